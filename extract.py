"""From a profile to work: see autokernel/cli/extract.py, or python extract.py --help."""

if __name__ == "__main__":
    from autokernel.cli.signals import catch_signals

    catch_signals()
    from autokernel.cli.main import run

    raise SystemExit(run("extract"))

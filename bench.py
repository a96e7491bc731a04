"""The gate on one kernel file: see autokernel/cli/bench.py, or python bench.py --help."""

if __name__ == "__main__":
    from autokernel.cli.signals import catch_signals

    catch_signals()
    from autokernel.cli.main import run

    raise SystemExit(run("bench"))

"""The kept kernels back in their model: see autokernel/cli/verify.py, or python verify.py --help."""

if __name__ == "__main__":
    from autokernel.cli.signals import catch_signals

    catch_signals()
    from autokernel.cli.main import run

    raise SystemExit(run("verify"))

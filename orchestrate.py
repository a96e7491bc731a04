"""The whole job on a model, and its runs: see autokernel/cli/orchestrate.py, or python orchestrate.py --help."""

if __name__ == "__main__":
    from autokernel.cli.signals import catch_signals

    catch_signals()
    from autokernel.cli.main import run

    raise SystemExit(run("orchestrate"))

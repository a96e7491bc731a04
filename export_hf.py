"""A kernel as a project of the Hugging Face Kernel Hub: see autokernel/cli/export_hf.py, or python export_hf.py --help."""

if __name__ == "__main__":
    from autokernel.cli.signals import catch_signals

    catch_signals()
    from autokernel.cli.main import run

    raise SystemExit(run("export_hf"))

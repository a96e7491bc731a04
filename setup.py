"""What pyproject.toml cannot say: a wheel takes along, as autokernel/data/, what stands beside the package in a clone."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = ("kernels", "models", "playbook")
FILES = ("reference.py", "kernel.py", "program.md", "LICENSE", "kernelbench/program_kb.md")


class BuildWithData(build_py):
    """An editable installation finds them in the clone."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        data = Path(self.build_lib, "autokernel", "data")
        shutil.rmtree(data, ignore_errors=True)
        for name in FOLDERS:
            shutil.copytree(name, data / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in FILES:
            (data / name).parent.mkdir(exist_ok=True)
            shutil.copy(name, data / name)


setup(cmdclass={"build_py": BuildWithData})

"""README's lines on the supported releases of PyTorch and Python, each in a clean clone and an environment of its own.

Usage:
    python3 benchmarks/versions.py                                            every pair: a short job and the quick tests
    python3 benchmarks/versions.py --torch 2.9.0 2.15.0 --job full --tests none      README's first line to its end
    python3 benchmarks/versions.py --torch newest --python 3.13 --tests all   what the index offers today, all tests on CPUs

--tests default is README's second line. pip takes whatever fits beside the release that is asked for. A pair that PyTorch
has no build for is recorded as that. An environment (up to 6 GB) is removed when its pair is done.

Reads:  this clone as it is committed; Pythons on the PATH, or pyenv's
Writes: benchmarks/versions.json, benchmarks/transcripts/versions/; works in a temporary folder. Exit status 0: all is well
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCHES = ("2.9.0", "2.11.0", "2.13.0", "2.14.1", "2.15.0")
PYTHONS = ("3.10", "3.13")
JOBS = {  # what is added to README's orchestrate.py; the smallest: one experiment on one target
    "none": None,
    "smallest": " --top 1 --experiments 1 --max-reverts 1 --input-shape 1,64 --model-args '{\"n_layers\": 1}'",
    "short": " --experiments 5 --max-reverts 1",
    "full": "",
}
TESTS = {
    "none": None,
    "smallest": "".join(f" tests/test_{name}.py" for name in ("sites", "boundary", "apply")),
    "quick": "".join(f" tests/test_{name}.py" for name in ("sites", "boundary", "apply", "ops", "architectures")),
    "default": "",
    "all": " -m 'not gpu'",
}
INSTALLED = "import torch, platform; print(torch.__version__, platform.python_version())"
NO_BUILD = re.compile(r"No matching distribution found for torch|requires a different Python")
OURS = re.compile(r"^(?!.*(Warning:|No CUDA runtime|warnings\.warn|Traceback)).*$")  # lines that may stand on a terminal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="X.Y.Z", help="or newest (default: %(default)s)")
    parser.add_argument(
        "--python",
        nargs="+",
        default=PYTHONS,
        metavar="X.Y",
        help="or here: the one that runs this; or newest of all that are there (default: %(default)s)",
    )
    parser.add_argument("--job", choices=JOBS, default="short", help="(default: %(default)s)")
    parser.add_argument("--tests", choices=TESTS, default="quick", help="(default: %(default)s)")
    parser.add_argument("--no-record", action="store_true", help="print what was found, and write nothing")
    arguments = parser.parse_args()
    failed = False
    for python in arguments.python:
        for torch in arguments.torch:
            with tempfile.TemporaryDirectory(prefix="autokernel-versions-") as folder:
                pair = Pair(Path(folder), torch, python)
                rows = pair.run(arguments.job, arguments.tests)
            for row in rows:
                failed |= row["status"] == "failed" or row["status"] == "no build" and python == "newest"
                print("torch {torch}, Python {python}, {what}: {status} in {seconds} s; {says}".format(**row), flush=True)
                if row["status"] == "failed":
                    print(pair.said[row["what"]][-4000:], file=sys.stderr)
            if not arguments.no_record:
                pair.record(rows)
    raise SystemExit(failed)


class Pair:
    """One release of PyTorch under one Python, in a folder that goes away with it."""

    def __init__(self, folder: Path, torch: str, python: str) -> None:
        self.folder, self.torch, self.python = folder, torch, python
        self.clone, self.said = folder / "autokernel", {}
        (folder / "bin").mkdir()
        (folder / "bin" / "python3").symlink_to(interpreter(python))
        constraints = folder / "constraints"  # in the place of the machine's own
        constraints.write_text("" if torch == "newest" else f"torch=={torch}\n")
        self.environment = os.environ | {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PIP_CONSTRAINT": str(constraints),
            "PIP_NO_CACHE_DIR": "1",
            "PIP_QUIET": "1",
            "AUTOKERNEL_CACHE": str(folder / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        }
        self.environment.pop("PYTHONPATH", None)

    def run(self, job: str, tests: str) -> list[dict]:
        """A row for the installation if that fails, else one for the job and one for the tests."""
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.clone)], check=True)
        install = readme(r"python3 .* -m pytest").rpartition(" && ")[0]
        installed = self.step("install", install)
        if installed["status"] == "failed":
            if NO_BUILD.search(self.said["install"]):
                installed |= {"status": "no build", "says": f"PyTorch {self.torch} has no build for Python {self.python}"}
            return [installed]
        version = subprocess.run([self.clone / ".venv/bin/python", "-c", INSTALLED], capture_output=True, text=True)
        self.torch, self.python = version.stdout.split()
        rows = []
        if JOBS[job] is not None:
            command = readme(r"python3 .* orchestrate\.py").rpartition(" && ")[2] + JOBS[job]
            row = self.step(f"{job} job", command)
            strange = [line for line in self.said[row["what"]].splitlines() if not OURS.match(line)]
            rows.append(row | {"foreign_lines": strange})
        if TESTS[tests] is not None:
            command = readme(r"python3 .* -m pytest").rpartition(" && ")[2] + TESTS[tests]
            rows.append(self.step(f"{tests} tests", command))
        return rows

    def step(self, what: str, command: str) -> dict:
        start = time.monotonic()
        run = subprocess.run(
            ["bash", "-c", command],
            cwd=self.clone,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        places = {str(self.folder): "", str(Path.home()): "~"}
        said = re.sub("|".join(map(re.escape, places)), lambda m: places[m[0]], run.stdout)
        self.said[what] = re.sub(r"(https?|file)://\S+", "(an address)", f"$ {command}\n{said}")
        lines = [line for line in self.said[what].splitlines() if line.strip()]
        return {
            "torch": self.torch,
            "python": self.python,
            "what": what,
            "status": "failed" if run.returncode else "passed",
            "seconds": round(time.monotonic() - start),
            "says": lines[-1].strip("= "),
        }

    def record(self, rows: list[dict]) -> None:
        """Add the rows to the record, in the place of older ones of the same, and keep what was printed."""
        path, transcripts = ROOT / "benchmarks" / "versions.json", ROOT / "benchmarks" / "transcripts" / "versions"
        commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        known = json.loads(path.read_text()) if path.exists() else []
        known = [k for k in known if not any(same(k, row) for row in rows)] + [
            row | {"commit": commit.stdout.strip(), "date": time.strftime("%F")} for row in rows
        ]
        known.sort(key=lambda row: ([int(n) for n in re.findall(r"\d+", row["torch"])], row["python"], row["what"]))
        path.write_text(json.dumps(known, indent=1) + "\n")
        transcripts.mkdir(parents=True, exist_ok=True)
        for row in rows:
            name = "torch-{torch}-python-{python}-{what}.txt".format(**row).replace(" ", "-")
            (transcripts / name).write_text(self.said[row["what"]])


def same(a: dict, b: dict) -> bool:
    return all(a[key] == b[key] for key in ("torch", "python", "what"))


def readme(command: str) -> str:
    """The line of README.md that is this command."""
    return re.search(rf"^{command}$", (ROOT / "README.md").read_text(), re.M)[0]


def interpreter(version: str) -> Path:
    """Python X.Y: this one, on the PATH, or pyenv's newest of it; the newest of all that there are."""
    if version == "newest":
        return next(filter(None, (found(f"3.{minor}") for minor in range(30, 9, -1))), Path(sys.executable))
    if version in ("here", "{}.{}".format(*sys.version_info)):
        return Path(sys.executable)
    if not (path := found(version)):
        raise SystemExit(f"error: there is no Python {version} here, on the PATH or of pyenv (pyenv install {version})")
    return path


def found(version: str) -> Path | None:
    """One that can make environments."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    of_pyenv = sorted((root / "versions").glob(f"{version}.*/bin/python{version}"), key=lambda p: p.stat().st_mtime)
    paths = [*of_pyenv[::-1], *filter(None, [shutil.which(f"python{version}")])]
    command = ["-c", "import ensurepip, venv"]
    return next((Path(p) for p in paths if not subprocess.run([p, *command], capture_output=True).returncode), None)


if __name__ == "__main__":
    main()

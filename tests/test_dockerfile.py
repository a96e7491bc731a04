"""Dockerfile and .devcontainer, without a builder: what they copy, call and install is there, as pyproject declares it."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

from autokernel.common.backends import BACKENDS
from autokernel.spec import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()
IGNORED = (ROOT / ".dockerignore").read_text().split()
NEEDED = {"git", "python3", "python3-venv", "python3-dev"}  # beside a compiler: Triton's launcher needs Python's headers


def instructions(text: str) -> list[tuple[str, str]]:
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return [tuple(line.split(maxsplit=1)) for line in re.sub(r"\\\n\s*", "", lines).splitlines() if line]


def ignored(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return any(pattern.removeprefix("**/") in (parts if pattern.startswith("**/") else parts[:1]) for pattern in IGNORED)


def wrong(text: str) -> Iterator[str]:
    """What would not build, or would not work when it is built."""
    made, arguments, place = set(), set(), PurePosixPath("/")
    for what, rest in instructions(text):
        words = shlex.split(rest)
        if what == "ARG":
            arguments.add(rest.partition("=")[0])
        elif what == "WORKDIR":
            place = PurePosixPath(rest)
        elif what == "COPY":
            yield from (f"no {source} to copy" for source in words[:-1] if not (ROOT / source).exists())
            made.add(words[-1])
        elif what == "ENV":
            yield from (f"no {path} in PATH" for path in re.findall(rf"{place}/([\w./]+)/bin", rest) if path not in made)
        elif what == "CMD":
            yield from (f"no {name}" for name in json.loads(rest)[1:] if not (ROOT / name).is_file())
        elif what == "RUN":
            for command in map(shlex.split, rest.split("&&")):
                yield from wrong_command(command, made, arguments)
    yield from (f"no ARG {name}" for name in re.findall(r"--build-arg (\w+)=", text) if name not in arguments)


def wrong_command(command: list[str], made: set[str], arguments: set[str]) -> Iterator[str]:
    """`.` is the project, with all that pyproject.toml declares; of other packages there is only the installer uv."""
    if command[:3] == ["python3", "-m", "venv"]:
        made.add(command[3])
    program = next(word for word in command if not re.match(r"[A-Z_]+=", word))
    if "/" in program and program.partition("/bin/")[0] not in made:
        yield f"{program} is in no environment that was made"
    yield from (f"{name} is no ARG" for name in re.findall(r"\$\{(\w+)}", " ".join(command)) if name not in arguments)
    installed = [word for word in command[command.index("install") + 1 :] if word[0] != "-"] if "install" in command else []
    if program == "apt-get":
        yield from (f"{name} is not installed" for name in sorted(NEEDED - set(installed)) if installed)
        if installed and not set(installed) & set(BACKENDS["cpp"].compilers):
            yield "no C++ compiler is installed"
        return
    for here, extra in (re.fullmatch(r"([^[]+)(?:\[(\w+)])?", requirement).groups() for requirement in installed):
        if here not in (".", "uv"):
            yield f"{here} is not declared in pyproject.toml"
        elif here == "." and "." not in made:
            yield "the project is installed before it is copied"
        if extra and not re.search(rf"(?m)^{extra} = \[", PYPROJECT):
            yield f"no extra {extra}"


def test_the_dockerfile_builds_from_what_is_there() -> None:
    assert list(wrong(DOCKERFILE)) == []
    assert any(what == "RUN" and " -e . " in rest for what, rest in instructions(DOCKERFILE)), "it installs no project"


def test_all_that_git_has_is_copied_and_git_itself() -> None:
    """A run in the container needs a repository."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [name for name in (".git/HEAD", *listed) if ignored(name)] == []
    assert ignored(".venv/bin/python") and ignored("tests/__pycache__/a.pyc")


@pytest.mark.parametrize(
    "right, other, says",
    [
        ("COPY . .", "COPY sources .", "no sources to copy"),
        ("-m venv .venv", "-m venv env", ".venv/bin/pip is in no environment"),
        ("-e .", "-e '.[gpu]'", "no extra gpu"),
        ("-e .", "-e . torchvision", "torchvision is not declared"),
        ("g++ git", "git", "no C++ compiler"),
        ("g++ git", "g++", "git is not installed"),
        ("ARG TORCH=cpu\n", "", "TORCH is no ARG"),
        ('"orchestrate.py"', '"run.py"', "no run.py"),
        ("PATH=/autokernel/.venv", "PATH=/autokernel/env", "no env in PATH"),
        ("--build-arg BASE", "--build-arg IMAGE", "no ARG IMAGE"),
    ],
)
def test_what_would_not_build_is_found(right, other, says) -> None:
    assert right in DOCKERFILE
    assert any(says in complaint for complaint in wrong(DOCKERFILE.replace(right, other)))


def test_the_dev_container_is_made_of_it() -> None:
    folder = ROOT / ".devcontainer"
    container = json.loads((folder / "devcontainer.json").read_text())
    assert (folder / container["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert (folder / container["build"]["context"]).resolve() == ROOT
    made: set[str] = {"."}
    commands = map(shlex.split, container["postCreateCommand"].split("&&"))
    assert [complaint for command in commands for complaint in wrong_command(command, made, set())] == []

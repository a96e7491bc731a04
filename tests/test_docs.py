"""README.md and docs/: every block is run or parsed, files and links that are named exist, the site builds."""

import argparse
import html
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

from autokernel.agents import Context, PastExperiment
from autokernel.cli.main import COMMANDS
from autokernel.common.preflight import OF_A_RUN
from autokernel.common.records import write_json
from autokernel.export.package import save
from autokernel.hardware.processes import STATE
from autokernel.integration.verification.forms import EAGER, GRAPHS, INDUCTOR
from autokernel.integration.winner import Winner
from autokernel.run.workspace import VERIFY
from autokernel.spec import ROOT, load_spec
from autokernel.target import default_target, encode
from benchmarks import picture, tables
from tests import in_process
from tests.test_experiments import ROW
from tests.test_ledger import clone  # noqa: F401  a fixture
from tests.test_winners import TARGET, WRONG, found, run  # noqa: F401  `run` is a fixture

README = ROOT / "README.md"
PAGES = [README, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md")), *(ROOT / "docs").glob("*.md")]
LANGUAGES = {"bash", "python", "json", "text"}  # text: what a terminal shows, and folders
NOT_RUN = {  # how a command begins: why it is not parsed here
    "cp ": "the shell's own",
    "git ": "another project's program",
    "uv ": "another project's program; what it installs is checked as pip's is",
    "export ": "the shell's own",
    "ray ": "another project's program, of an extra",
    "ruff ": "another project's program, which CONTRIBUTING.md names",
    "pip wheel": "pip's own; test_package.py builds a wheel",
    "mkdocs serve": "does not end; what it serves is built by test_the_site_builds",
    "python3 -m venv": "Python's own",
    "python3 -m autokernel.preflight": "takes no options; test_cli.py runs it",
}
WITHOUT_OPTIONS = {"benchmarks/picture.py", "benchmarks/tables.py"}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(language: str | None = None) -> list[Block]:
    made = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"(?ms)^```(\w*)\n(.*?)^```$", text):
            made.append(Block(name_of(page), text[: match.start()].count("\n") + 1, match[1], match[2]))
    return [block for block in made if language in (None, block.language)]


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {block.language for block in blocks()} <= LANGUAGES
    assert len(blocks("bash")) > 15 and len(blocks("python")) > 5
    for page in PAGES:
        assert page.read_text().count("```") == 2 * sum(block.page == name_of(page) for block in blocks()), page


def test_the_readme_is_short_and_has_the_two_command_lines() -> None:
    """.ci/run and benchmarks/versions.py take them from it."""
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    assert len(re.findall(r"(?m)^python3 .* orchestrate\.py$", text)) == 1
    assert len(re.findall(r"(?m)^python3 .* -m pytest$", text)) == 1


# ---- command lines ----


def commands() -> list[str]:
    """Each command of the blocks, and each that stands in a line of text, once."""
    lines = [line for block in blocks("bash") for line in block.text.splitlines()]
    programs = r"(?:\.venv/bin/)?(?:python3?|pip|ruff|mkdocs) "
    lines += [code for page in PAGES for code in re.findall(rf"`({programs}[^`]+)`", page.read_text())]
    return list(dict.fromkeys(part.strip() for line in lines for part in line.split("&&") if part.strip()))


def test_what_is_not_run_is_there() -> None:
    """An entry of NOT_RUN that no page needs any more goes."""
    for start in NOT_RUN:
        assert any(f"{command} ".startswith(start) for command in commands()), start


@pytest.mark.parametrize("command", commands())
def test_a_command_has_a_script_that_takes_its_options(command: str, pytestconfig, monkeypatch) -> None:
    words = shlex.split(command.removeprefix(".venv/bin/"), comments=True)
    if words[:2] in (["pip", "install"], ["uv", "pip"]):
        for extra in re.findall(r"\.\[(\w+)\]", command):
            assert re.search(rf"(?m)^{extra} = \[", (ROOT / "pyproject.toml").read_text()), f"there is no extra {extra}"
    elif words[:3] == ["python", "-m", "pytest"]:
        pytestconfig._parser.parse(words[3:])  # raises UsageError
    elif words[0] == "autokernel":
        known = COMMANDS[words[1]]
        begin = words[1:2] if words[1] in OF_A_RUN else ["run"] if known.module == "orchestrate" else []
        import_module(f"autokernel.cli.{known.module}").make_parser().parse_args([*begin, *words[2:]])
    elif not any(command.startswith(start) for start in NOT_RUN):
        assert words[0] == "python" and (ROOT / words[1]).is_file(), command
        parsed(words[1:], monkeypatch)


def parsed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's own main(), which ends where it has parsed its arguments."""
    script = words[0]
    if script in WITHOUT_OPTIONS:
        assert words[1:] in ([], ["--check"]) and "argparse" not in (ROOT / script).read_text()
        return
    body = ROOT / "autokernel" / "cli" / script  # of a script that only calls it
    text = (body if body.is_file() else ROOT / script).read_text()
    assert "parse_args(" in text, "it would run to its end"
    real = argparse.ArgumentParser.parse_args

    def parse_and_end(parser: argparse.ArgumentParser, *arguments: object) -> None:
        real(parser, *arguments)
        raise SystemExit("parsed")

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    monkeypatch.setenv(STATE, os.devnull)  # orchestrate.py: this process is the child, whose parser has the options
    ended = in_process.run(*words)
    version = "--version" in words and ended.returncode == 0
    assert ended.returncode == "parsed" or version, ended.stderr


@pytest.mark.parametrize(
    "command", ["bench.py --no-such-option", "orchestrate.py status --fast", "orchestrate.py --hours x", "verify.py FILE"]
)
def test_an_option_that_is_not_there_is_noticed(command: str, monkeypatch) -> None:
    with pytest.raises(AssertionError):
        parsed(command.split(), monkeypatch)


def test_json_parses() -> None:
    for block in blocks("json"):
        json.loads(block.text)


# ---- Python ----


def apply_to_a_model(block: Block, run, monkeypatch) -> None:  # noqa: F811
    """Each call, on a run whose one kernel shows where it runs."""
    write_json(run / VERIFY, encode(found(WRONG, (EAGER, INDUCTOR, GRAPHS))))
    monkeypatch.setenv("AUTOKERNEL_RUN", str(run.folder))
    model, x = nn.RMSNorm(768, eps=1e-6).requires_grad_(False), torch.randn(512, 768)
    names = {"model": model}
    *lines, last = [line for line in block.text.replace('"NAME"', repr(str(run.folder))).splitlines() if line.strip()]
    for line in lines:
        torch._dynamo.reset()
        exec(line, names)
        if line.startswith("autokernel.apply(model)"):
            assert model(x).abs().max() == 0, line
        elif line.startswith("autokernel.unapply"):
            assert model(x).abs().max() > 0, line
    exec(last, names)
    assert names["model"](x).abs().max() == 0, last


def use_a_package(block: Block, tmp_path) -> None:
    """In a process that does not know this repository."""
    winner = Winner(TARGET, load_spec("rmsnorm").starters("cpp")["cpp_kernel"].read_text())
    save(tmp_path / "fast_llama", found(winner.source, (EAGER,)), [winner])
    before = "import torch\nmodel = torch.nn.RMSNorm(768, eps=1e-6)\nx = torch.randn(512, 768)\nexpected = model(x)\n"
    after = "torch.testing.assert_close(model(x), expected)\n"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    program = before + block.text + "assert model._compiled_call_impl\n" + after
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path, check=True)


def make_inputs(block: Block) -> None:
    names = {}
    exec(block.text, names)
    assert all(isinstance(value, torch.Tensor) for value in names["example_inputs"]())


def propose(block: Block) -> None:
    """An edit of a starter; after one that was not kept, none."""
    names = {}
    exec(block.text, names)
    spec, target = load_spec("rotary_embedding"), default_target("rotary_embedding", "cpp", "cpu", torch.float32)
    context = Context(target, spec, spec.starters("cpp")["cpp_kernel"].read_text(), (), None)
    proposal = names["Doubler"]().propose(context)
    assert "CHUNK_ROWS = 512" in proposal.source and proposal.hypothesis.startswith("CHUNK_ROWS 256 -> 512")
    trial = PastExperiment(replace(ROW, status="reset"), "", "")
    assert names["Doubler"]().propose(replace(context, trials=(trial,))) is None
    assert names["Doubler"]().propose(replace(context, incumbent="CHUNK_ROWS = 0\n")) is None  # as RMSNorm's starter has it


PYTHON: dict[str, list[Callable | str]] = {  # of each page, in its order; words: what runs it elsewhere
    "README.md": [apply_to_a_model],
    "docs/using.md": [apply_to_a_model, use_a_package],
    "docs/models.md": [make_inputs],
    "docs/python.md": ["tests/test_package.py"] * 5,
    "docs/extending.md": [*["tests/test_tenth_type.py"] * 4, propose, *["tests/test_backends.py"] * 2],
}


def test_no_python_is_left_out() -> None:
    assert {page: len(checks) for page, checks in PYTHON.items()} == {
        page: sum(block.page == page for block in blocks("python")) for page in {block.page for block in blocks("python")}
    }


def python_here() -> Iterator[object]:
    for page, checks in PYTHON.items():
        of_page = [block for block in blocks("python") if block.page == page]
        for block, check in zip(of_page, checks):
            if isinstance(check, str):
                assert page in (ROOT / check).read_text()
            else:
                yield pytest.param(block, check, id=str(block))


@pytest.mark.parametrize(("block", "check"), list(python_here()))
def test_python_runs(block: Block, check: Callable, request) -> None:
    wanted = check.__code__.co_varnames[1 : check.__code__.co_argcount]
    check(block, *map(request.getfixturevalue, wanted))


# ---- what is named ----


def files_named(page: Path) -> list[str]:
    """Paths in code, from the root of the repository; records of benchmarks/transcripts by their names."""
    codes = re.findall(r"`([\w./*-]+)`", re.sub(r"(?ms)^```.*?^```$", "", page.read_text()))
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
    paths = [code for code in codes if re.match(rf"({folders})/", code) and not code.startswith("workspace/")]
    records = [
        f"benchmarks/transcripts/{code}" for code in codes if re.fullmatch(r"(cpu|h200|hf|claude)-[\w-]+\.\w+", code)
    ]
    scripts = [code for code in codes if re.fullmatch(r"\w+\.(py|md)", code)]
    return paths + records + scripts


# In a run's folder, in a folder that is spoken of, or what a user writes.
ELSEWHERE = {"report.md", "spec.py", "patterns.py", "cpp_kernel.py", "triton_kernel.py", "cuda_kernel.py"}
ELSEWHERE |= {"kernels/gelu/spec.py", "kernels/gelu/cpp_kernel.py", "kernels/gelu/patterns.py"}
ELSEWHERE |= {"kernels/rmsnorm/c_kernel.py"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_links_are_there(page: Path) -> None:
    missing = [name for name in files_named(page) if name not in ELSEWHERE and not list(ROOT.glob(name))]
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in link]
    missing += [link for link in links if link and not (page.parent / link).exists()]
    assert missing == []


def test_no_cluster_reports_to_ray_s_makers() -> None:
    """It does, by default, and without the dashboard too."""
    files = (*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "examples").glob("*.yaml"))
    heads = [line for file in files for line in file.read_text().splitlines() if "ray start --head" in line]
    assert len(heads) > 2 and all("--disable-usage-stats" in line for line in heads), heads
    assert 'RAY_USAGE_STATS_ENABLED, value: "0"' in (ROOT / "docs/examples/kuberay.yaml").read_text()


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)\)", README.read_text()))
    assert {name_of(page) for page in PAGES if page != README and page.name != "AGENTS.md"} <= linked


RATIO = r"([\d.]+)x? \[([\d.]+),\s+([\d.]+)\]"  # with its interval


def not_recorded(text: str, records: Iterable[Path]) -> Iterator[str]:
    """The ratios of a text that no record has, rounded."""
    known = [list(map(float, ratio)) for record in records for ratio in re.findall(RATIO, record.read_text())]
    for said in re.findall(RATIO, text):
        rounding = 0.51 * 10.0 ** -len(said[1].partition(".")[2])
        if not any(all(abs(float(a) - b) <= rounding for a, b in zip(said, ratio)) for ratio in known):
            yield "{}x [{}, {}]".format(*said)


def test_results_are_those_of_the_records() -> None:
    """README's of the record that the row names; those of docs/measurements.md that tables.py does not write, of any."""
    rows = re.findall(r"(?m)^(\|.*\|) `([\w-]+\.txt)` \|$", README.read_text())
    assert len(rows) >= 5
    for row, name in rows:
        assert list(not_recorded(row, [ROOT / "benchmarks/transcripts" / name])) == [], row
    page = re.sub(f"(?s){tables.BEGIN}.*{tables.END}", "", (ROOT / "docs/measurements.md").read_text())
    transcripts = (ROOT / "benchmarks/transcripts").glob("*.*")
    assert list(not_recorded(page, [path for path in transcripts if path.suffix in (".txt", ".html")])) == []
    assert list(not_recorded("2.99x [2.98, 3.01]", [])) == ["2.99x [2.98, 3.01]"]


def test_the_picture_shows_what_was_recorded() -> None:
    """`python benchmarks/picture.py` draws it."""
    drawn = html.unescape("".join(re.findall(r"<text [^>]*>([^<]*)</text>", picture.PICTURE.read_text())))
    drawn, record = drawn.replace("\xa0", " "), picture.RECORD.read_text()
    for line in picture.lines():
        assert line[:100] in drawn and (line == "…" or line in record), line


def test_the_site_builds(tmp_path) -> None:
    """With every link in place: a warning is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/gate/index.html").is_file()

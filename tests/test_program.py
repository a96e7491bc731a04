"""program.md and the playbook: every command is run, every example is where it says, every verdict is one that is given."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from autokernel.agents import PastExperiment
from autokernel.agents.playbook import FIELDS, FOLDER, TIERS, PlaybookEntry, entries, fitting_tier, tier_text
from autokernel.history.experiments import STARTER
from autokernel.history.progress import Rules, move_on
from autokernel.spec import ROOT, kernel_types
from autokernel.target import default_target
from tests.messages_api import serving
from tests.test_experiments import ROW
from tests.test_ledger import sh

PROGRAM = (ROOT / "program.md").read_text()
TEXTS = [PROGRAM, *(path.read_text() for path in sorted(FOLDER.glob("*.md")))]
SMALL = ["--device", "cpu", "--top", "1", "--input-shape", "1,64", "--model-args", '{"n_layers": 1, "vocab_size": 512}']
AGENT = """#!/bin/sh
grep -q 'kernel to beat' || exit 3
echo "# by $0 $*" >> kernel.py
echo 'HYPOTHESIS: a comment is faster'
"""
ALL_ENTRIES = [entry for tier in TIERS for entry in entries(tier)]
TYPES = {entry.group for entry in ALL_ENTRIES if entry.tier == 6}


def commands() -> list[str]:
    """Every command of program.md and the playbook, each once."""
    blocks = [
        line for text in TEXTS for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.splitlines()
    ]
    inline = [code for text in TEXTS for code in re.findall(r"`(python [^`]+)`", text)]
    return list(dict.fromkeys(line for line in [*blocks, *inline] if line.strip()))


def test_the_commands_are_found():
    assert len(commands()) >= 12 and all(command.startswith("python ") for command in commands())


class Run:
    """A clone with a run in it, small enough for a test: its commands, as someone types them."""

    def __init__(self, folder, api_url: str) -> None:
        self.root, self.bin = folder / "clone", folder / "bin"
        sh("git", "clone", "-q", str(ROOT), str(self.root), cwd=folder)
        self.bin.mkdir()
        for name in ("claude", "codex"):
            (self.bin / name).write_text(AGENT)
            (self.bin / name).chmod(0o755)
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("GIT_", "ANTHROPIC_", "VIRTUAL_ENV"))}
        self.environment = plain | {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "TMPDIR": str(folder),  # where runs of one machine take turns: this one waits for no other
            "ANTHROPIC_BASE_URL": api_url,
            "ANTHROPIC_API_KEY": "test",
        }

    def words(self, command: str) -> list[str]:
        """The command with a file for FILE, and for orchestrate.py a model that is small and one experiment."""
        words = [sys.executable, *shlex.split(command.replace("FILE", "kernels/rmsnorm/cpp_kernel.py"))[1:]]
        if words[1:3] == ["orchestrate.py", "--hours"]:
            agent = [] if "--agent" in words else ["--agent", "tuner"]
            return [*words, *agent, *SMALL, "--tag", "night", "--experiments", "1"]
        small = {"bench.py": ["--device", "cpu"], "verify.py": ["--warmup", "0", "--timed", "1"]}
        return [*words, *small.get(words[1], [])]

    def call(self, command: str) -> tuple[int, str]:
        """Exit status and output. A run is stopped by Ctrl-C at its first experiment: what follows has tests of its own."""
        process = subprocess.Popen(
            self.words(command),
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("target ") and not any(earlier.startswith("target ") for earlier in lines[:-1]):
                process.send_signal(signal.SIGINT)  # it finishes the experiment in hand
        return process.wait(), "".join(lines)


SAYS = {
    "--hours 10 --model": "stopped by SIGINT",
    "--agent 'command: claude": "a comment is faster",
    "codex": "experiments",
    "--agent tuner,claude": "experiments",
    "status": "run night",
    "plan": "starts from",
    "next": "of the model's time",
    "log": "start from",
    "log --all": "a comment is faster",
    "--profile": "CPU",
    "--incumbent": "correctness: PASS",
    "--quick": "correctness: PASS",
    "--autotune": "could be timed",
    "record": "UNROLL 4 -> 8",
    "report": "What got faster",
    "verify.py": "sites): ",
}


def said(command: str) -> str:
    """The longest key of SAYS that the command has."""
    return max((words for words in SAYS if words in command), key=len)


STARTS = [command for command in commands() if "--hours 10 --model" in command or "claude -p" in command]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A run that the commands have something to say of: a first command started it, an agent has made an experiment."""
    with serving(lambda request: None) as api:
        run = Run(tmp_path_factory.mktemp("program"), api.url)
        for command in STARTS:
            does_what_it_says(run, command)
        yield run


def does_what_it_says(run: Run, command: str) -> None:
    source = kernel_of_run(run) if "record" in command else (run.root / "kernels/rmsnorm/cpp_rows.py").read_text()
    (run.root / "kernel.py").write_text(source)
    status, output = run.call(command)
    assert status == 0 and SAYS[said(command)] in output, output


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in commands() if command not in STARTS])
def test_a_command_does_what_it_says(run, command):
    does_what_it_says(run, command)


def kernel_of_run(run: Run) -> str:
    """An edit of the run's kernel to beat: the file for a person to have judged."""
    return sh("git", "show", "autokernel/night:kernel.py", cwd=run.root) + "\n# by hand\n"


def test_every_entry_says_when_what_how_and_where():
    assert len(ALL_ENTRIES) >= 60
    for entry in ALL_ENTRIES:
        assert tuple(entry.fields) == FIELDS and all(len(text) > 10 for text in entry.fields.values()), entry.title
    assert {*kernel_types(), "region"} >= TYPES and len(TYPES) >= 9


@pytest.mark.parametrize("entry", ALL_ENTRIES, ids=lambda entry: f"{entry.tier}-{entry.title}")
def test_an_example_is_where_the_playbook_says(entry: PlaybookEntry):
    """The files exist, and each name beside them is in one of them."""
    quoted = re.findall(r"`([^`]+)`", entry.fields["Example"])
    files = [ROOT / text for text in quoted if re.fullmatch(r"[\w/]+\.(py|hpp|cuh)", text)]
    assert files and all(file.is_file() for file in files)
    together = "".join(file.read_text() for file in files)
    named = [text for text in quoted if re.fullmatch(r"\w+", text)]
    assert [name for name in named if name not in together] == []


def test_every_verdict_in_the_table_is_one_that_is_given():
    sources = "".join(path.read_text() for path in (ROOT / "autokernel").rglob("*.py"))
    table = PROGRAM.partition("| it says |")[2].partition("\n\n")[0]
    said = [phrase for line in table.splitlines() for phrase in re.findall(r"`([^`]+)`", line.partition(" | ")[0])]
    assert len(said) > 20
    for phrase in said:
        parts = [part.strip(" :") for part in re.split(r"\.\.\.|…|\d[\d.x]*|\[.*", phrase)]
        assert all(part in sources for part in parts), phrase


def made(statuses: str) -> list[PastExperiment]:
    names = {"k": "kept", "r": "reset", "u": "undecided", "f": "failed"}
    rows = [replace(ROW, agent=STARTER), *(replace(ROW, status=names[letter]) for letter in statuses)]
    return [PastExperiment(row, "", "") for row in rows]


@pytest.mark.parametrize(
    ("statuses", "tier"),
    [("", 1), ("rrrr", 1), ("rrrrr", 2), ("rrrkrrr", 1), ("rfrfrk", 2), ("r" * 10, 3), ("rururuurr", 2), ("r" * 30, 1)],
)
def test_the_tier_that_fits_follows_from_what_was_tried(statuses, tier):
    assert fitting_tier(made(statuses)) == tier


def test_a_target_is_left_when_its_tier_is_used_up_and_returned_to_a_tier_further():
    rows = [trial.row for trial in made("rrrrr")]
    assert move_on(rows[:-1], Rules()) is None and fitting_tier(made("rrrr")) == 1
    assert move_on(rows, Rules()) and not move_on(rows, Rules().patient(1)) and fitting_tier(made("rrrrr")) == 2


def test_a_target_is_given_what_is_for_it():
    target = default_target("softmax", "cpp", "cpu", torch.float32)
    types, machines = tier_text(6, target), tier_text(5, target)
    assert "## softmax" in types and "## matmul" not in types
    assert "## x86" in machines and "## every machine" in machines and "## Hopper" not in machines
    assert tier_text(6).count("\n## ") == len(TYPES)
    assert all(len(tier_text(tier, target)) < 8000 for tier in TIERS), "a tier is read alone"


def test_the_sample_output_was_recorded():
    """What program.md shows as output stands in the transcript of a run."""
    recorded = (ROOT / "benchmarks/transcripts/cpu-one-layer.txt").read_text()
    sample = PROGRAM.partition("in lines such as these")[2].partition("```\n")[2].partition("```")[0]
    for line in sample.splitlines():
        assert all(part.strip() in recorded for part in line.split("…")), line
    assert json.dumps(sample).count("\\n") > 5

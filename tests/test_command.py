"""The console command `autokernel`: it teaches, passes on to the scripts' own main(), and its words are its own."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autokernel.cli import completion
from autokernel.cli.main import COMMANDS, main
from autokernel.common import preflight
from autokernel.common.preflight import OF_A_RUN, as_called
from autokernel.spec import ROOT


def run(*words: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "autokernel", *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_help_teaches(words) -> None:
    ended = run(*words)
    assert ended.returncode == 0 and not ended.stderr
    assert all(f"\n    {name}" in ended.stdout for name in COMMANDS)
    assert "autokernel optimize --model" in ended.stdout


HELP = """
import sys
from pathlib import Path
from autokernel.cli.main import COMMANDS, run

for module in dict.fromkeys(command.module for command in COMMANDS.values()):
    assert run(module, ["--help"]) == 0 and "torch" not in sys.modules, module
"""


def test_help_comes_before_pytorch() -> None:
    """Which takes seconds to import."""
    ended = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_help_that_cannot_be_written_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "orchestrate.py", "--help"]
        ended = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 2 and "output cannot be written" in ended.stderr


def test_an_unknown_command_lists_those_that_there_are() -> None:
    ended = run("optimise")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and not ended.stdout
    assert all(name in ended.stderr for name in ("'optimise'", *COMMANDS))


@pytest.mark.parametrize("words", ["plan --tag none", "bench none.py", "profile --model none.py", "check a", "optimise"])
def test_what_cannot_be_done_is_json_where_json_is_asked_for(words, tmp_path) -> None:
    ended = run(*words.split(), "--json", AUTOKERNEL_CACHE=str(tmp_path))
    assert ended.returncode == 2 and ended.stderr == f"error: {json.loads(ended.stdout)['error']}\n"


@pytest.mark.parametrize("name", sorted(OF_A_RUN))
def test_the_help_of_each_command_of_a_run_has_an_example(name) -> None:
    """Of those before PyTorch is imported, as `--help` is."""
    from autokernel.cli import status
    from autokernel.cli.orchestrate import COMMANDS as described
    from autokernel.cli.orchestrate import make_parser, taught

    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit):
        if name in ("status", "runs", "log"):
            status.main([name, "--help"], {one: taught(one) for one in described})
        make_parser().parse_args([name, "--help"])
    assert f"\nExample:  python orchestrate.py {name}" in said.getvalue()


def test_a_script_s_name_is_no_command_and_the_command_is_named(here) -> None:
    assert "did you mean optimize?" in here("orchestrate") and "did you mean export?" in here("export_hf")
    assert "did you mean profile?" in here("Profile")


def test_an_option_without_a_command_is_refused() -> None:
    assert run("--fast").returncode == 2


def test_version() -> None:
    assert run("--version").stdout.startswith("autokernel 0.")


@pytest.fixture
def here(monkeypatch, capsys):
    """The command in this process, which has imported PyTorch: what it prints."""

    def ran(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["autokernel", *words])
        monkeypatch.setattr("autokernel.cli.main.catch_signals", lambda: None)  # which are pytest's
        with contextlib.suppress(SystemExit):
            main()
        return "".join(capsys.readouterr())

    return ran


def test_a_command_speaks_of_itself(here) -> None:
    """Usage, advice and errors name `autokernel …`, not the scripts that a clone has as well."""
    helped = here("extract", "--help")
    assert "autokernel extract --report" in helped and "profile.py" not in helped
    assert here("extract", "--tag", "no-such-run").endswith("run autokernel profile --tag no-such-run first\n")


def test_so_does_the_whole_job_which_runs_in_a_process_of_its_own() -> None:
    assert run("optimize", "--hours", "nan").stderr.endswith("(autokernel optimize run --help)\n")


def test_a_command_of_a_run_goes_to_orchestrate() -> None:
    ended = run("status", "--tag", "no-such-run")
    assert ended.returncode == 2 and "'no-such-run'" in ended.stderr


@pytest.mark.parametrize(
    "said, called",
    [
        ("run python profile.py --tag a", "run autokernel profile --tag a"),
        ("python orchestrate.py --hours 8", "autokernel optimize --hours 8"),
        ("python orchestrate.py log --all", "autokernel log --all"),
        ("python export_hf.py --name x", "autokernel export --name x"),
        ("there is no file bench.py", "there is no file bench.py"),  # which is a user's
        ("models/profile.py and kernel.py", "models/profile.py and kernel.py"),
    ],
)
def test_scripts_are_named_as_commands(said, called, monkeypatch) -> None:
    assert as_called(said) == said
    monkeypatch.setattr(sys, "argv", ["autokernel bench"])
    assert as_called(said) == called
    assert as_called("written by profile.py", all_ours=True) == "written by autokernel profile"


def test_scripts_are_named_with_their_clone_outside_of_it(tmp_path, monkeypatch) -> None:
    """Not in what is committed, which is read in other clones."""
    line = "python verify.py --tag a   (my own verify.py is not meant, nor models/profile.py)"
    monkeypatch.chdir(tmp_path)
    assert as_called(line) == as_called(as_called(line)) == line.replace("verify.py", f"{ROOT}/verify.py", 1)
    assert as_called(line, elsewhere=True) == line
    monkeypatch.chdir(ROOT)
    assert as_called(line) == line
    monkeypatch.setattr(preflight, "ROOT", Path("/a clone/of mine"))
    assert as_called("python bench.py x") == "python '/a clone/of mine/bench.py' x"


def test_every_command_has_a_parser_that_shells_can_complete() -> None:
    whole = completion.whole()
    made = next(a for a in whole._actions if a.dest == "command").choices
    assert set(made) == set(COMMANDS) >= set(OF_A_RUN)
    assert "--class-name" in made["optimize"]._option_string_actions and "--all" in made["log"]._option_string_actions


def test_bash_takes_the_completion(tmp_path, here) -> None:
    (tmp_path / "completion").write_text(here("completion", "bash"))
    ask = "COMP_WORDS=(autokernel opt); COMP_CWORD=1; _shtab_autokernel; echo ${COMPREPLY[@]}"
    ask = f"source {tmp_path}/completion; {ask}"
    assert subprocess.run(["bash", "-c", ask], capture_output=True, text=True).stdout.strip() == "optimize"

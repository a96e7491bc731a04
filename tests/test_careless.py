"""What a careless person types: one line on stderr and exit status 2, nothing of theirs removed or overwritten.

Every command runs in a small clone, beside and below folders with a file of the user's.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from autokernel.common.preflight import why_no_repository
from autokernel.history.runs import BadTag, checked_tag
from tests.small_clone import SmallClone, small_clone

CHILD = {"AUTOKERNEL_NOTES": "0"}  # as the supervisor starts it: without a process in between that imports PyTorch anew
BAD_TAGS = [
    "..",
    "../..",
    ".",
    "",
    "/",
    "/tmp",
    "a/b",
    "night/tree",
    "hub",
    "kernelbench",
    "-x",
    "x.lock",
    "a..b",
    "a b",
    "~",
    "*",
]
PLAN, VERIFY = "workspace/night/plan.json", "workspace/night/verify.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    yield from small_clone(tmp_path_factory.mktemp("home"))


@pytest.fixture
def untouched(made: SmallClone):
    """The same for commands that are to leave everything as it is: that is looked at, and not made anew for each."""
    if made.changed:
        made.make_runs()
    before = sorted(made.root.glob("workspace/**/*")), sorted(made.home.glob("*"))
    yield made
    assert (sorted(made.root.glob("workspace/**/*")), sorted(made.home.glob("*"))) == before
    assert (made.home / "beside/sentinel").read_text() == (made.home / "sentinel").read_text() == "mine"


@pytest.fixture
def clone(made: SmallClone):
    """The small clone with its runs as they were; afterwards, all that is the user's must still be there."""
    made.make_runs()
    before = made.git("status", "--porcelain"), made.git("rev-parse", "main")
    made.changed = True
    yield made
    for sentinel in (made.home / "sentinel", made.home / "beside/sentinel"):
        assert sentinel.read_text() == "mine"
    made.git("checkout", "-q", "main")
    assert (made.git("status", "--porcelain"), made.git("rev-parse", "main")) == before


def assert_one_line(done, *words: str, status: int = 2) -> None:
    assert "Traceback" not in done.stderr, done.stderr
    assert done.status == status, (done.status, done.stderr)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def assert_fine(done, *words: str) -> None:
    assert "Traceback" not in done.stderr and done.status == 0, done.stderr
    assert all(word in done.stdout for word in words), done.stdout


TAGGED = (
    *(
        "orchestrate.py clean {}",
        "orchestrate.py run --tag={}",
        "orchestrate.py status --tag={}",
        "orchestrate.py log --tag={}",
    ),
    *(
        "orchestrate.py report --tag={}",
        "orchestrate.py record --tag={}",
        "orchestrate.py merge --tag={}",
        "profile.py --tag={}",
    ),
    *("extract.py --tag={}", "bench.py --target x --tag={}", "verify.py --tag={}"),
)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("text", BAD_TAGS)
@pytest.mark.parametrize("command", TAGGED)
def test_what_is_no_name_of_a_run_is_refused_everywhere(untouched, command, text):
    words = [word.format(text) for word in command.split()]
    assert_one_line(untouched.run(words, **CHILD))


@pytest.mark.parametrize("text", ["night", "compactllama-nov22", "x_1.2+y=z", "nächte", "7"])
def test_names_of_runs(text):
    """They are what git takes as well."""
    assert checked_tag(text) == text
    for ref in (f"refs/heads/autokernel/{text}", f"refs/autokernel/{text}/1"):
        subprocess.run(["git", "check-ref-format", ref], check=True)


@pytest.mark.parametrize("text", ["a~1", "a^", "a:b", "a?", "a[b", "a\\b", "a@{1}", "a.", ".a", "a\n", "x" * 101, "HUB"])
def test_what_git_or_a_shell_would_read_is_no_name(text):
    with pytest.raises(BadTag):
        checked_tag(text)


NONSENSE = [
    (script, option, value)
    for script, options in {
        "orchestrate.py run": "--hours --minutes --experiments --top --budget-usd --budget-tokens --max-tokens "
        "--agent-minutes --max-reverts --max-pct-peak --max-hours --max-speedup",
        "profile.py": "--warmup-iters --profile-iters",
        "extract.py": "--top",
        "bench.py": "--seed --trials --budget",
        "verify.py": "--warmup --timed --atol --rtol",
        "kernelbench/evaluate.py": "--n-trials --gflop --mb --level --problem",
        "kernelbench/scorer.py": "--limit --experiments",
        "benchmarks/models.py": "--seconds",
        "benchmarks/soak.py": "--experiments --every",
    }.items()
    for option in options.split()
    for value in ("-1", "nan", "x", "", "inf", "1e999")
] + [
    ("orchestrate.py run", "--top", "0"),
    ("verify.py", "--timed", "0"),
    ("profile.py", "--profile-iters", "0"),
    ("orchestrate.py run", "--hours", "1000000"),
    ("orchestrate.py run", "--agent-minutes", "0"),
    ("kernelbench/evaluate.py", "--level", "5"),
]  # fmt: skip


@pytest.mark.slow_after(38)
@pytest.mark.parametrize("script, option, value", NONSENSE)
def test_numbers_that_make_no_sense(untouched, script, option, value):
    assert_one_line(untouched.run([*script.split(), f"{option}={value}"], **CHILD), option)


TUNER, OPENAI = "run --agent tuner", "run --agent openai --agent-model x"
REFUSED = {  # a command -> words of its line
    "orchestrate.py clean": ["TAG"],
    "profile.py --input-shape -1,512": ["'-1,512' is not a shape"],
    f"profile.py --model-args {'[' * 9999}": ["--model-args: not JSON"],
    "orchestrate.py clean nothing": ["nothing", "night"],
    "profile.py --pretrained=": ["--pretrained", "empty"],
    "profile.py --model=": ["--model", "empty"],
    "profile.py --class-name=": ["--class-name", "empty"],
    "orchestrate.py --kernelbench= --minutes 1": ["--kernelbench", "empty"],
    "orchestrate.py --agent= --minutes 1": ["--agent", "empty"],
    "orchestrate.py --workers 1 --ray-address=": ["--ray-address", "empty"],
    "orchestrate.py record --target= kernel.py": ["--target", "empty"],
    "orchestrate.py merge --to=": ["--to", "empty"],
    "bench.py --incumbent=": ["--incumbent", "empty"],
    "bench.py --kernel=": ["--kernel", "empty"],
    "bench.py --target=": ["--target", "empty"],
    "bench.py --trials 3": ["--trials is of --calibrate"],
    "bench.py --calibrate rmsnorm --trials 1 --quick": ["leave --quick out"],
    "extract.py --profile=": ["--profile", "empty"],
    "profile.py --output=": ["--output", "empty"],
    "profile.py --export-trace=": ["--export-trace", "empty"],
    "verify.py --workspace=": ["--workspace", "empty"],
    "verify.py --kernels=": ["--kernels", "empty"],
    "verify.py --save=": ["--save", "empty"],
    "export_hf.py --name x --output=": ["--output", "empty"],
    "orchestrate.py --tag night --model models/gpt2.py": [
        "'night' is of",
        "llama.py",
        "not of models/gpt2.py",
        "another --tag",
    ],
    "orchestrate.py models/gpt2.py": ["--model models/gpt2.py --class-name"],
    f"orchestrate.py {TUNER} --agent-model x": ["--agent-model is for --agent claude or openai", "is tuner"],
    f"orchestrate.py {TUNER} --price-in 1": ["--price-in is for --agent openai"],
    "orchestrate.py run --agent command:'x": ["no closing quotation"],
    "orchestrate.py run --agent command:no_such_program": ["no program no_such_program", "PATH"],
    "orchestrate.py run --agent command:./mine.sh": ["no program ./mine.sh", "the whole path"],
    f"orchestrate.py {OPENAI} --agent-url localhost:8000": ["'localhost:8000' is no address", "http://localhost:8000/v1"],
    f"orchestrate.py {OPENAI} --agent-url http://": ["'http://' is no address"],
    f"orchestrate.py {OPENAI} --agent-url http://x:99999/v1": ["is no address"],
    "orchestrate.py run --agent tuner,claude": ["--agent claude needs a key", "ANTHROPIC_API_KEY"],
    "orchestrate.py --repo-path / --minutes 1": ["--repo-path is for --kernelbench"],
    "orchestrate.py --kernelbench 1:1 --model models/gpt2.py": ["instead of a model"],
    "orchestrate.py run --agent-minutes 1e300": ["--agent-minutes", "out of range"],
    "verify.py --tag night --workspace workspace/unproven": ["not allowed with"],
    "orchestrate.py clear night": ["did you mean clean", "status"],
    "orchestrate.py --hours 1 --minutes 1": ["not allowed with"],
    "orchestrate.py --hour 1": ["--hour"],
    "orchestrate.py --tag night status": ["status"],
    "orchestrate.py status --tag nothing": ["nothing", "night", "unproven"],
    "orchestrate.py plan --tag nothing": ["nothing", "night"],
    "orchestrate.py next --tag nothing": ["nothing"],
    "orchestrate.py log --tag nothing": ["nothing"],
    "orchestrate.py status --nonsense": ["--nonsense"],
    "orchestrate.py record kernels": ["kernels is no file"],
    "orchestrate.py record nothing.py": ["nothing.py"],
    "orchestrate.py record LICENSE": ["LICENSE", "Python"],
    "orchestrate.py record .git/index": ["no text in UTF-8"],
    "orchestrate.py record kernels/softmax/cpp_kernel.py --tag night": ["no such target"],
    "orchestrate.py merge --tag night": ["not verified"],
    "extract.py --tag unproven": ["profile.py"],
    "extract.py --tag night": ["has experiments", "--report"],
    "extract.py --profile kernel.py": ["kernel.py", "cannot be read", "name another file"],
    "extract.py --profile .git/index": ["cannot be read"],
    "bench.py .git/index": ["no text in UTF-8"],
    "bench.py kernels": ["kernels"],
    "bench.py nothing.py": ["nothing.py"],
    "bench.py --incumbent nothing.py": ["nothing.py"],
    "bench.py --incumbent .git/index": ["no text in UTF-8"],
    "bench.py kernels/rmsnorm/cpp_kernel.py --incumbent kernels/softmax/cpp_kernel.py": ["another kernel type"],
    "bench.py kernels/rmsnorm/cpp_kernel.py --out sized.py": ["--out", "--autotune"],
    "bench.py --tag night --target nothing": ["nothing"],
    "bench.py --tag nothing --target nothing": ["nothing"],
    "verify.py --tag nothing": ["nothing"],
    "verify.py --save .": ["clone"],
    "verify.py --save kernels": ["kernels"],
    "verify.py --save torch": ["torch"],
    "verify.py --save class": ["class"],
    "verify.py --save a-b": ["a-b"],
    "profile.py --output /": ["/"],
    "profile.py --model models/gpt2.py --module transformers": ["not allowed with"],
    "profile.py --output ..": ["folder"],
    "profile.py --output README.md": ["README.md", "cannot be read", "name another file"],
    "profile.py --export-trace README.md": ["README.md", "exists"],
    "profile.py --device cpu --output x.json --export-trace ./x.json": ["x.json is named for two files"],
    "export_hf.py --name x --kernel .git/index": ["no text in UTF-8"],
    "export_hf.py --name my-x --kernel kernels/softmax/triton_kernel.py --output /proc/x": ["cannot write to /proc/x"],
    "export_hf.py --name my-x --kernel kernels/softmax/triton_kernel.py --backends ,": ["no backend", "cuda"],
    "export_hf.py --name my-x --kernel kernels/softmax/triton_kernel.py --backends cuda,cuda,nvidia": ["is no backend"],
    "export_hf.py --name my-x --kernel kernels/softmax/triton_kernel.py --backends nvidia": ["'nvidia' is no backend"],
    "export_hf.py --name my-x --kernel kernels/softmax/triton_kernel.py --repo-id ../x": ["'../x' is no name"],
    "export_hf.py --name my-x --kernel kernels/softmax/triton_kernel.py --output kernels": ["did not write"],
    "export_hf.py --name my-x --kernel kernels/softmax/triton_kernel.py --verdict README.md": ["README.md"],
}


@pytest.mark.slow_after(17)
@pytest.mark.parametrize("command", REFUSED)
def test_refused_in_one_line(untouched, command):
    assert_one_line(untouched.run(command.split(), **CHILD), *REFUSED[command])


def test_a_cache_that_cannot_be_written_is_told_before_anything_is_measured(untouched):
    assert_one_line(untouched.run(["profile.py"], AUTOKERNEL_CACHE="/proc/x", **CHILD), "cannot write to /proc/x")


@pytest.mark.parametrize("model", ["--model=models/nothing.py", "--module=nothing"])
def test_a_mistake_leaves_no_folder_of_a_run(untouched, model):
    done = untouched.run(["orchestrate.py", model, "--device=cpu"], **CHILD)
    assert done.status == 2 and "Traceback" not in done.stderr
    assert "nothing" in done.stderr.splitlines()[-1] and done.stderr.splitlines()[-1].startswith("error: ")


FOREIGN = {
    "truncated": '{"model": "te',
    "empty": "",
    "foreign": '{"name": "app", "version": 2}',
    "a list": "[1, 2]",
    "binary": "\0\udcff",
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize(
    "name, commands",
    {
        PLAN: ["status", "next", "plan", "report", "record kernels/rmsnorm/cpp_kernel.py"],
        "workspace/night/proof.json": ["status", "report"],
        VERIFY: ["report", "merge"],
        "workspace/night/profile.json": ["report"],
    }.items(),
    ids=lambda value: Path(value).name if isinstance(value, str) else "",
)  # fmt: skip
def test_files_that_are_not_as_written(clone, name, commands, content):
    path = clone.root / name
    path.write_bytes(content.encode(errors="surrogateescape"))
    for command in commands:
        assert_one_line(clone.run(["orchestrate.py", *command.split()]), str(path), "cannot be read")
    assert path.read_bytes() == content.encode(errors="surrogateescape")


def test_what_is_no_text_is_shown_and_what_is_no_number_is_null(clone):
    """A file's name may be no UTF-8, and a record may hold an infinity, which JSON has none of."""
    path = clone.root / PLAN
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": "n\udce9t.py", "model_latency_us": math.nan}))
    os.utime(path, (2e9, 2e9))
    for command in ("status", "runs", "plan", "report"):
        assert_fine(clone.run(["orchestrate.py", command], PYTHONIOENCODING="utf-8:strict"))
    done = clone.run(["orchestrate.py", "plan", "--json"])
    assert_fine(done)
    assert json.loads(done.stdout, parse_constant=pytest.fail)["model_latency_us"] is None


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_plan_blocks_nothing_but_itself(clone, content):
    (clone.root / "workspace/unproven/plan.json").write_bytes(content.encode(errors="surrogateescape"))
    assert_fine(clone.run(["orchestrate.py", "status"]), "run night")
    assert_fine(clone.run(["orchestrate.py", "runs"]), "night", "unproven", "cannot be read")
    say = "from autokernel.run.workspace import default_tag; from autokernel.model.workload import Workload\n"
    say += "from pathlib import Path;"
    script = clone.root / "workspace/ask.py"
    script.write_text(f"{say} print(default_tag(Path({str(clone.root)!r}), Workload()))")
    done = clone.run(["workspace/ask.py"])
    assert_fine(done, "minillama-")
    assert "'unproven' is passed over" in done.stderr
    assert_fine(clone.run(["orchestrate.py", "clean", "unproven"]), "removed run unproven")


BROKEN = FOREIGN | {"one line of the user's": "my results, do not touch", "a row": "a\tb\n1\t2\n"}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
@pytest.mark.slow_after(1)
def test_a_table_that_is_not_ours_is_passed_over_and_never_written(clone, content):
    path = clone.root / "results.tsv"
    path.write_bytes(content.encode(errors="surrogateescape"))
    for command in ("status", "log", "report", "next"):
        done = clone.run(["orchestrate.py", command])
        assert_fine(done)
        assert "results.tsv" in done.stdout + done.stderr
    if content:
        assert_one_line(clone.run(["orchestrate.py", "record", "kernels/rmsnorm/cpp_kernel.py"]), "results.tsv")
    assert path.read_bytes() == content.encode(errors="surrogateescape")


def test_a_table_that_a_spreadsheet_has_written(clone):
    path = clone.root / "results.tsv"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    done = clone.run(["orchestrate.py", "log", "--all"])
    assert_fine(done, "too bold")
    assert done.stderr == ""


@pytest.mark.slow
def test_git_has_the_experiments_where_the_table_is_gone(clone):
    good = clone.run(["orchestrate.py", "report"]).stdout
    whole = {name: clone.run(["orchestrate.py", *name.split()]).stdout for name in ("log --all", "next")}
    (clone.root / "results.tsv").unlink()
    assert_fine(clone.run(["orchestrate.py", "status"]), "#3", "told from git")
    for name, text in whole.items():
        done = clone.run(["orchestrate.py", *name.split()])
        assert done.stdout == text and "told from git" in done.stderr
    assert_fine(clone.run(["orchestrate.py", "report"]), good.strip().splitlines()[0], "told from git")
    assert "too bold" in (clone.root / "workspace/night/report.md").read_text()
    assert not (clone.root / "results.tsv").exists()


def test_a_good_report_is_not_overwritten_with_nothing(clone):
    clone.run(["orchestrate.py", "report"])
    (clone.root / "results.tsv").unlink()
    for ref in clone.git("for-each-ref", "--format=%(refname)", "refs/autokernel").split():
        clone.git("update-ref", "-d", ref)
    page = clone.root / "workspace/night/report.html"
    good = page.read_text()
    assert_one_line(clone.run(["orchestrate.py", "report"]), "left as it is")
    assert page.read_text() == good


def test_an_edit_of_a_runs_kernel_is_shown(clone):
    kernel = clone.root / "workspace/night/tree/kernel.py"
    before = clone.run(["orchestrate.py", "status"])
    kernel.write_text(kernel.read_text() + "# by hand\n")
    assert_fine(clone.run(["orchestrate.py", "status"]), "kernel.py of its tree is edited, and not judged yet")
    clone.ledger("night").reset()
    (aside,) = (clone.root / "workspace/night").glob("kernel_edited_*.py")
    assert aside.read_text().endswith("# by hand\n")
    assert_fine(clone.run(["orchestrate.py", "status"]), f"orchestrate.py record workspace/night/{aside.name} judges it")
    aside.unlink()
    assert clone.run(["orchestrate.py", "status"]) == before


def test_clean_removes_one_run_and_all_of_it(clone):
    assert_fine(clone.run(["orchestrate.py", "clean", "night/"]), "removed run night")  # as a shell completes it
    assert "night" not in clone.git("for-each-ref") and not (clone.root / "workspace/night").exists()
    assert (clone.root / "workspace/unproven/plan.json").exists()
    assert_one_line(clone.run(["orchestrate.py", "clean", "night"]), "night", "unproven")


def test_refs_alone_suffice_for_clean(clone):
    shutil.rmtree(clone.root / "workspace")
    assert_fine(clone.run(["orchestrate.py", "runs"]), "night", "only refs in git")
    assert_one_line(clone.run(["orchestrate.py", "status", "--tag", "night"]), "only its commits", "clean night")
    assert_one_line(clone.run(["orchestrate.py", "status"]), "only the commits of night: python orchestrate.py runs")
    assert_fine(clone.run(["orchestrate.py", "log", "--all"]), "#1 ", "#2 ")  # as of edits by hand
    assert_fine(clone.run(["orchestrate.py", "clean", "night"]), "removed run night")
    assert "night" not in clone.git("for-each-ref") + clone.git("worktree", "list")


def test_a_folder_that_is_no_run_stays(clone):
    mine = clone.root / "workspace/mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("mine")
    assert_one_line(clone.run(["orchestrate.py", "clean", "mine"]), "no run")
    assert (mine / "thesis.tex").exists()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["workspace/night", "workspace/night/tree", "workspace/night/more"])
def test_links_are_not_followed(clone, name):
    elsewhere = clone.home / "elsewhere"
    shutil.rmtree(elsewhere, ignore_errors=True)
    elsewhere.mkdir()
    (elsewhere / "kernel.py").write_text("mine")
    link = clone.root / name
    if link.exists():
        shutil.copytree(link, elsewhere, dirs_exist_ok=True, ignore=shutil.ignore_patterns("kernel.py"))
        shutil.rmtree(link)
    link.symlink_to(elsewhere)
    done = clone.run(["orchestrate.py", "clean", "night"])
    if name == "workspace/night":
        assert_one_line(done, "link")
    else:
        assert_fine(done, "removed run night")
    assert (elsewhere / "kernel.py").read_text() == "mine"


def test_a_link_to_nowhere_is_not_written_through(clone):
    shutil.rmtree(clone.root / "workspace")
    (clone.root / "workspace").symlink_to(clone.home / "nowhere")
    assert_one_line(clone.run(["profile.py", "--model", "models/llama.py"]), "workspace", "cannot write to")
    (clone.root / "workspace").unlink()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("place", ["clone", "another worktree"])
@pytest.mark.parametrize("command", ["record kernels/rmsnorm/cpp_kernel.py", "clean night"])
def test_a_branch_that_the_user_works_on_is_not_moved(clone, command, place):
    where = clone.root
    if place == "clone":
        clone.git("checkout", "-q", "--ignore-other-worktrees", "autokernel/night")
    else:
        where = clone.home / "second"
        clone.git("worktree", "add", "-q", "--force", str(where), "autokernel/night")
    before = clone.git("rev-parse", "autokernel/night")
    assert_one_line(
        clone.run(["orchestrate.py", *command.split()]), "autokernel/night is checked out", f"git -C {where} switch"
    )
    assert clone.git("rev-parse", "autokernel/night") == before and (clone.root / PLAN).exists()
    if place != "clone":
        clone.git("worktree", "remove", str(where))


def test_a_branch_of_a_run_is_no_place_for_a_merge(clone):
    from autokernel.history.ledger import CheckedOut, around

    clone.git("checkout", "-q", "--ignore-other-worktrees", "autokernel/night")
    with pytest.raises(CheckedOut):
        around(clone.root / "fast")


READ, REST = ("log", "status", "clean night"), ("report", "record kernels/rmsnorm/cpp_kernel.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "above"),
    [
        ("merge", "nothing"),
        ("merge", "another project's repository"),
        *(pytest.param(command, "nothing", marks=pytest.mark.slow) for command in READ + REST),
        *(pytest.param(command, "another project's repository", marks=pytest.mark.slow) for command in READ + REST),
    ],
)
def test_an_unpacked_archive(clone, tmp_path, command, above):
    """No .git: what can be told without is told, the rest is refused, and a repository above is not taken for ours."""
    archive, root = tmp_path / "archive.zip", tmp_path / "project/unpacked"
    clone.git("archive", "--output", str(archive), "HEAD")
    zipfile.ZipFile(archive).extractall(root)
    for path in (clone.root / "autokernel").rglob("*.py"):  # as the working tree has it
        shutil.copy(path, root / path.relative_to(clone.root))
    shutil.copy(clone.root / "orchestrate.py", root)
    for name in (PLAN, "results.tsv"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(clone.root / name, root / name)
    if above != "nothing":
        clone._git("init", "-q", cwd=tmp_path / "project")
        clone._git(
            "-c", "user.name=u", "-c", "user.email=u@x", "commit", "--allow-empty", "-qm", "x", cwd=tmp_path / "project"
        )
    environment = os.environ | {"PYTHONPATH": str(root), "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    command = [sys.executable, "orchestrate.py", *command.split()]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    if command[2] in ("report", "log", "status"):
        assert done.returncode == 0 and "not a git clone" in done.stdout + done.stderr
        assert "rmsnorm" in done.stdout
    else:
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert (root / PLAN).exists()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("command", ["status", "log --all", "report", "clean night", "runs"])
def test_without_git(clone, tmp_path, command):
    done = clone.run(["orchestrate.py", *command.split()], PATH=str(tmp_path))
    assert "Traceback" not in done.stderr, done.stderr
    if command == "clean night":
        assert_one_line(done, "git is not installed")
    else:
        assert done.status == 0 and ("#3 rmsnorm" if "log" in command else "night") in done.stdout


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("command", ["status", "log --all", "report", "next", "clean night"])
def test_a_commit_that_git_has_lost(clone, command):
    commit = clone.git("rev-parse", "refs/autokernel/night/3").strip()
    lost, kept = clone.root / ".git/objects" / commit[:2] / commit[2:], clone.home / "object"
    lost.rename(kept)
    done = clone.run(["orchestrate.py", *command.split()])
    kept.rename(lost)
    assert_fine(done)
    if command != "clean night":
        assert "git failed" in done.stdout + done.stderr and "missing object" in done.stdout + done.stderr


@pytest.mark.slow
def test_a_ref_that_is_no_experiment(clone):
    clone.git("update-ref", "refs/autokernel/night/9", "HEAD")
    for command in ("runs", "log --all"):
        assert_fine(clone.run(["orchestrate.py", *command.split()]), "night" if command == "runs" else "too bold")
    assert "git update-ref -d refs/autokernel/night/9" in clone.run(["orchestrate.py", "status"]).stdout
    assert_one_line(
        clone.run(["orchestrate.py", "record", "kernels/rmsnorm/cpp_kernel.py"]), "refs/autokernel/night/9 is no"
    )


def test_a_clone_of_another_users(clone):
    """Git reads none, and says what to do."""
    done = clone.run(["orchestrate.py", "clean", "night"], GIT_TEST_ASSUME_DIFFERENT_OWNER="1")
    assert_one_line(done, "dubious ownership", f"git config --global --add safe.directory {clone.root}")
    safe = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}  # as in a CI's job
    done = clone.run(["orchestrate.py", "clean", "night"], GIT_TEST_ASSUME_DIFFERENT_OWNER="1", **safe)
    assert_fine(done, "removed run night")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("command", ["log --all", "record kernels/rmsnorm/cpp_kernel.py"])
def test_a_branch_without_a_commit(clone, command):
    clone.git("symbolic-ref", "HEAD", "refs/heads/new")
    done = clone.run(["orchestrate.py", *command.split()])
    clone.git("symbolic-ref", "HEAD", "refs/heads/main")
    assert "the branch in" in done.stderr and "has none: git commit" in done.stderr and "git clone" not in done.stderr
    if command == "log --all":
        assert_fine(done, "too bold")
    else:
        assert_one_line(done)


@pytest.mark.parametrize(
    "file, words", [("HEAD", "not a git repository"), ("packed-refs", "unexpected line in .git/packed-refs")]
)
def test_what_is_damaged_in_git_is_no_reason_to_commit_or_to_clone_over_it(tmp_path, file, words):
    for words_of_git in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "x", "--allow-empty"],
    ):
        subprocess.run(["git", *words_of_git], cwd=tmp_path, check=True)
    assert why_no_repository(tmp_path) is None
    (tmp_path / ".git" / file).write_text("junk line\n")
    reason = why_no_repository(tmp_path)
    assert words in reason and "its .git is damaged" in reason


def test_gits_own_variables_do_not_lead_elsewhere(clone):
    """As in a hook, or in git rebase --exec, of another repository."""
    other = clone.home / "other"
    clone._git("init", "-q", str(other))
    assert_fine(clone.run(["orchestrate.py", "log", "--all"], GIT_DIR=str(other / ".git")), "too bold")


@pytest.mark.parametrize(
    "command",
    [
        "orchestrate.py log --all --json",
        *(pytest.param(f"orchestrate.py {word}", marks=pytest.mark.slow) for word in ("--help", "runs", "--version")),
    ],
)
def test_a_reader_that_has_gone(untouched, command):
    read, write = os.pipe()
    os.close(read)
    child, environment = [sys.executable, *command.split()], os.environ | {"PYTHONPATH": "."}
    done = subprocess.run(child, cwd=untouched.root, stdout=write, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(write)
    assert done.stderr == "" and done.returncode == (0 if "--help" in command else 141)  # argparse is quiet by itself


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(untouched, closed):
    command = f"exec {sys.executable} orchestrate.py runs {closed}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=untouched.root, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."}
    )
    assert (done.returncode, done.stderr) == (0, "") and ("night" in done.stdout) == (">&-" not in closed.split())


def test_another_encoding_than_utf8(untouched):
    """Files of ours are UTF-8, and what is printed too, whatever the locale's is."""
    environment = os.environ | {"PYTHONPATH": ".", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ask = [sys.executable, "orchestrate.py", "log", "--tag", "nächte"]
    done = subprocess.run(ask, cwd=untouched.root, capture_output=True, env=environment)
    assert (done.returncode, done.stdout) == (2, b"") and "'nächte'" in done.stderr.decode()


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    from autokernel.common.records import write_json

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True)
    write_json(pipe, {"a": 1})
    assert json.loads(reader.communicate(timeout=10)[0]) == {"a": 1} and pipe.is_fifo()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "command, says",
    {
        "orchestrate.py report": "File too large",
        "orchestrate.py record kernel.py --tag night -m faster": "File too large",
        "export_hf.py --name a-norm --kernel kernels/matmul/triton_kernel.py --repo-id me/a-norm": "File too large",
    }.items(),
)
def test_files_that_may_not_grow(clone, command, says):
    """As with `ulimit -f`, or a quota: one line, and nothing that is half of a file."""
    before = (clone.root / "results.tsv").read_bytes()
    shutil.copy(clone.root / "kernels/rmsnorm/cpp_kernel.py", clone.root / "kernel.py")
    assert_one_line(clone.run(command.split(), file_bytes=4000), says)
    assert (clone.root / "results.tsv").read_bytes() == before


def test_runs_are_listed(clone):
    assert_fine(clone.run(["orchestrate.py", "runs"]), "night", "unproven")
    listed = json.loads(clone.run(["orchestrate.py", "runs", "--json"]).stdout)
    assert [(run["tag"], run["experiments"], run["kept"]) for run in listed] == [("night", 2, 1), ("unproven", 0, 0)]


def test_a_run_that_is_being_profiled_is_told_of_before_it_has_a_plan(tmp_path):
    from autokernel.common.preflight import Refused
    from autokernel.history.at_work import profiling
    from autokernel.history.runs import NoRun, no_run, run_folder
    from autokernel.history.status import runs, status
    from autokernel.run.workspace import Workspace

    says = f"process {os.getpid()} is profiling net.py:Net 4,64"
    model = "net.py:Net 4,64"
    with profiling(run_folder(tmp_path, "new"), model):
        with (
            pytest.raises(Refused, match=f"{says} for run 'new': wait for it"),
            profiling(run_folder(tmp_path, "new"), model),
        ):
            pass  # a second one, which would write the same file
        assert says in status(tmp_path)
    for beginning in (profiling(run_folder(tmp_path, "new"), model), Workspace(tmp_path, "new").locked(model)):
        with beginning:
            assert status(tmp_path) == status(tmp_path, "new") and says in status(tmp_path)
            told = json.loads(status(tmp_path, as_json=True))
            assert (told["tag"], told["process"], told["notes"][-1]) == ("new", os.getpid(), says)
            assert says in runs(tmp_path) and says in str(no_run(tmp_path, "new"))
        with pytest.raises(NoRun, match="no run"):
            status(tmp_path, "new")
    (run_folder(tmp_path, "new") / "profile.json").write_text("{}")
    assert "extract.py --tag new" in str(no_run(tmp_path, "new"))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("command", ["status", "next", "plan", "log", "report", "runs", "merge"])
def test_where_there_is_no_run_at_all(clone, command):
    shutil.rmtree(clone.root / "workspace")
    for ref in clone.git("for-each-ref", "--format=%(refname)", "refs/autokernel", "refs/heads/autokernel").split():
        clone.git("update-ref", "-d", ref)
    assert_one_line(clone.run(["orchestrate.py", command]), "there is no run yet", "starts one")


@pytest.mark.parametrize("script", ["orchestrate.py", "profile.py", "extract.py", "bench.py", "verify.py", "export_hf.py"])
def test_version_and_help(untouched, script):
    assert_fine(untouched.run([script, "--version"]), "autokernel 0.", "torch 2.", "Python 3.")
    assert_fine(untouched.run([script, "--help"]), f"python {script}")


def test_help_shows_the_options_of_the_whole_job(untouched):
    done = untouched.run(["orchestrate.py", "--help"])
    assert_fine(done, "--model", "--hours", "--agent", "--input-shape", "--experiments", "record", "clean", "runs")


def test_a_failed_write_leaves_no_scratch(tmp_path):
    from autokernel.common.records import write_json

    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_json(tmp_path / "folder", {})
    with pytest.raises(TypeError):
        write_json(tmp_path / "file", {"cannot": object()})
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_a_package_is_written_anew_without_what_is_not_ours(tmp_path):
    from autokernel.export.folders import NotOurs, write_anew

    folder = tmp_path / "fast"
    write_anew(folder, {"a.py": "1", "old.py": "2"})
    (folder / "notes.txt").write_text("mine")
    write_anew(folder, {"a.py": "3"})
    assert {p.name for p in folder.iterdir()} == {"a.py", "notes.txt", ".autokernel.json"}
    (folder / "b.py").write_text("mine")
    with pytest.raises(NotOurs, match="b.py"):
        write_anew(folder, {"a.py": "4", "b.py": "5"})
    (folder / "a.py").write_text("edited")
    with pytest.raises(NotOurs, match="edited"):
        write_anew(folder, {"a.py": "4"})
    assert (folder / "a.py").read_text() == "edited" and (folder / "b.py").read_text() == "mine"

"""What a user gets wrong ends in one line that says what was wrong and what to do, exit status 2, and no traceback."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from autokernel import apply, explain, spec
from autokernel.cli import bench, check, export_hf, extract, profile, verify
from autokernel.cli.arguments import script
from autokernel.common import preflight
from autokernel.common.backends import BACKENDS
from autokernel.gate.source import read_kernel
from autokernel.integration.winner import Winner
from autokernel.spec import KERNELS
from autokernel.target import default_target
from tests.user_errors import RMSNORM, ROOT


def test_an_interrupt_without_words(capsys):
    def stopped(argv):
        raise KeyboardInterrupt

    assert script(stopped) == 130 and capsys.readouterr().err == "stopped\n"


COMMANDS = {
    "no such file": (profile.main, ("--model", "models/gpt3.py"), "there is no file models/gpt3.py: is it gpt2.py?"),
    "a text for a name": (profile.main, ("--model", "net" * 1000), "error: netnet", "…", "File name too long"),
    "a number for a text": (profile.main, ("--profile-iters", "9" * 3000), "out of range: at least 1, at most 1e+09"),
    "nothing near": (profile.main, ("--model", "no.py"), "there is no file no.py"),
    "a folder": (profile.main, ("--model", "models"), "models is no Python file"),
    "a text": (profile.main, ("--model", "README.md"), "README.md is no Python file"),
    "no such module": (profile.main, ("--module", "no_such_module"), "there is no module 'no_such_module'"),
    "no such part": (profile.main, ("--module", "torch.nn.no_such.part"), "there is no module 'torch.nn.no_such.part'"),
    "part of none": (profile.main, ("--module", "no_such.module"), "there is no module 'no_such.module'"),
    "an empty name": (profile.main, ("--module", ""), "--module", "is empty"),
    "no name": (profile.main, ("--module", "a..b"), "there is no module 'a..b'"),
    "a relative name": (profile.main, ("--module", ".models"), "there is no module '.models'"),
    "no such class": (profile.main, ("--module", "torch.nn", "--class-name", "Lineaer"), "no class Lineaer", "Linear"),
    "its arguments": (profile.main, ("--module", "torch.nn", "--class-name", "Linear"), "needs in_features, out_features"),
    "a folder to write": (profile.main, ("--output", "models"), "it is a folder: name a file"),
    "below a file": (profile.main, ("--output", "README.md/profile.json"), "cannot write to README.md", "Not a directory"),
    "below a folder that is not ours": (profile.main, ("--output", "/proc/x/profile.json"), "or name another folder"),
    "no profile": (extract.main, ("--tag", "no-such-run"), "there is no workspace/no-such-run/profile.json"),
    "no profile there": (extract.main, ("--profile", "models"), "models is a folder: name the file"),
    "no run": (verify.main, ("--tag", "no-such-run"), "there is no run named 'no-such-run'"),
    "no folder of a run": (verify.main, ("--workspace", "/no/run"), "there is no /no/run/plan.json", "workspace/NAME"),
    "no verdict": (
        export_hf.main, ("--name", "my-x", "--kernel", "kernels/rmsnorm/triton_kernel.py", "--verdict", "/no.json"),
        *("there is no file /no.json", "--json > /no.json"),
    ),
    "a name nearly right": (verify.main, ("--time=3",), "--time=3, did you mean --timed? ("),
    "a name of Python's": (profile.main, ("--model_args", "{}"), "did you mean --model-args?"),
    "a name like none": (profile.main, ("--gpu", "3"), "unrecognized arguments: --gpu 3 (python"),
    "no name of a file": (bench.main, ("kernel_" * 800,), "there is no file kernel_kernel_"),
    "no kernel": (bench.main, ("kernel_of_mine.py",), "there is no file kernel_of_mine.py"),
    "a folder of kernels": (bench.main, ("kernels/rmsnorm",), "kernels/rmsnorm is a folder"),
    "a profile with a space": (extract.main, ("--profile", "a b.json"), "python profile.py --output 'a b.json' writes one"),
    "no kernel file": (bench.main, ("LICENSE",), "LICENSE is not Python", "line 1"),
    "no kernel_fn": (bench.main, ("models/llama.py",), "defines no kernel_fn()", "models/llama.py:FUNCTION"),
    "of what type": (bench.main, ("models/llama.py:rotate",), "Say --kernel (in Python type=) with one of bmm"),
    "no such function": (bench.main, ("models/llama.py:rotated", "--kernel", "softmax"), "defines no rotated"),
    "no function": (bench.main, ("models/llama.py:", "--kernel", "softmax"), "'' is no name of a function"),
    "no such module of it": (bench.main, ("torch.no.such:f", "--kernel", "softmax"), "there is no file torch.no.such"),
    "no incumbent": (bench.main, ("kernels/rmsnorm/cpp_kernel.py", "--incumbent", "x.py"), "there is no file x.py"),
    "another type": (bench.main, ("kernels/rmsnorm/cpp_kernel.py", "--kernel", "rms"), "there is no kernel type 'rms'"),
    "two types": (bench.main, ("kernels/rmsnorm/cpp_kernel.py", "--kernel", "softmax"), "of rmsnorm, and not of softmax"),
    "no target": (
        bench.main, ("kernels/rmsnorm/cpp_kernel.py", "--tag", "no-such-run", "--target", "x"), "workspace/no-such-run/plan"
    ),
}  # fmt: skip


@pytest.mark.parametrize("script", ["profile", "orchestrate"])
def test_a_model_that_is_not_there_is_told_before_pytorch_is_imported(script):
    words = [sys.executable, "-X", "importtime", ROOT / f"{script}.py", "--model", "models/gpt3.py"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    said = [line for line in ended.stderr.splitlines() if not line.startswith("import time:")]
    assert said == ["error: there is no file models/gpt3.py: is it gpt2.py?"] and ended.returncode == 2
    assert not any(line.endswith("| torch") for line in ended.stderr.splitlines())


@pytest.mark.parametrize("case", COMMANDS)
def test_a_command_that_cannot_be_done(refusal, monkeypatch, case):
    monkeypatch.chdir(ROOT)
    main, argv, *words = COMMANDS[case]
    line = refusal(main, *argv)
    assert all(word in line for word in words), line


SPEC = (KERNELS / "rmsnorm" / "spec.py").read_text()
SPECS = {
    "syntax": ("SPEC = (", "'(' was never closed (kernels/mine/spec.py:1)"),
    "another name": (SPEC, "name='rmsnorm': it is that of its folder, 'mine'"),
    "no SPEC": ("SPECS = 3", "has no SPEC = KernelSpec(…): docs/extending.md"),
    "no oracle": ("import reference\n\nreference.mine", "no attribute 'mine' (kernels/mine/spec.py:3)"),
    "a field that is none": (SPEC.replace("headline=", "headlin="), "TypeError: ", "'headlin'", "(kernels/mine/spec.py:"),
}


@pytest.mark.parametrize("case", SPECS)
def test_a_kernel_type_with_a_mistake(monkeypatch, tmp_path, case):
    source, *words = SPECS[case]
    monkeypatch.setattr(spec, "KERNELS", tmp_path / "kernels")
    monkeypatch.setattr(spec, "ROOT", tmp_path)
    (tmp_path / "kernels" / "mine").mkdir(parents=True)
    (tmp_path / "kernels" / "mine" / "spec.py").write_text(source)
    (tmp_path / "reference.py").write_text((ROOT / "reference.py").read_text())
    with pytest.raises(preflight.Refused) as refused:
        spec.load_spec("mine")
    line = str(refused.value)
    assert line.startswith("kernels/mine/spec.py ") and all(word in line for word in words), line


KERNEL = 'KERNEL_TYPE = "rmsnorm"\nBACKEND = "cpp"\ndef kernel_fn(x, weight, eps): return x\n'
FILES = {
    "binary": (bytes(range(256)), "is no text in UTF-8"),
    "an object file": (b"\x7fELF\0\0\0", "is not Python"),
    "empty": (b" \n", "is empty"),
    "huge": (b"#" * (5 << 20), "has 5 MB: that is no kernel file"),
    "deep": (b"x = " + b"(" * 9999 + b")" * 9999, "is not Python"),
    "no type": (
        KERNEL.replace("KERNEL_TYPE", "TYPE").encode(),
        'sets no KERNEL_TYPE: add the line KERNEL_TYPE = "…"; the types are',
    ),
    "unknown type": (KERNEL.replace("rmsnorm", "rnsnorm").encode(), "KERNEL_TYPE is 'rnsnorm'; the types are"),
    "a path for a type": (
        KERNEL.replace("rmsnorm", "../../kernels/rmsnorm").encode(),
        "KERNEL_TYPE is '../../kernels/rmsnorm'",
    ),
    "a long type": (KERNEL.replace("rmsnorm", "r" * 5000).encode(), "KERNEL_TYPE is 'rrrrrrrrrrrr...rrrrrrrrrrrrr'"),
    "a set of lists": (b"A = {[]}\n" + KERNEL.replace("rmsnorm", "rnsnorm").encode(), "KERNEL_TYPE is 'rnsnorm'"),
    "no backend": (KERNEL.replace("BACKEND", "BACK").encode(), 'no BACKEND: add the line BACKEND = "…"; the backends are'),
    "unknown backend": (KERNEL.replace("cpp", "rust").encode(), "BACKEND is 'rust'; the backends are"),
    "no function": (KERNEL.replace("kernel_fn", "kernel").encode(), "defines no kernel_fn()"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_no_kernel(refusal, tmp_path, case):
    content, *words = FILES[case]
    file = tmp_path / "kernel.py"
    file.write_bytes(content)
    line = refusal(bench.main, file)
    assert all(word in line for word in words), line


def test_a_kernel_file_as_an_editor_on_windows_writes_it(tmp_path):
    """Python takes a byte order mark at the beginning of a file, and so do we."""
    file = tmp_path / "kernel.py"
    file.write_bytes(KERNEL.encode("utf-8-sig"))
    assert read_kernel(file) == KERNEL


def test_kernels_that_are_for_another_model_are_said_to_be_of_no_use_once(caplog):
    winner = Winner(default_target("rmsnorm", "cpp", "cpu", torch.float32), RMSNORM.read_text())
    model = torch.nn.Linear(4, 4)
    x, expected = torch.ones(2, 4), model(torch.ones(2, 4))
    applied = apply(model, [winner])
    assert torch.equal(applied(x), expected) and torch.equal(applied(x), expected)
    said = [record.message for record in caplog.records if "nothing is replaced" in record.message]
    assert len(said) == 1 and "in Linear" in said[0] and winner.target.name in said[0]


def test_a_model_without_a_graph_is_not_said_to_have_other_shapes(caplog):
    """Over a compiler an nn.GRU is in none."""

    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = torch.nn.GRU(4, 4)

        def forward(self, x):
            return self.gru(x)[0]

    winner = Winner(default_target("rmsnorm", "cpp", "cpu", torch.float32), RMSNORM.read_text())
    model = apply(Recurrent(), [winner], "aot_eager")
    for _ in range(2):  # at the first it is not settled where its lines are
        model(torch.ones(2, 1, 4))
    (said,) = [record.message for record in caplog.records if "nothing is replaced" in record.message]
    assert "no graph of it" in said and "shapes" not in said
    assert any("GRU" in why for why in explain(model).left)


def test_a_summary_that_cannot_be_written_is_told_before_anything_is_judged(refusal, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "/proc/nowhere/summary")
    assert "cannot write to /proc/nowhere" in refusal(check.main, RMSNORM, RMSNORM, "--kernel", "rmsnorm")


BROKEN = {
    "fails": ("echo 'fatal error: cannot execute cc1plus' >&2; exit 1", "cannot execute cc1plus"),
    "says nothing": ("exit 3", "exit status 3"),
    "does nothing": ("exit 0", "wrote no object file"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_compiler_that_compiles_nothing_is_none(refusal, monkeypatch, tmp_path, case):
    body, words = BROKEN[case]
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\n{body}\n")
    compiler.chmod(0o755)
    monkeypatch.setitem(BACKENDS, "cpp", replace(BACKENDS["cpp"], compilers=(str(compiler),)))
    line = refusal(bench.main, RMSNORM)
    assert words in line and "apt install g++" in line


def test_the_next_compiler_is_taken_where_the_first_is_broken(monkeypatch, tmp_path):
    first, works = tmp_path / "c++", preflight.find_compiler("cpp")
    first.write_text("not a program")
    first.chmod(0o755)
    monkeypatch.setitem(BACKENDS, "cpp", replace(BACKENDS["cpp"], compilers=(str(first), works)))
    assert preflight.find_compiler("cpp") == works

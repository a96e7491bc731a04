"""Traced patterns are kept: what is read is what was traced, and a file that cannot be read or written costs time alone."""

import os
from pathlib import Path

import pytest
import torch

from autokernel.model import pattern_graphs, patterns
from autokernel.model.patterns import patterns_of
from autokernel.spec import KERNELS


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """How many patterns are traced, with a cache of their own."""
    monkeypatch.setenv("AUTOKERNEL_CACHE", str(tmp_path))
    calls, trace = [], patterns._trace_pattern
    monkeypatch.setattr(patterns, "_trace_pattern", lambda pattern: calls.append(pattern) or trace(pattern))
    patterns._traced.cache_clear()
    yield calls
    patterns._traced.cache_clear()


def graphs(kernel_type: str) -> list[list]:
    patterns._traced.cache_clear()
    found = patterns_of(kernel_type)
    assert not found.failures
    return [pattern_graphs._nodes(graph) for _, graph in found.graphs]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kernel_type", ["rmsnorm", "rotary_embedding", "cross_entropy"])
def test_what_is_read_is_what_was_traced(traced, kernel_type):
    first, count = graphs(kernel_type), len(traced)
    assert count and graphs(kernel_type) == first and len(traced) == count
    for _, graph in patterns_of(kernel_type).graphs:
        graph.lint()


@pytest.mark.parametrize(
    "content", ["", "[[[]]]", '{"a": 1}', '[[[["call_function", "aten.gone.default", null, [], {}]]]]']
)
def test_what_cannot_be_read_is_traced_and_written_anew(traced, tmp_path, content):
    first, count = graphs("softmax"), len(traced)
    (kept,) = (tmp_path / pattern_graphs.FOLDER).iterdir()
    whole = kept.read_text()
    kept.write_text(content)
    assert graphs("softmax") == first and len(traced) == 2 * count and kept.read_text() == whole


def test_a_cache_that_cannot_be_written_to(traced, tmp_path):
    (tmp_path / pattern_graphs.FOLDER).write_text("a file is in the way")
    assert graphs("softmax") == graphs("softmax") and traced


def test_of_old_code_the_latest_files_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOKERNEL_CACHE", str(tmp_path))
    folder = tmp_path / pattern_graphs.FOLDER
    for n in range(pattern_graphs.KEPT + 3):
        pattern_graphs.write(folder / f"softmax-{n}.json", [])
        os.utime(folder / f"softmax-{n}.json", (n, n))
    pattern_graphs.write(folder / "rmsnorm-0.json", [])
    pattern_graphs.write(folder / "softmax-new.json", [])
    names = [path.stem for path in pattern_graphs.files()]
    assert len(names) == pattern_graphs.KEPT + 1 and {"softmax-new", "rmsnorm-0"} <= {*names} and "softmax-0" not in names


def test_other_code_has_a_file_of_its_own(tmp_path, monkeypatch):
    patterns = KERNELS / "softmax" / "patterns.py"
    before = pattern_graphs.file_for(patterns)
    (tmp_path / "changed.py").write_text("")
    monkeypatch.setattr(pattern_graphs, "OURS", [*pattern_graphs.OURS, tmp_path / "changed.py"])
    assert pattern_graphs.file_for(patterns) != before


@pytest.mark.parametrize("kernel_type", ["cross_entropy", "grouped_matmul"])
def test_the_default_device_of_a_models_code_is_none_of_theirs(traced, kernel_type):
    """Neither where it is made before the type's file is read, nor afterwards."""
    patterns._written.cache_clear()
    with torch.device("meta"):
        assert graphs(kernel_type) and traced
    patterns._written.cache_clear()

"""Whose code a thread of a worker stands in: by files that it cannot have written, and code that it has not changed."""

import os
import subprocess
import sys

import pytest

from autokernel.gate.timing import witness

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

# Writes over a page of libm's code what is there, and waits.
REWRITES = """
import ctypes, sys
libc, libm = ctypes.CDLL(None), ctypes.CDLL("libm.so.6")
page = ctypes.cast(libm.cbrt, ctypes.c_void_p).value & ~4095
assert libc.mprotect(ctypes.c_void_p(page), 4096, 7) == 0
if sys.argv[1] == "rewrites":
    ctypes.memmove(page, ctypes.string_at(page, 4096), 4096)
assert libc.mprotect(ctypes.c_void_p(page), 4096, 5) == 0
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "name", ["libc.so.7", "python-blas.so", "[heap]", "[anon:libc.so.6]", "/memfd:x/libc.so.6 (deleted)"]
)
def test_a_name_alone_makes_no_runtime_library(name: str, tmp_path):
    assert not witness._is_runtime(name if name[0] in "[/" else str(tmp_path / name))


def test_runtime_libraries_are_known():
    files = {region.file for region in witness._executable_regions(os.getpid())}
    (libc,) = {name for name in files if os.path.basename(name) == "libc.so.6"}
    assert witness._is_runtime(libc) and witness._is_runtime("[vdso]")


@pytest.mark.parametrize("does", ["rewrites", "leaves"])
def test_code_that_was_changed_is_not_its_file_s(does: str):
    with subprocess.Popen([sys.executable, "-c", REWRITES, does], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        files = [region.file for region in witness._executable_regions(child.pid)]
        child.stdin.close()
    assert ("code that was written over libm.so.6" in files) == (does == "rewrites")

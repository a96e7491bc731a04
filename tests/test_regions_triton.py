"""What is written in Triton for a region, on the CPU by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import sys
import torch
from region_models import CHAINS, ON_GPUS, N, Of, drawn, found, why_wrong
from autokernel import spec as specs
from autokernel.spec import import_file, load_spec
from autokernel.model.regions import convolutions, triton
from pathlib import Path

triton.HELD = int(sys.argv[3])
convolutions.DEVICE = None
specs.REGIONS = Path(sys.argv[1])
torch.manual_seed(0)
structures = set()
for name in sys.argv[2].split(","):
    _, sites = found(Of((CHAINS | ON_GPUS)[name]).eval(), torch.randn(64, N), torch.randn(64, N), backend="triton")
    assert sites, name
    for site in sites:
        spec = load_spec(site.kernel_type)
        inputs = {k: drawn(t) for k, t in site.case.tensors.items()}
        files = spec.starters("triton")
        structures |= {"triton_parts", "triton_rows"} & set(files)
        for stem, path in files.items():
            kernel = import_file(path, f"{path.parent.name}_{stem}")
            kernel.PARTS = 2
            kernel.WIDTH, kernel.HEIGHT = 16, 32  # which the sizes are no multiples of
            if triton.HELD < 16384:
                kernel.BLOCK = 32  # several to a row
            reason = why_wrong(kernel.kernel_fn(**inputs), spec, inputs)
            assert reason is None, f"{name}, {stem}: {reason}"
assert bool(structures) == (triton.HELD < 16384)
print("right")
"""


EDGES_PROGRAM = """
import sys
from pathlib import Path
from region_models import EDGES, assert_same_at_edges, edges, found, special
from autokernel import spec as specs
from autokernel.spec import import_file, load_spec

specs.REGIONS = Path(sys.argv[1])
for name in EDGES:
    x, y = special()
    _, (site,) = found(edges(name), x, y, backend="triton")
    spec, inputs = load_spec(site.kernel_type), (x, y)[: len(site.inputs)]
    kernel = import_file(spec.starters("triton")["triton_kernel"], f"edges_{name}")
    assert_same_at_edges(kernel.kernel_fn(*inputs), spec.oracle(*(v.double() for v in inputs)))
print("right")
"""


def run(folder: Path, names: str, held: int = 16384) -> None:
    run_program(PROGRAM, str(folder), names, str(held))


def run_program(program: str, *arguments: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.endswith("right\n"), done.stderr[-3000:]


def test_some_kernels_are_right(tmp_path: Path) -> None:
    """A sum, a power, a single row, tiles, a convolution: the tests of the second tier have all others."""
    run(tmp_path, "normed,powers,of_one_row,read_across,convolved_across")


@pytest.mark.slow
def test_kernels_are_right(tmp_path: Path) -> None:
    """By the block and by the row: sums, maxima, masks, broadcasts, split dims."""
    run(tmp_path, "gelu,masks,normed,scores,extremes,reduced,grouped,broadcast,small,steps,residual,gates,mean_last")


@pytest.mark.slow
def test_powers_numbers_and_single_rows(tmp_path: Path) -> None:
    """Powers of numbers below 0, and of literals; results that are a literal; a result that is one row, or one element."""
    run(tmp_path, "powers,powers_below_zero,powers_of_numbers,numbers,of_one_row,of_no_dim")


@pytest.mark.slow
def test_short_convolutions(tmp_path: Path) -> None:
    run(tmp_path, "convolved,convolved_plane,transposed,transposed_matrices,broadcast")


@pytest.mark.slow
def test_parts_windows_and_rows_in_order(tmp_path: Path) -> None:
    """What is read elsewhere or not at all, running sums from either end, places, and sums of everything."""
    run(
        tmp_path,
        "joined,padded,largest_of_windows,means_without_padding,running_backwards,running_before,first_of_the_largest,losses",
    )


@pytest.mark.slow
def test_long_rows_are_walked_through(tmp_path: Path) -> None:
    """By one program, and by several that each take a part; a variance in one pass."""
    run(tmp_path, "embedded,extremes,grouped", held=8)


@pytest.mark.slow
def test_long_rows_in_order_are_walked_through(tmp_path: Path) -> None:
    run(tmp_path, "mean_last,running,running_backwards,running_products,first_of_the_largest,losses", held=8)


@pytest.mark.slow
def test_functions_of_special_numbers_are_pytorchs(tmp_path: Path) -> None:
    run_program(EDGES_PROGRAM, str(tmp_path))


@pytest.mark.slow
def test_every_chain(tmp_path: Path) -> None:
    from region_models import CHAINS

    run(tmp_path, ",".join(CHAINS))


@pytest.mark.slow
def test_every_sum_in_parts(tmp_path: Path) -> None:
    run(tmp_path, "normed,scores,log_scores,extremes,reduced,grouped,summed,unit,rms,standardised", held=8)


@pytest.mark.slow
def test_several_results_of_long_rows(tmp_path: Path) -> None:
    run(tmp_path, "residual,mean_too,mean_last,dtypes,columns", held=8)

"""How far apart two identical C++ kernels are, pair by pair, as the gate times them on this CPU (A/A).

Usage:   python benchmarks/pair_spread.py              16 pairs of processes for each of three kernels
         python benchmarks/pair_spread.py --pairs 32

Prints for each kernel the standard deviation of the pairs' log ratios, within how many per cent half of the pairs lie, how
many are apart by over 10 %, microseconds of a call (lowest, median, highest pair), and seconds of a pair. Writes nothing.
"""

import argparse
import math
import secrets
import sys
import time
from pathlib import Path
from statistics import median, stdev

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.gate import Judge
from autokernel.gate.timing.pairs import Side
from autokernel.spec import load_spec
from autokernel.target import Target, WeightedCase

SIZES = {
    "rmsnorm": {"M": 512, "N": 768},
    "softmax": {"shape": (6144, 512)},
    "matmul": {"M": 768, "K": 768, "N": 768},
}
A, B = "candidate", "incumbent"
OVER = math.log(1.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=16, help="of each kernel (default: %(default)s)")
    pairs = parser.parse_args().pairs
    with Judge("cpu") as judge:
        for name, dims in SIZES.items():
            print(f"{name} {dims}: {spread(judge, name, dims, pairs)}", flush=True)


def spread(judge: Judge, name: str, dims: dict, pairs: int) -> str:
    spec, ratios, latencies_us, disturbed = load_spec(name), [], [], 0
    target = Target(name, name, "cpp", "cpu", (WeightedCase(spec.case(dims, torch.float32)),))
    source = spec.starters("cpp")["cpp_kernel"].read_text()
    started = time.perf_counter()
    with judge.contests.timer(target, secrets.randbits(48), "none") as timer:
        while len(ratios) < pairs:
            pair = timer.pair([Side(A, source), Side(B, source)], A)
            if pair.disturbance:
                disturbed += 1
                continue
            ratios.append(pair.log_ratio(B, A, target.cases))
            latencies_us.append(1e6 * pair.seconds[A][0])
    seconds = (time.perf_counter() - started) / (pairs + disturbed)
    apart = sum(abs(ratio) > OVER for ratio in ratios)
    low, middle, high = min(latencies_us), median(latencies_us), max(latencies_us)
    return (
        f"sd {stdev(ratios):.1%}, half within {median(map(abs, ratios)):.1%}, {apart} of {pairs} over 10 % apart; "
        f"{low:.0f} / {middle:.0f} / {high:.0f} us a call; {seconds:.1f} s a pair; {disturbed} disturbed pairs left out"
    )


if __name__ == "__main__":
    main()

"""The experiments of a run in TensorBoard, MLflow or Weights & Biases, whichever is installed.

Usage:
    python -m autokernel track tensorboard               the latest run, into workspace/tracked/tensorboard
    python -m autokernel track mlflow --tag night        into $MLFLOW_TRACKING_URI, or workspace/tracked/mlflow
    WANDB_MODE=offline python -m autokernel track wandb  into workspace/tracked/wandb; without it, to your account

Without a tracker: results.tsv is what pandas.read_csv("results.tsv", sep="\\t") reads.
"""

import argparse
from collections.abc import Sequence

from autokernel.cli.arguments import Parser, named_path, tag
from autokernel.cli.status import rows_with_notes
from autokernel.common.console import fail
from autokernel.common.preflight import HOME
from autokernel.common.records import json_text
from autokernel.common.words import counted
from autokernel.export.trackers import TRACKERS, track


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    parser.add_argument("tracker", choices=list(TRACKERS))
    parser.add_argument("--tag", type=tag, help="the run's name (default: the latest)")
    parser.add_argument("--folder", type=named_path, metavar="DIR", help="instead of workspace/tracked/<tracker>")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    options = make_parser().parse_args(argv)
    from autokernel.integration.verification.record import Verification  # with PyTorch
    from autokernel.run.workspace import VERIFY, find_run

    run = find_run(HOME, options.tag)
    rows = rows_with_notes(run.root, run.tag)
    if not rows:
        fail(f"run {run.tag!r} has no experiments yet")
    folder = options.folder or HOME / "workspace" / "tracked" / options.tracker
    gains = Verification.read(run / VERIFY).speedups if (run / VERIFY).exists() else {}
    model = {f"model/over {old} with {ours}": s.value for ours, over in gains.items() for old, s in over.items()}
    place = track(options.tracker, run.tag, rows, model, folder)
    if options.json:
        print(json_text({"run": run.tag, "experiments": len(rows), "where": place}))
    else:
        print(f"{counted(rows, 'experiment')} of {run.tag}: {place}")

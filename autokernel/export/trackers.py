"""A run's experiments in an experiment tracker: TensorBoard, MLflow or Weights & Biases, whichever is installed.

A step is an experiment, by its number; a metric that it does not have (a refused kernel has no latency) has no point there.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from autokernel.common.preflight import Refused
from autokernel.history.experiments import Experiment

METRICS = ("latency_us", "speedup_vs_pytorch", "speedup_vs_incumbent", "pct_peak", "seconds", "cost_usd")
Metrics = Mapping[str, float]


def points(rows: Sequence[Experiment]) -> Iterator[tuple[int, Metrics]]:
    """(number of an experiment, metric -> value), each metric under the name of the experiment's target."""
    kept = 0
    for row in rows:
        kept += row.status == "kept"
        measured = {f"{row.target}/{name}": getattr(row, name) for name in METRICS}
        yield row.experiment, {name: value for name, value in measured.items() if value is not None} | {"kept": kept}


def to_tensorboard(run: str, steps: Sequence[tuple[int, Metrics]], model: Metrics, folder: Path) -> str:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / run)) as writer:
        for step, metrics in steps:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
        for name, value in model.items():
            writer.add_scalar(name, value, 0)
    return f"tensorboard --logdir {folder}"


def to_mlflow(run: str, steps: Sequence[tuple[int, Metrics]], model: Metrics, folder: Path) -> str:
    """Into $MLFLOW_TRACKING_URI, else a database in `folder`."""
    import mlflow

    if not mlflow.is_tracking_uri_set():
        folder.mkdir(parents=True, exist_ok=True)
        mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').absolute()}")
    mlflow.set_experiment("autokernel")
    with mlflow.start_run(run_name=run):
        for step, metrics in steps:
            mlflow.log_metrics(dict(metrics), step=step)
        mlflow.log_metrics(dict(model))
    return f"mlflow ui --backend-store-uri {mlflow.get_tracking_uri()}"


def to_wandb(run: str, steps: Sequence[tuple[int, Metrics]], model: Metrics, folder: Path) -> str:
    """To where wandb is logged in; with WANDB_MODE=offline into `folder`, for `wandb sync`."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    with wandb.init(project="autokernel", name=run, dir=str(folder), settings=wandb.Settings(silent=True)) as made:
        for step, metrics in steps:
            made.log(dict(metrics), step=step)
        made.summary.update(dict(model))
        where = made.url or made.dir
    return str(where)


TRACKERS: dict[str, Callable[[str, Sequence[tuple[int, Metrics]], Metrics, Path], str]] = {
    "tensorboard": to_tensorboard,
    "mlflow": to_mlflow,
    "wandb": to_wandb,
}


def track(tracker: str, run: str, rows: Sequence[Experiment], model: Metrics, folder: Path) -> str:
    """Write a run's experiments, and `model`, what the whole model gained; returns where to look. Raises Refused."""
    if importlib.util.find_spec(tracker) is None:
        raise Refused(f"{tracker} is not installed: pip install {tracker}")
    return TRACKERS[tracker](run, list(points(rows)), model, folder)

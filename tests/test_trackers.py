"""A run's experiments in the trackers that are installed: what they read back is what results.tsv has."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from autokernel.cli import track as command
from autokernel.common.preflight import Refused
from autokernel.export.trackers import TRACKERS, points, track
from tests.test_experiments import ROW
from tests.test_ledger import clone  # noqa: F401  a fixture
from tests.test_winners import TARGET, run  # noqa: F401  `run` is a fixture

ROWS = [
    replace(ROW, experiment=1, target="softmax", status="kept", latency_us=50.0, speedup_vs_pytorch=1.5),
    replace(ROW, experiment=2, target="softmax", status="failed", latency_us=None, speedup_vs_pytorch=None),
    replace(ROW, experiment=3, target="softmax", status="kept", latency_us=40.0, speedup_vs_pytorch=1.9),
]
MODEL = {"model/over eager with eager": 1.25}
LATENCY = "softmax/latency_us"


def test_an_experiment_has_the_metrics_that_were_measured() -> None:
    steps = dict(points(ROWS))
    assert [steps[n].get(LATENCY) for n in (1, 2, 3)] == [50.0, None, 40.0]
    assert [steps[n]["kept"] for n in (1, 2, 3)] == [1, 1, 2]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track("tensorboard", "night", ROWS, MODEL, tmp_path)
    read = EventAccumulator(str(tmp_path / "night")).Reload()
    assert [(e.step, e.value) for e in read.Scalars(LATENCY)] == [(1, 50.0), (3, 40.0)]
    assert [e.value for e in read.Scalars("model/over eager with eager")] == [1.25]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track("mlflow", "night", ROWS, MODEL, tmp_path)
    (found,) = mlflow.search_runs(experiment_names=["autokernel"], output_format="list")
    assert found.info.run_name == "night" and found.data.metrics["model/over eager with eager"] == 1.25
    history = mlflow.MlflowClient().get_metric_history(found.info.run_id, LATENCY)
    assert [(m.step, m.value) for m in history] == [(1, 50.0), (3, 40.0)]


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    track("wandb", "night", ROWS, MODEL, tmp_path)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path) -> None:
    missing = next((name for name in TRACKERS if importlib.util.find_spec(name) is None), None)
    if missing is None:
        pytest.skip("all of them are installed")
    with pytest.raises(Refused, match=f"pip install {missing}"):
        track(missing, "night", ROWS, MODEL, tmp_path)


def test_the_command_takes_a_runs_rows_and_its_verdict(run, tmp_path, monkeypatch, capsys) -> None:  # noqa: F811
    taken = {}

    def told(name, steps, model, folder):
        taken.update(steps=steps, model=model)
        return "there"

    monkeypatch.setattr("autokernel.export.trackers.importlib.util.find_spec", lambda name: True)
    monkeypatch.setitem(TRACKERS, "tensorboard", told)
    monkeypatch.setattr(command, "HOME", run.root)
    command.main(["tensorboard", "--tag", "night", "--folder", str(tmp_path)])
    assert "1 experiment of night: there" in capsys.readouterr().out
    command.main(["tensorboard", "--tag", "night", "--folder", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out) == {"run": "night", "experiments": 1, "where": "there"}
    assert taken["model"]["model/over eager with eager"] == 1.2 and f"{TARGET.name}/latency_us" in taken["steps"][0][1]

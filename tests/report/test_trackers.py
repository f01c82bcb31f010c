"""Figures of records in trackers of experiments: by stand-ins, and by the real libraries where they are installed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bitplan.report import TrainingLog, log_records
from bitplan.report.read_records import ReportError

DOCUMENTS = Path(__file__).parents[2] / "docs" / "documents"


class Run:
    """A run as Weights & Biases has it."""

    def __init__(self) -> None:
        self.calls: list[tuple[int | None, dict[str, float]]] = []

    def log(self, figures: dict[str, float], step: int | None = None) -> None:
        self.calls.append((step, figures))


@pytest.fixture
def records(tmp_path: Path) -> list[Path]:
    """A training log, telemetry of the same steps and a search, the latter two from their pages."""
    with TrainingLog(tmp_path / "train.jsonl", run="one") as log:
        for step in range(3):
            log.write(step, loss=4.0 / (step + 1), learning_rate=1e-3)
    paths = [tmp_path / "train.jsonl"]
    for name in ("stream-telemetry", "front"):
        match = re.search(r"^```(jsonl?)\n(.*?)^```$", (DOCUMENTS / f"{name}.md").read_text(), re.DOTALL | re.MULTILINE)
        assert match
        paths.append(tmp_path / f"{name}.{match[1]}")
        paths[-1].write_text(match[2])
    return paths


def test_steps_rise_and_are_sent_once(records: list[Path]) -> None:
    run = Run()
    count = log_records(records, run)
    steps = [step for step, _ in run.calls]
    assert steps[-1] is None  # the search
    numbers = [step for step in steps if step is not None]
    assert numbers == sorted(set(numbers))
    assert count == sum(len(figures) for _, figures in run.calls)
    first = dict(run.calls)[0]
    assert first["training/loss"] == 4.0
    search = dict(run.calls)[None]
    front = json.loads(records[-1].read_text())
    assert search["search/plan/kl"] == front["plan"]["kl"]
    assert search["search/noise_floor/perplexity"] == front["noise_floor"]["perplexity"]
    assert any(name.startswith("stream/") for _, figures in run.calls for name in figures)


def test_what_is_no_tracker_or_has_no_figures_is_refused(records: list[Path], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="add_scalar, log_metrics or log; got object"):
        log_records(records, object())
    machine = tmp_path / "machine.json"
    machine.write_text('{"document": "bitplan-machine", "version": 1, "machine": {}, "versions": {}}')
    with pytest.raises(ReportError, match=r"machine.json: a machine has no figures"):
        log_records([machine], Run())


def test_tensorboard(records: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "board")) as writer:
        log_records(records[:1], writer)
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert [(point.step, point.value) for point in board.Scalars("training/loss")] == [
        (0, 4.0),
        (1, 2.0),
        (2, pytest.approx(4 / 3)),
    ]


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    library = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the small package has no database
    library.set_tracking_uri(f"file:{tmp_path}/runs")
    yield library
    library.end_run()


@pytest.mark.filterwarnings("ignore")  # those of the library
def test_mlflow(records: list[Path], mlflow: Any) -> None:
    with mlflow.start_run() as run:
        log_records(records, mlflow)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "training/loss")
    assert sorted((point.step, point.value) for point in history)[:2] == [(0, 4.0), (1, 2.0)]


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases(records: list[Path], tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    run = wandb.init(mode="offline", project="bitplan", dir=str(tmp_path), settings=wandb.Settings(silent=True))
    log_records(records, run)
    loss, kl = run.summary["training/loss"], run.summary["search/plan/kl"]
    run.finish()
    assert loss == pytest.approx(4 / 3)
    assert kl == json.loads(records[-1].read_text())["plan"]["kl"]

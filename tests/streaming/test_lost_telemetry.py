"""Telemetry that cannot be written costs no step: it is said once, and lines come again when there is a place."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading

import pytest

from bitplan.streaming.selective.config import SelectivePrecisionConfig
from bitplan.streaming.selective.training_policy import SelectivePrecisionPolicy
from tests.streaming.stream_samples import batch, make_stack, streaming


def delete_folder(folder, _monkeypatch) -> None:
    shutil.rmtree(folder)


def fill_disk(_folder, monkeypatch) -> None:
    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)


def put_file_in_its_place(folder, _monkeypatch) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file")


@pytest.mark.parametrize("lose", [delete_folder, fill_disk, put_file_in_its_place])
def test_lost_telemetry_costs_no_step(lose, tmp_path, monkeypatch, caplog):
    folder, model = tmp_path / "logs", make_stack(adapters=True, count=3)
    folder.mkdir()
    others = set(threading.enumerate())
    config = SelectivePrecisionConfig(warmup_steps=0, update_interval_steps=1, run_calibration=False)
    with (
        streaming(model, telemetry=folder / "steps.jsonl") as stream,
        SelectivePrecisionPolicy(stream, config, folder=folder) as policy,
    ):
        for step in range(6):
            if step == 2:
                lose(folder, monkeypatch)
            if step == 4:
                monkeypatch.undo()
                if not folder.is_dir():
                    folder.unlink(missing_ok=True)
                    folder.mkdir()
            policy.begin_step(step)
            model(batch(step)).square().mean().backward()
            policy.collect_block_grad_stats()
            policy.compute_hints(step)
            policy.end_step()
        assert stream.stats.steps == 6
        assert policy.telemetry.lost_lines == 2
    said = [record.message for record in caplog.records if "telemetry is being lost, the run goes on" in record.message]
    assert sorted(text.split(":")[1].rsplit("/", 1)[1] for text in said) == [
        "selective_precision_telemetry.jsonl",
        "steps.jsonl",
    ]
    lines = [json.loads(line)["step"] for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert lines[-2:] == [4, 5]
    assert not {2, 3} & set(lines)
    started = set(threading.enumerate()) - others
    assert not [thread for thread in started if thread.name.startswith("bitplan-")]

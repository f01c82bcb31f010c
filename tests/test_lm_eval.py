"""Packed folders in lm-eval answer as the decoded model does; where lm_eval is not installed, this is skipped."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from bitplan import quantize_file
from bitplan.files import export_model
from tests.files.engines.tiny_models import save_tiny

ROOT = Path(__file__).parents[1]
TEXT = "the heath\nthe teeth\nhe eats\nthat hat\nthen he hates\nthese\nhe sat\nthe east\n"


@pytest.mark.filterwarnings("ignore")  # of lm-eval and its libraries
def test_packed_folders_answer_as_the_decoded_model_does(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm_eval")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    program = runpy.run_path(str(ROOT / "benchmarks" / "task_accuracy.py"))
    program["write_task"](tmp_path / "tasks", TEXT, 4)
    save_tiny(tmp_path / "in", "llama", hidden_size=128)
    quantize_file(tmp_path / "in", tmp_path / "packed", "int4_g32")
    export_model(tmp_path / "packed", tmp_path / "decoded", "hf", "float32")
    row = program["compare"]({"packed": tmp_path / "packed", "decoded": tmp_path / "decoded"}, tmp_path / "tasks")
    assert row["questions"] == 4
    for name in program["MODELS"]:
        assert row[name]["other_answers"] == 0
        assert row[name]["largest_difference"] < 1e-4

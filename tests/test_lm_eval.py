"""Packed folders and GGUF files in lm-eval answer as the decoded model; skipped where lm_eval is not installed."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from bitplan import choose_formats, open_tensors
from tests.files.engines.tiny_models import save_tiny

ROOT = Path(__file__).parents[1]
TEXT = "the heath\nthe teeth\nhe eats\nthat hat\nthen he hates\nthese\nhe sat\nthe east\n"


MIXED = {"*mlp*": "mxfp4", "*self_attn*": "int8_row"}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The benchmark's functions, a task and a model."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm_eval")
    folder = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "benchmarks"))
        functions = runpy.run_path(str(ROOT / "benchmarks" / "task_accuracy.py"))
    functions["write_task"](folder / "tasks", TEXT, 4)
    save_tiny(folder / "in", "llama", hidden_size=128)
    with open_tensors(folder / "in") as file:
        choose_formats(file.specs, MIXED).save(folder / "plan.json")
    return functions, folder


@pytest.mark.filterwarnings("ignore")  # of lm-eval and its libraries
@pytest.mark.parametrize("fmt", ["int4_g32", "int8_row", "mxfp4", "q4_k_gguf", "plan.json", "gguf:q8_0_gguf"])
def test_packed_models_answer_as_the_decoded_one_does(program, fmt, tmp_path):
    functions, folder = program
    given = str(folder / fmt) if fmt.endswith(".json") else fmt
    row = functions["compare"](functions["pack"](folder / "in", given, tmp_path), folder / "tasks")
    assert row["questions"] == 4
    ran = [name for name in functions["MODELS"] if name in row]
    assert len(ran) == (2 if fmt.startswith("gguf") else 3)
    for name in ran:
        assert row[name]["other_answers"] == 0
        assert row[name]["largest_difference"] < 1e-4

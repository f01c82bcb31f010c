"""The demo's decisions and its GPU part, by themselves: a plan from literal errors, and the benches on a CPU."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from bitplan.cli.demo.gpu import GpuSizes, measure_fp8, measure_fused, plan_fp8
from bitplan.cli.demo.plan import BUDGET_PER_LAYER, choose_formats, manifest_of, worst_and_best
from bitplan.cli.demo.training import LEARNING_RATE, WARMUP, rate_shape
from bitplan.cli.demo.trees import made_table
from bitplan.measure.speed.crossover_files import gpu_fingerprint
from bitplan.plan import Manifest
from bitplan.report import write_report

SHAPES = {
    "tokens.weight": (65, 128),
    "blocks.0.norm_in.weight": (128,),
    "blocks.0.up.weight": (512, 128),
    "blocks.0.down.weight": (128, 512),
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def errors(up, down):
    """A layer's errors from that of its best 4-bit format."""
    return {
        f"blocks.0.{name}": {
            "int8_row": 0.001,
            "fp8_e4m3_row": 0.01,
            "q4_0_gguf": q4,
            "nvfp4": 1.5 * q4,
            "mxfp4": 2 * q4,
        }
        for name, q4 in (("up", up), ("down", down))
    }


@pytest.mark.parametrize(
    ("up", "down", "expected"),
    [
        (BUDGET_PER_LAYER, BUDGET_PER_LAYER, ("q4_0_gguf", "q4_0_gguf")),  # exactly the budget of two layers
        (BUDGET_PER_LAYER, 1.01 * BUDGET_PER_LAYER, ("q4_0_gguf", "int8_row")),  # the cheaper of the two
        (3 * BUDGET_PER_LAYER, BUDGET_PER_LAYER, ("int8_row", "q4_0_gguf")),
        (3 * BUDGET_PER_LAYER, 3 * BUDGET_PER_LAYER, ("int8_row", "int8_row")),
    ],
)
def test_layers_go_to_four_bits_while_their_errors_fit_the_budget(up, down, expected):
    plan = choose_formats(errors(up, down), SHAPES)
    assert (plan["blocks.0.up.weight"].format, plan["blocks.0.down.weight"].format) == expected
    assert plan["tokens.weight"].format == "bfloat16"
    assert plan["blocks.0.norm_in.weight"].format == "float32"
    assert f"output error {up:.3g} in q4_0_gguf" in plan["blocks.0.up.weight"].reason
    assert plan.entries["blocks.0.up.weight"].role == "mlp_weight"


def test_the_best_format_of_a_width_is_taken_by_its_error():
    result = errors(0.001, 0.001)
    result["blocks.0.up"] |= {"nvfp4": 0.0001}
    assert choose_formats(result, SHAPES)["blocks.0.up.weight"].format == "nvfp4"


def test_the_manifest_resolves_to_the_plan():
    plan = choose_formats(errors(3 * BUDGET_PER_LAYER, BUDGET_PER_LAYER), SHAPES)
    resolved = Manifest.from_document(manifest_of(plan)).resolve(SHAPES)
    assert {name: choice.format for name, choice in resolved.items()} == {name: plan[name].format for name in plan}


def test_worst_first_then_best():
    rows = {str(index): {"int4": float(index)} for index in range(6)}
    assert worst_and_best(rows, "int4", 2) == [("5", 5.0), ("4", 4.0), ("1", 1.0), ("0", 0.0)]
    assert len(worst_and_best(rows, "int4", 3)) == 6


def test_the_learning_rate_rises_and_falls():
    steps = 100
    rates = [LEARNING_RATE * rate_shape(step, steps) for step in range(steps)]
    assert rates.index(max(rates)) == WARMUP - 1
    assert 0.1 * LEARNING_RATE <= rates[-1] < 0.11 * LEARNING_RATE


def test_the_made_table_depends_on_its_seed():
    (x, y), (again, _), (other, _) = made_table(500, 3), made_table(500, 3), made_table(500, 4)
    assert np.array_equal(x, again)
    assert not np.array_equal(x, other)
    assert 0.3 < y.mean() < 0.7


def test_fp8_is_measured_into_files_that_a_report_shows(tmp_path):
    sizes = GpuSizes(LLAMA, sweep=((32, 1),), iters=3, timings=("eager",))
    session = plan_fp8(tmp_path, sizes, "cpu")
    message = []
    rows = measure_fp8(session, lambda amount, label: message.append((amount, label)))
    assert len(message) == len(session.plan.ways()) == 4
    assert len(rows) == 4
    sections = write_report([tmp_path / "fp8-policy.json"], tmp_path / "report.html")
    assert sections[0].title == "Speed"


def test_fused_products_are_measured_into_a_file_that_a_report_shows(tmp_path):
    sizes = GpuSizes(LLAMA, formats=("int4_g32",), side=64, rows=(1, 4))
    rows = measure_fused(
        tmp_path,
        sizes,
        "cpu",
        lambda *_: None,
        {"gpu": "a GPU"},
        timer=lambda call, repeats: [float(call().shape[0])] * repeats,
    )
    assert [(row["format"], row["rows"]) for row in rows] == [("int4_g32", 1), ("int4_g32", 4)]
    assert all(row["decode_ms"] == row["rows"] for row in rows)
    assert len(json.loads((tmp_path / "crossover.json").read_text())["weights"]) == 1
    sections = write_report([tmp_path / "crossover.json"], tmp_path / "report.html")
    assert sections[0].title == "Speed"


@pytest.mark.gpu
def test_the_gpu_part_on_a_gpu(tmp_path):
    sizes = GpuSizes(
        LLAMA | {"hidden_size": 1024, "intermediate_size": 2048}, sweep=((256, 1),), side=1024, rows=(1, 256)
    )
    assert measure_fp8(plan_fp8(tmp_path, sizes, "cuda"), lambda *_: None)
    rows = measure_fused(tmp_path, sizes, "cuda", lambda *_: None, gpu_fingerprint(torch.cuda.get_device_name()))
    assert {row["format"] for row in rows} == {"mxfp4", "q4_0_gguf"}
    assert all(row["fused_ms"] > 0 for row in rows)

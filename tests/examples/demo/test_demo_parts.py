"""The demo's decisions and its GPU part, by themselves: a plan as rules, and the benches on a CPU."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from bitplan.packed.crossover import gpu_fingerprint
from bitplan.plan import Manifest, Plan
from bitplan.plan.plan import Choice, Planned
from bitplan.report import write_report
from examples.demo.run import (
    LEARNING_RATE,
    WARMUP,
    GpuSizes,
    made_table,
    manifest_of,
    measure_fp8,
    measure_fused,
    plan_fp8,
    rate_shape,
    worst_and_best,
)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_the_manifest_resolves_to_the_plan():
    shapes = {"tokens.weight": (65, 128), "blocks.0.up.weight": (512, 128), "blocks.0.down.weight": (128, 512)}
    formats = dict(zip(shapes, ("int8_row", "nvfp4", "nvfp4"), strict=True))
    plan = Plan({name: Planned(Choice(formats[name], "why"), shape, "other") for name, shape in shapes.items()})
    resolved = Manifest.from_document(manifest_of(plan)).resolve(shapes)
    assert {name: choice.format for name, choice in resolved.items()} == formats


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
    assert len(message) == len(session.ways()) == 4
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

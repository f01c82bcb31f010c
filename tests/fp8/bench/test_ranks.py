"""The benchmark in two processes on the CPU, as torchrun starts them: real groups, one report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bitplan.fp8.policy.report import Report
from tests.trees.distributed.workers import run_together

ROOT = Path(__file__).parents[3]
CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
PROGRAM = """
import os, pathlib, torch
os.chdir(pathlib.Path(__file__).parent)
torch.set_num_threads(1)
from bitplan.fp8.bench.layer_bench import BenchOptions
from bitplan.fp8.bench.session import plan_session, run_session

options = BenchOptions("config.json", tp_size=2, ep_size=2, etp_size=1, warmup=1, iters=4, shape_sweep=((16, 1),),
                       report_path="r.jsonl", fp8_policy_path="p.json", products_apart=False, device="cpu")
result = run_session(plan_session(options))
pathlib.Path(f"rank{os.environ['RANK']}").write_text("first" if result is not None else "other")
"""


def run_under_torchrun(count, command, folder):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(torchrun + command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("start", [run_together, pytest.param(run_under_torchrun, marks=pytest.mark.long)])
def test_two_processes_share_the_layers(start, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "program.py").write_text(PROGRAM)
    start(2, [str(tmp_path / "program.py")], tmp_path)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["first", "other"]
    report = Report.load(tmp_path / "r.jsonl")
    assert report.settings["ranks"] == 2
    assert {(row.kind, row.shape, row.tp, row.num_gemms) for row in report.rows} == {
        ("layernorm_column", (384, 128), 2, None),
        ("row", (128, 128), 2, None),
        ("column_grouped", (256, 128), None, 2),
        ("row_grouped", (128, 128), None, 2),
    }
    assert {(row.status, row.timing) for row in report.rows} == {("ok", "eager")}
    assert (tmp_path / "p.json").exists()

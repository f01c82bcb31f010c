"""A policy of version 1 and small reports, for the tests of adaptive FP8."""

from __future__ import annotations

from bitplan.fp8.policy.report import Fingerprint, Report, Row

H200 = Fingerprint("NVIDIA H200", "580.82", "2.11.0", "3.6.0", "0.1.0", "abc1234")

# LoongForge's example, letter for letter.
VERSION_1 = """{
  "version": 1,
  "speedup_threshold": 1.0,
  "rules": {
    "layernorm_column": {
      "qkv": [{"tp": 1, "min_tokens": 16384, "measured_speedup": 1.03}],
      "fc1": [{"tp": 1, "min_tokens": 4096,  "measured_speedup": 1.18}]
    },
    "row": {
      "proj": [{"tp": 1, "min_tokens": 16384, "measured_speedup": 1.05}],
      "fc2":  [{"tp": 1, "min_tokens": 8192,  "measured_speedup": 1.23}]
    },
    "column_grouped": [
      {"etp": 1, "num_gemms": 64, "min_tokens": 424, "measured_speedup": 1.02}
    ],
    "row_grouped": [
      {"etp": 1, "num_gemms": 64, "min_tokens": 424, "measured_speedup": 1.04}
    ]
  }
}
"""

NOISE = (1.0, 1.01, 0.99, 1.02, 0.98, 1.005, 0.995, 1.015, 0.985, 1.0)  # ten turns, two per cent


def pair(tokens, speedup, *, turns=10, noise=NOISE, **layer):
    """A BF16 and an FP8 row, timed in turns, FP8 `speedup` times as fast. The GPU drifts by a half over the turns."""
    dense = {"part": "llm", "kind": "row", "name": "fc2", "shape": (4096, 14336), "tp": 1}
    common = {"gemm": "module", "timing": "graph", "tokens": tokens, "status": "ok", "in_turns": True}
    given = common | (dense if "kind" not in layer else {"part": "llm"}) | layer
    drift = [1 + 0.5 * turn / turns for turn in range(turns)]
    bf16 = tuple(2.0 * each for each in drift)
    fp8 = tuple(2.0 * each * noise[turn % len(noise)] / speedup for turn, each in enumerate(drift))
    return [Row(precision="bf16", samples_ms=bf16, **given), Row(precision="fp8", samples_ms=fp8, **given)]


def series(speedups, **layer):
    """Rows of one layer: token count to speedup."""
    return [row for tokens, speedup in speedups.items() for row in pair(tokens, speedup, **layer)]


def report(rows, *, recipe="blockwise", fingerprint=H200, where="report.json"):
    return Report(fingerprint, recipe, tuple(rows), "test", {}, where)


def experts(kind, **more):
    """What an expert's rows have: DeepSeek-V3 at EP 4."""
    shape = (4096, 7168) if kind == "column_grouped" else (7168, 2048)
    return {"kind": kind, "shape": shape, "etp": 1, "ep": 4, "num_gemms": 64, "topk": 8, "routing": "uniform"} | more

"""Random version 2 policies of two small layers, whole and by products, of two recipes."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from bitplan.fp8.policy.report import answer_of
from bitplan.fp8.policy.rules import LayerRule, Point, Policy
from tests.fp8.policy.fp8_samples import H200

COUNTS = (16, 32, 64, 128, 256)
TOKENS = st.one_of(st.sampled_from(COUNTS), st.integers(8, 300), st.integers(1, 600))
LAYERS = {"fc2": (128, 256), "proj": (128, 128)}


def random_policy(seed):
    """Speedups around 1, more often above; some counts were not measured, some failed, some rules are missing."""
    draw = random.Random(seed)
    threshold = draw.choice([1.0, 1.0, 1.1])
    rules = []
    for name, shape in LAYERS.items():
        for recipe in ("tensorwise", "blockwise"):
            for gemm in ("module", "fprop", "dgrad", "wgrad"):
                points = _points(draw, threshold)
                if points and draw.random() < 0.8:
                    layer = {"part": "llm", "kind": "row", "name": name, "shape": shape, "tp": 1}
                    rules.append(LayerRule(**layer, recipe=recipe, gemm=gemm, points=points))
    return Policy(rules, H200, threshold, 0.95)


def _points(draw, threshold):
    points = []
    for tokens in COUNTS:
        if draw.random() < 0.05:
            points.append(Point(tokens, "unmeasured", note="fp8 failed: no kernel"))
        elif draw.random() < 0.8:
            speedup = draw.uniform(0.7, 1.5)
            low, high = speedup * draw.uniform(0.95, 1.0), speedup * draw.uniform(1.0, 1.05)
            points.append(Point(tokens, answer_of(low, high, threshold), speedup, low, high, 10))
    return tuple(points)


POLICIES = st.integers(0, 2**32).map(random_policy)

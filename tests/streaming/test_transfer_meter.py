"""Transfer facts: the median of the first steps, settled once; nothing crosses where all blocks are resident."""

from __future__ import annotations

from bitplan.streaming.selective.decide import TransferFacts
from bitplan.streaming.selective.training_policy import TransferMeter
from bitplan.streaming.telemetry import StreamStepStats


def step_of(step, compute_ms, nbytes, gb_per_s):
    values = dict.fromkeys(StreamStepStats.__dataclass_fields__, 0)
    return StreamStepStats(
        **values | {"step": step, "compute_ms": compute_ms, "bytes_h2d": nbytes, "h2d_gb_per_s": gb_per_s}
    )


def test_the_median_is_settled_once():
    meter = TransferMeter()
    assert meter.settle() is None
    meter.note(None, 1000)
    for step, compute_ms in enumerate((500.0, 20.0, 30.0)):
        meter.note(step_of(step, compute_ms, 1500, 0.002), 1000)
        meter.note(step_of(step, 9e9, 1500, 0.002), 1000)  # the same step again counts once
    assert meter.settle() == TransferFacts(30.0, 2000.0, 1.5)
    meter.note(step_of(9, 1.0, 10, 1.0), 1000)
    assert meter.settle() == TransferFacts(30.0, 2000.0, 1.5)
    assert meter.to_document() == {"compute_ms": 30.0, "bytes_per_ms": 2000.0, "crossings": 1.5}


def test_resident_blocks_have_nothing_to_save():
    meter = TransferMeter()
    meter.note(step_of(0, 5.0, 0, None), 10**9)
    assert meter.settle().bytes_to_save(10**9) < 0

"""The next block is decoded beside the computation: on a device that does so as late as it may, nothing changes."""

from __future__ import annotations

import copy

import pytest
import torch

from bitplan.runtime.streaming.transfer.devices import Mark, SimulatedDevice
from tests.runtime.streaming.stream_samples import (
    assert_equal,
    batch,
    decoded_twin,
    make_stack,
    streaming,
    train_steps,
)


class LateDevice(SimulatedDevice):
    """Work aside is done when something waits for it, in order, and not before."""

    copies_in_background = True

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.undone, self.done = [], 0

    def claim(self, slot):
        """Nothing to do, as on a GPU: a copy waits for what reads the slot."""

    def run_aside(self, work, *after):
        mark = Mark()
        self.undone.append((mark, work))
        return mark

    def wait_for(self, mark):
        while any(one is mark for one, _ in self.undone):
            self.undone.pop(0)[1]()
            self.done += 1

    def _copy(self, direction, queue, target, source, after):
        for mark in after:
            self.wait_for(mark)
        return super()._copy(direction, queue, target, source, after)


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "pairs"])
def test_work_aside_is_waited_for_by_the_computation_and_by_copies(checkpointing):
    model = make_stack(adapters=True)
    source = copy.deepcopy(model)
    model.checkpointing = source.checkpointing = checkpointing
    device = LateDevice()
    with streaming(model, device, formats="int8_row", slots=2) as stream:
        expected = train_steps(decoded_twin(source, stream.formats), 2)
        for got, wanted in zip(train_steps(model, 2, stream=stream), expected, strict=True):
            assert_equal(got, wanted)
    assert device.done > 4


def test_memory_that_is_short_goes_to_slots_and_nothing_is_decoded_ahead():
    model = make_stack(adapters=False).eval()
    expected = []
    for capacity in (None, 500_000):
        device = LateDevice(capacity)
        with streaming(model, device, formats="int8_row", slots=2, train="nothing") as stream, torch.no_grad():
            expected.append(model(batch(0)))
            assert len(stream._loader.ring.scratches) == (2 if capacity is None else 1)
        assert bool(device.done) == (capacity is None)
    assert torch.equal(*expected)

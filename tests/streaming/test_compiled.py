"""Streamed blocks by torch.compile: the numbers of blocks that are not compiled, from one compilation for all."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.streaming.stream_samples import assert_equal, make_stack, streaming, train_steps


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    ("formats", "checkpointing", "train", "compilations"),
    [
        (None, "none", "weights", 1),
        pytest.param("int8_row", "reentrant", "adapters", 2, marks=pytest.mark.long),  # forward runs without gradients
    ],
)
def test_one_compilation_serves_all_blocks(formats, checkpointing, train, compilations):
    from torch._dynamo.testing import CompileCounterWithBackend  # takes a second

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    results = []
    plain = make_stack(adapters=train == "adapters", count=4)
    plain.checkpointing = checkpointing
    for model, options in ((copy.deepcopy(plain), False), (plain, {"backend": counter, "dynamic": False})):
        with streaming(model, formats=formats, train=train, slots=2, compile=options) as stream:
            results.append(train_steps(model, 2, stream=stream))
        results[-1].append({name: one.detach() for name, one in model.named_parameters()})
        assert "forward" not in vars(model.layers[0])  # closed: the blocks' own forward is back
    for plain_step, compiled_step in zip(*results, strict=True):
        assert_equal(compiled_step, plain_step)  # this backend calls the same kernels
    assert counter.frame_count == compilations
    torch._dynamo.reset()

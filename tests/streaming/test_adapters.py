"""Training adapters over a frozen, streamed base: gradients and updates as in the resident model, to the bit."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from bitplan.base.errors import StreamError
from bitplan.streaming.block_stream import stream_blocks
from bitplan.streaming.transfer.devices import Mark, SimulatedDevice
from tests.crosses import few
from tests.streaming.stream_samples import (
    CHECKPOINTING,
    COUNT,
    OPTIONS,
    LowRank,
    assert_equal,
    batch,
    decoded_twin,
    gradients,
    make_stack,
    streaming,
    train_steps,
)

MIXED = {"layers.0": "int8_row", "layers.*.down.weight": "mxfp4", "layers.3": "int8_g128"}
FORMATS = ["bfloat16", "int8_row", "int8_g128", "fp8_e4m3_row", "mxfp4", MIXED]


@pytest.mark.cross("slots", [2, 4])
@pytest.mark.cross("checkpointing", CHECKPOINTING)
def test_gradients_and_updates_equal_the_resident_model(checkpointing, slots):
    model = make_stack(adapters=True)
    model.checkpointing = checkpointing
    resident = copy.deepcopy(model)
    expected = train_steps(resident, 3, micro_batches=2)
    with streaming(model, slots=slots) as stream:
        result = train_steps(model, 3, stream=stream, micro_batches=2)
        for got, wanted in zip(result, expected, strict=True):
            assert_equal(got, wanted)
        assert stream.stats.bytes_d2h == 0
    assert_equal(dict(model.named_parameters()), dict(resident.named_parameters()))


@pytest.mark.parametrize(
    ("formats", "checkpointing"),
    few([*((formats, "none") for formats in FORMATS), *((MIXED, kind) for kind in CHECKPOINTING[1:])], 4),
    ids=str,
)
def test_formats_equal_a_resident_model_with_the_decoded_weights(formats, checkpointing):
    model = make_stack(adapters=True)
    source = copy.deepcopy(model)
    model.checkpointing = source.checkpointing = checkpointing
    with streaming(model, formats=formats) as stream:
        expected = train_steps(decoded_twin(source, stream.formats), 2)
        for got, wanted in zip(train_steps(model, 2, stream=stream), expected, strict=True):
            assert_equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype):
    model = make_stack(adapters=True, dtype=dtype)
    expected = train_steps(copy.deepcopy(model), 2, dtype=dtype)
    with streaming(model, formats="bfloat16" if dtype == torch.bfloat16 else None) as stream:
        assert set(stream.formats.values()) == {str(dtype).removeprefix("torch.")}
        for got, wanted in zip(train_steps(model, 2, stream=stream, dtype=dtype), expected, strict=True):
            assert_equal(got, wanted)


def test_steps_with_format_switches():
    model = make_stack(adapters=True, count=4)
    source = copy.deepcopy(model)
    switches = {2: "int8_row", 4: {"layers.1": "mxfp4"}, 6: {"layers.2.down.weight": "float32"}, 9: "bfloat16"}
    with streaming(model, formats=None, slots=2) as stream:

        def switch(step: int) -> None:
            if step in switches:
                before = stream.formats
                stream.set_formats(switches[step])
                assert stream.formats == before  # not before the boundary

        result = train_steps(model, 12, stream=stream, before=switch)
        assert set(stream.formats.values()) == {"bfloat16", "float32"}
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in source.parameters())

    resident = copy.deepcopy(source)
    base = {name: one.detach().clone() for name, one in source.named_parameters()}
    with streaming(copy.deepcopy(source)) as shadow:

        def decode_base(step: int) -> None:
            if step not in switches:
                return
            shadow.set_formats(switches[step])
            shadow.begin_step(step)
            shadow.end_step()
            twin = dict(decoded_twin(source, shadow.formats).named_parameters())
            with torch.no_grad():
                for name, one in resident.named_parameters():
                    if not one.requires_grad:
                        one.copy_(twin[name])

        expected = train_steps(resident, 12, before=decode_base)
    for got, wanted in zip(result, expected, strict=True):
        assert_equal(got, wanted)
    for name, one in model.named_parameters():  # the base itself never lost anything
        assert one.requires_grad or torch.equal(one, base[name]), name


def test_a_switch_of_formats_does_not_write_over_the_truth():
    """Two matrices of one shape trade formats: the layout keeps its size, and one is read from the other's place."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).bfloat16() for _ in range(3)])
    source = copy.deepcopy(model)
    x = torch.randn(2, 32).bfloat16()
    with streaming(model, blocks="*", formats={"*.0.weight": "int8_row"}, train="nothing", slots=2) as stream:
        stream.set_formats({"*.0.weight": "bfloat16", "*.1.weight": "int8_row"})
        stream.begin_step(0)
        with torch.no_grad():
            assert torch.equal(model(x), decoded_twin(source, stream.formats)(x))
        stream.end_step()
    assert_equal(dict(model.named_parameters()), dict(source.named_parameters()))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_backward_walks_in_reverse_and_both_turns_save_transfers(checkpointing):
    model, device = make_stack(adapters=True), SimulatedDevice()
    model.checkpointing = "non-reentrant" if checkpointing else "none"
    with streaming(model, device, slots=3) as stream:
        train_steps(model, 3, stream=stream)
        stream.synchronize()
        last = stream.stats.last
        assert last.loads == 2 * (COUNT - 3)
        assert last.prefetch_misses == 0


@pytest.mark.parametrize(("checkpointing", "alive"), [("none", COUNT), ("non-reentrant", 0)])
def test_non_reentrant_checkpointing_still_frees_activations(checkpointing, alive):
    """Torch applies the innermost hooks only: ours must not switch off those of checkpointing."""
    model = make_stack(adapters=True)
    model.checkpointing = checkpointing
    saved: list[weakref.ref] = []  # the input of `up.up`, which its weight's gradient needs
    for layer in model.layers:
        layer.up.up.register_forward_pre_hook(lambda _, args: saved.append(weakref.ref(args[0])))
    with streaming(model) as stream:
        stream.begin_step(0)
        loss = model(batch(0)).sum()
        assert sum(tensor() is not None for tensor in saved) == alive
        loss.backward()
        stream.end_step()


def test_outer_hooks_are_kept():
    model = make_stack(adapters=True)
    resident = copy.deepcopy(model)
    resident(batch(0)).sum().backward()
    with streaming(model, slots=2) as stream:
        stream.begin_step(0)
        with save_on_cpu():
            model(batch(0)).sum().backward()
        stream.end_step()
        assert_equal(gradients(model), gradients(resident))


def test_backward_after_the_step_is_refused():
    model = make_stack(adapters=True)
    with streaming(model) as stream:
        stream.begin_step(0)
        loss = model(batch(0)).sum()
        stream.end_step()
        with pytest.raises(StreamError, match=r"layers\.\d: backward came after its step ended"):
            loss.backward()
        with pytest.raises(StreamError, match=r"layers\.0: computed with gradients outside a step"):
            model(batch(0))


def test_weights_read_as_slices_and_transposes():
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48, bias=False)

        def forward(self, x):
            query, key, value = self.qkv.weight.chunk(3)
            return x + (x @ query.t()) * (x @ key.t()) @ value

    torch.manual_seed(0)
    model = nn.Sequential(LowRank(nn.Linear(16, 16)), *[Fused().requires_grad_(False) for _ in range(5)])
    resident, x = copy.deepcopy(model), torch.randn(4, 16)
    resident(x).sum().backward()
    model[0].down.requires_grad_(True)
    with streaming(model, blocks="*", slots=2) as stream:
        stream.begin_step(0)
        model(x).sum().backward()
        stream.end_step()
        assert_equal(gradients(model), gradients(resident))


class SparseMix(nn.Module):
    """Autograd saves its sparse matrix, which has no address."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        mixing = torch.eye(x.shape[0]).roll(1, 0).to_sparse()
        return torch.sparse.mm(mixing, self.base(x) * self.scale)


def test_blocks_that_save_sparse_tensors():
    model = nn.Sequential(*[SparseMix() for _ in range(3)])
    resident = copy.deepcopy(model)
    x = torch.randn(5, 8)
    resident(x).square().sum().backward()
    with stream_blocks(model, "*", device="cpu", slots=2) as stream:
        stream.begin_step(0)
        model(x).square().sum().backward()
        stream.end_step()
    assert_equal(
        *({name: one.grad for name, one in each.named_parameters() if one.requires_grad} for each in (model, resident))
    )


@pytest.mark.parametrize("formats", [None, "int8_row"])
def test_blocks_that_stay_cost_nothing_once_they_have_arrived(formats):
    """After the first step no mark, wait or hook of autograd is left; when weights change all of it comes back."""
    model = make_stack(adapters=True)
    model.checkpointing = "reentrant"
    marks = []

    class Counting(SimulatedDevice):
        def mark(self) -> Mark:
            marks.append(1)
            return super().mark()

    def step(number):
        model.zero_grad()
        stream.begin_step(number)
        before = len(marks)
        loss = model(batch(0)).sum()
        loss.backward()
        taken, found = len(marks) - before, gradients(model)
        stream.end_step()
        return loss.detach(), found, taken

    with stream_blocks(model, "layers.*", device=Counting(), formats=formats, options=OPTIONS) as stream:
        first = step(0)
        second = step(1)
        assert (first[2] > 0, second[2]) == (True, 0)
        assert torch.equal(second[0], first[0])
        assert_equal(second[1], first[1])
        assert stream.stats.last.prefetch_hits >= COUNT
        stream.begin_step(2)
        model.checkpointing = "none"
        late = model(batch(0)).sum()
        model.checkpointing = "reentrant"
        stream.end_step()
        with torch.no_grad():
            model.layers[2].down.weight.mul_(2.0)
        changed = step(3)
        assert changed[2] > 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()
        settled = step(4)
        assert settled[2] == 0
        assert torch.equal(settled[0], changed[0])
        assert_equal(settled[1], changed[1])
        assert not torch.equal(settled[0], first[0])

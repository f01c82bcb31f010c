"""Weights that somebody else changes: the stream sends them from the next boundary on, or refuses them by name."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from bitplan.base.errors import StreamError
from bitplan.streaming.block_stream import BlockStream
from tests.streaming.stream_samples import assert_equal, batch, decoded_twin, make_stack, streaming
from tests.streaming.test_weights import SETTINGS, adamw, masters_of, run_streamed

MIXED = {"layers.0": "int8_row", "layers.1": "bfloat16", "layers.2.up.*": "mxfp4"}  # the rest in its own type


def other_weights(model) -> dict[str, torch.Tensor]:
    return {
        name: one + 0.1 if one.is_floating_point() and "gain" not in name else one
        for name, one in copy.deepcopy(model.state_dict()).items()
    }


def load(model, _stream) -> None:
    model.load_state_dict(other_weights(model))


def assign(model, _stream) -> None:
    model.load_state_dict(other_weights(model), assign=True)


def edit(model, _stream) -> None:
    with torch.no_grad():
        for layer in model.layers:
            layer.norm.weight.add_(0.1)
            layer.down.weight.mul_(1.5)


def replace(model, _stream) -> None:
    for layer in model.layers:
        old = layer.down.weight
        layer.down.weight = nn.Parameter(old.detach() * 1.5, requires_grad=old.requires_grad)


def set_data(model, _stream) -> None:
    for layer in model.layers:
        layer.down.weight.data = layer.down.weight.detach() * 1.5


def write_data(model, stream) -> None:
    for layer in model.layers:
        layer.down.weight.data.mul_(1.5)
    stream.refresh()


def run_step(model, stream, step: int) -> torch.Tensor:
    stream.begin_step(step)
    out = model(batch(step))
    out.square().mean().backward()
    stream.end_step()
    return out.detach()


def expected_output(model, stream) -> torch.Tensor:
    resident = make_stack(adapters=True, count=4)
    resident.load_state_dict(model.state_dict())
    return decoded_twin(resident, stream.formats)(batch(0)).detach()


@pytest.mark.parametrize(
    ("change", "host"),
    [*((one, "pinned") for one in (load, assign, edit, replace, set_data, write_data)), (edit, "file")],
)
def test_changed_weights_are_sent_from_the_next_boundary_on(change, host):
    model = make_stack(adapters=True, count=4)
    with streaming(model, formats=MIXED, host=host, slots=2) as stream:
        before = run_step(model, stream, 0)
        change(model, stream)
        expected = expected_output(model, stream)
        with torch.no_grad():
            assert torch.equal(model(batch(0)), expected)  # outside a step too
        assert torch.equal(run_step(model, stream, 0), expected)
        assert not torch.equal(before, expected)
        change(model, stream)
        stream.set_formats("int8_row")  # blocks whose formats stay, and those that switch
        out = run_step(model, stream, 0)
        assert torch.equal(out, expected_output(model, stream))


@pytest.mark.parametrize("change", [load, assign, edit, replace, set_data, write_data])
def test_changed_weights_are_trained_on(change):
    """Masters are what was loaded, and AdamW's moments stay: as a model that is not streamed."""
    model = make_stack(adapters=False, count=4)
    resident = copy.deepcopy(model)
    optimizers = [
        adamw(resident.layers.parameters()),
        adamw([*resident.first.parameters(), *resident.head.parameters()]),
    ]
    for part in range(2):
        for step in range(2):
            resident(batch(10 * step)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if part == 0:
            with torch.no_grad():
                for one, other in zip(resident.parameters(), changed_twin(resident, change).parameters(), strict=True):
                    one.copy_(other)
        optimizers[1] = adamw([*resident.first.parameters(), *resident.head.parameters()])
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        run_streamed(model, stream, 2, 1)
        change(model, stream)
        run_streamed(model, stream, 2, 1)
        assert_equal(masters_of(stream), {name: one for name, one in resident.named_parameters() if "layers" in name})
    assert_equal(dict(model.named_parameters()), dict(resident.named_parameters()))


def changed_twin(model, change):
    class NoStream:
        def refresh(self) -> None: ...

    twin = copy.deepcopy(model)
    change(twin, NoStream())
    return twin


def test_bfloat16_weights_keep_the_masters_of_what_did_not_change():
    model = make_stack(adapters=False, dtype=torch.bfloat16, count=3)
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        run_streamed(model, stream, 2, 1, torch.bfloat16)
        masters = {name: one.clone() for name, one in masters_of(stream).items()}
        with torch.no_grad():
            model.layers[1].down.weight.mul_(2)
        stream.synchronize()  # does not write the masters over the change
        stream.refresh()
        stream.begin_step(2)
        now = masters_of(stream)
        changed = "layers.1.down.weight"
        assert torch.equal(now[changed], model.layers[1].down.weight.float())
        assert_equal(
            {name: one for name, one in now.items() if name != changed},
            {k: v for k, v in masters.items() if k != changed},
        )


def test_state_dict_holds_what_was_trained_without_a_call():
    model = make_stack(adapters=False, dtype=torch.bfloat16, count=3)
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        run_step_in(model, stream, torch.bfloat16)
        saved = {name: one.clone() for name, one in model.state_dict().items()}
        for name, master in masters_of(stream).items():
            assert torch.equal(saved[name], master.bfloat16()), name


def run_step_in(model, stream, dtype) -> None:
    stream.begin_step(0)
    model(batch(0, dtype)).square().mean().backward()
    stream.end_step()


def test_loading_waits_for_the_update_under_way():
    model = make_stack(adapters=False, count=3)
    wanted = other_weights(model)
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        run_with_held_update(model, stream)
        model.load_state_dict(wanted)
        stream.begin_step(1)
        assert_equal(masters_of(stream), {name: one for name, one in wanted.items() if name in masters_of(stream)})


def run_with_held_update(model, stream) -> None:
    stream.begin_step(0)
    model(batch(0)).square().mean().backward()
    gate = threading.Event()
    stream.training._updates.submit(gate.wait, "held back")
    stream.end_step()
    threading.Timer(0.2, gate.set).start()


def test_an_edit_that_did_not_wait_for_the_update_is_refused_once():
    model = make_stack(adapters=False, count=3)
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        run_with_held_update(model, stream)
        edit(model, stream)
        with pytest.raises(
            StreamError, match=r"layers\.0\.norm\.weight.* changed after end_step and before synchronize"
        ):
            stream.begin_step(1)
        run_step(model, stream, 1)
        stream.synchronize()
        edit(model, stream)
        run_step(model, stream, 2)


def test_an_edit_within_a_step_that_trains_the_weights_is_refused():
    model = make_stack(adapters=False, count=3)
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        stream.begin_step(0)
        model(batch(0)).square().mean().backward()
        edit(model, stream)
        with pytest.raises(StreamError, match=r"layers\.0\.norm\.weight.* changed within step 0"):
            stream.end_step()
        run_step(model, stream, 0)


def unfreeze(layer) -> None:
    layer.up.base.weight.requires_grad_(True)


def widen(layer) -> None:
    layer.up.base.weight = nn.Parameter(torch.zeros(3, 3), requires_grad=False)


def halve(layer) -> None:
    layer.up.base.half()


def remove(layer) -> None:
    layer.up.base.weight = None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (unfreeze, "requires gradients now and is streamed as frozen"),
        (widen, r"is \(3, 3\) float32 now and was streamed as \(256, 128\) float32"),
        (halve, r"is \(256, 128\) float16 now"),
        (remove, "is gone from its module"),
    ],
)
def test_what_cannot_be_streamed_as_it_was_is_refused_by_name(change, says):
    model = make_stack(adapters=True, count=3)
    with streaming(model) as stream:
        run_step(model, stream, 0)
        stored = model.layers[1].up.base.weight
        change(model.layers[1])
        for _ in range(2):
            with pytest.raises(StreamError, match=rf"layers\.1\.up\.base\.weight {says}"):
                stream.begin_step(1)
        with torch.no_grad(), pytest.raises(StreamError, match=r"layers\.1\.up\.base\.weight"):
            model(batch(0))
        model.layers[1].up.base.weight = None
        model.layers[1].up.base.weight = nn.Parameter(stored.detach().float(), requires_grad=False)
        model.layers[1].up.base.bias.data = model.layers[1].up.base.bias.data.float()
        run_step(model, stream, 1)


def test_a_module_that_takes_the_place_of_a_streamed_one_is_refused_by_name():
    model = make_stack(adapters=True, count=3)
    with streaming(model) as stream:
        run_step(model, stream, 0)
        own = model.layers[1].up
        model.layers[1].up = copy.deepcopy(own)
        for _ in range(2):
            with pytest.raises(StreamError, match=r"layers\.1\.up\.base\.\w+: its module was replaced"):
                stream.begin_step(1)
        with torch.no_grad(), pytest.raises(StreamError, match=r"layers\.1\.up\.base\.\w+: its module was replaced"):
            model(batch(0))
        model.layers[1].up = own
        run_step(model, stream, 1)


def test_modules_that_change_no_streamed_weight_may_come_and_go():
    model = make_stack(adapters=True, count=3)
    resident = copy.deepcopy(model)
    with streaming(model) as stream:
        run_step(model, stream, 0)
        for each in (model, resident):
            inner = each.layers[1].up
            each.layers[1].up = nn.Sequential(inner, nn.Identity())  # around a module, which is still there
        assert torch.equal(_output(model, stream), resident(batch(0)).detach())
        model.layers[1].note = nn.Linear(2, 2)
        run_step(model, stream, 2)
        model.layers[1].note.scale = nn.Parameter(torch.zeros(1, device="meta"))
        with pytest.raises(StreamError, match=r"layers\.1\.note\.scale came into a streamed block and is on meta"):
            stream.begin_step(3)


def _output(model: nn.Module, stream: BlockStream) -> torch.Tensor:
    stream.begin_step(1)
    out = model(batch(0)).detach()
    stream.end_step()
    return out


def test_weights_that_are_frozen_meanwhile_stay_as_they_are():
    model = make_stack(adapters=False, count=3)
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        run_streamed(model, stream, 1, 1)
        model.layers[1].requires_grad_(False)
        before = {name: one.clone() for name, one in masters_of(stream).items()}
        run_streamed(model, stream, 2, 1)
        after = masters_of(stream)
        for name in before:
            assert torch.equal(before[name], after[name]) == name.startswith("layers.1."), name


def test_looking_at_parameters_reads_no_numbers(monkeypatch):
    """A step in which nothing changed encodes nothing, and puts nothing on the host."""
    from bitplan.streaming import reencode_blocks

    model = make_stack(adapters=True, count=3)
    with streaming(model, formats="int8_row") as stream:
        run_step(model, stream, 0)
        monkeypatch.setattr(reencode_blocks.BlockUpkeep, "_put", lambda *_: pytest.fail("a block was encoded again"))
        run_step(model, stream, 1)
        stream.synchronize()
        assert stream.stats.last.loads == 0  # all are in slots still


def test_a_weight_may_be_frozen_and_thawed_while_an_update_is_under_way():
    """Between end_step and begin_step, without waiting; only its gradients stop, as in torch."""
    model = make_stack(adapters=False, count=3)
    resident = copy.deepcopy(model)
    optimizer = adamw(resident.parameters())
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        outside = adamw([one for name, one in model.named_parameters() if not name.startswith("layers.")])
        for step in range(4):
            for one in (model, resident):
                one.layers[1].down.weight.requires_grad_(step not in (1, 2))
            resident(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            stream.begin_step(step)
            model(batch(step)).square().mean().backward()
            outside.step()
            outside.zero_grad()
            stream.end_step()
    assert_equal(dict(model.named_parameters()), dict(resident.named_parameters()))


@pytest.mark.parametrize("formats", [None, "int8_row"])
def test_adapters_that_peft_merges_are_seen(formats):
    """peft writes through `.data`, which torch does not count."""
    peft = pytest.importorskip("peft")
    model = make_stack(adapters=False, count=3)
    config = peft.LoraConfig(target_modules=["up", "down"], init_lora_weights=False, lora_alpha=64)
    wrapped = peft.get_peft_model(model, config)
    x = batch(0)
    with torch.no_grad(), streaming(model, formats=formats) as stream:
        plain, before = model(x), copy.deepcopy(model.state_dict())

        def expected():
            """A fresh stream of the weights as they are now has no memory of earlier ones."""
            stream.refresh()
            return model(x)

        wrapped.merge_adapter()
        merged = model(x)
        assert torch.equal(merged, expected())
        with (
            wrapped.disable_adapter(),
            pytest.raises(StreamError, match=r"layers\.0: .*call unmerge_adapter\(\) first"),
        ):
            model(x)
        assert torch.equal(model(x), merged)
        wrapped.unmerge_adapter()
        assert torch.equal(model(x), expected())
        model.load_state_dict(before)
        assert torch.equal(model(x), plain)
        unloaded = wrapped.merge_and_unload()
        assert torch.equal(unloaded(x), merged)
        assert torch.equal(unloaded(x), expected())

"""Experts of mixtures that cross the bus when their router chose them: the same as the resident model, to the bit."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bitplan.base.errors import StreamError, TransferError
from bitplan.streaming.block_stream import stream_blocks
from bitplan.streaming.transfer.devices import SimulatedDevice
from bitplan.streaming.transfer.expert_memory import runs
from tests.streaming.interrupts import Interrupter
from tests.streaming.stream_samples import LowRank, arguments_of, assert_equal, gradients, streaming

HIDDEN, EXPERTS, LAYERS = 32, 16, 4


def config_of(family: str, experts: str) -> Any:
    from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig

    common = {
        "vocab_size": 64,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    }
    kinds = {
        "qwen3_moe": lambda: Qwen3MoeConfig(
            **common, num_experts=EXPERTS, moe_intermediate_size=16, intermediate_size=16, mlp_only_layers=[1]
        ),
        "mixtral": lambda: MixtralConfig(**common, num_local_experts=EXPERTS, intermediate_size=16),
        "gpt_oss": lambda: GptOssConfig(**common, num_local_experts=EXPERTS, intermediate_size=16),
    }
    config = kinds[family]()
    config._experts_implementation, config._attn_implementation = experts, "eager"
    return config


class Model(nn.Module):
    """A mixture of transformers, frozen, with low-rank adapters beside its queries."""

    def __init__(self, family: str = "qwen3_moe", experts: str = "grouped_mm") -> None:
        from transformers import AutoModel

        super().__init__()
        self.is_region = False  # checkpointed as a whole
        torch.manual_seed(0)
        self.model = AutoModel.from_config(config_of(family, experts)).train()
        with torch.no_grad():
            for one in self.model.parameters():
                one.normal_(std=0.2)
        self.model.requires_grad_(False)
        for layer in self.model.layers:
            layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)

    def forward(self, tokens: Tensor) -> Tensor:
        run = lambda tokens: self.model(tokens, use_cache=False).last_hidden_state
        hidden = checkpoint(run, tokens, use_reentrant=False) if self.is_region else run(tokens)
        return hidden.float().square().mean()

    @property
    def mixtures(self) -> list[nn.Module]:
        return [layer.mlp.experts for layer in self.model.layers if hasattr(layer.mlp, "experts")]


def tokens_of(step: int, device: str = "cpu") -> Tensor:
    """Few tokens, so that few experts are chosen."""
    return torch.randint(0, 64, (1, 3), generator=torch.Generator().manual_seed(step)).to(device)


def train(
    model: Model, steps: int, stream: Any = None, micro_batches: int = 2, device: str = "cpu"
) -> list[dict[str, Tensor]]:
    seen = []
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for step in range(steps):
        if stream is not None:
            stream.begin_step(step)
        losses = []
        for micro in range(micro_batches):
            losses.append(model(tokens_of(10 * step + micro, device)))
            losses[-1].backward()
        seen.append(gradients(model) | {"losses": torch.stack(losses).detach()})
        optimizer.step()
        optimizer.zero_grad()
        if stream is not None:
            stream.end_step()
    return seen


def by_use(model: nn.Module, device: Any = None, **options: Any) -> Any:
    return streaming(model, device, **{"blocks": "model.layers.*", "experts": "by use", "slots": 2} | options)


@pytest.mark.cross("checkpointing", ["none", "non-reentrant", "reentrant", "region", "offload"])
@pytest.mark.cross("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.cross("family", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.cross("cache", [0, 20_000])
def test_losses_and_gradients_equal_the_resident_model(family, experts, checkpointing, cache):
    model = Model(family, experts)
    if checkpointing.endswith("reentrant"):
        model.model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.model.enable_input_require_grads()
    model.is_region = checkpointing == "region"
    resident = copy.deepcopy(model)
    expected = train(resident, 4)
    device = SimulatedDevice()
    offload = checkpointing == "offload"
    with by_use(model, device, expert_cache_bytes=cache, offload_activations=offload) as stream:
        for got, wanted in zip(train(model, 4, stream), expected, strict=True):
            assert_equal(got, wanted)
        figures = stream.stats.experts
        assert 0 < figures["chosen_share"] < 0.5
        assert bool(figures["from_cache"]) == bool(cache)
        last = stream.stats.last
        assert sum(last.bytes_h2d_by_format.values()) == last.bytes_h2d
    assert (device.allocated_bytes, device.pinned_bytes) == (0, 0)
    assert_equal(dict(model.named_parameters()), dict(resident.named_parameters()))
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(model(tokens_of(3)), resident(tokens_of(3)))


def test_only_what_was_chosen_crosses():
    model, device = Model(), SimulatedDevice()
    counts = len(model.mixtures), EXPERTS
    with by_use(model, device) as stream:
        stream.begin_step(0)
        model(tokens_of(0))
        chosen = [len(mixture.expected) for mixture in stream.experts.mixtures]
        assert counts == (len(chosen), stream.experts.mixtures[0].count)
        assert all(0 < one <= 6 for one in chosen)  # three tokens of two experts
        assert stream.stats.experts["copied"] == sum(chosen)
        stream.end_step()
        sizes = stream.stats.last.bytes_h2d_by_format
        expert = 3 * HIDDEN * 16 * 4
        dense = sum(layout.nbytes for layout in stream._loader.layouts)
        assert sum(sizes.values()) == dense + sum(chosen) * expert
        assert stream.plan["model.layers.0.mlp.experts.down_proj"].format == "float32"
        assert "model.layers.0.mlp.experts.down_proj" not in stream.formats
        whole = stream.truth_of("model.layers.0", "mlp.experts.down_proj")
        assert whole.shape == (EXPERTS, HIDDEN, 16)


def test_what_was_chosen_last_is_sent_ahead_and_limits_stop_that():
    from bitplan.streaming.transfer.transfer_limits import RuntimeLimitHints

    model = Model()
    with by_use(model) as stream:
        for step, hints in enumerate([None, None, RuntimeLimitHints(1, 1, 1, suppress_speculative=True)]):
            stream.begin_step(step)
            if hints is not None:
                stream.set_limits(hints)
            ahead: list[int] = []
            send = stream.experts.memory.send_ahead

            def note(*args, ahead=ahead, send=send):
                ahead.append(args[0])
                return send(*args)

            stream.experts.memory.send_ahead = note
            with torch.no_grad():
                for _ in range(2):
                    model(tokens_of(0))
            stream.experts.memory.send_ahead = send
            stream.end_step()
            last = len(model.mixtures) - 1
            assert ahead == [[0, *range(1, last + 1), 0], [*range(1, last + 1), 0] * 2, []][step]


def test_the_cache_keeps_what_is_used_most():
    model = Model()
    with by_use(model, expert_cache_bytes=4 * 3 * HIDDEN * 16 * 4) as stream:
        memory = stream.experts.memory
        stream.begin_step(0)
        memory.load(0, [1, 2, 3, 4, 5], "test")
        for experts in ([1, 2, 3, 4, 5], [2, 3], [3]):
            memory.count(0, experts)
        memory.keep(0, [1, 2, 3, 4, 5])
        assert set(memory.cached) == {(0, 3), (0, 2), (0, 1), (0, 4)}  # most used first, then in order
        memory.load(1, [7, 8], "test")
        memory.count(1, [7, 8])
        memory.keep(1, [7, 8])
        assert len(memory.cached) == 4
        assert (1, 7) not in memory.cached
        memory.count(1, [8])
        memory.keep(1, [7, 8])
        assert {(0, 3), (0, 2), (1, 8)} < set(memory.cached)
        assert (1, 7) not in memory.cached
        copied = memory.copied_experts
        memory.load(2, [0], "test")  # the slots of stacks 0 and 1 are used again
        memory.load(0, [0], "test")
        buffer, _, _ = memory.load(1, [8, 9], "test")
        assert memory.copied_experts == copied + 3  # 8 came from the cache
        weights = stream.experts._weights(1, buffer)
        for local, one in stream.experts.mixtures[1].parameters.items():
            assert torch.equal(weights[local][[8, 9]], one.parameter[[8, 9]])
            assert weights[local][10].isnan().all()  # was not copied
        memory.forget(1)
        assert (1, 8) not in memory.cached
        assert (0, 3) in memory.cached
        stream.end_step()


def test_auto_sends_all_where_most_are_chosen_and_returns():
    model = Model("mixtral")
    resident, few, many = copy.deepcopy(model), tokens_of(0), torch.arange(64)[None]
    share = []
    with by_use(model, experts="auto") as stream:
        for step, tokens in enumerate([few, many, many, many, many, few, few, few, few, few, few]):
            stream.begin_step(step)
            loss, expected = model(tokens), resident(tokens)
            loss.backward(), expected.backward()
            assert torch.equal(loss, expected)
            stream.end_step()
            share.append(stream.stats.experts["sent_whole"])
        assert share[:2] == [0, 0]
        assert LAYERS in share
        assert share[-1] == 0
    assert_equal(gradients(model), gradients(resident))


def test_weights_that_change_are_sent_again():
    model = Model()
    resident = copy.deepcopy(model)
    with by_use(model, expert_cache_bytes=20_000) as stream:
        train(model, 2, stream), train(resident, 2)
        for change in range(4):
            for one in (model, resident):
                weights = one.mixtures[0].down_proj
                with torch.no_grad():
                    if change == 0:
                        weights.mul_(2)
                    elif change == 1:
                        one.load_state_dict({key: 0.9 * value for key, value in one.state_dict().items()})
                    elif change == 2:
                        one.mixtures[1].gate_up_proj = nn.Parameter(weights.new_ones(16, 32, 32), requires_grad=False)
                    else:
                        weights.data.mul_(2)
            if change == 3:
                stream.refresh()
            with torch.no_grad():  # outside a step
                assert torch.equal(model(tokens_of(1)), resident(tokens_of(1)))
            for got, wanted in zip(train(model, 1, stream), train(resident, 1), strict=True):
                assert_equal(got, wanted)
        model.mixtures[0].down_proj.requires_grad_()
        with pytest.raises(StreamError, match=r"layers\.0\.mlp\.experts\.down_proj requires gradients now"):
            stream.begin_step(9)
        model.mixtures[0].down_proj.requires_grad_(False)
        model.mixtures[0].down_proj = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
        with pytest.raises(StreamError, match=r"experts\.down_proj is \(2, 2\)"):
            stream.begin_step(9)


def test_a_copy_that_fails_names_its_mixture_and_the_next_step_is_right():
    model = Model()
    resident, fail = copy.deepcopy(model), False

    def before_copy() -> None:
        if fail:
            raise OSError("the bus is gone")

    with by_use(model, SimulatedDevice(before_copy=before_copy), slots="auto") as stream:
        train(model, 1, stream), train(resident, 1)
        stream.begin_step(1)
        fail = True
        with pytest.raises(TransferError, match=r"layers\.\d\.mlp\.experts, step 1: OSError: the bus is gone"):
            model(torch.arange(64)[None])
        fail = False
        for got, wanted in zip(train(model, 2, stream), train(resident, 2), strict=True):
            assert_equal(got, wanted)


def interrupted_at(at: int | None) -> tuple[list[dict[str, Tensor]], Interrupter]:
    """Gradients of a step after one that Ctrl-C has ended at this line."""
    model, interrupter = Model("mixtral"), Interrupter(at)
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    with by_use(model, expert_cache_bytes=20_000, offload_activations=False) as stream:
        train(model, 1, stream)
        stream.begin_step(1)
        try:
            with interrupter.on():
                model(tokens_of(5)).backward()
            stream.end_step()
        except KeyboardInterrupt:
            pass
        model.zero_grad()
        assert all(isinstance(one, nn.Parameter) for mixture in model.mixtures for one in mixture._parameters.values())
        return train(model, 2, stream), interrupter


def test_a_step_after_ctrl_c_at_any_line_is_right():
    expected, counted = interrupted_at(None)
    lines = random.Random(torch.initial_seed()).sample(range(counted.lines), 4)
    for at in lines:
        result, interrupter = interrupted_at(at)
        for got, wanted in zip(result, expected, strict=True):
            for name, tensor in wanted.items():
                assert torch.equal(got[name], tensor), f"{name}, interrupted at {interrupter.where}"


def test_backward_after_its_step_is_refused():
    model = Model()
    with by_use(model) as stream:
        stream.begin_step(0)
        loss = model(tokens_of(0))
        stream.end_step()
        with pytest.raises(StreamError, match="backward came after its step ended"):
            loss.backward()


def test_memory_that_is_not_there_is_given_back():
    model = Model()
    before = [one.clone() for one in model.parameters()]
    device = SimulatedDevice(capacity_bytes=300_000)
    with pytest.raises(torch.OutOfMemoryError, match="the cache of experts"):
        stream_blocks(
            model, device=device, **arguments_of({"experts": "by use", "expert_cache_bytes": 2**40, "slots": 2})
        )
    assert (device.allocated_bytes, device.pinned_bytes) == (0, 0)
    assert all(torch.equal(one, was) for one, was in zip(model.parameters(), before, strict=True))


class Dense(nn.Module):
    """Two stacks of matrices that are no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(4, 8, 8), requires_grad=False)
        self.two = nn.Parameter(torch.ones(4, 8, 8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("eij,ejk,bk->bi", self.one, self.two, x)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"train": "weights"}, "does not go with train='weights', which changes experts"),
        ({"host": "pageable"}, "does not go with host='pageable'"),
        ({"compile": True}, "does not go with compile="),
        ({"experts": "some"}, "experts='some': there are 'all', 'by use', 'auto'"),
        ({"expert_cache_bytes": -1}, "expert_cache_bytes=-1: expected a whole number"),
        ({"experts": "all", "expert_cache_bytes": 5}, "goes with experts='by use' or 'auto'"),
        ({"formats": "int8_row"}, r"mlp\.experts\.\w+: experts that cross by use do so in their own type, float32"),
        ({"blocks": "model.layers.*.mlp.experts"}, "holds experts alone"),
        ({"blocks": "model.layers.1"}, "no block holds experts in tensors"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_by_name(options, says):
    model = Model()
    with pytest.raises(StreamError, match=says), by_use(model, **options):
        pass


def test_models_that_cannot_be_served_are_refused_by_name():
    model = Model()
    model.mixtures[0].down_proj.requires_grad_()
    with pytest.raises(StreamError, match=r"down_proj requires gradients, and experts that cross by use are frozen"):
        by_use(model).__enter__()
    other = nn.Sequential(nn.Sequential(nn.Linear(8, 8), Dense()))
    with pytest.raises(StreamError, match=r"0\.1: its experts are not of a kind that can cross by use: it takes x,"):
        by_use(other, blocks="*", train="nothing").__enter__()
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(Model().model, LoraConfig(target_parameters=["mlp.experts.down_proj"]))
    with pytest.raises(StreamError, match=r"has adapters on its experts' own weights \(ParamWrapper\)"):
        by_use(adapted, blocks="base_model.model.layers.*").__enter__()


def test_formats_of_other_parameters():
    model = Model()
    formats = {"*.experts.*": None, "*": "int8_row"}
    with by_use(model, formats=formats) as stream:
        assert stream.formats["model.layers.0.self_attn.o_proj.weight"] == "int8_row"
        with pytest.raises(StreamError, match="in their own type"):
            stream.set_formats("mxfp4")
        stream.set_formats({"*.o_proj.weight": "mxfp4"})
        train(model, 1, stream)
        assert stream.formats["model.layers.0.self_attn.o_proj.weight"] == "mxfp4"


def test_peft_and_a_forward_alone():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(Model("mixtral").model, LoraConfig(target_modules=["k_proj", "v_proj"]))
    resident = copy.deepcopy(model)
    with by_use(model, blocks="base_model.model.layers.*", train="nothing") as stream, torch.no_grad():
        for step in range(4):
            got, wanted = (one(tokens_of(step)).last_hidden_state for one in (model, resident))
            assert torch.equal(got, wanted)
        assert stream.stats.experts["copied"] > 0


def test_runs():
    assert runs([5, 1, 2, 7, 8]) == [(1, 3), (5, 6), (7, 9)]
    assert runs([]) == []


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["by use", "auto"])
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_losses_and_gradients_equal_the_resident_model_on_a_gpu(experts, how):
    model = Model("qwen3_moe", experts).bfloat16()
    model.model.gradient_checkpointing_enable()
    model.model.enable_input_require_grads()
    resident = copy.deepcopy(model).cuda()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        expected = train(resident, 6, device="cuda")
        with by_use(model, "cuda", experts=how, expert_cache_bytes=20_000) as stream:
            for got, wanted in zip(train(model, 6, stream, device="cuda"), expected, strict=True):
                assert_equal(got, wanted)
            assert stream.stats.experts["from_cache"] > 0
    finally:
        torch.use_deterministic_algorithms(False)

"""What a view finds in models that people write by hand: by what they compute, whatever they are called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bitplan import describe
from bitplan.plan.structure import describe as structure
from bitplan.plan.structure.describe import is_norm, product_of
from bitplan.plan.structure.model_view import ModelView
from tests.plan.structure import handwritten_models as models


def short(view: ModelView) -> dict[str, str]:
    """Roles of the projections, by the path of their module."""
    return {linear.path: linear.role for linear in view.linears}


def groups(view: ModelView) -> set[tuple[str, ...]]:
    """Projections that read one input with others, by path."""
    found = (tuple(linear.path for linear in group.linears) for group in view.input_groups())
    return {paths for paths in found if len(paths) > 1}


def test_nanogpt() -> None:
    view = describe(models.NanoGPT())
    block = {"attn.c_attn": "qkv", "attn.c_proj": "attention_output", "mlp.c_fc": "up", "mlp.c_proj": "down"}
    assert short(view) == {
        **{f"transformer.h.{index}.{path}": role for index in (0, 1) for path, role in block.items()},
        "lm_head": "head",
    }
    assert [(mlp.up.path, mlp.down.path, mlp.activation, mlp.only_down) for mlp in view.plain_mlps()] == [
        (f"transformer.h.{index}.mlp.c_fc", f"transformer.h.{index}.mlp.c_proj", "gelu", True) for index in (0, 1)
    ]
    norm = view.norm_before("transformer.h.1.attn.c_attn")
    assert norm is not None
    assert (norm.path, norm.kind, norm.eps, norm.only_projections) == ("transformer.h.1.ln_1", "layer_norm", 1e-5, True)
    assert [(stack.path, stack.kinds) for stack in view.blocks()] == [("transformer.h", (0, 0))]
    assert len(view.residuals) == 4
    assert [(table.path, table.by) for table in view.embeddings] == [
        ("transformer.wte", "input"),
        ("transformer.wpe", "positions"),
    ]
    tied = view.by_name["lm_head.weight"]
    assert (tied.role, tied.tied_to) == ("head", ("transformer.wte.weight",))
    assert view.role("transformer.wte.weight") == "embedding"
    assert view.role("transformer.h.0.attn.c_attn.bias") == "bias"
    assert not view.unknown
    assert not view.changed
    assert view.source == "traced"


def test_llama_under_torchtitans_names() -> None:
    view = describe(models.Titan())
    names = {"wq": "query", "wk": "key", "wv": "value", "wo": "attention_output"}
    expected = {f"layers.{index}.attention.{name}": role for index in (0, 1) for name, role in names.items()}
    names = {"w1": "gate", "w3": "up", "w2": "down"}
    expected |= {f"layers.{index}.feed_forward.{name}": role for index in (0, 1) for name, role in names.items()}
    assert short(view) == {**expected, "output": "head"}
    assert groups(view) == {
        *(tuple(f"layers.{index}.attention.w{letter}" for letter in "qkv") for index in (0, 1)),
        *(tuple(f"layers.{index}.feed_forward.w{number}" for number in (1, 3)) for index in (0, 1)),
    }
    assert {mlp.activation for mlp in view.gated_mlps()} == {"silu"}
    assert view.blocks()[0].blocks == ("layers.0", "layers.1")
    assert all(norm.only_projections for norm in view.norms)


def test_rows_of_blocks_that_are_alike_read_from_those_blocks() -> None:
    view = describe(models.Titan())
    assert len(view.stacks[0].blocks) > 1
    reads = [row["reads"] for row in view.table_rows() if row["part"].startswith("layers.[0..")]
    assert any(" in layers.[0.." in words for words in reads)  # a step of the attention feeds its output projection
    assert not any("layers.0" in words for words in reads)


def test_fused_projections_and_a_norm_that_is_spelled_out() -> None:
    view = describe(models.Titan(models.FusedBlock).bfloat16())
    assert {linear.path.rpartition(".")[2]: linear.role for linear in view.linears} == {
        "one": "qkv",
        "two": "attention_output",
        "three": "gate_up",
        "four": "down",
        "output": "head",
    }
    mlp = view.gated_mlps()[0]
    assert (mlp.is_fused, mlp.gate_part, mlp.up_part, mlp.activation) == (True, 1, 0, "gelu")
    norm = view.norm_before("layers.0.one")
    assert norm is not None
    assert norm.only_projections
    assert norm.is_spelled
    assert (norm.kind, norm.eps, norm.computes_in, norm.casts_before_weight) == ("rms_norm", 1e-5, "float32", True)


def test_attention_and_mlp_behind_one_norm_read_one_input() -> None:
    view = describe(models.Titan(models.ParallelBlock, layers=1))
    assert groups(view) == {
        tuple(f"layers.0.{path}" for path in ("attention.wq", "attention.wk", "attention.wv", "mlp.w1", "mlp.w3"))
    }
    assert view.blocks()[0].blocks == ("layers.0",)


def test_a_class_named_as_one_of_transformers_is_seen_as_it_is() -> None:
    view = describe(models.Titan(models.LlamaDecoderLayer, layers=1))
    before = view.norm_before("layers.0.mlp.w1")
    assert before is not None
    assert before.path == "layers.0.pre_feedforward_layernorm"
    after = next(norm for norm in view.norms if norm.path == "layers.0.post_attention_layernorm")
    assert (after.readers, after.others) == ((), ("add in layers.0",))


def test_what_else_reads_a_norm_or_a_gate_is_said() -> None:
    view = describe(models.Titan(models.LeakyBlock, layers=1))
    norm = view.norm_before("layers.0.gate_proj")
    assert norm is not None
    assert not norm.only_projections
    assert norm.others == ("add in layers.0",)
    assert [(mlp.activation, mlp.only_down) for mlp in view.gated_mlps()] == [("silu", False)]
    assert next(group for group in view.input_groups() if len(group.linears) == 2).others == ("add in layers.0",)


def test_experts_of_a_router_are_followed_with_a_routing_chosen_here() -> None:
    view = describe(models.Titan(models.MoeBlock, layers=1))
    assert view.role("layers.0.gate.weight") == "router"
    assert [mlp.gate.path for mlp in view.gated_mlps()] == [f"layers.0.experts.{index}.w1" for index in range(3)]
    assert view.notes
    assert not view.unknown


def test_dit_with_an_adaptive_norm() -> None:
    view = describe(models.DiT())
    roles = {path.removeprefix("blocks.0."): role for path, role in short(view).items() if "blocks.1" not in path}
    assert roles == {
        "time": "linear",
        "modulation.1": "linear",
        "to_qkv": "qkv",
        "to_out": "attention_output",
        "ff.0": "up",
        "ff.2": "down",
        "final": "head",
    }
    assert view.norm_before("blocks.0.to_qkv") is None  # shift and scale come between
    norm = view.norms[0]
    assert (norm.path, norm.weight, norm.readers) == ("blocks.0.norm1", None, ())
    assert view.role("patches.weight") == "convolution"
    assert view.role("positions") == "other"
    assert {mlp.activation for mlp in view.plain_mlps() if mlp.only_down} == {"gelu_tanh"}


def test_unet() -> None:
    view = describe(models.UNet())
    assert len(view.convolutions) == 11
    assert not view.linears
    assert {norm.kind for norm in view.norms} == {"group_norm"}
    assert not view.unknown


def test_hooks_are_not_run_and_are_named() -> None:
    model, calls = models.Titan(layers=1), []
    model.layers["0"].attention.register_forward_pre_hook(lambda *_: calls.append(1))
    model.layers["0"].ffn_norm.register_forward_hook(lambda *_: calls.append(1))
    view = describe(model)
    assert not calls
    assert view.changed == {
        "layers.0.attention": ("forward pre-hook",),
        "layers.0.ffn_norm": ("forward hook",),
    }
    norm = view.norm_before("layers.0.attention.wq")
    assert norm is not None
    assert view.watchers(norm.output) == ("layers.0.attention",)


def test_patched_forwards_are_followed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def parallel(self: models.TitanBlock, x: Tensor) -> Tensor:
        return x + self.attention(self.attention_norm(x)) + self.feed_forward(self.attention_norm(x))

    monkeypatch.setattr(models.TitanBlock, "forward", parallel)
    model = models.Titan(layers=1)
    model.norm.forward = lambda x: x * 2
    view = describe(model)
    assert view.changed == {"layers.0": ("patched class",), "norm": ("forward of its own",)}
    norm = view.norm_before("layers.0.feed_forward.w1")
    assert norm is not None
    assert norm.path == "layers.0.attention_norm"
    assert view.norm_before("output") is None
    assert view.role("norm.weight") == "unused"
    assert view.role("layers.0.ffn_norm.weight") == "unused"


class Asks(nn.Module):
    """Cannot be followed: which way it goes depends on a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.never = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return self.never(h) if h.sum() > 0 else h


def test_what_depends_on_numbers_is_unknown_and_the_rest_is_seen() -> None:
    view = describe(nn.Sequential(nn.Linear(4, 8), Asks(), nn.Linear(8, 2)), torch.zeros(3, 4))
    assert view.unknown == {"1": "bool of numbers that weights decide"}
    assert view.role("1.never.weight") == "unknown"
    assert view.role("2.weight") == "head"
    assert view.plain_mlps() == ()


def test_weights_that_are_computed_are_named_by_what_they_are_computed_from() -> None:
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2))
    view = describe(model)
    assert view.linears[0].computed
    assert not view.linears[0].weight
    assert view.changed == {"0": ("parametrization",)}


class Remembers(nn.Module):
    """Writes into itself, as caches of rotations and counters do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.seen: list[Tensor] = []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = self.linear(x)
        self.seen.append(self.last)
        return self.norm(self.last) * torch.rand(())


def test_the_model_stays_as_it_was() -> None:
    model = Remembers()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes, drawn = set(model.__dict__), torch.random.get_rng_state()
    describe(model, torch.ones(2, 4))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert set(model.__dict__) == attributes
    assert not model.seen
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert not model(torch.ones(2, 4)).is_meta


def test_in_place_steps_make_new_values() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            y = self.a(x)
            z = self.b(x)
            x[:, 0] = 0
            return y + z + self.c(x)

    assert groups(describe(InPlace(), torch.zeros(2, 4))) == {("a", "b")}


def test_an_example_that_does_not_fit_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"Sequential: its forward raised RuntimeError: .*\[3, 5\]"):
        describe(nn.Sequential(nn.Linear(4, 8)), torch.zeros(3, 5))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (models.SpelledGelu(), "gelu_tanh"),
        (nn.ReLU(), "relu"),
        (nn.Mish(), "mish"),
        (nn.Softplus(beta=2), "other"),
    ],
)
def test_activations_are_named_by_what_they_compute(module: nn.Module, name: str) -> None:
    view = describe(nn.Sequential(nn.Linear(4, 8), module, nn.Linear(8, 2)))
    assert [mlp.activation for mlp in view.plain_mlps()] == [name]


def test_the_product_that_a_module_alone_is() -> None:
    from transformers.models.falcon.modeling_falcon import FalconLinear
    from transformers.pytorch_utils import Conv1D

    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x

    falcon, turned = product_of(FalconLinear(8, 8)), product_of(Conv1D(8, 8))
    assert falcon is not None
    assert not falcon.is_columns
    assert turned is not None
    assert turned.is_columns
    assert product_of(Noisy(8, 8)) is None
    assert product_of(nn.Embedding(8, 8)) is None


def test_norms_that_run_the_same_lines_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Norm(nn.Module):
        def __init__(self, scales: bool = True) -> None:
            super().__init__()
            self.weight, self.scales = nn.Parameter(torch.ones(8)), scales

        def forward(self, x: Tensor) -> Tensor:
            normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) if self.scales else x
            return normed * self.weight

    seen: list[nn.Module] = []
    see = structure._see_norm
    monkeypatch.setattr(structure, "_see_norm", lambda module: (seen.append(module), see(module))[1])
    norms = [Norm(), Norm(), Norm(scales=False), Norm(scales=False), nn.LayerNorm(8)]
    assert [is_norm(norm) for norm in [*norms, *norms]] == [True, True, False, False, True] * 2
    assert seen == [norms[0], norms[2]]


@pytest.mark.parametrize("limit", [3, 2])
def test_masks_of_experts_beyond_those_of_a_module_hide_nothing(limit: int) -> None:
    """As transformers 5.17 masks experts of other processes: any other mask of indices is a step of the model."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.ones(3, 32, 8)), nn.Parameter(torch.ones(3, 8, 16))

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            gate, up = torch.bmm(self.up[ids[:, 0]], x.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
            hidden = (nn.functional.silu(gate) * up).masked_fill((ids[:, :1] >= limit), 0.0)
            return torch.bmm(self.down[ids[:, 0]], hidden.unsqueeze(-1)).squeeze(-1) * weights[:, :1]

    view = describe(Experts(), (torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)))
    assert len(view.gated_mlps()) == (limit == 3)


def test_a_mask_of_indices_in_a_dense_mlp_is_a_step() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            hidden = nn.functional.silu(self.gate(x)) * self.up(x)
            return self.down(hidden.masked_fill((ids >= 1000).unsqueeze(-1), 0.0))

    assert not describe(Masked(), (torch.ones(4, 8), torch.arange(4))).gated_mlps()

"""apply_plan: every change with its reason, everything wrong in one error, and never half of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

import bitplan
from bitplan.base.errors import FileFormatError, FormatError, NonFiniteError, StoreError
from bitplan.files.compare import compare_files, compare_models
from bitplan.files.models.morph import morph_model
from bitplan.files.models.save_load import load_model, write_model
from bitplan.files.open_files import open_tensors
from bitplan.files.quantize_files import quantize_file
from bitplan.formats.codec import decode, encode
from bitplan.packed.apply_plan import ApplyError, Skipped, apply_plan
from bitplan.packed.product_strategy import LayerError
from bitplan.packed.quant_embedding import QuantEmbedding
from bitplan.packed.quant_linear import QuantLinear
from bitplan.packed.tile_cache import TileCache
from bitplan.plan import Choice, Manifest, Plan, Planned
from tests.crosses import few
from tests.packed.linear_samples import FORMATS, normal

HIDDEN, FFN, VOCAB = 64, 128, 96


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN)
        self.self_attn = nn.ModuleDict({f"{part}_proj": nn.Linear(HIDDEN, HIDDEN, bias=False) for part in "qkvo"})
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(HIDDEN, FFN, bias=False),
                "up_proj": nn.Linear(HIDDEN, FFN, bias=True),
                "down_proj": nn.Linear(FFN, HIDDEN, bias=False),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.input_layernorm(x)
        q, k, v = (self.self_attn[f"{part}_proj"](y).unsqueeze(1) for part in "qkv")
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + self.self_attn["o_proj"](seen)
        y = self.post_attention_layernorm(x)
        gated = functional.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y)
        return x + self.mlp["down_proj"](gated)


class Llama(nn.Module):
    """A llama-like stack under Hugging Face's names."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(VOCAB, HIDDEN),
                "layers": nn.ModuleList(Block() for _ in range(2)),
                "norm": nn.RMSNorm(HIDDEN),
            }
        )
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.model["embed_tokens"].weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model["embed_tokens"](ids)
        for layer in self.model["layers"]:
            x = layer(x)
        logits: Tensor = self.lm_head(self.model["norm"](x))
        return logits


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def plan_of(model: nn.Module, *rules: tuple[str, str], default: str = "float32") -> Plan:
    """Rules of (regex, format), the rest in a default."""
    patterns = [{"regex": regex, "format": fmt} for regex, fmt in (*rules, (".*", default))]
    return Manifest.from_document({"version": 1, "patterns": patterns}).resolve(shapes_of(model))


def plan_for(name: str, fmt: str, shape: tuple[int, ...] | None = None) -> Plan:
    return Plan({name: Planned(Choice(fmt, "by hand"), shape)})


IDS = torch.arange(12).reshape(2, 6)


# ---- what it does ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(FORMATS, 4))
def test_a_stack_runs_as_one_whose_weights_were_rounded(name: str) -> None:
    model, twin = Llama(), Llama()
    applied = apply_plan(model, plan_of(model, (r".*(proj)\.weight", name)), strategy="decode", pad="zero")
    for module in twin.modules():
        if isinstance(module, nn.Linear) and module is not twin.lm_head:
            module.weight.data = decode(encode(module.weight, name, pad="zero"))
    assert torch.allclose(model(IDS), twin(IDS), atol=1e-5)
    assert len(applied.changes) == 14
    assert all(change.format == name for change in applied.changes)


def test_what_changed_and_why() -> None:
    model = Llama()
    bias = model.model["layers"][0].mlp["up_proj"].bias
    rules = [{"regex": r".*\.mlp\..*weight", "format": "mxfp4"}, {"regex": ".*", "format": "BF16"}]
    plan = Manifest.from_document({"version": 1, "patterns": rules}).resolve(shapes_of(model))
    applied = apply_plan(model, plan, strategy="decode")
    by_name = {change.name: change for change in applied.changes}
    up = by_name["model.layers.0.mlp.up_proj.weight"]
    assert (up.before, up.after, up.format) == ("Linear float32", "QuantLinear mxfp4", "mxfp4")
    assert (up.bytes_before, up.bytes_after) == (4 * FFN * HIDDEN, FFN * HIDDEN // 2 + FFN * HIDDEN // 32)
    assert "patterns[0]" in up.reason
    norm = by_name["model.norm.weight"]
    assert (norm.before, norm.after, norm.bytes_before, norm.bytes_after) == ("float32", "bfloat16", 256, 128)
    assert set(by_name) == set(shapes_of(Llama()))
    assert applied.skipped == ()
    layer = model.model["layers"][0].mlp["up_proj"]
    assert isinstance(layer, QuantLinear)
    assert layer.name == "model.layers.0.mlp.up_proj"
    assert layer.bias is bias
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert applied.bytes_after == sum(change.bytes_after for change in applied.changes) < applied.bytes_before / 2
    assert applied.lines()[0].startswith("lm_head.weight: float32 -> bfloat16, 24576 -> 12288 bytes (patterns[1]")


def test_the_same_plan_twice_changes_nothing() -> None:
    model = Llama()
    plan = plan_of(model, (r".*mlp.*weight", "mxfp4"), default="bfloat16")
    apply_plan(model, plan)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    again = apply_plan(model, plan)
    assert again.changes == ()
    assert Skipped("model.layers.0.mlp.up_proj.weight", "already mxfp4") in again.skipped
    assert Skipped("model.norm.weight", "already bfloat16") in again.skipped
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_partly_packed_model_gets_the_rest() -> None:
    model = Llama()
    apply_plan(model, plan_of(model, (r"model\.layers\.0\.mlp.*weight", "mxfp4")))
    names = {name: tuple(parameter.shape) for name, parameter in Llama().named_parameters()}
    rules = [{"regex": r".*mlp.*weight", "format": "mxfp4"}, {"regex": ".*", "format": "float32"}]
    plan = Manifest.from_document({"version": 1, "patterns": rules}).resolve(names)
    applied = apply_plan(model, plan)
    assert [change.name for change in applied.changes] == [
        f"model.layers.1.mlp.{part}_proj.weight" for part in ("down", "gate", "up")
    ]


def test_strategy_cache_and_mode_reach_the_layers() -> None:
    model, cache = Llama().eval(), TileCache(10**6)
    apply_plan(model, plan_of(model, (r".*proj\.weight", "int8_row")), strategy="tile_cache", cache=cache)
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    assert len(layers) == 14
    assert all(one.strategy == "tile_cache" and one.cache is cache and not one.training for one in layers)
    model(IDS)
    assert cache.counters.tiles == 14


def test_buffers_are_cast_where_the_plan_names_them() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    names = {name: tuple(t.shape) for name, t in model.state_dict().items() if t.is_floating_point()}
    rules = [{"regex": "0.running_mean", "format": "BF16"}, {"regex": ".*", "format": "F32"}]
    apply_plan(model, Manifest.from_document({"version": 1, "patterns": rules}).resolve(names))
    assert model[0].running_mean.dtype == torch.bfloat16
    assert model[0].running_var.dtype == torch.float32


def test_gradients_and_optimizers_survive_a_cast() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    model(torch.ones(1, 4)).sum().backward()
    weight = model[0].weight
    apply_plan(model, plan_for("0.weight", "bfloat16"))
    assert model[0].weight is weight
    assert weight.dtype == weight.grad.dtype == torch.bfloat16


def test_a_packed_model_saves_and_loads_with_its_plan() -> None:
    source, target = Llama(), Llama()
    nn.init.normal_(source.model["layers"][1].mlp["up_proj"].weight)
    for model in (source, target):
        apply_plan(model, plan_of(model, (r".*mlp.*weight", "nvfp4")), strategy="decode")
    target.load_state_dict(source.state_dict())
    assert torch.equal(target(IDS), source(IDS))


# ---- ties ------------------------------------------------------------------------------------------------------------


def test_tied_floats_are_cast_once_and_stay_tied() -> None:
    model = Llama(tied=True)
    applied = apply_plan(model, plan_of(model, default="bfloat16"))
    assert model.lm_head.weight is model.model["embed_tokens"].weight
    assert model.lm_head.weight.dtype == torch.bfloat16
    both = {"lm_head.weight", "model.embed_tokens.weight"}
    assert len([change for change in applied.changes if change.name in both]) == 1
    assert [one.reason for one in applied.skipped] == ["tied to model.embed_tokens.weight"]


def test_a_file_that_holds_a_tied_weight_once_is_enough() -> None:
    model = Llama(tied=True)
    names = {name: shape for name, shape in shapes_of(model).items() if name != "lm_head.weight"}
    apply_plan(model, Manifest.from_document(RULES).resolve(names))


RULES = {"version": 1, "patterns": [{"regex": ".*", "format": "BF16"}]}


def test_an_embedding_and_the_head_share_the_packed_weight() -> None:
    model = Llama(tied=True)
    expected = copy.deepcopy(model)
    plan = plan_of(model, (r"(lm_head|model\.embed_tokens)\.weight", "int8_row"))
    table = model.lm_head.weight
    expected.lm_head.weight.data = bitplan.decode(bitplan.encode(table, "int8_row"))
    apply_plan(model, plan)
    assert isinstance(model.model["embed_tokens"], QuantEmbedding)
    assert model.lm_head.weight is model.model["embed_tokens"].weight
    torch.testing.assert_close(model(IDS), expected(IDS))


@pytest.mark.parametrize("fmt", ["int8_row", "mxfp4", "nvfp4"])
def test_an_embedding_refuses_the_ids_that_torch_refuses(fmt: str) -> None:
    table = QuantEmbedding(bitplan.encode(torch.randn(8, 64), fmt), name="table")
    for row in (-1, 8):
        with pytest.raises(IndexError):
            table(torch.tensor([0, row]))
    for dtype in (torch.float32, torch.int8, torch.bool):
        with pytest.raises(LayerError, match=f"^table: ids must be int32 or int64, got {str(dtype)[6:]}$"):
            table(torch.ones(2, dtype=dtype))
    ids = torch.tensor([[7, 0], [3, 7]])
    assert torch.equal(table(ids.int()), table(ids))


def test_linears_that_share_a_weight_share_the_packed_one() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    apply_plan(model, plan_of(model, (r".*weight", "mxfp4")))
    assert model[0].weight is model[2].weight
    assert model[2].bias is not None
    assert model[0].bias is None


def test_a_module_used_twice_is_replaced_in_both_places() -> None:
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    apply_plan(model, plan_of(model, (r".*weight", "mxfp4")))
    assert isinstance(model["a"], QuantLinear)
    assert model["b"][0] is model["a"]


def test_ties_on_which_the_plan_disagrees_are_refused() -> None:
    model = Llama(tied=True)
    plan = plan_of(model, (r"lm_head\.weight", "float16"), default="bfloat16")
    with pytest.raises(ApplyError, match=r"tied to .* another format"):
        apply_plan(model, plan)


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def fingerprint(model: nn.Module) -> list[Any]:
    kinds = [(name, type(module)) for name, module in model.named_modules()]
    return [kinds, [(name, value.dtype, value.double().sum().item()) for name, value in model.state_dict().items()]]


def refused(model: nn.Module, plan: Plan, said: str, error: type[Exception] = ApplyError, **options: Any) -> None:
    before = fingerprint(model)
    with pytest.raises(error, match=said):
        apply_plan(model, plan, **options)
    assert fingerprint(model) == before


def test_names_that_do_not_meet_are_all_listed() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    plan = Plan({name: Planned(Choice("mxfp4", "r")) for name in ("0.weight", "0.wieght", "7.weight")})
    refused(model, plan, r"2 tensors that the model lacks: '0\.wieght', '7\.weight'; did you mean '0\.weight'")
    refused(model, plan, r"3 tensors that the plan lacks: '0\.bias', '1\.weight', '1\.bias'")
    applied = apply_plan(model, plan, match="common")
    assert [change.name for change in applied.changes] == ["0.weight"]
    assert {one.name: one.reason for one in applied.skipped} == {
        "0.wieght": "the model has no tensor of this name",
        "7.weight": "the model has no tensor of this name",
        "0.bias": "not in the plan",
        "1.weight": "not in the plan",
        "1.bias": "not in the plan",
    }


def test_parts_of_experts_are_pointed_elsewhere() -> None:
    plan = Plan({"mlp.blocks": Planned(Choice("mxfp4", "r"), (2, 2, 4, 16), part="data")})
    refused(nn.Sequential(nn.Linear(64, 64)), plan, "load_packed")


class Own(nn.Linear):
    pass


class Conv1D(nn.Module):
    """As in transformers: the matrix is [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))


def hooked() -> nn.Module:
    linear = nn.Linear(64, 64, bias=False)
    linear.register_forward_hook(lambda *_: None)
    return linear


def replaced_forward() -> nn.Module:
    linear = nn.Linear(64, 64, bias=False)
    linear.forward = lambda x: x  # type: ignore[method-assign]
    return linear


class Columns(Conv1D):
    """A matrix [in, out], which the forward multiplies by; a second layer may share it as its transpose."""

    def __init__(self, inputs: int, outputs: int) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def test_matrices_that_lie_transposed_are_packed_along_their_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Columns(64, 96), nn.Tanh(), Columns(96, 64))
    twin, x = copy.deepcopy(model), torch.randn(5, 64)
    applied = apply_plan(model, {"*weight": "q8_0_gguf"})
    assert [change.after for change in applied.changes] == ["QuantLinear q8_0_gguf"] * 2
    assert model[0].weight.shape == (96, 64)
    with torch.no_grad():
        for layer in (twin[0], twin[2]):
            layer.weight.copy_(decode(encode(layer.weight.T.contiguous(), "q8_0_gguf")).T)
    torch.testing.assert_close(model(x), twin(x), rtol=0, atol=1e-4)
    again = copy.deepcopy(model)
    bitplan.dequantize(again)
    assert {name: type(module) for name, module in again.named_modules()} == {
        name: type(module) for name, module in twin.named_modules()
    }
    assert all(torch.equal(tensor, twin.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_a_matrix_that_two_layers_read_both_ways_is_refused() -> None:
    model = nn.Sequential(Columns(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    refused(
        model, plan_for("0.weight", "int8_row"), "0 and 1, of which one multiplies by its transpose", match="common"
    )


@pytest.mark.parametrize(
    ("model", "name", "said"),
    [
        (lambda: nn.Sequential(nn.Embedding(64, 64, max_norm=1.0)), "0.weight", "forward is not Embedding's own"),
        (lambda: nn.Sequential(Own(64, 64, bias=False)), "0.weight", "forward is not Linear's own"),
        (lambda: nn.Sequential(Conv1D()), "0.weight", "the weight of a Conv1D"),
        (lambda: nn.Sequential(hooked()), "0.weight", "hooks, which would be lost"),
        (lambda: nn.Sequential(replaced_forward()), "0.weight", "hooks, which would be lost"),
        (lambda: nn.Linear(64, 64, bias=False), "weight", "no parent"),
    ],
)
def test_layers_that_cannot_be_packed_are_refused_or_skipped(
    model: Callable[[], nn.Module], name: str, said: str
) -> None:
    refused(model(), plan_for(name, "mxfp4"), said)
    stored = model()
    applied = apply_plan(stored, plan_for(name, "mxfp4"), unsupported="skip")
    assert applied.changes == ()
    assert said in applied.skipped[0].reason


def test_weights_read_by_their_parents_are_refused() -> None:
    encoder = nn.Sequential(nn.TransformerEncoderLayer(64, 2, 64))
    refused(encoder, plan_for("0.linear1.weight", "mxfp4"), "TransformerEncoderLayer directly", match="common")
    attention = nn.Sequential(nn.MultiheadAttention(64, 2))
    refused(attention, plan_for("0.out_proj.weight", "mxfp4"), "NonDynamicallyQuantizable", match="common")


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (plan_for("0.weight", "mxfp4", (64, 32)), r"plan is for shape \(64, 32\), the model has \(64, 64\)"),
        (plan_for("0.weight", "int8"), "blocks of int8 do not lie within a row"),
        (Plan({"0.weight": Planned(Choice("mxfp4", "r"), None, part="data")}), r"a part \(data\) of mxfp4"),
    ],
)
def test_plans_that_do_not_fit_a_tensor_are_refused(plan: Plan, said: str) -> None:
    refused(nn.Sequential(nn.Linear(64, 64, bias=False)), plan, said)


def test_integers_are_not_cast() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    refused(model, plan_for("0.num_batches_tracked", "bfloat16"), "holds torch.int64", match="common")


def test_packed_weights_are_not_packed_again() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    apply_plan(model, plan_for("0.weight", "mxfp4"))
    refused(model, plan_for("0.weight", "int8_row"), "already packed as mxfp4, the plan has int8_row")
    refused(model, plan_for("0.weight", "bfloat16"), "already packed as mxfp4")


def test_a_failure_on_the_way_leaves_the_model_as_it_was() -> None:
    model = Llama()
    with torch.no_grad():
        model.model["layers"][1].mlp["up_proj"].weight[3, 3] = float("inf")
    before = fingerprint(model)
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        apply_plan(model, plan_of(model, (r".*mlp.*weight", "mxfp4"), default="bfloat16"))
    assert fingerprint(model) == before


def test_ragged_rows_are_refused_by_name_and_filled_when_asked() -> None:
    model = nn.Sequential(nn.Linear(100, 64, bias=False))
    refused(model, plan_for("0.weight", "mxfp4"), r"0\.weight: mxfp4 has blocks of 32", FormatError)
    apply_plan(model, plan_for("0.weight", "mxfp4"), pad="zero")
    assert model(normal(2, 100)).shape == (2, 64)


def test_a_cast_that_would_overflow_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    nn.init.constant_(model[1].weight, 1e5)
    refused(model, plan_of(model, default="float16"), r"1\.weight: numbers up to 1e\+05 do not fit torch\.float16")


def test_morphed_models_and_unknown_strategies_are_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    with pytest.raises(Exception, match="no strategy 'fast'"):
        apply_plan(model, plan_for("0.weight", "mxfp4"), strategy="fast")
    for options, said in (
        ({"match": "some"}, "match must be 'all' or 'common', got 'some'"),
        ({"unsupported": "ignore"}, "unsupported must be 'error' or 'skip', got 'ignore'"),
    ):
        with pytest.raises(ApplyError, match=said):
            apply_plan(model, plan_for("0.weight", "mxfp4"), **options)
    morph_model(model, "mxfp4")
    refused(model, plan_for("0.weight", "mxfp4"), r"undo it first: morph_model\(model, None\)")


@pytest.mark.parametrize("wanted", ["int8_row", {"0": "int8_row"}, [{"regex": "0.weight", "format": "int8_row"}]])
def test_a_format_a_mapping_or_a_manifest_is_made_a_plan_for_the_model(wanted: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    if isinstance(wanted, list):
        rules = [*wanted, {"regex": ".*", "format": "F32"}]
        wanted = Manifest.from_document({"version": 1, "patterns": rules})
    applied = apply_plan(model, wanted)
    assert [(change.name, change.format) for change in applied.changes] == [("0.weight", "int8_row")]
    assert isinstance(model[0], QuantLinear)


def test_many_faults_are_counted() -> None:
    model = nn.Sequential(*(nn.Bilinear(4, 4, 64, bias=False) for _ in range(12)))
    refused(model, plan_of(model, default="mxfp4"), "and 2 more")


# ---- types that meet -------------------------------------------------------------------------------------------------


def rules_for(model: nn.Module, **formats: str) -> Plan:
    """A plan by the last words of names; all else in BF16."""
    patterns = [{"regex": f".*{word}.*", "format": fmt} for word, fmt in formats.items()]
    rules = Manifest.from_document({"version": 1, "patterns": [*patterns, {"regex": ".*", "format": "BF16"}]})
    return rules.resolve({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})


class LlamaNorm(nn.RMSNorm):
    """As transformers has it: the product with the weight has the wider type of the two."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def as_in_transformers() -> Llama:
    model = Llama()
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.__class__ = LlamaNorm
    return model


def test_a_norm_of_another_type_than_the_linear_it_feeds_is_refused_before_anything_changes():
    model = as_in_transformers()
    before = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    with pytest.raises(ApplyError, match=r"input_layernorm.weight would be float32 \(.*norm.*\) and meet") as message:
        apply_plan(model, rules_for(model, norm="F32"))
    assert "bfloat16" in str(message.value)
    assert "change one of the two rules" in str(message.value)
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == before
    for word in ("embed", "bias", "up_proj"):
        with pytest.raises(ApplyError, match=f"{word}.* would be float32"):
            apply_plan(Llama(), rules_for(model, **{word: "F32"}))


def test_packed_linears_take_any_type():
    model = as_in_transformers()
    apply_plan(model, rules_for(model, norm="F32", bias="F32", _proj="int8_row", lm_head="int8_row"))
    assert model(torch.arange(5)).isfinite().all()


def test_a_norm_that_casts_back_may_have_its_own_type():
    class Norm(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float()).to(x.dtype)

    model = nn.Sequential(nn.Linear(8, 8), Norm(8), nn.Linear(8, 8))
    apply_plan(model, rules_for(model, **{"1.weight": "F32"}))
    assert model(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_packed_model_of_transformers_is_saved_as_a_packed_folder(tmp_path: Path) -> None:
    import transformers

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, vocab_size=64, **shape)).eval()
    apply_plan(model, "int8_row")
    model.save_pretrained(tmp_path / "packed")
    again = bitplan.load_packed(tmp_path / "packed").model
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    with pytest.raises(StoreError, match=r"save_packed writes a packed model, and takes no .*push_to_hub"):
        model.save_pretrained(tmp_path / "hub", push_to_hub=True)


# ---- saved ---------------------------------------------------------------------------------------------------------


def tensors_in(path: Path) -> dict[str, tuple[str, bytes]]:
    """Every tensor of a safetensors file as any reader sees it."""
    with safetensors.safe_open(path, "pt") as file:
        result = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    return {
        name: (str(item.dtype), item.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, item in result.items()
    }


def test_save_model_writes_what_quantize_writes(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.safetensors" for name in ("plain", "quantized", "saved", "again")}
    model = Llama()
    plan = plan_of(model, (".*q_proj.*", "nvfp4"), (".*(_proj|lm_head).weight", "int8_row"), (".*bias", "bfloat16"))
    write_model(model, paths["plain"])
    quantize_file(paths["plain"], paths["quantized"], plan)
    apply_plan(model, plan)
    write_model(model, paths["saved"])
    assert tensors_in(paths["saved"]) == tensors_in(paths["quantized"])
    assert compare_files(paths["quantized"], paths["saved"]).overall.max_error == 0
    assert compare_models(model, load_model(paths["quantized"], Llama())).overall.max_error == 0
    expected = model(torch.arange(5))
    for other in (Llama(), applied(Llama(), plan)):
        nn.init.normal_(other.model["embed_tokens"].weight)
        load_model(paths["saved"], other.eval())
        torch.testing.assert_close(other(torch.arange(5)), expected, rtol=0.02, atol=0.02)
    write_model(other, paths["again"])
    assert tensors_in(paths["again"]) == tensors_in(paths["saved"])
    mixed = applied(Llama(), plan_of(Llama(), (".*_proj.weight", "mxfp4")))
    with pytest.raises(
        FileFormatError, match=r"down_proj.weight' is int8_row, the model holds it packed as mxfp4; load"
    ):
        load_model(paths["saved"], mixed)


def applied(model: nn.Module, plan: Plan) -> nn.Module:
    apply_plan(model, plan)
    return model


def test_a_weight_that_linears_share_is_saved_once(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model[1].weight = model[0].weight
        return model

    model = make()
    apply_plan(model, plan_of(model, (".*weight", "mxfp4")))
    write_model(model, tmp_path / "a.safetensors")
    assert set(tensors_in(tmp_path / "a.safetensors")) == {"0.weight", "0.weight.scales", "0.bias", "1.bias"}
    loaded = load_model(tmp_path / "a.safetensors", make())
    torch.testing.assert_close(loaded.eval()(torch.eye(64)), model(torch.eye(64)))


def test_a_state_dict_of_packed_parts_is_no_file_of_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    apply_plan(model, plan_of(model, (".*weight", "mxfp4")))
    safetensors.torch.save_file(model.state_dict(), tmp_path / "parts.safetensors")
    with pytest.raises(
        FileFormatError, match=r"'0.weight' lies here as parts of a packed weight, as state_dict\(\) of"
    ):
        open_tensors(tmp_path / "parts.safetensors")


def test_a_layer_that_has_no_shape_yet_is_refused_by_name() -> None:
    with pytest.raises(StoreError, match=r"0\.weight: has no shape yet; run the model once"):
        apply_plan(nn.Sequential(nn.LazyLinear(64)), {"*weight": "int8_row", "*": "float32"})

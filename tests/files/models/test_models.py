"""Morphed models: eval sees exactly the version, training sees exactly the Parameter, and nothing else changes."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import json
import math
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from bitplan.base.errors import FormatError, PlanError, StoreError
from bitplan.files.compare import compare_models
from bitplan.files.models import decoded_in_eval, weight_store
from bitplan.files.models.morph import (
    attach_encoded,
    formats_of,
    morph_model,
    observe_model,
    stores_of,
    unmorph_model,
)
from bitplan.files.models.weight_store import ActivationObserver
from bitplan.formats import Encoded, error_report, get_format
from bitplan.formats.codec import decode, encode
from bitplan.plan import Choice, Plan, Planned, choose_formats
from tests.crosses import few
from tests.formats.samples import SMALL_BLOCKS

FORMATS = [fmt.name for fmt in SMALL_BLOCKS]
SPREAD = ["bfloat16", "int8", "uint4", "ternary", "q4_0_gguf", "mxfp4", "fp8_e4m3_b128"]
Change = Callable[[nn.Module], None]


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return [tensor for part in output if part is not None for tensor in tensors(part)]


def same(one: Any, two: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(two), strict=True))


def simulated(model: nn.Module, formats: Mapping[str, str], **options: Any) -> nn.Module:
    """The same model with the numbers that these formats leave of its weights written into its Parameters.

    They need no gradient: torch's matmul goes another way, with other roundings, for weights that do.
    """
    twin = copy.deepcopy(model)
    unmorph_model(twin)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if name in formats:
                parameter.copy_(decode(encode(parameter, formats[name], **options))).requires_grad_(False)
    return twin.eval()


class Tied(nn.Module):
    """A language model whose logits come from the embedding, as a tied Linear and once more by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(self.embed(tokens))
        return self.head(hidden), linear(hidden, self.embed.weight)


class Bare(nn.Module):
    """Parameters of a module of one's own, and a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(sample(32, 32))
        self.more = nn.ParameterList([nn.Parameter(sample(32, 32, seed=seed)) for seed in (1, 2)])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x @ self.mix @ self.more[0] @ self.more[1]


class Recurrent(nn.Module):
    """Asks for flat weights in its forward, as models that want cuDNN do."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, num_layers=2, bidirectional=True, proj_size=32)

    def forward(self, x: Tensor) -> Any:
        self.lstm.flatten_parameters()
        return self.lstm(x)


def tokens() -> Tensor:
    return torch.arange(12).reshape(3, 4) % 50


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, **options)


def with_padding(model: nn.Module, x: Tensor) -> Any:
    return model(x, src_key_padding_mask=torch.tensor([[False] * 5, [False] * 3 + [True] * 2]))


def plainly(model: nn.Module, *inputs: Tensor) -> Any:
    return model(*inputs)


# name -> (model, how to call it, inputs). Columns of every weight are a multiple of 32.
LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], tuple[Tensor, ...]]] = {
    "linear": (lambda: nn.Linear(64, 48), plainly, (sample(5, 64),)),
    "bilinear": (lambda: nn.Bilinear(32, 32, 4), plainly, (sample(5, 32), sample(5, 32, seed=1))),
    "embedding": (lambda: nn.Embedding(50, 64, padding_idx=0), plainly, (tokens(),)),
    "embedding max_norm": (lambda: nn.Embedding(50, 64, max_norm=1.0), plainly, (tokens(),)),
    "embedding bag": (lambda: nn.EmbeddingBag(50, 64, mode="sum"), plainly, (tokens(),)),
    "conv1d": (lambda: nn.Conv1d(16, 8, 4), plainly, (sample(2, 16, 20),)),
    "conv2d": (
        lambda: nn.Conv2d(16, 8, 4, groups=2, padding_mode="circular", padding=1),
        plainly,
        (sample(2, 16, 9, 9),),
    ),
    "conv3d": (lambda: nn.Conv3d(4, 8, 2), plainly, (sample(2, 4, 5, 5, 5),)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(8, 2, 4), plainly, (sample(2, 8, 5, 5),)),
    "rnn": (lambda: nn.RNN(32, 32, num_layers=2), plainly, (sample(6, 3, 32),)),
    "lstm": (lambda: nn.LSTM(32, 64, num_layers=2, bidirectional=True, proj_size=32), plainly, (sample(6, 3, 32),)),
    "lstm flattened": (Recurrent, plainly, (sample(6, 3, 32),)),
    "gru": (lambda: nn.GRU(32, 32, num_layers=2, bidirectional=True, bias=False), plainly, (sample(6, 3, 32),)),
    "lstm cell": (lambda: nn.LSTMCell(32, 32), plainly, (sample(3, 32),)),
    "attention": (lambda: nn.MultiheadAttention(64, 4, batch_first=True), plainly, (sample(2, 5, 64),) * 3),
    "attention kdim": (
        lambda: nn.MultiheadAttention(64, 4, kdim=32, vdim=96, add_bias_kv=True),
        plainly,
        (sample(5, 2, 64), sample(7, 2, 32), sample(7, 2, 96)),
    ),
    "encoder layer": (encoder_layer, plainly, (sample(2, 5, 64),)),
    "encoder layer norm_first": (lambda: encoder_layer(norm_first=True, bias=False), plainly, (sample(2, 5, 64),)),
    "encoder, padded": (lambda: nn.TransformerEncoder(encoder_layer(), 2), with_padding, (sample(2, 5, 64),)),
    "tied": (Tied, plainly, (tokens(),)),
}
BUILT_IN_NOISE = pytest.mark.filterwarnings(
    "ignore:LSTM with projections is not supported with oneDNN", "ignore:The PyTorch API of nested tensors"
)


def check_eval_and_training(layer: str, fmt: str) -> None:
    build, call, inputs = LAYERS[layer]
    torch.manual_seed(0)
    model = build()
    before = copy.deepcopy(model)
    keys = list(model.state_dict())
    report = morph_model(model, fmt)
    assert report.formats
    assert formats_of(model).keys() == report.formats.keys() == stores_of(model).keys()
    wanted = simulated(before, report.formats)
    model.eval()
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():  # the copy: an Embedding with max_norm writes its weights
            assert same(call(model, *inputs), call(copy.deepcopy(wanted), *inputs)), mode
    model.train()
    before.train()
    outputs = []
    for each in (model, before):
        torch.manual_seed(1)  # dropout
        outputs.append(call(each, *inputs))
    assert same(*outputs)
    assert list(model.state_dict()) == keys
    assert same(model.state_dict().values(), before.state_dict().values())


@BUILT_IN_NOISE
@pytest.mark.cross("fmt", SPREAD)
@pytest.mark.cross("layer", LAYERS)
def test_eval_sees_the_version_and_training_the_parameter(layer: str, fmt: str) -> None:
    check_eval_and_training(layer, fmt)


@pytest.mark.parametrize("fmt", few(FORMATS, 14))
def test_every_format(fmt: str) -> None:
    model = nn.Linear(128, 8).eval()
    exact = model(sample(3, 128))
    morph_model(model, fmt)
    out = model(sample(3, 128))
    assert torch.equal(out, linear(sample(3, 128), stores_of(model)["weight"].simulate(fmt), model.bias))
    if fmt in ("float32", "float64"):
        assert torch.equal(out, exact)
    elif get_format(fmt).bits_per_weight((8, 128)) <= 17:
        assert not torch.equal(out, exact)


@BUILT_IN_NOISE
def test_the_fused_encoder_layer_is_really_quantized() -> None:
    """In eval and no_grad torch runs one kernel on weights read from all parts; it must read the versions."""
    for morphed in (lambda m: m, lambda m: m.self_attn, lambda m: m.linear1):
        torch.manual_seed(0)
        layer, inputs = encoder_layer().eval(), sample(2, 5, 64)
        with torch.no_grad():
            exact = layer(inputs)
            morph_model(morphed(layer), "int4_g32")
            assert float((layer(inputs) - exact).abs().max()) > 1e-3
            wanted = simulated(layer, dict.fromkeys(stores_of(layer), "int4_g32"))
            torch.testing.assert_close(layer(inputs), wanted(inputs))


def test_a_module_within_a_frozen_part_is_quantized_while_the_rest_trains() -> None:
    model = mlp()
    morph_model(model, "int4")
    model[0].eval()
    hidden = model[0](sample(4, 32))
    assert torch.equal(hidden, linear(sample(4, 32), stores_of(model)["0.weight"].simulate("int4"), model[0].bias))
    assert torch.equal(model(sample(4, 32)), linear(hidden.relu(), model[2].weight, model[2].bias))


class ByHand(nn.Module):
    """Reads the weights of its layers and never calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = linear(x, layer.weight)
        return x


def test_weights_read_by_hand_go_by_the_mode_of_their_layer() -> None:
    model = ByHand().eval()
    morph_model(model, "int4")
    names = [f"layers.{i}.weight" for i in range(3)]
    assert torch.equal(model(sample(2, 32)), simulated(model, dict.fromkeys(names, "int4"))(sample(2, 32)))
    model.layers[1].train()
    assert torch.equal(model(sample(2, 32)), simulated(model, {names[0]: "int4", names[2]: "int4"})(sample(2, 32)))


def test_gradients_reach_inputs_and_biases_in_eval() -> None:
    model = mlp().eval()
    morph_model(model, "int8")
    inputs = sample(4, 32).requires_grad_()
    model(inputs).sum().backward()
    assert inputs.grad is not None
    assert model[0].bias.grad is not None
    assert model[0].weight.grad is None, "quantized after training, not in it"


# ---- what is left alone, and what a mapping may say ------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(32)
        self.attn = nn.MultiheadAttention(32, 2)
        self.fc = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.ones(1, 32))
        self.steps = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 8)


def test_one_format_takes_the_weights_of_known_layers_and_says_why_not_the_rest() -> None:
    report = morph_model(Net(), "int8")
    block = {name.removeprefix("blocks.0."): choice for name, choice in report.choices.items() if "blocks.0" in name}
    assert {name: (choice.fmt, choice.reason) for name, choice in block.items()} == {
        "scale": (None, "not a weight of a known layer (Block): left alone unless named"),
        "steps": (None, "not floats"),
        "ln1.weight": (None, "norm: left alone"),
        "ln1.bias": (None, "bias: left alone"),
        "attn.in_proj_weight": ("int8", "int8 for all weights"),
        "attn.in_proj_bias": (None, "bias: left alone"),
        "attn.out_proj.weight": ("int8", "int8 for all weights"),
        "attn.out_proj.bias": (None, "bias: left alone"),
        "fc.weight": ("int8", "int8 for all weights"),
        "fc.bias": (None, "bias: left alone"),
    }
    assert report.left_alone["norm.weight"] == "norm: left alone"
    assert json.loads(json.dumps(report.to_dict()))["head.weight"]["fmt"] == "int8"


IN_BLOCK_1 = ("blocks.1.attn.in_proj_weight", "blocks.1.attn.out_proj.weight", "blocks.1.fc.weight")
BIASES_OF_BLOCK_0 = ("blocks.0.ln1.bias", "blocks.0.attn.out_proj.bias", "blocks.0.fc.bias")


@pytest.mark.parametrize(
    ("mapping", "options", "morphed"),
    [
        ({"head": "int4"}, {}, {"head.weight": "int4"}),
        ({"head.weight": "int4"}, {}, {"head.weight": "int4"}),
        ({"head.bias": "int4"}, {}, {"head.bias": "int4"}),
        ({"blocks.1": "int4"}, {}, dict.fromkeys(IN_BLOCK_1, "int4")),
        ({"blocks.?.fc": "int4"}, {}, {"blocks.0.fc.weight": "int4", "blocks.1.fc.weight": "int4"}),
        ({"blocks.0.fc": "int2", "*.fc": "int4"}, {}, {"blocks.0.fc.weight": "int2", "blocks.1.fc.weight": "int4"}),
        ({"blocks": None, "*": "int4"}, {}, {"head.weight": "int4"}),
        ({"*.scale": "int4"}, {}, {"blocks.0.scale": "int4", "blocks.1.scale": "int4"}),
        ({"norm": "int8"}, {}, {"norm.weight": "int8"}),
        ({"norm.weight": "int8"}, {}, {"norm.weight": "int8"}),
        ({"*norm": "int8", "head": "int8"}, {}, {"head.weight": "int8"}),
        ({"*norm": "int8"}, {"norms": True}, {"norm.weight": "int8"}),
        ({"*ln1.*": "int8"}, {"norms": True}, {"blocks.0.ln1.weight": "int8", "blocks.1.ln1.weight": "int8"}),
        ({"blocks.0.*.bias": "int8"}, {}, dict.fromkeys(BIASES_OF_BLOCK_0, "int8")),
        ({"head": "int4", "*.bias": None, "head.bias": "int8"}, {}, {"head.weight": "int4"}),
        ({"head": "int4", "head.bias": "int8"}, {}, {"head.weight": "int4", "head.bias": "int8"}),
        ({"head": get_format("mxfp4")}, {}, {"head.weight": "mxfp4"}),
    ],
)
def test_mappings(mapping: dict[str, Any], options: dict[str, Any], morphed: dict[str, str]) -> None:
    report = morph_model(Net(), mapping, **options)
    assert report.formats == morphed
    assert all(report.left_alone.values())


@pytest.mark.parametrize("fmt", ["int8", "bfloat16", "int8_row"])
@pytest.mark.parametrize("norm", [nn.LayerNorm(32), nn.BatchNorm1d(32), nn.GroupNorm(4, 32), nn.RMSNorm(32)])
def test_norms_are_morphed_when_asked(norm: nn.Module, fmt: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32), copy.deepcopy(norm))
    with torch.no_grad():
        model[1].weight.copy_(sample(32))
    wanted = simulated(model, {"0.weight": fmt, "1.weight": fmt})
    morph_model(model, fmt, norms=True)
    model.eval()
    assert torch.equal(model(sample(4, 32)), wanted(sample(4, 32)))


def test_bare_parameters_by_name() -> None:
    model = Bare()
    wanted = simulated(model, {"mix": "int4", "more.0": "int8"})
    morph_model(model, {"mix": "int4", "more.0": "int8"})
    model.eval()
    assert torch.equal(model(sample(2, 32)), wanted(sample(2, 32)))
    assert model.calls == 1, "what a forward writes on its module stays"
    assert model.more[0] is stores_of(model)["more.0"]._master


def test_errors_name_what_is_wrong_and_change_nothing() -> None:
    model = Net()
    for mapping, words in [
        ({"heed": "int8", "*.fcc": "int8"}, r"'heed' matches no tensor; did you mean 'head'.*'\*\.fcc'"),
        ({"*norm": "int8"}, "nothing in this Net was morphed: .*norm: left alone"),
        ({"head": None}, "None in the mapping"),
    ]:
        with pytest.raises((PlanError, StoreError), match=words):
            morph_model(model, mapping)
    with pytest.raises(FormatError, match=r"no format 'int9'.* did you mean"):
        morph_model(model, "int9")
    odd = nn.Sequential(nn.Linear(32, 32), nn.Linear(33, 4))
    with pytest.raises(FormatError, match=r"1\.weight: mxfp4 has blocks of 32"):
        morph_model(odd, "mxfp4")
    with pytest.raises(StoreError, match=r"0\.weight: a store needs .* uninitialized"):
        morph_model(nn.Sequential(nn.LazyLinear(4)), {"0.weight": "int8"})
    with pytest.raises(PlanError, match=r"observers: the pattern 'hood.weight' matches no tensor"):
        morph_model(model, "int8", observers={"hood.weight": ActivationObserver()})
    with pytest.raises(StoreError, match="morph the MultiheadAttention"):
        morph_model(nn.MultiheadAttention(32, 2).out_proj, "int8")
    with pytest.raises(StoreError, match="it has no parameters"):
        morph_model(nn.ReLU(), "int8")
    for each in (model, odd):
        assert stores_of(each) == {}
        assert not any(isinstance(module, decoded_in_eval.Morphed) for module in each.modules())
    morph_model(odd, "mxfp4", pad="zero")
    assert odd.eval()[1](sample(2, 33)).shape == (2, 4)


# ---- never stale -----------------------------------------------------------------------------------------------------


def train_with(build: Callable[[Any], torch.optim.Optimizer]) -> Change:
    def change(model: nn.Module) -> None:
        model.train()
        optimizer = build(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(sample(8, 32)).square().mean().backward()
            optimizer.step()
        model.eval()

    return change


def load(assign: bool) -> Change:
    def change(model: nn.Module) -> None:
        model.load_state_dict({key: value * 1.5 for key, value in model.state_dict().items()}, assign=assign)

    return change


def replace_parameters(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(sample(64, 32, seed=3))  # type: ignore[index]


def descend_by_hand(model: nn.Module) -> None:
    model(sample(8, 32)).square().mean().backward()
    for parameter in model.parameters():
        parameter.data -= 0.1 * (torch.ones_like(parameter) if parameter.grad is None else parameter.grad)


CHANGES: dict[str, Change] = {
    "sgd": train_with(lambda p: torch.optim.SGD(p, lr=0.1, foreach=False)),
    "sgd foreach": train_with(lambda p: torch.optim.SGD(p, lr=0.1, foreach=True)),
    "sgd fused": train_with(lambda p: torch.optim.SGD(p, lr=0.1, fused=True)),
    "adamw": train_with(lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False)),
    "adamw foreach": train_with(lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True)),
    "adamw fused": train_with(lambda p: torch.optim.AdamW(p, lr=0.1, fused=True)),
    "load_state_dict": load(assign=False),
    "load_state_dict assign": load(assign=True),
    "new parameters": replace_parameters,
    "descent by hand through .data": descend_by_hand,
}


@pytest.fixture
def encodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []

    def counted(x: Tensor, fmt: object, **options: object) -> Encoded:
        done.append(str(options["name"]))
        return encode(x, fmt, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(weight_store, "encode", counted)
    return done


@pytest.mark.parametrize("change", few(CHANGES, 5))
def test_after_a_change_eval_uses_a_fresh_version_made_once(change: str, encodes: list[str]) -> None:
    model = mlp().eval()
    morph_model(model, "int4_g32", scale_rule="mse")
    for _ in range(3):
        model(sample(4, 32))
    assert encodes == ["0.weight", "2.weight"]
    stale = model(sample(4, 32))
    CHANGES[change](model)
    wanted = simulated(model, {"0.weight": "int4_g32", "2.weight": "int4_g32"}, scale_rule="mse")
    for _ in range(3):
        assert torch.equal(model(sample(4, 32)), wanted(sample(4, 32)))
    assert not torch.equal(model(sample(4, 32)), stale)
    once = ["0.weight"] if change == "new parameters" else ["0.weight", "2.weight"]
    assert encodes == ["0.weight", "2.weight", *once]


def test_training_goes_on_as_if_nothing_had_happened() -> None:
    torch.manual_seed(0)
    model = mlp()
    plain = copy.deepcopy(model)
    morph_model(model, "int2")
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        for step in range(5):
            optimizer.zero_grad()
            each.train()(sample(8, 32, seed=step)).square().mean().backward()
            optimizer.step()
            each.eval()(sample(8, 32))
    assert same(model.state_dict().values(), plain.state_dict().values())


def test_no_float32_expansion_stays_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    together: list[int] = []

    def watched(encoded: Encoded, dtype: torch.dtype = torch.float32) -> Tensor:
        gc.collect()
        together.append(sum(ref() is not None for ref in alive))
        decoded = decode(encoded, dtype)
        alive.append(weakref.ref(decoded))
        return decoded

    monkeypatch.setattr(decoded_in_eval, "decode", watched)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), ByHand(), nn.LSTM(32, 32)).eval()
    morph_model(model, "int8")
    with torch.no_grad():
        model(sample(4, 32))
    assert len(alive) == 7, "each weight once"
    assert together == [0, 0, 0, 0, 0, 0, 1], "one layer at a time; an LSTM layer has two weights"
    assert all(ref() is None for ref in alive)


@BUILT_IN_NOISE
@pytest.mark.parametrize(
    ("layer", "count"), [("attention", 2), ("attention kdim", 4), ("lstm flattened", 12), ("rnn", 4)]
)
def test_each_weight_is_decoded_once_per_call(layer: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    build, call, inputs = LAYERS[layer]
    decodes: list[Encoded] = []
    monkeypatch.setattr(decoded_in_eval, "decode", lambda *args: decodes.append(args[0]) or decode(*args))
    model = build().eval()
    morph_model(model, "int8")
    call(model, *inputs)
    assert len(decodes) == count


# ---- tied weights, shared modules, switching formats -----------------------------------------------------------------


def test_tied_weights_share_a_store_and_are_encoded_once(encodes: list[str]) -> None:
    model = Tied()
    report = morph_model(model, "int8_row")
    stores = stores_of(model)
    assert stores.keys() == report.formats.keys() == {"embed.weight", "head.weight"}
    assert stores["embed.weight"] is stores["head.weight"]
    model.eval()(tokens())
    assert encodes == ["embed.weight"]
    assert same(*model(tokens())[:2]), "the tied Linear and the embedding's weight read by hand"


def test_tied_weights_may_have_two_formats() -> None:
    model = Tied().eval()
    morph_model(model, {"embed": "int8", "head": "int4_g32"})
    store = stores_of(model)["embed.weight"]
    hidden = model.norm(embedding(tokens(), store.simulate("int8")))
    by_layer, by_hand = model(tokens())
    assert torch.equal(by_layer, linear(hidden, store.simulate("int4_g32")))
    assert torch.equal(by_hand, linear(hidden, store.simulate("int8")))


def test_a_tied_weight_named_once_is_morphed_under_all_its_names() -> None:
    """Else a model would compute otherwise before it is saved, as one tensor, and after it is loaded."""
    model = Tied().eval()
    report = morph_model(model, {"head": "int8"})
    assert report.formats == {"embed.weight": "int8", "head.weight": "int8"}
    assert report.choices["embed.weight"].reason == "tied to head.weight"
    assert same(model(tokens()), simulated(model, {"embed.weight": "int8"})(tokens()))
    assert morph_model(Tied(), {"embed": None, "head": "int8"}).formats == {"head.weight": "int8"}


def test_a_module_used_twice_is_morphed_once(encodes: list[str]) -> None:
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.Tanh(), shared).eval()
    wanted = simulated(model, {"0.weight": "int4"})
    report = morph_model(model, {"0": "int4", "2": "int8"})
    assert report.formats == {"0.weight": "int4", "2.weight": "int4"}
    assert torch.equal(model(sample(4, 32)), wanted(sample(4, 32)))
    assert encodes == ["0.weight"]


def test_a_plan_may_have_one_name_of_a_shared_weight() -> None:
    shared = nn.Linear(32, 32, bias=False)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    plan = Plan({"2.weight": Planned(Choice("int4", "a test"), (32, 32))})
    report = morph_model(model, plan)
    assert report.formats == {"0.weight": "int4", "2.weight": "int4"}
    assert report.choices["2.weight"].reason == "a test"
    with pytest.raises(PlanError, match=r"morph_model: the plan is for other tensors: it lacks 1: '0\.bias'"):
        morph_model(nn.Sequential(nn.Linear(32, 32)), choose_formats({"0.weight": (32, 32)}, "int8"))


def test_switching_formats_and_back(encodes: list[str]) -> None:
    model = mlp().eval()
    first = morph_model(model, "int8")
    assert formats_of(model) == {name: get_format(fmt) for name, fmt in first.formats.items()}
    morph_model(model, {"0": "int4"})
    assert {name: fmt.name for name, fmt in formats_of(model).items()} == {"0.weight": "int4", "2.weight": "int8"}
    assert torch.equal(model(sample(2, 32)), simulated(model, {"0.weight": "int4", "2.weight": "int8"})(sample(2, 32)))
    report = morph_model(model, {"0": None, "2.bias": "int8"}, scale_rule="mse")
    assert report.choices["2.weight"].reason == "morphed before"
    assert stores_of(model)["2.weight"].recipe("int8") == {}, "options are for what the mapping names"
    morph_model(model, {"2.bias": None})
    assert formats_of(model).keys() == {"2.weight"}
    morph_model(model, "int8")
    assert encodes.count("2.weight") == 1


# ---- the module stays the module -------------------------------------------------------------------------------------


@BUILT_IN_NOISE
@pytest.mark.parametrize("layer", few(LAYERS, 10))
def test_unmorph_leaves_no_trace(layer: str) -> None:
    build, call, inputs = LAYERS[layer]
    model = build().eval()
    exact = call(copy.deepcopy(model), *inputs)
    kinds = [type(module) for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    before = repr(model)
    morph_model(model, "int4")
    assert repr(model) == before
    assert all(isinstance(module, kind) for module, kind in zip(model.modules(), kinds, strict=True))
    call(model, *inputs)
    unmorph_model(model)
    unmorph_model(model)  # nothing left to do
    assert [type(module) for module in model.modules()] == kinds
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert same(call(model, *inputs), exact)


def test_parameters_are_the_same_objects() -> None:
    model = mlp()
    parameters = list(model.parameters())
    morph_model(model, "int8")
    model.eval()
    assert all(one is two for one, two in zip(model.parameters(), parameters, strict=True))
    assert model[0].weight is parameters[0], "outside of a forward"
    model[0].weight.data.zero_()
    assert not parameters[0].detach().any()
    assert inspect.signature(model.forward) == inspect.signature(mlp().forward)
    assert model.forward(sample(2, 32)).shape == (2, 32), "forward called by its name"


@BUILT_IN_NOISE
@pytest.mark.parametrize("layer", ["linear", "lstm", "attention", "tied"])
def test_a_deep_copy_is_independent(layer: str, encodes: list[str]) -> None:
    build, call, inputs = LAYERS[layer]
    model = build().eval()
    morph_model(model, "int8")
    out = call(model, *inputs)
    made = len(encodes)
    twin = copy.deepcopy(model)
    assert same(call(twin, *inputs), out)
    assert len(encodes) == made, "versions come along"
    assert all(
        store.follows(dict(twin.named_parameters(remove_duplicate=False))[name])
        for name, store in stores_of(twin).items()
    )
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    assert not same(call(twin, *inputs), out)
    assert same(call(model, *inputs), out)
    assert len({id(store) for store in stores_of(model).values()}) == len(
        {id(store) for store in stores_of(twin).values()}
    )


def test_a_morphed_model_is_not_pickled_by_accident() -> None:
    model = mlp()
    morph_model(model, "int8")
    with pytest.raises(StoreError, match=r"0\.weight: a morphed weight is not pickled"):
        pickle.dumps(model)
    unmorph_model(model)
    assert same(pickle.loads(pickle.dumps(model)).state_dict().values(), model.state_dict().values())


class Faulty(nn.Linear):
    error: type[BaseException] | None = None

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        if self.error is not None:
            raise self.error("in the middle")
        return out


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_forward_leaves_nothing_behind(error: type[BaseException]) -> None:
    model = nn.Sequential(Faulty(32, 32), nn.Linear(32, 32)).eval()
    morph_model(model, "int8")
    wanted = model(sample(2, 32))
    model[0].error = error
    with pytest.raises(error, match="in the middle"):
        model(sample(2, 32))
    assert not decoded_in_eval._frames.stack
    assert isinstance(model[0].weight, nn.Parameter)
    model[0].error = None
    assert torch.equal(model(sample(2, 32)), wanted)


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x: Tensor, depth: int) -> Tensor:
        return self.fc(x) if depth == 0 else self.fc(self(x, depth - 1)) + self.fc.weight.sum()


def test_recursion() -> None:
    model = Recursive().eval()
    wanted = simulated(model, {"fc.weight": "int4"})
    morph_model(model, "int4")
    assert torch.equal(model(sample(2, 32), 3), wanted(sample(2, 32), 3))


def test_functional_call_decides_for_itself() -> None:
    model = nn.Linear(32, 8).eval()
    morph_model(model, "int4")
    quantized = model(sample(2, 32))
    given = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    assert torch.equal(
        torch.func.functional_call(model, given, sample(2, 32)), linear(sample(2, 32), given["weight"], given["bias"])
    )
    other = nn.Linear(32, 8)
    borrowed = torch.func.functional_call(model, dict(other.named_parameters()), sample(2, 32))
    assert torch.equal(borrowed, linear(sample(2, 32), decode(encode(other.weight, "int4")), other.bias))
    assert torch.equal(model(sample(2, 32)), quantized)


def test_moving_and_casting_keep_the_versions(encodes: list[str]) -> None:
    """A model from a file is cast for the GPU it runs on; encoding again from rounded numbers would lose twice."""
    model = mlp().eval()
    morph_model(model, "int4", scale_rule="mse")
    versions = {name: store.morph("int4") for name, store in stores_of(model).items()}
    model.to(torch.bfloat16)
    model.float().double().float()
    model.share_memory()
    assert {name: store.morph("int4").to_bytes() for name, store in stores_of(model).items()} == {
        name: version.to_bytes() for name, version in versions.items()
    }
    model.to(torch.bfloat16)
    out = model[0](sample(2, 32).bfloat16())
    assert torch.equal(
        out, linear(sample(2, 32).bfloat16(), decode(versions["0.weight"], torch.bfloat16), model[0].bias)
    )
    assert encodes == ["0.weight", "2.weight"]
    model._apply(lambda tensor: tensor * 2)  # not a move: the numbers are others
    assert stores_of(model)["0.weight"].versions == {}


def test_moving_when_torch_makes_new_parameters() -> None:
    model = mlp().eval()
    morph_model(model, "int4", scale_rule="mse")
    wanted = model(sample(2, 32))
    stored = stores_of(model)["0.weight"].morph("int4")
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert stores_of(model)["0.weight"].morph("int4").to_bytes() == stored.to_bytes()
    assert torch.equal(model(sample(2, 32)), wanted)


def test_models_in_half_precision() -> None:
    model = mlp().bfloat16().eval()
    morph_model(model, "int8_row")
    weight = encode(model[0].weight.detach().float(), "int8_row")
    inputs = sample(2, 32).bfloat16()
    assert torch.equal(model[0](inputs), linear(inputs, decode(weight, torch.bfloat16), model[0].bias))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch 2.11's own, when its compiler is first imported
def test_torch_compile_trains_in_one_graph_and_evaluates_the_version() -> None:
    model = mlp()
    wanted = model(sample(2, 32))
    morph_model(model, "int8")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(sample(2, 32)), wanted)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    model.eval()
    assert torch.equal(compiled(sample(2, 32)), simulated(model, formats_by_name(model))(sample(2, 32)))
    CHANGES["adamw fused"](model)
    assert torch.equal(compiled(sample(2, 32)), simulated(model, formats_by_name(model))(sample(2, 32)))
    torch._dynamo.reset()


def formats_by_name(model: nn.Module) -> dict[str, str]:
    return {name: fmt.name for name, fmt in formats_of(model).items()}


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build", [lambda: nn.Linear(64, 64, bias=False), lambda: nn.RNN(64, 64, bias=False, nonlinearity="relu")]
)
def test_threads_evaluate_one_module_while_its_weights_change(build: Callable[[], nn.Module]) -> None:
    """All weights are k, inputs are ones: an output mixes no two k, and training mode elsewhere is not disturbed."""
    model, other = build().eval(), nn.Linear(8, 8)
    first = next(name for name, _ in model.named_parameters())
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    morph_model(model, "int8")
    store, stop, written = stores_of(model)[first], threading.Event(), [0]
    inputs = torch.ones(1, 64)

    def evaluate() -> None:
        while not stop.is_set():
            oldest = written[0]
            with torch.no_grad():
                out = tensors(model(inputs))[0]
            values = (out / 64).round().unique()
            assert values.numel() == 1
            assert oldest <= float(values[0]) <= written[0] + 1
            assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
            assert isinstance(getattr(model, first), nn.Parameter)

    def write() -> None:
        try:
            for k in range(1, 150):
                store.update(torch.full((64, 64), float(k)))
                written[0] = k
                other(torch.ones(1, 8)).sum().backward()
        finally:
            stop.set()

    with ThreadPoolExecutor(5) as pool:
        for job in [pool.submit(write), *(pool.submit(evaluate) for _ in range(4))]:
            job.result(60)


# ---- versions from a file --------------------------------------------------------------------------------------------


def test_attached_versions_are_kept_to_the_bit(encodes: list[str]) -> None:
    source, target = mlp().eval(), mlp().eval()
    morph_model(source, {"0": "int4_g32", "2": "q4_0_gguf"}, scale_rule="mse")
    saved = {name: store.morph(formats_of(source)[name]) for name, store in stores_of(source).items()}
    target.load_state_dict(source.state_dict())
    made = len(encodes)
    attach_encoded(target, saved)
    assert {name: store.morph(formats_of(target)[name]).to_bytes() for name, store in stores_of(target).items()} == {
        name: version.to_bytes() for name, version in saved.items()
    }
    assert torch.equal(target(sample(2, 32)), source(sample(2, 32)))
    assert len(encodes) == made
    assert torch.equal(target[0].weight.detach(), decode(saved["0.weight"])), "the master is restored from the version"
    CHANGES["sgd"](target)
    assert torch.equal(target(sample(2, 32)), simulated(target, formats_by_name(target))(sample(2, 32)))


def test_attaching_to_tied_weights() -> None:
    model = Tied().eval()
    int8, int4 = encode(sample(50, 64), "int8"), encode(sample(50, 64), "int4")
    attach_encoded(model, {"embed.weight": int8})
    assert formats_by_name(model) == {"embed.weight": "int8", "head.weight": "int8"}
    attach_encoded(model, {"embed.weight": int8, "head.weight": encode(sample(50, 64), "int8")})
    attach_encoded(model, {"embed.weight": int8, "head.weight": int4})
    assert formats_by_name(model) == {"embed.weight": "int8", "head.weight": "int4"}
    assert stores_of(model)["head.weight"].morph("int4").to_bytes() == int4.to_bytes()
    with pytest.raises(StoreError, match=r"head\.weight: another name of this tied parameter brings other int8 bytes"):
        attach_encoded(model, {"embed.weight": int8, "head.weight": encode(sample(50, 64, seed=1), "int8")})


def test_attach_refuses_before_it_changes_anything() -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    good = encode(sample(64, 32), "int8")
    with pytest.raises(StoreError, match=r"no parameter '0\.wait'; did you mean '0\.weight'"):
        attach_encoded(model, {"0.weight": good, "0.wait": good})
    with pytest.raises(StoreError, match=r"2\.weight: the parameter has shape \(32, 64\), its encoding \(64, 32\)"):
        attach_encoded(model, {"0.weight": good, "2.weight": good})
    assert same(model.state_dict().values(), before.values())
    assert stores_of(model) == {}
    attach_encoded(model, {})
    assert type(model) is nn.Sequential


# ---- observers -------------------------------------------------------------------------------------------------------


@BUILT_IN_NOISE
@pytest.mark.parametrize(
    ("layer", "seen"),
    [
        ("linear", {"weight"}),
        ("conv2d", {"weight"}),
        ("conv3d", {"weight"}),
        ("lstm", {"weight_ih_l0", "weight_ih_l0_reverse"}),
        ("lstm cell", {"weight_ih"}),
        ("attention", {"in_proj_weight"}),
        ("attention kdim", {"q_proj_weight", "k_proj_weight", "v_proj_weight"}),
        ("encoder layer", {"self_attn.in_proj_weight", "linear1.weight", "linear2.weight"}),
        ("tied", {"head.weight"}),
    ],
)
def test_observers_see_what_reaches_each_weight(layer: str, seen: set[str]) -> None:
    build, call, inputs = LAYERS[layer]
    model = build().eval()
    with observe_model(model) as observers, torch.no_grad():
        call(model, *inputs)
    assert observers.keys() == seen
    assert not any(module._forward_pre_hooks for module in model.modules())
    report = morph_model(model, "int4", observers=observers)
    for name in seen:
        calibration = report.choices[name].calibration
        assert calibration is not None
        assert calibration.error_after <= calibration.error_before
        assert "calibrated on" in report.choices[name].reason
        assert "importance" in stores_of(model)[name].recipe("int4")


def test_observing_details() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.LSTM(32, 32)).eval()
    with observe_model(model) as observers:
        packed = nn.utils.rnn.pack_sequence([sample(3, 32), sample(2, 32)])
        model[1](packed)
        model[0](input=sample(4, 32))
    assert observers["1.weight_ih_l0"].count == 5
    attention, hidden = nn.MultiheadAttention(32, 2), sample(4, 2, 32)
    with observe_model(attention) as of_attention:
        attention(hidden, hidden, hidden)
        attention(query=hidden, key=hidden, value=sample(4, 2, 32, seed=1))
    assert of_attention["in_proj_weight"].count == 8 + 16, "the same input counts once"
    torch.testing.assert_close(observers["0.weight"].mean_square, sample(4, 32).square().mean(dim=0))
    report = morph_model(model, {"0": "bfloat16", "1": "int8"}, observers=observers)
    assert report.choices["0.weight"].reason.endswith("a cast has no scales to calibrate")
    with pytest.raises(StoreError, match="no input reached a layer"), observe_model(model):
        pass
    with contextlib.suppress(ZeroDivisionError), observe_model(model):
        raise ZeroDivisionError  # not hidden behind the complaint that nothing was seen


# ---- comparison ------------------------------------------------------------------------------------------------------


def test_comparison_sees_quantization_loss() -> None:
    model = mlp()
    morphed = copy.deepcopy(model)
    morph_model(morphed, {"0": "int4", "2": "int8"})
    result = compare_models(model, morphed)
    for name, fmt in (("0.weight", "int4"), ("2.weight", "int8")):
        parameter = model.get_parameter(name)
        report = error_report(parameter, encode(parameter, fmt))
        layer = result.layers[name]
        assert (layer.cosine, layer.sqnr_db, layer.max_error) == (report.cosine, report.sqnr_db, report.max_error)
        assert layer.relative_error == report.relative_error > 0
        assert (layer.format_a, layer.format_b) == (None, fmt)
    assert result.layers["0.bias"].sqnr_db == math.inf
    assert result.layers["0.weight"].sqnr_db < result.overall.sqnr_db < result.layers["2.weight"].sqnr_db
    assert result.overall.count == sum(parameter.numel() for parameter in model.parameters())
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert document["layers"]["0.bias"]["sqnr_db"] is None
    assert document["overall"]["cosine"] == result.overall.cosine


def test_coarser_formats_compare_worse() -> None:
    model = nn.Linear(128, 64)
    figures = []
    for fmt in ("float32", "bfloat16", "int8", "q4_0_gguf", "int4", "int2"):
        morphed = copy.deepcopy(model)
        morph_model(morphed, fmt)
        figures.append(compare_models(model, morphed).overall.sqnr_db)
    assert figures[0] == math.inf
    assert figures == sorted(figures, reverse=True)
    assert len(set(figures)) == len(figures)


def test_comparison_follows_the_weights() -> None:
    model = nn.Linear(32, 32, bias=False)
    morph_model(model, "int8")
    before = copy.deepcopy(model)
    assert compare_models(before, model).overall.cosine == 1.0
    with torch.no_grad():
        model.weight.add_(1.0)
    assert compare_models(before, model).overall.cosine < 0.9


def test_comparison_of_mappings_and_tied_models() -> None:
    model = Tied()
    morphed = copy.deepcopy(model)
    morph_model(morphed, "int8")
    result = compare_models(model, morphed)
    assert result.layers.keys() == {"embed.weight", "norm.weight", "norm.bias"}, "tied parameters count once"
    encoded = {
        "embed.weight": encode(model.embed.weight, "int8"),
        "norm.weight": model.norm.weight,
        "norm.bias": model.norm.bias,
    }
    assert compare_models(model, encoded) == result
    assert compare_models(model, model.state_dict()).overall.cosine == 1.0
    mixed = copy.deepcopy(model)
    morph_model(mixed, {"embed": "int8", "head": "int4"})
    both = compare_models(model, mixed).layers
    assert (both["embed.weight"].format_b, both["head.weight"].format_b) == ("int8", "int4")
    assert both["embed.weight"].cosine > both["head.weight"].cosine
    assert compare_models(model.state_dict(), model.state_dict()).layers.keys() == model.state_dict().keys()
    normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert compare_models(normed, normed.state_dict()).overall.sqnr_db == math.inf, "buffers are no parameters"


def test_models_that_do_not_match_are_an_error() -> None:
    with pytest.raises(StoreError) as caught:
        compare_models(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
            nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2, bias=False), nn.Linear(1, 1)),
        )
    message = str(caught.value)
    assert "'1.bias' only in a" in message
    assert "'2.weight' only in b" in message
    assert "'0.weight' is (4, 4) in a, (4, 5) in b" in message


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture
def exact_gpu() -> Iterator[None]:
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = tf32


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_gpu")
@BUILT_IN_NOISE
@pytest.mark.parametrize("fmt", ["int8", "int4_g32"])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_on_a_gpu(layer: str, fmt: str) -> None:
    build, call, inputs = LAYERS[layer]
    torch.manual_seed(0)
    model = build().eval()
    inputs = tuple(tensor.cuda() for tensor in inputs)
    morph_model(model, fmt)
    wanted = simulated(model, formats_by_name(model)).cuda()
    versions = {name: store.morph(fmt).to_bytes() for name, store in stores_of(model).items()}
    model.cuda()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    moved = [store.morph(fmt) for store in stores_of(model).values()]
    with torch.no_grad():
        if "padded" in layer:
            inputs = (inputs[0], torch.tensor([[False] * 5, [False] * 3 + [True] * 2], device="cuda"))
            call = lambda m, x, mask: m(x, src_key_padding_mask=mask)
        for one, two in zip(tensors(call(model, *inputs)), tensors(call(wanted, *inputs)), strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert {name: store.morph(fmt).to_bytes() for name, store in stores_of(model).items()} == versions
    assert all(store.morph(fmt) is version for store, version in zip(stores_of(model).values(), moved, strict=True))
    assert [parameter.data_ptr() for parameter in model.parameters()] == places, "cuDNN's flat weights are a copy"
    for module in model.modules():
        if isinstance(module, nn.LSTM):
            module.flatten_parameters()
    assert {name: store.morph(fmt).to_bytes() for name, store in stores_of(model).items()} == versions

"""What a model computes stays what it computes: packed, streamed and in FP8, beside its plain self.

Bounds are relative differences of outputs (norm of the difference by norm of the plain output):

    packed    int8 rows, joined where the view joins them        0.03
    streamed  in the parameters' own type                        none: equal to the bit
    streamed  in int8 rows                                       0.03
    trained   streamed weights, or vectors on the device as adapters are, in the parameters' own type: gradients and
              AdamW's numbers after a step are equal to the bit to those of the plain model and torch's AdamW
    FP8       tensorwise, emulated, every layer that fits        0.15

Models that a way cannot take are refused by name.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

pytest.importorskip("numba")

from bitplan import apply_plan, describe
from bitplan.fp8.apply import apply_fp8
from bitplan.packed import fuse_projections
from bitplan.streaming.block_stream import stream_blocks
from bitplan.streaming.options import StreamOptions
from bitplan.streaming.training.adamw import AdamWSettings
from bitplan.streaming.transfer.devices import SimulatedDevice
from tests.plan.structure import handwritten_models as models
from tests.plan.structure.test_families import SIZES

IDS = torch.arange(3, 19)[None]
PACKED, STREAMED, FP8 = 0.03, 0.03, 0.15
Model = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def of(name: str) -> nn.Module:
    kind = getattr(transformers, name)
    known = kind.config_class.__dataclass_fields__
    model: nn.Module = kind(kind.config_class(**{key: value for key, value in SIZES.items() if key in known}))
    return model


def by_hand(model: Callable[[], nn.Module]) -> Callable[[], Model]:
    return lambda: (model(), (IDS,), {})


def decoder(name: str) -> Callable[[], Model]:
    return lambda: (of(name), (IDS,), {"use_cache": False})


def dit() -> Model:
    return models.DiT(), (torch.randn(1, 4, 16, 16), torch.full((1,), 3.0)), {}


def unet() -> Model:
    return models.UNet(), (torch.randn(1, 3, 16, 16),), {}


def t5() -> Model:
    return of("T5ForConditionalGeneration"), (), {"input_ids": IDS, "decoder_input_ids": IDS, "use_cache": False}


def whisper() -> Model:
    features = torch.randn(1, 16, 32)
    return (
        of("WhisperModel"),
        (),
        {"input_features": features, "decoder_input_ids": IDS[:, :8], "use_cache": False},
    )


def value_alone(self: models.TitanAttention, x: Tensor) -> Tensor:
    out: Tensor = self.wo(self.wv(x)) + x
    return out


def patched() -> Model:
    """A forward that somebody put on an instance, and which does something else."""
    model = models.Titan()
    attention = model.layers["0"].attention
    attention.forward = types.MethodType(value_alone, attention)
    return model, (IDS,), {}


def patched_class() -> Model:
    """A class of transformers whose forward was replaced: the MLP has no gate any more."""
    model = of("LlamaForCausalLM")

    class Patched(transformers.models.llama.modeling_llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down_proj(self.act_fn(self.up_proj(x)))
            return out

    for layer in model.model.layers:
        layer.mlp.__class__ = Patched
    return model, (IDS,), {"use_cache": False}


def hooked() -> Model:
    """A hook that changes what attention reads, so that a norm must not be moved into it."""
    model = models.Titan()
    model.layers["0"].attention.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))
    return model, (IDS,), {}


MODELS: dict[str, Callable[[], Model]] = {
    "nanogpt": by_hand(models.NanoGPT),
    "torchtitan": by_hand(models.Titan),
    "fused": by_hand(lambda: models.Titan(models.FusedBlock)),
    "parallel": by_hand(lambda: models.Titan(models.ParallelBlock)),
    "sandwich named LlamaDecoderLayer": by_hand(lambda: models.Titan(models.LlamaDecoderLayer)),
    "leaky": by_hand(lambda: models.Titan(models.LeakyBlock)),
    "experts": by_hand(lambda: models.Titan(models.MoeBlock)),
    "patched": patched,
    "patched class": patched_class,
    "hooked": hooked,
    "dit": dit,
    "unet": unet,
    "t5": t5,
    "whisper": whisper,
    "llama": decoder("LlamaForCausalLM"),
    "gemma2": decoder("Gemma2ForCausalLM"),
    "gpt2": decoder("GPT2LMHeadModel"),
    "mixtral": decoder("MixtralForCausalLM"),
}


def first(output: Any) -> Tensor:
    tensor = output if isinstance(output, Tensor) else output[0]
    return tensor.detach().float()


def difference(ours: Any, theirs: Any) -> float:
    return float((first(ours) - first(theirs)).norm() / first(theirs).norm())


def trained_streamed(model: nn.Module, pattern: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """One step of training, streamed, beside the plain model: of the weights of blocks, then of their vectors alone."""
    options: Any = {"slots": 3, "device": SimulatedDevice(), "options": StreamOptions(timeout_s=240.0)}

    def backward(twin: nn.Module) -> dict[str, Tensor]:
        output = twin(*args, **kwargs)
        (output if isinstance(output, Tensor) else output[0]).float().square().mean().backward()
        return {name: one.grad for name, one in twin.named_parameters() if one.grad is not None}

    plain, streamed = copy.deepcopy(model), copy.deepcopy(model)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    expected = backward(plain)
    adamw.step()
    with stream_blocks(streamed, pattern, train="weights", optimizer=AdamWSettings(lr=1e-3), **options) as stream:
        stream.begin_step(0)
        outside = backward(streamed)
        stream.end_step()
        tensors = stream.state_dict()["tensors"]
        assert outside.keys() == expected.keys() - stream.formats.keys()
        stepped = {name.removesuffix(".exp_avg") for name in tensors if name.endswith(".exp_avg")}
        assert stepped == expected.keys() & stream.formats.keys() != set()
        for name, parameter in plain.named_parameters():
            if name in outside:
                assert torch.equal(outside[name], expected[name]), name
            elif name in expected:
                state = adamw.state[parameter]
                for part, numbers in (
                    ("master", parameter),
                    ("exp_avg", state["exp_avg"]),
                    ("exp_avg_sq", state["exp_avg_sq"]),
                ):
                    assert torch.equal(tensors[f"{name}.{part}"], numbers), f"{name}.{part}"

    plain, streamed = copy.deepcopy(model), copy.deepcopy(model)
    for twin in (plain, streamed):
        for parameter in twin.parameters():
            parameter.requires_grad_(parameter.dim() < 2)
    expected = backward(plain)
    with stream_blocks(streamed, pattern, train="adapters", **options) as stream:
        stream.begin_step(0)
        gradients = backward(streamed)
        stream.end_step()
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient), name


LONG = ("leaky", "experts", "gemma2", "patched class")
# Layers in FP8: of experts that are a Linear each none; of Gemma 2 none, whose blocks differ by more than the bound; of
# patched blocks those that the patch leaves out stay apart.
FP8_LAYERS = {
    **dict.fromkeys(("torchtitan", "nanogpt", "fused", "parallel", "hooked", "llama", "gpt2", "mixtral"), 8),
    "sandwich named LlamaDecoderLayer": 8,
    "leaky": 4,
    "experts": 0,
    "unet": 0,
    "gemma2": 0,
    "dit": 11,
    "t5": 22,
    "whisper": 22,
    "patched": 10,
    "patched class": 10,
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.long) if one in LONG else one for one in MODELS])
def test_outputs_stay_what_they_were(name: str) -> None:
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    with torch.no_grad():
        for parameter in model.eval().parameters():  # norms' weights too, which begin as ones
            parameter.add_(0.05 * torch.randn_like(parameter))
        expected = model(*args, **kwargs)
    view = describe(model, args or kwargs)
    weights = sorted({use.weight for use in view.linears if use.role not in ("head", "router")})

    def packed() -> nn.Module:
        twin = copy.deepcopy(model)
        apply_plan(twin, dict.fromkeys(weights, "int8_row") | {"*": "float32"})
        fuse_projections(twin, example=args or kwargs)
        return twin

    assert difference(packed()(*args, **kwargs), expected) < PACKED

    pattern = f"{view.blocks()[-1].path}.*".lstrip(".")
    for formats, bound in ((None, 0.0), ("int8_row", STREAMED)):
        streamed = copy.deepcopy(model)
        options: Any = {"slots": 3, "train": "nothing", "formats": formats, "options": StreamOptions(timeout_s=240.0)}
        with stream_blocks(streamed, pattern, device=SimulatedDevice(), **options), torch.no_grad():
            assert difference(streamed(*args, **kwargs), expected) <= bound
    trained_streamed(model, pattern, args, kwargs)

    fp8 = copy.deepcopy(model)
    applied = apply_fp8(fp8, None, tokens=16, recipe="tensorwise", emulate=True, example=args or kwargs)
    assert applied.fp8_layers == FP8_LAYERS[name]
    assert (0.0 < difference(fp8(*args, **kwargs), expected) < FP8) == (applied.fp8_layers > 0)

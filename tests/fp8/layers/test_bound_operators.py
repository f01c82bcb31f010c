"""Bound calls of FP8 operators launch what the operators launch, and compute the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from bitplan.base.compiled_code import FUNCTIONS
from bitplan.base.loops import launch as launches
from bitplan.fp8.kernels import guessed_cast
from bitplan.fp8.kernels.cast import width_of
from bitplan.fp8.layer_settings import Fp8Recipe, GemmChoice
from bitplan.fp8.layers import bound_operators, joined_mlp, linear_function, scale_guesses, weight_casts
from bitplan.fp8.layers.products import Fp8Settings

TOKENS, WIDTH, FEATURES = 48, 64, 128
GENERAL = {
    "fp8_norm_linear_forward": linear_function.run_forward,
    "fp8_norm_linear_backward": linear_function.run_backward,
    "fp8_mlp_forward": joined_mlp.run_mlp_forward,
    "fp8_mlp_backward": joined_mlp.run_mlp_backward,
}
Launch = tuple[str, tuple[int, ...], tuple[Any, ...], tuple[str, ...]]


def text_of(norm: str | None = None, fp8: Any = "e4m3") -> str:
    recipe = Fp8Recipe("tensorwise", fp8)
    return Fp8Settings(recipe, GemmChoice.all("tensorwise"), (norm, 1e-6) if norm else None).to_text()


class Layer:
    """Operands of all operators of a llama's layer, or of nanoGPT's: a layer norm, GELU, and biases everywhere."""

    def __init__(self, device: str, norm: str, fp8: str = "e4m3") -> None:
        torch.manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape).to(device, torch.bfloat16)

        self.function = "silu_gated" if norm == "rms" else "gelu"
        width = width_of(self.function, FEATURES)
        self.x, self.norm = normal(TOKENS, WIDTH), normal(WIDTH) * 0.1 + 1
        self.weight, self.first, self.down = normal(96, WIDTH), normal(width, WIDTH), normal(WIDTH, FEATURES)
        sizes = {"norm_bias": WIDTH, "bias": 96, "first_bias": width, "down_bias": WIDTH}
        self.biases = {name: normal(size) if norm == "layer" else None for name, size in sizes.items()}
        self.plain, self.normed = text_of(fp8=fp8), text_of(norm, fp8)

    def step(self, call: Callable[..., tuple[Any, ...]], *, wgrad: bool = True) -> list[Tensor]:
        """Run every operator, the backward after the forward; all results."""
        x, norm, weight, first, down = self.x, self.norm, self.weight, self.first, self.down
        norm_bias, bias, first_bias, down_bias = self.biases.values()
        linear = call("fp8_norm_linear_forward", x, None, None, weight, bias, self.plain, wgrad, wgrad, True)
        normed = call("fp8_norm_linear_forward", x, norm, norm_bias, weight, bias, self.normed, wgrad, wgrad, True)
        made = [*linear, *normed]
        flags = (wgrad, wgrad, wgrad, wgrad, True)
        of_bias = (wgrad, wgrad, wgrad and first_bias is not None, wgrad, True)
        for of_norm, text in (((norm, norm_bias), self.normed), ((None, None), self.plain)):
            texts = (text, self.plain, self.function)
            y, *kept = call("fp8_mlp_forward", x, *of_norm, first, first_bias, down, down_bias, *texts, *flags)
            made += [y, *kept]
            if wgrad:
                given = (y, x, *of_norm, first, first_bias, down, *kept, *texts)
                made += call("fp8_mlp_backward", *given, *of_bias)
        if not wgrad:
            return made
        kept_of_linear = (*linear[1:3], weight, *(None,) * 5)
        of_linear = call("fp8_norm_linear_backward", linear[0], *kept_of_linear, self.plain, True, True, True)
        kept_of_norm = (*normed[1:3], weight, x, norm, norm_bias, *normed[3:])
        of_normed = call("fp8_norm_linear_backward", normed[0], *kept_of_norm, self.normed, True, True, True)
        return [*made, *of_linear, *of_normed]


def bound(name: str, *given: Any) -> tuple[Any, ...]:
    return FUNCTIONS[name](*given)


def general(name: str, *given: Any) -> tuple[Any, ...]:
    made = GENERAL[name](*given[:-1], linear_function.CASTS[given[-1]])
    return tuple(given[0].new_empty(0) if each is None else each for each in made)


def forget() -> None:
    weight_casts.drop_casts()
    scale_guesses._kept.clear()


class PretendedGpu:
    """CPU tensors that say they are on a GPU, where launches are recorded instead of run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: dict[int, str] = {}
        self.recorded: list[Launch] = []
        stream = SimpleNamespace(cuda_stream=7, wait_stream=lambda _: None)
        driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: 7))
        compiled: dict[Any, Any] = {}

        def ordinary(launch: launches.PreparedLaunch, pointers: tuple[Tensor | None, ...]) -> Any:
            addresses = tuple(0 if each is None else each.data_ptr() for each in pointers)
            self._record(launch._kernel.__name__, launch.grid, addresses, launch._tail)
            return compiled.setdefault(launch, SimpleNamespace(launch=launch))

        def entry_of(kernel: Any) -> tuple[Any, tuple[Any, ...], Any]:
            launch = kernel.launch
            count = launch._count

            def run(x: int, y: int, z: int, _stream: int, *rest: Any) -> None:
                self._record(launch._kernel.__name__, (x, y, z), rest[:count], rest[count:])

            return run, (), kernel

        def product(a: Tensor, b: Tensor, *scales_and_more: Any, out: Tensor | None = None) -> Tensor:
            self._record("product", (a.shape[0], b.shape[1], a.shape[1]), (), (*scales_and_more[4:],))
            made = torch.zeros((a.shape[0], b.shape[1]), dtype=scales_and_more[4])
            return made if out is None else out.copy_(made)

        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        monkeypatch.setattr(torch, "_scaled_mm", product)
        for owner, name, value in (
            (torch._C, "_cuda_getCurrentRawStream", lambda _: 7),
            (torch._C, "_cuda_getDevice", lambda: -1),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "current_stream", lambda _=None: stream),
            (torch.cuda, "default_stream", lambda _=None: stream),
            (launches, "INTERPRETED", SimpleNamespace(value=False)),
            (launches, "_current_device", lambda: -1),
            (launches, "is_watched", lambda: False),
            (launches, "_entry_of", entry_of),
            (launches.PreparedLaunch, "_launch_ordinarily", ordinary),
            (launches.triton.runtime, "driver", driver),
            (bound_operators, "_current_device", lambda: -1),
            (bound_operators, "_is_capturing", lambda: False),
            (bound_operators, "current_stream", lambda _: 7),
        ):
            monkeypatch.setattr(owner, name, value, raising=False)
        for module in (bound_operators, guessed_cast):
            monkeypatch.setattr(module, "empty_on_gpu", torch._C._dynamo.guards._empty_strided_cpu)

    def _record(self, name: str, grid: tuple[int, ...], addresses: tuple[int, ...], tail: tuple[Any, ...]) -> None:
        roles = tuple("none" if not each else self.names.get(each, "new") for each in addresses)
        self.recorded.append((name, grid, tail, roles))


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    forget()
    with torch.no_grad():
        yield PretendedGpu(monkeypatch)
    forget()


@pytest.mark.parametrize("wgrad", [True, False])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_bound_calls_launch_what_operators_launch(pretended: PretendedGpu, norm: str, wgrad: bool) -> None:
    layer = Layer("cpu", norm)
    pretended.names = {getattr(layer, name).data_ptr(): name for name in ("x", "norm", "weight", "first", "down")}
    pretended.names |= {bias.data_ptr(): name for name, bias in layer.biases.items() if bias is not None}
    used: list[str] = []

    def counted(name: str, *given: Any) -> tuple[Any, ...]:
        before = len(pretended.recorded)
        made = bound(name, *given)
        used.append(f"{name} {len(pretended.recorded) - before}")
        return made

    layer.step(bound, wgrad=wgrad)  # compiles
    pretended.recorded.clear()
    expected = layer.step(general, wgrad=wgrad)
    launched = list(pretended.recorded)
    pretended.recorded.clear()
    with pytest.MonkeyPatch.context() as patch:  # nothing is left to the operators
        patch.setattr(linear_function, "CASTS", ())
        made = layer.step(counted, wgrad=wgrad)
    assert pretended.recorded == launched
    assert len(used) == (8 if wgrad else 4)
    assert [(each.shape, each.dtype, each.stride()) for each in made] == [
        (each.shape, each.dtype, each.stride()) for each in expected
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", ["e4m3", "hybrid"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_bound_calls_compute_what_operators_compute(norm: str, fp8: str) -> None:
    results = []
    for call in (general, bound):
        forget()
        guessed_cast.drift_on(torch.device("cuda", 0)).zero_()
        layer = Layer("cuda:0", norm, fp8)
        with torch.no_grad():
            results.append([layer.step(call) for _ in range(4)])
    for expected, made in zip(*results, strict=True):
        for index, (one, other) in enumerate(zip(expected, made, strict=True)):
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other))), index

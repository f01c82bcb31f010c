"""How a linear layer uses FP8: the recipe, the epsilons, which products are FP8, and whether this machine can.

    recipe = Fp8Recipe("blockwise", fp8="hybrid", eps=AmaxEps.from_environment(os.environ))
    gemms = GemmChoice(fprop="blockwise", dgrad="tensorwise", wgrad="bf16")    # or GemmChoice.all("blockwise")

A recipe says how an operand is scaled (`fp8.recipes` has the table); a `GemmChoice` names the recipe of each of
the three products, or "bf16", so recipes can be mixed where they were measured to win. A layer without a GemmChoice
gets `GemmChoice.all` of the recipe's own name.

Fast accumulation: Hopper's tensor cores keep about 14 bits of a running FP8 sum, and only without "fast accumulation"
move it to float32 every few steps. A product over k numbers then carries a relative error of up to about
2^-14 * k / 32 (0.8% at k = 4096), beside the 3.7% that rounding two operands to E4M3 gives. `fast_accum` names the
products that use it: by default fprop alone. Gradients sum over tokens and wide layers, where k is largest, and without
it a layer forward and backward took 0 to 2% longer on an H200 (4% at 1024 tokens of 6144x4096). A sum over at most
`SHORT_SUM` numbers, as wgrad's over few tokens, is added fast unless `fast_accum` is (): its error is below that of
most fprops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import torch

from bitplan.base.errors import MissingLibraryError
from bitplan.base.optional import require
from bitplan.fp8.policy.vocabulary import PRODUCTS, Fp8Error, shape_obstacle
from bitplan.fp8.recipes import BF16, find_recipe, recipe_fault

SHORT_SUM = 2048
EPS_VARIABLES = {
    "input": "FP8_QUANT_FWD_INP_AMAX_EPS",
    "weight": "FP8_QUANT_FWD_WEIGHT_AMAX_EPS",
    "grad": "FP8_QUANT_BWD_GRAD_AMAX_EPS",
}


class Fp8UnavailableError(Fp8Error):
    """This machine cannot multiply in FP8, or not by this recipe."""


class Fp8LayerError(Fp8Error):
    """An FP8 layer cannot be built as asked, or got an input that it does not take."""


@dataclass(frozen=True)
class AmaxEps:
    """The smallest amax that a scale is made from, for each role. 0: no minimum; a zero tensor is safe either way."""

    input: float = 0.0
    weight: float = 0.0
    grad: float = 0.0

    def __post_init__(self) -> None:
        for role in EPS_VARIABLES:
            value = getattr(self, role)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise Fp8LayerError(f"the amax epsilon of {role} must be a number from 0, got {value!r}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read the three FP8_QUANT_* variables; one that is empty or missing means 0."""
        values = {}
        for role, name in EPS_VARIABLES.items():
            text = environment.get(name, "").strip()
            if not text:
                continue
            try:
                values[role] = float(text)
            except ValueError:
                values[role] = math.nan
            if not 0 <= values[role] < math.inf:
                raise Fp8LayerError(f"{name} must be a number from 0, such as 1e-12, got {text!r}")
        return cls(**values)


@dataclass(frozen=True)
class Fp8Recipe:
    """How operands are scaled, the FP8 type of gradients ("hybrid": E5M2), and which products accumulate fast."""

    name: str = "tensorwise"
    fp8: Literal["e4m3", "hybrid"] = "e4m3"
    eps: AmaxEps = AmaxEps()
    fast_accum: tuple[str, ...] = ("fprop",)

    def __post_init__(self) -> None:
        if fault := recipe_fault(self.name):
            raise Fp8LayerError(fault)
        if self.fp8 not in ("e4m3", "hybrid"):
            raise Fp8LayerError(f"fp8 must be 'e4m3' or 'hybrid' (E5M2 gradients), got {self.fp8!r}")
        unknown = set(self.fast_accum) - set(PRODUCTS)
        if unknown:
            raise Fp8LayerError(f"fast_accum names products {', '.join(PRODUCTS)}, got {sorted(unknown)}")

    @property
    def grad_fp8(self) -> str:
        return "e5m2" if self.fp8 == "hybrid" else "e4m3"


@dataclass(frozen=True)
class GemmChoice:
    """Which recipe, or "bf16", each of a layer's three products runs in: fprop, dgrad, wgrad."""

    fprop: str
    dgrad: str
    wgrad: str

    def __post_init__(self) -> None:
        for product in PRODUCTS:
            if fault := recipe_fault(getattr(self, product), product, (BF16,)):
                raise Fp8LayerError(fault)

    @classmethod
    def all(cls, recipe: str) -> Self:
        return cls(recipe, recipe, recipe)

    @property
    def recipes(self) -> tuple[str, ...]:
        """The recipes used, each once, in the order of the products; empty where all is BF16."""
        return tuple(dict.fromkeys(value for value in (self.fprop, self.dgrad, self.wgrad) if value != BF16))

    @property
    def is_bf16(self) -> bool:
        return not self.recipes


def require_fp8(device: torch.device | str, recipes: tuple[str, ...] = ()) -> None:
    """Raise `Fp8UnavailableError` where this device cannot run these recipes; a CPU emulates all of them."""
    missing = fp8_obstacle(torch.device(device), recipes)
    if missing is not None:
        raise Fp8UnavailableError(missing)


def usable_device(name: str, what: str, recipes: tuple[str, ...] | None = (), index: int = 0) -> torch.device:
    """The device of this name, "cpu" or "cuda", for doing `what`; one that lacks it, or the recipes, is refused."""
    if name == "cuda" and not torch.cuda.is_available():
        raise Fp8UnavailableError(
            f"torch sees no CUDA GPU, so there is nothing to {what}; run on the GPU that will train "
            "(the CPU emulates FP8, to try the command)",
            settings={"device": "cpu"},
        )
    device = torch.device("cuda", index) if name == "cuda" else torch.device(name)
    if recipes is not None:
        require_fp8(device, recipes)
    return device


@functools.cache
def fp8_obstacle(device: torch.device, recipes: tuple[str, ...] = ()) -> str | None:
    """What this device lacks for FP8 products, or None."""
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"FP8 layers run on CUDA GPUs and are emulated on CPUs, got device {device}; use BF16 there"
    if not torch.cuda.is_available():
        return f"device {device} was asked for, but torch sees no CUDA GPU; install CUDA torch, or use the CPU"
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    have = f"{name} has compute capability {capability[0]}.{capability[1]}"
    if capability < (8, 9):
        return f"FP8 products need compute capability 8.9 (Ada, Hopper, Blackwell), {have}; use BF16 there"
    for recipe in map(find_recipe, recipes):
        if recipe.capability is None or capability < recipe.capability:
            return f"the recipe {recipe.name} {recipe.needs}, {have}; use {recipe.instead}"
    try:
        require("triton", purpose="FP8 on a GPU")
    except MissingLibraryError as error:
        return str(error)
    return None


def check_shape(gemms: GemmChoice, shape: tuple[int, int], where: str = "the layer") -> None:
    """Raise where a weight of this shape cannot be cast as the products ask."""
    for recipe in gemms.recipes:
        obstacle = shape_obstacle(recipe, shape)
        if obstacle is not None:
            raise Fp8LayerError(f"{where}: {obstacle}; pad the weight, use another recipe, or keep this layer in BF16")

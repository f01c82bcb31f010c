"""Times of linear layers and experts in formats, as the packed runtime runs them, beside BF16 and in turns with it.

Products with the experts of a layer, to be timed: as the packed runtime runs them, and in BF16.

Tokens are sent to experts at random, each to as many as the model sends it to: a product has rows x experts per token
rows, and reads the matrices of those experts alone that got one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bitplan.base.paired_timing import OK, Arm, stopwatch_of, time_in_turns
from bitplan.formats import get_format
from bitplan.formats.dispatch import encode
from bitplan.packed.apply_plan import apply_plan
from bitplan.packed.crossover import compile_together
from bitplan.packed.expert_products import ExpertMatrices, Routes, fused_product, looped_product, looped_rows
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.product_strategy import FUSED_ROWS_UNMEASURED, compute_dtype
from bitplan.packed.quant_linear import QuantLinear, warm_up
from bitplan.packed.rounded_inputs import round_inputs
from bitplan.searching.evidence import SearchEvidence, TensorGroup, input_of, weight_format
from bitplan.searching.goal import SearchError

if TYPE_CHECKING:
    from bitplan.searching.searched_model import SearchSubject

# ---- expert timing ---------------------------------------------------------------------------------------------------


_PER_TOKEN = ("num_experts_per_tok", "moe_topk")


def experts_of_stacks(
    subject: SearchSubject, weights: Sequence[str]
) -> list[tuple[tuple[int, ...], Callable[[], Tensor]]]:
    """The shape [experts, outputs, inputs] of each stack of weights, gate and up joined, and how to read it."""
    stacks: dict[str, list[str]] = {}
    for name in weights:
        site = subject.sites[name]
        if site.slice is not None:
            stacks.setdefault(site.slice.stack, []).append(name)
    shapes_and_numbers: list[tuple[tuple[int, ...], Callable[[], Tensor]]] = []
    for names in stacks.values():
        rows: dict[int, list[str]] = {}
        for name in names:
            part = subject.sites[name].slice
            assert part is not None
            rows.setdefault(part.expert, []).append(name)
        outputs, inputs = (
            sum(subject.sites[name].shape[0] for name in next(iter(rows.values()))),
            subject.sites[names[0]].shape[1],
        )
        shapes_and_numbers.append(((len(rows), outputs, inputs), partial(_numbers, subject, list(rows.values()))))
    return shapes_and_numbers


def _numbers(subject: SearchSubject, experts: Sequence[Sequence[str]]) -> Tensor:
    return torch.stack([torch.cat([subject.weight(name) for name in names]) for names in experts])


def experts_per_token(subject: SearchSubject) -> int:
    """How many experts a token is sent to, by the model's config."""
    config: Any = getattr(subject.model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in _PER_TOKEN:
        count = getattr(config, name, None)
        if isinstance(count, int) and count > 0:
            return count
    raise SearchError(
        f"{subject.where}: its experts cannot be timed, for its config does not say how many a token is sent "
        f"to ({', '.join(_PER_TOKEN)}); give another goal than speed, or leave them as they are",
        settings={"keep": "*experts*"},
    )


class ExpertArms:
    """Timed variants of one layer's experts [experts, outputs, inputs], on random tokens and routes."""

    def __init__(self, subject: SearchSubject, weights: Tensor, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        count, top_k = len(weights), min(len(weights), experts_per_token(subject))
        ids = torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(rows)])
        self._weights, self._device = weights, weights.device
        self._routes = Routes(ids.to(self._device), count, "experts")
        x = torch.randn(rows, weights.shape[2], generator=generator).to(self._device, torch.bfloat16)
        self._x, self._sorted = x, x[self._routes.groups.order // top_k].contiguous()

    def plain(self) -> Callable[[], object]:
        half = self._weights.to(torch.bfloat16)

        def numbers(expert: int, _dtype: torch.dtype) -> Tensor:
            return half[expert]

        return lambda: looped_rows(self._sorted, None, self._routes, numbers, half.shape[1])

    def packed(self, fmt: str) -> Arm:
        """Run the experts as QuantExperts would."""
        if get_format(fmt).is_cast:
            return self.plain

        def build() -> Callable[[], object]:
            matrices = ExpertMatrices(PackedWeight(encode(self._weights, fmt, name=fmt)))
            few = self._routes.pairs <= FUSED_ROWS_UNMEASURED * self._routes.experts
            if self._device.type == "cuda" and few and _can_fuse(matrices):
                return lambda: fused_product(self._x, None, self._routes, matrices, per_pair=False)
            rows = self._sorted.to(compute_dtype(self._device, torch.bfloat16))
            return lambda: looped_product(rows, None, self._routes, matrices, matrices.decoded)

        return build


def _can_fuse(matrices: ExpertMatrices) -> bool:
    from bitplan.packed.products.fused_few_rows import why_not_fused

    return why_not_fused(matrices.encoded, torch.bfloat16) is None


# ---- timing ----------------------------------------------------------------------------------------------------------


REFERENCE = "BF16"
TURNS, WARMUP = 7, 2
COMPILED_AT_ONCE = 2**30  # numbers of weights whose kernels are compiled side by side
Times = dict[str, float]  # microseconds by format


def time_groups(
    subject: SearchSubject,
    evidence: SearchEvidence,
    rows: int,
    formats: Sequence[str],
    advance: Callable[[int, str], None],
) -> None:
    """Put times at `rows` rows into the evidence; each shape is timed once, tensors of one group add up.

    The experts of a layer are one product, of as many rows as tokens are sent to them. A weight that is only looked up
    takes no time here. A format that the runtime has no product for gets none.
    """
    by_shape: dict[tuple[int, ...], Times] = {}
    tried: dict[tuple[int, ...], set[str]] = {}  # some have no time: the runtime has no product for them
    missing_of: dict[str, list[str]] = {}
    for name, group in evidence.groups.items():
        absent = [fmt for fmt in formats if fmt in group.formats and rows not in group.formats[fmt].us]
        if absent or rows not in group.reference_us:
            missing_of[name] = absent
    products_of = {name: _products(subject, evidence.groups[name]) for name in missing_of}
    if subject.device.type == "cuda":
        compile_first(subject, [(shape, missing_of[name]) for name in missing_of for shape in products_of[name]], rows)
    for name, group_formats in missing_of.items():
        group, products = evidence.groups[name], products_of[name]
        for shape, weights in products.items():
            times_of_shape, before = by_shape.setdefault(shape, {}), tried.setdefault(shape, set())
            missing = [fmt for fmt in group_formats if fmt not in before]
            if missing or REFERENCE not in times_of_shape:
                times_of_shape |= _time_shape(subject, weights[0](), missing, rows)
                before |= set(missing)
        shapes = [shape for shape, weights in products.items() for _ in weights]
        group.reference_us = {**group.reference_us, rows: sum(by_shape[shape][REFERENCE] for shape in shapes)}
        for fmt in group_formats:
            times = [by_shape[shape].get(fmt) for shape in shapes]
            if None not in times:
                total = sum(time for time in times if time is not None)
                cost = group.formats[fmt]
                group.formats[fmt] = replace(cost, us={**cost.us, rows: total})
        advance(1, name)


def _products(subject: SearchSubject, group: TensorGroup) -> dict[tuple[int, ...], list[Callable[[], Tensor]]]:
    """Products with the tensors of a group, by shape, each with what gives its numbers."""
    tensors = subject.tensors
    weights = [weight for tensor in group.tensors for weight in tensors[tensor].weights]
    numbers_by_shape: dict[tuple[int, ...], list[Callable[[], Tensor]]] = {}
    for name in (name for name in weights if subject.sites[name].linears):
        numbers_by_shape.setdefault(subject.sites[name].shape, []).append(partial(subject.weight, name))
    for shape, numbers in experts_of_stacks(subject, weights):
        numbers_by_shape.setdefault(shape, []).append(numbers)
    return numbers_by_shape


def compile_first(
    subject: SearchSubject, wanted_formats: Iterable[tuple[tuple[int, ...], Sequence[str]]], rows: int
) -> None:
    """Compile kernels of many shapes and formats side by side: one after the other, as they are timed, takes minutes.

    What does not compile fails once more when it is timed, and says why there.
    """
    # Kernels of rounded inputs are those of the weight's format.
    formats = ((shape, weight_format(name)) for shape, names in wanted_formats for name in names)
    pairs = list(dict.fromkeys((shape, fmt) for shape, fmt in formats if not get_format(fmt).is_cast))
    while pairs:
        count = max(1, sum(total <= COMPILED_AT_ONCE for total in accumulate(math.prod(shape) for shape, _ in pairs)))
        some, pairs = pairs[:count], pairs[count:]
        layers, calls = nn.ModuleList(), []
        for shape, fmt in some:
            with suppress(Exception):
                numbers = torch.randn(shape, device=subject.device, generator=torch.Generator(subject.device))
                if len(shape) == 2:
                    layers.append(QuantLinear(encode(numbers, fmt), name=fmt))
                else:
                    calls.append(ExpertArms(subject, numbers, rows).packed(fmt)())
        compile_together(subject.device, calls)
        with suppress(Exception):
            warm_up(layers, (rows,))


def is_timed(evidence: SearchEvidence, rows: int) -> bool:
    """Whether the evidence has times at so many rows."""
    return all(rows in group.reference_us for group in evidence.groups.values())


def _time_shape(subject: SearchSubject, weight: Tensor, formats: Sequence[str], rows: int) -> Times:
    """Time products with a weight [N, K], or with a layer's experts [experts, N, K], in BF16 and each format."""
    if weight.dim() == 3:
        experts = ExpertArms(subject, weight, rows)
        return _best_times({REFERENCE: experts.plain, **{fmt: experts.packed(fmt) for fmt in formats}}, weight.device)
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(rows, weight.shape[1], generator=generator, device=weight.device).to(torch.bfloat16)
    half = weight.to(torch.bfloat16)
    arms: dict[str, Arm] = {REFERENCE: lambda: lambda: linear(x, half)}
    for name in formats:
        if get_format(weight_format(name)).is_cast:
            cast = weight.to(get_format(name).storage)
            arms[name] = _cast_arm(x.to(cast.dtype), cast)
        else:
            arms[name] = _packed_arm(weight, name, x)
    return _best_times(arms, weight.device)


def _best_times(arms: Mapping[str, Arm], device: torch.device) -> Times:
    with torch.no_grad():
        timed = time_in_turns(arms, stopwatch_of(device), turns=TURNS, warmup=WARMUP)
    return {name: 1000 * min(timing.samples_ms) for name, timing in timed.items() if timing.status == OK}


def _cast_arm(x: Tensor, weight: Tensor) -> Arm:
    return lambda: lambda: linear(x, weight)


def _packed_arm(weight: Tensor, candidate: str, x: Tensor) -> Arm:
    def build() -> Callable[[], object]:
        encoded = encode(weight.float(), weight_format(candidate))
        layer = QuantLinear(encoded, inputs=input_of(candidate), name=candidate)
        return lambda: layer(x)

    return build


@dataclass(frozen=True)
class BlockTimes:
    """A whole block, norms and attention included, in BF16 and by a plan; microseconds at `rows` rows."""

    rows: int
    block: int
    reference_us: float
    plan_us: float

    @property
    def faster(self) -> float:
        """The block's speed by the plan, as a multiple of BF16's."""
        return self.reference_us / self.plan_us

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "faster": self.faster}


def time_block(subject: SearchSubject, formats: Mapping[str, str], rows: int) -> BlockTimes | None:
    """The middle block by a plan, in turns with itself in BF16; None where the model has no list of blocks.

    A sum over single layers leaves out what lies between them, so a speed goal is confirmed here.
    """
    runner = subject.runner
    if not runner.blocks:
        return None
    index = len(runner.blocks) // 2
    with torch.no_grad():
        with runner.outside():
            states = runner.enter(torch.zeros(1, rows, dtype=torch.int64))
        call = states.calls[index]
        block_inputs = _in_bf16((states.hidden, call.args, dict(call.kwargs)))
        with runner.block_weights(index):
            plain = copy.deepcopy(runner.blocks[index]).to(torch.bfloat16)
            packed = copy.deepcopy(plain)
        local = {runner.name_in_block(index, subject.names[name]): candidate for name, candidate in formats.items()}
        apply_plan(packed, {name: weight_format(fmt) for name, fmt in local.items() if name}, match="common")
        round_inputs(packed, {name: rounded for name, fmt in local.items() if name and (rounded := input_of(fmt))})
        hidden, args, kwargs = block_inputs
        arms: dict[str, Arm] = {
            REFERENCE: lambda: lambda: plain(hidden, *args, **kwargs),
            "plan": lambda: lambda: packed(hidden, *args, **kwargs),
        }
        timed = time_in_turns(arms, stopwatch_of(runner.device), turns=2 * TURNS, warmup=WARMUP)
    best = {name: 1000 * min(timing.samples_ms) for name, timing in timed.items() if timing.status == OK}
    if len(best) < len(arms):
        failed = next(name for name in arms if name not in best)
        raise SearchError(f"{subject.where}: block {index} cannot be timed: {failed} does not run at {rows} rows")
    return BlockTimes(rows, index, best[REFERENCE], best["plan"])


def _in_bf16(value: Any) -> Any:
    """A copy with all floating-point tensors in bfloat16, also inside tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return value.to(torch.bfloat16) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _in_bf16(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_in_bf16(item) for item in value)
    return value

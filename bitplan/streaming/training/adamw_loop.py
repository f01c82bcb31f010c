"""AdamW in one pass: reads the gradient in its type; writes master, moments and what is sent.

Every operation is one of torch's fused AdamW, in its order, with multiplication and addition in one rounding where
torch's compiler puts them into one. The last few numbers, which fill no vector, torch computes another way: they are
left to it. States in little memory (see `adamw`) are widened, stepped and made small again a block at a time.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from torch import Tensor

from bitplan.base.loops.jit import compiled, inlined
from bitplan.base.loops.row_pieces import Cut, First, run
from bitplan.base.loops.vectors import VectorType, VectorWriter, define, lanewise, load, store
from bitplan.streaming.training.adamw import (
    BLOCK,
    FIRST_CODES,
    FIRST_MIX,
    SECOND_CODES,
    SECOND_MIX,
    STRIDE,
    AdamWRates,
    AdamWTensors,
    SmallTensors,
    random_seed,
    step_by_torch,
    step_small_by_torch,
)

LANES = 16  # a multiple of what torch takes at a time, on any CPU
NUMBER_NS, SMALL_NUMBER_NS = 1.0, 6.0  # on one thread
F32, I32, U32 = np.float32, np.int32, np.uint32
INT32 = ir.IntType(32)
WORDS = ir.VectorType(INT32, LANES)
FLOATS = VectorType(types.float32, LANES)
SMALL_SHARE = 0.5  # of a gradient in its mean: torch rounds larger ones another way
NO_MASTER, NO_REMAINDER = torch.empty(0), torch.empty(0, dtype=torch.int16)
# The look at torch's bits: how many numbers; betas, decay of weights, types of the gradient and of what is sent.
TRIED = 4096
TRIED_WAYS = (
    ((0.9, 0.999), 0.01, torch.bfloat16, torch.bfloat16),
    ((0.9, 0.95), 0.1, torch.float32, torch.bfloat16),  # accumulated or clipped
    ((0.3, 0.95), 0.0, torch.float32, torch.float32),
)


def step_by_loop(tensors: AdamWTensors, rates: AdamWRates) -> None:
    """Do what `step_by_torch` does, to the bit; gradient and `sent` are float32 or bfloat16."""
    loop_of(tensors)(rates, NO_MASTER)


def loop_of(tensors: AdamWTensors) -> Callable[[AdamWRates, Tensor], None]:
    """Return a call that does what `step_by_torch` does with these tensors, for any number of steps."""
    count, whole = tensors.master.numel(), [one.detach().view(-1) for one in tensors if one is not None]
    end = count // LANES * LANES
    master, gradient, first, second, *sent = (Cut(_array(one[:end])) for one in whole)
    rest = AdamWTensors(*(one[end:] for one in whole))

    def step(rates: AdamWRates, _scratch: Tensor) -> None:
        if end:
            target = sent[0] if sent else master
            run(_step, end, NUMBER_NS, master, gradient, first, second, target, bool(sent), _factors(rates))
        if end < count:
            step_by_torch(rest, rates, torch.empty(LANES))

    return step


def step_small_by_loop(tensors: SmallTensors, rates: AdamWRates, key: str, start: int) -> None:
    """Do what `step_small_by_torch` does, to the bit, for whole blocks; the numbers after them are left to it."""
    end = len(tensors.gradient) // BLOCK * BLOCK
    weights, remainder, gradient, moments = tensors.part(0, end)
    if end:
        halves = (weights, remainder) if remainder is not None else (torch.empty(0, dtype=torch.uint16), NO_REMAINDER)
        master = NO_MASTER if remainder is not None else weights
        arrays = [Cut(_array(one)) for one in (master, *halves, gradient, moments.first, moments.second)]
        scales = [Cut(one.numpy(), share=BLOCK) for one in (moments.first_scales, moments.second_scales)]
        seeds = np.array([random_seed(key, moment) for moment in (1, 2)], U32)
        run(
            _step_small,
            end,
            SMALL_NUMBER_NS,
            *arrays,
            *scales,
            _factors(rates, remainder is not None),
            seeds,
            First(start),
        )
    if end < len(tensors.gradient):
        step_small_by_torch(tensors.part(end, len(tensors.gradient)), rates, key, start + end)


def differs_from_torch() -> str:
    """Say where the loop differs from torch on this machine, tried with settings of each kind; empty if nowhere."""
    random = torch.Generator().manual_seed(0)
    for betas, decay, dtype, sent in TRIED_WAYS:
        size = 10.0 ** torch.randint(-9, 2, (TRIED,), generator=random)
        gradient = (torch.randn(TRIED, generator=random) * size).to(dtype)
        start = [torch.randn(TRIED, generator=random), torch.randn(TRIED, generator=random) * 1e-3]
        start.append(torch.rand(TRIED, generator=random) * 1e-4)
        results = []
        for step in (step_by_loop, lambda tensors, rates: step_by_torch(tensors, rates, torch.empty(TRIED))):
            master, first, second = (one.clone() for one in start)
            tensors = AdamWTensors(master, gradient, first, second, torch.empty(TRIED, dtype=sent))
            step(tensors, AdamWRates(1e-3, betas, 1e-8, decay, 3))
            results.append(tensors)
        for name, mine, torchs in zip(AdamWTensors._fields, *results, strict=True):
            if not torch.equal(mine, torchs):
                return f"bits of {name} are not those of torch {torch.__version__} on this processor"
    return ""


def _array(tensor: Tensor) -> Any:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _factors(rates: AdamWRates, is_split: bool = False) -> Any:
    """Return the factors of a step, computed in 64 bits and rounded to 32, as torch does."""
    (beta1, beta2), share = rates.betas, F32(1 - rates.betas[0])
    is_large = not abs(share) < SMALL_SHARE
    corrections = 1 - beta1**rates.step, 1 - beta2**rates.step
    return np.array(
        [
            1 - rates.lr * rates.weight_decay,
            share - F32(1) if is_large else share,
            is_large,
            beta2,
            1 - beta2,
            math.sqrt(corrections[1]),
            rates.eps,
            -(rates.lr / corrections[0]),
            rates.factor,
            is_split,
        ],
        F32,
    )


# ---- the loop: BF16 numbers are words of 16 bits ---------------------------------------------------------------------


def _all(number: int) -> Any:
    return ir.Constant(WORDS, [ir.Constant(INT32, number)] * LANES)


def _read(writer: VectorWriter, array: Any, index: Any) -> Any:
    kind, builder = writer.kinds[0].dtype, writer.builder
    pointed = ir.VectorType(writer.llvm(kind), LANES)
    numbers = builder.load(writer.pointer(array, index, pointed), align=kind.bitwidth // 8)
    if kind == types.float32:
        return numbers
    return builder.bitcast(builder.shl(builder.zext(numbers, WORDS), _all(16)), writer.llvm(FLOATS))


def _write(writer: VectorWriter, array: Any, index: Any, numbers: Any) -> Any:
    kind, builder = writer.kinds[0].dtype, writer.builder
    if kind != types.float32:
        words = builder.bitcast(numbers, WORDS)
        odd = builder.and_(builder.lshr(words, _all(16)), _all(1))
        nearest = builder.lshr(builder.add(builder.add(words, odd), _all(0x7FFF)), _all(16))
        is_nan = builder.fcmp_unordered("uno", numbers, numbers)
        numbers = builder.trunc(builder.select(is_nan, _all(0x7FC0), nearest), ir.VectorType(writer.llvm(kind), LANES))
    builder.store(numbers, writer.pointer(array, index, numbers.type), align=kind.bitwidth // 8)
    return writer.context.get_dummy_value()


read = define(2, lambda _array, _index: FLOATS, _read)
write = define(3, lambda _array, _index, _numbers: types.void, _write)
# a * b + c, rounded once.
fused = lanewise(lambda writer, a, b, c: writer.call(f"llvm.fma.v{LANES}f32", a.type, [a, b, c]), arity=3)
root = lanewise(lambda writer, a: writer.call(f"llvm.sqrt.v{LANES}f32", a.type, [a]), arity=1)


@compiled
def _step(master, gradient, first, second, sent, sends, factors):
    decay, share, is_large, beta2 = factors[0], factors[1], factors[2] != 0, factors[3]
    square_share, correction, eps, size, factor = factors[4], factors[5], factors[6], factors[7], factors[8]
    for i in range(0, master.size, LANES):
        weight, grad, mean = load(master, i, LANES) * decay, read(gradient, i) * factor, load(first, i, LANES)
        mean = fused(share, grad - mean, grad) if is_large else fused(share, grad - mean, mean)
        square = fused(grad * square_share, grad, load(second, i, LANES) * beta2)
        weight = weight + mean * size / (root(square) / correction + eps)
        store(first, i, mean)
        store(second, i, square)
        store(master, i, weight)
        if sends:
            write(sent, i, weight)


# ---- states in little memory -----------------------------------------------------------------------------------------


@inlined
def _random(position, seed):
    """A number of `random_numbers`; every product is cut to 32 bits, for numba makes it one of 64."""
    word = U32(position * U32(STRIDE) + seed)
    word = U32((word ^ (word >> U32(16))) * U32(FIRST_MIX))
    word = U32((word ^ (word >> U32(15))) * U32(SECOND_MIX))
    return F32(I32(U32(word ^ (word >> U32(15))) >> U32(8))) * F32(2.0**-24)


@inlined
def _largest(bits):
    """The bits of the largest magnitude: without their signs, bits have the order of numbers."""
    largest = I32(0)
    for i in range(BLOCK):
        largest = max(largest, bits[i] & I32(0x7FFFFFFF))
    return largest


@compiled
def _step_small(
    master, weights, remainder, gradient, first, second, first_scales, second_scales, factors, seeds, start
):
    """One step with small moments: masters are in `master`, or joined from `weights` and `remainder`."""
    masters, means, squares = np.empty(BLOCK, F32), np.empty(BLOCK, F32), np.empty(BLOCK, F32)
    words, mean_bits, square_bits = masters.view(I32), means.view(I32), squares.view(I32)
    scale_bits, is_split = np.empty(2, I32), factors[9] != 0
    scales = scale_bits.view(F32)
    for block in range(gradient.size // BLOCK):
        at = block * BLOCK
        if is_split:
            for i in range(BLOCK):
                words[i] = (I32(weights[at + i]) << I32(16)) + I32(remainder[at + i])
        else:
            for i in range(BLOCK):
                masters[i] = master[at + i]
        for i in range(BLOCK):
            share = F32(first[at + i]) / F32(FIRST_CODES)
            means[i] = share * abs(share) * first_scales[block]
            share = F32(second[at + i]) / F32(SECOND_CODES)
            square = share * share
            squares[i] = square * square * second_scales[block]
        _step(masters, gradient[at : at + BLOCK], means, squares, masters, False, factors)
        if is_split:
            for i in range(BLOCK):
                weights[at + i] = np.uint16((words[i] + I32(0x8000)) >> I32(16))
                remainder[at + i] = np.int16(words[i])
        else:
            for i in range(BLOCK):
                master[at + i] = masters[i]
        scale_bits[0], scale_bits[1] = _largest(mean_bits), _largest(square_bits)
        first_scales[block], second_scales[block] = scales[0], scales[1]
        by = scales[0] if scales[0] != 0 else F32(1)
        second_by = scales[1] if scales[1] != 0 else F32(1)
        for i in range(BLOCK):
            position = U32(start + at + i)
            code = I32(np.sqrt(abs(means[i]) / by) * F32(FIRST_CODES) + _random(position, seeds[0]))
            code = min(code, I32(FIRST_CODES))
            first[at + i] = np.int8(-code if means[i] < 0 else code)
            code = I32(np.sqrt(np.sqrt(squares[i] / second_by)) * F32(SECOND_CODES) + _random(position, seeds[1]))
            code = max(min(code, I32(SECOND_CODES)), I32(1))
            second[at + i] = np.uint8(code if squares[i] != 0 else I32(0))

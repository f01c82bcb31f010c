"""AdamW on the host: its settings, checked where they are made, and the definition of its step in plain torch.

A step is that of torch's fused AdamW, some numbers at a time. `adamw_loop` has the same in compiled loops, to the bit.

The states can take little memory: moments 2.13 bytes a weight instead of 8, the FP32 master of a BF16 weight 2 bytes
beside it instead of 4. A moment is cut into blocks of 64 numbers, and each has a scale, the largest magnitude in it,
in float32:

    first moment     code = sign(m) * round(127 * sqrt(|m| / scale))    m = sign(code) * (code / 127)^2 * scale
    second moment    code = round(255 * sqrt(sqrt(v / scale))), at least 1    v = (code / 255)^4 * scale

Roots give small numbers of a block more codes; the second moment's numbers are squares, so they have two. A second
moment above 0 never becomes 0, which would make its step endless.

Codes are rounded up or down at random, so that their mean is the number: a second moment moves by a thousandth a step,
far less than half a code, and would stand still if it were rounded to nearest. The random numbers depend on the weight,
the step and the position in the weight alone, so any number of processes makes the same codes. The largest number of a
block has the largest code, so numbers that are read and written again, to nearest, as a saved state is, have the same
codes.

The FP32 master of a BF16 weight is the weight, which is sent, and a remainder of 16 bits:

    weight        the nearest BF16 number of the master; of two that are as near, the one that is farther from 0
    remainder     bits of the master - bits of the weight * 65536, from -32768 to 32767: no bit of the master is lost
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitplan.base.documents import show
from bitplan.base.errors import StreamError


@dataclass(frozen=True)
class AdamWSettings:
    """Settings of torch.optim.AdamW for the streamed weights; what AdamW refuses is refused here."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        betas: Any = self.betas
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise StreamError(f"AdamW: betas: expected two numbers, got {_on_one_line(betas)}")
        checked = tuple(setting(f"betas[{at}]", beta, below=1.0) for at, beta in enumerate(betas))
        object.__setattr__(self, "betas", checked)
        for name in ("lr", "eps", "weight_decay"):
            object.__setattr__(self, name, setting(name, getattr(self, name)))

    def with_lr(self, lr: float) -> AdamWSettings:
        return replace(self, lr=lr)

    def of(self, _shape: tuple[int, ...]) -> AdamWSettings:
        """The settings for a weight: the same for all, whatever its shape."""
        return self

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "betas": list(self.betas)}


def setting(name: str, value: Any, *, below: float = math.inf) -> float:
    """A setting of AdamW as a float, if it is a number (or a tensor of one) from 0 to `below`."""
    is_number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    if isinstance(value, bool) or not is_number or not 0.0 <= float(value) < below:
        expected = (
            "a finite number of at least 0" if below == math.inf else f"a number of at least 0 and below {below:g}"
        )
        raise StreamError(f"AdamW: {name}: expected {expected}, got {_on_one_line(value)}")
    return float(value)


def _on_one_line(value: Any) -> str:
    return " ".join(show(value).split())  # a tensor is shown in several


# ---- one step, by torch's fused AdamW --------------------------------------------------------------------------------


class AdamWRates(NamedTuple):
    """The settings of one step, as torch.optim.AdamW has them, and a factor of gradients; the first step is step 1."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    factor: float = 1.0


class AdamWTensors(NamedTuple):
    """Contiguous tensors with equally many numbers; `sent` gets the new masters in its type."""

    master: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    sent: Tensor | None = None


def step_by_torch(tensors: AdamWTensors, rates: AdamWRates, scratch: Tensor) -> None:
    """Do one step by torch's fused AdamW, which is the definition.

    It takes as many numbers at a time as the scratch has, where a gradient in another type is widened.
    """
    for part in pieces([one for one in tensors if one is not None], len(scratch)):
        step_together([AdamWTensors(*part)], [rates], scratch)


def step_together(tensors: Sequence[AdamWTensors], rates: Sequence[AdamWRates], scratch: Tensor) -> None:
    """Do what `step_by_torch` does for flat tensors whose rates differ in `step` alone, in one call."""
    first, gradients = rates[0], [one.gradient for one in tensors]
    if first.factor != 1.0 or any(one.dtype != torch.float32 for one in gradients):
        sizes = [one.numel() for one in gradients]
        wide = list(scratch[: sum(sizes)].split(sizes))
        torch._foreach_copy_(wide, gradients)
        gradients = wide
        if first.factor != 1.0:
            scratch[: sum(sizes)].mul_(first.factor)
    torch._fused_adamw_(
        [one.master for one in tensors],
        gradients,
        [one.first for one in tensors],
        [one.second for one in tensors],
        [],
        [torch.tensor(float(one.step)) for one in rates],
        lr=first.lr,
        beta1=first.betas[0],
        beta2=first.betas[1],
        weight_decay=first.weight_decay,
        eps=first.eps,
        amsgrad=False,
        maximize=False,
    )
    sent = [(one.sent, one.master) for one in tensors if one.sent is not None]
    if sent:
        torch._foreach_copy_([copy for copy, _ in sent], [master for _, master in sent])


def pieces(tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Cut contiguous tensors of equal length into pieces of `size` numbers, and yield the pieces side by side."""
    flat = [tensor.detach().view(-1) for tensor in tensors]
    for start in range(0, len(flat[0]), size):
        yield [one[start : start + size] for one in flat]


# ---- moments and masters in little memory ----------------------------------------------------------------------------


BLOCK = 64
FIRST_CODES, SECOND_CODES = 127, 255
AT_A_TIME = 2**18  # numbers that are widened at a time: they stay in the processor's caches
WORD = 2**32 - 1
# Multipliers of `random_numbers`.
STRIDE, FIRST_MIX, SECOND_MIX = 0x9E3779B1, 0x21F0AAAD, 0x735A2D97


class SmallMoments(NamedTuple):
    """The two moments of one weight, flat: codes (int8, uint8) and the scales of their blocks."""

    first: Tensor
    second: Tensor
    first_scales: Tensor
    second_scales: Tensor

    @classmethod
    def zeros(cls, count: int) -> SmallMoments:
        blocks = -(-count // BLOCK)
        codes = torch.zeros(count, dtype=torch.int8), torch.zeros(count, dtype=torch.uint8)
        return cls(*codes, torch.zeros(blocks), torch.zeros(blocks))

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self)

    def part(self, start: int, end: int) -> SmallMoments:
        """Views of the numbers from `start`, a multiple of a block, to `end`."""
        blocks = slice(start // BLOCK, -(-end // BLOCK))
        return SmallMoments(
            self.first[start:end], self.second[start:end], self.first_scales[blocks], self.second_scales[blocks]
        )

    def read(self) -> tuple[Tensor, Tensor]:
        """Decode both moments to float32."""
        first, roots = self.first.float().div_(FIRST_CODES), self.second.float().div_(SECOND_CODES)
        second = roots.square_().square_()
        return _times(first.mul_(first.abs()), self.first_scales), _times(second, self.second_scales)

    def write(self, first: Tensor, second: Tensor, key: str | None = None, start: int = 0) -> None:
        """Encode numbers; they are overwritten.

        key: of the random numbers, with `start`, where these numbers begin in their weight; None: round to nearest.
        """
        up, second_up = (
            None if key is None else random_numbers(random_seed(key, moment), start, len(first)) for moment in (1, 2)
        )
        signs = first.sign()
        self.first.copy_(_codes(_roots(first.abs_(), self.first_scales), FIRST_CODES, up).mul_(signs))
        is_zero = second == 0
        codes = _codes(_roots(second, self.second_scales).sqrt_(), SECOND_CODES, second_up)
        self.second.copy_(codes.clamp_(min=1).masked_fill_(is_zero, 0))


class SmallTensors(NamedTuple):
    """One weight with its states, flat: float32 masters, or BF16 weights with their remainders."""

    weights: Tensor
    remainder: Tensor | None
    gradient: Tensor
    moments: SmallMoments

    def part(self, start: int, end: int) -> SmallTensors:
        """Views of the numbers from `start`, a multiple of a block, to `end`."""
        remainder = None if self.remainder is None else self.remainder[start:end]
        return SmallTensors(self.weights[start:end], remainder, self.gradient[start:end], self.moments.part(start, end))


def step_small_by_torch(tensors: SmallTensors, rates: AdamWRates, key: str, start: int) -> None:
    """Widen the states, step, and make them small again; this is the definition. `key`, `start`: see `write`."""
    scratch = torch.empty(min(len(tensors.gradient), AT_A_TIME))
    for begin in range(0, len(tensors.gradient), AT_A_TIME):
        weights, remainder, gradient, moments = tensors.part(begin, begin + AT_A_TIME)
        master = weights if remainder is None else join_master(weights, remainder)
        first, second = moments.read()
        step_by_torch(AdamWTensors(master, gradient, first, second), rates, scratch)
        moments.write(first, second, key, start + begin)
        if remainder is not None:
            split_master(master, weights, remainder)


def _times(numbers: Tensor, scales: Tensor) -> Tensor:
    for part, of_blocks in _blocks(numbers, scales):
        part.mul_(of_blocks)
    return numbers


def _blocks(numbers: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the whole blocks, one a row, and of the last one where it is shorter, each with its scales."""
    count = len(numbers) // BLOCK
    if count:
        yield numbers[: count * BLOCK].view(-1, BLOCK), scales[:count, None]
    if count < len(scales):
        yield numbers[count * BLOCK :].view(1, -1), scales[count:, None]


def _roots(numbers: Tensor, scales: Tensor) -> Tensor:
    """Compute sqrt(number / scale) in place, at most 1, and write each block's scale."""
    for part, of_blocks in _blocks(numbers, scales):
        torch.amax(part, 1, keepdim=True, out=of_blocks)
        part.div_(of_blocks.masked_fill(of_blocks == 0, 1))
    return numbers.sqrt_()


def _codes(roots: Tensor, largest: int, up: Tensor | None) -> Tensor:
    codes = roots.mul_(largest)
    if up is None:
        return codes.round_()
    # `largest` and a random number just below 1 add up to `largest` + 1 in float32, which no code is
    return codes.add_(up).floor_().clamp_(max=largest)


def random_seed(key: str, moment: int) -> int:
    """Return the seed of the random numbers of one step of one weight; `moment` is 1 or 2."""
    return zlib.crc32(f"{key} {moment}".encode())


def random_numbers(seed: int, start: int, count: int) -> Tensor:
    """Numbers `start` to `start + count` of a seed, from 0 to below 1 in 24 bits: a hash of their positions."""
    word = torch.arange(start, start + count).mul_(STRIDE).add_(seed).bitwise_and_(WORD)
    for shift, multiplier in ((16, FIRST_MIX), (15, SECOND_MIX)):
        word = (word ^ (word >> shift)).mul_(multiplier).bitwise_and_(WORD)
    return (word ^ (word >> 15)).bitwise_right_shift_(8).float().mul_(2.0**-24)


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """Put a BF16 weight and its remainder together to the float32 master; all flat."""
    return (weight.view(torch.int16).int() << 16).add_(remainder).view(torch.float32)


def split_master(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write a float32 master into a BF16 weight and its remainder, all flat."""
    bits = master.view(torch.int32)
    weight.view(torch.int16).copy_((bits + 0x8000) >> 16)
    remainder.copy_(bits)  # its low 16 bits

"""What a token needs between its products, on a CPU: sums with RMS norms, and attention with rotary positions.

The numbers of one token are few, so that operators of torch take longer to be called than to compute. Both are C
functions of a job (`JOB` names its fields), as products are; `packed.language.token_steps` has the same in torch.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
import math
import struct
from array import array
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitplan.base.hardware import float_lanes
from bitplan.base.loops.addresses import load_from, read, sum_of_lanes, take, write
from bitplan.base.loops.jit import inlined, thread_count
from bitplan.base.loops.openmp_threads import c_function, run
from bitplan.base.loops.vectors import multiply_add

F32, F64, I64 = np.float32, np.float64, np.int64
LANES = float_lanes()
LEAST_FOR_THREADS = 1 << 20  # multiplications of an attention; below, threads cost more than they save
JOB = (
    "x",  # float32 [width]: the token so far; of an attention queries, keys and values [heads, width], turned in place
    "added",  # float32 [width] that is added to x before, or 0
    "weight",  # float32 [width] of a norm
    "y",
    "width",
    "eps",  # a float64
    "cos",  # float32 [width]: of the token's position, signs of the first half in `sin`
    "sin",
    "keys",  # float32 [heads, room, width], of which `at` are filled
    "values",
    "scores",  # float32 [queries, room], scratch memory
    "at",
    "queries",
    "heads",
    "room",
    "next",
)
X, ADDED, WEIGHT, Y, WIDTH, EPS, COS, SIN, KEYS, VALUES, SCORES, AT, QUERIES, HEADS, ROOM, NEXT = range(len(JOB))


@inlined
def field(job, index):
    return read(job + 8 * index, I64)


@inlined
def vector(address):
    return load_from(address, F32, LANES)


def _norm(job):
    """An RMS norm: x += added; y = x * weight / sqrt(mean of x^2 + eps)."""
    x, added, weight, y, width = field(job, X), field(job, ADDED), field(job, WEIGHT), field(job, Y), field(job, WIDTH)
    if added:
        for k in range(0, width, LANES):
            write(x + 4 * k, vector(x + 4 * k) + vector(added + 4 * k))
    squares = vector(x) * vector(x)
    for k in range(LANES, width, LANES):
        squares = multiply_add(vector(x + 4 * k), vector(x + 4 * k), squares)
    scale = F32((F64(sum_of_lanes(squares)) / width + read(job + 8 * EPS, F64)) ** -0.5)
    for k in range(0, width, LANES):
        write(y + 4 * k, vector(x + 4 * k) * vector(weight + 4 * k) * scale)


@inlined
def turn(x, y, cos, sin, half):
    """Halves of a head, turned against each other: y = x cos + (second, first) sin."""
    for k in range(0, 4 * half, 4 * LANES):
        first, second = vector(x + k), vector(x + 4 * half + k)
        write(y + k, multiply_add(second, vector(sin + k), first * vector(cos + k)))
        write(y + 4 * half + k, multiply_add(first, vector(sin + 4 * half + k), second * vector(cos + 4 * half + k)))


@inlined
def mix(q, keys, values, scores, y, count, width):
    """One head's attention: softmax(q keys / sqrt(width)) values, of `count` tokens."""
    scale, top = F32(1 / math.sqrt(width)), F32(-np.inf)
    for t in range(count):
        key = keys + 4 * width * t
        sums = vector(q) * vector(key)
        for k in range(4 * LANES, 4 * width, 4 * LANES):
            sums = multiply_add(vector(q + k), vector(key + k), sums)
        score = F32(sum_of_lanes(sums) * scale)
        write(scores + 4 * t, score)
        top = max(top, score)
    total = F64(0)
    for t in range(count):
        share = F32(math.exp(F32(read(scores + 4 * t, F32) - top)))
        write(scores + 4 * t, share)
        total += share
    scale = F32(1 / total)
    for k in range(0, 4 * width, 4 * LANES):
        sums = vector(values + k) * read(scores, F32)
        for t in range(1, count):
            sums = sums + vector(values + 4 * width * t + k) * read(scores + 4 * t, F32)
        write(y + k, sums * scale)


def _attention(job):
    """The token's keys and values are entered; a thread takes keys of one head and the queries that share them."""
    x, at, queries, heads, width = (
        field(job, X),
        field(job, AT),
        field(job, QUERIES),
        field(job, HEADS),
        field(job, WIDTH),
    )
    cos, sin, half, room, group = field(job, COS), field(job, SIN), width // 2, field(job, ROOM), queries // heads
    h = take(job + 8 * NEXT, 1)
    while h < heads:
        keys, values = field(job, KEYS) + 4 * width * room * h, field(job, VALUES) + 4 * width * room * h
        turn(x + 4 * width * (queries + h), keys + 4 * width * at, cos, sin, half)
        for k in range(0, 4 * width, 4 * LANES):
            write(values + 4 * width * at + k, vector(x + 4 * width * (queries + heads + h) + k))
        for n in range(h * group, (h + 1) * group):
            q = x + 4 * width * n
            turn(q, q, cos, sin, half)
            mix(q, keys, values, field(job, SCORES) + 4 * room * n, field(job, Y) + 4 * width * n, at + 1, width)
        h = take(job + 8 * NEXT, 1)


@functools.cache
def functions() -> tuple[Any, Any]:
    """The C functions of a norm and of an attention."""
    return c_function(_norm), c_function(_attention)


def fits(hidden: int, width: int) -> bool:
    """Whether these sizes are whole vectors: of a token, and of half a head."""
    return hidden % LANES == 0 and width % (2 * LANES) == 0


class StepLoops:
    """Norms and attention of one token after another, in memory of their own: a result lasts until the next one."""

    def __init__(self, hidden: int, queries: int, heads: int, width: int) -> None:
        self._queries = queries
        self._normed, self._mixed = torch.empty(1, hidden), torch.empty(1, queries * width)
        self._norm_job, self._job = array("q", [0]) * len(JOB), array("q", [0]) * len(JOB)
        self._norm_job[WIDTH], self._norm_job[Y] = hidden, self._normed.data_ptr()
        self._job[WIDTH], self._job[Y] = width, self._mixed.data_ptr()
        self._job[QUERIES], self._job[HEADS] = queries, heads
        self._scores = torch.empty(0)

    def norm(self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `added` to x in place; gives the norm of x."""
        job = self._norm_job
        job[X], job[ADDED], job[WEIGHT] = x.data_ptr(), 0 if added is None else added.data_ptr(), weight.data_ptr()
        job[EPS] = _bits_of(eps)
        functions()[0](job.buffer_info()[0])
        return self._normed

    def attention(self, projected: Tensor, cache: Tensor, at: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention of a token's queries, keys and values [1, all heads * width], which are turned in place."""
        job, room = self._job, cache.shape[2]
        if self._scores.shape[-1] != room:
            self._scores = torch.empty(self._queries, room)
        keys, values = cache.data_ptr(), cache.data_ptr() + cache.stride(0) * 4
        job[X], job[KEYS], job[VALUES], job[AT], job[ROOM] = projected.data_ptr(), keys, values, at, room
        job[COS], job[SIN], job[SCORES], job[NEXT] = cos.data_ptr(), sin.data_ptr(), self._scores.data_ptr(), 0
        work = self._queries * job[WIDTH] * (at + 1) * 2
        run(functions()[1], job.buffer_info()[0], 1 if work < LEAST_FOR_THREADS else min(thread_count(), job[HEADS]))
        return self._mixed


@functools.cache
def _bits_of(number: float) -> int:
    return int(struct.unpack("q", struct.pack("d", number))[0])

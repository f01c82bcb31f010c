"""Casts of weights, kept as long as the weight does not change, so that micro-batches share one.

A cast belongs to a weight's memory (storage, address, shape) and holds for one state of it: the version that torch
counts at each in-place change. An optimizer's step raises the version (for a fused optimizer `weight_changes` does), so
the next forward casts anew, in eager mode and in compiled graphs alike; reading memory and version does not wait for
the GPU. A cast keeps its two layouts, so a weight of N x K costs 2 N K bytes more while it is kept;
`reuse_weight_cast=False` keeps none.

Writes through `weight.data` are not counted by torch. They are noticed where a training loop makes them: a cast whose
weight has got a gradient holds while gradients are only added up (`GradientWatch`), and `train()` and `eval()` end all
casts of their layers. Call `drop_weight_casts` after any other such write. FSDP2 fills the memory of weights anew, and
keeps the version on purpose: layers that it shards do not reuse casts (`weight_source.CastsWeight`).

CUDA graphs replay kernels without checking versions. So a captured graph casts every weight in each of its forwards,
and is right whatever happens between replays; it reads only casts made by `hold_weight_casts` from outside. Those stay
at their address: call `hold_weight_casts` again after each step, outside the graph, and all replays of the step share
that cast. torch.compile(mode="reduce-overhead") makes graphs by itself and must know all memory that they leave behind:
there a forward casts both layouts into memory outside those graphs, which belongs to the weight, and the backward reads
it there (tensorwise; by other recipes the backward casts its own layout). Between them the weight does not change, or
torch refuses the backward.

Weights that change together are cast together on a GPU (`cast_together`): the first one that is asked for after a step
triggers one replay of a graph that casts them all; one by one the host would launch two kernels for each. `apply_fp8`
does this for the layers it makes. Their casts are freed with the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from bitplan.base.weight_changes import (
    UNCOUNTED,
    GradientWatch,
    KeptByStorage,
    count_optimizer_steps,
    writes_of,
)
from bitplan.fp8.casts import FP8_DTYPES, CastPair, ScaledFp8, empty_scale
from bitplan.fp8.kernels.cast import cast_layouts
from bitplan.fp8.layers.scale_guesses import WEIGHT, allocate_outside, guess_for, in_compiled_graphs
from bitplan.fp8.recipes import RECIPES

_MemoryKey = tuple[int, int, tuple[int, ...], tuple[int, ...]]
_How = tuple[str, float]  # recipe, amax epsilon
Wanted = tuple[Tensor, str, float]  # a weight, and how it is cast


@dataclass
class _Kept:
    """The FP8 casts of one weight, kept as long as its numbers do not change."""

    storage: StorageWeakRef
    version: int
    step: GradientWatch
    rows: dict[_How, ScaledFp8] = field(default_factory=dict)
    cols: dict[_How, ScaledFp8] = field(default_factory=dict)
    captured: bool = False  # made inside a CUDA graph: only the backward of that graph may read it
    held: bool = False


class _Together:
    """Weights that change together: their casts, recorded once and replayed."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self.weights = [ref(weight) for weight, _, _ in wanted]
        self.hows = [(recipe, eps) for _, recipe, eps in wanted]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.keys: list[_MemoryKey] = []  # keys of the weights that the graph casts
        self.casts: list[CastPair] = []

    def refresh(self, asked: Tensor, how: _How) -> bool:
        """Cast all weights. False if at most half have changed, if one is gone, or if `asked` has another cast here."""
        present = [weight for reference in self.weights if (weight := reference()) is not None]
        keys = [_memory_key(weight) for weight in present]
        if len(present) < len(self.weights) or (_memory_key(asked), how) not in zip(keys, self.hows, strict=True):
            return False
        current = sum(map(_is_current, present, keys, self.hows))
        if 2 * current >= len(present):
            return False
        if self.keys != keys:  # the first time, or a weight has other memory now
            self._record(present)
            self.keys = keys
        assert self.graph is not None
        self.graph.replay()
        for weight, key, way, pair in zip(present, keys, self.hows, self.casts, strict=True):
            kept = _kept.get(key)
            if kept is None or not kept.held:  # held casts stay at their address
                _keep(weight, way, pair, captured=False, key=key)
        return True

    def _record(self, weights: Sequence[Tensor]) -> None:
        self.casts = self._cast(weights)  # compiles kernels, and makes the guesses
        stream = torch.cuda.Stream(weights[0].device)
        stream.wait_stream(torch.cuda.current_stream(weights[0].device))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.casts = self._cast(weights)

    def _cast(self, weights: Sequence[Tensor]) -> list[CastPair]:
        return [_cast(weight, recipe, eps) for weight, (recipe, eps) in zip(weights, self.hows, strict=True)]


@dataclass
class _OfGraphs:
    """Buffers into which graphs of torch.compile(mode="reduce-overhead") cast a weight; None: they have their own."""

    storage: StorageWeakRef
    pair: CastPair | None


_kept: KeptByStorage[_Kept] = KeptByStorage(16)
_of_graphs: KeptByStorage[_OfGraphs] = KeptByStorage(16)
_together: dict[_MemoryKey, _Together] = {}


def weight_rows(weight: Tensor, recipe: str, eps: float, *, with_cols: bool, reuse: bool) -> ScaledFp8:
    """The weight [N, K] for fprop. `with_cols`: dgrad will ask for the other layout of the same cast."""
    how = (recipe, eps)
    was_asked = reuse
    kept, reuse = _find_to_reuse(weight, reuse, is_forward=True)
    if was_asked and not reuse and with_cols and (fixed := _pair_of_graphs(weight, how, make=True)) is not None:
        return _cast_into(fixed, weight, how)
    capturing = _is_capturing(weight)
    if kept is not None and how in kept.rows and (kept.held or not (capturing or kept.captured)):
        return kept.rows[how]
    if reuse and not capturing and _refresh_together(weight, recipe, eps):
        return _kept[_memory_key(weight)].rows[how]
    pair = _cast(weight, recipe, eps, cols=with_cols and reuse)
    assert pair.rows is not None
    if reuse:
        _keep(weight, how, pair, captured=capturing)
    return pair.rows


def weight_cols(weight: Tensor, recipe: str, eps: float, *, reuse: bool) -> ScaledFp8:
    """The cast of the transposed weight, [K, N], for dgrad (the gradient of the input)."""
    how = (recipe, eps)
    was_asked = reuse
    kept, reuse = _find_to_reuse(weight, reuse)
    if was_asked and not reuse and (fixed := _pair_of_graphs(weight, how, make=False)) is not None:
        assert fixed.cols is not None
        return fixed.cols
    capturing = _is_capturing(weight)
    if kept is not None and how in kept.cols and (kept.held or kept.captured == capturing):
        cols = kept.cols[how]
        if kept.captured and not kept.held:  # for this graph and micro-batch only
            del _kept[_memory_key(weight)]
        return cols
    if reuse and not capturing and _refresh_together(weight, recipe, eps):
        return _kept[_memory_key(weight)].cols[how]
    pair = _cast(weight, recipe, eps, rows=False)
    assert pair.cols is not None
    if reuse and not capturing:
        _keep(weight, how, pair, captured=False)
    return pair.cols


def kept_layouts(
    weight: Tensor, recipe: str, eps: float, *, is_forward: bool
) -> tuple[ScaledFp8 | None, ScaledFp8 | None]:
    """Return the kept casts of the weight's present state, (rows, cols), quickly; not to be called in CUDA graphs."""
    kept = _kept.get(_memory_key(weight))
    if kept is None or kept.captured or kept.version != writes_of(weight):
        return None, None
    if is_forward and not kept.held and kept.step.is_step_over(weight):
        return None, None
    how = (recipe, eps)
    return kept.rows.get(how), kept.cols.get(how)


def _find_to_reuse(weight: Tensor, reuse: bool, *, is_forward: bool = False) -> tuple[_Kept | None, bool]:
    """Return the kept casts, and whether a new one may be kept: compiled graphs only read held casts, and keep none."""
    kept = _find(weight, is_forward=is_forward) if reuse else None
    if reuse and (kept is None or not kept.held) and in_compiled_graphs(weight):
        return None, False
    return kept, reuse


def _pair_of_graphs(weight: Tensor, how: _How, *, make: bool) -> CastPair | None:
    """The buffers into which compiled graphs cast this weight: the forward writes and the backward reads them.

    None for casts without a guess, and for a weight whose first graph was recorded without warming up: that one has
    its own memory, so no backward may look for its casts here.
    """
    key = (*_memory_key(weight), *how)
    known = _of_graphs.get(key)
    if known is None and make:
        pair = None
        if weight.is_cuda and RECIPES[how[0]].has_one_scale and not _is_capturing(weight):
            pair = allocate_outside(lambda: _empty_pair(weight))
            stream = torch.cuda.current_stream(weight.device)
            stream.wait_stream(torch.cuda.default_stream(weight.device))  # which may still use that memory
        known = _OfGraphs(StorageWeakRef(weight.untyped_storage()), pair)
        _of_graphs.add(key, known)
    return None if known is None else known.pair


def _cast_into(fixed: CastPair, weight: Tensor, how: _How) -> ScaledFp8:
    """Cast a weight into the memory `fixed`, and return its layout of rows."""
    recipe, eps = how
    guess = guess_for(recipe, weight, WEIGHT)
    if guess is not None:
        cast_layouts(weight, recipe, "e4m3", eps, is_weight=True, guess=guess, into=fixed)
    else:  # a graph is recorded, and there is no guess yet
        _copy_pair(_cast(weight, recipe, eps), fixed)
    assert fixed.rows is not None
    return fixed.rows


def _empty_pair(weight: Tensor) -> CastPair:
    """Memory for a tensorwise cast in both layouts."""
    rows, cols = weight.shape
    scale = empty_scale((rows, cols), "tensor", weight.device)
    codes = [
        torch.empty(shape, dtype=FP8_DTYPES["e4m3"], device=weight.device) for shape in ((rows, cols), (cols, rows))
    ]
    return CastPair(*(ScaledFp8(code, scale, "tensor") for code in codes))


def derived_layouts(
    weight: Tensor, how: _How, make: Callable[[bool, bool], tuple[Any, Any]], *, rows: bool, cols: bool, reuse: bool
) -> tuple[Any, Any]:
    """Layouts that `make(rows, cols)` makes of a weight; kept under `how`, which names no recipe.

    A forward asks for rows, and for the cols that its backward will ask for alone. In a captured CUDA graph each
    forward casts anew, since replays cannot check whether the weight changed; its backward takes what that one left.
    """
    kept, capturing = _find(weight, is_forward=rows) if reuse else None, _is_capturing(weight)
    is_held = kept is not None and kept.held
    if kept is not None and (kept.captured != capturing or (capturing and rows)):
        kept = None
    old = (kept.rows.get(how), kept.cols.get(how)) if kept is not None else (None, None)
    missing = (rows and old[0] is None, cols and old[1] is None)
    if not any(missing):
        if capturing:  # for this graph and micro-batch only
            del _kept[_memory_key(weight)]
        return old
    casts = make(*missing)
    if reuse and (not capturing or (rows and cols and not is_held)):
        _keep(weight, how, CastPair(*casts), captured=capturing)
    return casts[0] or old[0], casts[1] or old[1]


def cast_together(wanted: Iterable[Wanted]) -> None:
    """Cast these weights together, from now on, when they have changed. On a CPU this does nothing."""
    named = {
        (_memory_key(weight), recipe, eps): (weight, recipe, eps) for weight, recipe, eps in wanted if weight.is_cuda
    }
    together = _Together(list(named.values()))
    for (key, _, _), (weight, _, _) in named.items():
        _together[key] = together
        finalize(weight, _forget, ref(together)).atexit = False


def _forget(of: ref[_Together]) -> None:
    """Free, once a weight is gone, the memory of casts that were made together with its own."""
    together = of()
    for key in [key for key, other in _together.items() if other is together]:
        del _together[key]
        _kept.pop(key, None)


def free_with(weight: Tensor) -> None:
    """Give back the memory of this weight's casts when the weight goes, not only when others are made."""
    finalize(weight, _kept.pop, _memory_key(weight), None).atexit = False


def _refresh_together(weight: Tensor, recipe: str, eps: float) -> bool:
    together = _together.get(_memory_key(weight))
    return together is not None and together.refresh(weight, (recipe, eps))


def _is_current(weight: Tensor, key: _MemoryKey, how: _How) -> bool:
    kept = _find(weight, key, is_forward=True)
    return kept is not None and how in kept.rows and how in kept.cols


def _cast(weight: Tensor, recipe: str, eps: float, *, rows: bool = True, cols: bool = True) -> CastPair:
    guess = guess_for(recipe, weight, WEIGHT)
    return cast_layouts(weight, recipe, "e4m3", eps, is_weight=True, rows=rows, cols=cols, guess=guess)


def hold_cast(weight: Tensor, recipe: str, eps: float) -> None:
    """Cast now, into the same memory if it was held before, for CUDA graphs to read."""
    with torch.inference_mode(False):  # memory made in inference mode could not be written outside
        _hold(weight, (recipe, eps))


def _hold(weight: Tensor, how: _How) -> None:
    recipe, eps = how
    kept = _find(weight, any_version=True)
    if kept is not None and kept.held and how in kept.rows and how in kept.cols:
        if kept.version == weight._version:
            return
        _write_over(kept, how, _cast(weight, recipe, eps))
        kept.version = weight._version
        return
    _keep(weight, how, _cast(weight, recipe, eps), captured=False)
    _kept[_memory_key(weight)].held = True


def drop_casts(weights: Iterable[Tensor] | None = None) -> None:
    """Forget the casts of these weights, held ones too, and give their memory back; of all if none are named."""
    if weights is None:
        _kept.clear()
        _together.clear()
        return
    for weight in weights:
        key = _memory_key(weight)
        _kept.pop(key, None)
        together = _together.get(key)
        for other_key in [other for other, those in _together.items() if those is together]:
            del _together[other_key]  # their casts share one piece of memory


def expire_casts(weights: Iterable[Tensor]) -> None:
    """Have these weights cast anew at their next use, as after an optimizer's step; held casts stay."""
    for weight in weights:
        key = _memory_key(weight)
        if key in _kept and not _kept[key].held:
            del _kept[key]


def count_backward(weight: Tensor, gradient: Tensor) -> None:
    """Say that a gradient was computed for this weight, for its kept cast if it has one."""
    kept = _kept.get(_memory_key(weight))
    if kept is not None:
        kept.step.count_backward(gradient)


def drop_weight_casts(module: nn.Module | None = None) -> None:
    """Forget the casts of a model's weights; of all models if none is named."""
    drop_casts(module.parameters() if module is not None else None)


def kept_casts(weight: Tensor) -> CastPair | None:
    """The kept casts of the weight's present state, by any one recipe; for tests and reports."""
    kept = _find(weight)
    if kept is None:
        return None
    return CastPair(next(iter(kept.rows.values()), None), next(iter(kept.cols.values()), None))


def _keep(weight: Tensor, how: _How, pair: CastPair, *, captured: bool, key: _MemoryKey | None = None) -> None:
    version = writes_of(weight)
    if version == UNCOUNTED:
        return
    count_optimizer_steps()
    key = key or _memory_key(weight)
    kept = _find(weight, key)
    if kept is None or kept.captured or captured:
        last = _kept.get(key)
        storage = StorageWeakRef(weight.untyped_storage()) if last is None else last.storage
        kept = _Kept(storage, version, GradientWatch(weight), captured=captured)
        _kept.add(key, kept)
    if pair.rows is not None:
        kept.rows[how] = pair.rows
    if pair.cols is not None:
        kept.cols[how] = pair.cols


def _find(
    weight: Tensor, key: _MemoryKey | None = None, *, any_version: bool = False, is_forward: bool = False
) -> _Kept | None:
    """The kept casts of a weight that are still valid, or None. Only a forward asks whether a step is over since."""
    version = writes_of(weight)
    kept = _kept.get(key or _memory_key(weight)) if version != UNCOUNTED else None
    if kept is None or kept.version == version or any_version:
        if kept is not None and is_forward and not kept.held and kept.step.is_step_over(weight):
            del _kept[key or _memory_key(weight)]
            return None
        return kept
    if kept.held:
        _refresh(weight, kept)
        return kept
    return None


def _refresh(weight: Tensor, kept: _Kept) -> None:
    """Cast a weight that has changed again, into the memory of its held cast."""
    for how in list(kept.rows):
        if how[0] not in RECIPES:  # kept by `derived_layouts`, whose callers make it again
            kept.rows.pop(how)
            kept.cols.pop(how, None)
            continue
        _write_over(kept, how, _cast(weight, *how))
    kept.version = weight._version


def _write_over(kept: _Kept, how: _How, pair: CastPair) -> None:
    _copy_pair(pair, CastPair(kept.rows.get(how), kept.cols.get(how)))


def _copy_pair(source: CastPair, target: CastPair) -> None:
    for new, old in zip(source, target, strict=True):
        if old is not None and new is not None:
            old.codes.copy_(new.codes)
            old.scale.copy_(new.scale)


def _memory_key(weight: Tensor) -> _MemoryKey:
    return weight.untyped_storage()._cdata, weight.data_ptr(), weight.shape, weight.stride()


def _is_capturing(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()

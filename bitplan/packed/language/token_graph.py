"""One token after another through a model on a GPU, replayed as one CUDA graph.

The host takes longer to launch a token than the GPU takes to compute it: hundreds of kernels, each behind the modules
of transformers. Recorded once, they are launched by one call. What changes from token to token lies in the GPU's
memory: the token, its position, and how many tokens the cache holds, which attention reads there (kv_attention.py).

Before a graph is used, it is compared: it must give the logits of the model's own forward for the token that it was
recorded with, and for the next one, so that a number which was recorded as it was then (a mask, a position) is seen. A
forward that waits for the GPU is not recorded. `why_not` says why a model keeps its own forward.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bitplan.base.errors import MeasureError
from bitplan.packed.rounded_kv import attending_as_held, kv_of
from bitplan.plan.kv_formats import KVFormats

TOLERANCE = 5e-3  # of the norm of the logits, which may be bfloat16
EAGER_TOKENS = 1  # before one is recorded: kernels are compiled, and launches chosen
VERIFIED_TOKENS = 2  # made by the model, too


def read_on(model: Any, states: Any, **inputs: Any) -> tuple[Tensor, Any]:
    """Logits after more tokens than those that `states` are of, None for none, and the states after all of them."""
    name = _states_name(type(model).forward)
    output = model(use_cache=True, **{name: states}, **inputs)
    if getattr(output, name, None) is None:
        raise MeasureError(
            f"{type(model).__name__} gives back no states in {name}, so it cannot write a token at a time here; "
            "use its own generate()"
        )
    return output.logits[:, -1], getattr(output, name)


@functools.cache
def _states_name(forward: Callable[..., Any]) -> str:
    """What a forward calls what its model holds of the tokens before: keys and values, or Mamba's states."""
    return "cache_params" if "cache_params" in inspect.signature(forward).parameters else "past_key_values"


class TokenGraph:
    """Gives the logits of a text in pieces, and of single tokens soon by a graph; holds keys and values of all before.

    options  more keywords of the model's forward
    cache    with tokens that were read before, made by another one of these; None: a new one
    """

    def __init__(self, model: Any, options: dict[str, Any] | None = None, cache: Any = None) -> None:
        self._model, self._options = model, options or {}
        self.why_not = _why_not(model)
        self.cache = cache
        if self.why_not is None and cache is None:
            from bitplan.packed.kv_cache import KVCache  # which needs transformers

            self.cache = KVCache(model.config, kv_of(model) or KVFormats(), joined=True)
        self._graph: Any = None  # has replay()
        self._capacity = self._eager_tokens = self._verified = self._position = 0
        self._ids = self._positions = self._logits = torch.empty(0)

    def __call__(self, ids: Tensor) -> Tensor:
        """Logits [batch, vocabulary] after these tokens [batch, length]."""
        if self.why_not is not None:
            return self._by_model(input_ids=ids)
        count = int(self.cache.get_seq_length()) if ids.shape[1] == 1 else 0
        rows = self._rows() if count else []
        if rows and self._verified == VERIFIED_TOKENS and self._is_of(ids, rows, count):
            return self._replayed(ids, rows, count)
        with attending_as_held(self._model):
            return self._step(ids, rows, count) if count else self._by_model(input_ids=ids)

    def _by_model(self, **inputs: Any) -> Tensor:
        logits, self.cache = read_on(self._model, self.cache, **self._options, **inputs)
        return logits

    def _rows(self) -> list[Any]:
        """The memory of every layer; empty where a layer is none that attention reads as it is held."""
        rows = [getattr(layer, "_rows", None) for layer in self.cache.layers]
        return [] if any(one is None for one in rows) else rows

    def _is_of(self, ids: Tensor, rows: list[Any], count: int) -> bool:
        """Whether the graph is of such tokens, and of the memory that holds the cache, with room for one more."""
        is_same = self._graph is not None and self._capacity == rows[0].capacity and self._ids.shape == ids.shape
        return is_same and self._capacity > count

    def _step(self, ids: Tensor, rows: list[Any], count: int) -> Tensor:
        """One token by the model, and by a graph where there is room; the first ones by both."""
        if not rows or self._eager_tokens < EAGER_TOKENS or rows[0].capacity <= count:
            self._eager_tokens += 1
            logits = self._by_model(input_ids=ids)  # memory grows
            if not self._rows():
                self._stop("keys and values are not held where attention reads them")
            return logits
        if not self._is_of(ids, rows, count):
            self._record(ids, rows, count)
        if self._graph is None:
            return self._by_model(input_ids=ids)
        replayed = self._replayed(ids, rows, count)
        if self._verified < VERIFIED_TOKENS:
            self._set_count(rows, count)
            logits = self._by_model(input_ids=ids)  # keys and values are written anew
            self._verify(replayed, logits)
            return logits
        return replayed

    def _set_count(self, rows: list[Any], count: int) -> None:
        """Let the cache hold so many tokens: those behind them are written again."""
        for one in rows:
            one.tokens = count
        rows[0].shared.on(self._ids.device, count)
        self._positions.fill_(count)
        self._position = count

    def _record(self, ids: Tensor, rows: list[Any], count: int) -> None:
        """Record a token; it leaves the next one's position and count in memory."""
        shared, self._graph, self._capacity = rows[0].shared, None, rows[0].capacity
        with torch.inference_mode(False):
            self._ids, self._positions = ids.clone(), torch.full((1, 1), count, dtype=torch.int64, device=ids.device)

        def run() -> None:
            self._logits = self._by_model(input_ids=self._ids, position_ids=self._positions)
            shared.tensor.add_(1)
            self._positions.add_(1)
            shared.count = -1  # a graph's replay adds, its recording does not

        if not self._verified:
            with waiting_seen(ids.device) as waits:
                run()
            self._set_count(rows, count)
            if waits:
                self._stop(f"its forward waits for the GPU: {waits[0]}")
                return
        self._set_count(rows, count)
        self._graph = captured(run, ids.device)
        self._set_count(rows, count)

    def _replayed(self, ids: Tensor, rows: list[Any], count: int) -> Tensor:
        shared = rows[0].shared
        if (shared.count, self._position) != (count, count):
            self._set_count(rows, count)
        self._ids.copy_(ids)
        self._graph.replay()
        for one in rows:
            one.tokens = count + 1
        shared.count = self._position = count + 1
        return self._logits.clone()

    def _verify(self, replayed: Tensor, logits: Tensor) -> None:
        difference = float((replayed.float() - logits.float()).norm() / logits.float().norm())
        if difference <= TOLERANCE:
            self._verified += 1
        else:  # NaN, too
            self._stop(f"a recorded token differs from the model's own by {difference:.1%}")

    def _stop(self, reason: str) -> None:
        """Go on without a graph, and where keys and values are as they are, with transformers' own cache."""
        from transformers import DynamicCache

        self.why_not, self._graph, self._logits = reason, None, torch.empty(0)
        if kv_of(self._model) is None:
            cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
            for layer, held in zip(cache.layers, self.cache.layers, strict=True):
                if held.is_initialized:
                    layer.update(held.keys.numbers(), held.values.numbers())
            self.cache = cache


def _why_not(model: Any) -> str | None:
    """Why the tokens of a model are not recorded, as far as it is seen before it runs."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    config, devices = getattr(model, "config", None), {part.device for part in model.parameters()}
    if len(devices) > 1:
        return f"its weights lie on {len(devices)} devices"
    if config is None or "position_ids" not in inspect.signature(model.forward).parameters:
        return "its forward takes no positions"
    if not all(
        type(layer) is DynamicLayer for layer in DynamicCache(config=config.get_text_config(decoder=True)).layers
    ):
        return "not all of its layers attend to all tokens"
    with attending_as_held(model) as is_held:
        return None if is_held else "its attention is not torch's, which transformers lets be replaced"


@contextmanager
def waiting_seen(device: torch.device) -> Iterator[list[str]]:
    """What is called within the block and waits for the GPU, which a graph could not; seen by torch."""
    seen: list[str] = []
    if device.type != "cuda":
        yield seen
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode(before)
    seen += [f"{one.filename}:{one.lineno}" for one in caught if "called a synchronizing" in str(one.message)]


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where graphs are recorded: one stream, for cuBLAS keeps memory for each, which no graph must own."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        numbers = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
        torch.mm(numbers, numbers)
    return stream


def captured(run: Callable[[], None], device: torch.device) -> Any:
    """A CUDA graph of what `run` launches; without `torch.cuda.graph`, which empties the allocator's cache."""
    graph, stream = torch.cuda.CUDAGraph(), side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")  # other threads may go on meanwhile
        try:
            run()
        finally:
            graph.capture_end()
    return graph

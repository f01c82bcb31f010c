"""What formats of keys and values cost: bytes of a token by their shapes, and nats, which are measured.

The damage of a layer's keys or values is measured, with nothing else rounded, in the coarsest format; in the others it
is that, by the ratio of squared errors, corrected by all layers at once. Where an engine has one format for all layers,
they are one group. The groups are evidence as a search has it, of which the same solver makes plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.formats import get_format
from bitplan.packed.kv_cache import KVCache
from bitplan.packed.kv_rows import PackedRows, pack_rows, room_at
from bitplan.packed.language.token_steps import PIECE_TOKENS
from bitplan.plan.kv_formats import KEYS, VALUES, KVFormats, part_name
from bitplan.searching.engine_memory import EngineMemory, Held, kv_of_choice
from bitplan.searching.evidence import FormatCost, SearchEvidence, TensorGroup, by_part
from bitplan.searching.goal import SearchError, Stage
from bitplan.searching.plan_meter import PlanMeter, ratios_of_kinds
from bitplan.searching.searched_model import SearchSubject

DAMAGE_TOKENS = 512  # on which every group of keys and values is measured alone
_KV_ROLE = "kv"


@contextmanager
def _with_cache(model: nn.Module, cache: Any) -> Iterator[None]:
    """A context in which every call of a model gets this cache."""
    handle = model.register_forward_pre_hook(
        lambda _model, args, kwargs: (args, {**kwargs, "past_key_values": cache}), with_kwargs=True
    )
    try:
        yield
    finally:
        handle.remove()


class _WatchedCache(KVCache):
    """A cache that keeps nothing, and shows all keys and values that come in."""

    def __init__(self, config: Any, on_update: Callable[[int, Tensor, Tensor], None]) -> None:
        super().__init__(config, KVFormats(), stores=False)
        self._seen = on_update

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **options: Any) -> Any:
        self._seen(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **options)


def squared_errors(rows: Tensor, formats: Sequence[str]) -> dict[str, float]:
    """The mean squared error of rows [batch, heads, tokens, width] in each format."""
    errors = {}
    for name in formats:
        fmt = get_format(name)
        packed = PackedRows(fmt, rows.shape[-1], torch.float32, pack_rows(rows, fmt))
        errors[name] = float((packed.numbers() - rows.float()).square().mean())
    return errors


@dataclass(frozen=True)
class KVShapes:
    """Heads and width of every layer's keys and values, by their names, and the tokens of layers that have a window."""

    parts: dict[str, tuple[int, ...]]
    windows: dict[str, int]

    def nbytes(self, fmt: str, engine: EngineMemory, request: Held, item_bytes: int = 0) -> int:
        """Bytes of all parts in one format, with so many bytes a number where it is a plain type."""
        return sum(
            self.tokens(name, fmt, engine, request) * engine.row_bytes(fmt, heads, width, item_bytes)
            for name, (heads, width) in self.parts.items()
        )

    def tokens(self, name: str, fmt: str, engine: EngineMemory, request: Held) -> int:
        """How many tokens a part has room for, of all texts: what attention reads as it is held on a GPU has more."""
        window = self.windows.get(name.split(".")[1])
        if request.on_gpu and window is None and (fmt == "bfloat16" or not get_format(fmt).is_cast):
            return room_at(request.context, PIECE_TOKENS) * request.batch
        return engine.tokens(window, request)


def watch_kv(
    subject: SearchSubject, ids: Tensor, on_rows: Callable[[int, str, Tensor], None] = lambda *_: None
) -> tuple[KVShapes, Tensor]:
    """Run the unquantized model on `ids`; return the shapes of its keys and values, and its log-probabilities.

    `on_rows(layer, part, rows)` is called with the keys and then the values of each layer.
    """
    model = subject.model
    if not hasattr(model, "config"):
        raise SearchError(f"{subject.where}: no keys and values are known; give a model of transformers")
    parts: dict[str, tuple[int, ...]] = {}

    def see(layer: int, keys: Tensor, values: Tensor) -> None:
        for part, rows in zip((KEYS, VALUES), (keys, values), strict=True):
            parts[part_name(layer, part)] = rows.shape[1], rows.shape[3]
            on_rows(layer, part, rows)

    cache = _WatchedCache(model.config, see)
    with _with_cache(model, cache):
        odds = _log_odds(subject.runner, ids)
    if not parts:
        raise SearchError(f"{subject.where}: no layer gave keys and values to a cache of transformers: nothing to fit")
    spans = {str(index): getattr(layer, "sliding_window", None) for index, layer in enumerate(cache.layers)}
    return KVShapes(parts, {layer: int(span) for layer, span in spans.items() if span}), odds


def gather_kv(
    subject: SearchSubject, meter: PlanMeter, evidence: SearchEvidence, stage: Stage, engine: EngineMemory
) -> SearchEvidence:
    """What an engine's formats of keys and values cost: bytes of one token, and damage, which is measured."""
    ids, formats = meter.windows[0][None, :DAMAGE_TOKENS], list(engine.formats)
    errors: dict[str, dict[str, float]] = {}
    members: dict[str, list[str]] = {}

    def add_errors(layer: int, part: str, rows: Tensor) -> None:
        group = engine.group_of(layer, part)
        members.setdefault(group, []).append(part_name(layer, part))
        before = errors.get(group, {})
        errors[group] = {fmt: error + before.get(fmt, 0.0) for fmt, error in squared_errors(rows, formats).items()}

    shapes, reference = watch_kv(subject, ids, add_errors)
    model, unrounded = subject.model, engine.kept or dtype_of(subject)
    coarsest = max(formats, key=lambda fmt: sum(one[fmt] for one in errors.values()))
    groups = {}
    with stage("keys and values", len(members)) as advance:
        for group, names in members.items():
            with _with_cache(model, KVCache(model.config, kv_of_choice({group: coarsest}), stores=False)):
                kl = (reference.exp() * (reference - _log_odds(subject.runner, ids))).sum(-1).mean()
                nats = max(0.0, float(kl))
            worst = errors[group][coarsest]
            damage = {unrounded: 0.0} | {fmt: nats * (errors[group][fmt] / worst if worst else 0.0) for fmt in formats}
            costs = {
                fmt: FormatCost(sum(engine.row_bytes(fmt, *shapes.parts[name]) for name in names), predicted)
                for fmt, predicted in damage.items()
            }
            shapes_and_roles = {name: (shapes.parts[name], _KV_ROLE) for name in names}
            groups[group] = TensorGroup(shapes_and_roles, costs, checked=coarsest)
            advance(1, group)
    kv_evidence = replace(evidence, groups=groups, stays={}, proven=[], text={"windows": shapes.windows})
    _check_formats(kv_evidence, meter, formats, stage)
    return kv_evidence


def dtype_of(subject: SearchSubject) -> str:
    """The type of keys and values that are not packed: the most frequent float type of the file's tensors."""
    stored = [
        entry.stored for entry in subject.stored.entries.values() if entry.stored in ("bfloat16", "float16", "float32")
    ]
    return max(set(stored), key=stored.count) if stored else "bfloat16"


def _log_odds(runner: Any, ids: Tensor) -> Tensor:
    (states,) = runner.through_blocks([ids])
    with torch.no_grad(), runner.outside():
        return runner.leave(states)[0].double().log_softmax(-1)  # type: ignore[no-any-return]


def _check_formats(evidence: SearchEvidence, meter: PlanMeter, formats: Sequence[str], stage: Stage) -> None:
    """Measure each format on the keys of all layers at once, then on values, and correct predictions by it."""
    parts = by_part(evidence.groups)
    with stage("checking keys and values", len(parts) * len(formats)) as advance:
        for part, names in parts.items():
            for fmt in formats:
                choice = dict.fromkeys(names, fmt)
                quality = meter.measure(evidence, choice, f"{part} in {fmt}")
                assert quality.against is not None
                measured = quality.against.kl.mean
                predicted = sum(evidence.groups[name].formats[fmt].predicted for name in names)
                for name in names:
                    cost = evidence.groups[name].formats[fmt]
                    ratio = measured / predicted if predicted > 0 and measured > 0 else 1.0
                    evidence.groups[name].formats[fmt] = replace(cost, predicted=cost.predicted * ratio)
                    if fmt == evidence.groups[name].checked:
                        evidence.groups[name].kinds = ratios_of_kinds(quality, meter.kinds)
                advance(1, f"{part} in {fmt}")


class JointMeter(PlanMeter):
    """Measures choices for groups of weights and of keys and values together."""

    def _around(self, choice: Mapping[str, str]) -> Callable[[], AbstractContextManager[None]]:
        model = self._runner.model
        return lambda: _with_cache(model, KVCache(model.config, kv_of_choice(choice), stores=False))

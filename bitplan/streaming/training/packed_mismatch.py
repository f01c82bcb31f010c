"""PackedMismatch: how far the packed model that inference runs is from the model that is being trained.

    mismatch = PackedMismatch(model, {"model.layers.*": "mxfp4"}, batches, max_mismatch=0.01)      before it is streamed
    Trainer(..., callbacks=[mismatch.callback()])         logs eval_packed_kl after every evaluation
    packed = mismatch.packed(model)                       the packed model, made from the weights of now

Where one packed model answers and another, unpacked, learns from the answers (reinforcement learning), the two must
stay the same policy. What is measured is the real packed model, made anew from the trained weights: the mean KL of its
next-token distributions from the trainer's, over the positions of `batches`.

Above `max_mismatch` layers are kept in more bits, one after the other until the KL is within: first those that lower it
most, each measured alone, from their format to 8 bits and then to their own type. `kept` and `history` say which.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.base.errors import ArgumentError, StreamError
from bitplan.base.optional import require
from bitplan.packed.apply_plan import apply_plan
from bitplan.plan.names import ShellPatterns, split_layer

MORE_BITS: tuple[str | None, ...] = ("int8_row", None)  # None: a layer's own type
METRIC = "eval_packed_kl"
_log = logging.getLogger("bitplan")


class PackedMismatch:
    """Measures, and with `max_mismatch` limits, the KL of a model's packed twin; make it before the model is streamed.

    formats        a format for all weights, or a mapping from patterns, as `apply_plan` takes them
    batches        inputs of the model: mappings of its arguments, or single tensors
    max_mismatch   the largest mean KL, in nats a position; None: nothing is kept in more bits
    """

    def __init__(
        self,
        model: nn.Module,
        formats: str | Mapping[str, str | None],
        batches: Sequence[Any],
        *,
        max_mismatch: float | None = None,
    ) -> None:
        if not batches:
            raise ArgumentError("PackedMismatch: batches must hold at least one batch to compare on")
        if max_mismatch is not None and not (math.isfinite(max_mismatch) and max_mismatch > 0):
            raise ArgumentError(f"max_mismatch: expected a KL above 0, got {max_mismatch!r}")
        self._formats = {"*": formats} if isinstance(formats, str) else dict(formats)
        self._batches, self.max_mismatch = list(batches), max_mismatch
        self._empty = _without_weights(model)
        patterns = ShellPatterns(self._formats)
        packed = [name for name, one in model.named_parameters() if one.dim() > 1 and patterns.matching(name)]
        self._layers = list(dict.fromkeys(_layer_of(name) for name in packed))  # whose matrices are packed
        self.kept: dict[str, str | None] = {}  # layer -> its format in place of `formats`
        self.history: list[dict[str, Any]] = []

    def packed(self, model: nn.Module, kept: Mapping[str, str | None] | None = None) -> nn.Module:
        """The packed model of the weights that `model` has now; what is not packed is shared with it."""
        twin = copy.deepcopy(self._empty)
        twin.load_state_dict({name: one.detach() for name, one in model.state_dict().items()}, assign=True)
        apply_plan(twin, {**(self.kept if kept is None else kept), **self._formats}, unsupported="skip")
        return twin.eval()

    def measure(self, model: nn.Module, step: int = 0) -> float:
        """Measure the mean KL of the packed model; above `max_mismatch` keep layers in more bits until it is not."""
        expected = _log_probabilities(model, self._batches)
        kl, raised = self._kl(model, expected, self.kept), []
        if self.max_mismatch is not None and kl > self.max_mismatch:
            for layer, fmt in self._ranked(model, expected):
                self.kept[layer] = fmt
                raised.append({"layer": layer, "format": fmt or "its own type", "kl_before": kl})
                kl = self._kl(model, expected, self.kept)
                _log.info("bitplan: step %d: %s is kept in %s: packed KL %.3g", step, layer, fmt or "its own type", kl)
                if kl <= self.max_mismatch:
                    break
            else:
                raise StreamError(
                    f"step {step}: the KL is {kl:.3g}, above max_mismatch={self.max_mismatch:g}, with every layer in "
                    "its own type: the model computes something else each time; make its forward repeatable"
                )
        self.history.append({"step": step, "kl": kl, "raised": raised})
        return kl

    def _ranked(self, model: nn.Module, expected: Sequence[Tensor]) -> Iterator[tuple[str, str | None]]:
        """Yield (layer, format of more bits) for layers to keep so, those first that lower the KL most."""
        for fmt in MORE_BITS:
            lower = [one for one in self._layers if self.kept.get(one, "") not in (fmt, None)]
            alone = {one: self._kl(model, expected, {**self.kept, one: fmt}) for one in lower}
            yield from ((one, fmt) for one in sorted(lower, key=alone.__getitem__))

    def _kl(self, model: nn.Module, expected: Sequence[Tensor], kept: Mapping[str, str | None]) -> float:
        twin = self.packed(model, kept)
        total, positions = 0.0, 0
        for log_p, log_q in zip(expected, _log_probabilities(twin, self._batches), strict=True):
            total += float((log_p.exp() * (log_p - log_q)).sum())
            positions += log_p.numel() // log_p.shape[-1]
        return total / positions

    def callback(self) -> Any:
        """A callback for transformers.Trainer: after each evaluation `eval_packed_kl` is in its metrics and its log."""
        base = require("transformers", purpose="a Trainer callback", extra="train").TrainerCallback
        measure = self.measure

        class PackedMismatchCallback(base):  # type: ignore[misc, valid-type]
            def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                kl = measure(kwargs["model"], state.global_step)
                (kwargs.get("metrics") or {})[METRIC] = kl
                state.log_history.append({METRIC: kl, "step": state.global_step})

        return PackedMismatchCallback()


def _layer_of(name: str) -> str:
    """The numbered layer that holds a weight, or the weight's own name."""
    before, number, _ = split_layer(name)
    return before + number


def _without_weights(model: nn.Module) -> nn.Module:
    """A copy that holds no numbers of parameters; buffers it has, for a state need not hold them."""
    empty: dict[int, Any] = {
        id(one): nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad) for one in model.parameters()
    }
    return copy.deepcopy(model, empty)  # deepcopy takes what its memo holds for the copy


def _log_probabilities(model: nn.Module, batches: Sequence[Any]) -> list[Tensor]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            outputs = [model(**one) if isinstance(one, Mapping) else model(one) for one in batches]
    finally:
        model.train(was_training)
    logits = [one if isinstance(one, Tensor) else one["logits"] for one in outputs]
    return [one.detach().float().log_softmax(-1) for one in logits]

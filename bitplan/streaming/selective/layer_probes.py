"""LayerProbes: measures what the policy needs of a streamed model, by ordinary module hooks.

    impact    on the steps before an update: <dL/dy, (W - W_hat) x> of some layers in turn, also of frozen weights
    gradient  of streamed weights that are trained: measured during backward, because they leave the device then
    backward  the first gradient that reaches the last block: the conductor's phase begins

For an impact, x and W are needed when dL/dy arrives, and a streamed W is gone by then. So a hook on the layer's output
saves both as autograd saves tensors, by the saved-tensor hooks that are active there: a streamed weight becomes a
place, which the stream loads again with its block (`streaming.saved_tensors`), and checkpointing recomputes
everything as usual. Of x only a copy of the measured rows is kept. Nothing waits for the device, and probes do not
change the numbers of the step.

An impact costs the product with the sampled rows and about six passes over the weight, so not every unit is measured
before every update: all are before the first update, and then one in `impact_turns`. The others keep their last figure
while they are low, and stay as they are while they are bf16. For a unit that is low on this step the device has only
W_hat; W must be sent as well, and because of that copy only one in eight of these units is measured. A unit with a
weight whose product cannot be observed has no impact at all: a part of its damage would pass for all of it. Nor does it
have one in a step in which one of its layers did not run, or got no gradient.

Samples rows that stand for all rows: unbiased, and the same on every machine and after a restart.

A sum over T rows (tokens), c_1 + ... + c_T, is estimated from n of them by T/n times their sum. The rows are cut into n
stretches of the same length, T/n, and one row of each is drawn with equal chances: so each row is drawn n/T times on
average, for any T and n, and the mean of the estimate is the sum. Its variance, where n divides T, is

    (T/n)^2 * (var_1 + ... + var_n)      var_h: the variance of the T/n numbers of stretch h

Where the numbers have random signs and nothing in common, that is T/n - 1 times the mean square of the sum itself.
Taking every fourth row instead would be wrong: it takes the same positions of every sequence, among them the first,
which is unlike all others.

The draw depends on the key and the sizes only; Python's generator is the same everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bitplan.base.hardware import to_device
from bitplan.streaming.saved_tensors import outer_hooks
from bitplan.streaming.selective.gradient_statistics import GradStatsCollector, impact_of, rounding_error
from bitplan.streaming.selective.precision_units import MatrixUse, PrecisionUnits


def sample_rows(count: int, most: int, key: str) -> list[int] | None:
    """Draw `most` rows of `count`, in order, each with weight count / most; None: all rows (most 0, or not fewer)."""
    if not most or most >= count:
        return None
    draw = random.Random(f"{key} {count} {most}").random
    return [min(count - 1, int((at + draw()) * count / most)) for at in range(most)]


LOW_UNITS_IN_TURN = 8
_Key = tuple[int, str]  # a module and the local name of its weight


class LayerProbes:
    """Hooks on the layers of a stream; they do nothing until `watch` is called for a step."""

    def __init__(self, units: PrecisionUnits, collector: GradStatsCollector, on_backward: Callable[[], None]) -> None:
        self.units, self.collector, self.on_backward = units, collector, on_backward
        self.unseen: dict[str, str] = {}  # weight -> why its impact cannot be measured
        self._blind: set[str] = set()  # units of the weights in `unseen`
        self._precisions: Mapping[str, str] | None = None  # of the step that is measured
        self._due: frozenset[str] = frozenset()  # units to be measured in this step
        self._step = 0
        self._uses: dict[str, dict[_Key, str]] = {}  # unit -> where its weights are used -> their names
        self._measured: set[_Key] = set()  # of this step
        self._pathless: set[_Key] = set()  # of this step: layers that ran, and that no gradient will reach
        self._rows: dict[tuple[int, torch.device], Tensor | None] = {}  # of this step: number of rows -> sample
        self._handles: list[RemovableHandle] = []

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def hook_backward(self) -> None:
        """Call `on_backward` when backward has reached the last block."""
        last = self.units.stream.blocks[-1].module
        self._handles.append(last.register_forward_hook(self._after_last_block))

    def hook_gradients(self) -> None:
        """Measure the gradients of streamed weights that are trained."""
        for unit, module, local in self.units.trained_uses():
            self._handles.append(module.register_forward_pre_hook(self._gradient_hook(unit, local)))

    def hook_impacts(self) -> None:
        """Measure impacts on watched steps."""
        uses, self.unseen = self.units.linear_uses()
        self._blind = {weight.unit for weight in self.units.weights if weight.full_name in self.unseen}
        for use in uses:
            self._uses.setdefault(use.weight.unit, {})[_key_of(use)] = use.weight.full_name
            hook = self._impact_hook(use)
            self._handles.append(use.module.register_forward_hook(hook, with_kwargs=True))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ---- steps -------------------------------------------------------------------------------------------------------

    def watch(self, precisions: Mapping[str, str], step: int, *, impacts: bool, all_high: bool) -> None:
        """Measure this step's gradients, and where asked impacts of INT8: of units whose turn it is, or of all."""
        self._precisions, self._step, self._rows = precisions, step, {}
        self._measured, self._pathless = set(), set()
        config = self.units.config
        turn, turns = step // config.update_interval_steps, {"bf16": 1 if all_high else config.impact_turns}
        self._due = frozenset(
            unit
            for index, unit in enumerate(self.units.names)
            if impacts and (index - turn) % turns.get(precisions[unit], LOW_UNITS_IN_TURN) == 0
        )

    def sleep(self) -> None:
        """Measure nothing until the next `watch`: between steps, and while a probe batch runs."""
        self._precisions = None

    def finish_step(self) -> dict[str, str]:
        """Drop incomplete impacts, after backward. Returns unit -> the first weight that was not measured."""
        lacking = {}
        for unit in self._due - self._blind:
            uses = self._uses.get(unit, {})
            missing = [name for key, name in uses.items() if key not in self._measured or key in self._pathless]
            if missing:
                self.collector.drop_impacts(unit)
                lacking[unit] = missing[0]
        self._due = frozenset()
        return lacking

    # ---- hooks of a layer --------------------------------------------------------------------------------------------

    def _after_last_block(self, module: nn.Module, args: Any, output: Any) -> None:
        first = first_tensor(output)
        if self._precisions is not None and first is not None and first.requires_grad:
            first.register_hook(lambda _: self.on_backward())

    def _gradient_hook(self, unit: str, local: str) -> Callable[..., None]:
        def before(module: nn.Module, _args: Any) -> None:
            leaf = module._parameters[local]
            if self._precisions is None or leaf is None or not leaf.requires_grad or not torch.is_grad_enabled():
                return
            if not leaf.is_leaf or hasattr(leaf, "_bitplan_measured"):  # modules may share a weight: measure it once
                return
            leaf._bitplan_measured = True  # type: ignore[attr-defined]
            leaf.register_hook(lambda gradient: self.collector.add_gradient(unit, gradient))

        return before

    def _impact_hook(self, use: MatrixUse) -> Callable[..., None]:
        unit, key = use.weight.unit, _key_of(use)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._precisions is None or unit not in self._due or unit in self._blind or not torch.is_grad_enabled():
                return
            inputs, weight = first_tensor([*args, *kwargs.values()]), module._parameters[use.local]
            if isinstance(output, Tensor) and not output.requires_grad:
                self._pathless.add(key)
            if not (isinstance(output, Tensor) and output.requires_grad and inputs is not None and weight is not None):
                return
            if tuple(weight.shape) != (output.shape[-1], inputs.shape[-1]):
                shapes = (
                    f"{tuple(weight.shape)} with an input of {inputs.shape[-1]} and an output of {output.shape[-1]}"
                )
                self.unseen[use.weight.full_name] = f"it does not compute W x: {shapes}"
                self._blind.add(unit)
                return
            flat = inputs.detach().reshape(-1, inputs.shape[-1])
            rows = self._sample(len(flat), flat.device)
            # Always a copy: the input may be changed in place later, which autograd would not detect here.
            saved = _Saved(flat.clone() if rows is None else flat.index_select(0, rows), weight.detach())
            measure = self._measure(use, self._precisions[unit] != "bf16", rows)
            output.register_hook(lambda gradient: measure(gradient, saved))

        return after

    def _sample(self, count: int, device: torch.device) -> Tensor | None:
        """The indices of the rows, of `count`, that are measured in this step, the same for every layer; None: all."""
        key = (count, device)
        if key not in self._rows:
            rows = sample_rows(count, self.units.config.impact_tokens, f"step {self._step}")
            self._rows[key] = None if rows is None else to_device(torch.tensor(rows), device)
        return self._rows[key]

    def _measure(self, use: MatrixUse, is_low: bool, rows: Tensor | None) -> Callable[[Tensor, _Saved], None]:
        fmt, weight = self.units.config.int8_format, use.weight

        def measure(gradient: Tensor, saved: _Saved) -> None:
            inputs, on_device = saved.unpack()
            if weight.unit in self._blind:  # another of its layers has shown it meanwhile
                return
            flat = gradient.reshape(-1, gradient.shape[-1])
            scale = 1.0 if rows is None else len(flat) / len(rows)
            flat = flat if rows is None else flat.index_select(0, rows)
            true = to_device(self.units.truth(weight), on_device.device) if is_low else on_device
            impact = impact_of(flat, inputs, rounding_error(true, fmt))
            self.collector.add_impact(weight.unit, "int8", impact, scale)
            self._measured.add(_key_of(use))

        return measure


def _key_of(use: MatrixUse) -> _Key:
    return id(use.module), use.local


class _Saved:
    """Tensors kept for a hook in backward as autograd would keep them: through the hooks that are active now."""

    def __init__(self, *tensors: Tensor) -> None:
        self._hooks = outer_hooks()
        self._pending: list[Any] = [one if self._hooks is None else self._hooks[0](one) for one in tensors]

    def unpack(self) -> list[Tensor]:
        pending, self._pending = self._pending, []
        return [one if self._hooks is None else self._hooks[1](one) for one in pending]


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in a module's inputs or outputs."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((one for one in map(first_tensor, value) if one is not None), None)
    return None

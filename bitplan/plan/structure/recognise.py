"""From a recording to the parts of a model: products, norms, embeddings, MLPs, attention, residuals, blocks.

Every rule here looks at functions, their arguments and who feeds whom; none at the name of a class or an attribute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bitplan.plan.structure import activations
from bitplan.plan.structure.graph import Graph, Slot, sample
from bitplan.plan.structure.model_view import AttentionUse, GatedMlpUse, LinearUse, NormUse, PlainMlpUse, Residual
from bitplan.plan.structure.norms import Norms
from bitplan.plan.structure.products import Products
from bitplan.plan.structure.recorder import Step

_CHOICES = {"topk", "argmax", "sort", "argsort", "multinomial"}
_SOFTMAX = {"softmax", "_softmax"}


class Recogniser:
    """The parts of one recording, each found once, in the order of the run."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        products = Products(graph)
        self.linears, self.embeddings = products.linears, products.embeddings
        self.convolutions = products.convolutions
        self.norms = Norms(graph).norms
        self.norms = [self._with_readers(norm) for norm in self.norms]
        self.gated: list[GatedMlpUse] = []
        self.plain: list[PlainMlpUse] = []
        for linear in list(self.linears.values()):
            self._find_mlp(linear)
        self.attentions = list(self._find_attentions())
        self._name_roles()
        self.residuals = list(self._find_residuals())

    def _with_readers(self, norm: NormUse) -> NormUse:
        weights, others = [], []
        for step, value in self.graph.final_readers(norm.output):
            linear = self.linears.get(step.index)
            if linear is not None and linear.input == value:
                weights.append(linear.weight)
            else:
                others.append(describe_step(step))
        if self.graph.is_output(norm.output):
            others.append("the model's output")
        return replace(norm, readers=tuple(dict.fromkeys(weights)), others=tuple(dict.fromkeys(others)))

    # MLPs

    def _find_mlp(self, down: LinearUse) -> None:
        graph = self.graph
        if down.step not in self.linears or down.input >= len(graph.values):
            return
        value = down.input
        behind = graph.slots_behind(value, self.linears)
        if behind is None or not 1 <= len(behind[0]) <= 2:
            return
        slots, between = sorted(behind[0], key=lambda slot: (slot.step, slot.part)), behind[1]
        if not between or any(slot.step == down.step for slot in slots):
            return
        numbers = {slot: sample(64, seed) for seed, slot in enumerate(slots)}

        def given(index: int) -> Any:
            slot = graph.slot(index, self.linears)
            return numbers.get(slot) if slot is not None else None

        try:
            result = graph.replay(value, given)
        except (RuntimeError, TypeError, ValueError):  # a step that wants the shapes of the run
            result = None
        casts = any(graph.is_cast(graph.steps[index]) for index in between)
        drops = any(graph.is_dropout_on(graph.steps[index]) for index in between)
        only = self._are_read_only_between(slots, between)
        if len(slots) == 1:
            if slots[0].parts == 1:
                name = activations.OTHER if result is None else activations.name_of(numbers[slots[0]], result)
                if name != "identity":
                    self.plain.append(PlainMlpUse(self.linears[slots[0].step], down, name, only, casts, drops))
            return
        for gate, up in (slots, slots[::-1]):
            name = self._gating(numbers[gate], numbers[up], result)
            if name != activations.OTHER or up is slots[0]:
                parts = (gate.part, up.part)
                linears = (self.linears[gate.step], self.linears[up.step], down)
                self.gated.append(GatedMlpUse(*linears, name, *parts, only, gate.is_interleaved, casts, drops))
                return

    def _gating(self, gate: Any, up: Any, result: Any) -> str:
        if result is None:
            return activations.OTHER
        joined = {name: act(gate) * up for name, act in activations.KNOWN.items()}
        joined |= {name: join(gate, up) for name, join in activations.GATINGS.items()}
        same = (name for name, values in joined.items() if activations.is_close(values, result))
        return next(same, activations.OTHER)

    def _are_read_only_between(self, slots: list[Slot], between: set[int]) -> bool:
        """Whether outputs of projections, and all that is made of them up to the last product, are read there alone."""
        inner = {*between}
        waiting = [output for slot in slots for output in self.graph.steps[slot.step].outputs]
        while waiting:
            value = waiting.pop()
            if value in self.graph.outputs:
                return False
            for step in self.graph.readers(value):
                if step.index in inner:
                    continue
                cuts = self.graph.is_same_numbers(step) or step.name in ("chunk", "split", "getitem", "unbind")
                if not cuts or step.index in self.linears:
                    return False
                waiting += step.outputs
        return True

    # AttentionUse and roles

    def _find_attentions(self) -> Iterator[AttentionUse]:
        graph = self.graph
        for step in graph.steps:
            if step.name == "sdpa":
                named = zip((0, 1, 2), ("query", "key", "value"), strict=True)
                values = [graph.value_at(step, at, name) for at, name in named]
                if None not in values:
                    yield self._attention(step, [value for value in values if value is not None], step.outputs[0])
            elif step.name in _SOFTMAX:
                before, after = self._product_before(step), self._product_after(step)
                if before is not None and after is not None:
                    last, values_in = after
                    yield self._attention(step, [*before, values_in], last)

    def _attention(self, step: Step, values: list[int], output: int) -> AttentionUse:
        behind = [graph_weights(self, self.graph.behind(value, self.linears)) for value in values]
        ahead, _ = self.graph.ahead(output, self.linears)
        queries, keys, gathered = behind
        return AttentionUse(step.module, queries, keys, gathered, graph_weights(self, ahead))

    def _product_before(self, step: Step) -> tuple[int, int] | None:
        """The two values whose product a softmax is taken of."""
        value = step.inputs[0]
        for _ in range(12):
            maker = self.graph.maker(value)
            if maker is None or maker.index in self.linears:
                return None
            if maker.name in ("matmul", "bmm", "baddbmm", "einsum") and len(maker.inputs) >= 2:
                first, second = maker.inputs[-2:]
                return first, second
            if not maker.inputs:
                return None
            value = maker.inputs[0]
        return None

    def _product_after(self, step: Step) -> tuple[int, int] | None:
        """The product of a softmax's numbers with values: its output, and the values."""
        value = step.outputs[0]
        for _ in range(8):
            readers = self.graph.readers(value)
            product = next((each for each in readers if each.name in ("matmul", "bmm", "einsum")), None)
            if product is not None:
                others = [index for index in product.inputs if index != value]
                return (product.outputs[0], others[0]) if others and product.index not in self.linears else None
            if not readers or not readers[0].outputs:
                return None
            value = readers[0].outputs[0]
        return None

    def _name_roles(self) -> None:
        roles: dict[str, set[str]] = {}
        for attention in self.attentions:
            for part in ("queries", "keys", "values"):
                for weight in getattr(attention, part):
                    roles.setdefault(weight, set()).add(part)
        outputs = {weight for attention in self.attentions for weight in attention.outputs}
        plain = [mlp for mlp in self.plain if mlp.only_down]
        gates = {mlp.gate.step: "gate_up" if mlp.is_fused else "gate" for mlp in self.gated}
        ups = {mlp.up.step: "up" for mlp in self.gated if not mlp.is_fused} | {mlp.up.step: "up" for mlp in plain}
        downs = {mlp.down.step for mlp in self.gated} | {mlp.down.step for mlp in plain}
        parts = {*self.linears, *(part.step for part in (*self.norms, *self.convolutions))}
        for key, linear in self.linears.items():
            if linear.role != "linear":
                continue
            role: str | None = _attention_role(roles.get(linear.weight, set())) or gates.get(key) or ups.get(key)
            if role is None and linear.weight in outputs:
                role = "attention_output"
            if role is None and key in downs:
                role = "down"
            if role is None or role == "up":
                role = self._router_or_head(linear, parts) or role
            self.linears[key] = replace(linear, role=role or "linear")
        known = self.linears
        self.gated = [
            replace(mlp, gate=known[mlp.gate.step], up=known[mlp.up.step], down=known[mlp.down.step])
            for mlp in self.gated
        ]
        self.plain = [replace(mlp, up=known[mlp.up.step], down=known[mlp.down.step]) for mlp in self.plain]

    def _router_or_head(self, linear: LinearUse, parts: set[int]) -> str | None:
        choices = {step.index for step in self.graph.steps if step.name in _CHOICES}
        reached, returned = self.graph.ahead(linear.output, parts | choices)
        if reached & choices:
            return "router"
        return "head" if returned and not reached else None

    def _find_residuals(self) -> Iterator[Residual]:
        graph = self.graph
        parts = {*self.linears, *(part.step for part in self.convolutions)}
        parts |= {step.index for step in graph.steps if step.name == "unknown"}
        for step in graph.steps:
            if step.name != "add" or len(step.inputs) != 2 or len({*step.inputs}) != 2:
                continue
            first, second = sorted(step.inputs)
            if graph.values[first].shape != graph.values[second].shape or graph.weight(first) or graph.weight(second):
                continue
            if graph.maker(second) is not None and graph.derives_from(second, first, parts):
                yield Residual(step.module, first, second, step.outputs[0])


def graph_weights(found: Recogniser, steps: set[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(found.linears[index].weight for index in sorted(steps)))


def _attention_role(roles: set[str]) -> str | None:
    if not roles:
        return None
    if len(roles) == 3:
        return "qkv"
    if len(roles) == 1:
        return {"queries": "query", "keys": "key", "values": "value"}[next(iter(roles))]
    return "key_value" if "queries" not in roles else "query_key" if "values" not in roles else "query_value"


def describe_step(step: Step) -> str:
    return f"{step.name} in {step.module or 'the model'}"


def roles_by_function(graph: Graph) -> dict[str, str]:
    """What parameters are for that no part reads: named by the first function that reads them."""
    roles: dict[str, str] = {}
    for step in graph.steps:
        for value in step.inputs:
            known = graph.values[value]
            if known.is_parameter and known.names:
                word = {"add": "bias", "sub": "bias", "mul": "scale"}.get(step.name, "other")
                roles.setdefault(known.names[0], word)
    return roles


def parameter_roles(found: Recogniser) -> dict[str, str]:
    """What parameters are for, each under the name by which a part reads it."""
    roles: dict[str, str] = {}
    for norm in found.norms:
        roles |= {name: "norm" for name in (norm.weight, norm.bias) if name}
    for convolution in found.convolutions:
        roles |= {convolution.weight: "convolution"} | ({convolution.bias: "bias"} if convolution.bias else {})
    for embedding in found.embeddings:
        roles[embedding.weight] = "embedding" if embedding.by == "input" else "position_embedding"
    for linear in found.linears.values():
        if linear.bias:
            roles[linear.bias] = "bias"
        for name in (linear.weight, *linear.computed):
            if name and roles.get(name) not in ("embedding", "position_embedding"):
                roles[name] = linear.role
    return roles

"""From a recording to the parts of a model: products, norms, embeddings, MLPs, attention, residuals, blocks.

Every rule here looks at functions, their arguments and who feeds whom; none at the name of a class or an attribute.

Norms: as one function, or spelled out in small steps, with or without a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bitplan.plan.structure import activations
from bitplan.plan.structure.graph import CASTS, Graph, ReadWeight, Slot, sample
from bitplan.plan.structure.model_view import AttentionUse, GatedMlpUse, LinearUse, NormUse, PlainMlpUse, Residual
from bitplan.plan.structure.products import Products, holder
from bitplan.plan.structure.recorder import Step

# ---- norms -----------------------------------------------------------------------------------------------------------


_FUSED_NORMS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"}


class Norms:
    """All norms of a recording, in the order of the run."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.norms: list[NormUse] = []
        for step in graph.steps:
            if step.name in _FUSED_NORMS:
                self._fused_norm(step)
            elif step.name in ("rsqrt", "sqrt") or (step.name == "pow" and graph.argument(step, 1, "exponent") == -0.5):
                self._spelled_norm(step)

    def _fused_norm(self, step: Step) -> None:
        graph = self.graph
        value = graph.value_at(step, 0, "input")
        at = {"layer_norm": (2, 3, 4), "rms_norm": (2, None, 3), "group_norm": (2, 3, 4)}.get(step.name, (3, 4, 7))
        weight = graph.weight(graph.value_at(step, at[0], "weight"))
        bias = graph.weight(graph.value_at(step, at[1], "bias")) if at[1] is not None else None
        if value is None:
            return
        given = graph.argument(step, 1, "normalized_shape")
        size = tuple(given) if isinstance(given, list | tuple) else (graph.values[value].shape[-1],)
        eps = graph.argument(step, at[2], "eps") if at[2] is not None else None
        eps = eps if isinstance(eps, float) else None
        self._add(step, value, step.outputs[0], weight, bias, kind=step.name, eps=eps, size=size)

    def _add(
        self, step: Step, value: int, output: int, weight: ReadWeight | None, bias: ReadWeight | None, **facts: Any
    ) -> None:
        names = [None if read is None else self.graph.name_of(read, step.module) for read in (weight, bias)]
        path = holder(names[0]) if names[0] else step.module
        use = NormUse(path, step.module, value, output, step.index, weight=names[0], bias=names[1], **facts)
        self.norms.append(use)

    def _spelled_norm(self, step: Step) -> None:
        """x * rsqrt(mean(x * x) + eps), and with the mean taken off first: in many orders and casts."""
        graph = self.graph
        found = self._mean_of_squares(step.inputs[0])
        if found is None:
            return
        squared, eps, mean = found
        scale = step.outputs[0]
        if step.name == "sqrt":  # 1 / sqrt(x), or a division by it
            after = graph.readers(scale)
            if len(after) == 1 and after[0].name in ("rdiv", "reciprocal"):
                scale = after[0].outputs[0]
        products = [other for other in graph.readers(scale) if other.name in ("mul", "div") and len(other.inputs) == 2]
        if len(products) != 1 or len(graph.readers(scale)) != 1:
            return
        normed = products[0]
        left = next((value for value in normed.inputs if value != scale), None)
        if left is None or not self._are_equal(left, squared):
            return
        centred = graph.maker(squared)
        value, kind = squared, "rms_norm"
        if centred is not None and centred.name == "sub" and self._is_mean_of_other(centred):
            value, kind = centred.inputs[0], "layer_norm"
        source = self._uncast(value)
        computes = graph.values[value].dtype
        inner = "" if computes == graph.values[source].dtype else str(computes).removeprefix("torch.")
        output, weight, bias, plus_one, before = self._factor_after(normed.outputs[0], graph.values[source].dtype)
        size = graph.values[mean.inputs[0]].shape[-1:]
        spelled = {"plus_one": plus_one, "is_spelled": True, "computes_in": inner, "casts_before_weight": before}
        self._add(step, source, output, weight, bias, kind=kind, eps=eps, size=size, **spelled)

    def _mean_of_squares(self, value: int) -> tuple[int, float | None, Step] | None:
        """x, eps and the mean's step where a value is mean(x * x) + eps over the last dimension."""
        graph, eps = self.graph, None
        step = graph.maker(value)
        if step is not None and step.name == "add" and len(step.inputs) == 1:
            eps = next((item for item in step.args if isinstance(item, float | int)), None)
            step = graph.maker(step.inputs[0])
        elif step is not None and step.name == "add":  # eps in a buffer
            step = graph.maker(step.inputs[0])
        if step is None or step.name not in ("mean", "var"):
            return None
        dims = step.kwargs.get("dim", step.args[1] if len(step.args) > 1 else None)
        rank = len(graph.values[step.inputs[0]].shape)
        last = dims if isinstance(dims, int) else dims[0] if isinstance(dims, list | tuple) and len(dims) == 1 else None
        if last not in (-1, rank - 1) or step.name == "var":
            return None
        square = graph.maker(step.inputs[0])
        if square is None:
            return None
        is_square = square.name == "square" or (square.name == "pow" and graph.argument(square, 1, "exponent") == 2)
        is_square = is_square or (square.name == "mul" and len(square.inputs) == 2 and len({*square.inputs}) == 1)
        return (square.inputs[0], None if eps is None else float(eps), step) if is_square else None

    def _are_equal(self, one: int, other: int) -> bool:
        """The same value but for casts, or the same difference of two values, computed twice."""
        one, other = self._uncast(one), self._uncast(other)
        if one == other:
            return True
        steps = self.graph.maker(one), self.graph.maker(other)
        if steps[0] is None or steps[1] is None or {step.name for step in steps if step is not None} != {"sub"}:
            return False
        return all(self._uncast(a) == self._uncast(b) for a, b in zip(steps[0].inputs, steps[1].inputs, strict=True))

    def _uncast(self, value: int) -> int:
        while (step := self.graph.maker(value)) is not None and step.name in CASTS and not step.writes:
            value = step.inputs[0]
        return value

    def _is_mean_of_other(self, step: Step) -> bool:
        mean = self.graph.maker(step.inputs[1]) if len(step.inputs) == 2 else None
        return mean is not None and mean.name == "mean" and self._uncast(mean.inputs[0]) == self._uncast(step.inputs[0])

    def _factor_after(self, value: int, dtype: Any) -> tuple[int, ReadWeight | None, ReadWeight | None, bool, bool]:
        """What follows the normed numbers: casts, a factor, an addend. The last value, and what was found."""
        graph = self.graph
        weight, bias, plus_one, before = None, None, False, False
        while True:
            readers = graph.readers(value)
            if len(readers) != 1 or readers[0].writes or value in graph.outputs:
                return value, weight, bias, plus_one, before
            step = readers[0]
            if step.name in CASTS and step.inputs[0] == value:
                if weight is None and bias is None:
                    after = graph.readers(step.outputs[0])
                    if len(after) == 1 and self._parameter_beside(after[0], step.outputs[0])[0] is not None:
                        before = graph.values[step.outputs[0]].dtype == dtype
                value = step.outputs[0]
                continue
            read, plus = self._parameter_beside(step, value)
            if read is None:
                return value, weight, bias, plus_one, before
            if step.name == "mul" and weight is None and bias is None:
                weight, plus_one = read, plus
            elif step.name == "add" and bias is None and not plus:
                bias = read
            else:
                return value, weight, bias, plus_one, before
            value = step.outputs[0]

    def _parameter_beside(self, step: Step, value: int) -> tuple[ReadWeight | None, bool]:
        """The parameter of rank 1 that a step joins with a value, and whether it is 1 + that parameter."""
        if step.name not in ("mul", "add") or len(step.inputs) != 2:
            return None, False
        other = next((index for index in step.inputs if index != value), None)
        read = self.graph.weight(other)
        plus = False
        if read is None and other is not None:
            maker = self.graph.maker(other)
            if maker is not None and maker.name == "add" and len(maker.inputs) == 1 and 1 in _numbers(maker):
                read, plus = self.graph.weight(maker.inputs[0]), True
        if read is None or len(self.graph.values[read.value].shape) != 1:
            return None, False
        return read, plus


def _numbers(step: Step) -> list[Any]:
    return [item for item in (*step.args, *step.kwargs.values()) if isinstance(item, int | float)]


# ---- recognise -------------------------------------------------------------------------------------------------------


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

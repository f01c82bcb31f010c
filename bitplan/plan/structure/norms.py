"""Norms: as one function, or spelled out in small steps, with or without a weight."""

from __future__ import annotations

from typing import Any

from bitplan.plan.structure.graph import CASTS, Graph, ReadWeight
from bitplan.plan.structure.model_view import NormUse
from bitplan.plan.structure.products import holder
from bitplan.plan.structure.recorder import Step

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
        name = graph.name_of(weight, step.module) if weight is not None else None
        self.norms.append(
            NormUse(
                holder(name) if name else step.module,
                step.module,
                value,
                step.outputs[0],
                step.index,
                kind=step.name,
                weight=name,
                bias=graph.name_of(bias, step.module) if bias is not None else None,
                eps=eps if isinstance(eps, float) else None,
                size=size,
            )
        )

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
        name = graph.name_of(weight, step.module) if weight is not None else None
        self.norms.append(
            NormUse(
                holder(name) if name else step.module,
                step.module,
                source,
                output,
                step.index,
                kind=kind,
                weight=name,
                bias=graph.name_of(bias, step.module) if bias is not None else None,
                eps=eps,
                size=graph.values[mean.inputs[0]].shape[-1:],
                plus_one=plus_one,
                is_spelled=True,
                computes_in=inner,
                casts_before_weight=before,
            )
        )

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

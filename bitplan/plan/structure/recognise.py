"""From a recording to the parts of a model: products, norms, embeddings, MLPs, attention, residuals, blocks.

Every rule here looks at functions, their arguments and who feeds whom; none at the name of a class or an attribute.

Products with weights, however they are written, rows of tables and convolutions come first, then norms, as one function
or spelled out in small steps, then what is made of them. Blocks that repeat are modules side by side, called one after
the other, each with products of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import Tensor

from bitplan.plan.structure.graph import CASTS, Graph, ReadWeight, Slot, each_once, sample
from bitplan.plan.structure.model_view import (
    AttentionUse,
    ConvolutionUse,
    EmbeddingUse,
    GatedMlpUse,
    LinearUse,
    NormUse,
    PlainMlpUse,
    Residual,
    Stack,
)
from bitplan.plan.structure.recorder import Recording, Ref, Step

# ---- activations -----------------------------------------------------------------------------------------------------

# An activation has a name by what it computes: its chain of steps is run on a few numbers and compared.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "mish": F.mish,
    "softplus": F.softplus,
    "elu": F.elu,
    "selu": F.selu,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "exp": torch.exp,
}
# What joins gate and up beside act(gate) * up.
_GATINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gpt_oss": lambda gate, up: (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)),
}
_OTHER = "other"


def activation_name(inputs: Tensor, outputs: Tensor) -> str:
    """The activation that makes these outputs of these inputs; "other" where none that is known does."""
    for name, function in ACTIVATIONS.items():
        if _is_close(function(inputs), outputs):
            return name
    return _OTHER


def _is_close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding; constants are often written with seven digits, and gelu differs from its tanh by 1e-3."""
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=1e-6, atol=1e-6))


# ---- products --------------------------------------------------------------------------------------------------------


# function -> positions of input, weight and bias, and whether the weight is [inputs, outputs] there
_PRODUCTS: dict[str, tuple[int, int, int | None, bool]] = {
    "linear": (0, 1, 2, False),
    "matmul": (0, 1, None, True),
    "mm": (0, 1, None, True),
    "bmm": (0, 1, None, True),
    "grouped_mm": (0, 1, None, True),
    "rmatmul": (1, 0, None, True),
    "addmm": (1, 2, 0, True),
    "baddbmm": (1, 2, 0, True),
}
_ARGUMENTS = {"linear": ("input", "weight", "bias"), "addmm": ("mat1", "mat2", "input")}
_PICKERS = {"embedding": (1, 0, "weight", "input"), "index_select": (0, 2, "input", "index")}


def holder(name: str) -> str:
    """The path of the module that holds a parameter of this name."""
    return name.rpartition(".")[0]


class Products:
    """All parts of a recording that read a matrix: by step, in the order of the run."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.linears: dict[int, LinearUse] = {}
        self.embeddings: list[EmbeddingUse] = []
        self.convolutions: list[ConvolutionUse] = []
        for step in graph.steps:
            if step.name in _PRODUCTS:
                self._product(step)
            elif step.name == "einsum":
                self._einsum(step)
            elif step.name == "multi_head_attention_forward":
                self._joined_attention(step)
            elif step.name in _PICKERS or (step.name == "getitem" and len(step.inputs) > 1):
                self._embedding(step)
            elif step.name.startswith("conv"):
                self._convolution(step)

    def _product(self, step: Step) -> None:
        at, weight_at, bias_at, columns = _PRODUCTS[step.name]
        names = _ARGUMENTS.get(step.name, ("", "", ""))
        value = self.graph.value_at(step, at, names[0])
        weight = self.graph.value_at(step, weight_at, names[1])
        if value is None or weight is None:
            return
        if step.name == "bmm" and self._product_with_columns(step, value, weight):
            return
        bias = self.graph.value_at(step, bias_at, names[2]) if bias_at is not None else None
        self._add_linear(step, value, weight, bias, columns)

    def _product_with_columns(self, step: Step, weight: int, column: int) -> bool:
        """Add a product written squeeze(w @ x[..., None]), a matrix for each row; whether it is one."""
        before, after = self.graph.maker(column), self.graph.readers(step.outputs[0])
        is_column = before is not None and before.name == "unsqueeze" and self.graph.values[column].shape[-1] == 1
        if not is_column or self.graph.weight(weight) is None or [reader.name for reader in after] != ["squeeze"]:
            return False
        assert before is not None
        self._add_linear(after[0], before.inputs[0], weight, None, columns=False)
        return True

    def _add_linear(self, step: Step, value: int, weight: int, bias: int | None, columns: bool) -> None:
        read = self.graph.weight(weight)
        computed = () if read is not None else self.graph.made_of_parameters(weight)
        if read is None and not computed:
            return
        shape = self.graph.values[read.value if read is not None else weight].shape
        if len(shape) < 2:
            return
        columns = columns != (read.is_turned if read is not None else False)
        outputs, inputs = (shape[-1], shape[-2]) if columns else (shape[-2], shape[-1])
        name = self.graph.name_of(read, step.module) if read is not None else ""
        if not name and not computed:
            return  # a weight that the model does not hold: of a module that a forward keeps elsewhere
        bias_read = self.graph.weight(bias) if bias is not None else None
        self.linears[step.index] = LinearUse(
            path=holder(name or computed[0]),
            module=step.module,
            input=value,
            output=step.outputs[0],
            step=step.index,
            weight=name,
            bias=self.graph.name_of(bias_read, step.module) if bias_read is not None else self._bias_added(step),
            shape=(outputs, inputs),
            is_columns=columns,
            source=self.graph.origin(value),
            experts=shape[0] if len(shape) == 3 else 0,
            item=read.item if read is not None else None,
            function=step.name,
            computed=computed,
            is_whole=read.is_whole if read is not None else True,
        )

    def _bias_added(self, step: Step) -> str | None:
        """Find the bias of a product: a parameter that is added to it and used nowhere else (Falcon, Conv1D)."""
        readers = list(self.graph.final_readers(step.outputs[0]))
        if len(readers) != 1 or readers[0][0].name != "add":
            return None
        reads = (self.graph.bias(value) for value in readers[0][0].inputs)
        return next((self.graph.name_of(read, step.module) for read in reads if read is not None), None)

    def _einsum(self, step: Step) -> None:
        equation, operands = step.args[0], [item for item in step.args[1:] if isinstance(item, Ref)]
        if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
            return
        left, _, result = equation.replace(" ", "").partition("->")
        terms = left.split(",")
        for weight, value in ((1, 0), (0, 1)):
            letters, others = terms[weight], terms[value].replace("...", "")
            if self.graph.weight(operands[weight].value) is None or len(letters) < 2 or "." in letters:
                continue
            summed = [letter for letter in letters if letter not in result]
            if letters[:-2] in summed:  # a matrix of rank 3, as XLNet's of attention, not one for each expert
                continue
            if len(summed) == 1 and others.endswith(summed[0]) and letters[-1] in (summed[0], result[-1:]):
                self._add_linear(
                    step, operands[value].value, operands[weight].value, None, columns=letters[-1] != summed[0]
                )
                return

    def _joined_attention(self, step: Step) -> None:
        """Add the projections of torch's own attention, whose weights are arguments of one function.

        They have keys below zero here, since the step is theirs together; what the last one reads is never seen, so
        its source is a number that no value has.
        """
        at = self.graph.value_at
        query, key, value = at(step, 0, "query"), at(step, 1, "key"), at(step, 2, "value")
        joined = query if query == key == value else None
        products = [
            (joined, at(step, 5, "in_proj_weight"), at(step, 6, "in_proj_bias"), "qkv"),
            (query, at(step, 18, "q_proj_weight"), None, "query"),
            (key, at(step, 19, "k_proj_weight"), None, "key"),
            (value, at(step, 20, "v_proj_weight"), None, "value"),
            (step.outputs[0], at(step, 11, "out_proj_weight"), at(step, 12, "out_proj_bias"), "attention_output"),
        ]
        for number, (source, weight, bias, role) in enumerate(products):
            if source is None or weight is None:
                continue
            self._add_linear(step, source, weight, bias, columns=False)
            linear = self.linears.pop(step.index, None)
            if linear is not None:
                unseen = -(8 * step.index + number) - 2
                kept = linear.source if role != "attention_output" else unseen
                self.linears[unseen] = replace(linear, role=role, source=kept)

    def _embedding(self, step: Step) -> None:
        if step.name == "getitem":
            table, index = step.inputs[0], step.inputs[-1]
            if not isinstance(step.args[1], Ref):
                return
        else:
            at, weight_at, index_name, weight_name = _PICKERS[step.name]
            first, second = self.graph.value_at(step, at, index_name), self.graph.value_at(step, weight_at, weight_name)
            if first is None or second is None:
                return
            table, index = first, second
        read = self.graph.weight(table)
        if read is None or self.graph.values[index].dtype.is_floating_point:
            return
        matrix = self.graph.values[read.value]
        if len(matrix.shape) != 2:
            return
        name, by = self.graph.name_of(read, step.module), "input" if self._comes_from_input(index) else "positions"
        self.embeddings.append(
            EmbeddingUse(holder(name), step.module, index, step.outputs[0], step.index, name, matrix.shape, by)
        )

    def _comes_from_input(self, value: int) -> bool:
        waiting = [value]
        for index in each_once(waiting):
            step = self.graph.maker(index)
            if step is None and not self.graph.values[index].names:
                return True
            waiting += step.inputs if step is not None and not self.graph.values[index].is_chosen else ()
        return False

    def _convolution(self, step: Step) -> None:
        value, weight = self.graph.value_at(step, 0, "input"), self.graph.value_at(step, 1, "weight")
        read = self.graph.weight(weight)
        if value is None or read is None:
            return
        bias = self.graph.weight(self.graph.value_at(step, 2, "bias"))
        name = self.graph.name_of(read, step.module)
        self.convolutions.append(
            ConvolutionUse(
                holder(name),
                step.module,
                value,
                step.outputs[0],
                step.index,
                name,
                self.graph.name_of(bias, step.module) if bias is not None else None,
                self.graph.values[read.value].shape,
                step.name,
            )
        )


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
        shape = graph.argument(step, 1, "normalized_shape")
        size = tuple(shape) if isinstance(shape, list | tuple) else (graph.values[value].shape[-1],)
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
        """Recognise a norm written in steps: x * rsqrt(mean(x * x) + eps), also with the mean subtracted."""
        graph = self.graph
        mean_of_squares = self._mean_of_squares(step.inputs[0])
        if mean_of_squares is None:
            return
        squared, eps, mean = mean_of_squares
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
        """Whether two values are the same one but for casts, or the same difference computed twice."""
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
        """Follow a norm's result `value` through casts, multiplication by a weight and addition of a bias.

        Returned are the last value, the weight and the bias (None if there is none), whether the factor is 1 + weight,
        and whether the result was cast to `dtype` before the weight.
        """
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

        def numbers_of(index: int) -> Any:
            slot = graph.slot(index, self.linears)
            return numbers.get(slot) if slot is not None else None

        try:
            result = graph.replay(value, numbers_of)
        except (RuntimeError, TypeError, ValueError):  # a step that wants the shapes of the run
            result = None
        casts = any(graph.is_cast(graph.steps[index]) for index in between)
        drops = any(graph.is_dropout_on(graph.steps[index]) for index in between)
        only = self._are_read_only_between(slots, between)
        if len(slots) == 1:
            if slots[0].parts == 1:
                name = _OTHER if result is None else activation_name(numbers[slots[0]], result)
                if name != "identity":
                    self.plain.append(PlainMlpUse(self.linears[slots[0].step], down, name, only, casts, drops))
            return
        for gate, up in (slots, slots[::-1]):
            name = self._gating(numbers[gate], numbers[up], result)
            if name != _OTHER or up is slots[0]:
                parts = (gate.part, up.part)
                linears = (self.linears[gate.step], self.linears[up.step], down)
                self.gated.append(GatedMlpUse(*linears, name, *parts, only, gate.is_interleaved, casts, drops))
                return

    def _gating(self, gate: Any, up: Any, result: Any) -> str:
        if result is None:
            return _OTHER
        joined = {name: act(gate) * up for name, act in ACTIVATIONS.items()}
        joined |= {name: join(gate, up) for name, join in _GATINGS.items()}
        same = (name for name, values in joined.items() if _is_close(values, result))
        return next(same, _OTHER)

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
            product = next((reader for reader in readers if reader.name in ("matmul", "bmm", "einsum")), None)
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
        linears = self.linears
        self.gated = [
            replace(mlp, gate=linears[mlp.gate.step], up=linears[mlp.up.step], down=linears[mlp.down.step])
            for mlp in self.gated
        ]
        self.plain = [replace(mlp, up=linears[mlp.up.step], down=linears[mlp.down.step]) for mlp in self.plain]

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


def graph_weights(parts: Recogniser, steps: set[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(parts.linears[index].weight for index in sorted(steps)))


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
    """Each parameter's role, "bias", "scale" or "other", by the first function that reads it."""
    roles: dict[str, str] = {}
    for step in graph.steps:
        for value in step.inputs:
            parameter = graph.values[value]
            if parameter.is_parameter and parameter.names:
                word = {"add": "bias", "sub": "bias", "mul": "scale"}.get(step.name, "other")
                roles.setdefault(parameter.names[0], word)
    return roles


def parameter_roles(parts: Recogniser) -> dict[str, str]:
    """What parameters are for, each under the name by which a part reads it."""
    roles: dict[str, str] = {}
    for norm in parts.norms:
        roles |= {name: "norm" for name in (norm.weight, norm.bias) if name}
    for convolution in parts.convolutions:
        roles |= {convolution.weight: "convolution"} | ({convolution.bias: "bias"} if convolution.bias else {})
    for embedding in parts.embeddings:
        roles[embedding.weight] = "embedding" if embedding.by == "input" else "position_embedding"
    for linear in parts.linears.values():
        if linear.bias:
            roles[linear.bias] = "bias"
        for name in (linear.weight, *linear.computed):
            if name and roles.get(name) not in ("embedding", "position_embedding"):
                roles[name] = linear.role
    return roles


# ---- blocks that repeat ----------------------------------------------------------------------------------------------


def find_stacks(recording: Recording, parts: Recogniser) -> tuple[Stack, ...]:
    """The outermost stacks: numbered modules side by side; else modules side by side that compute the same."""
    first_call: dict[str, int] = {}
    for index, call in enumerate(recording.calls):
        first_call.setdefault(call.path, index)
    heavy = _with_several_products(parts)
    siblings: dict[str, list[str]] = {}
    for path in first_call:
        if path and path in heavy:
            siblings.setdefault(path.rpartition(".")[0], []).append(path)
    kinds = {path: _kind(recording, parts, path, first_call[path]) for paths in siblings.values() for path in paths}
    contained = {
        parent: paths for parent, paths in siblings.items() if all(path.rpartition(".")[2].isdigit() for path in paths)
    }
    chosen = {parent: paths for parent, paths in contained.items() if not _lies_in(parent, contained)}
    for parent, paths in siblings.items():
        equal = [path for path in paths if sum(kinds[path] == kinds[other] for other in paths) > 1]
        is_free = not any(_is_within(path, parent) or _is_within(parent, path) for path in chosen)
        if parent not in contained and len(equal) > 1 and is_free:
            chosen[parent] = equal
    return tuple(_stack(parent, paths, kinds, first_call) for parent, paths in chosen.items())


def _stack(parent: str, paths: list[str], kinds: dict[str, object], first_call: dict[str, int]) -> Stack:
    ordered = sorted(paths, key=first_call.__getitem__)
    distinct = list(dict.fromkeys(kinds[path] for path in ordered))
    return Stack(parent, tuple(ordered), tuple(distinct.index(kinds[path]) for path in ordered))


def _with_several_products(parts: Recogniser) -> set[str]:
    """Paths of modules below which there are at least two weights of products or convolutions, however often called."""
    weights: dict[str, set[str]] = {}
    uses = [(part.path, part.weight) for part in parts.linears.values()]
    for path, weight in uses + [(part.path, part.weight) for part in parts.convolutions]:
        while path:
            weights.setdefault(path, set()).add(weight)
            path = path.rpartition(".")[0]
    return {path for path, below in weights.items() if len(below) > 1}


def _kind(recording: Recording, parts: Recogniser, path: str, call: int) -> object:
    """What a block computes: its functions in order, and its weights' shapes under names within the block."""
    block = recording.calls[call]
    names = tuple(step.name for step in recording.steps[block.first : block.last])
    weights = tuple(
        (linear.weight[len(path) :], linear.shape)
        for linear in parts.linears.values()
        if _is_within(linear.path, path) and block.first <= linear.step < block.last
    )
    return names, weights


def _lies_in(parent: str, others: dict[str, list[str]]) -> bool:
    """Whether a container lies within a block of another container."""
    return any(_is_within(parent, path) for other, paths in others.items() if other != parent for path in paths)


def _is_within(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.") or not block

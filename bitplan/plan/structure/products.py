"""Products with weights, however they are written; rows of tables; convolutions."""

from __future__ import annotations

from dataclasses import replace

from bitplan.plan.structure.graph import Graph, each_once
from bitplan.plan.structure.model_view import ConvolutionUse, EmbeddingUse, LinearUse
from bitplan.plan.structure.recorder import Ref, Step

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
    """The module that holds a parameter of this name."""
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
        """A matrix for each row of the input, which is made a column for the product: squeeze(w @ x[..., None])."""
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
        """A parameter that is added to a product and nothing else, as after Falcon's and Conv1D's products."""
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
        """torch's own attention: its projections in and out are arguments of one function.

        They have keys below zero here, since the step is theirs together; what the last one reads is never seen, so
        its source is a number that no value has.
        """
        at = self.graph.value_at
        query, key, value = at(step, 0, "query"), at(step, 1, "key"), at(step, 2, "value")
        joined = query if query == key == value else None
        given = [
            (joined, at(step, 5, "in_proj_weight"), at(step, 6, "in_proj_bias"), "qkv"),
            (query, at(step, 18, "q_proj_weight"), None, "query"),
            (key, at(step, 19, "k_proj_weight"), None, "key"),
            (value, at(step, 20, "v_proj_weight"), None, "value"),
            (step.outputs[0], at(step, 11, "out_proj_weight"), at(step, 12, "out_proj_bias"), "attention_output"),
        ]
        for number, (source, weight, bias, role) in enumerate(given):
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
        known = self.graph.values[read.value]
        if len(known.shape) != 2:
            return
        name, by = self.graph.name_of(read, step.module), "input" if self._comes_from_input(index) else "positions"
        self.embeddings.append(
            EmbeddingUse(holder(name), step.module, index, step.outputs[0], step.index, name, known.shape, by)
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

"""Questions about a recording: where a value comes from, what reads it, and what a chain of small steps computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bitplan.plan.structure.recorder import Recording, Ref, Step

# Steps that give the same numbers in the same order along the last dimension, in another shape or memory.
SAME_NUMBERS = {"view", "reshape", "flatten", "unflatten", "contiguous", "unsqueeze", "squeeze", "clone", "detach"}
SAME_NUMBERS |= {"alias", "view_as", "data", "reshape_as", "identity", "requires_grad"}
CASTS = {"to", "float", "type", "type_as", "half", "bfloat16", "double"}
# Steps that give each number by itself, from numbers at the same place and constants.
POINTWISE = {"silu", "gelu", "relu", "sigmoid", "tanh", "mul", "add", "sub", "div", "pow", "square", "exp", "erf"}
POINTWISE |= {"clamp", "clamp_min", "clamp_max", "relu6", "hardswish", "hardtanh", "leaky_relu", "softplus", "mish"}
POINTWISE |= {"elu", "selu", "celu", "logsigmoid", "log_sigmoid", "sqrt", "rsub", "rdiv", "abs", "softsign", "log"}
POINTWISE |= {"neg", "hardsigmoid", "reciprocal", "rpow", "log1p", "expm1"}
DROPOUTS = {"dropout", "feature_dropout", "dropout1d", "dropout2d", "alpha_dropout"}
TURNS = {"T", "t", "mT", "transpose", "swapaxes", "permute", "adjoint", "H", "mH"}
_PICKS = {"getitem", "select", "narrow", "chunk", "split", "unbind", "expand", "split_with_sizes"}


@dataclass(frozen=True)
class ReadWeight:
    """A parameter as a step reads it: turned or not, as a whole or one matrix or some rows of it."""

    value: int
    is_turned: bool = False
    item: int | None = None
    is_whole: bool = True


@dataclass(frozen=True)
class Slot:
    """A projection's output, or one equal share of it along the last dimension."""

    step: int  # of the projection
    part: int = 0
    parts: int = 1
    is_interleaved: bool = False


class Graph:
    """A recorded run as a graph of steps and values, with ways to walk it that recognition needs."""

    def __init__(self, recording: Recording) -> None:
        self.values, self.steps, self.calls = recording.values, recording.steps, recording.calls
        self.outputs = set(recording.outputs)

    def maker(self, value: int) -> Step | None:
        step = self.values[value].step
        return None if step is None else self.steps[step]

    def readers(self, value: int) -> list[Step]:
        return [self.steps[index] for index in self.values[value].readers]

    def argument(self, step: Step, position: int, name: str) -> Any:
        return step.args[position] if len(step.args) > position else step.kwargs.get(name)

    def value_at(self, step: Step, position: int, name: str) -> int | None:
        argument = self.argument(step, position, name)
        return argument.value if isinstance(argument, Ref) else None

    def is_dropout_of_nothing(self, step: Step) -> bool:
        """Whether a step is a dropout that leaves every number, in training too."""
        return step.name.endswith(("dropout", "dropout1d", "dropout2d")) and self.argument(step, 1, "p") == 0

    def is_dropout_off(self, step: Step) -> bool:
        if step.name not in DROPOUTS:
            return False
        share, training = self.argument(step, 1, "p"), self.argument(step, 2, "training")
        return share == 0 or training is False

    def is_dropout_on(self, step: Step) -> bool:
        return step.name in DROPOUTS and not self.is_dropout_off(step)

    def is_same_numbers(self, step: Step) -> bool:
        """Whether a step hands its first input on, at most in another shape."""
        if step.writes:
            return False
        if step.name in CASTS and step.inputs:
            return self.values[step.inputs[0]].dtype == self.values[step.outputs[0]].dtype
        if self.is_dropout_off(step):
            return True
        if step.name == "getitem" and len(step.inputs) == 1:
            picked = step.args[1] if isinstance(step.args[1], tuple) else (step.args[1],)
            is_plain = all(item is Ellipsis or isinstance(item, slice) for item in picked)
            return is_plain and self.values[step.inputs[0]].shape == self.values[step.outputs[0]].shape
        if step.name not in SAME_NUMBERS:
            return False
        before, after = (self.values[index].shape for index in (step.inputs[0], step.outputs[0]))
        return bool(before) and bool(after) and before[-1] == after[-1]

    def is_cast(self, step: Step) -> bool:
        """Whether a step changes the type of its input."""
        return step.name in CASTS and self.values[step.inputs[0]].dtype != self.values[step.outputs[0]].dtype

    def origin(self, value: int) -> int:
        """Walk back from a value over views and copies that keep the last dimension; returns the value before them."""
        while (step := self.maker(value)) is not None and self.is_same_numbers(step):
            value = step.inputs[0]
        return value

    def uncast(self, value: int) -> int:
        """Walk back from a value over steps that only change its type; returns the value before them."""
        while (step := self.maker(value)) is not None and step.name in CASTS:
            value = step.inputs[0]
        return value

    def final_readers(self, value: int) -> Iterator[tuple[Step, int]]:
        """Steps that read a value, or views and copies of it, with the value that each reads."""
        for step in self.readers(value):
            if self.is_same_numbers(step) and step.inputs[0] == value:
                for output in step.outputs:
                    yield from self.final_readers(output)
            else:
                yield step, value

    def is_output(self, value: int) -> bool:
        """Whether a value, or a view of it, is returned by the model."""
        if value in self.outputs:
            return True
        return any(
            self.is_output(output)
            for step in self.readers(value)
            if self.is_same_numbers(step) and step.inputs[0] == value
            for output in step.outputs
        )

    def weight(self, value: int | None) -> ReadWeight | None:
        """The parameter that a value is, or is a view or a cast of."""
        turned, item, whole = False, None, True
        while value is not None:
            step = self.maker(value)
            if step is None:
                source = self.values[value]
                return ReadWeight(value, turned, item, whole) if source.is_parameter else None
            if self._picks_matrices(step):
                value = step.inputs[0]
                continue
            if step.writes or not step.inputs or (len(step.inputs) > 1 and step.name not in CASTS):
                return None
            if step.name in TURNS:
                turned = turned != self._swaps_last_two(step)
            elif step.name in ("getitem", "select") and len(step.inputs) == 1:
                picked = step.args[1:] if step.name == "getitem" else step.args[2:]
                is_item = len(picked) == 1 and isinstance(picked[0], int)
                item, whole = (picked[0], whole) if is_item else (item, False)
            elif step.name in _PICKS:
                if step.name != "expand":
                    whole = False
            elif step.name not in SAME_NUMBERS and step.name not in CASTS:
                return None
            value = step.inputs[0]
        return None

    def _picks_matrices(self, step: Step) -> bool:
        """Whether a step picks matrices of a stack by indices that the run computed: the experts of tokens."""
        if step.name != "getitem" or len(step.inputs) != 2 or not isinstance(step.args[1], Ref):
            return False
        stack, index = (self.values[value] for value in step.inputs)
        is_number = not index.dtype.is_floating_point and index.dtype is not torch.bool
        return len(stack.shape) == 3 and is_number and not step.writes

    def name_of(self, weight: ReadWeight, module: str) -> str:
        """A parameter's name; of a tied one the name in the module that reads it, if it has one there."""
        names = self.values[weight.value].names
        return next((name for name in names if name.rpartition(".")[0] == module), names[0] if names else "")

    def _swaps_last_two(self, step: Step) -> bool:
        rank = len(self.values[step.inputs[0]].shape)
        if step.name in ("T", "t", "mT", "adjoint", "H", "mH"):
            return True
        dims = [dim % rank for dim in _integers(step.args[1:])] if rank else []
        if step.name == "permute":
            return dims[-2:] == [rank - 1, rank - 2]
        return {*dims} == {rank - 1, rank - 2}

    def made_of_parameters(self, value: int) -> tuple[str, ...]:
        """Names of the parameters from which alone a value is computed; empty where anything else goes in."""
        names: dict[str, None] = {}
        waiting = [value]
        for count, index in enumerate(each_once(waiting)):
            value_, step = self.values[index], self.maker(index)
            if count == 200 or (step is not None and step.name == "unknown") or (step is None and not value_.names):
                return ()
            if step is not None:
                waiting += step.inputs
            elif value_.is_parameter:
                names[value_.names[0]] = None
        return tuple(names)

    def derives_from(self, value: int, ancestor: int, through: Iterable[int]) -> bool:
        """Whether a value is computed from another by way of one of these steps; values count up with the run."""
        via, done = set(through), set()
        waiting = [(value, False)]
        while waiting:
            index, passed = waiting.pop()
            if index == ancestor and passed:
                return True
            if index > ancestor and (index, passed) not in done:
                done.add((index, passed))
                step = self.maker(index)
                if step is not None:
                    passed = passed or step.index in via
                    waiting += [(value_in, passed) for value_in in step.inputs]
        return False

    def behind(self, value: int, stops: Iterable[int]) -> set[int]:
        """Walk back from a value to the nearest of the steps `stops` on every path; returns their indices."""
        stop, reached, waiting = set(stops), set(), [value]
        for index in each_once(waiting):
            step = self.maker(index)
            if step is not None and step.index in stop:
                reached.add(step.index)
            elif step is not None:
                waiting += step.inputs
        return reached

    def ahead(self, value: int, stops: Iterable[int]) -> tuple[set[int], bool]:
        """Walk forward to the nearest of the steps `stops` on every path; also whether the model returns it."""
        stop, reached, waiting, is_returned = set(stops), set(), [value], False
        for index in each_once(waiting):
            is_returned = is_returned or index in self.outputs
            for step in self.readers(index):
                if step.index in stop:
                    reached.add(step.index)
                else:
                    waiting += step.outputs
        return reached, is_returned

    # Chains of small steps

    def slot(self, value: int, projections: dict[int, Any]) -> Slot | None:
        """Which share of which projection's output a value is (all, or one of equal parts); None if it is none."""
        part, parts, interleaved = 0, 1, False
        while (step := self.maker(value)) is not None:
            if step.index in projections:
                return Slot(step.index, part, parts, interleaved)
            if self.is_same_numbers(step):
                value = step.inputs[0]
                continue
            if (before := self.before_bias(step)) is not None:
                value = before
                continue
            share = self._share(step, value)
            if share is None or parts != 1:
                return None
            part, parts, interleaved, value = share
        return None

    def before_bias(self, step: Step) -> int | None:
        """The value to which a step adds a bias: a parameter, or rows of one."""
        if step.name != "add" or len(step.inputs) != 2:
            return None
        for value, other in (step.inputs, step.inputs[::-1]):
            if self.bias(other) is not None and self.bias(value) is None:
                return value
        return None

    def bias(self, value: int) -> ReadWeight | None:
        """The parameter that is added as a bias: of rank 1, or one row of it for each row of the input."""
        read = self.weight(value)
        if read is None:
            step = self.maker(self.origin(value))
            picks = step is not None and step.name == "getitem" and isinstance(step.args[1], Ref)
            read = self.weight(step.inputs[0]) if step is not None and picks else None
            return read if read is not None and len(self.values[read.value].shape) == 2 else None
        return read if len(self.values[read.value].shape) == 1 else None

    def _share(self, step: Step, value: int) -> tuple[int, int, bool, int] | None:
        """Read a step that cuts equal shares out of a last dimension: number, count, alternating or not, of what."""
        shape, got = self.values[step.inputs[0]].shape, self.values[value].shape
        if step.name in ("getitem", "unbind", "select") and len(shape) == len(got) + 1:
            return self._picked_share(step, value)
        if len(step.inputs) != 1 or len(shape) != len(got) or not got or not got[-1] or shape[-1] % got[-1]:
            return None
        count = shape[-1] // got[-1]
        if step.name in ("chunk", "split", "tensor_split", "split_with_sizes"):
            dims = step.kwargs.get("dim", step.args[2] if len(step.args) > 2 else 0)
            sizes = {self.values[output].shape for output in step.outputs}
            if dims not in (-1, len(shape) - 1) or len(sizes) != 1:
                return None
            return step.outputs.index(value), count, False, step.inputs[0]
        if step.name == "getitem":
            picked = step.args[1] if isinstance(step.args[1], tuple) else (step.args[1],)
            last = picked[-1]
            if not isinstance(last, slice) or (len(picked) < len(shape) and Ellipsis not in picked):
                return None
            if any(item not in (slice(None), Ellipsis) for item in picked[:-1]):
                return None
            start, stop, stride = last.indices(shape[-1])
            if stride == count and start < count:
                return start, count, True, step.inputs[0]
            if stride == 1 and stop - start == got[-1] and start % got[-1] == 0:
                return start // got[-1], count, False, step.inputs[0]
        return None

    def _picked_share(self, step: Step, value: int) -> tuple[int, int, bool, int] | None:
        """Recognise a share of the last dimension that was first reshaped to [..., shares, size] and then indexed.

        Returned are its number, the number of shares, False (shares do not alternate), and the value before the
        reshape; None if the step is something else.
        """
        split = self.maker(step.inputs[0])
        if split is None or split.name not in SAME_NUMBERS or len(split.inputs) != 1:
            return None
        before, rows, got = (self.values[index].shape for index in (split.inputs[0], step.inputs[0], value))
        if len(rows) < 2 or before[-1] != rows[-2] * rows[-1] or got != (*rows[:-2], rows[-1]):
            return None
        if step.name == "unbind":
            return step.outputs.index(value), rows[-2], False, split.inputs[0]
        picked = step.args[1] if isinstance(step.args[1], tuple) else (step.args[1],)
        numbers = [item for item in picked if isinstance(item, int) and not isinstance(item, bool)]
        return (numbers[0], rows[-2], False, split.inputs[0]) if len(numbers) == 1 else None

    def slots_behind(self, value: int, projections: dict[int, Any]) -> tuple[set[Slot], set[int]] | None:
        """The shares from which a value is computed point by point, and the steps between; None if anything else."""
        slots: set[Slot] = set()
        between: set[int] = set()
        waiting = [value]
        for count, index in enumerate(each_once(waiting)):
            if (slot := self.slot(index, projections)) is not None:
                slots.add(slot)
                continue
            step = self.maker(index)
            if self.weight(index) is not None:  # an activation with weights of its own
                continue
            if step is None or step.writes or count >= 60:
                return None
            is_passed = step.name in CASTS or step.name in DROPOUTS or self.is_same_numbers(step)
            if not (step.name in POINTWISE or is_passed):
                return None
            between.add(step.index)
            waiting += step.inputs if step.name in POINTWISE else step.inputs[:1]
        return slots, between

    def replay(self, value: int, value_of: Callable[[int], Tensor | None]) -> Tensor | None:
        """Compute a value anew from others, in float64 and without its casts and dropouts."""
        if (tensor := value_of(value)) is not None:
            return tensor
        step = self.maker(value)
        if step is None:
            return None
        if step.name in CASTS or step.name in DROPOUTS or self.is_same_numbers(step):
            return self.replay(step.inputs[0], value_of)
        tensors: dict[int, Tensor] = {}
        for index in step.inputs:
            tensor = self.replay(index, value_of)
            if tensor is None:
                return None
            tensors[index] = tensor
        args, kwargs = tree_map_only(Ref, lambda ref: tensors[ref.value].clone(), (step.args, step.kwargs))
        if "inplace" in kwargs:
            kwargs["inplace"] = False
        result = step.function(*args, **kwargs)
        return result if isinstance(result, Tensor) else None


def each_once(waiting: list[int]) -> Iterator[int]:
    """Every number of a list that may grow meanwhile, the last first."""
    done: set[int] = set()
    while waiting:
        index = waiting.pop()
        if index not in done:
            done.add(index)
            yield index


def _integers(arguments: Iterable[Any]) -> list[int]:
    items: list[int] = []
    for argument in arguments:
        items += argument if isinstance(argument, list | tuple) else [argument]
    return [item for item in items if isinstance(item, int)]


def sample(count: int, seed: int) -> Tensor:
    """Random numbers on which activation functions are compared."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dtype=torch.float64, generator=generator) * 3

"""Records what a module computes: one run of its forward without numbers, call by call.

A `TorchFunctionMode` sees every torch function that a forward calls, whole (`linear`, `silu`, `rms_norm`), with the
tensors that go in and come out. Identity of tensors says who feeds whom. Parameters are replaced by twins on the meta
device in the arguments of each call, so nothing is computed and nothing is allocated, whatever the model's size.

What stays real: small tensors on the CPU that are no parameters (token ids, positions, masks), until they meet a twin.
So a forward may look at its ids. Where a forward asks for a number that weights decide, it cannot be followed further:
the innermost module is written down as unknown, and the run goes on behind it if a value of its input's shape will do.
Indices that weights decide (the experts of a token) are chosen here, one after the other, and noted: they pick rows,
and who feeds whom does not depend on them.

Layers of ours whose weights are packed are run by a plain layer of the same shape (`stand_in`).

The model is not altered. Hooks are not run (what they would do is unknown, and so the view names the modules that have
them); attributes, lists and buffers that a forward writes are put back; random numbers are drawn from a fork. Another
thread must not use the model meanwhile. torch.export and a dispatch mode were tried (docs/log.md): both show
smaller steps, and export takes seven times as long.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from bitplan.base.errors import BitplanError
from bitplan.plan.structure.untouched import (
    as_written,
    calls_through,
    has_foreign_forward,
    own_forward,
    restored,
    same_random_numbers,
)

MOST_REAL = 1 << 20  # numbers of a tensor that is copied rather than replaced by a twin without numbers
# Functions whose result is no tensor, or whose shape depends on numbers: they need the numbers themselves.
_NEED_NUMBERS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__", "nonzero"}
_NEED_NUMBERS |= {"unique", "unique_consecutive", "masked_select", "equal", "allclose", "is_nonzero", "bincount"}
_NEED_NUMBERS |= {"__array__", "argwhere", "histc", "__complex__"}
_TAKE_SIZES = {"view", "reshape", "expand", "repeat", "unflatten", "narrow", "as_strided", "pad"}
_TAKE_SIZES |= {"new_zeros", "new_ones", "new_empty", "new_full", "split", "chunk"}
_MADE_OF_NOTHING = {"arange", "zeros", "ones", "full", "tensor", "linspace", "eye", "as_tensor"}
# Functions whose integers are positions along a dimension: (its argument's position, its default).
_CHOOSE_INDICES = {"topk": (2, -1), "sort": (1, -1), "argsort": (1, -1), "argmax": (1, None), "argmin": (1, None)}
_CHOOSE_INDICES |= {"max": (1, None), "min": (1, None), "multinomial": (99, -1)}
_RENAMED = {"rdiv": "rdiv", "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "rmul": "mul"}
_RENAMED |= {"iadd": "add", "radd": "add", "imul": "mul", "isub": "sub", "subtract": "sub", "itruediv": "div"}
_RENAMED |= {"rmatmul": "rmatmul", "scaled_dot_product_attention": "sdpa"}


class NumbersNeededError(BitplanError):
    """A forward asks for numbers that only weights could give."""


@dataclass(frozen=True)
class Ref:
    """Stands for a recorded value in the arguments of a step."""

    value: int


@dataclass
class Value:
    """A tensor of the run: where it came from, and its shape and type."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    step: int | None = None  # the step that made it; None for parameters, buffers and inputs
    names: tuple[str, ...] = ()  # of a parameter or buffer: all its names
    is_parameter: bool = False
    is_chosen: bool = False  # indices that were chosen here, since weights would decide them
    readers: list[int] = field(default_factory=list)


@dataclass
class Step:
    """One call of a torch function."""

    index: int
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    module: str
    writes: tuple[int, ...] = ()  # values that hold something else afterwards


@dataclass
class ModuleCall:
    """One call of a module's forward: what went in and came out, and the steps between."""

    path: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    first: int
    last: int
    parent: int | None


@dataclass
class Recording:
    """All that was recorded in one run: values, steps, calls of modules, and notes."""

    values: list[Value]
    steps: list[Step]
    calls: list[ModuleCall]
    outputs: tuple[int, ...]
    unknown: dict[str, str]
    notes: list[str]
    packed: dict[str, Tensor]


def record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    """Run a forward without numbers. An error that is not about missing numbers is raised as it is."""
    recorder = _Recorder(model)
    with recorder.running():
        output = model(*args, **kwargs)
    return recorder.finish(output)


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.values: list[Value] = []
        self.steps: list[Step] = []
        self.calls: list[ModuleCall] = []
        self.unknown: dict[str, str] = {}
        self.notes: list[str] = []
        self.packed: dict[str, Tensor] = {}  # weights of packed layers, as plain ones without numbers
        self._stand_ins: dict[int, nn.Module] = {}
        self._stack: list[int] = []
        self._value_of: dict[int, int] = {}  # id of a tensor -> value
        self._kept: list[Any] = []  # tensors, so that ids stay theirs
        self._twins: dict[int, Tensor] = {}
        self._aliases: dict[int, list[Tensor]] = {}  # storage -> tensors of the run in it
        self._new_layouts: dict[Any, Any] = {}  # a function and the layouts of its arguments -> that of a new tensor
        self._paths: dict[int, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), path)
        self._names: dict[int, list[str]] = {}
        self._parameters: set[int] = set()
        for named, is_parameter in ((model.named_parameters, True), (model.named_buffers, False)):
            for name, tensor in named(remove_duplicate=False):
                self._names.setdefault(id(tensor), []).append(name)
                self._kept.append(tensor)
                if is_parameter:
                    self._parameters.add(id(tensor))

    # The run

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(restored(self.model))
            stack.enter_context(same_random_numbers())
            stack.enter_context(torch.no_grad())
            stack.enter_context(as_written())
            stack.enter_context(calls_through(self._call_module))
            stack.enter_context(self)
            yield

    def finish(self, output: Any) -> Recording:
        outputs = tuple(dict.fromkeys(self._value(tensor) for tensor in _tensors_in(output)))
        return Recording(self.values, self.steps, self.calls, outputs, self.unknown, self.notes, self.packed)

    def _call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parent = self._stack[-1] if self._stack else None
        path = self._paths.get(id(module))
        if path is None:  # a module that a forward makes, or keeps where torch does not look
            path = self.calls[parent].path if parent is not None else ""
        inputs = tuple(self._value(tensor) for tensor in _tensors_in((args, kwargs)))
        call = ModuleCall(path, inputs, (), len(self.steps), len(self.steps), parent)
        self.calls.append(call)
        self._stack.append(len(self.calls) - 1)
        try:
            output = self._forward(module, path, args)(*args, **kwargs)
        except (NumbersNeededError, NotImplementedError) as error:
            output = self._go_on_behind(call, module, error, args, kwargs)
        except Exception as error:
            is_after_unknown = any(self._lies_in(later.path, path) for later in self.calls[self._stack[-1] + 1 :])
            if parent is None or not (has_foreign_forward(module) or is_after_unknown):
                raise
            output = self._go_on_behind(call, module, error, args, kwargs)
        finally:
            self._stack.pop()
            call.last = len(self.steps)
        call.outputs = tuple(self._value(tensor) for tensor in _tensors_in(output))
        return output

    def _forward(self, module: nn.Module, path: str, args: tuple[Any, ...]) -> Callable[..., Any]:
        if not hasattr(type(module), "stand_in"):
            return own_forward(module)
        key = id(module)
        if key not in self._stand_ins:
            with torch._C.DisableTorchFunction():
                plain: nn.Module | None = module.stand_in(*args)  # type: ignore[operator]
            if plain is None:
                raise NumbersNeededError("packed experts: only their router is seen")
            self._stand_ins[key] = plain
            for local, parameter in plain.named_parameters():
                self._names[id(parameter)] = [f"{path}.{local}".lstrip(".")]
                self._parameters.add(id(parameter))
                self.packed[self._names[id(parameter)][0]] = parameter
        forward: Callable[..., Any] = self._stand_ins[key].forward
        return forward

    def _lies_in(self, path: str, outer: str) -> bool:
        return path in self.unknown and (path == outer or not outer or path.startswith(f"{outer}."))

    def _go_on_behind(
        self, call: ModuleCall, module: nn.Module, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Go on after a module that cannot be followed, with a value shaped like its input; else raise."""
        self.unknown.setdefault(call.path, _reason(error))
        floats = [tensor for tensor in _tensors_in((args, kwargs)) if tensor.is_floating_point()]
        if call.parent is None or not floats:
            raise error
        with torch._C.DisableTorchFunction():
            output = torch.empty_like(floats[0], device="meta")
        step = self._add_step("unknown", module.forward, args, kwargs, output)
        assert step is not None
        return output

    # Functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if name in _TAKE_SIZES:  # a size that a forward computed as a tensor is a number all the same
            args, kwargs = (
                (*args[:1], *_map_tensors(_as_size, args[1:])),
                _map_tensors(_as_size, kwargs),
            )
        if name == "masked_fill" and len(args) > 1 and isinstance(args[1], Tensor) and self._masks_no_index(args[1]):
            return args[0]
        args, kwargs = self._with_twins(args, kwargs, indexed=name in ("getitem", "setitem"))
        tensors = _tensors_in((args, kwargs))
        if getattr(func, "__name__", "") in _NEED_NUMBERS and any(map(_has_no_numbers, tensors)):
            raise NumbersNeededError(f"{name} of numbers that weights decide")
        if name == "where" and len(args) + len(kwargs) == 1 and _has_no_numbers(tensors[0]):
            raise NumbersNeededError("where() of numbers that weights decide")
        before = [_version(tensor) for tensor in tensors]
        output = self._compute(name, func, tensors, before, args, kwargs)
        if isinstance(output, Tensor) and _has_no_numbers(output):
            output = self._with_numbers(name, func, args, kwargs, output)
        if name in _CHOOSE_INDICES:
            output = self._choose_indices(name, output, args, kwargs)
        written = [tensor for tensor, version in zip(tensors, before, strict=True) if _version(tensor) != version]
        self._add_step(name, func, args, kwargs, output, written)
        return output

    def _masks_no_index(self, mask: Tensor) -> bool:
        """Whether a mask is of experts beyond those that the module holds (another process's), and none is."""
        if _has_no_numbers(mask):
            return False
        with torch._C.DisableTorchFunction():
            if bool(mask.any()):
                return False
        step = self.values[self._value(mask)].step
        while step is not None and self.steps[step].name in ("unsqueeze", "reshape", "view"):
            step = self.values[self.steps[step].inputs[0]].step
        maker = None if step is None else self.steps[step]
        if maker is None or maker.name != "ge" or len(maker.inputs) != 1 or not self._stack:
            return False
        parameters = self.model.get_submodule(self.calls[self._stack[-1]].path)._parameters.values()
        return maker.args[1] in {len(weight) for weight in parameters if weight is not None and weight.ndim == 3}

    def _compute(self, name: str, func: Any, tensors: list[Tensor], before: list[int], args: Any, kwargs: Any) -> Any:
        """Call a torch function on tensors without numbers; the few that fail on these are computed otherwise."""
        if name in ("to", "cpu", "cuda") and _has_no_numbers(tensors[0]):  # it stays where it is
            return tensors[0].to(_type_asked_for(tensors, args, kwargs))
        if name == "histc" and not tensors[0].is_floating_point():  # GPUs count integers, CPUs only floats
            return func(tensors[0].float(), *args[1:], **kwargs)
        if name == "grouped_mm" and _has_no_numbers(tensors[0]) and tensors[0].dim() == 2:  # in BF16 alone
            return tensors[0].new_empty(tensors[0].shape[0], tensors[1].shape[-1])
        key = (func, _layout_of((args, kwargs))) if tensors and all(map(_has_no_numbers, tensors)) else (func, None)
        if key in self._new_layouts:
            shape, stride, dtype = self._new_layouts[key]
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        output = func(*args, **kwargs)
        if key[1] is not None and type(output) is Tensor and before == [_version(tensor) for tensor in tensors]:
            layout = _layout_of(output)
            if layout is not None and _storage(output) not in {_storage(tensor) for tensor in tensors}:
                self._new_layouts[key] = layout
        return output

    def _add_step(
        self, name: str, func: Any, args: Any, kwargs: Any, output: Any, written: list[Tensor] | None = None
    ) -> Step | None:
        tensors = _tensors_in((args, kwargs))
        before = {id(tensor) for tensor in tensors}
        new = [tensor for tensor in _tensors_in(output) if id(tensor) not in before]
        if not new and not written:
            return None
        args, kwargs = _map_tensors(lambda tensor: Ref(self._value(tensor)), (args, kwargs))
        inputs = tuple(self._value(tensor) for tensor in tensors)
        index = len(self.steps)
        step = Step(index, name, func, args, kwargs, inputs, (), self._module_at(inputs))
        self.steps.append(step)
        for value in dict.fromkeys(inputs):
            self.values[value].readers.append(index)
        changed: list[int] = []
        for tensor in written or ():
            changed += [self._new_value(alias, index) for alias in self._aliases.get(_storage(tensor), [tensor])]
        step.writes = tuple(changed)
        step.outputs = (*(self._new_value(tensor, index) for tensor in new), *changed)
        return step

    def _module_at(self, inputs: Iterable[int]) -> str:
        """The module whose forward is running: the last that was called, or one whose `forward` was called by name."""
        called = self.calls[self._stack[-1]].path if self._stack else ""
        owners = {name.rpartition(".")[0] for index in inputs for name in self.values[index].names}
        if called in owners or not owners:
            return called
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not _Recorder._call_module.__code__:
            path = self._paths.get(id(frame.f_locals.get("self"))) if frame.f_code.co_name == "forward" else None
            if path in owners:
                return path
            frame = frame.f_back
        return called

    def _with_numbers(self, name: str, func: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        """The result of a function; positions and masks that a forward makes on the meta device get real numbers."""
        tensors = _tensors_in((args, kwargs))
        if not tensors and name in _MADE_OF_NOTHING and output.numel() <= MOST_REAL:
            result: Tensor = func(*args, **{**kwargs, "device": "cpu"})
            return result
        if name == "to" and not _has_no_numbers(tensors[0]):
            return tensors[0].to(output.dtype)
        return output

    def _choose_indices(self, name: str, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace indices that only weights could give (argmax, topk) by 0, 1, 2, ... along the dimension."""
        position, default = _CHOOSE_INDICES[name]
        source = next(iter(_tensors_in((args, kwargs))))
        dim = kwargs.get("dim", args[position] if len(args) > position else default)
        size = source.numel() if not isinstance(dim, int) else source.shape[dim] if source.dim() else 1

        def chosen(tensor: Tensor) -> Tensor:
            if tensor.device.type != "meta" or tensor.is_floating_point() or tensor.dtype is torch.bool or not size:
                return tensor
            if not _has_no_numbers(source):
                return tensor
            indices = (torch.arange(tensor.numel()) % size).reshape(tensor.shape).to(tensor.dtype)
            note = "indices that weights decide (routing, choices) were chosen one after the other"
            if note not in self.notes:
                self.notes.append(note)
            return indices

        if isinstance(output, Tensor):
            return chosen(output)
        if isinstance(output, tuple):
            items = [chosen(item) if isinstance(item, Tensor) else item for item in output]
            if not hasattr(output, "_fields") and hasattr(type(output), "n_fields"):
                return type(output)(items)  # a named result of torch, as of topk
            return tuple(items)
        return output

    # Tensors

    def _with_twins(self, args: Any, kwargs: Any, *, indexed: bool) -> tuple[Any, Any]:
        args, kwargs = _map_tensors(self._twin, (args, kwargs))
        if indexed and args and isinstance(args[0], Tensor):  # an index may have numbers where the tensor has none
            first, *rest = args
            if len(rest) > 1 and isinstance(rest[1], Tensor) and _has_no_numbers(first):
                rest[1] = self._without_numbers(rest[1])
            if any(_has_no_numbers(tensor) for tensor in _tensors_in(rest)):
                first = self._without_numbers(first)
            return (first, *rest), kwargs
        if any(_has_no_numbers(tensor) for tensor in _tensors_in((args, kwargs))):
            args, kwargs = _map_tensors(self._without_numbers, (args, kwargs))
        return args, kwargs

    def _twin(self, tensor: Tensor) -> Tensor:
        """The tensor that stands for one from outside the run, with its numbers or without; the run's own as it is."""
        if id(tensor) in self._value_of and id(tensor) not in self._twins:
            return tensor
        if (twin := self._twins.get(id(tensor))) is not None:
            return twin
        if _is_wrapped(tensor):
            return tensor
        names = tuple(self._names.get(id(tensor), ()))
        is_parameter = id(tensor) in self._parameters or isinstance(tensor, nn.Parameter)
        with torch._C.DisableTorchFunction():
            if is_parameter or tensor.device.type != "cpu" or tensor.numel() > MOST_REAL or type(tensor) is not Tensor:
                twin = _empty_twin(tensor)
            else:
                twin = tensor.detach().clone()
        self._kept.append(tensor)
        self._twins[id(tensor)] = twin
        self._new_value(twin, None, names=names, is_parameter=is_parameter)
        self._value_of[id(tensor)] = self._value_of[id(twin)]
        return twin

    def _without_numbers(self, tensor: Tensor) -> Tensor:
        if _has_no_numbers(tensor):
            return tensor
        key = -id(tensor)
        twin = self._twins.get(key)
        if twin is None or self._value_of[id(twin)] != self._value(tensor):
            with torch._C.DisableTorchFunction():
                twin = _empty_twin(tensor)
            self._twins[key] = twin
            self._kept.append(twin)
            self._value_of[id(twin)] = self._value(tensor)
        return twin

    def _value(self, tensor: Tensor) -> int:
        if (index := self._value_of.get(id(tensor))) is not None:
            return index
        self._twin(tensor)
        if (index := self._value_of.get(id(tensor))) is not None:
            return index
        return self._new_value(tensor, None)

    def _new_value(self, tensor: Tensor, step: int | None, **facts: Any) -> int:
        index = len(self.values)
        with torch._C.DisableTorchFunction():
            self.values.append(Value(index, tuple(tensor.shape), tensor.dtype, step, **facts))
        if id(tensor) not in self._value_of:
            self._kept.append(tensor)
            if (storage := _storage(tensor)) != 0:
                self._aliases.setdefault(storage, []).append(tensor)
        self._value_of[id(tensor)] = index
        return index


def _name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    bare = name.strip("_")
    return _RENAMED.get(bare, bare)


_LEAVES = {int, float, bool, str, type(None), type(...), torch.dtype, torch.device}


def _tensors_in(tree: Any) -> list[Tensor]:
    """Tensors in arguments or results: in tuples, lists, dicts, and in objects of results that are dicts."""
    tensors: list[Tensor] = []

    def see(item: Any) -> None:
        if isinstance(item, Tensor):
            tensors.append(item)
        elif (kind := type(item)) is tuple or kind is list:
            for part in item:
                see(part)
        elif kind is dict:
            for part in item.values():
                see(part)
        elif kind not in _LEAVES:
            tensors.extend(leaf for leaf in tree_flatten(item)[0] if isinstance(leaf, Tensor))

    see(tree)
    return tensors


def _map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """A tree with its tensors changed. torch's own walk takes ten times as long for plain arguments."""
    if isinstance(tree, Tensor):
        return change(tree)
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([_map_tensors(change, part) for part in tree])
    if kind is dict:
        return {key: _map_tensors(change, part) for key, part in tree.items()}
    return tree if kind in _LEAVES else tree_map_only(Tensor, change, tree)


def _layout_of(tree: Any) -> Any:
    """A key of shapes, strides, types and plain values in arguments or a result; None if there is anything else."""
    if isinstance(tree, Tensor):
        with torch._C.DisableTorchFunction():
            if type(tree) not in (Tensor, nn.Parameter) or _is_wrapped(tree) or tree.layout is not torch.strided:
                return None
            return tuple(tree.shape), tree.stride(), tree.dtype
    kind = type(tree)
    if kind is tuple or kind is list:
        parts = tuple([_layout_of(part) for part in tree])
        return None if None in parts else (kind, parts)
    if kind is dict:
        return _layout_of((*tree, *tree.values()))
    return (kind, tree) if kind in _LEAVES else None


def _type_asked_for(tensors: list[Tensor], args: Any, kwargs: Any) -> torch.dtype:
    """The dtype that a call of `to`, `cpu` or `cuda` gives its tensor: the one named in it, else the tensor's own."""
    asked = [argument for argument in (*args[1:], *kwargs.values()) if isinstance(argument, torch.dtype)]
    return asked[0] if asked else tensors[-1].dtype


def _as_size(tensor: Tensor) -> Any:
    """Turn a tensor of one integer on the CPU into a Python int; any other tensor is returned."""
    with torch._C.DisableTorchFunction():
        is_size = tensor.dim() == 0 and not tensor.is_floating_point() and tensor.device.type == "cpu"
        return int(tensor) if is_size else tensor


def _is_wrapped(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _has_no_numbers(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.device.type == "meta"


def _version(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        if _is_wrapped(tensor) or tensor.is_inference():
            return 0
        return tensor._version


def _storage(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        if _is_wrapped(tensor) or tensor.layout is not torch.strided:
            return 0
        return int(tensor.untyped_storage()._cdata)


def _empty_twin(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device="meta")


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())[:200]
    return words if isinstance(error, NumbersNeededError) else f"{type(error).__name__}: {words}"

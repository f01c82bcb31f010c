"""PackedWeight: an Encoded weight as a module, so that it moves, saves and loads with the model that holds it.

Its parts are buffers (`weight.data`, `weight.scales`, ...). Codes and scales are bytes with a meaning of their own:
`model.half()` or `model.to(torch.bfloat16)` must not touch them, so `_apply` shows every function a byte view, which
dtype casts leave alone and device moves carry along.

Things made from a weight (an expanded matrix, scales in a kernel's order, tiles in a cache) must not outlive it:
`state` changes with every move, load and in-place write, `derived` keeps things for one state only, and caches that
listen (`add_listener`) drop theirs too. None of these things are saved or copied.

In a `state_dict` the format and shape travel beside the parts, as JSON in a uint8 tensor (`weight._extra_state`), so
that safetensors can hold them too. Loading compares them and every part before a byte is copied.
"""

from __future__ import annotations

import itertools
import json
import mmap
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from bitplan.base.documents import NAME, SHAPE, Reader
from bitplan.base.errors import FileFormatError, StoreError
from bitplan.base.records import parse_json
from bitplan.base.weight_changes import UNCOUNTED, writes_of
from bitplan.formats import Encoded
from bitplan.formats.encoded import EncodedModule
from bitplan.formats.format import Format

_EXTRA = "_extra_state"
_MAX_EXTRA_BYTES = 2**16
_tokens = itertools.count(1)
State = tuple[int, ...]
Made = TypeVar("Made")


class Listener(Protocol):
    """An object that keeps things derived from weights and must be told when one changes."""

    def drop(self, token: int) -> None:
        """Called when the weight with this token (number) changed or was freed."""


class _ReadAsNumbersError(StoreError, AttributeError):
    """A model's code used a packed weight as a tensor. It is an AttributeError too, so that `hasattr` says no."""

    def __init__(self, called: str, weight: PackedWeight | None) -> None:
        shown = "a packed weight" if weight is None else f"a weight of shape {weight.shape} in {weight.fmt.name}"
        named = "" if weight is None or not weight.name else f"{weight.name}: "
        super().__init__(
            f"{named}{called} got {shown}: the model's code reads this weight itself, not through its layer, so it "
            "cannot be packed; quantize the model again and leave it as it is",
            settings={"keep": weight.name if named and weight is not None else "NAME"},
        )


class PackedWeight(EncodedModule):
    """A weight [..., outputs, inputs] held in its format; `encoded` is the value, `data`, `scales`, ... its parts.

    transposed   the parameter whose place it took is [..., inputs, outputs]
    """

    dtype = torch.uint8  # the type of the bytes, not of the numbers that they stand for
    name = ""  # of the parameter whose place it took in a model, for errors

    def __init__(self, encoded: Encoded, *, transposed: bool = False) -> None:
        super().__init__()
        self.transposed = transposed
        self.fmt: Format = encoded.fmt
        self.shape = encoded.shape
        for name, part in encoded.parts.items():
            self.register_buffer(name, part)
        self._begin()

    def _begin(self) -> None:
        self.token = next(_tokens)  # never reused, unlike an id()
        self.format_name = self.fmt.name  # which compiled graphs compare in every call
        self._changes = 0
        self._encoded: Encoded | None = None
        self._derived: dict[Hashable, Any] = {}
        self._derived_state: State = ()
        self._listeners: weakref.WeakSet[Any] = weakref.WeakSet()
        self.waiting: dict[str, Tensor] = {}  # its parts as the host sees them, where they lie there (`wait_in_host`)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_buffers", ()):
            self.forget()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise: a model's code uses a layer's packed weight as if it were numbers."""
        weight = next((argument for argument in (*args, *(kwargs or {}).values()) if isinstance(argument, cls)), None)
        raise _ReadAsNumbersError(getattr(func, "__name__", str(func)), weight)

    def __getattr__(self, name: str) -> Any:
        """A part by its name; what only a tensor has (`weight.t()`, `weight.norm()`) is refused as above."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or not hasattr(Tensor, name):
                raise
        raise _ReadAsNumbersError(name, self)

    def _refuse(self, *_: Any) -> Any:
        raise _ReadAsNumbersError("arithmetic", self)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = __abs__ = __getitem__ = _refuse

    @property
    def encoded(self) -> Encoded:
        parts = {name: part for name, part in self._buffers.items() if part is not None}
        cached = self._encoded
        if cached is None or any(cached.parts[name] is not part for name, part in parts.items()):
            cached = self._encoded = Encoded(self.fmt, self.shape, **parts)  # its checks take time in every forward
        return cached

    @property
    def device(self) -> torch.device:
        return next(iter(self.buffers())).device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.buffers())

    @property
    def derived_nbytes(self) -> int:
        """Bytes of the things made from the weight and held here; tiles are counted by their cache."""
        return sum(getattr(item, "nbytes", 0) for item in self._derived.values())

    def extra_repr(self) -> str:
        return f"{self.fmt.name}, shape={self.shape}, nbytes={self.nbytes}"

    # ---- things made from the weight --------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Equal as long as the bytes are the same and lie in the same place."""
        return (self._changes, *(UNCOUNTED if part is None else writes_of(part) for part in self._buffers.values()))

    def derived(self, key: Hashable, make: Callable[[], Made], *, keep: bool = True) -> Made:
        """The result of `make` for this key, made at most once per state; with keep=False it is not kept."""
        state = self.state
        if self._derived_state != state:
            self._derived.clear()
            self._derived_state = state
        if key in self._derived:
            result: Made = self._derived[key]
            return result
        item = make()
        if keep:
            self._derived[key] = item
        return item

    def forget(self) -> None:
        """Drop everything that was made from this weight; it is made again when it is needed."""
        self._changes += 1
        self._encoded = None  # or parts that were replaced would stay in memory
        self._derived.clear()
        for listener in list(self._listeners):
            listener.drop(self.token)

    def add_listener(self, listener: Listener) -> None:
        """Call the listener's `drop` when things made from this weight are stale, or the weight is freed."""
        if listener not in self._listeners:
            self._listeners.add(listener)
            weakref.finalize(self, _drop, weakref.ref(listener), self.token).atexit = False

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("token", "_changes", "_encoded", "_derived", "_derived_state", "_listeners", "waiting"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._begin()

    # ---- moving, saving, loading ------------------------------------------------------------------------------------

    def replace(self, encoded: Encoded) -> None:
        """Take the bytes of another tensor of the same format and shape, as a file holds them."""
        if encoded.fmt.name != self.fmt.name or encoded.shape != self.shape:
            raise StoreError(
                f"expected {self.fmt.name} of shape {self.shape}, got {encoded.fmt.name} of shape {encoded.shape}"
            )
        for name, part in encoded.parts.items():
            self.get_buffer(name).copy_(part)
        self.forget()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedWeight:
        moved_any = False
        for name, part in self._buffers.items():
            if part is None:
                continue
            before = part.contiguous().reshape(-1).view(torch.uint8)
            moved = fn(before)
            if moved.dtype != torch.uint8 or moved.numel() != before.numel():
                raise StoreError(
                    f"packed {self.fmt.name} weights are bytes: they move between devices and cannot be cast to "
                    f"{moved.dtype}; cast the float parameters only, with .to(dtype), .half() or .bfloat16()"
                )
            if moved.device != before.device or moved.data_ptr() != part.data_ptr():
                moved_any = True
                self._buffers[name] = moved.view(part.dtype).reshape(part.shape)
        if moved_any:
            self.waiting = {}
            self.forget()
        return self

    def get_extra_state(self) -> Tensor:
        text = json.dumps({"format": self.fmt.name, "shape": list(self.shape)})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Do nothing: `_faults` has compared the saved state with this weight already."""

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        faults = self._faults(state_dict, prefix)
        if faults:
            error_msgs.extend(faults)
            return
        args = (state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(*args)
        self.forget()

    def _faults(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        """Why this state does not fit this weight; if there is a reason, nothing is copied."""
        where = prefix.rstrip(".") or "packed weight"
        parts = {name: state_dict[prefix + name] for name in self._buffers if prefix + name in state_dict}
        if prefix + _EXTRA not in state_dict:
            fault = f"{where}: the state has {', '.join(parts)} but not {prefix + _EXTRA}, which says their format"
            return [f"{fault}; save it with state_dict()"] if parts else []
        try:
            fmt, shape = _read_extra(state_dict[prefix + _EXTRA], where)
        except FileFormatError as error:
            return [str(error)]
        if fmt != self.fmt.name or shape != list(self.shape):
            return [
                f"{where}: expected {self.fmt.name} of shape {list(self.shape)}, the state holds {fmt} of shape "
                f"{shape}; apply the plan that the state was saved under, then load it"
            ]
        faults = [f"{where}: part {name!r} is missing" for name in self._buffers if name not in parts]
        for name, (dtype, size) in self.fmt.part_shapes(self.shape).items():
            part = parts.get(name)
            if name in parts and (
                not isinstance(part, Tensor) or part.dtype != dtype or tuple(part.shape) != size or part.is_meta
            ):
                came = f"{part.dtype} {tuple(part.shape)} on {part.device}" if isinstance(part, Tensor) else type(part)
                faults.append(f"{where}: part {name!r} of {self.fmt.name} must be {dtype} {size}, got {came}")
        return faults


def _read_extra(extra: Any, where: str) -> tuple[Any, Any]:
    if not isinstance(extra, Tensor) or extra.dtype != torch.uint8 or extra.dim() != 1:
        raise FileFormatError(f"{where}: {_EXTRA} must be JSON in a uint8 tensor, got {type(extra).__name__}")
    if extra.numel() > _MAX_EXTRA_BYTES:
        raise FileFormatError(f"{where}: {_EXTRA} of {extra.numel()} bytes is too long for a format and a shape")
    document = parse_json(bytes(extra.tolist()), where=f"{where}: {_EXTRA}")
    Reader(where, FileFormatError).keys(_EXTRA, document, {"format": NAME, "shape": SHAPE}, ("format", "shape"))
    return document["format"], document["shape"]


def _drop(listener: weakref.ref[Listener], token: int) -> None:
    owner = listener()
    if owner is not None:
        owner.drop(token)


# ---- weights in the host's memory ------------------------------------------------------------------------------------
#
# A packed weight may wait in the host's memory, and cross the bus when a product needs it. Its bytes lie in pinned
# memory, of exactly their size, which a GPU can address: to torch and to kernels they are a tensor of the GPU. A kernel
# reads a weight's codes once in a product with few rows, so they cross once; of a layer's experts the chosen ones
# cross, of an embedding a row. No copy of them is made on the GPU and nothing has to be scheduled; kernels read pinned
# memory about as fast as the copy engine does.
#
# Scales, as kernels read them, are made once and lie on the GPU, as for other weights. On a CPU both memories are one:
# there the same code runs on a copy, to try it out.


class _Addressed:
    """Wraps pinned host memory so that torch takes it for the GPU's, by its address."""

    def __init__(self, buffer: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
            "data": (buffer.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
        weakref.finalize(self, _release, buffer).atexit = False


def _release(buffer: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


def addressed(host: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """A copy of a tensor in pinned memory: as the host sees it, and as a tensor of the device."""
    tensor = host.contiguous()
    size = tensor.nbytes
    if not size:
        return tensor, tensor.to(device)
    buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)  # torch's pinned memory is rounded up
    buffer.copy_(tensor.reshape(-1).view(torch.uint8))
    on_device = buffer
    if device.type == "cuda":
        status = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0))
        if status:
            raise StoreError(
                f"CUDA refused to pin {size:,} bytes of host memory (error {status}); raise the limit on locked memory "
                "(ulimit -l), or let less lie there"
            )
        on_device = torch.as_tensor(_Addressed(buffer), device=device)
    return _like(buffer, tensor), _like(on_device, tensor)


def _like(flat: Tensor, tensor: Tensor) -> Tensor:
    return flat.view(tensor.dtype).reshape(tensor.shape)


def wait_in_host(weight: PackedWeight, device: torch.device) -> PackedWeight:
    """Move a weight to pinned memory of the host, which the device reads in each product; returns the weight."""
    _hold(weight, {name: addressed(part, device) for name, part in weight._buffers.items() if part is not None})
    return weight


def _hold(weight: PackedWeight, parts: dict[str, tuple[Tensor, Tensor]]) -> None:
    for name, (_, on_device) in parts.items():
        weight._buffers[name] = on_device
    weight.waiting = {name: host for name, (host, _) in parts.items()}
    weight.forget()


def join_waiting(weights: Sequence[PackedWeight]) -> dict[str, Tensor]:
    """Codes and scales of weights below each other in one matrix of the host's memory; they become views of it."""
    device, first = weights[0].device, weights[0]
    parts: dict[str, Tensor] = {}
    rows: dict[str, tuple[Tensor, Tensor]] = {}
    for name in (name for name in ("data", "scales") if name in first.waiting):
        rows[name] = addressed(torch.cat([weight.waiting[name] for weight in weights]), device)
        parts[name] = rows[name][1]
    start = 0
    for weight in weights:
        stop = start + weight.shape[0]
        others: dict[str, Any] = {name: (host, weight._buffers[name]) for name, host in weight.waiting.items()}
        _hold(
            weight,
            others | {name: (host[start:stop], on_device[start:stop]) for name, (host, on_device) in rows.items()},
        )
        start = stop
    return parts

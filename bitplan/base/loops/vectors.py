"""Vectors inside numba: a fixed number of lanes, and operators that become vector instructions.

LLVM's own vectorizer fails on blocks of 32: a loop of known length is unrolled before the vectorizer sees it, and one
of unknown length gets run-time checks and a scalar tail that cost as much as the block. Here a kernel says `load(x, i,
32) & mask`, and LLVM splits 32 lanes into whatever registers the CPU has (NEON, SSE, AVX). One source serves any CPU,
and nothing depends on what a vectorizer recognises.

    words = load(x, 32 * block, 32)                       # vector(uint32 x 32) from a flat uint32 array
    store(out, 32 * block, narrow(words >> 24, np.uint8))

Operands are vectors of one type, or a scalar, which is cast to the lane type and repeated. Integers wrap, and
>> of signed lanes keeps the sign. Nothing is checked: an index outside the array is undefined, as in C.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.core.types import unliteral  # type: ignore[attr-defined]
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

INT32 = ir.IntType(32)


class VectorType(types.Type):
    """numba's type of a vector: `width` lanes of `lane`."""

    def __init__(self, lane: Any, width: int) -> None:
        self.lane, self.width = lane, width
        super().__init__(name=f"vector({lane} x {width})")

    @property
    def is_float(self) -> bool:
        return isinstance(self.lane, types.Float)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: VectorType) -> None:
        super().__init__(manager, vector, ir.VectorType(manager.lookup(vector.lane).get_value_type(), vector.width))


class VectorWriter:
    """Writes one operation in LLVM: holds numba's context and builder, and the types of the arguments."""

    def __init__(self, context: Any, builder: Any, kinds: Sequence[Any]) -> None:
        self.context, self.builder, self.kinds = context, builder, kinds
        self.vector: Any = next((kind for kind in kinds if isinstance(kind, VectorType)), None)

    def llvm(self, kind: Any) -> Any:
        return self.context.get_value_type(kind)

    def operands(self, values: Sequence[Any]) -> list[Any]:
        """Every value as a vector: a scalar is repeated."""
        return [
            value if isinstance(kind, VectorType) else self._repeat(value, kind)
            for value, kind in zip(values, self.kinds, strict=True)
        ]

    def _repeat(self, value: Any, kind: Any) -> Any:
        scalar = self.context.cast(self.builder, value, kind, self.vector.lane)
        nothing = ir.Constant(self.llvm(self.vector), ir.Undefined)
        first = self.builder.insert_element(nothing, scalar, ir.Constant(INT32, 0))
        return self.shuffle(first, nothing, [0] * self.vector.width)

    def shuffle(self, a: Any, b: Any, places: Sequence[int]) -> Any:
        mask = ir.Constant(ir.VectorType(INT32, len(places)), [ir.Constant(INT32, place) for place in places])
        return self.builder.shuffle_vector(a, b, mask)

    def pointer(self, array: Any, index: Any, pointed: Any) -> Any:
        data = self.context.make_array(self.kinds[0])(self.context, self.builder, array).data
        return self.builder.bitcast(self.builder.gep(data, [index]), ir.PointerType(pointed))

    def call(self, name: str, result: Any, values: Sequence[Any]) -> Any:
        kind = ir.FunctionType(result, [value.type for value in values])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), values)


def define(arity: int, result: Callable[..., Any], emit: Callable[..., Any]) -> Any:
    """A function for kernels: `result(*types)` is its type, `emit(writer, *values)` its code."""

    def build(*kinds: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            return emit(VectorWriter(context, builder, kinds), *values)

        return result(*kinds)(*kinds), generate

    takes = {  # numba needs a function with the right number of arguments
        1: lambda _typing, a: build(a),
        2: lambda _typing, a, b: build(a, b),
        3: lambda _typing, a, b, c: build(a, b, c),
        4: lambda _typing, a, b, c, d: build(a, b, c, d),
        5: lambda _typing, a, b, c, d, e: build(a, b, c, d, e),
    }
    return intrinsic(prefer_literal=True)(takes[arity])


# ---- arithmetic, lane by lane -------------------------------------------------------------------------------------


def lanewise(emit: Callable[..., Any], arity: int = 2) -> Any:
    """A function of vectors and scalars; `emit(writer, *vectors)` writes the instruction."""
    return define(
        arity,
        lambda *kinds: next(kind for kind in kinds if isinstance(kind, VectorType)),
        lambda writer, *values: emit(writer, *writer.operands(values)),
    )


def _instruction(integer: str, floating: str = "") -> Callable[..., Any]:
    return lambda writer, a, b: getattr(writer.builder, floating if writer.vector.is_float else integer)(a, b)


def _shift_right(writer: VectorWriter, a: Any, b: Any) -> Any:
    return writer.builder.ashr(a, b) if writer.vector.lane.signed else writer.builder.lshr(a, b)


def _better(sign: str) -> Callable[..., Any]:
    def emit(writer: VectorWriter, a: Any, b: Any) -> Any:
        compare = writer.builder.icmp_signed if writer.vector.lane.signed else writer.builder.icmp_unsigned
        return writer.builder.select(compare(sign, a, b), a, b)

    return emit


def _greater(writer: VectorWriter, a: Any, b: Any) -> Any:
    compare = writer.builder.icmp_signed if writer.vector.lane.signed else writer.builder.icmp_unsigned
    return writer.builder.sext(compare(">", a, b), a.type)


def _multiply_add(writer: VectorWriter, a: Any, b: Any, c: Any) -> Any:
    product = writer.builder.fmul(a, b, flags=("contract",))
    return writer.builder.fadd(product, c, flags=("contract",))


def _largest(writer: VectorWriter, value: Any) -> Any:
    lane = writer.vector.lane
    name = f"llvm.vector.reduce.{'s' if lane.signed else 'u'}max.v{writer.vector.width}i{lane.bitwidth}"
    return writer.call(name, writer.llvm(lane), [value])


minimum = lanewise(_better("<"))  # integers
maximum = lanewise(_better(">"))
greater = lanewise(_greater)  # all ones where a > b, else zero; integers
copysign = lanewise(lambda writer, a, b: writer.call(f"llvm.copysign.v{writer.vector.width}f32", a.type, [a, b]))
# a * b + c, in one instruction if the CPU has it: only for exact products, where that makes no difference.
multiply_add = lanewise(_multiply_add, arity=3)
largest = define(1, lambda vector: vector.lane, _largest)  # the largest lane, integers

_OPERATORS = {
    operator.add: _instruction("add", "fadd"),
    operator.sub: _instruction("sub", "fsub"),
    operator.mul: _instruction("mul", "fmul"),
    operator.truediv: _instruction("", "fdiv"),
    operator.and_: _instruction("and_"),
    operator.or_: _instruction("or_"),
    operator.xor: _instruction("xor"),
    operator.lshift: _instruction("shl"),
    operator.rshift: _shift_right,
}


def _teach(symbol: Any, emit: Callable[..., Any]) -> None:
    """Give numba type and code of an operator directly: `overload` would compile a function for each pair of types."""

    @infer_global(symbol)
    class Operator(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            vector = next((kind for kind in args if isinstance(kind, VectorType)), None)
            return None if vector is None else signature(vector, *map(unliteral, args))

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        writer = VectorWriter(context, builder, signature.args)
        return emit(writer, *writer.operands(values))

    for kinds in ((VectorType, VectorType), (VectorType, types.Number), (types.Number, VectorType)):
        lower_builtin(symbol, *kinds)(generate)


for _symbol, _emit in _OPERATORS.items():
    _teach(_symbol, _emit)


# ---- memory -------------------------------------------------------------------------------------------------------


def _load(writer: VectorWriter, array: Any, index: Any, _width: Any) -> Any:
    kind, _, width = writer.kinds
    pointed = ir.VectorType(writer.llvm(kind.dtype), width.literal_value)
    return writer.builder.load(writer.pointer(array, index, pointed), align=kind.dtype.bitwidth // 8)


def _store(writer: VectorWriter, array: Any, index: Any, vector: Any) -> Any:
    writer.builder.store(vector, writer.pointer(array, index, vector.type), align=writer.vector.lane.bitwidth // 8)
    return writer.context.get_dummy_value()


def _prefetch(writer: VectorWriter, array: Any, index: Any) -> Any:
    hints = [ir.Constant(INT32, hint) for hint in (0, 0, 1)]  # read access, low locality, data cache
    writer.call("llvm.prefetch.p0", ir.VoidType(), [writer.pointer(array, index, ir.IntType(8)), *hints])
    return writer.context.get_dummy_value()


def _count_below(writer: VectorWriter, array: Any, index: Any, number: Any, width: Any) -> Any:
    numbers = _load(
        VectorWriter(writer.context, writer.builder, (*writer.kinds[:2], writer.kinds[3])), array, index, width
    )
    nothing = ir.Constant(numbers.type, ir.Undefined)
    first = writer.builder.insert_element(nothing, number, ir.Constant(INT32, 0))
    size = numbers.type.count
    is_below = writer.builder.fcmp_ordered("<", numbers, writer.shuffle(first, nothing, [0] * size))
    bits = writer.builder.bitcast(is_below, ir.IntType(size))
    return writer.builder.zext(writer.call(f"llvm.ctpop.i{size}", bits.type, [bits]), ir.IntType(64))


# load(array, index, width), width a literal; store(array, index, vector): contiguous arrays.
load = define(3, lambda array, _index, width: VectorType(array.dtype, width.literal_value), _load)
store = define(3, lambda _array, _index, _vector: types.void, _store)
# count_below(array, index, number, width): how many of `width` floats from array[index] on are below the number, of
# their type; none is below NaN.
count_below = define(4, lambda *_kinds: types.int64, _count_below)
# Prefetch the cache line at array[index]. The index may lie past the end: it is a hint, never a fault.
prefetch = define(2, lambda _array, _index: types.void, _prefetch)


# ---- other lane types: f(vector, numpy type) ----------------------------------------------------------------------


def _convert(emit: Callable[..., Any]) -> Any:
    def write(writer: VectorWriter, value: Any, _lane: Any) -> Any:
        return emit(writer, value, writer.llvm(VectorType(writer.kinds[1].dtype, writer.vector.width)))

    return define(2, lambda vector, lane: VectorType(lane.dtype, vector.width), write)


def _widen(writer: VectorWriter, value: Any, result: Any) -> Any:
    return writer.builder.sext(value, result) if writer.vector.lane.signed else writer.builder.zext(value, result)


def _same_bits(vector: VectorType, lane: Any) -> VectorType:
    return VectorType(lane.dtype, vector.width * vector.lane.bitwidth // lane.dtype.bitwidth)


narrow = _convert(lambda writer, value, result: writer.builder.trunc(value, result))  # keeps the low bits
widen = _convert(_widen)
to_float = _convert(lambda writer, value, result: writer.builder.sitofp(value, result))  # from signed lanes
# The same bits as lanes of another type; a wide lane's low bits come first.
view = define(
    2, _same_bits, lambda writer, value, _lane: writer.builder.bitcast(value, writer.llvm(_same_bits(*writer.kinds)))
)


# ---- numbers: the same bits as another type; a number of a contiguous array whose bytes are read as another type -----


def _number_at(writer: VectorWriter, array: Any, index: Any, _kind: Any) -> Any:
    kind = ir.PointerType(writer.llvm(writer.kinds[2].dtype))
    return writer.builder.load(writer.builder.gep(writer.pointer(array, ir.Constant(INT32, 0), kind.pointee), [index]))


same_bits = define(
    2,
    lambda _number, kind: kind.dtype,
    lambda writer, value, _kind: writer.builder.bitcast(value, writer.llvm(writer.kinds[1].dtype)),
)
number_at = define(3, lambda _array, _index, kind: kind.dtype, _number_at)


# ---- moving lanes -------------------------------------------------------------------------------------------------


def _part(places: Callable[[int], Sequence[int]]) -> Any:
    return define(
        1,
        lambda vector: VectorType(vector.lane, vector.width // 2),
        lambda writer, value: writer.shuffle(value, value, places(writer.vector.width)),
    )


def _merge(places: Callable[[int], Sequence[int]]) -> Any:
    return define(
        2,
        lambda a, _b: VectorType(a.lane, 2 * a.width),
        lambda writer, a, b: writer.shuffle(a, b, places(writer.vector.width)),
    )


evens = _part(lambda width: range(0, width, 2))
odds = _part(lambda width: range(1, width, 2))
first_half = _part(lambda width: range(width // 2))
second_half = _part(lambda width: range(width // 2, width))
interleave = _merge(lambda width: [lane // 2 + width * (lane % 2) for lane in range(2 * width)])
concatenate = _merge(lambda width: range(2 * width))

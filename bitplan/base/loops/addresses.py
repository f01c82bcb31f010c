"""Vectors from memory that is known by its address alone, and operations for sums of products that `vectors` lacks.

A C function that another library's threads call gets one address and no arrays. Addresses are int64; nothing is
checked, and nothing has to be aligned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from bitplan.base.loops.vectors import VectorType, VectorWriter, define

INT64 = ir.IntType(64)


def _pointer(writer: VectorWriter, address: Any, pointed: Any) -> Any:
    return writer.builder.inttoptr(address, ir.PointerType(pointed))


# ---- memory -------------------------------------------------------------------------------------------------------


def _load(writer: VectorWriter, address: Any, _lane: Any, _width: Any) -> Any:
    kind = VectorType(writer.kinds[1].dtype, writer.kinds[2].literal_value)
    return writer.builder.load(_pointer(writer, address, writer.llvm(kind)), align=1)


def _read(writer: VectorWriter, address: Any, _kind: Any) -> Any:
    return writer.builder.load(_pointer(writer, address, writer.llvm(writer.kinds[1].dtype)), align=1)


def _write(writer: VectorWriter, address: Any, value: Any) -> Any:
    writer.builder.store(value, _pointer(writer, address, value.type), align=1)
    return writer.context.get_dummy_value()


def _prefetch(locality: int) -> Callable[..., Any]:
    def emit(writer: VectorWriter, address: Any) -> Any:
        hints = [ir.Constant(ir.IntType(32), hint) for hint in (0, locality, 1)]  # read access, locality, data
        writer.call("llvm.prefetch.p0", ir.VoidType(), [_pointer(writer, address, ir.IntType(8)), *hints])
        return writer.context.get_dummy_value()

    return emit


def _take(writer: VectorWriter, address: Any, count: Any) -> Any:
    return writer.builder.atomic_rmw("add", _pointer(writer, address, INT64), count, "monotonic")


load_from = define(3, lambda _a, lane, width: VectorType(lane.dtype, width.literal_value), _load)
read = define(2, lambda _address, kind: kind.dtype, _read)  # one number
write = define(2, lambda _address, _value: types.void, _write)  # a number or a vector
# Ask for the cache line there: soon, into the first-level cache, or later, into the second. Hints, never faults.
prefetch_soon = define(1, lambda _address: types.void, _prefetch(3))
prefetch_later = define(1, lambda _address: types.void, _prefetch(2))
# Adds to the int64 there and returns its value before, atomically.
take = define(2, lambda _address, _count: types.int64, _take)


def _call_c(writer: VectorWriter, address: Any, argument: Any) -> Any:
    function = _pointer(writer, address, ir.FunctionType(ir.VoidType(), [INT64]))
    writer.builder.call(function, [argument])
    return writer.context.get_dummy_value()


# Calls the C function of one int64 at this address (`openmp_threads.c_function`).
call_c = define(2, lambda _address, _argument: types.void, _call_c)


# ---- lanes --------------------------------------------------------------------------------------------------------


def _sum(writer: VectorWriter, vector: Any) -> Any:
    lane = writer.llvm(writer.vector.lane)
    kind = ir.FunctionType(lane, [lane, vector.type])
    name = f"llvm.vector.reduce.fadd.v{writer.vector.width}f32"
    function = cgutils.get_or_insert_function(writer.builder.module, kind, name)
    return writer.builder.call(function, [ir.Constant(lane, 0.0), vector], fastmath=("reassoc",))


def _picked(places: Callable[[int, int], list[int]]) -> Any:
    """A function of a vector and a literal: lanes at `places(width, literal)`."""

    def emit(writer: VectorWriter, vector: Any, _number: Any) -> Any:
        return writer.shuffle(vector, vector, places(writer.vector.width, writer.kinds[1].literal_value))

    def result(vector: Any, number: Any) -> Any:
        return VectorType(vector.lane, len(places(vector.width, number.literal_value)))

    return define(2, result, emit)


def _half(writer: VectorWriter, bits: Any) -> Any:
    halves = writer.builder.bitcast(bits, ir.VectorType(ir.HalfType(), writer.vector.width))
    return writer.builder.fpext(halves, ir.VectorType(ir.FloatType(), writer.vector.width))


sum_of_lanes = define(1, lambda vector: vector.lane, _sum)  # float32, in any order
repeat_each = _picked(lambda width, times: [lane // times for lane in range(width * times)])
# Nibble j of 32-bit lane i holds number 8 i + j of a row: every eighth number, from the j-th on.
every_eighth = _picked(lambda width, first: list(range(first, width, 8)))
# The same for GGUF, where a byte holds numbers j and j + 16 of 32.
every_fourth_of_halves = _picked(
    lambda width, first: [
        32 * block + 4 * lane + first // 2 + 16 * (first % 2) for block in range(width // 32) for lane in range(4)
    ]
)
float_of_half = define(1, lambda vector: VectorType(types.float32, vector.width), _half)  # uint16 bits of float16


# ---- instructions of some CPUs --------------------------------------------------------------------------------------


def _lookup(writer: VectorWriter, table: Any, places: Any) -> Any:
    return writer.call("llvm.x86.avx512.permvar.sf.512", table.type, [table, places])


# AVX-512: 16 float32 picked from 16 others, by the low four bits of each lane of an int32 vector.
look_up_16 = define(2, lambda table, _places: table, _lookup)


def byte_table(numbers: Sequence[int]) -> Any:
    """AVX2: a function of 32 bytes, each below 16, that gives the number at each byte's place among these 16."""

    def emit(writer: VectorWriter, places: Any) -> Any:
        table = ir.Constant(places.type, [ir.Constant(ir.IntType(8), number) for number in (*numbers, *numbers)])
        return writer.call("llvm.x86.avx2.pshuf.b", places.type, [table, places])

    return define(1, lambda places: places, emit)


# ---- tiles: several rows of a weight times several inputs -----------------------------------------------------------


def _tuple(writer: VectorWriter, made: list[Any]) -> Any:
    return cgutils.pack_array(writer.builder, made)


def _multiply_in(writer: VectorWriter, parts: Any, weights: Any, inputs: Any) -> Any:
    kinds = writer.kinds
    made = []
    for row in range(kinds[1].count):
        for column in range(kinds[2].count):
            values = [
                writer.builder.extract_value(group, place)
                for group, place in ((weights, row), (inputs, column), (parts, row * kinds[2].count + column))
            ]
            made.append(writer.call(f"llvm.fma.v{kinds[0].dtype.width}f32", values[0].type, values))
    return _tuple(writer, made)


def _scale_in(writer: VectorWriter, sums: Any, scales: Any, parts: Any) -> Any:
    kinds = writer.kinds
    columns = kinds[0].count // kinds[1].count
    made = []
    for place in range(kinds[0].count):
        groups = ((scales, place // columns), (parts, place), (sums, place))
        values = [writer.builder.extract_value(group, index) for group, index in groups]
        made.append(writer.call(f"llvm.fma.v{kinds[0].dtype.width}f32", values[0].type, values))
    return _tuple(writer, made)


def _zero_tile(writer: VectorWriter, _count: Any, _width: Any) -> Any:
    count, width = (kind.literal_value for kind in writer.kinds)
    return _tuple(writer, [ir.Constant(writer.llvm(VectorType(types.float32, width)), None)] * count)


def _places(writer: VectorWriter, address: Any, stride: Any, rows: int, columns: int, bytes_each: int) -> list[Any]:
    """Addresses address + row * stride + column * bytes_each."""
    builder = writer.builder
    steps = [builder.mul(stride, ir.Constant(INT64, row)) for row in range(rows)]
    return [
        builder.add(builder.add(address, step), ir.Constant(INT64, column * bytes_each))
        for step in steps
        for column in range(columns)
    ]


def _tile_type(*sizes: Any) -> Any:
    rows, columns, width = (kind.literal_value for kind in sizes)
    vector = VectorType(types.float32, width)
    return types.UniTuple(vector, rows * columns)  # type: ignore[attr-defined]


def _load_tile(writer: VectorWriter, address: Any, stride: Any, *_sizes: Any) -> Any:
    rows, columns, width = (kind.literal_value for kind in writer.kinds[2:])
    kind = writer.llvm(VectorType(types.float32, width))
    places = _places(writer, address, stride, rows, columns, 4 * width)
    return _tuple(writer, [writer.builder.load(_pointer(writer, place, kind), align=4) for place in places])


def _store_tile(writer: VectorWriter, address: Any, stride: Any, tile: Any, columns: Any) -> Any:
    count, width = writer.kinds[2].count, writer.kinds[2].dtype.width
    columns = writer.kinds[3].literal_value
    for index, place in enumerate(_places(writer, address, stride, count // columns, columns, 4 * width)):
        vector = writer.builder.extract_value(tile, index)
        writer.builder.store(vector, _pointer(writer, place, vector.type), align=4)
    return writer.context.get_dummy_value()


def _repeated(writer: VectorWriter, address: Any, stride: Any, _rows: Any, _width: Any) -> Any:
    rows, width = (kind.literal_value for kind in writer.kinds[2:])
    kind = writer.llvm(VectorType(types.float32, width))
    nothing, made = ir.Constant(kind, ir.Undefined), []
    for place in _places(writer, address, stride, rows, 1, 0):
        number = writer.builder.load(_pointer(writer, place, ir.FloatType()), align=4)
        first = writer.builder.insert_element(nothing, number, ir.Constant(ir.IntType(32), 0))
        made.append(writer.shuffle(first, nothing, [0] * width))
    return _tuple(writer, made)


# load_tile(address, stride, rows, columns, width): float32 vectors of `width` lanes, `columns` in each of `rows` rows
# that lie `stride` bytes apart; store_tile(address, stride, tile, columns) writes them.
load_tile = define(5, lambda _address, _stride, *sizes: _tile_type(*sizes), _load_tile)
store_tile = define(4, lambda *_kinds: types.void, _store_tile)
# repeated(address, stride, rows, width): one number of each row, on all lanes of a vector.
repeated = define(
    4,
    lambda _address, _stride, rows, width: types.UniTuple(  # type: ignore[attr-defined]
        VectorType(types.float32, width.literal_value), rows.literal_value
    ),
    _repeated,
)
# Tuples of float32 vectors: parts[r, c] + weights[r] * inputs[c], and sums[r, c] + scales[r] * parts[r, c].
multiply_in = define(3, lambda parts, _weights, _inputs: parts, _multiply_in)
scale_in = define(3, lambda sums, _scales, _parts: sums, _scale_in)
zero_tile = define(
    2,
    lambda count, width: types.UniTuple(  # type: ignore[attr-defined]
        VectorType(types.float32, width.literal_value), count.literal_value
    ),
    _zero_tile,
)

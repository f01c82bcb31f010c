"""Loops of the CPU's products for GGUF's blocks, whose scales lie among their codes: read as they are in the file.

One loop serves all of them. `Layout` says where a block's planes of bits, its groups' scales and its float16 numbers
lie; from that the instructions for one block are written, without a loop: codes of LANES numbers are widened from their
planes, converted, multiplied by their group's scale, and its minimum is added. Those are the operations of
`Layout.decode`, so weights in registers equal decoded ones bit for bit; then they are multiplied by x and summed in
float32. Numbers come in their own order, so inputs are read where they lie. Of IQ2 and IQ3 (`VectorLayout`) LANES
numbers are one to four vectors, read as bytes from the format's list, whose address is the job's `table`.

A tile is 4 rows of the weight times one input, or 2 times 4; blocks go past it one after the other.

**Inputs in 8 bits** (`cpu_integers`) are multiplied by codes as bytes, 32 at a time: four neighbours in each of 8
lanes, which have their group's scale. Beside 32 codes of an input lie 8 sums of four of them: times minus the offset by
which codes were made unsigned, where sums of products begin; or in float32, to be multiplied by the group's minimum.
Blocks of 32 codes fill whole registers where a row has enough of them: one register has the low nibbles of
QUARTER_LANES blocks, one the high ones, and each block has four lanes.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from bitplan.base.loops.addresses import prefetch_later, read, take, write, zero_tile
from bitplan.base.loops.jit import inlined, merged
from bitplan.base.loops.openmp_threads import c_function
from bitplan.base.loops.vectors import VectorType, VectorWriter, define, first_half, second_half
from bitplan.formats.gguf.grids import VECTOR_LAYOUTS, VectorLayout
from bitplan.formats.gguf.layouts import LAYOUTS, Layout
from bitplan.packed.products.cpu_integers import (
    BLOCK,
    DOTS,
    IS_X86,
    OFFSETS,
    block_rows_of,
    dot_of,
    look_up,
    numbers_at,
    ones_like,
    opened_blocks_bytes,
    quads_bytes,
    rounded_block,
    rounds_quads,
    scale_of_token,
    splat,
    zero_words,
)
from bitplan.packed.products.cpu_rows import (
    BY_TOKEN,
    CODES,
    CODES_STRIDE,
    COUNT,
    F32,
    FIRST,
    INPUTS,
    LANES,
    LINE,
    NEXT_ROW,
    NEXT_THREAD,
    PIECE,
    QUARTER_LANES,
    REGISTER,
    ROWS,
    SCRATCH,
    SCRATCH_STRIDE,
    STEP,
    TABLE,
    WIDTH,
    Y_STRIDE,
    X,
    Y,
    field,
    four_rows,
    row_of,
    two_rows,
    write_2x4,
    write_4x1,
)

INT8, INT16, INT32, INT64, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS = ir.VectorType(FLOAT, LANES)
WORDS, OF_WORDS, CODES_32 = ir.VectorType(INT32, 8), ir.VectorType(FLOAT, 8), ir.VectorType(INT8, BLOCK)


def _constants(kind: Any, numbers: Any) -> Any:
    return ir.Constant(ir.VectorType(kind, len(numbers)), [ir.Constant(kind, number) for number in numbers])


class _Block:
    """Writes the numbers of a block, LANES at a time, from its address."""

    def __init__(self, writer: VectorWriter, layout: Any, address: Any) -> None:
        self.writer, self.builder, self.layout, self.address = writer, writer.builder, layout, address
        names, sizes = zip(*layout.parts, strict=True)
        self.parts = dict(zip(names, itertools.accumulate((0, *sizes)), strict=False))
        self.scales, self.lows = self._scales()
        self.of_groups: dict[int, tuple[Any, Any]] = {}

    def load(self, part: str, offset: int, kind: Any) -> Any:
        pointer = self.builder.add(self.address, ir.Constant(INT64, self.parts[part] + offset))
        return self.builder.load(self.builder.inttoptr(pointer, ir.PointerType(kind)), align=1)

    # ---- scales ------------------------------------------------------------------------------------------------------

    def _scales(self) -> tuple[Any, Any]:
        """Vectors of all groups' scales and of the numbers added to them; of one lane where d is the scale."""
        builder, layout = self.builder, self.layout
        d = self._float("d")
        low = self._float("dmin") if layout.has_min else None
        if not layout.has_groups:
            return d, low
        scales, lows = self._integers()
        scales = builder.fmul(self._floats(scales), self._splat(d, 0, layout.group_count))
        if lows is None:
            return scales, None
        low = self._splat(builder.fneg(low), 0, layout.group_count)
        return scales, builder.fmul(self._floats(lows), low)

    def _float(self, part: str) -> Any:
        return self.builder.fpext(self.load(part, 0, ir.VectorType(ir.HalfType(), 1)), ir.VectorType(FLOAT, 1))

    def _integers(self) -> tuple[Any, Any]:
        """The groups' integers, as `Layout` unpacks them: bytes of scales, of minima or None."""
        builder, layout = self.builder, self.layout
        if layout.scale_low == -128:
            return self.load("scales", 0, ir.VectorType(INT8, 16)), None
        if layout.table is not None:  # IQ4_XS: two bits of all, then four
            second, first = self.load("scales", 0, INT16), self.load("scales", 2, INT32)
            four = self._fields(first, range(0, 32, 4), 15)
            two = self._fields(builder.zext(second, INT32), range(0, 16, 2), 3)
            both = builder.or_(four, builder.shl(two, _constants(INT32, [4] * 8)))
            return builder.trunc(builder.sub(both, _constants(INT32, [32] * 8)), ir.VectorType(INT8, 8)), None
        if not layout.has_min:  # Q3_K: four bits of all, then two
            first, second = self.load("scales", 0, INT64), self.load("scales", 8, INT32)
            of_all = ir.VectorType(INT8, 16)
            four = builder.bitcast(self._fields(first, (0, 4), 0x0F0F0F0F0F0F0F0F), of_all)
            two = builder.bitcast(self._fields(second, (0, 2, 4, 6), 0x03030303), of_all)
            both = builder.or_(four, builder.shl(two, _constants(INT8, [4] * 16)))
            return builder.sub(both, _constants(INT8, [32] * 16)), None
        if layout.scale_high == 15:  # Q2_K
            both = self.load("scales", 0, ir.VectorType(INT8, 16))
            return builder.and_(both, _constants(INT8, [15] * 16)), builder.lshr(both, _constants(INT8, [4] * 16))
        words = [self.load("scales", 4 * index, INT32) for index in range(3)]

        def masked(word: Any, shift: int, mask: int) -> Any:
            return builder.and_(builder.lshr(word, ir.Constant(INT32, shift)), ir.Constant(INT32, mask))

        unpacked = []
        for index in range(2):
            above = builder.shl(masked(words[index], 6, 0x03030303), ir.Constant(INT32, 4))
            low = masked(words[index], 0, 0x3F3F3F3F)
            pair = ir.Constant(ir.VectorType(INT32, 2), ir.Undefined)
            for half, word in enumerate((low, builder.or_(masked(words[2], 4 * index, 0x0F0F0F0F), above))):
                pair = builder.insert_element(pair, word, ir.Constant(INT32, half))
            unpacked.append(builder.bitcast(pair, ir.VectorType(INT8, 8)))
        return unpacked[0], unpacked[1]

    def _fields(self, word: Any, shifts: Sequence[int], mask: int) -> Any:
        """A word, shifted to the right by each of these, and masked."""
        count, kind = len(shifts), word.type
        nothing = ir.Constant(ir.VectorType(kind, 1), ir.Undefined)
        one = self.builder.insert_element(nothing, word, ir.Constant(INT32, 0))
        words = self.builder.lshr(self._splat(one, 0, count), _constants(kind, shifts))
        return self.builder.and_(words, _constants(kind, [mask] * count))

    def _floats(self, codes: Any) -> Any:
        """Signed bytes as float32."""
        count = codes.type.count
        return self.builder.sitofp(self.builder.sext(codes, ir.VectorType(INT32, count)), ir.VectorType(FLOAT, count))

    def _splat(self, vector: Any, lane: int, count: int) -> Any:
        return self.writer.shuffle(vector, vector, [lane] * count)

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def order(self) -> list[int]:
        """Where LANES numbers begin, those of the same bytes one after the other."""
        return sorted(range(0, self.layout.numbers, LANES), key=lambda k: self._place(0, k))

    def _place(self, plane: int, k: int) -> tuple[int, int]:
        """The byte and the bit at which number k lies in a plane."""
        bits, run = self.layout.planes[plane]
        lane, byte_number = k // run % (8 // bits), k // run // (8 // bits)
        return byte_number * run + k % run, bits * lane

    def numbers(self, k: int) -> Any:
        """LANES numbers from k on."""
        builder, layout = self.builder, self.layout
        scale, low = self._of_group(k // layout.group)
        if layout.table is not None:
            codes = self._looked_up(k)
        else:
            codes, shift = None, 0
            for plane in range(len(layout.planes)):
                bits = self._bits(plane, k, shift)
                codes = bits if codes is None else builder.or_(codes, bits)
                shift += layout.planes[plane].bits
            if layout.low:
                codes = builder.add(codes, _constants(INT32, [layout.low] * LANES))
        numbers = builder.fmul(builder.sitofp(codes, FLOATS), scale)
        return numbers if low is None else builder.fadd(numbers, low)

    def _of_group(self, group: int) -> tuple[Any, Any]:
        if group not in self.of_groups:
            scale = self._splat(self.scales, group, LANES)
            self.of_groups[group] = scale, None if self.lows is None else self._splat(self.lows, group, LANES)
        return self.of_groups[group]

    def _bits(self, plane: int, k: int, shift: int) -> Any:
        """This plane's bits of LANES codes, as int32, shifted to where they belong."""
        builder, words = self.builder, ir.VectorType(INT32, LANES)
        bits, run = self.layout.planes[plane]
        if run == 1:  # one bit of each of 32 codes, in a word
            one = self.load(f"plane{plane}", 0, ir.VectorType(INT32, 1))
            shifts = [k + lane for lane in range(LANES)]
            codes = builder.lshr(self._splat(one, 0, LANES), _constants(INT32, shifts))
            is_masked = True
        else:
            byte, first = self._place(plane, k)
            codes = builder.zext(self.load(f"plane{plane}", byte, ir.VectorType(INT8, LANES)), words)
            codes = builder.lshr(codes, _constants(INT32, [first] * LANES)) if first else codes
            is_masked = first + bits < 8
        if is_masked:
            codes = builder.and_(codes, _constants(INT32, [2**bits - 1] * LANES))
        return builder.shl(codes, _constants(INT32, [shift] * LANES)) if shift else codes

    def _looked_up(self, k: int) -> Any:
        """Numbers of the layout's table at the places that 4-bit codes name, as int32."""
        builder = self.builder
        numbers = self._sixteen(k - k % 16, 0)
        numbers = self.writer.shuffle(numbers, numbers, [k % 16 + lane for lane in range(LANES)])
        return builder.sext(numbers, ir.VectorType(INT32, LANES))

    def _sixteen(self, k: int, offset: int) -> Any:
        """16 codes of 4 bits from k on, or the numbers of the layout's table at these places, as bytes."""
        builder, bytes_ = self.builder, ir.VectorType(INT8, 16)
        byte, first = self._place(0, k)
        codes = self.load("plane0", byte, bytes_)
        if first:
            codes = builder.lshr(codes, _constants(INT8, [4] * 16))
        else:
            codes = builder.and_(codes, _constants(INT8, [15] * 16))
        if self.layout.table is None:
            return codes
        return look_up(self.writer, codes, [number + offset for number in self.layout.table])

    # ---- bytes of 32 codes -------------------------------------------------------------------------------------------

    def codes(self, k: int, offset: int) -> Any:
        """32 codes from k on, with this offset."""
        builder, layout = self.builder, self.layout
        joined, shift = None, 0
        for plane, (bits, run) in enumerate(layout.planes):
            if run == 16:
                halves = self._sixteen(k, offset), self._sixteen(k + 16, offset)
                codes = self.writer.shuffle(*halves, range(BLOCK))
            elif run == 1:
                of_all = builder.bitcast(self.load(f"plane{plane}", 0, INT32), ir.VectorType(ir.IntType(1), BLOCK))
                codes = builder.zext(of_all, CODES_32)
            else:
                byte, first = self._place(plane, k)
                codes = self.load(f"plane{plane}", byte, CODES_32)
                codes = builder.lshr(codes, _constants(INT8, [first] * BLOCK)) if first else codes
                codes = builder.and_(codes, _constants(INT8, [2**bits - 1] * BLOCK)) if first + bits < 8 else codes
            codes = builder.shl(codes, _constants(INT8, [shift] * BLOCK)) if shift else codes
            joined = codes if joined is None else builder.or_(joined, codes)
            shift += bits
        signed = layout.low + offset if layout.table is None else 0
        return builder.add(joined, _constants(INT8, [signed] * BLOCK)) if signed else joined

    def of_lanes(self, vector: Any, k: int) -> Any:
        """The number of each group, on lanes that hold four codes each, of 32 from k on."""
        return self.writer.shuffle(vector, vector, [(k + 4 * lane) // self.layout.group for lane in range(8)])


class _Vectors(_Block):
    """The same of blocks of vectors, whose list lies at the address `table`, a byte for each number."""

    def __init__(self, writer: VectorWriter, layout: VectorLayout, address: Any, table: Any) -> None:
        super().__init__(writer, layout, address)
        self.table, self.signs = table, None

    def _scales(self) -> tuple[Any, Any]:
        builder, groups = self.builder, self.layout.numbers // self.layout.group
        if "scales" in self.parts:
            both = self.load("scales", 0, ir.VectorType(INT8, groups // 2))
            fields = builder.and_(both, _constants(INT8, [15] * (groups // 2))), self._shifted(both, 4)
            order = [groups // 2 * (group % 2) + group // 2 for group in range(groups)]
            stored = builder.zext(self.writer.shuffle(*fields, order), ir.VectorType(INT32, groups))
        else:
            stored = self._shifted(self._words(), 28)
        odd = builder.or_(self._shifted(stored, -1), _constants(INT32, [1] * groups))
        floats = builder.sitofp(odd, ir.VectorType(FLOAT, groups))
        multiples = builder.fmul(floats, _constants(FLOAT, [self.layout.unit] * groups))  # which is exact
        return builder.fmul(multiples, self._splat(self._float("d"), 0, groups)), None

    def _words(self) -> Any:
        """The words of eight groups, where signs lie among scales."""
        if "words" in self.parts:
            return self.load("words", 0, WORDS)
        both = self.load("mixed", 0, ir.VectorType(INT32, 16))
        return self.writer.shuffle(both, both, range(1, 16, 2))

    def order(self) -> list[int]:
        return list(range(0, self.layout.numbers, LANES))

    def numbers(self, k: int) -> Any:
        builder, size = self.builder, min(self.layout.width, LANES)
        kind = ir.IntType(8 * size)
        joined = ir.Constant(ir.VectorType(kind, LANES // size), ir.Undefined)
        for place in range(LANES // size):
            vector, start = divmod(k + size * place, self.layout.width)
            offset = builder.mul(self._index(vector), ir.Constant(INT64, self.layout.width))
            pointer = builder.add(builder.add(self.table, offset), ir.Constant(INT64, start))
            numbers = builder.load(builder.inttoptr(pointer, ir.PointerType(kind)), align=1)
            joined = builder.insert_element(joined, numbers, ir.Constant(INT32, place))
        numbers = builder.zext(builder.bitcast(joined, ir.VectorType(INT8, LANES)), ir.VectorType(INT32, LANES))
        numbers = builder.fmul(builder.sitofp(numbers, FLOATS), self._of_group(k // self.layout.group)[0])
        return builder.select(self._minus(k), builder.fneg(numbers), numbers)

    def _index(self, vector: int) -> Any:
        """Which vector of the list it is, the vector-th of the block."""
        builder, per_eight = self.builder, 8 // self.layout.width
        if "pairs" in self.parts:
            pair = self.load("pairs", 2 * vector, INT16)
            return builder.zext(builder.and_(pair, ir.Constant(INT16, 511)), INT64)
        if "mixed" in self.parts:
            return builder.zext(self.load("mixed", vector // 4 * 8 + vector % 4, INT8), INT64)
        index = builder.zext(self.load("vectors", vector, INT8), INT64)
        if "high" not in self.parts:
            return index
        part, lane = divmod(vector, 4 * per_eight)
        bits = 2 // per_eight
        high = builder.lshr(builder.zext(self.load("high", part, INT8), INT64), ir.Constant(INT64, bits * lane))
        high = builder.and_(high, ir.Constant(INT64, 2**bits - 1))
        return builder.or_(index, builder.shl(high, ir.Constant(INT64, 8)))

    def _minus(self, k: int) -> Any:
        """Which of LANES numbers from k on have a minus."""
        builder, size = self.builder, max(LANES, 8)
        if "signs" in self.parts:
            bits = self.load("signs", k // 8, ir.IntType(size))
        else:
            self.signs = self._of_sevens() if self.signs is None else self.signs
            of_lanes = builder.bitcast(self.signs, ir.VectorType(ir.IntType(size), self.layout.numbers // size))
            bits = builder.extract_element(of_lanes, ir.Constant(INT32, k // size))
        bits = builder.lshr(bits, ir.Constant(bits.type, k % size))
        return builder.bitcast(builder.trunc(bits, ir.IntType(LANES)), ir.VectorType(ir.IntType(1), LANES))

    def _of_sevens(self) -> Any:
        """Bytes of eight signs, of seven bits each: the eighth makes their number even."""
        if "pairs" in self.parts:
            pairs = self.load("pairs", 0, ir.VectorType(INT16, 32))
            return self.builder.trunc(self._with_eighth(self._shifted(pairs, 9)), CODES_32)
        words, joined = self._words(), _constants(INT32, [0] * 8)
        for byte in range(4):
            seven = self.builder.and_(self._shifted(words, 7 * byte), _constants(INT32, [127] * 8))
            joined = self.builder.or_(joined, self._shifted(self._with_eighth(seven), -8 * byte))
        return joined

    def _with_eighth(self, sevens: Any) -> Any:
        odd = sevens
        for bits in (4, 2, 1):
            odd = self.builder.xor(odd, self._shifted(odd, bits))
        odd = self.builder.and_(odd, _constants(sevens.type.element, [1] * sevens.type.count))
        return self.builder.or_(sevens, self._shifted(odd, -7))

    def _shifted(self, vector: Any, right: int) -> Any:
        shifts = _constants(vector.type.element, [abs(right)] * vector.type.count)
        return self.builder.lshr(vector, shifts) if right >= 0 else self.builder.shl(vector, shifts)


def _block(writer: VectorWriter, layout: Layout | VectorLayout, address: Any, table: Any) -> _Block:
    if isinstance(layout, VectorLayout):
        return _Vectors(writer, layout, address, table)
    return _Block(writer, layout, address)


def _tile(layout: Layout | VectorLayout, rows: int, inputs: int) -> Any:
    """(addresses of a block in each row, of vectors, of its inputs, bytes between inputs, sums): sums with products."""
    fma = f"llvm.fma.v{LANES}f32"

    def emit(writer: VectorWriter, codes: Any, table: Any, x: Any, stride: Any, sums: Any) -> Any:
        builder = writer.builder
        blocks = [_block(writer, layout, builder.extract_value(codes, row), table) for row in range(rows)]
        starts = [builder.add(x, builder.mul(stride, ir.Constant(INT64, m))) for m in range(inputs)]
        added = [builder.extract_value(sums, index) for index in range(rows * inputs)]
        for k in blocks[0].order():
            at = [builder.add(start, ir.Constant(INT64, 4 * k)) for start in starts]
            numbers = [builder.load(builder.inttoptr(pointer, ir.PointerType(FLOATS)), align=4) for pointer in at]
            for row, block in enumerate(blocks):
                weights = block.numbers(k)
                for m in range(inputs):
                    values = [weights, numbers[m], added[row * inputs + m]]
                    added[row * inputs + m] = writer.call(fma, FLOATS, values)
        return cgutils.pack_array(builder, added)

    return define(5, lambda _codes, _table, _x, _stride, sums: sums, emit)


def _decoder(layout: Layout | VectorLayout) -> Any:
    """(addresses of a block, of vectors, address): its numbers in float32."""

    def emit(writer: VectorWriter, address: Any, table: Any, to: Any) -> Any:
        block = _block(writer, layout, address, table)
        for k in block.order():
            pointer = writer.builder.add(to, ir.Constant(INT64, 4 * k))
            writer.builder.store(block.numbers(k), writer.builder.inttoptr(pointer, ir.PointerType(FLOATS)), align=4)
        return writer.context.get_dummy_value()

    return define(3, lambda _address, _table, _to: types.void, emit)


def _writer(layout: Layout) -> Any:
    """(address of a block, three addresses): its codes as bytes, its groups' scales, and their minima."""

    def emit(writer: VectorWriter, address: Any, to: Any, scales: Any, minima: Any) -> Any:
        builder, block = writer.builder, _Block(writer, layout, address)

        def store(value: Any, base: Any, offset: int) -> None:
            pointer = builder.add(base, ir.Constant(INT64, offset))
            builder.store(value, builder.inttoptr(pointer, ir.PointerType(value.type)), align=1)

        for k in range(0, layout.numbers, BLOCK):
            store(block.codes(k, OFFSETS[_many_kind(layout)]), to, k)
        store(block.scales, scales, 0)
        if block.lows is not None:
            store(block.lows, minima, 0)
        return writer.context.get_dummy_value()

    return define(4, lambda _address, _to, _scales, _minima: types.void, emit)


def _groups(layout: Layout) -> int:
    """The groups of 32 numbers."""
    return BLOCK // layout.group


def _many_kind(layout: Layout) -> str:
    """The kind of codes as bytes for many inputs: one for all whose codes fit, so that inputs are rounded alike."""
    return "bytes" if layout.table is not None else "unsigned" if layout.has_min else "signed"


def _kind(layout: Layout) -> str:
    return "integers" if layout.table is None else "bytes"


def _offset(layout: Layout) -> int:
    """What is added to numbers before scaling, so that bytes are what `DOTS` takes."""
    if layout.table is not None:
        return OFFSETS["bytes"]
    return -layout.low if IS_X86 else 0


def _integer_tile(layout: Layout) -> Any:
    """(addresses of a block in four rows, of its inputs' codes, sums): sums with its products."""

    def emit(writer: VectorWriter, codes: Any, x: Any, sums: Any) -> Any:
        builder, fma = writer.builder, "llvm.fma.v8f32"
        blocks = [_Block(writer, layout, builder.extract_value(codes, row)) for row in range(4)]
        added = [builder.extract_value(sums, row) for row in range(4)]

        def load(offset: int, kind: Any) -> Any:
            pointer = builder.add(x, ir.Constant(INT64, offset))
            return builder.load(builder.inttoptr(pointer, ir.PointerType(kind)), align=1)

        for k in range(0, layout.numbers, BLOCK):
            inputs, scale = load(3 * k, CODES_32), load(3 * k + 2 * BLOCK, OF_WORDS)
            beside = load(3 * k + BLOCK, OF_WORDS if layout.has_min else WORDS)
            start = ir.Constant(WORDS, None) if layout.has_min else beside
            for row, block in enumerate(blocks):
                products = builder.sitofp(
                    DOTS[_kind(layout)](writer, start, block.codes(k, _offset(layout)), inputs), OF_WORDS
                )
                both = builder.fmul(block.of_lanes(block.scales, k), scale)
                added[row] = writer.call(fma, OF_WORDS, [products, both, added[row]])
                if block.lows is not None:
                    added[row] = writer.call(fma, OF_WORDS, [block.of_lanes(block.lows, k), beside, added[row]])
        return cgutils.pack_array(builder, added)

    return define(3, lambda _codes, _x, sums: sums, emit)


class _Blocks:
    """Writes the codes of QUARTER_LANES blocks of 32, which lie one after the other from an address on."""

    def __init__(self, writer: VectorWriter, layout: Layout, address: Any) -> None:
        self.writer, self.builder, self.layout = writer, writer.builder, layout
        size = layout.block_bytes
        addresses = [writer.builder.add(address, ir.Constant(INT64, size * block)) for block in range(QUARTER_LANES)]
        self.blocks = [_Block(writer, layout, start) for start in addresses]

    def halves(self) -> tuple[Any, Any]:
        """Codes 0 to 15 of every block, and codes 16 to 31, with their offset."""
        builder, layout, offset = self.builder, self.layout, _offset(self.layout)
        packed = self._joined([block.load("plane0", 0, ir.VectorType(INT8, 16)) for block in self.blocks])
        halves = [builder.and_(packed, self._all(15)), builder.lshr(packed, self._all(4))]
        if layout.table is not None:
            low, high = (look_up(self.writer, half, [number + offset for number in layout.table]) for half in halves)
            return low, high
        if len(layout.planes) == 2:  # the fifth bit: a word for each block, of which the lower half has codes 0 to 15
            words = self._joined([block.load("plane1", 0, ir.VectorType(ir.IntType(16), 2)) for block in self.blocks])
            for half in range(2):
                bits = self.writer.shuffle(words, words, range(half, 2 * QUARTER_LANES, 2))
                bits = builder.zext(builder.bitcast(bits, ir.VectorType(ir.IntType(1), REGISTER)), packed.type)
                halves[half] = builder.or_(halves[half], builder.shl(bits, self._all(4)))
        signed = layout.low + offset
        low, high = (builder.add(half, self._all(signed)) if signed else half for half in halves)
        return low, high

    def on_lanes(self, part: str) -> Any:
        """A float16 number of every block, each on the four lanes of its block."""
        block, halves = self.blocks[0], ir.VectorType(ir.HalfType(), LANES)
        if QUARTER_LANES < 4:
            numbers = self._joined([one.load(part, 0, ir.VectorType(ir.HalfType(), 1)) for one in self.blocks])
            spread = self.writer.shuffle(numbers, numbers, [lane // 4 for lane in range(LANES)])
        else:  # the first words of two blocks in one register, those of the next two in another
            words = self.layout.block_bytes // 2
            first, second = (block.load("d", 4 * words * two, ir.VectorType(ir.IntType(16), 16)) for two in range(2))
            words_of_lanes = [
                block.parts[part] // 2 + 16 * (lane // 8) + words * (lane // 4 % 2) for lane in range(LANES)
            ]
            spread = self.builder.bitcast(self.writer.shuffle(first, second, words_of_lanes), halves)
        return self.builder.fpext(spread, FLOATS)

    def _joined(self, parts: Sequence[Any]) -> Any:
        """All lanes of vectors of one length, as many as a power of 2."""
        joined = list(parts)
        while len(joined) > 1:
            pairs = zip(joined[::2], joined[1::2], strict=True)
            joined = [self.writer.shuffle(a, b, range(2 * a.type.count)) for a, b in pairs]
        return joined[0]

    def _all(self, number: int) -> Any:
        return _constants(INT8, [number] * REGISTER)


def _wide_tile(layout: Layout) -> Any:
    """The same for QUARTER_LANES blocks of 32; inputs are arranged by `_halves_of_inputs`."""
    fma, bytes_, words = f"llvm.fma.v{LANES}f32", ir.VectorType(INT8, REGISTER), ir.VectorType(INT32, LANES)

    def emit(writer: VectorWriter, codes: Any, x: Any, sums: Any) -> Any:
        builder, dot, added = writer.builder, DOTS[_kind(layout)], []

        def load(register: int, kind: Any) -> Any:
            pointer = builder.add(x, ir.Constant(INT64, REGISTER * register))
            return builder.load(builder.inttoptr(pointer, ir.PointerType(kind)), align=1)

        x_low, x_high, scale = load(0, bytes_), load(1, bytes_), load(2, FLOATS)
        beside = load(3, FLOATS if layout.has_min else words)
        start = ir.Constant(words, None) if layout.has_min else beside
        for row in range(4):
            blocks = _Blocks(writer, layout, builder.extract_value(codes, row))
            low, high = blocks.halves()
            products = dot(writer, dot(writer, start, low, x_low), high, x_high)
            both = builder.fmul(blocks.on_lanes("d"), scale)
            values = [builder.sitofp(products, FLOATS), both, builder.extract_value(sums, row)]
            added.append(writer.call(fma, FLOATS, values))
            if layout.has_min:
                added[row] = writer.call(fma, FLOATS, [blocks.on_lanes("dmin"), beside, added[row]])
        return cgutils.pack_array(builder, added)

    return define(3, lambda _codes, _x, sums: sums, emit)


def _beside(layout: Layout) -> Any:
    """(sums of codes of an input, their scale): what lies beside these codes."""

    def emit(writer: VectorWriter, sums: Any, scale: Any) -> Any:
        lanes = sums.type.count
        if layout.has_min:
            floats = writer.builder.sitofp(sums, ir.VectorType(FLOAT, lanes))
            return writer.builder.fmul(floats, splat(writer, scale, lanes))
        return writer.builder.mul(sums, _constants(INT32, [-_offset(layout)] * lanes))

    lane = types.float32 if layout.has_min else types.int32
    return define(2, lambda sums, _scale: VectorType(lane, sums.width), emit)


# A float32 on 8 lanes, and on 4.
_repeated_8 = define(1, lambda number: VectorType(number, 8), lambda writer, number: splat(writer, number, 8))
_repeated_4 = define(1, lambda number: VectorType(number, 4), lambda writer, number: splat(writer, number, 4))
_dot = dot_of("integers")


@inlined
def _padded(job, mine):
    """The address of inputs and the bytes from one to the next: where they lie, or with zeros up to whole blocks and
    tiles.
    """
    inputs, width, count, x = field(job, INPUTS), field(job, WIDTH), field(job, COUNT), field(job, X)
    tiled = inputs if inputs == 1 else max(inputs, 4)
    if width == count and tiled == inputs:
        return x, 4 * width
    for m in range(tiled):
        for k in range(count):
            is_there = m < inputs and k < width
            write(mine + 4 * (m * count + k), read(x + 4 * (m * width + k), F32) if is_there else F32(0))
    return mine, 4 * count


def padded_bytes(inputs: int, width: int, padded: int) -> int:
    """Scratch of a thread for inputs that do not fill blocks or tiles; threads share no cache line."""
    tiled = inputs if inputs == 1 else max(inputs, 4)
    return 64 if (tiled, padded) == (inputs, width) else 4 * padded * tiled + 64


@inlined
def _prefetch(address, size):
    """Ask for a block of a later row: rows are too short for the CPU to foresee them."""
    for line in range(-(-size // LINE)):
        prefetch_later(address + LINE * line)


@inlined
def _four_blocks(job, n, block, size):
    """Where a block of each of four rows lies; those of the next four are asked for."""
    a, b, c, d = four_rows(job, CODES, n)
    at, later = size * block, size * block + 4 * field(job, CODES_STRIDE)
    _prefetch(a + later, size)
    _prefetch(b + later, size)
    _prefetch(c + later, size)
    _prefetch(d + later, size)
    return a + at, b + at, c + at, d + at


@merged
def _products(job, tile_4x1, tile_2x4, numbers, size):
    """The job of a format whose blocks have this many numbers and bytes."""
    inputs, rows, piece, blocks = field(job, INPUTS), field(job, ROWS), field(job, PIECE), field(job, COUNT) // numbers
    mine = field(job, SCRATCH) + take(job + 8 * NEXT_THREAD, 1) * field(job, SCRATCH_STRIDE)
    (x, stride), table = _padded(job, mine), field(job, TABLE)
    first = take(job + 8 * NEXT_ROW, piece)
    while first < rows:
        stop = min(first + piece, rows)
        if inputs == 1:
            for n in range(first, stop, 4):
                sums = zero_tile(4, LANES)
                for block in range(blocks):
                    sums = tile_4x1(_four_blocks(job, n, block, size), table, x + 4 * numbers * block, stride, sums)
                write_4x1(job, n, 0, sums)
        else:
            for n in range(first, stop, 2):
                e, f = two_rows(job, CODES, n)
                for tile in range(0, inputs, 4):
                    m = min(tile, max(inputs - 4, 0))
                    sums8 = zero_tile(8, LANES)
                    for block in range(blocks):
                        at, inputs_at = size * block, x + m * stride + 4 * numbers * block
                        sums8 = tile_2x4((e + at, f + at), table, inputs_at, stride, sums8)
                    write_2x4(job, n, m, sums8)
        first = take(job + 8 * NEXT_ROW, piece)


def rounded_bytes(inputs: int, padded: int) -> int:
    """Scratch of a thread for rounded inputs; threads share no cache line."""
    return 4 * BLOCK + 3 * padded * inputs + 64


@inlined
def _rounded_inputs(job, x, buffer, to, beside):
    """A row of x -> 32 codes, what lies beside them, their scale on 8 lanes, 32 more codes, ..."""
    width, by_token = field(job, WIDTH), field(job, BY_TOKEN)
    of_token = scale_of_token(x, width) if by_token else F32(0)
    for k in range(0, field(job, COUNT), BLOCK):
        codes, scale = rounded_block(numbers_at(x, width, k, buffer), by_token, of_token)
        write(to + 3 * k, codes)
        write(to + 3 * k + BLOCK, beside(_dot(zero_words(8), ones_like(codes), codes), F32(scale)))
        write(to + 3 * k + 2 * BLOCK, _repeated_8(F32(scale)))


@merged
def _integer_products(job, tile, beside, numbers, size):
    """The same with inputs in 8 bits, one after the other; every thread rounds all of them."""
    inputs, rows, piece, count = field(job, INPUTS), field(job, ROWS), field(job, PIECE), field(job, COUNT)
    mine = field(job, SCRATCH) + take(job + 8 * NEXT_THREAD, 1) * field(job, SCRATCH_STRIDE)
    x = mine + 4 * BLOCK
    for m in range(inputs):
        _rounded_inputs(job, field(job, X) + 4 * m * field(job, WIDTH), mine, x + 3 * m * count, beside)
    first = take(job + 8 * NEXT_ROW, piece)
    while first < rows:
        for n in range(first, min(first + piece, rows), 4):
            for m in range(inputs):
                sums, inputs_at = zero_tile(4, 8), x + 3 * m * count
                for block in range(count // numbers):
                    sums = tile(_four_blocks(job, n, block, size), inputs_at + 3 * numbers * block, sums)
                write_4x1(job, n, m, sums)
        first = take(job + 8 * NEXT_ROW, piece)


def wide_bytes(inputs: int, padded: int) -> int:
    """Scratch of a thread for inputs that are arranged in halves; threads share no cache line."""
    return 4 * BLOCK + 4 * REGISTER * -(-padded // STEP) * inputs + 64


@inlined
def _halves_of_inputs(job, x, buffer, to, beside):
    """A row of x -> codes 0 to 15 of QUARTER_LANES blocks, codes 16 to 31, scales, what lies beside them, ..."""
    width, blocks, by_token = field(job, WIDTH), field(job, COUNT) // BLOCK, field(job, BY_TOKEN)
    of_token = scale_of_token(x, width) if by_token else F32(0)
    for step in range(-(-blocks // QUARTER_LANES)):
        first = min(step * QUARTER_LANES, blocks - QUARTER_LANES)
        for block in range(QUARTER_LANES):
            codes, scale = rounded_block(numbers_at(x, width, BLOCK * (first + block), buffer), by_token, of_token)
            scale = scale if first + block >= step * QUARTER_LANES else F32(0)  # a block that the step before has, too
            low, high, lane = first_half(codes), second_half(codes), to + 4 * REGISTER * step + 16 * block
            write(lane, low)
            write(lane + REGISTER, high)
            write(lane + 2 * REGISTER, _repeated_4(F32(scale)))
            sums = _dot(_dot(zero_words(4), ones_like(low), low), ones_like(high), high)
            write(lane + 3 * REGISTER, beside(sums, F32(scale)))


@merged
def _wide_products(job, tile, beside, size):
    """The same for rows of at least STEP numbers in blocks of 32."""
    inputs, rows, piece, blocks = field(job, INPUTS), field(job, ROWS), field(job, PIECE), field(job, COUNT) // BLOCK
    mine = field(job, SCRATCH) + take(job + 8 * NEXT_THREAD, 1) * field(job, SCRATCH_STRIDE)
    steps, x = -(-blocks // QUARTER_LANES), mine + 4 * BLOCK
    for m in range(inputs):
        _halves_of_inputs(job, field(job, X) + 4 * m * field(job, WIDTH), mine, x + 4 * REGISTER * steps * m, beside)
    first = take(job + 8 * NEXT_ROW, piece)
    while first < rows:
        for n in range(first, min(first + piece, rows), 4):
            a, b, c, d = four_rows(job, CODES, n)
            for m in range(inputs):
                sums, inputs_at, later = zero_tile(4, LANES), x + 4 * REGISTER * steps * m, 4 * field(job, CODES_STRIDE)
                for step in range(steps):
                    at = size * min(step * QUARTER_LANES, blocks - QUARTER_LANES)
                    prefetch_later(a + at + later)
                    prefetch_later(b + at + later)
                    prefetch_later(c + at + later)
                    prefetch_later(d + at + later)
                    sums = tile((a + at, b + at, c + at, d + at), inputs_at + 4 * REGISTER * step, sums)
                write_4x1(job, n, m, sums)
        first = take(job + 8 * NEXT_ROW, piece)


@merged
def _decoded(job, decode, numbers, size):
    """Decode blocks FIRST .. FIRST + COUNT of every row into `y`."""
    rows, piece, first, count = field(job, ROWS), field(job, PIECE), field(job, FIRST), field(job, COUNT)
    row, table = take(job + 8 * NEXT_ROW, piece), field(job, TABLE)
    while row < rows:
        for n in range(row, min(row + piece, rows)):
            codes, to = row_of(job, CODES, n) + first * size, field(job, Y) + n * field(job, Y_STRIDE)
            for block in range(count):
                decode(codes + size * block, table, to + 4 * numbers * block)
        row = take(job + 8 * NEXT_ROW, piece)


def _steps(name: str) -> tuple[Any, ...]:
    layout = LAYOUTS[name]
    return _tile(layout, 4, 1), _tile(layout, 2, 4), _decoder(layout), _integer_tile(layout), _beside(layout)


def _vector_steps(name: str) -> tuple[Any, Any, Any]:
    layout = VECTOR_LAYOUTS[name]
    return _tile(layout, 4, 1), _tile(layout, 2, 4), _decoder(layout)


# ---- a function for each format -------------------------------------------------------------------------------------


_q4_1_4x1, _q4_1_2x4, _q4_1_block, _q4_1_tile, _q4_1_beside = _steps("q4_1_gguf")
_q5_0_4x1, _q5_0_2x4, _q5_0_block, _q5_0_tile, _q5_0_beside = _steps("q5_0_gguf")
_q5_1_4x1, _q5_1_2x4, _q5_1_block, _q5_1_tile, _q5_1_beside = _steps("q5_1_gguf")
_iq4_nl_4x1, _iq4_nl_2x4, _iq4_nl_block, _iq4_nl_tile, _iq4_nl_beside = _steps("iq4_nl_gguf")
_q2_k_4x1, _q2_k_2x4, _q2_k_block, _q2_k_tile, _q2_k_beside = _steps("q2_k_gguf")
_q3_k_4x1, _q3_k_2x4, _q3_k_block, _q3_k_tile, _q3_k_beside = _steps("q3_k_gguf")
_q4_k_4x1, _q4_k_2x4, _q4_k_block, _q4_k_tile, _q4_k_beside = _steps("q4_k_gguf")
_q5_k_4x1, _q5_k_2x4, _q5_k_block, _q5_k_tile, _q5_k_beside = _steps("q5_k_gguf")
_iq4_xs_4x1, _iq4_xs_2x4, _iq4_xs_block, _iq4_xs_tile, _iq4_xs_beside = _steps("iq4_xs_gguf")
_q6_k_4x1, _q6_k_2x4, _q6_k_block, _q6_k_tile, _q6_k_beside = _steps("q6_k_gguf")
_iq3_s_4x1, _iq3_s_2x4, _iq3_s_block = _vector_steps("iq3_s_gguf")
_iq3_xxs_4x1, _iq3_xxs_2x4, _iq3_xxs_block = _vector_steps("iq3_xxs_gguf")
_iq2_s_4x1, _iq2_s_2x4, _iq2_s_block = _vector_steps("iq2_s_gguf")
_iq2_xs_4x1, _iq2_xs_2x4, _iq2_xs_block = _vector_steps("iq2_xs_gguf")
_iq2_xxs_4x1, _iq2_xxs_2x4, _iq2_xxs_block = _vector_steps("iq2_xxs_gguf")
_q4_1_of_32, _q5_0_of_32 = _wide_tile(LAYOUTS["q4_1_gguf"]), _wide_tile(LAYOUTS["q5_0_gguf"])
_q5_1_of_32, _iq4_nl_of_32 = _wide_tile(LAYOUTS["q5_1_gguf"]), _wide_tile(LAYOUTS["iq4_nl_gguf"])
_q4_1_written, _q5_0_written = _writer(LAYOUTS["q4_1_gguf"]), _writer(LAYOUTS["q5_0_gguf"])
_q5_1_written, _iq4_nl_written = _writer(LAYOUTS["q5_1_gguf"]), _writer(LAYOUTS["iq4_nl_gguf"])
_q2_k_written, _q3_k_written = _writer(LAYOUTS["q2_k_gguf"]), _writer(LAYOUTS["q3_k_gguf"])
_q4_k_written, _q5_k_written = _writer(LAYOUTS["q4_k_gguf"]), _writer(LAYOUTS["q5_k_gguf"])
_q6_k_written, _iq4_xs_written = _writer(LAYOUTS["q6_k_gguf"]), _writer(LAYOUTS["iq4_xs_gguf"])
_rows_of_bytes = block_rows_of("bytes", has_minima=False, groups=1)
_rows_of_signed = block_rows_of("signed", has_minima=False, groups=1)
_rows_of_signed_16 = block_rows_of("signed", has_minima=False, groups=2)
_rows_of_unsigned = block_rows_of("unsigned", has_minima=True, groups=1)
_rows_of_unsigned_16 = block_rows_of("unsigned", has_minima=True, groups=2)


def _q4_1(job):
    _products(job, _q4_1_4x1, _q4_1_2x4, 32, 20)


def _q4_1_decoded(job):
    _decoded(job, _q4_1_block, 32, 20)


def _q4_1_integers(job):
    _integer_products(job, _q4_1_tile, _q4_1_beside, 32, 20)


def _q4_1_wide(job):
    _wide_products(job, _q4_1_of_32, _q4_1_beside, 20)


def _q4_1_panels(job):
    _rows_of_unsigned(job, _q4_1_written, 32, 20)


def _q5_0(job):
    _products(job, _q5_0_4x1, _q5_0_2x4, 32, 22)


def _q5_0_decoded(job):
    _decoded(job, _q5_0_block, 32, 22)


def _q5_0_integers(job):
    _integer_products(job, _q5_0_tile, _q5_0_beside, 32, 22)


def _q5_0_wide(job):
    _wide_products(job, _q5_0_of_32, _q5_0_beside, 22)


def _q5_0_panels(job):
    _rows_of_signed(job, _q5_0_written, 32, 22)


def _q5_1(job):
    _products(job, _q5_1_4x1, _q5_1_2x4, 32, 24)


def _q5_1_decoded(job):
    _decoded(job, _q5_1_block, 32, 24)


def _q5_1_integers(job):
    _integer_products(job, _q5_1_tile, _q5_1_beside, 32, 24)


def _q5_1_wide(job):
    _wide_products(job, _q5_1_of_32, _q5_1_beside, 24)


def _q5_1_panels(job):
    _rows_of_unsigned(job, _q5_1_written, 32, 24)


def _iq4_nl(job):
    _products(job, _iq4_nl_4x1, _iq4_nl_2x4, 32, 18)


def _iq4_nl_decoded(job):
    _decoded(job, _iq4_nl_block, 32, 18)


def _iq4_nl_integers(job):
    _integer_products(job, _iq4_nl_tile, _iq4_nl_beside, 32, 18)


def _iq4_nl_wide(job):
    _wide_products(job, _iq4_nl_of_32, _iq4_nl_beside, 18)


def _iq4_nl_panels(job):
    _rows_of_bytes(job, _iq4_nl_written, 32, 18)


def _q2_k(job):
    _products(job, _q2_k_4x1, _q2_k_2x4, 256, 84)


def _q2_k_decoded(job):
    _decoded(job, _q2_k_block, 256, 84)


def _q2_k_integers(job):
    _integer_products(job, _q2_k_tile, _q2_k_beside, 256, 84)


def _q2_k_panels(job):
    _rows_of_unsigned_16(job, _q2_k_written, 256, 84)


def _q3_k(job):
    _products(job, _q3_k_4x1, _q3_k_2x4, 256, 110)


def _q3_k_decoded(job):
    _decoded(job, _q3_k_block, 256, 110)


def _q3_k_integers(job):
    _integer_products(job, _q3_k_tile, _q3_k_beside, 256, 110)


def _q3_k_panels(job):
    _rows_of_signed_16(job, _q3_k_written, 256, 110)


def _q4_k(job):
    _products(job, _q4_k_4x1, _q4_k_2x4, 256, 144)


def _q4_k_decoded(job):
    _decoded(job, _q4_k_block, 256, 144)


def _q4_k_integers(job):
    _integer_products(job, _q4_k_tile, _q4_k_beside, 256, 144)


def _q4_k_panels(job):
    _rows_of_unsigned(job, _q4_k_written, 256, 144)


def _q5_k(job):
    _products(job, _q5_k_4x1, _q5_k_2x4, 256, 176)


def _q5_k_decoded(job):
    _decoded(job, _q5_k_block, 256, 176)


def _q5_k_integers(job):
    _integer_products(job, _q5_k_tile, _q5_k_beside, 256, 176)


def _q5_k_panels(job):
    _rows_of_unsigned(job, _q5_k_written, 256, 176)


def _q6_k(job):
    _products(job, _q6_k_4x1, _q6_k_2x4, 256, 210)


def _q6_k_decoded(job):
    _decoded(job, _q6_k_block, 256, 210)


def _q6_k_integers(job):
    _integer_products(job, _q6_k_tile, _q6_k_beside, 256, 210)


def _q6_k_panels(job):
    _rows_of_signed_16(job, _q6_k_written, 256, 210)


def _iq4_xs(job):
    _products(job, _iq4_xs_4x1, _iq4_xs_2x4, 256, 136)


def _iq4_xs_decoded(job):
    _decoded(job, _iq4_xs_block, 256, 136)


def _iq4_xs_integers(job):
    _integer_products(job, _iq4_xs_tile, _iq4_xs_beside, 256, 136)


def _iq4_xs_panels(job):
    _rows_of_bytes(job, _iq4_xs_written, 256, 136)


def _iq3_s(job):
    _products(job, _iq3_s_4x1, _iq3_s_2x4, 256, 110)


def _iq3_s_decoded(job):
    _decoded(job, _iq3_s_block, 256, 110)


def _iq3_xxs(job):
    _products(job, _iq3_xxs_4x1, _iq3_xxs_2x4, 256, 98)


def _iq3_xxs_decoded(job):
    _decoded(job, _iq3_xxs_block, 256, 98)


def _iq2_s(job):
    _products(job, _iq2_s_4x1, _iq2_s_2x4, 256, 82)


def _iq2_s_decoded(job):
    _decoded(job, _iq2_s_block, 256, 82)


def _iq2_xs(job):
    _products(job, _iq2_xs_4x1, _iq2_xs_2x4, 256, 74)


def _iq2_xs_decoded(job):
    _decoded(job, _iq2_xs_block, 256, 74)


def _iq2_xxs(job):
    _products(job, _iq2_xxs_4x1, _iq2_xxs_2x4, 256, 66)


def _iq2_xxs_decoded(job):
    _decoded(job, _iq2_xxs_block, 256, 66)


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "q4_1_gguf": (_q4_1, _q4_1_decoded, _q4_1_integers, _q4_1_panels, _q4_1_wide),
    "q5_0_gguf": (_q5_0, _q5_0_decoded, _q5_0_integers, _q5_0_panels, _q5_0_wide),
    "q5_1_gguf": (_q5_1, _q5_1_decoded, _q5_1_integers, _q5_1_panels, _q5_1_wide),
    "iq4_nl_gguf": (_iq4_nl, _iq4_nl_decoded, _iq4_nl_integers, _iq4_nl_panels, _iq4_nl_wide),
    "q2_k_gguf": (_q2_k, _q2_k_decoded, _q2_k_integers, _q2_k_panels),
    "q3_k_gguf": (_q3_k, _q3_k_decoded, _q3_k_integers, _q3_k_panels),
    "q4_k_gguf": (_q4_k, _q4_k_decoded, _q4_k_integers, _q4_k_panels),
    "q5_k_gguf": (_q5_k, _q5_k_decoded, _q5_k_integers, _q5_k_panels),
    "q6_k_gguf": (_q6_k, _q6_k_decoded, _q6_k_integers, _q6_k_panels),
    "iq4_xs_gguf": (_iq4_xs, _iq4_xs_decoded, _iq4_xs_integers, _iq4_xs_panels),
    "iq3_s_gguf": (_iq3_s, _iq3_s_decoded),
    "iq3_xxs_gguf": (_iq3_xxs, _iq3_xxs_decoded),
    "iq2_s_gguf": (_iq2_s, _iq2_s_decoded),
    "iq2_xs_gguf": (_iq2_xs, _iq2_xs_decoded),
    "iq2_xxs_gguf": (_iq2_xxs, _iq2_xxs_decoded),
}


def numbers_of(format_name: str) -> int:
    """The numbers of a block."""
    return (LAYOUTS[format_name] if format_name in LAYOUTS else VECTOR_LAYOUTS[format_name]).numbers


@functools.cache
def products_of(format_name: str) -> Any:
    """The C function that multiplies by a format's blocks, compiled at first use and cached on disk."""
    return c_function(_FUNCTIONS[format_name][0])


@functools.cache
def integers_of(format_name: str, padded: int) -> tuple[Any, Callable[[int, int], int]]:
    """The C function that rounds inputs and multiplies them by rows of so many numbers in a format's blocks; what gives
    its scratch memory.
    """
    is_wide = LAYOUTS[format_name].numbers == BLOCK and padded >= STEP
    return c_function(_FUNCTIONS[format_name][4 if is_wide else 2]), wide_bytes if is_wide else rounded_bytes


def has_panels(rows: int, padded: int) -> bool:
    """Whether many inputs are multiplied as integers by so many rows of so many numbers."""
    return rows >= LANES and padded >= REGISTER


@functools.cache
def many_inputs(format_name: str) -> tuple[Any, Any]:
    """The C functions that round many inputs, and that multiply them."""
    layout = LAYOUTS[format_name]
    return rounds_quads(_many_kind(layout), _groups(layout)), c_function(_FUNCTIONS[format_name][3])


def many_bytes(format_name: str, inputs: int, padded: int) -> tuple[int, int]:
    """Memory of rounded inputs, and of each thread that multiplies them."""
    layout = LAYOUTS[format_name]
    of_thread = opened_blocks_bytes(padded, layout.has_min, _groups(layout))
    return quads_bytes(inputs, padded, _groups(layout)), of_thread


@functools.cache
def decoder_of(format_name: str) -> Any:
    """The C function that decodes a part of the weight's rows."""
    return c_function(_FUNCTIONS[format_name][1])

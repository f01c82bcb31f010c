"""Crossovers: the pick is a pure function of the record, a wrong kernel is refused, unfit files are not used."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bitplan.base.errors import FileFormatError
from bitplan.base.folders import cache_dir
from bitplan.formats import Encoded
from bitplan.formats.codec import decode, encode
from bitplan.packed import crossover
from bitplan.packed.crossover import (
    ROW_COUNTS,
    Crossover,
    CrossoverTable,
    Timing,
    from_document,
    measure_crossover,
    pick,
    read_crossovers,
    to_document,
)
from bitplan.packed.products.fused import Launch, fused_for
from tests.caught_logs import CaughtLogs

PRINT = {"gpu": "A", "driver": "1"}
WIDE, NARROW = {"rows": 16, "warps": 8}, {"rows": 8, "warps": 2}


def timing(rows: int, fused: float | None, decoded: float, expanded: float, launch: Launch | None = None) -> Timing:
    samples = {"decode": (decoded,), "expanded": (expanded,)} | ({} if fused is None else {"fused": (fused,)})
    return Timing(rows, samples, launch)


RECORD = Crossover(
    "mxfp4",
    64,
    128,
    (
        timing(1, 1.0, 5.0, 3.0, NARROW),
        timing(2, 2.0, 5.0, 2.0, NARROW),  # as fast from the cache
        timing(4, 3.0, 5.0, 2.0, WIDE),  # the cache wins
        timing(8, 5.0, 5.0, 5.0, WIDE),  # all equal
        timing(16, 9.0, 6.0, 5.5, WIDE),  # expanded either way
    ),
)


def faked(one: Encoded, _: object, row_counts: Sequence[int]) -> Crossover:
    return Crossover(one.fmt.name, *one.shape, tuple(timing(rows, 1.0, 2.0, 3.0) for rows in row_counts))


# ---- pick ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "room", "strategy", "launch"),
    [
        (0, False, "fused", NARROW),
        (1, False, "fused", NARROW),
        (1, True, "fused", NARROW),
        (2, True, "fused", NARROW),  # equal: less memory
        (3, False, "fused", WIDE),  # goes by 4 rows
        (3, True, "tile_cache", None),
        (4, True, "tile_cache", None),
        (5, True, "fused", WIDE),  # goes by 8 rows, equal
        (8, False, "fused", WIDE),
        (9, False, "decode", None),  # goes by 16 rows
        (16, False, "decode", None),
        (16, True, "tile_cache", None),
        (17, False, "decode", None),  # beyond the last: the last
        (10**6, True, "tile_cache", None),
    ],
)
def test_the_pick_on_every_threshold(rows: int, room: bool, strategy: str, launch: Launch | None) -> None:
    result = pick(RECORD, rows, room=room)
    assert (result.strategy, result.launch) == (strategy, launch)


def test_the_pick_says_what_was_measured() -> None:
    result = pick(RECORD, 3, room=False)
    assert result.reason == "measured for 4 rows: fused 3.0000 ms, decode 5.0000 ms; no room in a tile cache"
    refused = Crossover("mxfp4", 64, 128, RECORD.timings, refused="it is wrong")
    assert pick(refused, 1, room=False).strategy == "decode"
    assert "fused is not used: it is wrong" in pick(refused, 1, room=True).reason


def test_medians_decide_and_not_means() -> None:
    samples = {"fused": (1.0, 1.0, 90.0), "decode": (2.0, 2.0, 2.0), "expanded": (3.0, 3.0, 3.0)}
    assert pick(Crossover("mxfp4", 1, 1, (Timing(1, samples),)), 1, room=True).strategy == "fused"


# ---- measuring -------------------------------------------------------------------------------------------------------


class Kernel:
    """A fused kernel as it should be, or with a fault."""

    name = "the kernel under test"

    def __init__(self, spoil: Callable[[Tensor], Tensor] = lambda y: y, launches: Sequence[Launch] = ()) -> None:
        self.spoil, self.given = spoil, launches
        self.ran: list[Launch | None] = []

    def why_not(self, weight: Encoded, dtype: torch.dtype) -> str | None:
        return None if weight.fmt.name == "mxfp4" else "only mxfp4"

    def prepare(self, weight: Encoded) -> Any:
        return decode(weight)

    def launches(self, weight: Encoded, rows: int) -> Sequence[Launch]:
        return self.given

    def run(self, x_MK: Tensor, weight: Encoded, prepared: Any, bias: Tensor | None, launch: Launch | None) -> Tensor:
        self.ran.append(launch)
        return self.spoil(functional.linear(x_MK, prepared, bias))

    def note(self, weight: Encoded) -> str:
        return "is under test"


def measured_in_float32(*args: Any, **options: Any) -> Crossover:
    """A CPU multiplies bfloat16 too slowly, and with a warning."""
    return measure_crossover(*args, dtype=torch.float32, **options)


def weight(name: str = "mxfp4") -> Encoded:
    return encode(torch.randn(48, 256, generator=torch.Generator().manual_seed(0)), name)


def one_ms(_: Callable[[], Tensor], repeats: int) -> Sequence[float]:
    return [1.0] * repeats


def ticking(*times: float) -> Callable[[Callable[[], Tensor], int], Sequence[float]]:
    """A timer that runs the call and hands out these milliseconds in turn."""
    left = list(times)

    def timer(call: Callable[[], Tensor], repeats: int) -> Sequence[float]:
        call()
        return [left.pop(0)] * repeats

    return timer


def test_every_way_is_timed_at_every_row_count() -> None:
    record = measured_in_float32(weight(), Kernel(), timer=one_ms, row_counts=(1, 4))
    assert [one.rows for one in record.timings] == [1, 4]
    assert all(one.samples_ms.keys() == {"fused", "decode", "expanded"} for one in record.timings)
    assert record.key == ("mxfp4", 48, 256)
    assert record.refused is None
    assert ROW_COUNTS == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def test_the_fastest_launch_is_kept() -> None:
    kernel = Kernel(launches=(NARROW, WIDE))
    record = measured_in_float32(weight(), kernel, timer=ticking(5.0, 4.0, 4.1, 7.0, 6.0), row_counts=(2,))
    assert record.timings[0].launch == WIDE
    assert kernel.ran == [NARROW, WIDE, NARROW, WIDE, WIDE]  # checked, tried, timed
    assert {way: one[0] for way, one in record.timings[0].samples_ms.items()} == {
        "fused": 4.1,
        "decode": 7.0,
        "expanded": 6.0,
    }


def lost_block(y: Tensor) -> Tensor:
    y = y.clone()
    y[:, 3] = y[:, 3] * 1.2
    return y


@pytest.mark.parametrize(
    "spoil",
    [
        lambda y: y * 1.03,
        lambda y: y.roll(1, dims=1),
        lost_block,
        lambda y: torch.where(y == y.max(), float("nan"), y),
        torch.zeros_like,
    ],
    ids=["scaled", "shifted", "one column", "one nan", "zero"],
)
def test_a_wrong_kernel_is_refused_loudly_and_not_timed(spoil: Callable[[Tensor], Tensor], caplog: CaughtLogs) -> None:
    with caplog.at_level(logging.ERROR, logger="bitplan"):
        record = measured_in_float32(weight(), Kernel(spoil), timer=one_ms, row_counts=(16,))
    assert "differ from decode" in str(record.refused)
    assert "the kernel under test is wrong" in caplog.text
    assert "fused" not in record.timings[0].samples_ms
    assert pick(record, 1, room=False).strategy == "decode"


def test_products_in_fp8_are_compared_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitplan.packed.products import fp8_rows

    one = encode(torch.randn(48, 256, generator=torch.Generator().manual_seed(0)), "fp8_e4m3_row")
    assert crossover.measure_fp8(one, 16, timer=one_ms) == Timing(16, {"fp8": (1.0,) * crossover.REPEATS})
    right = fp8_rows.fp8_linear
    monkeypatch.setattr(fp8_rows, "fp8_linear", lambda *given: right(*given).roll(1, dims=1))
    assert "results at 16 rows" in str(crossover.measure_fp8(one, 16, timer=one_ms))


def test_a_kernel_that_is_wrong_for_one_launch_at_many_rows_is_refused() -> None:
    kernel = Kernel(launches=(NARROW, WIDE))
    right = kernel.run

    def run(x: Tensor, *rest: Any) -> Tensor:
        return right(x, *rest) * (1.5 if x.shape[0] == 8 and rest[-1] == WIDE else 1.0)

    kernel.run = run  # type: ignore[method-assign]
    record = measured_in_float32(weight(), kernel, timer=one_ms, row_counts=(4, 8))
    assert "8 rows" in str(record.refused)
    assert "'warps': 8" in str(record.refused)


def test_a_format_without_a_kernel_is_measured_without_it() -> None:
    record = measured_in_float32(weight("int8_row"), Kernel(), timer=one_ms, row_counts=(1,))
    assert record.refused == "only mxfp4"
    assert "fused" not in record.timings[0].samples_ms


def test_a_launch_the_gpu_has_no_room_for_is_left_out() -> None:
    triton = pytest.importorskip("triton")
    kernel = Kernel(launches=(NARROW, WIDE))
    right = kernel.run

    def run(x: Tensor, *rest: Any) -> Tensor:
        if rest[-1] == NARROW:
            raise triton.OutOfResources(300_000, 232_448, "shared memory")
        return right(x, *rest)

    kernel.run = run  # type: ignore[method-assign]
    record = measured_in_float32(weight(), kernel, timer=one_ms, row_counts=(1,))
    assert record.timings[0].launch == WIDE


def test_an_error_that_only_has_the_name_of_triton_s_is_raised() -> None:
    class OutOfResources(Exception):  # noqa: N818  (Triton's name)
        pass

    kernel = Kernel(launches=(NARROW, WIDE))
    kernel.run = lambda *_: (_ for _ in ()).throw(OutOfResources("of another library"))  # type: ignore[method-assign]
    with pytest.raises(OutOfResources):
        measured_in_float32(weight(), kernel, timer=one_ms, row_counts=(1,))


def test_running_out_of_memory_ends_the_measurement_with_what_there_is() -> None:
    def timer(call: Callable[[], Tensor], repeats: int) -> Sequence[float]:
        if call().shape[0] > 2:
            raise torch.OutOfMemoryError("full")
        return [1.0] * repeats

    record = measured_in_float32(weight(), Kernel(), timer=timer, row_counts=(1, 2, 4, 8))
    assert [one.rows for one in record.timings] == [1, 2]
    assert record.stopped == "out of memory at 4 rows"
    with pytest.raises(torch.OutOfMemoryError):
        measured_in_float32(weight(), Kernel(), timer=timer, row_counts=(4,))


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_document_comes_back_as_it_was() -> None:
    result = {RECORD.key: RECORD}
    document = json.loads(json.dumps(to_document(result, PRINT)))
    assert from_document(document, PRINT, where="f") == result


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BITPLAN_CACHE_DIR", raising=False)
    assert cache_dir() == tmp_path / "bitplan"
    monkeypatch.setenv("BITPLAN_CACHE_DIR", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("BITPLAN_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "bitplan"


def test_a_weight_is_measured_once_and_found_by_the_next_process(tmp_path: Path) -> None:
    measured: list[tuple[Any, ...]] = []

    def measure(one: Encoded, _: object, row_counts: Sequence[int]) -> Crossover:
        measured.append((one.fmt.name, *row_counts))
        return Crossover(one.fmt.name, *one.shape, tuple(timing(rows, 1.0, 2.0, 3.0) for rows in row_counts))

    path = tmp_path / "new" / "gpu.json"
    table = CrossoverTable(path, PRINT, measure)
    first = table.find_or_measure(weight(), None, 1)
    assert table.find_or_measure(weight(), None, 1) is first
    CrossoverTable(path, PRINT, measure).find_or_measure(weight("int8_row"), None, 10**6)
    assert measured == [("mxfp4", 1), ("int8_row", 8192)]
    assert CrossoverTable(path, PRINT, measure).find("mxfp4", 48, 256) == first
    assert CrossoverTable(path, PRINT, measure).find("mxfp4", 48, 255) is None
    # What the second process added is not lost when the first writes again.
    record = table.find_or_measure(weight(), None, 3)
    assert record is not None
    assert [one.rows for one in record.timings] == [1, 4]
    assert len(read_crossovers(path, PRINT)) == 2


def test_a_record_of_the_package_counts_where_gpu_and_kernels_are_its_own(tmp_path: Path) -> None:
    here = PRINT | {"kernels": "k"}
    shipped = tmp_path / "shipped.json"
    shipped.write_text(json.dumps(to_document({RECORD.key: RECORD}, here)))
    moved = here | {"driver": "2"}
    table = CrossoverTable(tmp_path / "gpu.json", moved, faked, shipped)
    assert table.find(*RECORD.key) == RECORD
    table.find_or_measure(encode(torch.ones(64, 128), "mxfp4"), None, 32)
    again = CrossoverTable(tmp_path / "gpu.json", moved, faked, shipped).find(*RECORD.key)
    assert again is not None
    assert [one.rows for one in again.timings] == [1, 2, 4, 8, 16, 32]
    for other in ({"gpu": "B"}, {"kernels": "l"}):
        assert CrossoverTable(tmp_path / "other.json", here | other, faked, shipped).find(*RECORD.key) is None


def test_the_records_of_the_package_are_of_the_kernels_as_they_are() -> None:
    for path in crossover.SHIPPED.glob("crossover_*.json"):
        document = json.loads(path.read_text())
        assert from_document(document, document["fingerprint"], where=path.name)
        kernels = document["fingerprint"]["kernels"]
        assert kernels == crossover._source_hash(), f"{path.name}: measure again with benchmarks/decode.py"


def test_another_fingerprint_is_measured_again_and_said(tmp_path: Path, caplog: CaughtLogs) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(to_document({RECORD.key: RECORD}, PRINT)))
    other = PRINT | {"driver": "2"}
    with caplog.at_level(logging.WARNING, logger="bitplan"):
        assert CrossoverTable(path, other).find(*RECORD.key) is None
    assert "driver '1', now '2'" in caplog.text
    CrossoverTable(path, other, faked).find_or_measure(weight(), None, 1)
    assert json.loads(path.read_text())["fingerprint"] == other


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(version=2), "version must be 1"),
        (lambda d: d.update(extra=1), "unknown key 'extra'"),
        (lambda d: d["weights"][0].pop("timings"), "timings is missing"),
        (lambda d: d["weights"][0].update(timings=[]), "one timing or more"),
        (lambda d: d["weights"][0]["timings"][0]["samples_ms"].update(decode=[0.0]), "numbers above 0"),
        (lambda d: d["weights"][0]["timings"][0]["samples_ms"].pop("expanded"), "expanded is missing"),
        (lambda d: d["weights"][0]["timings"][0].update(launch={"warps": "two"}), "object of integers"),
        (lambda d: d["weights"][0]["timings"][1].update(rows=1), "more than 1"),
    ],
)
def test_a_file_that_lies_is_not_used(
    change: Callable[[dict[str, Any]], Any], said: str, tmp_path: Path, caplog: CaughtLogs
) -> None:
    document = json.loads(json.dumps(to_document({RECORD.key: RECORD}, PRINT)))
    change(document)
    with pytest.raises(FileFormatError, match=said):
        from_document(document, PRINT, where="gpu.json")
    (tmp_path / "gpu.json").write_text(json.dumps(document))
    with caplog.at_level(logging.WARNING, logger="bitplan"):
        assert read_crossovers(tmp_path / "gpu.json", PRINT) == {}
    assert "measured again" in caplog.text


def test_a_folder_that_cannot_be_written_is_said_and_no_error(tmp_path: Path, caplog: CaughtLogs) -> None:
    (tmp_path / "file").write_text("")
    table = CrossoverTable(tmp_path / "file" / "gpu.json", PRINT, faked)
    with caplog.at_level(logging.WARNING, logger="bitplan"):
        assert table.find_or_measure(weight(), None, 1) is not None
    assert "cannot be written" in caplog.text
    assert table.find("mxfp4", 48, 256) is not None


def test_a_measurement_that_failed_is_not_tried_again(tmp_path: Path) -> None:
    tries: list[int] = []

    def measure(*_: object, **_options: object) -> Crossover:
        tries.append(1)
        raise torch.OutOfMemoryError("no room")

    table = CrossoverTable(tmp_path / "gpu.json", PRINT, measure)
    assert table.find_or_measure(weight(), None, 1) is None
    assert table.find_or_measure(weight(), None, 1) is None
    assert tries == [1]
    assert "no room" in str(table.why_never("mxfp4", 48, 256))


def test_the_kernels_source_is_part_of_the_fingerprint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(crossover, "PACKAGE", tmp_path)
    monkeypatch.setattr(crossover, "GPU_SOURCES", ("kernel.py",))
    kernel = tmp_path / "kernel.py"
    kernel.write_text("a")
    before = crossover._source_hash()
    kernel.write_text('"""A docstring\n# of lines."""\n# a comment\n\na')
    assert crossover._source_hash() == before
    kernel.write_text("b")
    assert crossover._source_hash() != before


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_measuring_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITPLAN_CACHE_DIR", str(tmp_path))
    crossover._table_of.cache_clear()
    try:
        on_gpu = encode(torch.randn(1024, 2048), "mxfp4").to("cuda")
        table = crossover.crossovers_of(on_gpu.device)
        for rows in (1, 60):
            record = table.find_or_measure(on_gpu, fused_for("cuda"), rows)
        assert record is not None
        assert record.refused is None, record.refused
        assert [one.rows for one in record.timings] == [1, 64]
        assert all(
            len(samples) == 15 and min(samples) > 0 for one in record.timings for samples in one.samples_ms.values()
        )
        assert read_crossovers(table.path, table.fingerprint)[record.key] == record  # beside what is shipped
    finally:
        crossover._table_of.cache_clear()

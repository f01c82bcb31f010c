"""What `auto` picks, with its reason: the rule on a CPU, and on CUDA the record, the defaults and the refusals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bitplan.formats import Encoded
from bitplan.formats.codec import decode
from bitplan.formats.dispatch import decode as fast_decode
from bitplan.formats.dispatch import explain_decode
from bitplan.packed import crossover, product_strategy
from bitplan.packed.crossover import Crossover, CrossoverTable, Pick, Timing
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.product_strategy import LayerError, choose, compute_dtype
from bitplan.packed.products import cpu_fused, cpu_matmul
from bitplan.packed.products.fused import Launch, fused_for
from bitplan.packed.quant_linear import QuantLinear, warm_up
from bitplan.packed.tile_cache import TileCache
from tests.caught_logs import CaughtLogs
from tests.packed.linear_samples import FORMATS, exact_linear, normal, packed

needs_kernel = pytest.mark.skipif(cpu_matmul._why_not_here() is not None, reason=str(cpu_matmul._why_not_here()))


# ---- on a CPU --------------------------------------------------------------------------------------------------------


@needs_kernel
def test_auto_on_a_cpu_takes_the_four_bit_kernel_and_says_what_it_does_to_inputs() -> None:
    result = QuantLinear(packed("int4_g32"))
    for rows in (1, 16, 4096):
        picked = result.explain(rows)
        assert picked.strategy == "fused"
        assert "rounds each input row to 8-bit integers" in picked.reason
    assert result.explain(1, torch.float64).strategy == "decode"
    assert "float64" in result.explain(1, torch.float64).reason


@pytest.mark.parametrize("name", cpu_fused.FORMATS)
def test_auto_on_a_cpu_reads_packed_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_fused, "_takes_torch", lambda *_: False)
    result = QuantLinear(packed(name), cache=TileCache(10**6))
    for rows in (1, 4096):
        assert result.explain(rows).strategy == "fused"
        assert "keeps no copy" in result.explain(rows).reason
    assert "float64" in result.explain(1, torch.float64).reason


def test_auto_on_a_cpu_decodes_formats_without_a_kernel() -> None:
    result = QuantLinear(packed("int4_g64"))
    assert result.explain(1).strategy == "decode"
    assert "no int4_g64" in result.explain(1).reason
    result.cache = TileCache(48 * 256 * 4)
    assert result.explain(1).strategy == "tile_cache"
    result.cache = TileCache(48 * 256 * 4 - 1)
    assert result.explain(1).strategy == "decode"
    assert "no room" in result.explain(1).reason


def test_auto_fills_the_cache_and_leaves_those_that_came_first_in_it() -> None:
    cache = TileCache(48 * 256 * 4)
    first, second = (QuantLinear(packed("int4_g64", seed=seed), cache=cache) for seed in (0, 1))
    x = normal(2, 256)
    for _ in range(3):
        first(x)
        second(x)
    assert isinstance(first.last_pick, Pick)
    assert isinstance(second.last_pick, Pick)
    assert (first.last_pick.strategy, second.last_pick.strategy) == ("tile_cache", "decode")
    assert (cache.counters.hits, cache.counters.misses, cache.counters.evictions) == (2, 1, 0)


def test_a_pick_is_made_once_for_each_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitplan.packed import quant_linear

    asked: list[int] = []

    def counting(weight: PackedWeight, rows: int, *args: Any, **options: Any) -> Pick:
        asked.append(rows)
        return choose(weight, rows, *args, **options)

    monkeypatch.setattr(quant_linear, "choose", counting)
    result = QuantLinear(packed("mxfp4"))
    for rows in (1, 1, 2, 3, 4, 5, 8, 0):
        result(torch.ones(rows, 256))
    assert asked == [1, 2, 4, 8]
    result.load_state_dict(result.state_dict())  # another state: decided anew
    result(torch.ones(1, 256))
    assert asked == [1, 2, 4, 8, 1]


def test_explaining_a_strategy_asked_for_says_so_or_why_not() -> None:
    result = QuantLinear(packed("int4_g64"), strategy="eager")
    assert result.explain(4) == Pick("eager", "asked for")
    result.strategy = "fused"
    with pytest.raises(LayerError, match="cannot run"):
        result.explain(4)


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cpu", torch.bfloat16, torch.float32),
        ("cpu", torch.float16, torch.float32),
        ("cpu", torch.float32, torch.float32),
        ("cpu", torch.float64, torch.float64),
        ("cuda", torch.bfloat16, torch.bfloat16),
        ("cuda", torch.float32, torch.float32),
    ],
)
def test_no_sixteen_bit_products_on_a_cpu(device: str, dtype: torch.dtype, expected: torch.dtype) -> None:
    assert compute_dtype(torch.device(device), dtype) == expected


# ---- on CUDA, without one --------------------------------------------------------------------------------------------


class Kernel:
    name = "the kernel"

    def why_not(self, weight: Encoded, dtype: torch.dtype) -> str | None:
        return None if dtype == torch.bfloat16 else f"inputs are {dtype}"

    def prepare(self, weight: Encoded) -> Any:
        return None

    def launches(self, weight: Encoded, rows: int) -> Sequence[Launch]:
        return ()

    def run(self, x_MK: Tensor, weight: Encoded, prepared: Any, bias: Tensor | None, launch: Launch | None) -> Tensor:
        return functional.linear(x_MK, decode(weight), bias)

    def note(self, weight: Encoded) -> str:
        return "is a stand-in"


class Somewhere:
    """A PackedWeight as `choose` sees it, on a GPU that is not there."""

    device = torch.device("cuda:0")

    def __init__(self) -> None:
        self.encoded = packed("mxfp4", 64, 128)
        self.fmt, self.shape = self.encoded.fmt, self.encoded.shape


FAST = {"outputs": 64, "warps": 2}
TIMINGS = (
    Timing(1, {"fused": (1.0,), "decode": (3.0,), "expanded": (2.0,)}, FAST),
    Timing(128, {"fused": (9.0,), "decode": (3.0,), "expanded": (2.0,)}, FAST),
)


class Gpu:
    """Puts `choose` in front of a GPU: a kernel, a table, and room in a cache as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, record: Crossover | None) -> None:
        self.measured = 0
        self.capturing = False

        def measure(*_: object, **_options: object) -> Crossover:
            self.measured += 1
            if record is None:
                raise torch.OutOfMemoryError("the GPU is full")
            return record

        self.table = CrossoverTable(folder / "gpu.json", {"gpu": "fake"}, measure)
        monkeypatch.setattr(product_strategy, "fused_for", lambda _device, _input=None: Kernel())
        monkeypatch.setattr(product_strategy, "crossovers_of", lambda _: self.table)
        monkeypatch.setattr(product_strategy, "is_capturing", lambda _: self.capturing)

    def choose(self, rows: int, way: str = "auto", *, room: bool = False, **options: Any) -> Pick:
        cache: Any = SimpleNamespace(has_room=lambda *_: room, budget_bytes=1)
        weight: Any = Somewhere()
        dtype = options.pop("dtype", torch.bfloat16)
        return choose(weight, rows, dtype, way, cache, where="up", **{"measure": True, **options})


def test_auto_measures_once_and_goes_by_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = Gpu(monkeypatch, tmp_path, Crossover("mxfp4", 64, 128, TIMINGS))
    assert (gpu.choose(1).strategy, gpu.choose(1).launch) == ("fused", FAST)
    assert gpu.choose(2).strategy == "decode"
    assert gpu.choose(2, room=True).strategy == "tile_cache"
    assert gpu.measured == 3  # what has no timing of its own row count is measured
    assert "measured for 128 rows" in gpu.choose(2).reason


def test_explaining_and_capturing_measure_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = Gpu(monkeypatch, tmp_path, Crossover("mxfp4", 64, 128, TIMINGS))
    assert gpu.choose(32, measure=False) == Pick(
        "fused", "default for up to 32 rows: not measured, which bitplan.warm_up does"
    )
    assert gpu.choose(33, measure=False).strategy == "decode"
    assert gpu.choose(33, measure=False, room=True).strategy == "tile_cache"
    gpu.capturing = True
    assert "graph is being captured" in gpu.choose(32).reason
    assert gpu.choose(33, room=True).strategy == "decode"  # a tile may be gone when the graph is replayed
    assert gpu.measured == 0
    with pytest.raises(LayerError, match="CUDA graph"):
        gpu.choose(1, "tile_cache")


def test_a_measurement_that_failed_falls_to_the_default_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = Gpu(monkeypatch, tmp_path, None)
    assert gpu.choose(32).strategy == "fused"
    assert "out of memory" in gpu.choose(33).reason
    assert gpu.measured == 1


def test_inputs_the_kernel_cannot_take_need_no_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = Gpu(monkeypatch, tmp_path, None)
    assert gpu.choose(1, dtype=torch.float16) == Pick(
        "decode", "not fused: inputs are torch.float16; no room in a tile cache"
    )
    assert gpu.choose(1, dtype=torch.float16, room=True).strategy == "tile_cache"
    assert gpu.measured == 0
    with pytest.raises(LayerError, match="inputs are torch"):
        gpu.choose(1, "fused", dtype=torch.float16)


def test_a_kernel_found_wrong_is_refused_also_when_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = Gpu(monkeypatch, tmp_path, Crossover("mxfp4", 64, 128, TIMINGS, refused="3 results differ"))
    assert gpu.choose(1).strategy == "decode"
    assert "3 results differ" in gpu.choose(1).reason
    with pytest.raises(LayerError, match="3 results differ"):
        gpu.choose(1, "fused")


def test_fused_asked_for_uses_the_measured_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = Gpu(monkeypatch, tmp_path, Crossover("mxfp4", 64, 128, TIMINGS))
    assert gpu.choose(1, "fused").launch is None  # asking by name measures nothing
    gpu.choose(1)
    assert gpu.choose(1, "fused").launch == FAST


def test_inputs_in_fp8_run_on_fp8_units_where_that_is_faster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusal: list[str | None] = [None]
    monkeypatch.setattr(product_strategy, "why_no_fp8", lambda *_: refusal[0])
    times = {"fused": (1.0,), "decode": (3.0,), "expanded": (2.0,)}
    record = Crossover("mxfp4", 64, 128, tuple(Timing(rows, times, FAST) for rows in (1, 64)))
    gpu = Gpu(monkeypatch, tmp_path, record)
    fp8 = {"measure": False, "input": "fp8_e4m3_row"}
    assert [gpu.choose(rows, **fp8).strategy for rows in (32, 33)] == ["fused", "fp8"]  # by the rule
    assert gpu.choose(33, room=True, **fp8).strategy == "tile_cache"
    measured: list[int] = []

    def measure(_weight: Encoded, rows: int) -> Timing | str:
        measured.append(rows)
        return Timing(rows, {"fp8": (0.5 if rows == 64 else 1.5,)})

    monkeypatch.setattr(crossover, "measure_fp8", measure)
    for _ in range(2):
        assert [gpu.choose(rows, input="fp8_e4m3_row").strategy for rows in (1, 64)] == ["fused", "fp8"]
    assert measured == [1, 64]
    assert "fp8 0.5000 ms" in gpu.choose(64, input="fp8_e4m3_row").reason
    again = CrossoverTable(gpu.table.path, gpu.table.fingerprint)  # as another process reads it
    assert again.find("mxfp4", 64, 128) == gpu.table.find("mxfp4", 64, 128)
    refusal[0] = "a row's scales span too much"
    assert gpu.choose(64, input="fp8_e4m3_row").strategy == "fused"
    with pytest.raises(
        LayerError, match=r"'fp8' cannot run for mxfp4 of shape \(64, 128\) on cuda:0: a row's scales span"
    ):
        gpu.choose(64, "fp8", input="fp8_e4m3_row")


def test_fp8_is_not_used_where_its_results_were_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: CaughtLogs
) -> None:
    monkeypatch.setattr(product_strategy, "why_no_fp8", lambda *_: None)
    monkeypatch.setattr(crossover, "measure_fp8", lambda *_: "7 of 8 results differ")
    gpu = Gpu(monkeypatch, tmp_path, Crossover("mxfp4", 64, 128, TIMINGS))
    assert gpu.choose(128, input="fp8_e4m3_row").strategy == "decode"
    assert "products of mxfp4 in FP8 are wrong and will not be used: 7 of 8" in caplog.text


def test_what_is_decoded_runs_in_fp8_where_that_was_not_measured() -> None:
    record = Crossover("mxfp4", 64, 128, TIMINGS)
    assert crossover.pick(record, 128, room=False, in_fp8=True).strategy == "fp8"
    assert crossover.pick(record, 128, room=False).strategy == "decode"
    assert crossover.pick(record, 1, room=False, in_fp8=True).strategy == "fused"


def test_a_device_without_kernels_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Somewhere, "device", torch.device("mps"))
    weight: Any = Somewhere()
    assert choose(weight, 1, torch.float16, "auto", None, where="up") == Pick(
        "decode", "not fused: there is no fused kernel for mps; no room in a tile cache"
    )


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture
def _own_cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("BITPLAN_CACHE_DIR", str(tmp_path))
    crossover._table_of.cache_clear()
    yield
    crossover._table_of.cache_clear()


@pytest.mark.gpu
@pytest.mark.usefixtures("_own_cache_dir")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("way", ["eager", "fused", "tile_cache", "decode"])
@pytest.mark.parametrize("rows", [1, 5, 64, 300])
def test_every_strategy_on_a_gpu(name: str, way: str, rows: int) -> None:
    one, x, bias = packed(name, 160, 512), normal(rows, 512).bfloat16(), normal(160, seed=2)
    layer = QuantLinear(one, bias, strategy=way, cache=TileCache(10**8)).cuda()
    on_gpu = x.cuda().requires_grad_()
    y = layer(on_gpu)
    expected, size = exact_linear(x, one, bias)
    # Decoded weights and the result are rounded to bfloat16, unit roundoff 2^-8.
    assert bool(((y.detach().cpu().double() - expected).abs() <= 2.0**-8 * expected.abs() + 2.0**-8 * size).all())
    assert (y.detach().cpu().double() - expected).norm() / expected.norm() < 2.0**-7
    grad = normal(rows, 160, seed=4).bfloat16()
    y.backward(grad.cuda())
    exact = grad.double() @ decode(one).double()
    assert on_gpu.grad is not None
    assert (on_gpu.grad.cpu().double() - exact).norm() / exact.norm() < 2.0**-7


@pytest.mark.gpu
@pytest.mark.usefixtures("_own_cache_dir")
def test_auto_on_a_gpu_answers_by_a_rule_and_by_measurements_after_warming_up() -> None:
    one = packed("mxfp4", 1024, 2048)
    layer = QuantLinear(one).cuda()
    for reason in ("not measured", "measured for"):
        for rows in (1, 4096):
            x = normal(rows, 2048).bfloat16()
            with torch.no_grad():
                y = layer(x.cuda())
            expected, _ = exact_linear(x, one)
            assert (y.cpu().double() - expected).norm() / expected.norm() < 2.0**-7
            assert layer.last_pick is not None
            assert reason in layer.last_pick.reason
        warm_up(layer, (1, 4096))
    assert layer.explain(1).strategy == "fused"  # 4-bit weights at one row: bytes decide


@pytest.mark.gpu
@pytest.mark.usefixtures("_own_cache_dir")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_bound_decoded_products_on_a_gpu_see_every_change(
    name: str, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bias = normal(160, seed=2).bfloat16() if with_bias else None
    layer = QuantLinear(packed(name, 160, 512), bias, strategy="decode").cuda()
    x = normal(2, 150, 512).bfloat16().cuda()
    with torch.no_grad():
        calls: list[Tensor] = []
        forward = layer._forward
        assert torch.equal(layer(x), forward(x))
        monkeypatch.setattr(layer, "_forward", lambda x: calls.append(x) or forward(x))
        for again in (x, x[:, :140], x[0].repeat(2, 1)[:290], x.transpose(0, 1)):  # other lengths and strides
            assert torch.equal(layer(again), forward(again))
        is_bound = explain_decode(layer.weight.encoded, torch.bfloat16).implementation == "triton"
        assert len(calls) == (0 if is_bound else 4)
        layer.weight.data.copy_(packed(name, 160, 512, seed=5).data)
        assert torch.equal(layer(x), forward(x))
        assert len(calls) == (0 if is_bound else 5)  # it decodes the bytes as they are
        with torch.autocast("cuda", torch.float16):
            assert layer(x).dtype == torch.float16
    with pytest.raises(LayerError, match="512 features"):
        layer(x[..., :500])
    given = x.clone().requires_grad_()
    layer(given).sum().backward()
    assert given.grad is not None


@pytest.mark.gpu
@pytest.mark.usefixtures("_own_cache_dir")
@pytest.mark.parametrize("way", ["auto", "fused", "decode", "eager"])
def test_a_captured_graph_replays_the_product(way: str) -> None:
    one = packed("mxfp4", 160, 512)
    layer = QuantLinear(one, strategy=way).cuda()
    x = normal(4, 512).bfloat16().cuda()
    side = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        layer(x)  # warm
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(normal(4, 512, seed=9).bfloat16())
    graph.replay()
    expected, _ = exact_linear(x, one.to("cpu"))
    assert (y.cpu().double() - expected).norm() / expected.norm() < 2.0**-7


@pytest.mark.gpu
def test_tiles_made_on_one_stream_are_safe_on_another() -> None:
    cache = TileCache(10**9)
    weight = PackedWeight(packed("mxfp4", 2048, 4096)).cuda()
    expected = fast_decode(weight.encoded, torch.bfloat16)
    for _ in range(10):
        cache.clear()
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(first):
            list(cache.pieces(weight, torch.bfloat16))
        with torch.cuda.stream(second):
            result = torch.cat([values for _, values in cache.pieces(weight, torch.bfloat16)])
        torch.cuda.synchronize()
        assert torch.equal(result, expected)


@pytest.mark.gpu
def test_moving_between_devices_drops_tiles_and_keeps_results() -> None:
    cache = TileCache(10**8)
    layer = nn.Sequential(QuantLinear(packed("int8_row"), strategy="tile_cache", cache=cache))
    x = normal(3, 256)
    expected = layer(x)
    layer.cuda()
    assert cache.counters.tiles == 0
    assert torch.allclose(layer(x.cuda()).cpu(), expected, atol=1e-3)
    assert fused_for("cuda") is not None

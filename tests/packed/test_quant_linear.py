"""QuantLinear: every strategy against the decoded weight in float64, gradients, autocast, states, and refusals."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bitplan.base.errors import FormatError
from bitplan.formats import Encoded
from bitplan.formats.codec import decode, encode
from bitplan.packed import linear_operator as operator
from bitplan.packed import product_strategy, quant_linear
from bitplan.packed.product_strategy import LayerError
from bitplan.packed.products import cpu_matmul
from bitplan.packed.products.cpu_fused import FusedOnCpu
from bitplan.packed.products.cpu_matmul import four_bit_bound
from bitplan.packed.products.fused import TritonOnCuda
from bitplan.packed.quant_linear import QuantLinear
from bitplan.packed.tile_cache import TileCache
from tests.crosses import few
from tests.packed.linear_samples import FORMATS, ROUNDING, exact_linear, normal, packed

EXACT = ("eager", "decode", "tile_cache")  # strategies that are F.linear on decoded weights
needs_kernel = pytest.mark.skipif(cpu_matmul._why_not_here() is not None, reason=str(cpu_matmul._why_not_here()))


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces, also for the small matrices of tests."""
    monkeypatch.setattr(cpu_matmul, "piece_bytes", lambda: 20 * 256 * 4)


def layer(name: str, way: str, bias: Tensor | None = None, **shape: int) -> QuantLinear:
    cache = TileCache(10**6, tile_bytes=20 * 256 * 4) if way == "tile_cache" else None
    return QuantLinear(packed(name, **shape), bias, strategy=way, cache=cache)


# ---- the product -----------------------------------------------------------------------------------------------------


@pytest.mark.cross("name", FORMATS)
@pytest.mark.cross("way", EXACT)
@pytest.mark.cross("cols", [256, 100])
def test_each_strategy_gives_the_product_of_the_decoded_weight(name: str, way: str, cols: int) -> None:
    one, x, bias = packed(name, cols=cols), normal(5, cols), normal(48, seed=2)
    result = QuantLinear(one, bias, strategy=way, cache=TileCache(10**6, tile_bytes=20 * cols * 4))
    expected, size = exact_linear(x, one, bias)
    for _ in range(2):  # the second time from what was kept
        off = (result(x).double() - expected).abs()
        assert bool((off <= (cols + 1) * 2.0**-24 * size).all())
    assert result.last_pick is not None
    assert result.last_pick.strategy == way


@pytest.mark.parametrize("way", EXACT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_computed_wide_and_rounded_once(way: str, dtype: torch.dtype) -> None:
    result, x = layer("int8_row", way, normal(48, seed=2)), normal(5, 256).to(dtype)
    y = result(x)
    expected, size = exact_linear(x, result.weight.encoded, result.bias)
    assert y.dtype == dtype
    sums = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    assert bool(((y.double() - expected).abs() <= ROUNDING[dtype] * expected.abs() + 257 * sums * size).all())


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cols", [256, 100])
def test_torch_s_four_bit_kernel_stays_within_its_bound(dtype: torch.dtype, cols: int) -> None:
    one, x, bias = packed("int4_g32", cols=cols), normal(5, cols).to(dtype), normal(48, seed=2)
    y = QuantLinear(one, bias, strategy="fused")(x)
    expected, size = exact_linear(x, one, bias)
    bound = four_bit_bound(x.double(), decode(one).double()) + 257 * 2.0**-24 * size
    assert y.dtype == dtype
    assert bool(((y.double() - expected).abs() <= bound + ROUNDING[dtype] * (expected.abs() + bound)).all())


@pytest.mark.cross("shape", [(256,), (1, 256), (2, 3, 256), (2, 1, 3, 256), (0, 256), (2, 0, 256)])
@pytest.mark.cross("way", ["auto", *EXACT])
def test_any_leading_axes(shape: tuple[int, ...], way: str) -> None:
    result, x = layer("mxfp4", way, normal(48, seed=2)), normal(*shape)
    assert torch.allclose(result(x), functional.linear(x, decode(result.weight.encoded), result.bias), atol=1e-4)


@pytest.mark.parametrize("shape", [(256,), (2, 3, 256), (0, 256)])
def test_any_leading_axes_through_the_fused_kernel(shape: tuple[int, ...]) -> None:
    assert layer("int4_g32", "fused")(normal(*shape)).shape == (*shape[:-1], 48)


def test_inputs_need_not_be_contiguous() -> None:
    """The same numbers up to the order of sums, which a BLAS may choose by strides."""
    result = layer("int8_row", "decode")
    for x in (normal(256, 6).T, normal(5, 512)[:, ::2]):
        torch.testing.assert_close(result(x), result(x.contiguous()), rtol=1e-5, atol=1e-4)


def test_pieces_are_all_that_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    right = operator.decoded_pieces

    def watched(*args: object) -> object:
        for rows, values in right(*args):  # type: ignore[arg-type]
            seen.append(tuple(values.shape))
            yield rows, values

    monkeypatch.setattr(operator, "decoded_pieces", watched)
    result, x = layer("mxfp4", "decode"), normal(5, 256).requires_grad_()
    result(x).sum().backward()
    assert seen == [(16, 256)] * 3 * 2
    assert result.weight.derived_nbytes == 0


def test_eager_expands_once_and_keeps_it() -> None:
    result = layer("mxfp4", "eager")
    result(normal(2, 256))
    stored = result.weight._derived["expanded", torch.float32]
    result(normal(2, 256).bfloat16())  # float32 as well, on a CPU
    assert result.weight._derived == {("expanded", torch.float32): stored}
    assert result.weight.derived_nbytes == 48 * 256 * 4


def test_tiles_are_shared_by_layers_and_counted() -> None:
    cache = TileCache(10**6)
    first, second = (QuantLinear(packed("mxfp4", seed=s), strategy="tile_cache", cache=cache) for s in (0, 1))
    for _ in range(3):
        first(normal(1, 256))
        second(normal(1, 256))
    assert (cache.counters.misses, cache.counters.hits, cache.counters.tiles) == (2, 4, 2)


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.cross("name", FORMATS)
@pytest.mark.cross("way", EXACT)
def test_gradients_are_those_through_the_decoded_weight(name: str, way: str) -> None:
    result = layer(name, way, normal(48, seed=2))
    x = normal(3, 4, 256).double().requires_grad_()
    weight, bias = decode(result.weight.encoded).double(), result.bias.detach().double().requires_grad_()
    twin = x.detach().clone().requires_grad_()
    target = normal(3, 4, 48, seed=3).double()
    (result(x) * target).sum().backward()
    (functional.linear(twin, weight, bias) * target).sum().backward()
    assert torch.allclose(x.grad, twin.grad, rtol=1e-12, atol=1e-12)
    assert result.bias.grad.dtype == torch.float32
    assert torch.allclose(result.bias.grad.double(), bias.grad, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("way", few(EXACT, 2))
def test_gradcheck_first_and_second(way: str) -> None:
    result = QuantLinear(
        packed("int8_row", 5, 8), normal(5).double(), strategy=way, cache=TileCache(10**6, tile_bytes=1)
    ).double()
    x = normal(3, 8).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda one: result(one).square(), (x,))
    assert torch.autograd.gradgradcheck(lambda one: result(one).square(), (x,))


@pytest.mark.parametrize("learns", [False, True])
def test_where_nothing_is_learned_the_product_is_called_directly(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    result = layer("int4_g32", "decode")
    monkeypatch.setattr(result, "_operator", None)
    with torch.set_grad_enabled(not learns):
        assert not result(normal(3, 256).requires_grad_(learns)).requires_grad


@needs_kernel
def test_the_gradient_of_the_fused_product_is_exact() -> None:
    result, x = layer("int4_g32", "fused"), normal(3, 256).requires_grad_()
    grad = normal(3, 48, seed=3)
    result(x).backward(grad)
    expected = grad.double() @ decode(result.weight.encoded).double()
    assert torch.allclose(x.grad.double(), expected, rtol=1e-5, atol=1e-4)


def test_gradients_of_sixteen_bit_inputs_have_their_type() -> None:
    result, x = layer("mxfp4", "decode"), normal(3, 256).bfloat16().requires_grad_()
    result(x).sum().backward()
    expected = decode(result.weight.encoded).double().sum(dim=0).expand(3, -1)
    assert x.grad.dtype == torch.bfloat16
    assert torch.allclose(x.grad.double(), expected, rtol=2.0**-8, atol=1e-2)


def test_only_what_needs_a_gradient_gets_one() -> None:
    result, x = layer("mxfp4", "decode", normal(48)), normal(3, 256)
    assert not list(result.weight.parameters())
    with torch.no_grad():
        assert result(x).grad_fn is None
    result.bias.requires_grad_(False)
    assert result(x).grad_fn is None
    assert layer("mxfp4", "decode")(x.requires_grad_()).grad_fn is not None


def test_a_weight_that_changed_before_backward_is_an_error() -> None:
    result, x = layer("mxfp4", "decode"), normal(3, 256).requires_grad_()
    y = result(x).sum()
    result.load_state_dict(layer("mxfp4", "decode").state_dict())
    with pytest.raises(LayerError, match="between forward and backward"):
        y.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    model = nn.Sequential(layer("mxfp4", "decode", normal(48)), nn.GELU(), nn.Linear(48, 3))
    grads = []
    for run in (model, lambda one: checkpoint(model, one, use_reentrant=reentrant)):
        x = normal(4, 256).requires_grad_()
        model.zero_grad()
        run(x).square().sum().backward()
        grads.append((x.grad, model[0].bias.grad.clone()))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


class Adapter(nn.Module):
    """LoRA: a packed base that stands still, and a low-rank sum that learns."""

    def __init__(self, base: QuantLinear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


@pytest.mark.parametrize("name", ["mxfp4", pytest.param("int4_g32", marks=pytest.mark.long)])
def test_adapters_train_over_a_packed_base(name: str) -> None:
    torch.manual_seed(0)
    bases = [QuantLinear(packed(name, 64, 64)), QuantLinear(packed(name, 8, 64, seed=3))]
    model = nn.Sequential(Adapter(bases[0]), nn.GELU(), Adapter(bases[1]))
    before = [one.base.weight.encoded.to_bytes() for one in model if isinstance(one, Adapter)]
    x, target = normal(64, 64), normal(64, 8, seed=5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert model[0].up.weight.abs().sum() > 0  # the gradient went through the second packed base to the first adapter
    assert [one.base.weight.encoded.to_bytes() for one in model if isinstance(one, Adapter)] == before


# ---- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_linear_does_and_never_multiplies_in_sixteen_bits(dtype: torch.dtype) -> None:
    result, x = layer("mxfp4", "decode", normal(48)), normal(5, 256).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):  # a bfloat16 product here would be a warning, which is an error
        y = result(x)
        y.float().sum().backward()
    assert y.dtype == dtype
    assert x.grad.dtype == torch.float32
    rounded = x.detach().to(dtype)
    expected, size = exact_linear(rounded, result.weight.encoded, result.bias)
    off = (y.detach().double() - expected).abs()
    assert bool((off <= ROUNDING[dtype] * expected.abs() + 257 * 2.0**-24 * size).all())
    with torch.autocast("cpu", dtype=dtype):
        assert result(x.detach().double()).dtype == torch.float64


# ---- states and copies -----------------------------------------------------------------------------------------------


def test_state_round_trip_gives_the_same_results() -> None:
    source, target = layer("nvfp4", "decode", normal(48)), QuantLinear(packed("nvfp4", seed=8), torch.zeros(48))
    assert set(source.state_dict()) == {"bias", "weight.data", "weight.scales", "weight.base", "weight._extra_state"}
    x = normal(2, 256)
    target.strategy = "eager"
    target(x)  # an expansion that must not survive
    target.load_state_dict(source.state_dict())
    assert torch.allclose(target(x), source(x), atol=1e-5)


def test_states_of_other_layers_are_refused_by_name() -> None:
    model = nn.ModuleDict({"up": layer("mxfp4", "decode")})
    with pytest.raises(RuntimeError, match=r"up\.weight: expected mxfp4 .* int8_row"):
        model.load_state_dict(nn.ModuleDict({"up": layer("int8_row", "decode")}).state_dict())
    with pytest.raises(RuntimeError, match=r"up\.weight: the state holds a float weight"):
        model.load_state_dict(nn.ModuleDict({"up": nn.Linear(256, 48, bias=False)}).state_dict())


def test_a_copy_is_independent_and_keeps_its_settings() -> None:
    result = layer("mxfp4", "tile_cache", normal(48))
    x = normal(2, 256)
    expected = result(x)
    twin = copy.deepcopy(result)
    assert twin.cache is result.cache
    assert twin.strategy == "tile_cache"
    result.load_state_dict(QuantLinear(packed("mxfp4", seed=9), normal(48)).state_dict())
    assert torch.equal(twin(x), expected)
    assert not torch.equal(result(x), expected)


def test_moving_a_layer_keeps_its_results() -> None:
    result, x = layer("mxfp4", "eager", normal(48)), normal(2, 256)
    expected = result(x)
    result.weight._apply(torch.clone)
    assert torch.equal(result(x), expected)
    result.half()  # the bias is cast, codes and scales are not
    assert result.bias.dtype == torch.float16
    assert torch.allclose(result(x), expected, atol=1e-2)


def test_from_linear_keeps_bias_mode_and_options() -> None:
    linear = nn.Linear(256, 48).eval()
    result = QuantLinear.from_linear(linear, "mxfp4", scale_rule="mse", strategy="decode", name="up")
    assert result.bias is linear.bias
    assert not result.training
    expected = encode(linear.weight, "mxfp4", scale_rule="mse")
    assert result.weight.encoded.to_bytes() == expected.to_bytes()
    with pytest.raises(FormatError, match=r"up\.weight: mxfp4 has blocks of 32"):
        QuantLinear.from_linear(nn.Linear(100, 4), "mxfp4", name="up")
    assert QuantLinear.from_linear(nn.Linear(100, 4), "mxfp4", pad="zero")(normal(2, 100)).shape == (2, 4)


def test_compiled_models_run_the_layer_as_it_is() -> None:
    model = nn.Sequential(nn.ReLU(), layer("mxfp4", "decode", normal(48)), nn.ReLU())
    x = normal(3, 256)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="eager")(x), model(x))


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "bias", "said"),
    [
        (encode(torch.ones(4, 256), "int8"), None, "int8 of shape"),
        (encode(torch.ones(4, 256), "bfloat16"), None, "plain cast"),
        (encode(torch.ones(128, 128), "fp8_e4m3_b128"), None, "fp8_e4m3_b128"),
        (encode(torch.ones(2, 4, 64), "mxfp4"), None, r"shape \(2, 4, 64\)"),
        (encode(torch.ones(4, 64), "mxfp4"), torch.ones(3), r"bias must have shape \(4,\)"),
        (
            torch.ones(4, 64),
            None,
            "must be an Encoded or a PackedWeight, got a Tensor; pack it first with bitplan.encode",
        ),
    ],
)
def test_weights_that_are_no_packed_matrix_are_refused(weight: Encoded, bias: Tensor | None, said: str) -> None:
    with pytest.raises(LayerError, match=said):
        QuantLinear(weight, bias)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.ones(2, 255), r"256 features, got \(2, 255\)"),
        (torch.ones(()), "256 features"),
        (torch.ones(2, 256, dtype=torch.int32), "got torch.int32"),
        (torch.ones(2, 256, dtype=torch.float8_e4m3fn), "float8"),
        (torch.ones(2, 256, device="meta"), "lies on meta"),
        (torch.ones(2, 256).to_sparse(), "must be a dense tensor, got torch.sparse_coo; call to_dense"),
        ("text", "QuantLinear: the input must be a torch.Tensor, got a str"),
        (np.ones((2, 256)), "got a ndarray"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x: Tensor, said: str) -> None:
    with pytest.raises(LayerError, match=said):
        layer("mxfp4", "decode")(x)


def test_a_strategy_that_cannot_run_is_an_error_and_not_another_strategy() -> None:
    result = layer("int4_g64", "fused")
    with pytest.raises(LayerError, match=r"'fused' cannot run for int4_g64 .* set strategy='auto'"):
        result(normal(2, 256))
    result.strategy = "tile_cache"
    with pytest.raises(LayerError, match=r"needs a cache with a budget.*TileCache\(budget_bytes\)"):
        result(normal(2, 256))
    result.cache = TileCache()
    with pytest.raises(LayerError, match="needs a cache with a budget"):
        result(normal(2, 256))
    with pytest.raises(LayerError, match="did you mean 'eager'"):
        result.strategy = "eagre"
    with pytest.raises(LayerError, match="no strategy 'fast'"):
        QuantLinear(packed("mxfp4"), strategy="fast")


# ---- the Triton kernel, under its interpreter ------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_the_triton_kernel_behind_the_same_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    kernel = TritonOnCuda()
    for module in (product_strategy, quant_linear, operator):
        monkeypatch.setattr(module, "fused_for", lambda _device, _input=None: kernel)
    one, x, bias = packed(name, 32, 128), normal(3, 128).bfloat16(), normal(32, seed=2).half()
    result = QuantLinear(one, bias, strategy="fused")
    reason = kernel.why_not(one, torch.bfloat16)
    if reason is not None and "run on CUDA" in reason:
        pytest.skip(reason)
    y = result(x.requires_grad_())
    expected, size = exact_linear(x, one, bias)
    # Decoded codes are rounded to bfloat16 in the kernel, as the result is.
    assert bool(((y.detach().double() - expected).abs() <= 2.0**-8 * expected.abs() + 2.0**-8 * size).all())
    assert (y.detach().double() - expected).norm() / expected.norm() < 2.0**-7
    y.sum().backward()
    assert x.grad is not None
    assert result.weight.derived_nbytes > 0


def test_the_cpu_kernel_is_the_default_on_a_cpu() -> None:
    assert isinstance(product_strategy.fused_for("cpu"), FusedOnCpu)
    assert product_strategy.fused_for("mps") is None


@pytest.mark.parametrize("way", EXACT)
def test_what_inference_mode_kept_serves_training(way: str) -> None:
    result, x = layer("mxfp4", way, normal(48)), normal(3, 256).requires_grad_()
    with torch.inference_mode():
        expected = result(x)
    result(x).sum().backward()
    assert torch.equal(result(x), expected)
    assert x.grad is not None


# ---- copies, parts that are set, transforms --------------------------------------------------------------------------


def test_a_copy_of_a_layer_that_ran_reads_its_own_bytes_and_can_be_pickled() -> None:
    original, x = layer("int8_row", "auto"), normal(2, 256)
    before = original(x)
    twins = copy.deepcopy(original), pickle.loads(pickle.dumps(original))
    original.weight.replace(packed("int8_row", seed=7))
    assert not torch.equal(original(x), before)
    assert all(torch.equal(twin(x), before) for twin in twins)


@pytest.mark.parametrize("way", ["eager", "tile_cache", "auto"])
def test_a_part_of_the_weight_that_is_set_counts(way: str) -> None:
    changed, other, x = layer("int8_row", way), packed("int8_row", seed=7), normal(2, 256)
    changed(x)
    assert other.scales is not None
    changed.weight.data, changed.weight.scales = other.data, other.scales
    cache = TileCache(10**6) if way == "tile_cache" else None
    assert torch.equal(changed(x), QuantLinear(other, strategy=way, cache=cache)(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, as it enters a dual level
def test_transforms_that_a_kernel_would_drop_are_refused() -> None:
    one, x = layer("int8_row", "auto"), normal(2, 256)
    one(x)
    with forward_ad.dual_level(), pytest.raises(LayerError, match="forward-mode derivatives do not go through"):
        one(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("grad", [False, True])
def test_vmap_gives_the_products_of_all_samples(grad: bool) -> None:
    one, x = layer("int8_row", "auto", normal(48, seed=2)), normal(3, 2, 256)
    with torch.set_grad_enabled(grad):
        expected = torch.stack([one(sample) for sample in x])
        torch.testing.assert_close(torch.func.vmap(one)(x), expected)
        torch.testing.assert_close(torch.func.vmap(one, in_dims=1)(x.transpose(0, 1)), expected)


def test_other_transforms_and_mapped_biases_are_refused_by_name() -> None:
    one, x = layer("int8_row", "auto", normal(48, seed=2)), normal(3, 2, 256)
    with pytest.raises(LayerError, match=r"torch\.func\.grad does not go through packed layers"):
        torch.func.grad(lambda sample: one(sample).sum())(x[0])
    with pytest.raises(LayerError, match="its weight and bias may not"):
        torch.func.vmap(lambda bias: torch.func.functional_call(one, {"bias": bias}, (x[0],)))(normal(3, 48))


def test_what_peft_prints_of_a_layer_names_our_function() -> None:
    assert "bitplan.peft.get_peft_model" in repr(layer("int8_row", "auto"))


def test_a_decoded_call_costs_the_host_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python functions of a call whose decoder is bound, as on a GPU; torch's own layer takes five."""
    numbers = torch.randn(64, 64)

    def bind(_weight: Any, _dtype: torch.dtype, compute: Any, bias: Any) -> Any:
        return lambda x, _shape=None: compute(x, numbers, bias)

    monkeypatch.setattr(quant_linear, "bind_with_numbers", bind)
    layer = QuantLinear(encode(numbers, "int8_row"), strategy="decode")
    calls: list[str] = []

    def watch(frame: Any, event: str, _argument: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    x = torch.randn(2, 150, 64)
    with torch.no_grad():
        for given in (x, x):  # bound, then made quick for all inputs of about as many rows
            layer(given)
        sys.setprofile(watch)
        try:
            y = layer(x[:, :140])
        finally:
            sys.setprofile(None)
    assert torch.equal(y, torch.nn.functional.linear(x[:, :140].contiguous(), numbers))
    assert "_forward" not in calls
    assert len(calls) <= 6, calls

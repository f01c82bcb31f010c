"""WeightStore: versions are right, made once per master state, never stale, never torn."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor, nn

from bitplan.base.errors import FormatError, NonFiniteError, StoreError
from bitplan.files.models import weight_store
from bitplan.files.models.weight_store import ActivationObserver, WeightStore
from bitplan.formats import Encoded, get_format
from bitplan.formats.codec import decode, encode
from tests.crosses import few
from tests.formats.samples import SMALL_BLOCKS

FORMATS = [fmt.name for fmt in SMALL_BLOCKS]
SCALED = [fmt.name for fmt in SMALL_BLOCKS if not fmt.is_cast]


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_bytes(one: Encoded, two: Encoded) -> bool:
    return one.fmt.name == two.fmt.name and one.shape == two.shape and one.to_bytes() == two.to_bytes()


@pytest.fixture
def encodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formats that were encoded, in order."""
    done: list[str] = []

    def counted(x: Tensor, fmt: object, **options: object) -> Encoded:
        done.append(get_format(fmt).name)  # type: ignore[arg-type]
        return encode(x, fmt, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(weight_store, "encode", counted)
    return done


# ---- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", few(FORMATS, 14))
def test_morph_is_encode_and_happens_once(fmt: str, encodes: list[str]) -> None:
    master = sample(4, 128)
    store = WeightStore(master)
    assert store.active(fmt) is None
    version = store.morph(fmt)
    assert same_bytes(version, encode(master, fmt))
    assert store.morph(get_format(fmt)) is version
    assert store.active(fmt) is version
    assert torch.equal(store.simulate(fmt), decode(version))
    assert encodes == [fmt]


def test_nothing_is_encoded_until_asked_for(encodes: list[str]) -> None:
    store = WeightStore(sample(4, 32))
    store.update(sample(4, 32, seed=1))
    assert store.versions == {}
    assert encodes == []


def test_each_version_owns_its_scale() -> None:
    """The original shares one scale: int8 first, then int4 clips most weights."""
    store = WeightStore(sample(64, 64))
    assert store.morph("int8").scales != store.morph("int4").scales
    assert same_bytes(store.morph("int4"), encode(store.master, "int4"))


def test_force_morph_encodes_again(encodes: list[str]) -> None:
    store = WeightStore(sample(4, 32))
    first = store.morph("int8")
    second = store.force_morph("int8")
    assert second is not first
    assert same_bytes(first, second)
    assert store.active("int8") is second
    assert encodes == ["int8", "int8"]


def test_versions_cannot_be_written() -> None:
    store = WeightStore(sample(4, 32))
    store.morph("int8")
    with pytest.raises(TypeError):
        store.versions["int8"] = store.morph("int8")  # type: ignore[index]


def test_options_are_remembered_and_a_change_of_them_makes_the_version_anew(encodes: list[str]) -> None:
    master = sample(8, 64)
    store = WeightStore(master)
    plain = store.morph("int4")
    clipped = store.morph("int4", scale_rule="mse")
    assert not same_bytes(plain, clipped)
    assert store.morph("int4") is clipped
    assert store.morph("int4", scale_rule=None) is clipped
    assert store.morph("int4", scale_rule="mse", pad="zero") is clipped, "pad cannot change a version that exists"
    store.update(lambda w: w * 2)
    assert same_bytes(store.morph("int4"), encode(master, "int4", scale_rule="mse"))
    assert same_bytes(store.morph("int4", scale_rule="absmax"), encode(master, "int4"))
    assert len(encodes) == 4
    assert store.recipe("int4") == {"scale_rule": "absmax"}
    importance = torch.arange(64.0)
    store.morph("int4", scale_rule="mse")
    weighted = store.morph("int4", importance=importance)
    assert same_bytes(weighted, encode(master, "int4", scale_rule="mse", importance=importance))
    assert store.morph("int4", importance=importance.clone()) is weighted


def test_a_scale_given_by_hand_stays_until_a_rule_is_asked_for() -> None:
    """Compute a scale yourself and put it in before morph."""
    store = WeightStore(sample(8, 64))
    assert float(store.morph("int8", scale=0.5).scales) == 0.5  # type: ignore[arg-type]
    store.update(lambda w: w * 3)
    assert float(store.morph("int8").scales) == 0.5  # type: ignore[arg-type]
    assert same_bytes(store.morph("int8", scale_rule="absmax"), encode(store.master, "int8"))


def test_an_error_names_the_weight_and_leaves_the_store_usable() -> None:
    store = WeightStore(sample(4, 33), name="blocks.0.fc.weight")
    with pytest.raises(FormatError, match=r"blocks\.0\.fc\.weight: mxfp4"):
        store.morph("mxfp4")
    assert same_bytes(store.morph("mxfp4", pad="zero"), encode(store.master, "mxfp4", pad="zero"))
    with pytest.raises(FormatError, match="no format 'int9'"):
        store.morph("int9")


def test_a_float32_version_is_not_the_masters_memory() -> None:
    store = WeightStore(torch.ones(2, 3))
    version = store.morph("float32")
    store.update(lambda w: w + 1)
    assert torch.equal(decode(version), torch.ones(2, 3))
    assert torch.equal(store.simulate("float32"), torch.full((2, 3), 2.0))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    store = WeightStore(torch.ones(shape))
    assert store.simulate("int8").shape == shape
    store.update(torch.zeros(shape))
    assert torch.equal(store.simulate("int8"), torch.zeros(shape))


# ---- the master ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_become_a_float32_master(dtype: torch.dtype) -> None:
    given = sample(4, 32).to(dtype)
    store = WeightStore(given)
    assert store.master.dtype == torch.float32
    store.apply_gradients(torch.full((4, 32), 1e-6), lr=1.0)
    assert torch.equal(store.master, given.float() - 1e-6), "FP32 holds what a half would round away"


def test_a_bfloat16_parameter_is_followed_as_it_is() -> None:
    parameter = nn.Parameter(sample(4, 32).bfloat16())
    store = WeightStore(parameter)
    assert same_bytes(store.morph("int8"), encode(parameter.detach().float(), "int8"))
    store.update(torch.ones(4, 32))
    assert torch.equal(parameter.detach(), torch.ones(4, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.ones(2, dtype=torch.int64), "torch.int64"),
        (torch.empty(2, device="meta"), "on meta"),
        (nn.parameter.UninitializedParameter(), "uninitialized"),
    ],
)
def test_a_master_must_hold_float_numbers(bad: Tensor, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        WeightStore(bad, name="w")


def _optimizer(
    build: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> Callable[[WeightStore, nn.Parameter], None]:
    def step(_: WeightStore, parameter: nn.Parameter) -> None:
        optimizer = build([parameter])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    return step


def _manual(write: Callable[[nn.Parameter], object]) -> Callable[[WeightStore, nn.Parameter], None]:
    def change(_: WeightStore, parameter: nn.Parameter) -> None:
        with torch.no_grad():
            write(parameter)

    return change


class DataWriter(torch.optim.Optimizer):
    """An optimizer of the old school, which torch's count of writes does not see."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data[0, 1:3] -= 0.1


def _assign_data(parameter: nn.Parameter) -> None:
    parameter.data = parameter.detach() * 2


def _write_numpy(parameter: nn.Parameter) -> None:
    parameter.detach().numpy()[:] = 0.25


def _double(numbers: Tensor) -> None:
    numbers.mul_(2)


CHANGES: dict[str, Callable[[WeightStore, nn.Parameter], None]] = {
    "sgd": _optimizer(lambda p: torch.optim.SGD(p, lr=0.1, foreach=False)),
    "sgd foreach": _optimizer(lambda p: torch.optim.SGD(p, lr=0.1, foreach=True)),
    "sgd fused": _optimizer(lambda p: torch.optim.SGD(p, lr=0.1, fused=True)),
    "adamw": _optimizer(lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False)),
    "adamw foreach": _optimizer(lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True)),
    "adamw fused": _optimizer(lambda p: torch.optim.AdamW(p, lr=0.1, fused=True)),
    "optimizer through .data": _optimizer(DataWriter),
    "in place": _manual(lambda p: p.add_(1.0)),
    "one number in place": _manual(lambda p: p[1, 3].fill_(9.0)),
    ".data in place": _manual(lambda p: p.data.mul_(1.5)),
    ".data assigned": _manual(_assign_data),
    "numpy": _manual(_write_numpy),
    "apply_gradients": lambda store, p: store.apply_gradients(torch.ones_like(p), lr=0.5),
    "update": lambda store, p: store.update(torch.zeros_like(p)),
    "update by a function": lambda store, _: store.update(lambda w: w * 2),
    "update in a function": lambda store, _: store.update(_double),
}


@pytest.mark.cross("change", CHANGES)
@pytest.mark.cross("shape", [(4, 32), (40, 512)])
def test_after_a_change_the_version_is_fresh(change: str, shape: tuple[int, int], encodes: list[str]) -> None:
    parameter = nn.Parameter(sample(*shape))
    store = WeightStore(parameter)
    stale = store.morph("int8")
    CHANGES[change](store, parameter)
    assert store.active("int8") is None
    fresh = store.morph("int8")
    assert fresh is not stale
    assert same_bytes(fresh, encode(parameter.detach(), "int8"))
    assert encodes == ["int8", "int8"]


def test_a_step_of_another_optimizer_keeps_the_versions() -> None:
    mine, other = nn.Parameter(sample(4, 32)), nn.Parameter(sample(4, 32))
    store = WeightStore(mine)
    version = store.morph("int8")
    other.grad = torch.ones_like(other)
    torch.optim.AdamW([other], fused=True).step()
    assert store.morph("int8") is version


def test_invalidate_is_for_writes_nobody_can_see() -> None:
    parameter = nn.Parameter(sample(1024, 512))
    store = WeightStore(parameter)
    version = store.morph("int8")
    parameter.data[0, 1] = 5.0  # one number of half a million, behind torch's back
    assert store.active("int8") is version, "if this is ever seen, say so in the module's docstring"
    store.invalidate()
    assert same_bytes(store.morph("int8"), encode(parameter.detach(), "int8"))


def test_non_contiguous_masters_are_followed() -> None:
    parameter = nn.Parameter(sample(8, 4, 3, 3).to(memory_format=torch.channels_last))
    store = WeightStore(parameter)
    store.morph("int8")
    parameter.data.mul_(2)
    assert same_bytes(store.morph("int8"), encode(parameter.detach(), "int8"))
    assert torch.equal(WeightStore(torch.ones(1).expand(3, 4)).simulate("float32"), torch.ones(3, 4))


def test_a_failing_update_changes_nothing() -> None:
    store = WeightStore(torch.ones(2, 3))
    version = store.morph("int8")

    def half_way(w: Tensor) -> Tensor:
        w.zero_()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        store.update(half_way)
    with pytest.raises(StoreError, match=r"the update has shape \(3, 2\), the weight \(2, 3\)"):
        store.update(torch.ones(3, 2))
    with pytest.raises(StoreError, match="the gradient has shape"):
        store.apply_gradients(torch.ones(3), lr=0.1)
    assert torch.equal(store.master, torch.ones(2, 3))
    assert store.active("int8") is version


def test_an_update_may_read_the_store() -> None:
    store = WeightStore(sample(4, 32))
    store.update(lambda w: w - store.simulate("int4"))
    assert store.active("int4") is None


def test_morph_in_inference_mode_gives_ordinary_tensors() -> None:
    store = WeightStore(nn.Parameter(sample(4, 32)))
    with torch.inference_mode():
        version = store.morph("bfloat16")
        twin = WeightStore.from_encoded(version)
        twin.unpack("bfloat16")
    assert not version.data.is_inference()
    assert not twin.master.is_inference()


def test_a_master_made_in_inference_mode() -> None:
    """Torch counts no writes on such a tensor; dense ones are still seen."""
    with torch.inference_mode():
        master = sample(4, 32)
        store = WeightStore(master)
        store.morph("int8")
        master.mul_(2)
    assert same_bytes(store.morph("int8"), encode(master, "int8"))


# ---- unpack, release, adopt ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["float16", "int8", "uint4", "q4_0_gguf", "mxfp4"])
def test_unpack_makes_the_version_the_truth(fmt: str, encodes: list[str]) -> None:
    parameter = nn.Parameter(sample(4, 64))
    store = WeightStore(parameter)
    version, other = store.morph(fmt), store.morph("int2")
    assert torch.equal(store.unpack(fmt), decode(version))
    assert torch.equal(parameter.detach(), decode(version)), "a Parameter is written in place, its optimizer keeps it"
    assert store.morph(fmt) is version
    assert store.active("int2") is None
    assert store.morph("int2") is not other
    assert encodes == [fmt, "int2", "int2"]


def test_unpack_without_a_version_says_which_there_are() -> None:
    store = WeightStore(sample(4, 32), name="w")
    store.morph("int8")
    with pytest.raises(StoreError, match=r"w: unpack int4: there is no such version \(versions: int8\); morph first"):
        store.unpack("int4")


def test_release_gives_the_memory_back_and_unpack_restores() -> None:
    master = sample(4, 32)
    gone = weakref.ref(master)
    store = WeightStore(master, name="w")
    with pytest.raises(StoreError, match="nothing would be left"):
        store.release_master()
    version, other = store.morph("int8"), store.morph("int4")
    store.release_master()
    del master
    assert gone() is None
    assert not store.has_master
    assert store.morph("int8") is version
    assert torch.equal(store.simulate("int8"), decode(version))
    assert store.to_device("meta", "int4").data.is_meta
    for refused in (
        lambda: store.master,
        lambda: store.morph("mxfp4"),
        lambda: store.force_morph("int8"),
        lambda: store.apply_gradients(torch.zeros(4, 32), 0.1),
        lambda: store.update(lambda w: w),
        lambda: store.calibrate("int8", torch.ones(1, 32)),
    ):
        with pytest.raises(StoreError, match=r"there is no master \(versions: int4, int8\); unpack one"):
            refused()
    with pytest.raises(StoreError, match="released"):
        store.invalidate()
    assert torch.equal(store.unpack("int4"), decode(other))
    assert store.versions.keys() == {"int4"}
    store.apply_gradients(torch.ones(4, 32), lr=0.1)
    assert torch.equal(store.master, decode(other) - 0.1)


def test_release_then_new_numbers() -> None:
    store = WeightStore(torch.ones(2, 3))
    store.morph("int8")
    store.release_master()
    store.update(torch.zeros(2, 3))
    assert store.has_master
    assert torch.equal(store.simulate("int8"), torch.zeros(2, 3))


def test_a_parameter_is_not_the_stores_to_release() -> None:
    store = WeightStore(nn.Parameter(sample(4, 32)))
    store.morph("int8")
    with pytest.raises(StoreError, match="a module holds"):
        store.release_master()


def test_drop_frees_one_version() -> None:
    store = WeightStore(sample(4, 32))
    store.morph("int8")
    store.morph("int4")
    store.to_device("meta", "int8")
    store.drop("int8")
    assert store.versions.keys() == {"int4"}
    assert not store._device_versions
    store.release_master()
    with pytest.raises(StoreError, match="int4 is all that is left"):
        store.drop("int4")


def test_a_store_from_a_file_has_a_version_and_makes_its_master_on_unpack() -> None:
    version = encode(sample(4, 32), "q4_0_poly")
    store = WeightStore.from_encoded(version, name="w")
    assert repr(store) == "WeightStore('w', shape=(4, 32), no master, versions=['q4_0_poly'])"
    assert store.morph("q4_0_poly") is version
    store.unpack("q4_0_poly")
    assert torch.equal(store.master, decode(version))
    assert store.morph("q4_0_poly") is version


def test_adopt_keeps_the_bytes_even_where_encoding_again_would_not() -> None:
    parameter = nn.Parameter(torch.zeros(4, 64))
    store = WeightStore(parameter)
    first = encode(sample(4, 64), "int4", scale_rule="mse")
    second = encode(sample(4, 64), "int8")
    assert not same_bytes(encode(decode(first), "int4"), first)
    store.adopt(first, second)
    assert store.morph("int4") is not None
    assert same_bytes(store.morph("int4"), first)
    assert same_bytes(store.morph("int8"), second)
    assert torch.equal(parameter.detach(), decode(second)), "the largest is the truth"
    with pytest.raises(StoreError, match=r"shape is \(4, 64\), and that of the version \(64, 4\)"):
        store.adopt(encode(torch.ones(64, 4), "int8"))


# ---- devices ---------------------------------------------------------------------------------------------------------


def test_device_versions_follow_their_version() -> None:
    store = WeightStore(nn.Parameter(sample(4, 32)))
    there = store.to_device("meta", "int8_row")
    assert there.data.is_meta
    assert there.scales is not None
    assert there.scales.is_meta
    assert store.to_device(torch.device("meta"), "int8_row") is there
    assert store.to_device("cpu", "int8_row") is store.morph("int8_row")
    store.force_morph("int8_row")
    again = store.to_device("meta", "int8_row")
    assert again is not there
    gone = weakref.ref(again)
    store.update(sample(4, 32, seed=1))
    del again
    assert gone() is None
    assert store.to_device("meta", "int8_row").data.is_meta


def test_a_copy_under_way_while_the_master_changes_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    store = WeightStore(torch.ones(4, 32))
    late: list[Encoded] = []
    move = Encoded.to

    def slowly(version: Encoded, device: torch.device) -> Encoded:
        store.update(torch.zeros(4, 32))
        store.morph("int8")
        late.append(move(version, device))
        return late[-1]

    monkeypatch.setattr(Encoded, "to", slowly)
    assert store.to_device("meta", "int8") is late[0], "right when it was asked for"
    monkeypatch.undo()
    assert store.to_device("meta", "int8") is not late[0]


def test_unpack_does_not_overwrite_an_update_that_came_between(monkeypatch: pytest.MonkeyPatch) -> None:
    store = WeightStore(torch.ones(4, 32))
    store.morph("int8")

    def slowly(version: Encoded) -> Tensor:
        store.update(torch.zeros(4, 32))
        return decode(version)

    monkeypatch.setattr(weight_store, "decode", slowly)
    with pytest.raises(StoreError, match="there is no such version"):
        store.unpack("int8")
    assert not store.master.any()


@pytest.mark.gpu
def test_device_versions_on_a_gpu() -> None:
    store = WeightStore(nn.Parameter(sample(4, 32)))
    there = store.to_device("cuda", "int8_row")
    assert there.device == torch.device("cuda", torch.cuda.current_device())
    assert store.to_device(there.device, "int8_row") is there
    assert torch.equal(decode(there).cpu(), store.simulate("int8_row"))


@pytest.mark.gpu
@pytest.mark.parametrize("change", [name for name in CHANGES if name not in ("numpy", ".data in place")])
def test_changes_are_seen_on_a_gpu(change: str) -> None:
    parameter = nn.Parameter(sample(4, 32).cuda())
    store = WeightStore(parameter)
    store.morph("int8")
    CHANGES[change](store, parameter)
    assert same_bytes(store.morph("int8"), encode(parameter.detach(), "int8"))


# ---- calibration -----------------------------------------------------------------------------------------------------


def mean_square(inputs: Tensor, axis: int = -1) -> Tensor:
    observer = ActivationObserver(axis)
    observer.observe(inputs)
    return observer.mean_square


def test_an_observer_averages_over_everything_but_its_axis() -> None:
    inputs = sample(3, 4, 5)
    torch.testing.assert_close(mean_square(inputs), inputs.square().mean(dim=(0, 1)))
    torch.testing.assert_close(mean_square(inputs.bfloat16(), -2), inputs.bfloat16().float().square().mean(dim=(0, 2)))


def outlier_inputs(rows: int = 256, features: int = 64) -> Tensor:
    inputs = sample(rows, features, seed=7)
    inputs[:, :4] *= 30
    return inputs


@pytest.mark.parametrize("fmt", few(SCALED, 4))
def test_calibration_lowers_the_error_of_the_output(fmt: str) -> None:
    master, inputs = sample(32, 128), outlier_inputs(features=128)
    store = WeightStore(master)
    result = store.calibrate(fmt, inputs)
    assert result.fmt == fmt
    assert result.rows_seen == 256
    slack = 1.02 if fmt == "ternary_absmean" else 1.0  # its default is near the best already
    assert result.error_after <= result.error_before * slack
    importance = mean_square(inputs)
    assert same_bytes(store.morph(fmt), encode(master, fmt, scale_rule="mse", importance=importance))


@pytest.mark.parametrize("fmt", ["int4", "int4_g32", "int2", "uint4", "mxfp4"])
def test_calibration_helps_where_it_matters(fmt: str) -> None:
    """The real output, not the estimate: x W' with outlier features in x."""
    master, inputs = sample(64, 128), outlier_inputs(features=128)
    store = WeightStore(master)
    errors = []
    for version in (store.morph(fmt), None):
        if version is None:
            store.calibrate(fmt, inputs)
        errors.append(float((inputs @ (master - store.simulate(fmt)).T).norm() / (inputs @ master.T).norm()))
    assert errors[1] < 0.97 * errors[0]


def test_calibration_is_used_again_on_new_weights(encodes: list[str]) -> None:
    store, inputs = WeightStore(sample(8, 64)), outlier_inputs()
    store.calibrate("int4", inputs)
    store.update(sample(8, 64, seed=2))
    wanted = encode(store.master, "int4", scale_rule="mse", importance=mean_square(inputs))
    assert same_bytes(store.morph("int4"), wanted)
    assert store.morph("int4") is store.morph("int4")
    assert len(encodes) == 3  # before, after, and once for the new weights


def test_ways_to_hand_over_activations() -> None:
    inputs = outlier_inputs(240)
    linear = nn.Linear(64, 8)
    observer = ActivationObserver()
    handle = linear.register_forward_hook(observer)
    for batch in inputs.reshape(4, 6, 10, 64):
        linear(batch)
    handle.remove()
    versions = []
    for given in (inputs, inputs.reshape(4, 60, 64), inputs.chunk(4), (part for part in inputs.chunk(3)), observer):
        store = WeightStore(linear.weight)
        assert store.calibrate("int4_g32", given).rows_seen == 240
        versions.append(store.morph("int4_g32"))
    assert all(same_bytes(version, versions[0]) for version in versions)


def test_a_convolution_takes_one_feature_per_channel() -> None:
    conv = nn.Conv2d(8, 6, 3, groups=2)
    inputs = sample(4, 8, 10, 10)
    inputs[:, 0] *= 20
    observer = ActivationObserver(axis=-3)
    observer(conv, (inputs,))
    store = WeightStore(conv.weight)
    store.calibrate("int4", observer)
    per_channel = mean_square(inputs, -3).reshape(2, 4).mean(dim=0)
    wanted = encode(conv.weight.detach(), "int4", scale_rule="mse", importance=per_channel.repeat_interleave(9))
    assert same_bytes(store.morph("int4"), wanted)


def test_calibration_refuses() -> None:
    store = WeightStore(sample(8, 64), name="w")
    with pytest.raises(StoreError, match="bfloat16 is a plain cast, with no scales to calibrate"):
        store.calibrate("bfloat16", torch.ones(1, 64))
    with pytest.raises(StoreError, match=r"w: the activations have 32 features, a weight of shape \(8, 64\) takes 64"):
        store.calibrate("int8", torch.ones(4, 32))
    with pytest.raises(StoreError, match="it has seen no input"):
        store.calibrate("int8", [])
    with pytest.raises(StoreError, match="it has seen no input"):
        store.calibrate("int8", torch.ones(0, 64))
    with pytest.raises(StoreError, match="64 features before, and 32 now"):
        store.calibrate("int8", [torch.ones(1, 64), torch.ones(1, 32)])
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        store.calibrate("int8", torch.full((4, 64), torch.inf))
    with pytest.raises(StoreError, match="takes a multiple of 3"):
        WeightStore(sample(8, 3, 5, 5)).calibrate("int8", torch.ones(4, 7))
    assert store.versions == {}


def test_dead_inputs_leave_the_default_scale() -> None:
    store = WeightStore(sample(8, 64))
    assert store.calibrate("int8", torch.zeros(4, 64)).error_after == 0.0
    assert same_bytes(store.morph("int8"), encode(store.master, "int8"))


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_a_deep_copy_is_independent_and_keeps_versions(encodes: list[str]) -> None:
    store = WeightStore(nn.Parameter(sample(4, 32)), name="w")
    version = store.morph("int8", scale_rule="mse")
    twin = copy.deepcopy(store)
    assert twin.morph("int8") is version
    twin.update(torch.ones(4, 32))
    assert store.morph("int8") is version
    assert not torch.equal(store.master, twin.master)
    assert same_bytes(twin.morph("int8"), encode(torch.ones(4, 32), "int8", scale_rule="mse"))
    assert len(encodes) == 2


def test_a_deep_copy_does_not_bring_stale_versions() -> None:
    parameter = nn.Parameter(sample(4, 32))
    store = WeightStore(parameter)
    store.morph("int8")
    with torch.no_grad():
        parameter.zero_()
    assert copy.deepcopy(store).versions == {}


def test_stores_are_not_pickled() -> None:
    with pytest.raises(StoreError, match="undo it first"):
        pickle.dumps(WeightStore(sample(4, 32)))


# ---- threads ---------------------------------------------------------------------------------------------------------


class Gate:
    """An encode that waits until it is let go, and says when it has begun."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, x: Tensor, fmt: object, **options: object) -> Encoded:
        encoded = encode(x, fmt, **options)  # type: ignore[arg-type]
        self.begun.set()
        assert self.go.wait(10)
        return encoded


def test_a_master_that_changes_during_encode_is_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr(weight_store, "encode", gate)
    store = WeightStore(torch.ones(4, 32))
    with ThreadPoolExecutor(1) as pool:
        morphing = pool.submit(store.morph, "int8")
        assert gate.begun.wait(10)
        assert store.active("int8") is None  # readers do not wait for the encoder
        store.update(torch.full((4, 32), 3.0))
        gate.go.set()
        version = morphing.result(10)
    assert torch.equal(decode(version), torch.full((4, 32), 3.0))
    assert store.active("int8") is version


def test_a_master_that_never_rests_cannot_hang_morph(monkeypatch: pytest.MonkeyPatch) -> None:
    store = WeightStore(torch.zeros(4, 32))
    count = iter(range(1, 100))

    def disturbed(x: Tensor, fmt: object, **options: object) -> Encoded:
        store.update(torch.full((4, 32), float(next(count))))
        return encode(x, fmt, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(weight_store, "encode", disturbed)
    version = store.morph("int8")
    assert torch.equal(decode(version), torch.ones(4, 32)), "what the master was during the call"
    assert store.active("int8") is None, "and not handed to anyone after it"


def test_many_threads_one_encode(encodes: list[str]) -> None:
    store = WeightStore(sample(256, 256))
    barrier = threading.Barrier(8)

    def morph(_: int) -> Encoded:
        barrier.wait(10)
        return store.morph("int4_g32")

    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(morph, range(8)))
    assert all(version is versions[0] for version in versions)
    assert encodes == ["int4_g32"]


def run_all(*jobs: Callable[[], None]) -> None:
    with ThreadPoolExecutor(len(jobs)) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result(60)


READERS = ("int8", "int8", "int16", "float32", "bfloat16")


def test_stress_readers_see_whole_and_recent_versions() -> None:
    """Weights are all k; a reader must get one k throughout, no older than the last update before its call."""
    store = WeightStore(nn.Parameter(torch.zeros(128, 128)))
    written, stop = [0], threading.Event()

    def write() -> None:
        try:
            for k in range(1, 250):
                store.update(torch.full((128, 128), float(k)))
                written[0] = k
        finally:
            stop.set()

    def read(fmt: str) -> None:
        reads = 0
        while not (stop.is_set() and reads):
            oldest = written[0]
            numbers = decode(store.to_device("cpu", fmt)).round()
            newest = written[0] + 1  # the writer may be between the write and its note
            assert numbers.unique().numel() == 1
            assert oldest <= float(numbers[0, 0]) <= newest
            reads += 1

    run_all(write, *(functools.partial(read, fmt) for fmt in READERS))
    assert float(store.simulate("int8")[0, 0]) == pytest.approx(249)


@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.long)])
def test_stress_a_trainer_always_reads_back_what_it_wrote(fused: bool) -> None:
    """Workers morph while an optimizer writes the master; after each step no one is handed an older version."""
    parameter = nn.Parameter(torch.zeros(128, 128))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    store = WeightStore(parameter)
    stop = threading.Event()

    def train() -> None:
        try:
            for k in range(1, 40):
                parameter.grad = torch.full_like(parameter, -1.0)
                optimizer.step()
                assert torch.equal(store.simulate("int8").round(), torch.full((128, 128), float(k)))
        finally:
            stop.set()

    def morph(fmt: str) -> None:
        while not stop.is_set():
            assert store.morph(fmt).shape == (128, 128)

    run_all(train, *(functools.partial(morph, fmt) for fmt in READERS))


# ---- any order of operations -----------------------------------------------------------------------------------------


class Operations(RuleBasedStateMachine):
    """Whatever happens, an active version is the one that encoding the master as it was then gives."""

    formats = st.sampled_from(["float16", "int8", "int4", "q4_0_poly", "int8_row"])

    def __init__(self) -> None:
        super().__init__()
        self.parameter = nn.Parameter(sample(2, 32))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1, fused=True)
        self.store = WeightStore(self.parameter)
        self.expected: dict[str, bytes] = {}

    @rule(fmt=formats)
    def morph(self, fmt: str) -> None:
        stored = self.expected.setdefault(fmt, encode(self.parameter.detach(), fmt).to_bytes())
        assert self.store.morph(fmt).to_bytes() == stored

    @rule(fmt=formats)
    def force_morph(self, fmt: str) -> None:
        self.expected[fmt] = encode(self.parameter.detach(), fmt).to_bytes()
        assert self.store.force_morph(fmt).to_bytes() == self.expected[fmt]

    @rule(factor=st.floats(0.1, 2.0))
    def update(self, factor: float) -> None:
        self.store.update(lambda w: w * factor)
        self.expected.clear()

    @rule()
    def optimize(self) -> None:
        self.parameter.grad = self.parameter.detach().clone()
        self.optimizer.step()
        self.expected.clear()

    @rule(fmt=formats)
    def unpack(self, fmt: str) -> None:
        if fmt in self.expected:
            self.store.unpack(fmt)
            self.expected = {fmt: self.expected[fmt]}
            assert torch.equal(self.parameter.detach(), self.store.simulate(fmt))

    @rule(fmt=formats)
    def drop(self, fmt: str) -> None:
        self.store.drop(fmt)
        self.expected.pop(fmt, None)

    @rule()
    def copy(self) -> None:
        self.store = copy.deepcopy(self.store, {id(self.parameter): self.parameter})

    @invariant()
    def versions_are_as_expected(self) -> None:
        assert {name: version.to_bytes() for name, version in self.store.versions.items()} == self.expected


Operations.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestOperations = Operations.TestCase


def test_features_of_a_narrow_matrix_are_its_columns() -> None:
    """A matrix of few columns is no convolution: twice as many features do not share them."""
    store = WeightStore(torch.randn(8, 16))
    observer = ActivationObserver()
    observer.observe(torch.randn(10, 32))
    with pytest.raises(StoreError, match=r"the activations have 32 features, a weight of shape \(8, 16\) takes 16"):
        store.calibrate("int4", observer)


def test_a_store_follows_another_parameter():
    layer = nn.Linear(8, 4, bias=False)
    store = WeightStore(layer.weight)
    store.morph("int8_row")
    layer.load_state_dict({"weight": torch.ones(4, 8)}, assign=True)
    assert store.active("int8_row") is None
    assert store.follows(layer.weight)
    assert torch.equal(store.simulate("int8_row"), torch.ones(4, 8))
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(store.simulate("int8_row"), torch.zeros(4, 8))
    with pytest.raises(StoreError, match=r"a store of shape \(4, 8\) cannot follow \(8, 4\)"):
        store.follow(torch.ones(8, 4))
    twin = copy.deepcopy((layer, store))
    twin[0].weight = nn.Parameter(torch.full((4, 8), 2.0))
    assert torch.equal(twin[1].simulate("int8_row"), torch.full((4, 8), 2.0))
    assert store.follows(layer.weight)
    layer.weight = nn.Parameter(torch.ones(2, 2))
    for use in (lambda: store.morph("int8"), lambda: store.master, lambda: store.versions):
        with pytest.raises(StoreError, match=r"its Parameter was replaced in the module: .*\(2, 2\); make a store"):
            use()
    store.follow(torch.ones(4, 8))
    assert torch.equal(store.master, torch.ones(4, 8))

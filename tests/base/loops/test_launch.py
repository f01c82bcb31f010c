"""Prepared launches: the same results as ordinary ones, and, once compiled, the same arguments for the launcher."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from bitplan.base.loops import launch as triton_launch
from bitplan.base.loops.launch import PreparedLaunch, launch_in_turn
from tests.processes import compile_with_triton


@triton.jit
def _scale(x_ptr, bias_ptr, out_ptr, size, factor, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0) * factor
    if HAS_BIAS:
        x += tl.load(bias_ptr + at, mask=at < size, other=0.0)
    tl.store(out_ptr + at, x, mask=at < size)


@triton.jit
def _copy(x_ptr, bias_ptr, out_ptr, copy_ptr, size, WIDTH: tl.constexpr):  # noqa: ARG001
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(copy_ptr + at, tl.load(out_ptr + at, mask=at < size, other=0.0), mask=at < size)


def launch_of(size: int, has_bias: bool) -> PreparedLaunch:
    constants = {"HAS_BIAS": has_bias, "WIDTH": 64}
    return PreparedLaunch(_scale, (triton.cdiv(size, 64),), (size, 3.0), constants, num_warps=2)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_prepared_launch_can_be_repeated(has_bias, device) -> None:
    launch = launch_of(100, has_bias)
    for seed in range(3):
        x = torch.randn(100, generator=torch.Generator().manual_seed(seed)).to(device)
        out = torch.empty_like(x)
        launch(x, x if has_bias else None, out)
        assert torch.equal(out, x * 3 + x if has_bias else x * 3)


def test_kernels_in_turn_share_the_first_pointers(device) -> None:
    launches = launch_of(100, False), PreparedLaunch(_copy, (2,), (100,), {"WIDTH": 64}, num_warps=2)
    for seed in range(3):
        x = torch.randn(100, generator=torch.Generator().manual_seed(seed)).to(device)
        out, copy = torch.empty_like(x), torch.empty_like(x)
        launch_in_turn(launches, (x, None, out, copy))
        assert torch.equal(out, x * 3)
        assert torch.equal(copy, out)


def test_constants_come_in_the_order_of_the_kernel() -> None:
    with pytest.raises(ValueError, match=r"_scale ends in \['HAS_BIAS', 'WIDTH'\], got \['WIDTH', 'HAS_BIAS'\]"):
        PreparedLaunch(_scale, (1,), (1, 1.0), {"WIDTH": 64, "HAS_BIAS": True})


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 16, 100, 4096])
def test_addresses_of_every_alignment_give_the_same_bytes(size) -> None:
    launch = launch_of(size, True)
    room = torch.randn(2, size + 16, device="cuda")
    outs = torch.empty(size + 16, device="cuda")
    for start in (0, 1, 4, 0, 3, 1, 0):  # each alignment again once its kernel is kept
        x, bias, out = room[0, start : start + size], room[1, :size], outs[start : start + size]
        expected = torch.empty(size, device="cuda")
        _scale[(triton.cdiv(size, 64),)](x, bias, expected, size, 3.0, HAS_BIAS=True, WIDTH=64, num_warps=2)
        out.zero_()
        launch(x, bias, out)
        assert torch.equal(out, expected)
    assert len(launch._compiled) == 3  # 0 and 4 numbers on are both multiples of 16 bytes


@pytest.mark.gpu
def test_the_stream_of_the_caller_is_used() -> None:
    launch, x = launch_of(4096, False), torch.randn(4096, device="cuda")
    out = torch.zeros_like(x)
    launch(x, None, torch.empty_like(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # on a stream of its own; a launch on another would not be in the graph
        launch(x, None, out)
    assert not out.any()
    graph.replay()
    assert torch.equal(out, x * 3)


class Launcher:
    """As Triton 3.6 has it around its C."""

    def __call__(self, x, y, z, stream, function, *rest):
        scratch = "memory" if self.global_scratch_size or self.profile_scratch_size else None
        self.launch(
            x, y, z, stream, function, self.launch_cooperative_grid, self.launch_pdl, scratch, scratch, *rest
        )  # fmt: skip


def test_a_launcher_with_nothing_to_do_is_left_out(monkeypatch) -> None:
    kind, recorded = Launcher, []
    if triton.__version__.startswith("3.6."):
        kind = importlib.import_module("triton.backends.nvidia.driver").CudaLauncher
    launcher = kind.__new__(kind)
    launcher.launch = lambda *arguments: recorded.append(arguments)
    launcher.launch_cooperative_grid, launcher.launch_pdl = False, True
    for of in ("global", "profile"):
        setattr(launcher, f"{of}_scratch_size", 0)
        setattr(launcher, f"{of}_scratch_align", 1)
    kernel = SimpleNamespace(run=launcher, function=5, packed_metadata=(4, 1, 0))
    monkeypatch.setattr(triton_launch, "_HAS_LAUNCH", True)
    run, fixed, _ = triton_launch._entry_of(kernel)
    assert run is launcher.launch
    run(2, 1, 1, 77, *fixed, 1024, 2048, 3.0)
    launcher(2, 1, 1, 77, 5, (4, 1, 0), None, None, None, 1024, 2048, 3.0)
    assert recorded[0] == recorded[1]
    launcher.profile_scratch_size = 128
    assert triton_launch._entry_of(kernel)[0] is launcher


# What a launcher gets, without a GPU: the driver is one that records.
PROGRAM = """
import torch, triton
from triton.backends.compiler import GPUTarget

RECORDED = []

class Launcher:
    def __init__(self, source, metadata):
        pass

    def __call__(self, *arguments):
        RECORDED.append(tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments))

class Utils:
    load_binary = staticmethod(lambda *arguments: (1, 2, 32, 0, 1024))
    unload_module = staticmethod(lambda module: None)
    get_device_properties = staticmethod(lambda device: {"max_shared_mem": 200000, "warpSize": 32})

class Driver:
    utils, launcher_cls = Utils(), Launcher
    get_current_device = staticmethod(lambda: -1)
    get_current_stream = staticmethod(lambda device: 77)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

triton.runtime.driver.set_active(Driver())
from tests.base.loops.test_launch import _copy, _scale, launch_of
from bitplan.base.loops.launch import PreparedLaunch, launch_in_turn

ordinary = []
real = type(_scale).run
def run(self, *arguments, **named):
    ordinary.append(1)
    return real(self, *arguments, **named)
type(_scale).run = run

launch = launch_of(100, False)
copier = PreparedLaunch(_copy, (2,), (100,), {"WIDTH": 64}, num_warps=2)
room = torch.zeros(264, dtype=torch.bfloat16)
x, odd, out = room[:100], room[1:101], room[128:228]
launch(x, None, out)
launch(odd, None, out)
assert len(ordinary) == 2, "a new alignment is compiled for"
launch(out, None, x)
launch(odd, None, out)
assert len(ordinary) == 2, "known ones go straight to the launcher"
first, second, third, fourth = RECORDED
def essence(recorded):  # the grid, stream, kernel and its arguments; an unused pointer is None or 0
    return recorded[:6] + tuple(each or 0 for each in recorded[9:])
assert essence(second) == essence(fourth), (second, fourth)
assert essence(third) == essence(first[:9] + (out.data_ptr(), None, x.data_ptr()) + first[12:]), (first, third)
assert first[:4] == (2, 1, 1, 77) and first[12:] == (100, 3.0, False, 64), first
assert third[6:9] == (None, None, None)

seen = []
triton.knobs.runtime.launch_enter_hook.add(seen.append)
launch(x, None, out)
assert len(ordinary) == 3, "a profiler sees ordinary launches"
triton.knobs.runtime.launch_enter_hook.remove(seen.append)

RECORDED.clear()
launch_in_turn((launch, copier), (x, None, out, room))
launch_in_turn((launch, copier), (x, None, out, room))
assert len(ordinary) == 4, "of the second kernel alone"
assert [essence(each) for each in RECORDED[2:]] == [essence(each) for each in RECORDED[:2]]
assert RECORDED[3][9:] == (x.data_ptr(), 0, out.data_ptr(), room.data_ptr(), 100, 64), RECORDED[3]
print("recorded")
"""


def test_what_the_launcher_gets(tmp_path) -> None:
    assert compile_with_triton(PROGRAM, folder=tmp_path) == "recorded\n"

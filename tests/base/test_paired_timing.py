"""Turns, order, warm-up, failures and memory of paired timing, with a clock that only the timed calls move."""

from __future__ import annotations

import pytest
import torch

from bitplan.base.paired_timing import (
    EAGER_SAMPLE_MS,
    MAX_CALLS_PER_SAMPLE,
    CpuStopwatch,
    Peers,
    is_out_of_memory,
    stopwatch_of,
    time_in_turns,
)


class Bench:
    """A clock in seconds that calls move forward, and a diary of what was called."""

    def __init__(self):
        self.now, self.diary = 0.0, []
        self.stopwatch = CpuStopwatch(lambda: self.now)

    def arm(self, name, ms, *, fail_at=None, error=None):
        times = iter(ms) if isinstance(ms, list) else None

        def build():
            count = 0

            def call():
                nonlocal count
                count += 1
                if fail_at is not None and count >= fail_at:
                    raise error
                self.diary.append(name)
                self.now += (next(times) if times is not None else ms) / 1e3

            return call

        return build


def test_samples_are_what_the_calls_took_and_lie_in_turns():
    bench = Bench()
    result = time_in_turns({"a": bench.arm("a", 2.0), "b": bench.arm("b", 3.0)}, bench.stopwatch, turns=4, warmup=0)
    assert result["a"].samples_ms == (2.0,) * 4
    assert result["b"].samples_ms == (3.0,) * 4
    assert result["a"].status == "ok"
    assert result["a"].in_turns
    assert result["b"].in_turns
    assert bench.diary[-8:] == list("abbaabba")  # every other turn in the opposite order


def test_warm_up_is_not_in_the_samples():
    bench = Bench()
    slow_start = [100.0] * 3 + [1.0] * 50
    result = time_in_turns({"a": bench.arm("a", slow_start)}, bench.stopwatch, turns=3, warmup=3, graph=True)
    assert result["a"].samples_ms == (1.0,) * 3
    assert len(bench.diary) == 3 + 1 + 3  # and one look at the memory
    assert not result["a"].in_turns  # there was nobody to take turns with


@pytest.mark.parametrize(("ms", "calls"), [(1.0, 4), (3.0, 2), (100.0, 1), (1e-5, MAX_CALLS_PER_SAMPLE)])
def test_eager_samples_call_until_they_are_long(ms, calls):
    assert EAGER_SAMPLE_MS == 4.0
    bench = Bench()
    result = time_in_turns(
        {"a": bench.arm("a", ms), "slow": bench.arm("s", ms * 5)}, bench.stopwatch, turns=2, warmup=1
    )
    assert bench.diary.count("a") == 1 + 1 + 1 + 2 * calls  # warm-up, memory, the length of one, the samples
    assert bench.diary.count("s") == 3 + 2 * calls
    assert result["a"].samples_ms == pytest.approx((ms,) * 2, rel=1e-3, abs=1e-6)


@pytest.mark.cross(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("shapes\ncannot be multiplied"), "error"),
        (ValueError("no"), "error"),
    ],
)
@pytest.mark.cross("fail_at", [1, 2, 5])
def test_one_arm_fails_and_the_others_go_on(error, status, fail_at):
    bench = Bench()
    arms = {"good": bench.arm("g", 5.0), "bad": bench.arm("b", 5.0, fail_at=fail_at, error=error)}
    result = time_in_turns(arms, bench.stopwatch, turns=4, warmup=1)
    assert (result["bad"].status, result["bad"].samples_ms) == (status, ())
    assert result["bad"].message
    assert "\n" not in result["bad"].message
    assert result["good"].samples_ms == (5.0,) * 4
    assert not result["good"].in_turns


def test_building_may_run_out_of_memory():
    def build():
        raise torch.OutOfMemoryError("CUDA out of memory")

    bench = Bench()
    result = time_in_turns({"a": build, "b": bench.arm("b", 1.0)}, bench.stopwatch, turns=1, warmup=1)
    assert result["a"].status == "oom"
    assert result["b"].status == "ok"


def test_a_lost_device_is_raised():
    class Lost(CpuStopwatch):
        def recover(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    bench = Bench()
    arm = bench.arm("a", 1.0, fail_at=1, error=RuntimeError("launch failed"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        time_in_turns({"a": arm}, Lost(), turns=1, warmup=1)


def test_a_stop_is_not_swallowed():
    bench = Bench()
    arm = bench.arm("a", 1.0, fail_at=1, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        time_in_turns({"a": arm}, bench.stopwatch, turns=1, warmup=1)


def test_peers_fail_together_and_the_slowest_counts():
    class Two(Peers):
        def __init__(self):
            self.asked = 0

        def worst(self, status):
            self.asked += 1
            return "oom" if self.asked == 1 else status

        def slowest(self, samples_ms):
            return [max(each, 7.0) for each in samples_ms]

    bench = Bench()
    arms = {"a": bench.arm("a", 1.0), "b": bench.arm("b", 2.0)}
    result = time_in_turns(arms, bench.stopwatch, turns=2, warmup=0, peers=Two())
    assert (result["a"].status, result["a"].message) == ("oom", "it failed in another process")
    assert result["b"].samples_ms == (7.0, 7.0)


def test_a_clock_that_stands_still_gives_a_sample_above_zero():
    result = time_in_turns({"a": lambda: lambda: None}, CpuStopwatch(lambda: 1.0), turns=2, warmup=1)
    assert all(each > 0 for each in result["a"].samples_ms)


@pytest.mark.parametrize(("turns", "warmup"), [(0, 1), (1, -1)])
def test_bad_counts(turns, warmup):
    with pytest.raises(ValueError, match="turns must be from 1 and warmup from 0"):
        time_in_turns({}, CpuStopwatch(), turns=turns, warmup=warmup)


def test_real_clock_on_the_cpu():
    x = torch.randn(64, 64)
    result = time_in_turns({"a": lambda: lambda: x @ x}, stopwatch_of(torch.device("cpu")), turns=3, warmup=1)
    assert len(result["a"].samples_ms) == 3
    assert result["a"].peak_bytes is None


def test_out_of_memory_is_told_by_class_or_words():
    assert is_out_of_memory(RuntimeError("CUDA out of memory"))
    assert not is_out_of_memory(ValueError("out of memory"))  # somebody else's words


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_gpu_times_and_memory(graph):
    device = torch.device("cuda")

    def product(size):
        def build():
            x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
            return lambda: x @ x

        return build

    result = time_in_turns(
        {"small": product(1024), "large": product(8192)}, stopwatch_of(device), turns=5, warmup=2, graph=graph
    )
    assert min(result["large"].samples_ms) > max(result["small"].samples_ms)
    assert result["large"].peak_bytes >= 8192 * 8192 * 2


@pytest.mark.gpu
def test_gpu_out_of_memory_is_caught_and_given_back():
    device = torch.device("cuda")
    free, _ = torch.cuda.mem_get_info(device)

    def build():
        held = [torch.empty(free // 3, dtype=torch.uint8, device=device) for _ in range(6)]
        return lambda: held

    result = time_in_turns({"huge": build}, stopwatch_of(device), turns=1, warmup=1)
    assert result["huge"].status == "oom"
    assert torch.cuda.mem_get_info(device)[0] > free // 2

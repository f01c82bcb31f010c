"""Where the time of a step goes: how busy bus and computation are, by torch's profiler, and what the host takes."""

from __future__ import annotations

import cProfile
import io
import itertools
import pstats
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

STEPS = 3
NAMES = 14  # kernels that are named, those that take longest first
NAME_LENGTH = 72
Span = tuple[int, int]


def trace(step: Callable[[], None]) -> dict[str, Any]:
    """Milliseconds a step, of some steps that are queued one after another; on a GPU alone.

    kernels_ms   by the kernel's name
    gaps_ms      in which no kernel runs, by the name of the kernel that ends the gap; with how many of them
    """
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        host = [_seconds(step) for _ in range(STEPS)]
        torch.cuda.synchronize()
    result: Any = profiler.profiler
    events = [one for one in result.kineto_results.events() if "CUDA" in str(one.device_type())]
    copies = [one for one in events if "Memcpy HtoD" in one.name()]
    kernels = [one for one in events if not one.name().startswith(("Memcpy", "Memset"))]
    decodes = [one for one in kernels if "decode" in one.name()]
    busy = _union(_span(one) for one in kernels)
    gaps = [two[0] - one[1] for one, two in itertools.pairwise(busy)]
    first, last = min(start for start, _ in busy), max(end for _, end in busy)
    return {
        "host_ms": sum(host) / STEPS * 1e3,
        "span_ms": (last - first) / STEPS / 1e6,
        "compute_busy_ms": _total(busy) / STEPS,
        "copy_busy_ms": _total(_union(_span(one) for one in copies)) / STEPS,
        "decode_ms": _total([_span(one) for one in decodes]) / STEPS,
        "kernels": len(kernels) / STEPS,
        "longest_gap_ms": max(gaps, default=0) / 1e6,
        "gaps_over_20us": sum(gap > 20_000 for gap in gaps) / STEPS,
        "gaps_over_20us_ms": sum(gap for gap in gaps if gap > 20_000) / STEPS / 1e6,
        "kernels_ms": _by_name((one.name(), one.duration_ns()) for one in kernels),
        "gaps_ms": _by_name(_gaps(kernels)),
    }


def _gaps(kernels: Iterable[Any]) -> Iterator[tuple[str, int]]:
    end = None
    for one in sorted(kernels, key=lambda one: one.start_ns()):
        start, stop = _span(one)
        if end is not None and start > end:
            yield one.name(), start - end
        end = stop if end is None else max(end, stop)


def _by_name(times: Iterable[tuple[str, int]]) -> dict[str, list[float]]:
    """Milliseconds a step, and how many, of the names with most of it."""
    spent: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, nanoseconds in times:
        spent[name[:NAME_LENGTH]] += nanoseconds
        counts[name[:NAME_LENGTH]] += 1
    return {name: [round(one / STEPS / 1e6, 3), counts[name] / STEPS] for name, one in spent.most_common(NAMES)}


def host_profile(step: Callable[[], None], lines: int = 40) -> str:
    """Where the host's time goes in a step, by function; the backward runs on the calling thread for this."""
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        profile.runcall(step)
    torch.cuda.synchronize()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(lines)
    return text.getvalue()


def line_of(name: str, tokens: int, traced: dict[str, Any]) -> str:
    figures = (f"{key} {value:.1f}" for key, value in traced.items() if not isinstance(value, dict))
    return f"trace  {name:<10} {tokens:>6} tokens  " + "  ".join(figures)


def _seconds(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _span(event: Any) -> Span:
    return event.start_ns(), event.start_ns() + event.duration_ns()


def _total(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans) / 1e6


def _union(spans: Iterable[Span]) -> list[Span]:
    """Spans that overlap as one, in order."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined

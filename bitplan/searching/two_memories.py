"""Which weights lie on the GPU and which in the host's memory, and in which format: one problem, by measured times.

A packed weight in the host's memory is read by the GPU over the bus whenever its product runs (`packed.packed_weight`).
So a choice is a format and a place (`mxfp4`, or `mxfp4@host`), with bytes in either memory and a time:

    on the GPU     bytes that are read / `gpu_rate`
    on the host    `crossing` + bytes that are read / `bus_rate`; its scales, as kernels read them, lie on the GPU
    an embedding   reads one row, so it takes no time anywhere; of experts the share is read that tokens choose
    without a kernel that reads codes   its decoding, too, and reading the decoded numbers

A token takes the sum of these and `rest`, but no less than the host needs to launch it: `launch`. All of them were
measured on the device that the model shall run on (`memory_probe`). The solver keeps to both memories, and to a
time: that of `FitGoal.ms`, or else that of the uniform format next to `USUAL_BITS` with its best split, and no less
than reading the GPU's whole memory takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from bitplan.base.optional import require
from bitplan.formats import get_format
from bitplan.searching.evidence import (
    FormatCost,
    SearchEvidence,
    TensorGroup,
    bits_of,
    in_host,
    input_of,
    is_in_host,
    place_of,
    weight_format,
)
from bitplan.searching.goal import Goal, GoalError
from bitplan.searching.memory_probe import WIDE, MemoryProbe, TokenTimes
from bitplan.searching.solver import MOST_NODES, Solution

USUAL_BITS = 4.5
FEW_ROWS = 64  # that kernels multiply with codes; with more a weight is decoded first
BF16_BYTES = 2
DECODING_COSTS = 4  # bytes, bytes a number, microseconds, microseconds a number; probes of before have bytes alone
SPLIT_GAP = 1e-3  # of a uniform format's best split: layers are alike there, and a proof would take long


DecodingCosts = Mapping[str, Sequence[float]]


class TwoMemories(Protocol):
    """What planning for two memories needs to know of a fit's goal."""

    @property
    def memory(self) -> int: ...

    @property
    def ram(self) -> int | None: ...

    @property
    def ms(self) -> float | None: ...

    @property
    def batch(self) -> int: ...

    @property
    def on_gpu(self) -> bool: ...


def scale_bytes(fmt: str, shapes: Iterable[tuple[int, ...]], *, on_gpu: bool) -> int:
    """Bytes of the second copy of scales, in a kernel's order, that a GPU keeps for packed weights."""
    if not on_gpu or get_format(fmt).is_cast:
        return 0
    from bitplan.packed.products.fused import arranged_bytes

    return sum(arranged_bytes(get_format(fmt), shape) for shape in shapes)


def with_workspace(joint: SearchEvidence, probe: MemoryProbe) -> SearchEvidence:
    """Groups with what their products take on a GPU beyond the probe's, whose weights were in 8 bits.

    Of a prompt's rows every packed weight is decoded; of the few that a head multiplies, where no kernel reads codes.
    """
    if probe.decoded is None or probe.floor is None:
        return joint
    tables, lookups = _tables(joint), lookups_of(joint)
    layers = [_at_once(group) for name, group in joint.groups.items() if name not in tables and is_weight(group)]
    decoded_bytes = {fmt: tuple(costs[:2]) for fmt, costs in probe.decoded.items()}
    counted = decoded_bytes[WIDE][0] + max(layers, default=0) * decoded_bytes[WIDE][1]
    groups = {}
    for name, group in joint.groups.items():
        shapes = [shape for shape, _ in group.tensors.values()]
        formats = {}
        for fmt, cost in group.formats.items():
            stored = weight_format(fmt)
            any_weight, per_number = decoded_bytes.get(stored, (0.0, 0.0))
            more = any_weight + _at_once(group) * per_number
            if name in tables:
                is_fused = probe.batch <= FEW_ROWS and scale_bytes(stored, shapes, on_gpu=True) > 0
                more = 0.0 if is_fused or name in lookups else probe.floor + more - probe.nbytes
            elif is_weight(group):
                more -= counted
            formats[fmt] = replace(cost, workspace=max(0, int(more)) if stored in decoded_bytes else 0)
        groups[name] = replace(group, formats=formats)
    return replace(joint, groups=groups)


def _at_once(group: TensorGroup) -> int:
    """How many numbers one product decodes: all of a group, or of experts those of one."""
    shapes = [shape for shape, _ in group.tensors.values()]
    return max(math.prod(shape[-2:]) for shape in shapes) if _is_expert(group) else group.numbers


def _is_expert(group: TensorGroup) -> bool:
    return any(".experts" in name or len(shape) == 3 for name, (shape, _) in group.tensors.items())


def is_weight(group: TensorGroup) -> bool:
    return all(role != "kv" for _, role in group.tensors.values())


def with_places(
    joint: SearchEvidence, times: TokenTimes, goal: TwoMemories, decoded: DecodingCosts | None = None
) -> SearchEvidence:
    """Groups with a candidate for each format and place, and times; keys and values stay on the GPU.

    decoded   what decoding a weight takes, as a probe on a GPU has it
    """
    lookups, groups = lookups_of(joint), {}
    for name, group in joint.groups.items():
        share, on_gpu = _share_read(group, times, goal.batch), goal.on_gpu and name not in lookups
        shapes = [shape for shape, _ in group.tensors.values()]
        formats: dict[str, FormatCost] = {}
        for fmt, cost in group.formats.items():
            stored = weight_format(fmt)
            scales = scale_bytes(stored, shapes, on_gpu=on_gpu) if is_weight(group) else 0
            file_bytes = cost.nbytes - scales  # what the file has of it: `joint_evidence` counts scales twice
            read = 0.0 if name in lookups or not is_weight(group) else share
            decoding = read * _decoding_us(stored, group, times, decoded)
            formats[fmt] = replace(cost, us={goal.batch: decoding + read * file_bytes / times.gpu_rate})
            if is_weight(group) and not get_format(stored).is_cast:
                us = read and decoding + times.crossing + read * (file_bytes - scales) / times.bus_rate
                formats[in_host(fmt)] = replace(cost, nbytes=scales, host=file_bytes, us={goal.batch: us})
        groups[name] = replace(group, formats=formats, reference_us={goal.batch: 0.0})
    return replace(joint, groups=groups)


def _decoding_us(fmt: str, group: TensorGroup, times: TokenTimes, decoded: DecodingCosts | None) -> float:
    """What a token waits for weights to be decoded and read again, where no kernel multiplies with their codes."""
    shapes = [shape for shape, _ in group.tensors.values()]
    costs = () if decoded is None else decoded.get(fmt, ())
    if len(costs) < DECODING_COSTS or scale_bytes(fmt, shapes, on_gpu=True):
        return 0.0
    _, _, any_weight, per_number = costs
    return any_weight + group.numbers * (per_number + BF16_BYTES / times.gpu_rate)


def _tables(joint: SearchEvidence) -> list[str]:
    return [name for name, group in joint.groups.items() if any(role == "embed" for _, role in group.tensors.values())]


def lookups_of(joint: SearchEvidence) -> set[str]:
    """Tables of which a token reads a row: embeddings, where the head is another tensor."""
    tables = [
        name for name, group in joint.groups.items() if any(role == "embed" for _, role in group.tensors.values())
    ]
    return {name for name in tables if len(tables) > 1 and "head" not in name and "output" not in name}


def _share_read(group: TensorGroup, times: TokenTimes, batch: int) -> float:
    """The share of a group's bytes that is read for a token of each text."""
    return 1 - (1 - times.chosen) ** batch if _is_expert(group) else 1.0


def place_goal(joint: SearchEvidence, times: TokenTimes, goal: TwoMemories, of_bytes: Goal) -> Goal:
    """The goal for the solver: the two memories' bytes, and the microseconds that products may take."""
    within = replace(of_bytes, host=goal.ram, rows=goal.batch)
    if goal.ms is not None:
        weights_us = 1e3 * goal.ms - times.rest
        if weights_us <= 0 or 1e3 * goal.ms < times.launch:
            least = max(times.rest, times.launch) / 1e3
            raise GoalError(
                f"a token takes {least:.2f} ms beside products with weights, and {goal.ms:g} are allowed",
                settings={"ms": f"{1.2 * least:.1f}"},
            )
        return replace(within, us=weights_us)
    usual = min(uniform_formats(joint), key=lambda fmt: (abs(bits_of(fmt) - USUAL_BITS), fmt))
    split = best_split(joint, usual, within)
    full = goal.memory / times.gpu_rate  # a smaller format's time would leave room on the GPU
    return replace(within, us=max(split.us or 0.0, full, times.launch - times.rest))


def uniform_formats(joint: SearchEvidence) -> list[str]:
    """Formats that most weights can have in either memory; raises where there is none."""
    total = sum(group.numbers for group in joint.groups.values())
    numbers_of = {
        fmt: sum(group.numbers for group in joint.groups.values() if in_host(fmt) in group.formats)
        for fmt in joint.formats
        if input_of(fmt) is None
    }
    common = [fmt for fmt, numbers in numbers_of.items() if 2 * numbers > total]
    if not common:
        raise GoalError("no format is packed for most weights: nothing could lie in the host's memory")
    return common


def best_split(joint: SearchEvidence, fmt: str, within: Goal) -> Solution:
    """Find the fastest division between these memories of weights that have one format.

    Keys and values are in one format too, the least harmful that there is room for.
    """
    order, stay = joint.formats, {}
    in_kv = [name for name, group in joint.groups.items() if all(role == "kv" for _, role in group.tensors.values())]
    for name, group in joint.groups.items():
        larger = [name for name in order[order.index(fmt) :] if name in group.formats and input_of(name) is None]
        stay[name] = larger[0] if larger else max(group.formats, key=lambda name: group.formats[name].nbytes)
    first = joint.groups[in_kv[0]] if in_kv else TensorGroup({})
    *better, last = sorted(first.formats, key=lambda name: (first.nats(name), -first.formats[name].nbytes)) or [""]
    for kv_format in better:
        with suppress(GoalError):
            return _split(joint, stay | dict.fromkeys(in_kv, kv_format), within)
    return _split(joint, stay | dict.fromkeys(in_kv, last), within)


def _split(joint: SearchEvidence, stay: Mapping[str, str], within: Goal) -> Solution:
    """Choose which groups go to the host's memory, by an integer program over kinds of equal groups."""
    optimize = require("scipy.optimize", purpose="searching a plan", extra="search")
    numpy = require("numpy", purpose="searching a plan")
    alike: dict[tuple[float, ...], list[str]] = {}
    for name, fmt in stay.items():
        on_gpu, on_host = joint.groups[name].formats[fmt], joint.groups[name].formats.get(in_host(fmt))
        if on_host is not None:
            more = on_host.us[within.rows] - on_gpu.us[within.rows]
            alike.setdefault((on_gpu.nbytes - on_host.nbytes, on_host.host, more), []).append(name)
    over = joint.nbytes(stay) - within.most_bytes(joint.numbers)  # type: ignore[operator]
    choice = dict(stay)
    if over > 0:
        saved, host, more_us = (numpy.array(column, dtype=float) for column in zip(*alike, strict=True))
        solution = optimize.milp(
            more_us / max(more_us.max(), 1e-9),
            integrality=numpy.ones(len(alike)),
            bounds=optimize.Bounds(0, [len(names) for names in alike.values()]),
            constraints=[
                optimize.LinearConstraint(saved[None] / over, 1, numpy.inf),
                optimize.LinearConstraint(host[None] / max(1, within.host or 0), -numpy.inf, 1),
            ],
            options={"mip_rel_gap": SPLIT_GAP, "node_limit": MOST_NODES},
        )
        if solution.x is None:
            raise GoalError(f"{joint.model}: {stay[next(iter(stay))]} for all is too large for both memories")
        for names, count in zip(alike.values(), solution.x, strict=True):
            choice |= {name: in_host(stay[name]) for name in names[: round(count)]}
    us = joint.microseconds(choice, within.rows)
    return Solution(choice, joint.predict(choice), joint.nbytes(choice), us, us or 0.0, SPLIT_GAP)


def crossing_first(joint: SearchEvidence, choice: Mapping[str, str]) -> dict[str, str]:
    """Of equal layers let the first ones lie in the host's memory: their launches are then ahead of the GPU."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, fmt in choice.items():
        group = joint.groups[name]
        shapes = tuple(sorted(shape for shape, _ in group.tensors.values()))
        alike.setdefault((place_of(name)[1], shapes, fmt.removesuffix("@host")), []).append(name)
    placed = dict(choice)
    for (*_, fmt), names in alike.items():
        ordered = sorted(names, key=_layer)
        count = sum(is_in_host(choice[name]) for name in names)
        placed |= {name: in_host(fmt) if at < count else fmt for at, name in enumerate(ordered)}
    return placed


def _layer(name: str) -> int:
    layer = place_of(name)[0]
    return int(layer) if layer else -1

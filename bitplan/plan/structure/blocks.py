"""Blocks that repeat: modules side by side, called one after the other, each with products of its own."""

from __future__ import annotations

from bitplan.plan.structure.model_view import Stack
from bitplan.plan.structure.recognise import Recogniser
from bitplan.plan.structure.recorder import Recording


def find_stacks(recording: Recording, parts: Recogniser) -> tuple[Stack, ...]:
    """The outermost stacks: numbered modules side by side; else modules side by side that compute the same."""
    first_call: dict[str, int] = {}
    for index, call in enumerate(recording.calls):
        first_call.setdefault(call.path, index)
    heavy = _with_several_products(parts)
    siblings: dict[str, list[str]] = {}
    for path in first_call:
        if path and path in heavy:
            siblings.setdefault(path.rpartition(".")[0], []).append(path)
    kinds = {path: _kind(recording, parts, path, first_call[path]) for paths in siblings.values() for path in paths}
    contained = {
        parent: paths for parent, paths in siblings.items() if all(path.rpartition(".")[2].isdigit() for path in paths)
    }
    chosen = {parent: paths for parent, paths in contained.items() if not _lies_in(parent, contained)}
    for parent, paths in siblings.items():
        equal = [path for path in paths if sum(kinds[path] == kinds[other] for other in paths) > 1]
        is_free = not any(_is_within(path, parent) or _is_within(parent, path) for path in chosen)
        if parent not in contained and len(equal) > 1 and is_free:
            chosen[parent] = equal
    return tuple(_stack(parent, paths, kinds, first_call) for parent, paths in chosen.items())


def _stack(parent: str, paths: list[str], kinds: dict[str, object], first_call: dict[str, int]) -> Stack:
    ordered = sorted(paths, key=first_call.__getitem__)
    distinct = list(dict.fromkeys(kinds[path] for path in ordered))
    return Stack(parent, tuple(ordered), tuple(distinct.index(kinds[path]) for path in ordered))


def _with_several_products(parts: Recogniser) -> set[str]:
    """Paths of modules below which there are at least two weights of products or convolutions, however often called."""
    weights: dict[str, set[str]] = {}
    uses = [(part.path, part.weight) for part in parts.linears.values()]
    for path, weight in uses + [(part.path, part.weight) for part in parts.convolutions]:
        while path:
            weights.setdefault(path, set()).add(weight)
            path = path.rpartition(".")[0]
    return {path for path, below in weights.items() if len(below) > 1}


def _kind(recording: Recording, parts: Recogniser, path: str, call: int) -> object:
    """What a block computes: its functions in order, and its weights' shapes under names within the block."""
    found = recording.calls[call]
    names = tuple(step.name for step in recording.steps[found.first : found.last])
    weights = tuple(
        (linear.weight[len(path) :], linear.shape)
        for linear in parts.linears.values()
        if _is_within(linear.path, path) and found.first <= linear.step < found.last
    )
    return names, weights


def _lies_in(parent: str, others: dict[str, list[str]]) -> bool:
    """Whether a container lies within a block of another container."""
    return any(_is_within(parent, path) for other, paths in others.items() if other != parent for path in paths)


def _is_within(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.") or not block

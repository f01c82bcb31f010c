"""How near to its bound can a streamed step get with k slots? The ring's own schedule, simulated, no GPU needed.

    python benchmarks/streaming_bound.py

The bound is max(computing, copying what is sent): the two overlap perfectly. A ring of k slots cannot always do that:
in a forward the copy of block k waits until block 0 has been computed, the forward and the backward each have a share
of the copies, and what one of them has left of the bus is of no use to the other, because all slots are taken.

The simulation asks the product's own functions (`schedule.Walk`, `loads_ahead`) which block goes into which slot. Time
goes by two clocks, of the bus and of the computation: a copy starts when the bus is free and its slot's last block is
computed, or decoded where all of it is (`packed`); a block computes when its copy is there. Decoding takes no time
here. The backward of a checkpointed block takes twice its forward (computed again, and two products for one: frozen
weights need no gradient of their own).

`--compare` puts measured rows of benchmarks/results/streaming_nvidia_h200.json beside the simulated ones.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitplan.streaming.transfer.schedule import Walk, load_now, loads_ahead, spread_residents

BACKWARD = 2.0  # of a block's forward
WARM_STEPS = 3  # the first step starts with empty slots
MORE_SLOTS = (4, 6, 8, 12)
INT8_SHARE = 0.6
RESULT = Path(__file__).parent / "results" / "streaming_nvidia_h200.json"


@dataclass
class Simulation:
    """One device: when the bus and the computation are free, and what each slot holds."""

    blocks: int
    slots: int
    copy_ms: float
    forward_ms: float
    resident: frozenset[int] = frozenset()
    packed: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.held: list[int | None] = [None] * self.slots
        self.free_at = [0.0] * self.slots  # when a slot's block has been computed
        self.ready_at: dict[int, float] = {}
        self.bus = self.compute = 0.0
        self.copies = 0
        self.decoded: int | None = None
        self.walk = Walk(self.blocks, self.resident)

    def step_ms(self) -> float:
        """The time of a step once slots are warm, and `copies` of that step."""
        for _ in range(WARM_STEPS):
            started, self.copies = self.compute, 0
            for block in range(self.blocks):
                self._visit(block, self.forward_ms)
            for block in reversed(range(self.blocks)):
                self._visit(block, BACKWARD * self.forward_ms)
        return self.compute - started

    def _visit(self, block: int, compute_ms: float) -> None:
        self.walk = self.walk.moved_to(block, wraps=False)
        is_packed = block in self.packed
        if not (is_packed and self.decoded == block):
            if block not in self.resident and block not in self.held:
                self._load(*load_now(self.walk, self.held, block))
            if not is_packed:
                self._load_ahead()
            self.compute = max(self.compute, self.ready_at.get(block, 0.0))
            if block in self.held:
                self.free_at[self.held.index(block)] = self.compute + (0.0 if is_packed else compute_ms)
        if is_packed:
            self.decoded = block
            self._load_ahead()
        self.compute += compute_ms

    def _load_ahead(self) -> None:
        for load in loads_ahead(self.walk, self.held, self.decoded):
            self._load(*load)

    def _load(self, slot: int, block: int) -> None:
        self.bus = max(self.bus, self.free_at[slot]) + self.copy_ms
        self.held[slot], self.ready_at[block] = block, self.bus
        self.copies += 1


def simulate(
    blocks: int,
    slots: int,
    computing_ms: float,
    copy_ms: float,
    resident: int = 0,
    packed: frozenset[int] = frozenset(),
) -> dict[str, float]:
    """A step of `blocks` that compute `computing_ms` in all; `copy_ms` a block. Over the bound, and the bound."""
    spread = spread_residents(blocks, resident) if resident else frozenset()
    one = Simulation(blocks, slots, copy_ms, computing_ms / blocks / (1 + BACKWARD), spread, packed)
    step = one.step_ms()
    bound = max(computing_ms, one.copies * copy_ms)
    return {"step_ms": step, "copies": one.copies, "bound_ms": bound, "over_bound": step / bound}


def table(blocks: int, ratios: list[float], slots: list[int]) -> list[dict[str, Any]]:
    """Rows by slots: the step over its bound, for computing that takes `ratio` times two crossings of all blocks."""
    rows = []
    for count in slots:
        row: dict[str, Any] = {"slots": count}
        for ratio in ratios:
            copy_ms = 1.0
            row[f"{ratio:g}"] = simulate(blocks, count, ratio * 2 * blocks * copy_ms, copy_ms)["over_bound"]
            # The same memory as three ring slots and residents, as slots="auto" divides it.
            auto = simulate(blocks, min(3, count), ratio * 2 * blocks * copy_ms, copy_ms, max(0, count - 3))
            row[f"{ratio:g} auto"] = auto["over_bound"]
        rows.append(row)
    return rows


def packed_blocks(variant: str, blocks: int) -> frozenset[int]:
    """The blocks that a variant of benchmarks/streaming.py sends in INT8."""
    return spread_residents(blocks, round({"int8": 1.0, "mix60": INT8_SHARE}.get(variant, 0.0) * blocks))


def needed_slots(blocks: int, ratio: float, limit: float) -> int:
    """The fewest slots with which a step is within `limit` of its bound."""
    fits = (
        count
        for count in range(2, blocks + 1)
        if simulate(blocks, count, ratio * 2 * blocks, 1.0)["over_bound"] <= limit
    )
    return next(fits, blocks)


def compare(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Measured steps beside simulated ones of the same computing time and the same time a copy."""
    blocks, rows = result["model"]["blocks"], []
    resident = {row["tokens"]: row["median_ms"] for row in result["rows"] if row["variant"] == "resident"}
    for row in result["rows"]:
        slots = row.get("slots", result["slots"])
        if "bound_ms" not in row or row["tokens"] not in resident or slots == "auto":
            continue
        packed = packed_blocks(row["variant"], blocks)
        simulated = simulate(blocks, slots, resident[row["tokens"]], row["transfer_ms"] / row["loads"], packed=packed)
        rows.append(
            {
                "tokens": row["tokens"],
                "variant": row["variant"],
                "slots": slots,
                "measured_ms": row["median_ms"],
                "simulated_ms": simulated["step_ms"],
                "bound_ms": simulated["bound_ms"],
                "with_slots_ms": {
                    count: simulate(
                        blocks, count, resident[row["tokens"]], row["transfer_ms"] / row["loads"], packed=packed
                    )["step_ms"]
                    for count in MORE_SLOTS
                },
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="computing over copying")
    parser.add_argument("--slots", type=int, nargs="+", default=[2, 3, 4, 5, 6, 8, 12])
    parser.add_argument("--limit", type=float, default=1.03)
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    heads = "".join(f"{ratio:>8g} {'auto':>8}" for ratio in options.ratios)
    print(f"step over max(computing, copying), {options.blocks} blocks; computing over two crossings of all blocks:")
    print(f"slots{heads}")
    for row in table(options.blocks, options.ratios, options.slots):
        values = "".join(f"{row[f'{one:g}']:8.3f} {row[f'{one:g} auto']:8.3f}" for one in options.ratios)
        print(f"{row['slots']:5}{values}")
    for ratio in options.ratios:
        count = needed_slots(options.blocks, ratio, options.limit)
        print(f"computing {ratio:g} times copying: {count} slots are within {options.limit:g}")
    if options.compare:
        print("tokens  variant        measured  simulated  bound, ms  simulated with slots", *MORE_SLOTS)
        for row in compare(json.loads(RESULT.read_text(encoding="utf-8"))):
            print(
                f"{row['tokens']:6}  {row['variant']:<13} {row['measured_ms']:9.1f}  {row['simulated_ms']:9.1f}"
                f"  {row['bound_ms']:9.1f}  {'':18}"
                + "".join(f"{value:8.1f}" for value in row["with_slots_ms"].values())
            )


if __name__ == "__main__":
    main()

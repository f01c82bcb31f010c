"""The rows of benchmarks/streaming.py as lines and as a table, and the slots they are of."""

from __future__ import annotations

from typing import Any, Literal

Row = dict[str, Any]
Slots = int | Literal["auto"]  # auto: as many as fit, which is what stream_blocks does by itself


def slots_order(slots: Slots) -> float:
    return float("inf") if slots == "auto" else slots


def slots_of(text: str) -> Slots:
    return "auto" if text == "auto" else int(text)


def line_of(row: Row) -> str:
    text = f"{row['tokens']:>6} tokens  {row['variant']:<10} {row['median_ms']:9.2f} ms"
    text += f"  {row['times_resident']:6.2f} x resident"
    if "times_bound" in row:
        text += f"  {row['slots']!s:>4} slots"
        text += f"  floor {row['bound_ms']:8.2f} ms ({'transfer' if row['is_transfer_bound'] else 'compute'})"
        text += f"  gap {row['times_bound'] - 1:+6.1%}"
        text += f"  {row['h2d_gb_per_s'] or 0:.1f} GB/s  stall {row['stall_share']:.1%}"
    return text


def table_of(rows: list[Row]) -> str:
    """The steps as a Markdown table: the floor, the gap to it, and how others stand to each variant."""
    lines = [
        "| tokens | blocks sent as | slots | step ms | floor ms | gap | simulated ms | H2D of the pinned peak | stall "
        "| one-ahead takes | pageable takes | resident takes |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    times = {(row["tokens"], row["variant"]): row["median_ms"] for row in rows if "times_bound" not in row}
    for row in rows:
        if "times_bound" not in row:
            continue
        others = [
            f"{times[row['tokens'], name] / row['median_ms']:.2f}x" if (row["tokens"], name) in times else ""
            for name in ("one-ahead", "pageable", "resident")
        ]
        what = "transfer" if row["is_transfer_bound"] else "compute"
        lines.append(
            f"| {row['tokens']} | {row['variant']} | {row['slots']} | {row['median_ms']:.1f} | "
            f"{row['bound_ms']:.1f} ({what}) | {row['times_bound'] - 1:+.1%} | {row['simulated_ms']:.1f} | "
            f"{h2d_share(row):.0%} | {row['stall_share']:.1%} | {' | '.join(others)} |"
        )
    return "\n".join(lines)


def h2d_share(row: Row) -> float:
    """Bytes over the whole step, gaps and all, of what pinned copies reach."""
    return float(row["bytes_h2d"] / row["median_ms"] / 1e6 / row["pinned_gb_per_s"])

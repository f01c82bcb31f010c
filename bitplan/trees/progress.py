"""A progress bar over rounds, for people who wait: rich's, on standard error, and only when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def round_bar(rounds: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield what to call after each round, with its number."""
    if not shown:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("boosting", total=rounds)
        yield lambda number: progress.update(task, completed=number + 1)

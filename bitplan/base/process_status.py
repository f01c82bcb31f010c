"""Why a step of all processes of torch.distributed has failed: which of them ended, and with what error.

Each process that ends by an error leaves a message in the store of the group (`leave`). A process whose step fails asks
that store (`explain`): it writes that it is here, and waits until every other process has written so or left a message.
One that was killed or hangs does neither, and is named after `ANSWER_WAIT_S`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from bitplan.base.errors import visible

ANSWER_WAIT_S = 5.0  # how long the others have to say that they are here
SHOWN_CHARACTERS = 2000  # of another process's message


class ProcessStatus:
    """What one process writes into the store of its group and reads there; `names` are those of all, by rank.

    Keys begin with `prefix`, which differs between groups that use the store one after the other.
    """

    def __init__(self, store: Any, prefix: str, rank: int, names: Sequence[str]) -> None:
        self._store, self._prefix, self._rank, self._names = store, prefix, rank, names

    def leave(self, error: BaseException, label: str = "ended") -> None:
        """Write the error into the store, under `label`; nothing happens where the store cannot be reached."""
        message = visible(f"{type(error).__name__}: {error}", SHOWN_CHARACTERS)
        self._try(lambda: self._store.set(self.key(label), message))

    def message(self, rank: int, label: str = "ended") -> str:
        """The error that the process of this rank has left under `label`, fit to be shown."""
        return visible(self._store.get(self.key(label, rank)).decode(errors="replace"), SHOWN_CHARACTERS)

    def explain(self, error: RuntimeError) -> str:
        """Which processes ended or do not answer, with their errors; `error` is what gloo or the store raised."""
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        cause = visible(re.sub(r"^\[\S+\] |\. This is typically.*", "", first_line), SHOWN_CHARACTERS)
        ended, silent, is_store_there = self._ask_all()
        if not is_store_there:
            return (
                "the store of the process group is gone: what hosts it ended, rank 0 or torchrun's own process; look "
                f"at its output ({cause})"
            )
        if ended:
            return "; ".join(f"{self._names[rank]} ended with {message}" for rank, message in sorted(ended.items()))
        if silent:
            names = ", ".join(self._names[rank] for rank in silent)
            return f"no answer from {names}: it died, or hangs; look at its output ({cause})"
        return (
            "every process answers, so the others stopped waiting for this one or a connection broke; raise timeout_s, "
            f"or look at the network ({cause})"
        )

    def key(self, label: str, rank: int | None = None) -> str:
        """The store's key of a label and a rank, this process's without one."""
        return f"{self._prefix}/{label}/{self._rank if rank is None else rank}"

    def _ask_all(self) -> tuple[dict[int, str], list[int], bool]:
        """Messages of processes that ended, ranks that give no answer, and whether the store could be asked."""
        ended: dict[int, str] = {}
        silent = [rank for rank in range(len(self._names)) if rank != self._rank]
        is_reached = self._try(lambda: self._store.set(self.key("here"), "yes"))
        until = time.monotonic() + ANSWER_WAIT_S
        while is_reached and silent and not ended and time.monotonic() < until:
            is_reached = self._try(lambda: self._read_answers(ended, silent))
            time.sleep(0.05)
        return ended, silent, is_reached

    def _read_answers(self, ended: dict[int, str], silent: list[int]) -> None:
        """Take ranks that have written something out of `silent`; messages of those that ended go to `ended`."""
        for rank in list(silent):
            if self._store.check([self.key("ended", rank)]):
                ended[rank] = self.message(rank)
            if rank in ended or self._store.check([self.key("here", rank)]):
                silent.remove(rank)

    def _try(self, ask: Callable[[], Any]) -> bool:
        """Whether the store could be reached: that it cannot is an answer here, and not an error."""
        try:
            ask()
        except RuntimeError:
            return False
        return True

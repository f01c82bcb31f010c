"""What is said of processes that ended, over a store within this process; real processes are in tests of users."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from bitplan.base import process_status
from bitplan.base.process_status import ProcessStatus

NAMES = ["rank 0", "rank 1 (worker b)", "rank 2"]
BROKEN = RuntimeError("[/pytorch/gloo.cc:12] Connection closed by peer. This is typically a firewall\nmore lines")


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(process_status, "ANSWER_WAIT_S", 0.2)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.01))
    return store


def all_of(store, prefix="group/1"):
    return [ProcessStatus(store, prefix, rank, NAMES) for rank in range(len(NAMES))]


def test_a_process_that_left_an_error_is_named_with_it(store):
    first, second, _ = all_of(store)
    second.leave(ValueError("no such\nfile"))
    assert first.explain(BROKEN) == r"rank 1 (worker b) ended with ValueError: no such\nfile"


def test_processes_that_write_nothing_are_named_with_the_first_line_of_the_cause(store):
    first, second, third = all_of(store)
    assert first.explain(BROKEN) == (
        "no answer from rank 1 (worker b), rank 2: it died, or hangs; look at its output (Connection closed by peer)"
    )
    assert "no answer from rank 2" in second.explain(BROKEN)  # the first has written that it is here
    assert third.explain(BROKEN).startswith("every process answers")


def test_groups_that_use_a_store_one_after_the_other_do_not_hear_each_other(store):
    all_of(store)[1].leave(ValueError("of the group before"))
    assert "no answer from rank 1 (worker b), rank 2" in all_of(store, "group/2")[0].explain(BROKEN)


def test_a_message_has_a_label_of_its_own(store):
    first, second, _ = all_of(store)
    second.leave(ValueError("in step 3"), "failed in step 3")
    assert first.message(1, "failed in step 3") == "ValueError: in step 3"
    assert "no answer from" in first.explain(BROKEN)  # it has not ended


def test_a_store_that_is_gone_is_said_and_no_error():
    class Gone:
        def set(self, *_):
            raise dist.DistStoreError("gone")

    status = ProcessStatus(Gone(), "group/1", 0, NAMES)
    status.leave(ValueError("nobody reads this"))
    assert status.explain(RuntimeError("")).startswith("the store of the process group is gone: what hosts it ended")
    assert status.explain(RuntimeError("")).endswith("(RuntimeError)")


def test_messages_of_other_processes_are_cut_and_escaped(store):
    first, second, _ = all_of(store)
    store.set(second.key("ended"), "ValueError: \x1b[2Jred\n" + "x" * 3_000_000)
    message = first.explain(BROKEN)
    assert r"ended with ValueError: \x1b[2Jred\nxxx" in message
    assert message.endswith("x... (3000020 characters)")
    assert message.isprintable()
    assert len(message) < 2500
    first.leave(ValueError("\x1b" * 3_000_000))
    assert len(store.get(first.key("ended"))) < 10_000

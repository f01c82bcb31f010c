"""Helper threads: every piece is done once, by no more threads than were asked for, by several callers at once, too."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bitplan.base.loops import helper_threads
from bitplan.base.loops.addresses import read, take, write
from bitplan.base.loops.openmp_threads import c_function

PIECES = 40


def mark_pieces(job):
    """Place 0: the next piece; 1: how many threads came; then what each piece was done."""
    take(job + 8, 1)
    piece = take(job, 1)
    while piece < PIECES:
        write(job + 16 + 8 * piece, read(job + 16 + 8 * piece, np.int64) + 1)
        piece = take(job, 1)


@pytest.fixture(scope="module")
def mark():
    yield c_function(mark_pieces)
    helper_threads.stop()


def run_once(mark, threads):
    job = np.zeros(2 + PIECES, np.int64)
    helper_threads.run(mark, job.ctypes.data, threads)
    assert (job[2:] == 1).all()
    assert 1 <= job[1] <= threads


def test_every_piece_is_done_once(mark):
    for threads in (1, 4, 2, 6) * 100:
        run_once(mark, threads)


def test_several_callers_at_once(mark):
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(run_once, mark, 3) for _ in range(400)]:
            future.result()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12: beside threads
def test_a_forked_process_has_helpers_of_its_own(mark):
    run_once(mark, 3)
    child = os.fork()
    if child == 0:
        try:
            run_once(mark, 3)
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="helpers sleep on semaphores of Linux")
def test_work_that_nobody_took_is_not_left_for_helpers_to_find_and_hides_no_sleeper():
    """Else they go through thousands of ended runs, and the next caller waits for them; or are never woken again."""
    function, job = c_function(_nothing), np.zeros(1, np.int64)
    for number in range(2000):  # with pauses in which some fall asleep
        helper_threads.run(function, job.ctypes.data, 16)
        helpers = helper_threads._sets[0]
        assert ctypes.c_int64.from_address(helpers._address + helper_threads.COUNT).value == 0
        time.sleep(number % 20 * 2e-5)
    give_up = time.monotonic() + 60
    sleepers = sleepers_of(helpers)
    while sleepers.value != len(helpers._threads) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert sleepers.value == len(helpers._threads), "asleep, as far as the pool knows"


def sleepers_of(helpers):
    return ctypes.c_int64.from_address(helpers._address + helper_threads.SLEEPERS)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="helpers sleep on semaphores of Linux")
def test_work_for_few_wakes_nobody_while_enough_look_for_it(mark):
    """Else work for two after work for sixteen wakes one sleeper after the other, and who is awake looks in vain."""
    run_once(mark, 16)
    helpers, fewest, give_up = helper_threads._sets[0], [], time.monotonic() + 60
    sleepers = sleepers_of(helpers)
    while len(fewest) < 5 and time.monotonic() < give_up:
        while sleepers.value != len(helpers._threads):
            time.sleep(0.001)
        asleep = []
        for _ in range(200):
            run_once(mark, 2)
            asleep.append(len(helpers._threads) - sleepers.value)
        fewest.append(max(asleep))
    assert sorted(fewest)[1] <= 3, "a busy machine may let one sleep between two runs, and another wake"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="helpers sleep on semaphores of Linux")
def test_helpers_look_longer_while_each_thread_has_a_core(mark):
    def seen():
        run_once(mark, 2)
        return helper_threads.looks(), helper_threads._sets[0]._patience.value

    usual, longer = (
        (helper_threads.SHARED_LOOKS, helper_threads.SLEEP_LOOKS),
        (helper_threads.OWN_LOOKS, helper_threads.AWAKE_LOOKS),
    )
    assert seen() == usual
    with helper_threads.staying_awake(2, 4):
        assert seen() == longer
        with helper_threads.staying_awake(2, 4):
            assert seen() == longer
            with helper_threads.staying_awake(1, 4):
                assert seen() == usual, "five threads"
        assert seen() == longer
    assert seen() == usual
    with helper_threads.staying_awake(5, 4):
        assert seen() == usual


def _nothing(_job):
    return None

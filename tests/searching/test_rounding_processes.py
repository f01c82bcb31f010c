"""Weights rounded in other processes are those that are rounded here."""

from __future__ import annotations

import os

import pytest
import torch

import bitplan
from bitplan.base.errors import FormatError
from bitplan.searching import Goal, SearchOptions, damage
from bitplan.searching.damage import RoundedWeights, RoundingJob, RoundingProcesses
from bitplan.searching.goal import SearchError
from bitplan.searching.searched_model import subject_of
from bitplan.searching.statistics import InputStatistics, add_windows
from tests.searching.test_run import tiny_llama, tokens


def test_weights_are_rounded_in_processes_as_here_and_errors_come_back(tmp_path):
    subject, statistics = subject_of(tiny_llama()), InputStatistics()
    add_windows(subject, tokens(), statistics, tmp_path, lambda _: None)
    pairs = [(name, fmt) for name in subject.sites for fmt in ("mxfp4", "q4_0_gguf")]
    found = []
    for workers in (0, 1):
        rounded, done = RoundedWeights(subject, statistics, workers), []
        rounded.round_all(pairs, lambda name, fmt, done=done: done.append((name, fmt)))
        assert sorted(done) == sorted(pairs)
        assert not rounded.missing(pairs)
        found.append([rounded.encoded(*pair).parts for pair in pairs])
    for here, there in zip(*found, strict=True):
        assert here.keys() == there.keys()
        assert all(torch.equal(part, there[key]) for key, part in here.items())
    job = RoundingJob(
        {"a": torch.ones(2, 32).numpy()}, {"a": 64}, [("a", "no_such_format", tmp_path / "a")], None, {}, {}
    )
    assert rounded._processes is not None
    with pytest.raises(FormatError, match="no_such_format"):
        list(rounded._processes.round([job]))
    with pytest.raises(SearchError, match=r"one of 1, ended without an answer.*fewer, or none \(workers=0\)"):
        list(rounded._processes.round([_EndingJob({}, {}, [], None, {}, {})]))


def test_a_search_finds_the_same_plan_with_workers(monkeypatch):
    counts: list[int] = []

    class InThisProcess(RoundingProcesses):
        def __post_init__(self):
            counts.append(self.count)

        def round(self, jobs):
            return (done for job in jobs for done in job.run())

    monkeypatch.setattr(damage, "RoundingProcesses", InThisProcess)
    options = {"goal": Goal(bits=7.0), "formats": ("mxfp4", "int8_row")}
    plain, found = (
        bitplan.search(tiny_llama(), tokens(), options=SearchOptions(workers=count), **options) for count in (0, 3)
    )
    assert counts == [3]
    assert found.plan.to_document() == plain.plan.to_document()


def test_a_search_finds_the_same_plan_on_a_dask_cluster():
    distributed = pytest.importorskip("distributed")
    options = {"goal": Goal(bits=7.0), "formats": ("mxfp4", "int8_row")}
    with distributed.LocalCluster(processes=False, n_workers=2, threads_per_worker=1, dashboard_address=":0") as dask:
        plain, found = (
            bitplan.search(tiny_llama(), tokens(), options=SearchOptions(workers=workers), **options)
            for workers in (0, dask.scheduler_address)
        )
    assert found.plan.to_document() == plain.plan.to_document()
    assert found.winner.kl == plain.winner.kl


class _EndingJob(RoundingJob):
    def run(self):
        os._exit(1)

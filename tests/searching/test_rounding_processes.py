"""Weights rounded, and statistics taken, in other processes are those of this one."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

import bitplan
from bitplan.base.errors import FormatError
from bitplan.searching import Goal, SearchOptions, collect, damage, statistics
from bitplan.searching.damage import RoundedWeights, RoundingJob, RoundingProcesses
from bitplan.searching.goal import SearchError, no_stage
from bitplan.searching.searched_model import open_subject, subject_of
from bitplan.searching.statistics import InputStatistics, add_windows
from tests.files.engines.tiny_models import save_tiny
from tests.searching.test_run import tiny_llama, tokens


def test_weights_are_rounded_in_processes_as_here_and_errors_come_back(tmp_path):
    subject, statistics = subject_of(tiny_llama(layers=1)), InputStatistics()
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


OPTIONS = {"goal": Goal(bits=7.0), "formats": ("mxfp4", "int8_row")}


@pytest.fixture(scope="module")
def plain():
    """A search in this process alone."""
    return bitplan.search(tiny_llama(layers=1), tokens(), **OPTIONS)


def test_a_search_finds_the_same_plan_with_workers(plain, monkeypatch):
    counts: list[int] = []

    class InThisProcess(RoundingProcesses):
        def __post_init__(self):
            counts.append(self.count)

        def round(self, jobs):
            return (done for job in jobs for done in job.run())

    monkeypatch.setattr(damage, "RoundingProcesses", InThisProcess)
    found = bitplan.search(tiny_llama(layers=1), tokens(), options=SearchOptions(workers=3), **OPTIONS)
    assert counts == [3]
    assert found.plan.to_document() == plain.plan.to_document()


def test_a_search_finds_the_same_plan_on_a_dask_cluster(plain):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(processes=False, n_workers=2, threads_per_worker=1, dashboard_address=":0") as dask:
        options = SearchOptions(workers=dask.scheduler_address)
        found = bitplan.search(tiny_llama(layers=1), tokens(), options=options, **OPTIONS)
    assert found.plan.to_document() == plain.plan.to_document()
    assert found.winner.kl == plain.winner.kl


class _EndingJob(RoundingJob):
    def run(self):
        os._exit(1)


def gathered(model: Path, folder: Path, address: str | int) -> dict[str, bytes]:
    """The files of statistics of a tiny model, in shares of four windows, by a cluster's workers or here."""
    windows = list(torch.randint(16, (14, 12), generator=torch.Generator().manual_seed(1)))
    rounded = RoundedWeights(open_subject(model, "cpu"), InputStatistics(), address)
    folder.mkdir()
    found = collect._gather(rounded, windows, {"text": "drawn"}, folder, no_stage)
    assert (found.windows, found.tokens, found.gradient_tokens) == (14, 14 * 12, 4 * 12)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def small_shares(monkeypatch):
    monkeypatch.setattr(statistics, "AT_ONCE", 48)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.usefixtures("small_shares")
def test_statistics_of_a_clusters_workers_are_those_taken_here(kind, tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")
    save_tiny(tmp_path / kind, kind)
    there = []
    monkeypatch.setattr(
        collect, "sums_of_share", lambda *args: there.append(args[1]) or statistics.sums_of_share(*args)
    )
    alone = gathered(tmp_path / kind, tmp_path / "alone", 0)
    assert not there
    with distributed.LocalCluster(processes=False, n_workers=2, threads_per_worker=1, dashboard_address=":0") as dask:
        assert gathered(tmp_path / kind, tmp_path / "there", dask.scheduler_address) == alone
    assert sorted((share.first, *share.takes) for share in there) == [
        (0, "gradient"),
        *((first, "inputs") for first in (0, 4, 8, 12)),
    ]


class SumsKilledOnce(collect.SumsOfShares):
    """Ends its process in the second share, as a machine that is switched off, if no other has."""

    mark: Path

    def make(self, share):
        made = super().make(share)
        if share.first and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return made


def killed_once(mark: Path, *args):
    opened = collect.open_sums(*args)
    opened.__class__ = SumsKilledOnce
    opened.mark = mark
    return opened


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.usefixtures("small_shares")
def test_a_killed_workers_share_of_the_statistics_is_taken_again(workers, tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")
    save_tiny(tmp_path / "llama", "llama")
    alone = gathered(tmp_path / "llama", tmp_path / "alone", 0)
    monkeypatch.setattr(collect, "open_sums", partial(killed_once, tmp_path / "mark"))
    with distributed.LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0") as processes:
        assert gathered(tmp_path / "llama", tmp_path / "there", processes.scheduler_address) == alone
    assert (tmp_path / "mark").exists()

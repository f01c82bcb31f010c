"""The fingerprint of this machine: an emulation is never taken for a GPU."""

from __future__ import annotations

import pytest
import torch

from bitplan.base import __version__
from bitplan.fp8.policy.report import EMULATED, commit, fingerprint_of


def test_cpu_says_that_it_emulates():
    result = fingerprint_of(torch.device("cpu"))
    assert result.gpu == EMULATED
    assert (result.torch, result.bitplan) == (torch.__version__, __version__)
    assert not result.differences(fingerprint_of(torch.device("cpu")))


def test_a_stated_commit_counts(monkeypatch):
    commit.cache_clear()
    monkeypatch.setenv("BITPLAN_COMMIT", "abc1234")
    assert fingerprint_of(torch.device("cpu")).commit == "abc1234"
    commit.cache_clear()


@pytest.mark.gpu
def test_gpu():
    result = fingerprint_of(torch.device("cuda"))
    assert result.gpu == torch.cuda.get_device_name()
    assert result.driver

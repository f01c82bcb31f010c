"""Weights that are rounded some rows at a time have the bits that they have as a whole."""

from __future__ import annotations

import gc
import stat
import tempfile
from types import SimpleNamespace

import pytest
import torch

from bitplan.formats.dispatch import encode
from bitplan.rounding.weights import round_weight
from bitplan.searching import damage
from bitplan.searching.statistics import InputStatistics

LONG = [pytest.param(fmt, marks=pytest.mark.long) for fmt in ("iq4_nl_gguf", "mxfp4", "int4_g32", "fp8_e4m3_b128")]


@pytest.mark.parametrize("fmt", ["q4_k_gguf", "nvfp4", "int8_row", *LONG])
def test_rows_rounded_apart_are_those_of_the_whole(fmt):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(320, 256, generator=generator)
    inputs = torch.randn(600, 256, generator=generator)
    statistics = ({"hessian": inputs.T @ inputs}, {"moments": inputs.square().mean(0)})
    whole = [round_weight(weight, fmt, **each).parts for each in statistics]
    at_once = 128 * 256
    assert [len(piece) for piece in damage.pieces_of(weight, at_once, damage._height(weight.shape, fmt))] == [
        128,
        128,
        64,
    ]
    for before, each in zip(whole, statistics, strict=True):
        apart = damage.round_by_rows(weight, fmt, at_once, **each).parts
        assert before.keys() == apart.keys()
        assert all(torch.equal(before[part], apart[part]) for part in before)


def test_plain_casts_are_made_in_pieces_too():
    weight = torch.randn(5, 64)
    assert torch.equal(damage.round_by_rows(weight, "bfloat16", 64).data, encode(weight, "bfloat16").data)


def test_scratch_folders_of_processes_that_are_gone_are_removed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    of_a_user = tmp_path / "bitplan-search-notes"
    of_a_user.mkdir()
    left = tmp_path / ".bitplan-search-0123456789ab"
    left.mkdir()
    (left / "weight-0").write_bytes(b"left by a killed search")
    first = damage.RoundedWeights(SimpleNamespace(), InputStatistics())
    assert not left.exists()
    second = damage.RoundedWeights(SimpleNamespace(), InputStatistics())
    assert {*tmp_path.iterdir()} == {of_a_user, first.scratch, second.scratch}
    assert stat.S_IMODE(first.scratch.stat().st_mode) == 0o700
    (first.scratch / "weight-0").write_bytes(b"numbers")
    del first
    gc.collect()
    assert {*tmp_path.iterdir()} == {of_a_user, second.scratch}

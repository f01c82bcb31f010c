"""The calibration's document: means over samples, what is missing, and which part of a fingerprint differs."""

from __future__ import annotations

import pytest
import torch

from bitplan.base.hardware import hash_tensors
from bitplan.streaming.selective.calibration import (
    Calibration,
    CalibrationError,
    compare_fingerprints,
    fingerprint_of,
    load_calibration,
    relative_error,
    tensors_of,
)


def sample_fingerprint(**changes):
    parts = {
        "weights": {"layers.0": [torch.ones(2, 2)], "layers.1": [torch.zeros(2, 2)]},
        "formats": ["int8_row"],
        "layout": {"layers.0": "1 parameter", "layers.1": "1 parameter"},
        "batches": [torch.arange(4), torch.arange(5)],
    }
    return fingerprint_of(**{**parts, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"layers.0": [torch.ones(2, 2)], "layers.1": [torch.ones(2, 2)]}}, "the weights of 'layers.1'"),
        ({"formats": ["int8_row", "int8_g128"]}, "the quantizer settings of 'int8_g128'"),
        ({"layout": {"layers.0": "2 parameters", "layers.1": "1 parameter"}}, "the block layout of 'layers.0'"),
        ({"batches": [torch.arange(4), torch.arange(5).float()]}, "the data of 'batch 1'"),
    ],
)
def test_each_part_is_named(changes, message):
    (result,) = compare_fingerprints(sample_fingerprint(), sample_fingerprint(**changes))
    assert result.startswith(f"{message} differ (")


def test_the_same_is_the_same_and_rubbish_is_not():
    assert compare_fingerprints(sample_fingerprint(), sample_fingerprint()) == []
    assert len(compare_fingerprints(None, sample_fingerprint())) == 5
    assert len(compare_fingerprints({"weights": 3}, sample_fingerprint())) == 5


def test_a_hash_sees_numbers_types_and_shapes():
    numbers = torch.arange(6.0)
    kinds = [numbers, numbers.reshape(2, 3), numbers.bfloat16(), numbers.int(), -numbers, torch.tensor(1.0)]
    assert len({hash_tensors([one]) for one in kinds}) == len(kinds)
    assert hash_tensors([numbers.reshape(2, 3).t()]) == hash_tensors([numbers.reshape(2, 3).t().contiguous()])
    assert hash_tensors(tensors_of({"b": 1, "a": numbers})) == hash_tensors(tensors_of({"a": numbers, "b": 1}))
    assert hash_tensors(tensors_of({"use_cache": True})) != hash_tensors(tensors_of({"use_cache": False}))
    with pytest.raises(CalibrationError, match="got a set in it"):
        tensors_of([{1}])


def test_means_what_is_missing_and_what_gave_no_number(tmp_path):
    done = Calibration(sample_fingerprint())
    assert done.missing_formats(0, ["int8_row"]) == ["int8_row"]
    done.layers = {"0": {"layers.0.up": {"int8_row": 0.1}}, "1": {"layers.0.up": {"int8_row": 0.3}}}
    done.blocks = {"int8_row": {"0": {"layers.0": 0.25, "layers.1": None}, "1": {"layers.0": 0.75, "layers.1": None}}}
    assert done.is_done(0, ["int8_row"])
    assert not done.is_done(2, ["int8_row"])
    result = done.result()
    assert result.of("layers.0", "int8_row") == 0.5
    assert result.of("layers.0.up", "int8_row") == pytest.approx(0.2)
    assert result.of("layers.1", "int8_row") is None
    assert result.excluded == {"layers.1": 2}
    done.save(tmp_path / "calibration.json")
    assert load_calibration(tmp_path / "calibration.json", sample_fingerprint()) == done


def test_relative_error():
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])) == pytest.approx(0.2)
    assert relative_error(torch.zeros(2), torch.zeros(2)) is None
    assert relative_error(torch.ones(2), torch.tensor([1.0, float("nan")])) is None

"""The public names: a change here is a change users see."""

from __future__ import annotations

import bitplan

NAMES = {
    "BitplanError",
    "Encoded",
    "ErrorReport",
    "Format",
    "QuantExperts",
    "QuantLinear",
    "SelectivePrecisionPolicy",
    "TileCache",
    "WeightStore",
    "__version__",
    "apply_fp8",
    "apply_plan",
    "compare_models",
    "decode",
    "encode",
    "error_report",
    "get_format",
    "list_formats",
    "load_model",
    "load_packed",
    "morph_model",
    "open_tensors",
    "quantize_file",
    "repack",
    "run_calibration",
    "save_model",
    "stream_blocks",
    "unmorph_model",
    "write_report",
}


def test_public_names_are_these() -> None:
    assert set(bitplan.__all__) == NAMES


def test_every_public_name_exists_and_says_what_it_is() -> None:
    for name in NAMES - {"__version__"}:
        assert getattr(bitplan, name).__doc__, name

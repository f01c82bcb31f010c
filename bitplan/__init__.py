"""bitplan: the right number format for every part of a model.

`encode` and `decode` pick the fastest implementation for where the tensor lies; the definitions they must equal
are `bitplan.formats.encode` and `bitplan.formats.decode`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bitplan.errors import BitplanError
from bitplan.formats import Encoded, ErrorReport, Format, error_report, get_format, list_formats, repack
from bitplan.kernels import decode, encode
from bitplan.runtime.apply import apply_plan
from bitplan.runtime.quant_experts import QuantExperts
from bitplan.runtime.quant_linear import QuantLinear
from bitplan.runtime.tile_cache import TileCache
from bitplan.store.compare import compare_models
from bitplan.store.model_files import load_model, save_model
from bitplan.store.models import morph_model, unmorph_model
from bitplan.store.quantize import quantize_file
from bitplan.store.tensor_files import open_tensors
from bitplan.store.weights import WeightStore
from bitplan.version import __version__

if TYPE_CHECKING:
    from bitplan.report import write_report
    from bitplan.runtime.fp8_apply import apply_fp8
    from bitplan.runtime.load import load_packed
    from bitplan.runtime.run_calibration import run_calibration
    from bitplan.runtime.selective_precision import SelectivePrecisionPolicy
    from bitplan.runtime.stream_blocks import stream_blocks

__all__ = [
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
]


# Parts that bring much along are loaded when they are asked for.
_LATER = {
    "SelectivePrecisionPolicy": "bitplan.runtime.selective_precision",
    "apply_fp8": "bitplan.runtime.fp8_apply",
    "load_packed": "bitplan.runtime.load",
    "run_calibration": "bitplan.runtime.run_calibration",
    "stream_blocks": "bitplan.runtime.stream_blocks",
    "write_report": "bitplan.report",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'bitplan' has no attribute {name!r}")

"""bitplan: the right number format for every part of a model.

`encode` and `decode` pick the fastest implementation for where the tensor lies; the definitions they must equal
are `bitplan.formats.encode` and `bitplan.formats.decode`. A name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from bitplan.lazy_names import lazy_names
from bitplan.version import __version__

if TYPE_CHECKING:
    from bitplan.errors import BitplanError
    from bitplan.formats.encoded import Encoded
    from bitplan.formats.format import Format
    from bitplan.formats.registry import get_format, list_formats
    from bitplan.formats.repacking import repack
    from bitplan.formats.report import ErrorReport, error_report
    from bitplan.kernels.dispatch import decode, encode
    from bitplan.plan.manifest import Manifest
    from bitplan.plan.plan import Choice, Plan, combine
    from bitplan.plan.selective_config import SelectivePrecisionConfig
    from bitplan.report.page import write_report
    from bitplan.runtime.apply import apply_plan
    from bitplan.runtime.fp8_apply import apply_fp8, apply_fp8_config
    from bitplan.runtime.load import load_packed
    from bitplan.runtime.quant_experts import QuantExperts
    from bitplan.runtime.quant_linear import QuantLinear
    from bitplan.runtime.run_calibration import run_calibration
    from bitplan.runtime.selective_precision import SelectivePrecisionPolicy
    from bitplan.runtime.stream_blocks import stream_blocks
    from bitplan.runtime.tile_cache import TileCache
    from bitplan.store.compare import compare_models
    from bitplan.store.model_files import load_model, save_model
    from bitplan.store.models import morph_model, unmorph_model
    from bitplan.store.quantize import quantize_file
    from bitplan.store.tensor_files import open_tensors
    from bitplan.store.weights import WeightStore

__all__ = [
    "BitplanError",
    "Choice",
    "Encoded",
    "ErrorReport",
    "Format",
    "Manifest",
    "Plan",
    "QuantExperts",
    "QuantLinear",
    "SelectivePrecisionConfig",
    "SelectivePrecisionPolicy",
    "TileCache",
    "WeightStore",
    "__version__",
    "apply_fp8",
    "apply_fp8_config",
    "apply_plan",
    "combine",
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "errors": ("BitplanError",),
        "formats.encoded": ("Encoded",),
        "formats.format": ("Format",),
        "formats.registry": ("get_format", "list_formats"),
        "formats.repacking": ("repack",),
        "formats.report": ("ErrorReport", "error_report"),
        "kernels.dispatch": ("decode", "encode"),
        "plan.manifest": ("Manifest",),
        "plan.plan": ("Choice", "Plan", "combine"),
        "plan.selective_config": ("SelectivePrecisionConfig",),
        "report.page": ("write_report",),
        "runtime.apply": ("apply_plan",),
        "runtime.fp8_apply": ("apply_fp8", "apply_fp8_config"),
        "runtime.load": ("load_packed",),
        "runtime.quant_experts": ("QuantExperts",),
        "runtime.quant_linear": ("QuantLinear",),
        "runtime.run_calibration": ("run_calibration",),
        "runtime.selective_precision": ("SelectivePrecisionPolicy",),
        "runtime.stream_blocks": ("stream_blocks",),
        "runtime.tile_cache": ("TileCache",),
        "store.compare": ("compare_models",),
        "store.model_files": ("load_model", "save_model"),
        "store.models": ("morph_model", "unmorph_model"),
        "store.quantize": ("quantize_file",),
        "store.tensor_files": ("open_tensors",),
        "store.weights": ("WeightStore",),
    },
    parts=("formats", "kernels", "measure", "plan", "report", "runtime", "store", "trees"),
)

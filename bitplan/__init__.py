"""bitplan: the right number format for every part of a model.

`encode` and `decode` pick the fastest implementation for the tensor's device; they give the same bits as the
definitions `bitplan.formats.encode` and `bitplan.formats.decode`. A name is imported when it is first used.
"""

import sys
from typing import TYPE_CHECKING

from bitplan.lazy_names import lazy_names
from bitplan.version import __version__

if TYPE_CHECKING:
    from bitplan.errors import BitplanError
    from bitplan.formats.encoded import Encoded
    from bitplan.formats.format import Format
    from bitplan.formats.quantization_error import ErrorReport, error_report
    from bitplan.formats.registry import get_format, list_formats
    from bitplan.formats.repacking import repack
    from bitplan.kernels.codec.dispatch import decode, encode
    from bitplan.plan.choose import choose_formats
    from bitplan.plan.manifest import Manifest
    from bitplan.plan.plan import Choice, Plan, combine
    from bitplan.plan.selective.config import SelectivePrecisionConfig
    from bitplan.report.page import write_report
    from bitplan.runtime.fp8.apply import apply_fp8, apply_fp8_config
    from bitplan.runtime.packed.apply import apply_plan
    from bitplan.runtime.packed.checkpoints.load import load_packed
    from bitplan.runtime.packed.checkpoints.save import save_packed
    from bitplan.runtime.packed.fused_projections import fuse_projections
    from bitplan.runtime.packed.quant_embedding import QuantEmbedding
    from bitplan.runtime.packed.quant_experts import QuantExperts
    from bitplan.runtime.packed.quant_linear import QuantLinear
    from bitplan.runtime.packed.tile_cache import TileCache
    from bitplan.runtime.packed.warm_up import warm_up
    from bitplan.runtime.selective.run_calibration import run_calibration
    from bitplan.runtime.selective.training_policy import SelectivePrecisionPolicy
    from bitplan.runtime.streaming.stream_blocks import stream_blocks
    from bitplan.searching.goal import Goal
    from bitplan.searching.run import search
    from bitplan.store.compare import compare_models
    from bitplan.store.files.open_files import open_tensors
    from bitplan.store.models.morph import morph_model, unmorph_model
    from bitplan.store.models.save_load import load_model, save_model
    from bitplan.store.models.weight_store import WeightStore
    from bitplan.store.quantize import quantize_file

__all__ = [
    "BitplanError",
    "Choice",
    "Encoded",
    "ErrorReport",
    "Format",
    "Goal",
    "Manifest",
    "Plan",
    "QuantEmbedding",
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
    "choose_formats",
    "combine",
    "compare_models",
    "decode",
    "encode",
    "error_report",
    "fuse_projections",
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
    "save_packed",
    "search",
    "stream_blocks",
    "unmorph_model",
    "warm_up",
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
        "formats.quantization_error": ("ErrorReport", "error_report"),
        "kernels.codec.dispatch": ("decode", "encode"),
        "plan.choose": ("choose_formats",),
        "plan.manifest": ("Manifest",),
        "plan.plan": ("Choice", "Plan", "combine"),
        "plan.selective.config": ("SelectivePrecisionConfig",),
        "report.page": ("write_report",),
        "runtime.packed.apply": ("apply_plan",),
        "runtime.fp8.apply": ("apply_fp8", "apply_fp8_config"),
        "runtime.packed.checkpoints.load": ("load_packed",),
        "runtime.packed.checkpoints.save": ("save_packed",),
        "runtime.packed.fused_projections": ("fuse_projections",),
        "runtime.packed.quant_embedding": ("QuantEmbedding",),
        "runtime.packed.quant_experts": ("QuantExperts",),
        "runtime.packed.quant_linear": ("QuantLinear",),
        "runtime.selective.run_calibration": ("run_calibration",),
        "runtime.selective.training_policy": ("SelectivePrecisionPolicy",),
        "runtime.streaming.stream_blocks": ("stream_blocks",),
        "runtime.packed.tile_cache": ("TileCache",),
        "runtime.packed.warm_up": ("warm_up",),
        "searching.goal": ("Goal",),
        "searching.run": ("search",),
        "store.compare": ("compare_models",),
        "store.models.save_load": ("load_model", "save_model"),
        "store.models.morph": ("morph_model", "unmorph_model"),
        "store.quantize": ("quantize_file",),
        "store.files.open_files": ("open_tensors",),
        "store.models.weight_store": ("WeightStore",),
    },
    parts=("formats", "kernels", "measure", "plan", "report", "runtime", "searching", "store", "trees"),
)

_theirs = sys.modules.get("transformers")
if int(str(getattr(_theirs, "__version__", "0")).partition(".")[0]) >= 5:
    import bitplan.transformers  # noqa: F401 (imported already: its from_pretrained knows packed folders at once)

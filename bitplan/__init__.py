"""bitplan: the right number format for every part of a model.

`encode` and `decode` pick the fastest implementation for where the tensor lies; the definitions they must equal
are `bitplan.formats.encode` and `bitplan.formats.decode`.
"""

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
    from bitplan.runtime.load import load_packed

__all__ = [
    "BitplanError",
    "Encoded",
    "ErrorReport",
    "Format",
    "QuantExperts",
    "QuantLinear",
    "TileCache",
    "WeightStore",
    "__version__",
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
    "save_model",
    "unmorph_model",
]


def __getattr__(name: str) -> Any:
    if name == "load_packed":  # when it is asked for: it brings the readers of every container
        from bitplan.runtime.load import load_packed

        return load_packed
    raise AttributeError(f"module 'bitplan' has no attribute {name!r}")

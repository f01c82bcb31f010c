"""bitplan: the right number format for every part of a model.

`encode` and `decode` pick the fastest implementation for where the tensor lies; the definitions they must equal
are `bitplan.formats.encode` and `bitplan.formats.decode`.
"""

from bitplan.errors import BitplanError
from bitplan.formats import Encoded, ErrorReport, Format, error_report, get_format, list_formats, repack
from bitplan.kernels import decode, encode
from bitplan.store.compare import compare_models
from bitplan.store.model_files import load_model, save_model
from bitplan.store.models import morph_model, unmorph_model
from bitplan.store.quantize import quantize_file
from bitplan.store.tensor_files import open_tensors
from bitplan.store.weights import WeightStore
from bitplan.version import __version__

__all__ = [
    "BitplanError",
    "Encoded",
    "ErrorReport",
    "Format",
    "WeightStore",
    "__version__",
    "compare_models",
    "decode",
    "encode",
    "error_report",
    "get_format",
    "list_formats",
    "load_model",
    "morph_model",
    "open_tensors",
    "quantize_file",
    "repack",
    "save_model",
    "unmorph_model",
]

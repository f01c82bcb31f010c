"""What a number is: the exact definition of every format, in plain torch."""

from typing import TYPE_CHECKING

from bitplan.errors import FormatError, NonFiniteError
from bitplan.lazy_names import lazy_names

if TYPE_CHECKING:
    from bitplan.formats.codec import decode, encode
    from bitplan.formats.encoded import Encoded
    from bitplan.formats.format import Format
    from bitplan.formats.quantization_error import ErrorReport, error_report
    from bitplan.formats.registry import DTYPE_NAMES, get_format, list_formats
    from bitplan.formats.repacking import repack
    from bitplan.formats.scales.checks import scale_health
    from bitplan.formats.scales.reencode import requantize

__all__ = [
    "DTYPE_NAMES",
    "Encoded",
    "ErrorReport",
    "Format",
    "FormatError",
    "NonFiniteError",
    "decode",
    "encode",
    "error_report",
    "get_format",
    "list_formats",
    "repack",
    "requantize",
    "scale_health",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "codec": ("decode", "encode"),
        "scales.reencode": ("requantize",),
        "encoded": ("Encoded",),
        "format": ("Format",),
        "registry": ("DTYPE_NAMES", "get_format", "list_formats"),
        "repacking": ("repack",),
        "quantization_error": ("ErrorReport", "error_report"),
        "scales.checks": ("scale_health",),
    },
)

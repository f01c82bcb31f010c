"""What a number is: the exact definition of every format, in plain torch."""

from bitplan.formats.codec import decode, encode
from bitplan.formats.encoded import Encoded
from bitplan.formats.format import Format
from bitplan.formats.registry import DTYPE_NAMES, get_format, list_formats
from bitplan.formats.repack import repack
from bitplan.formats.report import ErrorReport, error_report

__all__ = [
    "DTYPE_NAMES",
    "Encoded",
    "ErrorReport",
    "Format",
    "decode",
    "encode",
    "error_report",
    "get_format",
    "list_formats",
    "repack",
]

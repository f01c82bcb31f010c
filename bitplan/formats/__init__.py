"""What a number is: the exact definition of every format, in plain torch.

Which module does which step:

    registry          the table of formats: element, block, storage of scales, packing
    elements          the numbers that a code can stand for
    scales.rules      how a scale is stored, and the rule that chooses it; MXFP4's is that of powers of two
    scales.choose     that rule, or another of a user's choice (mse, percentile), tile by tile
    codec             encode and decode by these definitions; `kernels.codec.dispatch` picks a faster twin
    fp8_recipes       the table of FP8 recipes: a new one is a row here, a test, and a row of docs/adaptive-fp8.md
    fp8               FP8 casts by these recipes
"""

from typing import TYPE_CHECKING

from bitplan.lazy_names import lazy_names

if TYPE_CHECKING:
    from bitplan.errors import FormatError as FormatError, NonFiniteError as NonFiniteError
    from bitplan.formats.codec import decode as decode, encode as encode
    from bitplan.formats.encoded import Encoded as Encoded
    from bitplan.formats.format import Format as Format
    from bitplan.formats.quantization_error import ErrorReport as ErrorReport, error_report as error_report
    from bitplan.formats.registry import (
        DTYPE_NAMES as DTYPE_NAMES,
        get_format as get_format,
        list_formats as list_formats,
    )
    from bitplan.formats.repacking import repack as repack
    from bitplan.formats.scales.checks import scale_health as scale_health
    from bitplan.formats.scales.reencode import requantize as requantize

__getattr__, __dir__, __all__ = lazy_names(__name__)

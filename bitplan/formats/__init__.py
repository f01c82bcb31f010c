"""What a number is: the exact definition of every format in plain torch, with its fast twins beside it.

Which module does which step:

    registry               the table of formats: element, block, storage of scales, packing
    elements               the numbers that a code can stand for
    scale_rules            how a scale is stored, and the rule that chooses it; MXFP4's is that of powers of two
    codec                  encode and decode by these definitions; scales by that rule or another (mse, percentile)
    dispatch               picks a faster twin, and says which and why: `cpu_codec` by numba, `triton_codec` on GPUs
    reencode, scale_checks    changed weights encoded again; scales and codes at the end of their range
    gguf                   GGUF's blocks with their own scales
"""

from typing import TYPE_CHECKING

from bitplan.base.names import lazy_names

if TYPE_CHECKING:
    from bitplan.base.errors import FormatError as FormatError
    from bitplan.formats.dispatch import decode as decode, encode as encode
    from bitplan.formats.encoded import Encoded as Encoded
    from bitplan.formats.quantization_error import error_report as error_report
    from bitplan.formats.reencode import requantize as requantize
    from bitplan.formats.registry import get_format as get_format
    from bitplan.formats.scale_checks import scale_health as scale_health

__getattr__, __dir__, __all__ = lazy_names(__name__)

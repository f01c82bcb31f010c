"""bitplan: the right number format for every part of a model.

Each name has one place: those of daily use are here, the others in their part (`bitplan.formats`, `bitplan.packed`). A
name is imported when it is first used. `encode` and `decode` pick the fastest implementation for the tensor's device;
they give the bits of the definitions in `bitplan.formats.codec`.
"""

import sys
from typing import TYPE_CHECKING

from bitplan.base.names import lazy_names
from bitplan.base.names import add_old_parts
from bitplan.base import __version__ as __version__

if TYPE_CHECKING:
    from bitplan.base.errors import BitplanError as BitplanError
    from bitplan.formats.registry import get_format as get_format
    from bitplan.formats.dispatch import decode as decode, encode as encode
    from bitplan.plan.format_choices import choose_formats as choose_formats
    from bitplan.plan.manifest import Manifest as Manifest
    from bitplan.plan.plan import Choice as Choice, Plan as Plan
    from bitplan.report.page import write_report as write_report
    from bitplan.fp8.apply import apply_fp8 as apply_fp8
    from bitplan.fp8.decide import Fp8Options as Fp8Options
    from bitplan.packed.apply_plan import apply_plan as apply_plan
    from bitplan.packed.rounded_inputs import round_inputs as round_inputs
    from bitplan.packed.checkpoints.load import load_packed as load_packed
    from bitplan.packed.checkpoints.save import save_packed as save_packed
    from bitplan.streaming.selective.trainer_callbacks import streaming_callback as streaming_callback
    from bitplan.streaming.block_stream import stream_blocks as stream_blocks
    from bitplan.searching.fit import fit as fit
    from bitplan.searching.goal import Goal as Goal
    from bitplan.searching.run import search as search
    from bitplan.files.compare import compare_models as compare_models
    from bitplan.files.open_files import open_tensors as open_tensors
    from bitplan.files.describe_files import describe as describe
    from bitplan.files.quantize_files import quantize_file as quantize_file
    from bitplan.packed.apply_plan import dequantize as dequantize
    from bitplan.packed.quant_linear import warm_up as warm_up
    from bitplan.plan.from_records import read_plan as read_plan

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    parts=("files", "formats", "fp8", "packed", "plan", "report", "rounding", "searching", "streaming", "trees"),
)
add_old_parts()

_theirs = sys.modules.get("transformers")
if int(str(getattr(_theirs, "__version__", "0")).partition(".")[0]) >= 5:
    import bitplan.transformers  # noqa: F401 (imported already: its from_pretrained knows packed folders at once)

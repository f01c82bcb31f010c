"""Which format each parameter of each block crosses the bus in.

`formats` may be
    None            every parameter in its own type: nothing is lost
    a name          that format for every weight of two or more axes; vectors (norms, biases) keep their own type
    a mapping       keys, first match wins: a parameter's full name, a block's or module's name (its matrices, as
                    above), or a shell pattern of either; parameters without a key, or with None, keep their type
    a manifest      its rules
    a Plan          by parameter name, exactly; a parameter of a block that the plan lacks is refused
Decisions only, by `choose_formats`: no tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bitplan.formats import Format, get_format
from bitplan.plan.format_choices import Stored, Wanted, choose_formats
from bitplan.plan.plan import Choice, Plan, Planned
from bitplan.runtime.streaming.blocks.layout import ParameterSpec
from bitplan.runtime.streaming.errors import StreamError

Formats = Wanted | None
# Block name -> (parameter's name within the block -> its shape and type).
BlockSpecs = Mapping[str, Mapping[str, ParameterSpec]]
BlockFormats = dict[str, dict[str, Format]]


def resolve_formats(formats: Formats, blocks: BlockSpecs, current: BlockFormats | None = None) -> BlockFormats:
    """Block -> parameter -> format. Parameters that a mapping does not name have those of `current`, if given."""
    specs = {f"{block}.{name}": spec for block, names in blocks.items() for name, spec in names.items()}
    own = {name: own_format(spec, name) for name, spec in specs.items()}
    now = {f"{block}.{name}": fmt for block, names in (current or {}).items() for name, fmt in names.items()}
    base = Plan({name: Planned(Choice((now or own)[name].name, "as it is")) for name in specs})
    if isinstance(formats, Plan):  # a plan may be for the whole model
        formats = Plan({name: entry for name, entry in formats.entries.items() if name in specs})
    elif formats is None:
        formats = base
    elif isinstance(formats, Format | str):
        formats = {"*": formats}
    tensors = {name: Stored(spec.shape, own[name].name) for name, spec in specs.items()}
    plan = choose_formats(tensors, formats, base=base, where="stream_blocks")
    plan.require_whole("stream_blocks")
    return {
        block: {name: get_format(plan[f"{block}.{name}"].format) for name in names} for block, names in blocks.items()
    }


def own_format(spec: ParameterSpec, name: str) -> Format:
    """The plain cast to a parameter's own type."""
    text = str(spec.dtype).removeprefix("torch.")
    if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise StreamError(
            f"{name}: {text} cannot be streamed; float32, bfloat16, float16 and float64 parameters can: "
            "stream the model before it is packed, and give the packed formats as `formats`"
        )
    return get_format(text)

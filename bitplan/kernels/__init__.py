"""The same numbers, faster: fast versions of the formats' definitions, and a dispatcher that says which it picked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitplan.lazy_names import lazy_names

if TYPE_CHECKING:
    from bitplan.kernels.codec.dispatch import (
        Picked as Picked,
        decode as decode,
        encode as encode,
        explain_decode as explain_decode,
        explain_encode as explain_encode,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__)  # loops for CPUs (`base`) need no torch

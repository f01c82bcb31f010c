"""`import bitplan.transformers`: transformers' from_pretrained then loads folders that `bitplan quantize` wrote."""

from __future__ import annotations

from bitplan.base.optional import require

require("transformers", purpose="bitplan.transformers", extra="models", least=5)

from bitplan.packed.checkpoints.quantizer import BitplanConfig, BitplanQuantizer, register  # noqa: E402

__all__ = ["BitplanConfig", "BitplanQuantizer"]
register()

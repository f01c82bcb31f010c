"""Packed models in lm-eval 0.4: `python -m bitplan.lm_eval` is its command line, and knows what bitplan wrote.

--model hf        folders that `bitplan quantize` packed, for transformers' plug-in is imported
--model bitplan   all that `bitplan generate` runs: also GGUF files and folders of other libraries
"""

from __future__ import annotations

from typing import Any

from bitplan.base.optional import require

require("lm_eval", purpose="bitplan.lm_eval")

import torch  # noqa: E402
from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

import bitplan.transformers  # noqa: E402, F401 (from_pretrained then knows packed folders)
from bitplan.packed.language.generation import load_for_running  # noqa: E402

__all__ = ["BitplanLM"]


@register_model("bitplan")
class BitplanLM(HFLM):  # type: ignore[misc]
    """lm-eval's model of transformers around one that bitplan loads.

    pretrained   a folder or a GGUF file
    dtype        of weights that are not packed, such as bfloat16; else float32 on a CPU, the folder's on a GPU
    inputs       the format that packed layers round their inputs to; else what a packed folder says
    """

    def __init__(
        self, pretrained: str, device: str = "cpu", dtype: str = "auto", inputs: str | None = None, **options: Any
    ) -> None:
        kind = None if dtype == "auto" else getattr(torch, dtype)
        lm = load_for_running(pretrained, device=device, dtype=kind, inputs=inputs)
        super().__init__(pretrained=lm.model, tokenizer=lm.tokenizer, device=device, **options)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()

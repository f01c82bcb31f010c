"""Guesses a tensor's role from its name, in Hugging Face's, GGUF's, OpenAI's and torch's own naming."""

from __future__ import annotations

import re

_ROLES = tuple(
    (role, re.compile(pattern, re.IGNORECASE))
    for role, pattern in (
        ("scale", r"[._]scales$"),
        ("bias", r"(^|[._])bias$"),
        ("norm", r"norm\w*$|(norm\w*|(^|[._])ln(_?\w+)?)\.(weight|scale|gamma)$"),
        ("router", r"router\b|(^|\.)(gate|wg)\.weight$|shared_expert_gate\b|gate_inp\w*\.weight$"),
        ("rope", r"rotary|(^|[._])rope|inv_freq|freqs_cis|(cos|sin)_cached"),
        (
            "position",
            r"position\w*embed|pos(itional)?_embed|embed_positions|(^|[._])wpe\b|position_embd|relative_\w*bias",
        ),
        ("state", r"(^|[._])(A_log|ssm_a)$"),
        (
            "embed",
            r"embed|embd|\bwte\b|^shared\.weight$|(^|\.)lm_head\b|^output\.weight$|predictions\.decoder\.weight$"
            r"|(^|\.)(score|classifier|qa_outputs|output_projection)\.weight$",
        ),
        ("attn", r"attn|attention|sinks|[qkv]_proj|qkv"),
        ("mlp_weight", r"mlp|ffn|experts|feed_forward"),
    )
)


def guess_role(name: str) -> str:
    """scale, bias, norm, router, rope, position, state, embed (output heads too), attn, mlp_weight, or other."""
    return next((role for role, pattern in _ROLES if pattern.search(name)), "other")

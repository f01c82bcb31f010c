"""Models of each family with random weights, a few thousand numbers each, as their folders are published."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENS = ["<unk>", "<s>", "</s>", "Ġ", *LETTERS, "th", "he", "the"]
MERGES = [("t", "h"), ("h", "e"), ("th", "e")]
SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS) + 3,  # padded, as many published models are
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma3": ("Gemma3Text", {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 16,
            "intermediate_size": 64,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
    ),
}


def save_tiny(folder: Path, kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """Write a folder with weights, config and tokenizer; the model itself comes back."""
    name, more = MODELS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more, **changes})
    stem = name.removesuffix("Text")
    with redirect_stderr(io.StringIO()):
        model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
        with torch.no_grad():  # biases and norms that a mistake would show in
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.2 * torch.randn_like(parameter)
        model.to(config.dtype or torch.float32).save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, MERGES))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = "{{ messages[0].content }}"
    fast.save_pretrained(folder)

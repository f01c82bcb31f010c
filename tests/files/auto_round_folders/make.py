"""Make the folders beside this script: a layer of a tiny llama that auto-round 0.16 quantized, and its own numbers.

Each has model.safetensors and config.json as auto-round saved them, cut to one layer. NAME.safetensors beside it has
what auto-round's own layer computes from these tensors and an identity matrix. Needs `pip install auto-round`, no GPU:

python tests/files/auto_round_folders/make.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import tokenizers
import torch
import transformers
from auto_round import AutoRound
from auto_round.export.export_to_awq.utils import dequantize_gemm
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
GROUP = 32
LAYER = "model.layers.0.mlp.down_proj"
CASES = {
    "gptq_int4": ("W4A16G32", "auto_gptq", True),
    "gptq_uint4": ("W4A16G32", "auto_gptq", False),
    "gptq_int8": ("W8A16G32", "auto_gptq", True),
    "gptq_uint3": ("W3A16G32", "auto_gptq", False),
    "awq_uint4": ("W4A16G32", "auto_awq", False),
}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}


def make(name: str, scheme: str, layout: str, symmetric: bool) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=1, head_dim=32, **SIZES)
    model = transformers.LlamaForCausalLM(config).half()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    options = {"scheme": scheme, "sym": symmetric, "iters": 0, "disable_opt_rtn": True, "device_map": "cpu"}
    with tempfile.TemporaryDirectory() as place:
        rounder = AutoRound(model, tokenizer, **options)
        rounder.quantize_and_save(place, format=layout)
        saved = next(path for path in Path(place).rglob("config.json"))
        tensors = {}
        for file in saved.parent.glob("*.safetensors"):
            tensors |= {key: one for key, one in load_file(file).items() if key.startswith(LAYER)}
        document = json.loads(saved.read_text())
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({f"{LAYER}.weight": numbers(tensors, layout, int(scheme[1]))}, HERE / f"{name}.safetensors")
    keys = ("model_type", "dtype", "torch_dtype", "quantization_config")
    said = {key: document[key] for key in keys if key in document}
    (folder / "config.json").write_text(json.dumps(said, indent=1) + "\n")


def numbers(tensors: dict[str, torch.Tensor], layout: str, bits: int) -> torch.Tensor:
    """The weight by auto-round's own code: [rows, columns] in float16."""
    parts = {key.removeprefix(f"{LAYER}."): one for key, one in tensors.items()}
    if layout == "auto_awq":
        return dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], bits, GROUP).T.contiguous()
    columns, rows = SIZES["intermediate_size"], SIZES["hidden_size"]
    layer = QuantLinear(bits, GROUP, columns, rows, bias=False, g_idx="g_idx" in parts)
    layer.load_state_dict(parts)
    with torch.no_grad():
        return layer(torch.eye(columns, dtype=torch.float16)).T.contiguous()


if __name__ == "__main__":
    for case, (scheme, layout, symmetric) in CASES.items():
        make(case, scheme, layout, symmetric)

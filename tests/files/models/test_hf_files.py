"""Files of transformers, quantized, back into its models: tied heads, buffers, renamed and merged tensors."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

from bitplan.base.errors import FileFormatError
from bitplan.files.models.morph import formats_of
from bitplan.files.models.save_load import load_model
from bitplan.files.quantize_files import quantize_file
from tests.crosses import few

SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 96, "max_position_embeddings": 32}
MODELS = {
    "tied head": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "unsaved buffers": lambda: transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, is_decoder=True)),
    "renamed": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES)),
    "merged experts": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    ),
    "shared by two": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    ),
}


def saved(build, folder):
    torch.manual_seed(0)
    model = build().eval()
    with redirect_stderr(io.StringIO()):  # its progress bar
        model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", few(MODELS, 3))
def test_a_quantized_file_loads_into_a_fresh_model(kind, tmp_path):
    model = saved(MODELS[kind], tmp_path / "hf")
    quantize_file(tmp_path / "hf", tmp_path / "q.safetensors", "int8_row")
    torch.manual_seed(1)
    fresh = load_model(tmp_path / "q.safetensors", MODELS[kind]().eval())
    inputs = {"input_ids": torch.arange(3, 15)[None]}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        expected, result = model(**inputs).logits, fresh(**inputs).logits
    assert float((result - expected).norm() / expected.norm()) < 0.03
    assert len(formats_of(fresh)) >= 9  # what transformers only renames stays packed


def test_a_buffer_in_the_file_must_be_the_models_own(tmp_path):
    """Older checkpoints hold position_ids, which the model computes itself and does not save."""
    saved(MODELS["unsaved buffers"], tmp_path / "hf")
    weights = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    weights["bert.embeddings.position_ids"] = torch.arange(32)[None]
    safetensors.torch.save_file(weights, tmp_path / "old.safetensors")
    load_model(tmp_path / "old.safetensors", MODELS["unsaved buffers"]())
    weights["bert.embeddings.position_ids"] += 1
    safetensors.torch.save_file(weights, tmp_path / "odd.safetensors")
    with pytest.raises(FileFormatError, match=r"'bert.embeddings.position_ids' holds other numbers"):
        load_model(tmp_path / "odd.safetensors", MODELS["unsaved buffers"]())


def test_missing_tensors_are_listed_and_nothing_changes(tmp_path):
    saved(MODELS["renamed"], tmp_path / "hf")
    weights = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    del weights["embed_out.weight"]
    safetensors.torch.save_file(weights, tmp_path / "less.safetensors")
    model = MODELS["renamed"]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(FileFormatError, match=r"1 missing.*lm_head\.weight"):
        load_model(tmp_path / "less.safetensors", model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_tied_names_must_bring_the_same_numbers(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    one = torch.randn(4, 4)
    safetensors.torch.save_file({"a.weight": one}, tmp_path / "one.safetensors")
    assert torch.equal(load_model(tmp_path / "one.safetensors", model)["b"].weight, one)
    safetensors.torch.save_file({"a.weight": one, "b.weight": one + 1}, tmp_path / "two.safetensors")
    with pytest.raises(FileFormatError, match=r"ties 'b.weight' to 'a.weight', and the file has different numbers"):
        load_model(tmp_path / "two.safetensors", model)

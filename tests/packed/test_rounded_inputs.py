"""Formats of inputs of a whole model: set, kept in folders, shown, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bitplan
from bitplan.base.errors import FileFormatError, FormatError, StoreError
from bitplan.cli import run
from bitplan.formats.input_formats import round_input
from bitplan.packed.product_strategy import LayerError
from bitplan.packed.quant_linear import QuantLinear
from bitplan.packed.rounded_inputs import inputs_of, runs_on_integers, shown_inputs

transformers = pytest.importorskip("transformers")


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64, bias=False))


def formats_in(model: nn.Module) -> set[str | None]:
    return {layer.inputs for layer in model.modules() if isinstance(layer, QuantLinear)}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_apply_plan_gives_layers_a_format_of_inputs() -> None:
    model, x = two_layers(), torch.randn(3, 128)
    bitplan.apply_plan(model, {"*.weight": "int8_row", "*": "float32"}, inputs="int8")
    assert formats_in(model) == {"q8_0_gguf"}
    assert runs_on_integers(model)
    first, last = model[0], model[2]
    assert isinstance(first, QuantLinear)
    assert isinstance(last, QuantLinear)
    hidden = torch.relu(round_input(x, "q8_0_gguf") @ bitplan.decode(first.weight.encoded).T + first.bias)
    expected = round_input(hidden, "q8_0_gguf") @ bitplan.decode(last.weight.encoded).T
    torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=1e-3)
    assert bitplan.round_inputs(model, "keep") == ["0", "2"]
    assert shown_inputs(model) is None


def test_what_cannot_be_is_refused_and_nothing_changes() -> None:
    model = two_layers()
    with pytest.raises(FormatError, match="apply_plan: no format of inputs 'int7'; there are keep, int8"):
        bitplan.apply_plan(model, "int8_row", inputs="int7")
    assert isinstance(model[0], nn.Linear)
    with pytest.raises(LayerError, match="nothing in this Sequential is packed"):
        bitplan.round_inputs(model, "int8")
    assert bitplan.round_inputs(model, "keep") == []


def test_packed_experts_are_refused_by_name() -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=2,
        num_experts_per_tok=1,
        head_dim=32,
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    with pytest.raises(LayerError, match=r"model\.layers\.0\.mlp\.experts: packed experts have no products of inputs"):
        bitplan.apply_plan(model, "int8_row", inputs="int8", unsupported="skip")
    assert not any(isinstance(layer, QuantLinear) for layer in model.modules())


def test_a_folder_keeps_the_format_of_inputs(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import bitplan.transformers

    packed, again = tmp_path / "packed", tmp_path / "again"
    assert run(["quantize", str(llama), str(packed), "--format", "int8_row", "--inputs", "int8"]) == 0
    assert json.loads((packed / "config.json").read_text())["quantization_config"]["inputs"] == "q8_0_gguf"
    assert run(["inspect", str(packed)]) == 0
    assert "inputs of packed layers are rounded to q8_0_gguf" in capsys.readouterr().out
    assert run(["inspect", str(packed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["inputs"] == "q8_0_gguf"

    model = bitplan.load_packed(packed).model
    assert formats_in(model) == {"q8_0_gguf"}
    assert formats_in(bitplan.load_packed(packed, inputs="keep").model) == {None}
    assert formats_in(bitplan.load_packed(packed, inputs="fp8").model) == {"fp8_e4m3_row"}
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(packed)
    assert formats_in(theirs) == {"q8_0_gguf"}
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(theirs(ids).logits, model(ids).logits)

    bitplan.save_packed(model, again)
    assert formats_in(bitplan.load_packed(again).model) == {"q8_0_gguf"}
    bitplan.round_inputs(model, "keep")
    model.lm_head.inputs = "int8"
    assert shown_inputs(model) == "keep and q8_0_gguf"
    with pytest.raises(StoreError, match="lm_head to q8_0_gguf, and a folder holds one format of inputs"):
        inputs_of(model)


def test_a_folder_with_an_unknown_format_of_inputs_is_refused(llama: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    bitplan.quantize_file(llama, packed, "int8_row", inputs="int8_row")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["inputs"] = "int3"
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileFormatError, match="quantization_config: inputs: no format of inputs 'int3'"):
        bitplan.load_packed(packed)


def test_a_file_of_weights_says_nothing_of_inputs(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"out\.safetensors: a file of weights says nothing of inputs"):
        bitplan.quantize_file(llama, tmp_path / "out.safetensors", "int8_row", inputs="int8")

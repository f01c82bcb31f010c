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
from bitplan.formats.input_formats import round_input, with_scale
from bitplan.packed.product_strategy import LayerError
from bitplan.packed.quant_linear import QuantLinear
from bitplan.packed.rounded_inputs import calibrate_inputs, inputs_of, runs_on_integers, shown_inputs
from bitplan.plan import Choice, Plan, PlanError, Planned

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
    assert {name for name, fmt in inputs_of(model).items() if fmt == "q8_0_gguf"} == {"lm_head.weight"}


def test_a_folder_that_is_packed_anew_says_what_it_leaves_behind(llama: Path, tmp_path: Path) -> None:
    packed, again = tmp_path / "packed", tmp_path / "again"
    bitplan.quantize_file(llama, packed, "int8_row", inputs="int8", options={"kv": "int8:int4"})
    notes = bitplan.quantize_file(packed, again, "q8_0_gguf").notes
    assert sum("rounds inputs of its layers (q8_0_gguf), and the new folder leaves them" in note for note in notes) == 1
    assert sum("keeps keys and values in int8_row:int4_g32, and the new" in note for note in notes) == 1
    notes = bitplan.quantize_file(packed, tmp_path / "said", "q8_0_gguf", inputs="keep", options={"kv": "keep"}).notes
    assert not any("the new folder leaves them" in note for note in notes)


RULES = {
    "version": 1,
    "patterns": [
        {"regex": ".*norm.weight", "format": "FP32"},
        {"regex": ".*q_proj.weight", "format": "int4_g32", "input": "int8"},
        {"regex": ".*mlp.*weight", "format": "int8_row", "input": "int8_row"},
        {"regex": ".*", "format": "int8_row"},
    ],
}


def by_layer(model: nn.Module) -> dict[str, str]:
    return {path: layer.inputs for path, layer in model.named_modules() if getattr(layer, "inputs", None)}


def test_a_plan_gives_each_layer_its_own(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Manifest -> folder -> load_packed, from_pretrained, judge; saved again, and shown by every verb that reads it."""
    import bitplan.transformers

    expected = {f"model.layers.0.mlp.{name}_proj": "int8_row" for name in ("gate", "up", "down")}
    expected["model.layers.0.self_attn.q_proj"] = "q8_0_gguf"
    rules, packed, again = tmp_path / "rules.json", tmp_path / "packed", tmp_path / "again"
    rules.write_text(json.dumps(RULES))
    assert run(["quantize", str(llama), str(packed), "--manifest", str(rules)]) == 0
    assert json.loads((packed / "config.json").read_text())["quantization_config"]["inputs"] == "by layer"
    model: Any = bitplan.load_packed(packed).model
    assert by_layer(model) == expected
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(packed)
    assert by_layer(theirs) == expected
    ids = torch.arange(16)[None]
    bitplan.save_packed(model, again)
    assert by_layer(bitplan.load_packed(again).model) == expected
    assert torch.equal(theirs(ids).logits, model(ids).logits)

    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(llama)
    plan = bitplan.Plan.load(packed / "bitplan_plan.json")
    bitplan.apply_plan(plain, plan)
    assert by_layer(plain) == expected
    torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)

    capsys.readouterr()
    assert run(["inspect", str(packed), "--json"]) == 0
    rows = {row["name"]: row["inputs"] for row in json.loads(capsys.readouterr().out)["tensors"]}
    assert rows["model.layers.0.self_attn.q_proj.weight"] == "q8_0_gguf"
    assert rows["lm_head.weight"] == ""
    assert run(["explain", str(packed / "bitplan_plan.json"), "*q_proj.weight"]) == 0
    assert "q_proj.weight: int4_g32, inputs q8_0_gguf (weight, rule)" in capsys.readouterr().out
    kept = tmp_path / "kept.json"
    plan.with_inputs(dict.fromkeys(plan.inputs)).save(kept)
    assert run(["diff", str(packed / "bitplan_plan.json"), str(kept), "--json"]) == 0
    differences = json.loads(capsys.readouterr().out)["rows"]
    assert {row["from"] for row in differences} == {"int4_g32, inputs q8_0_gguf", "int8_row, inputs int8_row"}
    for flags in ([], ["--scales"]):
        assert run(["compare", str(llama), str(packed), *flags]) == 0
        assert "packed: inputs of packed layers are rounded by layer; weights alone are compared" in " ".join(
            capsys.readouterr().out.split()
        )
    assert run(["report", str(packed / "bitplan_plan.json"), "--output", str(tmp_path / "page.html")]) == 0
    assert "as they are" in (tmp_path / "page.html").read_text()

    (packed / "bitplan_plan.json").unlink()  # a download may leave it out, and nothing else says it
    with pytest.raises((FileFormatError, StoreError), match=r"bitplan_plan\.json"):
        transformers.AutoModelForCausalLM.from_pretrained(packed)


def test_a_folder_of_before_says_one_format_for_all(llama: Path, tmp_path: Path) -> None:
    """Earlier versions wrote the format into config.json alone."""
    packed = tmp_path / "packed"
    bitplan.quantize_file(llama, packed, "int8_row")
    config = json.loads((packed / "config.json").read_text())
    assert "inputs" not in config["quantization_config"]
    assert '"input"' not in (packed / "bitplan_plan.json").read_text()
    config["quantization_config"]["inputs"] = "q8_0_gguf"
    (packed / "config.json").write_text(json.dumps(config))
    assert formats_in(bitplan.load_packed(packed).model) == {"q8_0_gguf"}


def test_a_tied_head_rounds_what_its_embedding_says() -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    plan = bitplan.choose_formats({name: tuple(p.shape) for name, p in model.named_parameters()}, "int8_row")
    bitplan.apply_plan(model, plan.with_inputs({"model.embed_tokens.weight": "int8_row"}))
    assert by_layer(model) == {"lm_head": "int8_row"}
    assert inputs_of(model)["model.embed_tokens.weight"] == "int8_row"


def test_plans_that_cannot_be_are_refused_by_name() -> None:
    model = two_layers()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    plan = bitplan.choose_formats(shapes, {"0.weight": "int8_row"})
    with pytest.raises(PlanError, match=r"input 'q8_0_gguf' beside float32: only packed weights round the inputs"):
        plan.with_inputs({"2.weight": "int8"})
    with pytest.raises(FormatError, match=r"apply_plan: 0.weight: int8_static has no scale yet"):
        bitplan.apply_plan(model, plan.with_inputs({"0.weight": "int8_static"}))
    assert isinstance(model[0], nn.Linear)
    with pytest.raises(
        PlanError, match=r"morph_model: 0.weight: the plan rounds inputs to int8_row, which only packed"
    ):
        bitplan.files.morph_model(model, plan.with_inputs({"0.weight": "int8_row"}))
    convolution = nn.Sequential(nn.Conv1d(32, 32, 1))
    named = {
        "0.weight": Planned(Choice("int8_row", "why", input="int8_row")),
        "0.bias": Planned(Choice("float32", "f")),
    }
    with pytest.raises(bitplan.BitplanError, match=r"0\.weight"):
        bitplan.apply_plan(convolution, Plan(named))


def test_static_scales_are_measured_and_kept() -> None:
    model, x = two_layers(), torch.randn(64, 128)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    plan = bitplan.choose_formats(shapes, {"*weight": "int8_row"})
    plan = plan.with_inputs({"0.weight": "int8_static", "2.weight": "int8_row"})
    measured = calibrate_inputs(model, plan, [x[:32], x[32:]])
    assert measured["0.weight"].input == with_scale(float(x.abs().max()) / 127)
    assert measured["2.weight"].input == "int8_row"
    assert Plan.from_document(json.loads(measured.to_json())) == measured
    bitplan.apply_plan(model, measured)
    first: Any = model[0]
    exact = round_input(2 * x, first.inputs).double() @ bitplan.decode(first.weight.encoded).double().T + first.bias
    products = round_input(2 * x, first.inputs).abs().double() @ bitplan.decode(first.weight.encoded).double().abs().T
    bound = (128 + 4) * 2.0**-24 * (products + first.bias.abs())
    assert ((first(2 * x).double() - exact).abs() <= bound).all()  # numbers beyond the scale are saturated
    with pytest.raises(LayerError, match="its input was never seen"):
        calibrate_inputs(two_layers(), plan, [])


def test_a_folder_with_an_unknown_format_of_inputs_is_refused(llama: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    bitplan.quantize_file(llama, packed, "int8_row", inputs="int8_row")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["inputs"] = "int3"
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileFormatError, match="quantization_config: inputs: no format of inputs 'int3'"):
        bitplan.load_packed(packed)


def test_a_file_of_weights_says_nothing_of_inputs(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"out\.safetensors: only a model's folder, with config"):
        bitplan.quantize_file(llama, tmp_path / "out.safetensors", "int8_row", inputs="int8")

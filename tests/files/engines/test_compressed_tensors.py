"""Folders for vLLM and transformers: compressed-tensors decompresses them to our numbers."""

from __future__ import annotations

import json
import shutil

import pytest
import safetensors.torch
import torch

from bitplan.base.errors import BitplanError, StoreError
from bitplan.files.engines.compressed_tensors import SCHEMES
from bitplan.files.engines.targets import ExportRequest, export_model, prepare_export
from bitplan.files.transformers_names import silence_transformers
from bitplan.formats.codec import decode, encode
from bitplan.plan import Manifest
from tests.crosses import few
from tests.files.engines.tiny_models import save_tiny

UP = "model.layers.0.mlp.up_proj.weight"
# A group for each format in one folder; the library decompresses 4-bit floats to bfloat16, whatever the model's type.
MIXED = {
    "float32": {
        "*.0.self_attn*_proj*": "int8_row",
        "*.0.mlp.down_proj*": "int8_g128",
        "*.0.mlp*": "int4_g64",
        "*.1.self_attn.o_proj*": "fp8_e4m3_b128",
        "*.1.self_attn*_proj*": "fp8_e4m3_row",
        "*.1.mlp*": "int4_g128",
    },
    "bfloat16": {"*.o_proj*": "nvfp4", "*.0.mlp*": "mxfp4", "*.1.mlp*": "int4_g32"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "qwen3"
    save_tiny(place, "qwen3", hidden_size=128, intermediate_size=256)
    return place


def parts_of(path, weight):
    module = weight.removesuffix("weight")
    held = safetensors.torch.load_file(path / "model.safetensors")
    return {name.removeprefix(module): tensor for name, tensor in held.items() if name.startswith(module)}


@pytest.mark.parametrize("fmt", few(SCHEMES, 6))
def test_the_library_decompresses_to_our_numbers(fmt, folder, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    export_model(folder, tmp_path / "out", "compressed-tensors", {UP: fmt, UP.replace("up", "gate"): fmt})
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    assert UP.removesuffix(".weight") in scheme.targets
    own = parts_of(tmp_path / "out", UP)
    theirs = BaseCompressor.load_from_registry(config["format"]).decompress(own, scheme)["weight"]
    source = safetensors.torch.load_file(folder / "model.safetensors")
    base = None
    if fmt == "nvfp4":
        base = max(float(encode(source[name], fmt).base) for name in (UP, UP.replace("up", "gate")))
    wanted = decode(encode(source[UP], fmt, base=base), theirs.dtype)
    if fmt == "nvfp4":  # they divide by the base's reciprocal, and may round another way in the last bit
        torch.testing.assert_close(theirs, wanted, rtol=2**-7, atol=0)
    else:
        assert torch.equal(theirs, wanted)


@pytest.mark.parametrize("dtype", MIXED)
def test_transformers_loads_a_mixed_plan_and_gives_our_logits(dtype, folder, tmp_path):
    pytest.importorskip("compressed_tensors")
    import transformers

    report = export_model(folder, tmp_path / "out", "compressed-tensors", MIXED[dtype])
    formats = {row.source: row.format for row in report.rows if row.format != "float32"}
    assert set(formats.values()) == set(MIXED[dtype].values())
    assert len(formats) == (14 if dtype == "float32" else 8)
    with silence_transformers():
        ours = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=getattr(torch, dtype))
    ids = torch.arange(3, 19).reshape(1, -1)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name in formats:
                parameter.copy_(decode(encode(parameter, formats[name])))
        tolerance = 1e-4 if dtype == "float32" else 0.05
        wanted = ours.to(getattr(torch, dtype))(ids).logits
        torch.testing.assert_close(theirs(ids).logits, wanted, rtol=tolerance, atol=tolerance)


def test_what_compressed_tensors_cannot_hold_is_refused(folder, tmp_path):
    def prepare(formats, source=folder):
        prepare_export(ExportRequest(source, tmp_path / "a", formats), "compressed-tensors")

    with pytest.raises(StoreError, match=r"'\S+q_proj.weight' is int8_row, '\S+k_proj.weight' not packed; engines"):
        prepare({"*.q_proj*": "int8_row"})
    with pytest.raises(StoreError, match="compressed-tensors has no q4_0_gguf"):
        prepare({"*.o_proj*": "q4_0_gguf"})
    with pytest.raises(StoreError, match="no layer would be packed"):
        prepare("bfloat16")
    with pytest.raises(StoreError, match="is made of a model's folder or a GGUF file"):
        prepare("int8_row", folder / "model.safetensors")
    assert not (tmp_path / "a").exists()


def test_a_base_model_under_a_head_is_refused_for_no_engine_would_find_its_layers(folder, tmp_path):
    part = shutil.copytree(folder, tmp_path / "part")
    held = safetensors.torch.load_file(part / "model.safetensors")
    safetensors.torch.save_file(
        {name.removeprefix("model."): tensor for name, tensor in held.items()}, part / "model.safetensors"
    )
    for target in ("compressed-tensors", "torchao", "mlx"):
        with pytest.raises(StoreError, match="under the name that it has inside of a Qwen3ForCausalLM") as refused:
            export_model(part, tmp_path / "out", target, "int4_g32")
    command = str(refused.value).split("first: ")[1].replace("WHOLE", str(tmp_path / "whole"))
    with silence_transformers():
        exec(f"import transformers; {command}")
    export_model(tmp_path / "whole", tmp_path / "out", "compressed-tensors", "int4_g32")


def test_a_mixed_plan_has_a_group_for_each_format(folder, tmp_path):
    mixed = {"*self_attn*_proj*": "fp8_e4m3_row", "*gate_proj*": "int4_g32", "*up_proj*": "int4_g32"}
    report = export_model(folder, tmp_path / "out", "compressed-tensors", mixed)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert {group["format"] for group in config["config_groups"].values()} == {"float-quantized", "pack-quantized"}
    assert "model.layers.0.mlp.down_proj" in config["ignore"]
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert {row.format for row in report.rows} == {"fp8_e4m3_row", "int4_g32", "float32"}
    export_model(tmp_path / "out", tmp_path / "plain", "hf", {})  # and back
    numbers = safetensors.torch.load_file(tmp_path / "plain" / "model.safetensors")
    source = safetensors.torch.load_file(folder / "model.safetensors")
    assert numbers.keys() == source.keys()
    assert torch.equal(numbers[UP], decode(encode(source[UP], "int4_g32")))
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in config
    config["quantization_config"] = {"quant_method": "unheard-of"}
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    with pytest.raises(StoreError, match="in a way that bitplan does not read"):
        prepare_export(ExportRequest(tmp_path / "plain", tmp_path / "b", "int8_row"), "compressed-tensors")


def test_rows_that_a_format_does_not_block_take_the_nearest_that_fits(tmp_path):
    save_tiny(tmp_path / "llama", "llama")  # rows of 64 and 96
    prepared = prepare_export(ExportRequest(tmp_path / "llama", tmp_path / "a", "int4_g64"), "compressed-tensors")
    prepared.close()
    (down,) = (row for row in prepared.report.rows if row.source == "model.layers.0.mlp.down_proj.weight")
    assert down.format == "int4_g32"
    assert "rows of 96 are not whole blocks of 64 (int4_g64), int4_g32 holds them" in down.reason
    with pytest.raises(BitplanError, match=r"blocks of 64, and 96 .* int4_g32 holds it"):
        prepare_export(ExportRequest(tmp_path / "llama", tmp_path / "a", {"*mlp*": "int4_g64"}), "compressed-tensors")


def test_joined_layers_share_the_base_of_their_scales(folder, tmp_path):
    export_model(folder, tmp_path / "out", "compressed-tensors", "nvfp4")
    held = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    scales = {name: float(held[f"model.layers.0.{name}_proj.weight_global_scale"]) for name in ("mlp.up", "mlp.gate")}
    assert scales["mlp.up"] == scales["mlp.gate"]
    assert scales["mlp.up"] != float(held["model.layers.0.mlp.down_proj.weight_global_scale"])


def test_evidence_chooses_the_numbers(folder, tmp_path):
    from bitplan.files.input_statistics import write_evidence
    from bitplan.rounding.weights import round_weight

    moments = torch.randn(128, generator=torch.Generator().manual_seed(1)).exp()
    with write_evidence(tmp_path / "evidence.safetensors", {f"{UP}.moments": (128,)}) as writer:
        writer.write(f"{UP}.moments", moments)
    evidence = tmp_path / "evidence.safetensors"
    export_model(folder, tmp_path / "out", "compressed-tensors", "int4_g32", evidence=evidence)
    source = safetensors.torch.load_file(folder / "model.safetensors")[UP]
    wanted = round_weight(source, "int4_g32", moments=moments)
    held = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(held[f"{UP}_packed"].view(torch.uint8), wanted.data)
    assert torch.equal(held[f"{UP}_scale"], wanted.scales)
    (tmp_path / "other").mkdir()
    with write_evidence(tmp_path / "other" / "e.safetensors", {"x.moments": (4,)}) as writer:
        writer.write("x.moments", torch.ones(4))
    with pytest.raises(StoreError, match="statistics of other tensors"):
        export_model(
            folder, tmp_path / "b", "compressed-tensors", "int4_g32", evidence=tmp_path / "other/e.safetensors"
        )
    with pytest.raises(StoreError, match="statistics of other tensors"):
        export_model(folder, tmp_path / "b.gguf", "gguf", "q8_0_gguf", evidence=tmp_path / "other/e.safetensors")


def test_an_output_head_stays_unless_a_plan_names_it(tmp_path):
    pytest.importorskip("compressed_tensors")
    import transformers

    save_tiny(tmp_path / "in", "llama3", hidden_size=128, vocab_size=64)
    head = "lm_head.weight"
    report = export_model(tmp_path / "in", tmp_path / "all", "compressed-tensors", "int4_g32")
    assert next(row.format for row in report.rows if row.source == head) == "float32"
    report = export_model(
        tmp_path / "in",
        tmp_path / "named",
        "compressed-tensors",
        {head: "int8_row", UP: "int4_g32", UP.replace("up", "gate"): "int4_g32"},
    )
    assert next(row.format for row in report.rows if row.source == head) == "int8_row"
    config = json.loads((tmp_path / "named" / "config.json").read_text())["quantization_config"]
    assert "lm_head" not in config["ignore"]
    assert ["lm_head"] in [group["targets"] for group in config["config_groups"].values()]
    with silence_transformers():
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "named", dtype=torch.float32)
    with torch.no_grad():
        found = theirs(torch.arange(3, 9)[None], output_hidden_states=True)
        wanted = found.hidden_states[-1] @ decode(encode(plain.lm_head.weight, "int8_row")).T
    torch.testing.assert_close(found.logits, wanted)


def test_weights_and_inputs_in_one_format(folder, tmp_path):
    from bitplan import quantize_file

    quantize_file(folder, tmp_path / "packed", "int8_row", inputs="int8_row")
    report = export_model(tmp_path / "packed", tmp_path / "out", "compressed-tensors", {})  # the folder says it
    export_model(folder, tmp_path / "same", "compressed-tensors", "int8_row", inputs="int8_row", engine="vllm-cpu")
    packed = safetensors.torch.load_file(tmp_path / "same" / "model.safetensors")
    assert packed[UP].dtype == torch.int8
    source = safetensors.torch.load_file(folder / "model.safetensors")[UP]
    assert torch.equal(packed[UP].float() * packed[f"{UP}_scale"], decode(encode(source, "int8_row")))
    for path in ("out", "same"):
        (group,) = json.loads((tmp_path / path / "config.json").read_text())["quantization_config"][
            "config_groups"
        ].values()
        assert group["format"] == "int-quantized"
        assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == ("token", True)
    assert any(row.format == "int8_row" for row in report.rows)
    export_model(
        folder,
        tmp_path / "w4a8",
        "compressed-tensors",
        "int4_g128",
        inputs="fp8",
        only=["*mlp*"],
        engine="transformers",
    )
    config = json.loads((tmp_path / "w4a8" / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    assert (group["format"], group["weights"]["num_bits"], group["weights"]["group_size"]) == ("pack-quantized", 4, 128)
    assert (group["input_activations"]["type"], group["input_activations"]["strategy"]) == ("float", "token")
    with pytest.raises(
        StoreError, match=r"no kernel for int4_g128 with inputs in fp8_e4m3_row .* int8_row with inputs in"
    ):
        export_model(
            folder, tmp_path / "a", "compressed-tensors", "int4_g128", inputs="fp8", only=["*mlp*"], engine="vllm-cpu"
        )
    with pytest.raises(StoreError, match=r"no int4_g32 with inputs in int8_row .*; take one of int8_row"):
        export_model(folder, tmp_path / "a", "compressed-tensors", "int4_g32", inputs="int8_row")
    with pytest.raises(StoreError, match=r"no inputs in q8_0_gguf \(.*\); take one of int8_row, fp8_e4m3_row"):
        export_model(folder, tmp_path / "a", "compressed-tensors", "int8_row", inputs="int8")
    with pytest.raises(StoreError, match=r"is for compressed-tensors alone was given, and mlx asked for \(inputs\)"):
        export_model(folder, tmp_path / "a", "mlx", "int8_g64", inputs="int8_row")


def test_each_layer_of_a_plan_has_its_own_inputs(folder, tmp_path):
    """W8A8 for the MLP, int8 weights alone for attention: two groups, each with its own container."""
    from bitplan import quantize_file

    rules = [
        {"regex": ".*mlp.*weight", "format": "int8_row", "input": "int8_row"},
        {"regex": ".*(self_attn).*_proj.weight", "format": "int8_row"},
        {"regex": ".*", "format": "FP32"},
    ]
    manifest = Manifest.from_document({"version": 1, "patterns": rules})
    quantize_file(folder, tmp_path / "packed", manifest)
    export_model(tmp_path / "packed", tmp_path / "held", "compressed-tensors", {})
    export_model(folder, tmp_path / "out", "compressed-tensors", manifest)
    for path in ("held", "out"):
        config = json.loads((tmp_path / path / "config.json").read_text())["quantization_config"]
        groups = {bool(group["input_activations"]): group for group in config["config_groups"].values()}
        assert config["format"] == "mixed-precision"
        assert {rounded: group["format"] for rounded, group in groups.items()} == {
            True: "int-quantized",
            False: "pack-quantized",
        }
        assert all(".mlp." in name for name in groups[True]["targets"])
        packed = safetensors.torch.load_file(tmp_path / path / "model.safetensors")
        assert packed[UP].dtype == torch.int8
        assert any(name.endswith("q_proj.weight_packed") for name in packed)
    report = export_model(tmp_path / "packed", tmp_path / "out.gguf", "gguf", "q8_0_gguf")
    assert report.notes == []  # a format that was asked for has no inputs
    one = {"regex": ".*mlp.up.*weight", "format": "int8_row"}
    other = Manifest.from_document({"version": 1, "patterns": [one, *rules]})
    with pytest.raises(StoreError, match=r"is int8_row with inputs in int8_row, .* int8_row; engines compute them"):
        export_model(folder, tmp_path / "a", "compressed-tensors", other)


@pytest.mark.parametrize(
    ("engine", "fmt", "message"),
    [
        ("vllm-cpu", "int8_row", r"vLLM 0.32.0 on a CPU has no kernel for int8_row \('model.layers.0.\S+'\); the"),
        ("vllm-cpu", "fp8_e4m3_row", r"the nearest that it has is int8_row with inputs in int8_row, or keep the layer"),
        ("vllm-cpu", "nvfp4", r"the nearest that it has is int4_g32, or keep the layer \(keep='model.layers"),
        ("vllm-gpu", "nvfp4", "no engine 'vllm-gpu'; there are vllm-cpu, vllm-cuda, transformers"),
    ],
)  # fmt: skip
def test_what_an_engine_has_no_kernel_for_is_said_before_writing(engine, fmt, message, folder, tmp_path):
    with pytest.raises(StoreError, match=message):
        export_model(folder, tmp_path / "out", "compressed-tensors", fmt, engine=engine)
    assert not (tmp_path / "out").exists()


def test_sizes_and_experts_that_an_engine_has_no_kernel_for(tmp_path):
    save_tiny(tmp_path / "odd", "llama", hidden_size=48)
    down = {"*down_proj*": "int4_g32"}
    with pytest.raises(StoreError, match=r"multiples of 32, and '\S+down_proj.weight' is 48 x 96"):
        export_model(tmp_path / "odd", tmp_path / "a", "compressed-tensors", down, engine="vllm-cpu")
    save_tiny(tmp_path / "moe", "mixtral")
    with pytest.raises(StoreError, match=r"vLLM 0.32.0 on CUDA has no kernel for fp8_e4m3_row .*experts.* int8_row"):
        export_model(tmp_path / "moe", tmp_path / "a", "compressed-tensors", "fp8_e4m3_row", engine="vllm-cuda")
    mixed = {"*.experts.*.w2*": "int8_row", "*.experts.*": "int4_g32"}
    with pytest.raises(StoreError, match=r"w1.weight' is int4_g32, '\S+w2.weight' int8_row; engines compute them"):
        export_model(tmp_path / "moe", tmp_path / "a", "compressed-tensors", mixed)

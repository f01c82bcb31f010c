"""Every layout into every other, and back: bytes, values, configs, memory, and what a failure leaves."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch

from bitplan.base.errors import StoreError
from bitplan.files.gguf import GGUFFile, GGUFValue, write_gguf
from bitplan.files.gpt_oss import PRESETS, GptOssFile, convert_gpt_oss, make_checkpoint
from bitplan.files.gpt_oss import source as gpt_oss_source
from bitplan.files.gpt_oss.layouts import LAYOUTS
from bitplan.files.tensor_bytes import ContainerFile
from bitplan.formats import Encoded
from bitplan.formats.codec import decode, encode
from tests.crosses import few

TINY = PRESETS["tiny"]
PAIRS = [(first, second) for first in LAYOUTS for second in LAYOUTS]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def path_in(folder, layout, stem="model"):
    return folder / (f"{stem}.gguf" if layout == "gguf" else f"{stem}-{layout}")


def weights(path):
    return path / "model.safetensors" if path.is_dir() else path


def load(path):
    return safetensors.torch.load_file(weights(path))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The same numbers in every layout, and experts in bfloat16."""
    folder = tmp_path_factory.mktemp("made")
    result = {layout: path_in(folder, layout) for layout in LAYOUTS}
    for layout, path in result.items():
        make_checkpoint(path, naming=layout)
    result["tuned"] = folder / "tuned"
    make_checkpoint(result["tuned"], naming="hf", expert_format="bfloat16")
    return result


def numbers_of(blocks, scales):
    """MXFP4 decoded by its definition, in numpy: low nibble first."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    values = E2M1[codes] * np.exp2(scales.astype(np.float64) - 127)[..., None]
    return values.reshape(*scales.shape[:-1], -1).astype(np.float32)


def payload(path):
    """All bytes of a file; of GGUF those after the metadata, which hold a certificate of what it was made of."""
    raw = weights(path).read_bytes()
    if path.suffix != ".gguf":
        return raw
    with GGUFFile(path) as file:
        return raw[min(tensor.start for tensor in file.tensors.values()) :]


@pytest.mark.parametrize(("first", "second"), few(PAIRS, 5))
def test_there_and_back_is_the_same_file(made, tmp_path, first, second):
    there, back = path_in(tmp_path, second, "there"), path_in(tmp_path, first, "back")
    convert_gpt_oss(made[first], there, to=second)
    assert payload(there) == payload(made[second])
    convert_gpt_oss(there, back, to=first)
    assert payload(back) == payload(made[first])
    if first != "gguf":
        assert (back / "config.json").read_text() == (made[first] / "config.json").read_text()


def test_openai_and_hugging_face_share_every_byte(made, tmp_path):
    report = convert_gpt_oss(made["openai"], tmp_path / "hf", to="hf")
    assert {row["action"] for row in report.counts()} == {"copied"}
    ours, theirs = load(made["openai"]), load(tmp_path / "hf")
    assert len(theirs) == 3 + 19 * TINY.layers
    for layer in range(TINY.layers):
        block, own = f"block.{layer}.", f"model.layers.{layer}."
        for name in ("weight", "bias"):
            parts = [theirs[f"{own}self_attn.{part}_proj.{name}"] for part in "qkv"]
            assert [len(part) for part in parts] == [TINY.q_rows, TINY.kv_rows, TINY.kv_rows]
            assert torch.equal(ours[f"{block}attn.qkv.{name}"], torch.cat(parts))
        for part in ("blocks", "scales"):
            assert torch.equal(ours[f"{block}mlp.mlp1_weight.{part}"], theirs[f"{own}mlp.experts.gate_up_proj_{part}"])
            assert torch.equal(ours[f"{block}mlp.mlp2_weight.{part}"], theirs[f"{own}mlp.experts.down_proj_{part}"])


def test_ggufs_own_reader_sees_the_same_values(made, tmp_path):
    convert_gpt_oss(made["hf"], tmp_path / "model.gguf", to="gguf")
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    ours = load(made["hf"])

    def value(name):
        tensor = theirs[name]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)

    for layer in range(TINY.layers):
        own, blk = f"model.layers.{layer}.", f"blk.{layer}."
        experts = f"{own}mlp.experts."
        both = numbers_of(*(ours[f"{experts}gate_up_proj_{part}"].numpy() for part in ("blocks", "scales")))
        down = numbers_of(*(ours[f"{experts}down_proj_{part}"].numpy() for part in ("blocks", "scales")))
        assert np.array_equal(value(f"{blk}ffn_gate_exps.weight"), both[:, 0::2])
        assert np.array_equal(value(f"{blk}ffn_up_exps.weight"), both[:, 1::2])
        assert np.array_equal(value(f"{blk}ffn_down_exps.weight"), down)
        assert theirs[f"{blk}ffn_up_exps.weight"].tensor_type == gguf.GGMLQuantizationType.MXFP4
        bias = ours[f"{experts}gate_up_proj_bias"].float().numpy()
        assert np.array_equal(value(f"{blk}ffn_gate_exps.bias"), bias[:, 0::2])
        assert np.array_equal(value(f"{blk}ffn_up_exps.bias"), bias[:, 1::2])
        for name, other in {
            "input_layernorm.weight": "attn_norm.weight",
            "post_attention_layernorm.weight": "post_attention_norm.weight",
            "self_attn.sinks": "attn_sinks.weight",
            "self_attn.k_proj.bias": "attn_k.bias",
            "mlp.router.weight": "ffn_gate_inp.weight",
        }.items():
            assert theirs[blk + other].tensor_type == gguf.GGMLQuantizationType.F32
            assert np.array_equal(value(blk + other), ours[own + name].float().numpy())
        assert theirs[f"{blk}attn_q.weight"].tensor_type == gguf.GGMLQuantizationType.BF16
        assert np.array_equal(value(f"{blk}attn_q.weight"), ours[f"{own}self_attn.q_proj.weight"].float().numpy())


def test_the_metadata_llama_cpp_needs_is_there(made):
    fields = gguf.GGUFReader(made["gguf"]).fields
    result = {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
    assert result["general.architecture"] == "gpt-oss"
    assert result["general.file_type"] == gguf.LlamaFileType.MOSTLY_MXFP4_MOE
    assert result["tokenizer.ggml.model"] == "none"
    expected = {
        "block_count": 2,
        "context_length": 131072,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "expert_feed_forward_length": 96,
        "expert_count": 4,
        "expert_used_count": 4,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.sliding_window": 128,
        "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
        "vocab_size": 128,
    }
    assert {key: result[f"gpt-oss.{key}"] for key in expected} == expected
    assert result["gpt-oss.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)


# ---- floats and back -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["tiny", "wide enough for the fast codecs"])
def every_code(request, tmp_path):
    """A packed checkpoint of random codes; some blocks use small codes alone, and scales go down to the first byte."""
    sizes = {} if request.param == "tiny" else {"layers": 1, "experts": 2, "hidden": 512, "intermediate": 256}
    make_checkpoint(tmp_path / "codes", naming="hf", **sizes)
    tensors = load(tmp_path / "codes")
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):
            codes = torch.randint(0, 256, tensor.shape, generator=generator, dtype=torch.uint8)
            largest = torch.randint(0, 8, tensor.shape[:-1], generator=generator, dtype=torch.uint8)[..., None]
            low, high = (codes & 7).minimum(largest), (codes >> 4 & 7).minimum(largest)
            tensors[name] = codes & 0x88 | low | high << 4
        elif name.endswith("_scales"):
            tensors[name] = torch.randint(0, 252, tensor.shape, generator=generator, dtype=torch.uint8)
            tensors[name][:, 0] %= 6
    safetensors.torch.save_file(tensors, weights(tmp_path / "codes"), {"format": "pt"})
    return tmp_path / "codes"


@pytest.mark.parametrize("rule", [None, "mse"])
@pytest.mark.parametrize("through", ["hf", "gguf"])
def test_an_expanded_model_comes_back_value_for_value(every_code, tmp_path, rule, through):
    wide = path_in(tmp_path, through, "wide")
    report = convert_gpt_oss(every_code, wide, to=through, experts="bfloat16")
    assert [row["action"] for row in report.counts() if row["action"] == "expanded"] == ["expanded"]
    convert_gpt_oss(wide, tmp_path / "back", to="hf", scale_rule=rule)
    before, after = load(every_code), load(tmp_path / "back")
    assert before.keys() == after.keys()
    changed = 0
    for name in before:
        if not name.endswith("_blocks"):
            continue
        own = [(file[name], file[name.replace("_blocks", "_scales")]) for file in (before, after)]
        old, new = (numbers_of(blocks.numpy(), scales.numpy()) for blocks, scales in own)
        assert np.array_equal(old, new)
        assert np.array_equal(np.signbit(old), np.signbit(new))
        (blocks, scales), (new_blocks, new_scales) = own
        largest = torch.maximum(blocks & 7, blocks >> 4 & 7).amax(-1)
        if rule is None:  # 6 and 7 are the codes of 4 and 6: there the floor rule finds the scale that was there
            assert torch.equal(scales[largest >= 6], new_scales[largest >= 6])
            assert torch.equal(blocks[largest >= 6], new_blocks[largest >= 6])
        changed += int((scales != new_scales).sum())
    assert changed


def test_expanded_experts_are_the_packed_ones_transposed(made, tmp_path):
    convert_gpt_oss(made["openai"], tmp_path / "wide", to="hf", experts="bfloat16")
    wide, packed = load(tmp_path / "wide"), load(made["hf"])
    for matrix in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{matrix}"
        numbers = numbers_of(packed[f"{name}_blocks"].numpy(), packed[f"{name}_scales"].numpy())
        assert wide[name].dtype == torch.bfloat16
        assert np.array_equal(wide[name].float().numpy(), numbers.transpose(0, 2, 1))
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert "quantization_config" not in config


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fine_tuned_model_becomes_mxfp4_in_every_layout(made, tmp_path, layout):
    report = convert_gpt_oss(made["tuned"], path_in(tmp_path, layout), to=layout)
    assert {row["format"] for row in report.counts() if row["action"] == "encoded"} == {"mxfp4"}
    with GptOssFile(path_in(tmp_path, layout)) as packed, GptOssFile(made["tuned"]) as tuned:
        for parts in (("gate", "up"), ("down",)):
            item, floats = packed.expert(1, parts, 2), tuned.expert(1, parts, 2)
            assert isinstance(item, Encoded)
            expected = decode(encode(floats, "mxfp4"))
            assert torch.equal(decode(item), expected)
            assert torch.nn.functional.cosine_similarity(expected.flatten(), floats.float().flatten(), 0) > 0.99
    if layout == "hf":
        assert json.loads((tmp_path / "model-hf" / "config.json").read_text())["quantization_config"] == {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        }


def test_the_mse_rule_is_closer(made, tmp_path):
    errors = {}
    for rule in ("absmax", "mse"):
        convert_gpt_oss(made["tuned"], tmp_path / rule, to="hf", scale_rule=rule)
        with GptOssFile(tmp_path / rule) as packed, GptOssFile(made["tuned"]) as tuned:
            errors[rule] = (decode(packed.expert(0, ("down",), 0)) - tuned.expert(0, ("down",), 0)).square().sum()
    assert errors["mse"] < errors["absmax"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_float_types_of_a_fine_tuned_model_stay(made, tmp_path, dtype):
    tensors = {name: tensor.to(dtype) + 2**-9 for name, tensor in load(made["tuned"]).items()}
    safetensors.torch.save_file(tensors, tmp_path / "tuned.safetensors")
    convert_gpt_oss(tmp_path / "tuned.safetensors", tmp_path / "packed", to="hf")
    convert_gpt_oss(tmp_path / "packed", tmp_path / "packed.gguf", to="gguf")
    convert_gpt_oss(tmp_path / "packed.gguf", tmp_path / "again", to="hf")
    for name, tensor in load(tmp_path / "again").items():
        if name in tensors:  # GGUF holds norms, biases and routers in float32, and that is what comes back
            assert tensor.dtype == dtype or len(tensor.shape) == 1 or "bias" in name or "router" in name
            assert torch.equal(tensor.float(), tensors[name].float())
    report = convert_gpt_oss(tmp_path / "tuned.safetensors", tmp_path / "bf", to="hf", experts="bfloat16")
    assert [row["format"] for row in report.counts() if row["action"] == "rounded"] == ["bfloat16"]


def test_nan_keeps_its_bits_through_gguf(made, tmp_path):
    tensors = load(made["hf"])
    tensors["model.norm.weight"].view(torch.int16)[3] = 0x7FA5
    safetensors.torch.save_file(tensors, tmp_path / "nan.safetensors", {"format": "pt"})
    convert_gpt_oss(tmp_path / "nan.safetensors", tmp_path / "nan.gguf", to="gguf")
    convert_gpt_oss(tmp_path / "nan.gguf", tmp_path / "back", to="hf")
    assert weights(tmp_path / "back").read_bytes() == (tmp_path / "nan.safetensors").read_bytes()


# ---- sources ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["hf", "tuned"])
def test_a_sharded_checkpoint_is_one_source(made, tmp_path, source):
    tensors = load(made[source])
    names, weight_map = sorted(tensors), {}
    (tmp_path / "shards").mkdir()
    for number in range(3):
        shard = f"model-{number + 1:05}-of-00003.safetensors"
        own = names[number::3]
        safetensors.torch.save_file({name: tensors[name] for name in own}, tmp_path / "shards" / shard)
        weight_map |= dict.fromkeys(own, shard)
    index = tmp_path / "shards" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (tmp_path / "shards" / "config.json").write_bytes((made[source] / "config.json").read_bytes())
    convert_gpt_oss(tmp_path / "shards", tmp_path / "one", to="hf")
    convert_gpt_oss(made[source], tmp_path / "other", to="hf")
    assert weights(tmp_path / "one").read_bytes() == weights(tmp_path / "other").read_bytes()
    convert_gpt_oss(index, tmp_path / "one.gguf", to="gguf")
    (tmp_path / "shards" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="does not exist"):
        convert_gpt_oss(tmp_path / "shards", tmp_path / "two", to="hf")


def test_config_and_tokenizer_come_along(made, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    weights(source).write_bytes(weights(made["tuned"]).read_bytes())
    config = json.loads((made["tuned"] / "config.json").read_text())
    config |= {"my_key": [1], "rope_theta": 1234, "quantization_config": {"quant_method": "mxfp4", "dequantize": True}}
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer.json").write_text("{}")
    report = convert_gpt_oss(source, tmp_path / "packed", to="hf")
    assert report.files == ["config.json", "tokenizer.json", "bitplan_evidence.json"]
    assert (tmp_path / "packed" / "tokenizer.json").read_text() == "{}"
    config["quantization_config"] = {"quant_method": "mxfp4"}  # not to be expanded again on loading
    assert json.loads((tmp_path / "packed" / "config.json").read_text()) == config
    convert_gpt_oss(tmp_path / "packed", tmp_path / "openai", to="openai")
    assert json.loads((tmp_path / "openai" / "config.json").read_text())["rope_theta"] == 1234


def _with_rope(made, folder, rope):
    folder.mkdir()
    weights(folder).write_bytes(weights(made["tuned"]).read_bytes())
    config = json.loads((made["tuned"] / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": rope}))
    return folder


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False,
         "original_max_position_embeddings": 512},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "default"},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rotary_positions_come_back_from_gguf(made, tmp_path, rope):
    source = _with_rope(made, tmp_path / "source", rope)
    convert_gpt_oss(source, tmp_path / "model.gguf", to="gguf")
    convert_gpt_oss(tmp_path / "model.gguf", tmp_path / "back", to="hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["rope_scaling"] == rope


@pytest.mark.parametrize("to", ["gguf", "openai"])
def test_rotary_positions_that_a_layout_cannot_say_are_refused(made, tmp_path, to):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 2.0}
    source = _with_rope(made, tmp_path / "source", rope)
    output = tmp_path / ("model.gguf" if to == "gguf" else "out")
    with pytest.raises(
        StoreError, match=r"layout cannot say attention_factor 2.0 .*; truncate true.*; keep the checkpo"
    ):
        convert_gpt_oss(source, output, to=to)
    assert not output.exists()
    convert_gpt_oss(source, tmp_path / "copy", to="hf")
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["rope_scaling"] == rope


def test_gguf_to_gguf_keeps_the_tokenizer(made, tmp_path):
    with GGUFFile(made["gguf"]) as file:
        tokens = GGUFValue(gguf.GGUFValueType.ARRAY, ("a", "b"), gguf.GGUFValueType.STRING)
        metadata = {**file.metadata, "tokenizer.ggml.tokens": tokens}
        entries = [(name, tensor.type, tensor.shape) for name, tensor in file.tensors.items()]
        with write_gguf(tmp_path / "in.gguf", entries, metadata) as writer:
            for name in file.tensors:
                writer.write(name, file.read_raw(name))
    convert_gpt_oss(tmp_path / "in.gguf", tmp_path / "wide.gguf", to="gguf", experts="bfloat16")
    convert_gpt_oss(tmp_path / "wide.gguf", tmp_path / "out.gguf", to="gguf")
    with GGUFFile(tmp_path / "wide.gguf") as wide, GGUFFile(tmp_path / "out.gguf") as out:
        assert wide.metadata["tokenizer.ggml.tokens"] == out.metadata["tokenizer.ggml.tokens"] == tokens
        assert wide.metadata["general.file_type"].value == gguf.LlamaFileType.MOSTLY_BF16
        assert out.metadata == metadata


# ---- memory, failures, destinations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), few([*PAIRS, ("tuned", "hf"), ("tuned", "gguf")], 4))
def test_no_read_is_larger_than_an_expert_or_a_chunk(made, tmp_path, monkeypatch, first, second):
    monkeypatch.setattr(gpt_oss_source, "CHUNK_BYTES", 300)
    reads, read = [], ContainerFile._read_exactly

    def counted(self, what, offset, nbytes):
        if what.startswith("tensor"):
            reads.append(nbytes)
        return read(self, what, offset, nbytes)

    monkeypatch.setattr(ContainerFile, "_read_exactly", counted)
    convert_gpt_oss(made[first], path_in(tmp_path, second), to=second)
    expert = 2 * TINY.intermediate * TINY.hidden
    biases = 4 * TINY.experts * 2 * TINY.intermediate
    assert max(reads) <= max(2 * expert if first == "tuned" else expert, biases)
    if first != "tuned":
        assert weights(path_in(tmp_path, second)).read_bytes() == weights(made[second]).read_bytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("there", [False, True])
def test_a_failure_leaves_what_was_there(made, tmp_path, layout, there):
    name = "model.gguf" if layout == "gguf" else "model.safetensors" if there else "folder"
    if there:
        (tmp_path / name).write_text("old")
    done = []

    def fail(count, _):
        done.append(count)
        if len(done) == 30:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        convert_gpt_oss(made["openai"], tmp_path / name, to=layout, force=True, on_bytes=fail)
    assert [path.name for path in tmp_path.iterdir()] == ([name] if there else [])
    if there:
        assert (tmp_path / name).read_text() == "old"


def test_destinations(made, tmp_path):
    with pytest.raises(StoreError, match=r"out.safetensors: the layout gguf is written to a .gguf file$"):
        convert_gpt_oss(made["hf"], tmp_path / "out.safetensors", to="gguf")
    with pytest.raises(StoreError, match=r"written to a .safetensors file, or a folder"):
        convert_gpt_oss(made["hf"], tmp_path / "out.gguf", to="openai")
    with pytest.raises(StoreError, match="no layout 'openay'; there are openai, hf, gguf; did you mean 'openai'"):
        convert_gpt_oss(made["hf"], tmp_path / "out", to="openay")
    with pytest.raises(StoreError, match="experts are written in mxfp4 or bfloat16, got 'int4'"):
        convert_gpt_oss(made["hf"], tmp_path / "out", to="hf", experts="int4")
    for own in (made["hf"], weights(made["hf"])):
        with pytest.raises(StoreError, match=r"the input .* itself"):
            convert_gpt_oss(made["hf"], own, to="hf", force=True)
    with pytest.raises(StoreError, match=f"{tmp_path / 'no'} is no folder; make it first"):
        convert_gpt_oss(made["hf"], tmp_path / "no" / "out", to="hf")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    convert_gpt_oss(made["hf"], tmp_path / "out", to="hf")
    with pytest.raises(StoreError, match="is not empty; a folder is never overwritten"):
        convert_gpt_oss(made["hf"], tmp_path / "out", to="hf", force=True)
    convert_gpt_oss(made["hf"], tmp_path / "out.gguf", to="gguf")
    with pytest.raises(StoreError, match=r"exists already; .*replace it \(force=True\)"):
        convert_gpt_oss(made["hf"], tmp_path / "out.gguf", to="gguf")
    convert_gpt_oss(made["hf"], tmp_path / "out.gguf", to="gguf", force=True)


def test_another_models_config_is_not_replaced_by_the_way(made, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StoreError, match=r"config.json: is there already and says something else"):
        convert_gpt_oss(made["openai"], tmp_path / "new.safetensors", to="hf")
    assert not (tmp_path / "new.safetensors").exists()
    convert_gpt_oss(made["openai"], tmp_path / "new.safetensors", to="hf", force=True)
    assert "architectures" in (tmp_path / "config.json").read_text()
    with pytest.raises(StoreError, match=r"instead of a file$"):  # the source's own is never replaced
        convert_gpt_oss(
            tmp_path / "new.safetensors", tmp_path / "wide.safetensors", to="hf", experts="bfloat16", force=True
        )


def test_a_scale_rule_without_anything_to_encode_is_refused(made, tmp_path):
    with pytest.raises(StoreError, match="these are MXFP4 already"):
        convert_gpt_oss(made["hf"], tmp_path / "out", to="hf", scale_rule="mse")
    with pytest.raises(StoreError, match="floats that stay floats"):
        convert_gpt_oss(made["tuned"], tmp_path / "out", to="hf", experts="bfloat16", scale_rule="mse")

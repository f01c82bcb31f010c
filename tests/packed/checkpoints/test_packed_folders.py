"""Packed folders of any architecture: logits as decoded, the same bytes when saved, refusals of one line."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import bitplan
from bitplan.base.errors import FileFormatError, StoreError
from bitplan.files import quantize_files
from bitplan.files.certificate import CARD, EVIDENCE_FILE
from bitplan.files.compare import compare_files
from bitplan.files.drift import drift_files
from bitplan.files.packed_folder import FolderContents, cut_shards, packed_config, write_packed_folder
from bitplan.files.tensor_file import TensorSpec
from bitplan.packed.apply_plan import ApplyError
from bitplan.packed.checkpoints.load import _check_room
from bitplan.packed.layer_replacement import StackedExperts
from bitplan.packed.product_strategy import LayerError
from bitplan.packed.quant_embedding import QuantEmbedding
from bitplan.packed.quant_linear import QuantLinear
from bitplan.plan import Plan
from tests.crosses import few
from tests.processes import Program

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 96}
KEYS = SIZES | {"num_key_value_heads": 2}
IDS = torch.arange(12)[None] * 7 % 96


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**KEYS, tie_word_embeddings=True))


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**KEYS, num_local_experts=4))


def qwen():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**KEYS, **experts))


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def gemma():
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**KEYS, head_dim=16, sliding_window=8))


def olmo():
    """Its norms have no weights, so that a packed one has no parameter left."""
    return transformers.OlmoForCausalLM(transformers.OlmoConfig(**KEYS, eos_token_id=2, pad_token_id=1))


MODELS = {make.__name__: make for make in (llama, mixtral, qwen, bert, gemma)}


def save(model, folder):
    with contextlib.redirect_stderr(io.StringIO()):  # transformers' progress bar
        model.save_pretrained(folder)
    return folder


def logits(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(ids).logits


def contents(folder):
    """What a folder holds, but for the certificate and the card: they say how `quantize` made it."""
    made = {EVIDENCE_FILE, CARD}
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name not in made}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A tied llama with a tokenizer's file beside it, and the folder that `quantize` makes of it, in shards."""
    root = tmp_path_factory.mktemp("packed")
    torch.manual_seed(0)
    source = save(llama(), root / "llama")
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"pickles stay behind")
    quantize_files.quantize_file(
        source, root / "packed", "int8_row", options=quantize_files.QuantizeOptions(shard_bytes=40_000)
    )
    return root / "packed"


# ---- what works ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(MODELS, 3))
def test_logits_are_those_of_the_decoded_model_and_saving_gives_the_same_bytes(name, tmp_path):
    torch.manual_seed(0)
    source = save(MODELS[name](), tmp_path / "source")
    options = quantize_files.QuantizeOptions(shard_bytes=50_000)
    quantize_files.quantize_file(source, tmp_path / "packed", "mxfp4", options=options)
    model, report = bitplan.load_packed(tmp_path / "packed")
    decoded = bitplan.load_packed(tmp_path / "packed", model=MODELS[name](), masters=True).model
    torch.testing.assert_close(logits(model), logits(decoded))
    held = sum(path.stat().st_size for path in tmp_path.glob("packed/*.safetensors"))
    assert report.packed_bytes < report.device_bytes < held
    kinds = {type(module) for module in model.modules()}
    assert {QuantLinear, QuantEmbedding} <= kinds
    assert (StackedExperts in kinds) == (name in ("mixtral", "qwen"))
    bitplan.save_packed(model, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "packed")


def test_a_model_without_any_parameter_left_generates_and_has_a_device_and_a_type(tmp_path):
    quantize_files.quantize_file(save(olmo(), tmp_path / "source"), tmp_path / "packed", "int8_row")
    model = bitplan.load_packed(tmp_path / "packed", dtype=torch.bfloat16).model
    assert not list(model.named_parameters())
    for one in (model, model.model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert (one.device, one.dtype) == (torch.device("cpu"), torch.bfloat16)
    assert model.float().dtype == torch.float32
    asked = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 1}
    made = model.generate(IDS, **asked)
    decoded = bitplan.load_packed(tmp_path / "packed", model=olmo(), masters=True).model.eval()
    assert made.tolist() == decoded.generate(IDS, **asked).tolist()
    adapter = model.model.layers[0].mlp.extra = nn.Linear(2, 2)
    assert list(model.parameters()) == list(adapter.parameters())


def test_a_folder_is_complete(packed):
    names = {path.name for path in packed.iterdir()}
    assert {"config.json", "bitplan_plan.json", "generation_config.json", "tokenizer.json"} < names
    assert "model.safetensors.index.json" in names
    assert "pytorch_model.bin" not in names
    shards = list(packed.glob("*.safetensors"))
    assert len(shards) > 1
    assert all(path.stat().st_size < 50_000 for path in shards)
    said = json.loads((packed / "config.json").read_text())["quantization_config"]
    assert (said["quant_method"], said["version"]) == ("bitplan; import bitplan.transformers before from_pretrained", 1)
    assert Plan.load(packed / said["plan"])["model.norm.weight"].format == "float32"


def test_a_tied_head_shares_the_embedding_whose_rows_are_decoded_alone(packed, monkeypatch):
    model = bitplan.load_packed(packed).model
    table = model.model.embed_tokens
    assert model.lm_head.weight is table.weight
    seen = []
    from bitplan.packed import quant_embedding

    decode = quant_embedding.decode
    monkeypatch.setattr(quant_embedding, "decode", lambda rows, dtype: seen.append(rows.shape) or decode(rows, dtype))
    assert torch.equal(table(IDS), bitplan.decode(table.weight.encoded)[IDS])
    assert seen == [(12, 64)]
    torch.library.opcheck(
        quant_embedding.embedding_rows,
        (IDS, table.weight.data, table.weight.scales, None, "int8_row", 64, torch.bfloat16),
    )
    assert table.to(torch.bfloat16)(IDS).dtype == torch.bfloat16


def test_transformers_loads_generates_and_saves_it(packed, tmp_path):
    import bitplan.transformers

    with contextlib.redirect_stderr(io.StringIO()):
        model = transformers.AutoModelForCausalLM.from_pretrained(packed)
    ours = bitplan.load_packed(packed).model
    assert torch.equal(logits(model), logits(ours))
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **options), ours.generate(IDS, **options))
    model.save_pretrained(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(packed)
    newer = shutil.copytree(packed, tmp_path / "newer")
    (newer / "config.json").write_text((newer / "config.json").read_text().replace('"version": 1', '"version": 7'))
    with pytest.raises(FileFormatError, match="version 7 of quant_method 'bitplan', and this bitplan reads up to 1"):
        transformers.AutoModelForCausalLM.from_pretrained(newer)


def test_transformers_loads_a_model_whose_initialisation_reads_the_weights_of_children(tmp_path):
    import bitplan.transformers

    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "vocab_size": 96}
    source = save(
        transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)),
        tmp_path / "t5",
    )
    quantize_files.quantize_file(source, tmp_path / "packed", "int8_row")
    with contextlib.redirect_stderr(io.StringIO()):
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "packed")
    ours = bitplan.load_packed(tmp_path / "packed").model
    with torch.no_grad():
        results = [one.eval()(input_ids=IDS, decoder_input_ids=IDS).logits for one in (model, ours)]
    assert torch.equal(*results)


def test_a_loaded_model_that_ran_is_pickled(packed, tmp_path):
    model, _ = bitplan.load_packed(packed)
    expected = logits(model)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(again), expected)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(bitplan.load_packed(tmp_path / "again").model), expected)


def test_models_whose_linear_layers_are_not_plain(tmp_path):
    keys = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 96}
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**keys, num_attention_heads=4))
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**keys, state_size=8, time_step_rank=32))
    for model, stays in ((falcon, 0), (mamba, 2)):
        source = save(model, tmp_path / model.config.model_type)
        report = quantize_files.quantize_file(source, tmp_path / "packed", "int8_row", force=True)
        assert sum("no packed layer holds it" in row["reason"] for row in report.rows) == stays
        loaded, _ = bitplan.load_packed(tmp_path / "packed")
        assert (logits(loaded) - logits(model)).abs().max() < 0.05 * logits(model).abs().max()


def test_parameters_that_a_model_computes_and_its_files_lack_are_computed(tmp_path):
    """transformers writes none of Marian's positions, and fills them when it loads."""
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32}
    tokens = {"vocab_size": 96, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    marian = transformers.MarianMTModel(transformers.MarianConfig(**sizes, **heads, **tokens)).eval()
    quantize_files.quantize_file(save(marian, tmp_path / "marian"), tmp_path / "packed", "int8_row")
    loaded, _ = bitplan.load_packed(tmp_path / "packed")
    positions = marian.model.encoder.embed_positions.weight
    torch.testing.assert_close(loaded.model.encoder.embed_positions.weight, positions)
    bitplan.save_packed(loaded, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "packed")
    bitplan.dequantize(loaded)
    with torch.no_grad():
        asked = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
        expected = marian(**asked).logits
        assert (loaded(**asked).logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_a_model_packed_in_memory_is_saved_and_loaded_under_its_own_names(tmp_path):
    torch.manual_seed(0)
    model = mixtral()
    bitplan.apply_plan(model, "int8_row")
    bitplan.save_packed(copy.deepcopy(model), tmp_path / "packed")
    again = bitplan.load_packed(tmp_path / "packed").model
    assert torch.equal(logits(again), logits(model))
    bitplan.save_packed(copy.deepcopy(again), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "packed")


@pytest.mark.gpu
def test_on_a_gpu(packed):
    model, report = bitplan.load_packed(packed, device="cuda", dtype=torch.bfloat16)
    assert report.peak_bytes < 1.1 * report.device_bytes + 2**20
    expected = logits(bitplan.load_packed(packed).model)
    result = logits(model, IDS.cuda()).float().cpu()
    assert torch.nn.functional.cosine_similarity(result.flatten(), expected.flatten(), dim=0) > 0.99
    table = model.model.embed_tokens
    assert torch.equal(table(IDS.cuda()), bitplan.decode(table.weight.encoded, torch.bfloat16)[IDS.cuda()])
    assert model.generate(IDS.cuda(), max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (1, 15)


def test_a_model_of_the_users_own(tmp_path):
    def own():
        return nn.ModuleDict({"table": nn.Embedding(96, 64), "up": nn.Linear(64, 96), "norm": nn.LayerNorm(96)})

    torch.manual_seed(0)
    source = own()
    safetensors.torch.save_file(source.state_dict(), tmp_path / "wide.safetensors")
    quantize_files.quantize_file(tmp_path / "wide.safetensors", tmp_path / "small.safetensors", "int8_row")
    with torch.device("meta"):
        target = own()
    model = bitplan.load_packed(tmp_path / "small.safetensors", model=target).model
    assert model is target
    x = bitplan.decode(bitplan.encode(source["table"].weight, "int8_row"))[IDS]
    up = nn.functional.linear(x, bitplan.decode(bitplan.encode(source["up"].weight, "int8_row")), source["up"].bias)
    torch.testing.assert_close(model["norm"](model["up"](model["table"](IDS))), source["norm"](up))
    bitplan.save_packed(model, tmp_path / "again.safetensors")
    saved, written = (safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in ("again", "small"))
    assert saved.keys() == written.keys()
    assert all(torch.equal(saved[name].view(torch.uint8), written[name].view(torch.uint8)) for name in saved)
    bitplan.save_packed(model, tmp_path / "folder")
    again = bitplan.load_packed(tmp_path / "folder", model=own()).model
    assert torch.equal(again["up"].weight.data, model["up"].weight.data)


def test_the_type_that_is_asked_for_holds_for_a_given_model_too(packed):
    model = bitplan.load_packed(packed, model=llama(), dtype=torch.float16).model
    assert {one.dtype for one in model.parameters()} == {torch.float16}


def test_a_format_that_keeps_its_scales_among_its_codes_runs():
    model = nn.Sequential(nn.Embedding(8, 256), nn.Linear(256, 32))
    table, weight = (bitplan.encode(layer.weight, "q4_k_gguf") for layer in model)
    bias = model[1].bias
    bitplan.apply_plan(model, {"*": "q4_k_gguf"})
    expected = nn.functional.linear(bitplan.decode(table)[:4], bitplan.decode(weight), bias)
    torch.testing.assert_close(model(torch.arange(4)), expected, atol=1e-4, rtol=1e-4)


# ---- what does not fit -----------------------------------------------------------------------------------------------


def changed(packed, folder, change):
    """A copy of the folder as one file, whose tensors were changed."""
    tensors = {}
    for path in sorted(packed.glob("*.safetensors")):
        tensors |= safetensors.torch.load_file(path)
    before = dict(tensors)
    change(tensors)
    shutil.copytree(packed, folder)
    for path in folder.glob("*.safetensors"):
        shard = safetensors.torch.load_file(path)
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata()
        safetensors.torch.save_file({name: tensors.get(name, before[name]) for name in shard}, path, metadata)
    return folder


def test_everything_that_does_not_fit_is_one_error(packed, tmp_path):
    config = json.loads((packed / "config.json").read_text())
    shutil.copytree(packed, tmp_path / "other")
    other = config | {"num_hidden_layers": 1, "vocab_size": 80, "attention_bias": True}
    (tmp_path / "other" / "config.json").write_text(json.dumps(other))
    with pytest.raises(FileFormatError) as caught:
        bitplan.load_packed(tmp_path / "other")
    message = str(caught.value)
    assert "4 missing: model.layers.0.self_attn.k_proj.bias" in message
    assert "9 unknown to the model: model.layers.1.input_layernorm.weight" in message
    assert "1 of another shape: model.embed_tokens.weight (the file has (96, 64), the model (80, 64))" in message
    model = llama()
    before = dict(model.state_dict())
    del model.model.layers[1]
    with pytest.raises(FileFormatError, match="9 unknown to the model"):
        bitplan.load_packed(packed, model=model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder, _: (folder / "config.json").unlink(), "no config.json, so not a model's folder"),
        (lambda _, config: config["quantization_config"].update(version=2), r"version 2 of quant_method 'bitplan'"),
        (
            lambda _, config: config["quantization_config"].update(quant_method="quip"),
            "quant_method 'quip'",
        ),
        (lambda _, config: config.pop("quantization_config"), "is not packed; `bitplan quantize` packs it"),
        (lambda _, config: config["quantization_config"].update(plan="../x"), "the plan '../x' is not in the folder"),
        (lambda folder, _: (folder / "bitplan_plan.json").write_text("{}"), "is not the plan by which this folder was"),
        (lambda _, config: config.update(architectures=["MyModel"]), "'MyModel' is not one of transformers"),
        (
            lambda folder, _: (folder / "generation_config.json").write_text("[1]"),
            "generation_config.json must be an object",
        ),
        (lambda _, config: config.update(hidden_size=-1), "config.json: no model can be made of it"),
        (
            lambda _, config: config.update(num_hidden_layers="two"),
            "made of it: .*num_hidden_layers.*: TypeError: .*two",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_in_one_line(packed, tmp_path, change, said):
    folder = tmp_path / "bad"
    shutil.copytree(packed, folder)
    config = json.loads((folder / "config.json").read_text())
    change(folder, config)
    if (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileFormatError, match=said) as caught:
        bitplan.load_packed(folder)
    assert "\n" not in str(caught.value)


def test_transformers_is_not_led_out_of_the_folder_by_an_index(packed, tmp_path):
    import bitplan.transformers  # noqa: F401 (from_pretrained then knows packed folders)

    folder = tmp_path / "bad"
    shutil.copytree(packed, folder)
    index = json.loads((packed / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: str(packed / file) for name, file in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StoreError, match=r"its index names .* which is not in the folder"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_a_plan_of_another_model_is_refused(packed, tmp_path):
    other = save(bert(), tmp_path / "bert")
    with pytest.raises(bitplan.BitplanError, match="the plan is for other tensors: it lacks"):
        quantize_files.quantize_file(other, tmp_path / "out", Plan.load(packed / "bitplan_plan.json"))
    assert not (tmp_path / "out").exists()
    folder = tmp_path / "mixed"
    shutil.copytree(packed, folder)
    plan = Plan({name: entry for name, entry in Plan.load(packed / "bitplan_plan.json").entries.items() if "0" in name})
    plan.save(folder / "bitplan_plan.json")
    (folder / "config.json").write_text(
        json.dumps(packed_config(json.loads((folder / "config.json").read_text()), plan))
    )
    with pytest.raises(
        FileFormatError,
        match=r"mixed: the folder is damaged: model.*: extra: 'model-.*\.safetensors' has it, and its plan",
    ):
        bitplan.load_packed(folder)


def test_a_tensor_that_is_missing_is_named_with_the_file_that_lacks_it(packed, tmp_path):
    import bitplan.transformers

    whole = tmp_path / "whole"
    bitplan.quantize_file(packed.parent / "llama", whole, "int8_row")
    with safetensors.safe_open(whole / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(whole / "model.safetensors")
    del tensors["model.norm.weight"]
    safetensors.torch.save_file(tensors, whole / "model.safetensors", metadata)
    said = "whole: the folder is damaged: model.norm.weight: missing: its plan has it, and 'model.safetensors' lacks it"
    for load in (bitplan.load_packed, transformers.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(FileFormatError, match=said):
            load(whole)


def test_a_packed_vocabulary_is_not_resized(packed):
    model = bitplan.load_packed(packed).model
    before = logits(model)
    with pytest.raises(StoreError, match=r"resize_token_embeddings\(300\): .* packed .* 96 rows"):
        model.resize_token_embeddings(300)
    assert model.resize_token_embeddings(96) is model.resize_token_embeddings() is model.model.embed_tokens
    assert torch.equal(logits(model), before)


def test_numbers_that_are_none_are_refused(packed, tmp_path):
    import bitplan.transformers

    norm = changed(packed, tmp_path / "norm", lambda all_: all_["model.norm.weight"][3:5].fill_(torch.nan))
    scale = changed(
        packed, tmp_path / "scale", lambda all_: all_["model.layers.0.mlp.up_proj.weight.scales"][:1].fill_(torch.inf)
    )
    for check in ("headers", "deep"):
        with pytest.raises(FileFormatError, match=r"model\.norm\.weight.* NaN"):
            bitplan.load_packed(norm, check=check)
        with pytest.raises(FileFormatError, match=r"mlp\.up_proj\.weight.*(NaN or infinite|are infinite)"):
            bitplan.load_packed(scale, check=check)
    for folder, said in ((norm, r"model\.norm\.weight': 2 of 64 numbers of a norm are NaN"), (scale, "infinite")):
        with pytest.raises(FileFormatError, match=said):
            transformers.AutoModelForCausalLM.from_pretrained(folder)
    bitplan.load_packed(packed, check="deep")


def gpt2():
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 96, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()


def test_matrices_that_lie_transposed_are_packed_along_their_inputs(tmp_path):
    import bitplan.transformers

    torch.manual_seed(0)
    model, source = gpt2(), tmp_path / "gpt2"
    save(model.transformer, source)  # as on the hub: names of the model without its head
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (source / "config.json").write_text(json.dumps(config))
    report = quantize_files.quantize_file(source, tmp_path / "packed", "q8_0_gguf")
    assert report.warnings == []
    assert [row["name"] for row in report.rows if row["to"] == "q8_0_gguf"] == [
        *("h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight", "h.0.mlp.c_fc.weight", "h.0.mlp.c_proj.weight"),
        "wte.weight",
    ]
    loaded = bitplan.load_packed(tmp_path / "packed").model
    in_memory = copy.deepcopy(model)
    packed = dict.fromkeys(("*.c_*.weight", "*.wte.weight", "lm_head.weight"), "q8_0_gguf")
    bitplan.apply_plan(in_memory, packed | {"*": "float32"})
    assert torch.equal(logits(loaded), logits(in_memory))
    decoded = copy.deepcopy(loaded)
    bitplan.dequantize(decoded)
    assert {name: one.shape for name, one in decoded.state_dict().items()} == {
        name: one.shape for name, one in model.state_dict().items()
    }
    torch.testing.assert_close(logits(decoded), logits(loaded), rtol=0, atol=1e-5)
    assert (logits(loaded) - logits(model)).abs().max() < 0.02

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert torch.equal(logits(theirs), logits(loaded))
    theirs.save_pretrained(tmp_path / "theirs")
    bitplan.save_packed(pickle.loads(pickle.dumps(loaded)), tmp_path / "pickled")
    bitplan.save_packed(loaded, tmp_path / "again")
    assert contents(tmp_path / "theirs") == contents(tmp_path / "again") == contents(tmp_path / "packed")
    assert torch.equal(logits(bitplan.load_packed(tmp_path / "pickled").model), logits(loaded))
    assert compare_files(source, tmp_path / "packed").findings == ()
    assert {row.relative_error < 0.01 for row in drift_files(source, tmp_path / "packed").rows} == {True}
    quantize_files.quantize_file(tmp_path / "packed", tmp_path / "plain.safetensors", "float32")
    assert compare_files(tmp_path / "plain.safetensors", tmp_path / "packed").differing_names == []


def test_experts_with_biases_keep_them_and_say_that_they_are_transposed(tmp_path):
    import bitplan.transformers

    torch.manual_seed(0)
    sizes = KEYS | {"num_local_experts": 2, "num_experts_per_tok": 2, "head_dim": 16}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes)).eval()
    with torch.no_grad():
        for name, bias in model.named_parameters():
            if name.endswith("_bias"):
                bias.normal_()
    packed = tmp_path / "packed"
    quantize_files.quantize_file(save(model, tmp_path / "model"), packed, "int8_row")
    loaded = bitplan.load_packed(packed).model
    theirs = transformers.AutoModelForCausalLM.from_pretrained(packed)
    assert torch.equal(logits(theirs), logits(loaded))
    theirs.save_pretrained(tmp_path / "theirs")
    assert contents(tmp_path / "theirs") == contents(packed)

    with safetensors.safe_open(packed / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    metadata["bitplan"] = metadata["bitplan"].replace('"transposed":true', "").replace('"transposed": true', "")
    tensors = safetensors.torch.load_file(packed / "model.safetensors")
    metadata["bitplan"] = re.sub(r",\s*}", "}", metadata["bitplan"])
    safetensors.torch.save_file(tensors, packed / "model.safetensors", metadata)
    with pytest.raises(FileFormatError, match=r"experts are packed as their transpose; .* quantize the folder"):
        compare_files(tmp_path / "model", packed)


def test_files_say_which_matrices_lie_transposed(tmp_path):
    torch.manual_seed(0)
    model, alone, lone = save(gpt2(), tmp_path / "gpt2"), tmp_path / "alone.safetensors", tmp_path / "lone.safetensors"
    quantize_files.quantize_file(model, alone, "int8_row")
    loaded = bitplan.load_packed(alone, model=gpt2()).model
    quantize_files.quantize_file(model, tmp_path / "packed", "int8_row")
    assert torch.equal(logits(loaded), logits(bitplan.load_packed(tmp_path / "packed").model))
    bitplan.save_packed(loaded, tmp_path / "saved.safetensors")
    assert torch.equal(logits(bitplan.load_packed(tmp_path / "saved.safetensors", model=gpt2()).model), logits(loaded))
    with pytest.raises(FileFormatError, match=r"4 packed as the transpose of what the model holds.* without masters"):
        bitplan.load_packed(alone, model=gpt2(), masters=True)
    with pytest.raises(StoreError, match=r"packed as the transpose of a parameter.*\.safetensors file"):
        bitplan.save_packed(loaded, tmp_path / "saved.json")
    quantize_files.quantize_file(model / "model.safetensors", lone, "int8_row")  # of which model it is, nothing says
    with pytest.raises(FileFormatError, match=r"4 not loadable: .*c_proj.weight \(packed along its outputs; quantize"):
        bitplan.load_packed(lone, model=gpt2())
    with pytest.raises(FileFormatError, match="packed as the transpose"):
        bitplan.load_packed(lone, model=loaded, masters=True)


def test_layers_and_formats_that_cannot_be_packed_are_refused(tmp_path):
    source = save(mixtral(), tmp_path / "mixtral")
    report = quantize_files.quantize_file(source, tmp_path / "nvfp4", "nvfp4")
    assert "24 experts are in mxfp4: nvfp4 has a factor for each tensor" in report.warnings[-1]
    assert {row["to"] for row in report.rows if ".experts." in row["name"]} == {"mxfp4"}
    assert logits(bitplan.load_packed(tmp_path / "nvfp4").model).shape == (1, 12, 96)


def rwkv():
    sizes = {"vocab_size": 96, "hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 2}
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes, rescale_every=1))


def llama4():
    sizes = KEYS | {"intermediate_size_mlp": 96, "num_local_experts": 2, "head_dim": 16, "pad_token_id": 0}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes, interleave_moe_layer_step=1))


def deberta():
    """Its code normalises the embeddings of distances as a matrix, without looking rows up."""
    settings = {"relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm"}
    return transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**SIZES, **settings))


def test_parameters_of_a_vision_model_that_no_packed_layer_holds_stay_so_that_the_folder_runs(tmp_path):
    """SAM adds and stacks embeddings without looking rows up, and has convolutions and tables of positions."""
    vision = {"num_hidden_layers": 1, "num_attention_heads": 2, "output_channels": 32, "num_pos_feats": 16}
    sizes = {"hidden_size": 32, "image_size": 32, "patch_size": 8}
    config = transformers.SamConfig(
        vision_config=sizes | vision | {"mlp_dim": 64, "window_size": 2, "global_attn_indexes": [0]},
        prompt_encoder_config=sizes | {"mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 32, "mlp_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    )
    torch.manual_seed(0)
    model = transformers.SamModel(config).eval()
    source = save(model, tmp_path / "source")
    report = quantize_files.quantize_file(source, tmp_path / "packed", {"*": "int8_row"})
    reasons = {row["name"]: row["reason"] for row in report.rows}
    assert "read by the model's own code (getitem in prompt_encoder)" in reasons["prompt_encoder.point_embed.1.weight"]
    assert "the weight of a Conv2d" in reasons["prompt_encoder.mask_embed.conv1.weight"]
    loaded = bitplan.load_packed(tmp_path / "packed").model
    images = {"pixel_values": torch.randn(1, 3, 32, 32), "input_points": torch.rand(1, 1, 2, 2)}
    with torch.no_grad():
        results = [one(**images).pred_masks for one in (loaded, model)]
    torch.testing.assert_close(*results, atol=1e-3, rtol=0.1)

    with pytest.raises(ApplyError, match=r"mask_tokens.weight: read by the model's own code \(cat in mask_decoder\)"):
        bitplan.apply_plan(model, {"*mask_tokens*": "int8_row"}, match="common")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # transformers' DeBERTa
@pytest.mark.parametrize("make", [rwkv, llama4, deberta])
def test_what_the_code_of_a_model_reads_itself_stays_so_that_the_folder_runs(make, tmp_path):
    torch.manual_seed(0)
    model = make()
    report = quantize_files.quantize_file(save(model, tmp_path / "source"), tmp_path / "packed", "int8_row")
    assert any("stay as they are, for no packed layer holds them" in note for note in report.notes)
    torch.testing.assert_close(
        logits(bitplan.load_packed(tmp_path / "packed").model), logits(model), atol=0.1, rtol=0.1
    )


def test_a_folder_that_is_packed_again_says_against_what_errors_are(packed, tmp_path):
    report = quantize_files.quantize_file(packed, tmp_path / "again", "int4_g32")
    assert any("tensors were packed already (int8_row): their errors here are against" in note for note in report.notes)
    assert not quantize_files.quantize_file(packed, tmp_path / "same", "int8_row").notes


def test_a_strategy_without_a_kernel_and_a_gpu_without_room_are_refused(packed, monkeypatch):
    model = llama()
    with pytest.raises(LayerError, match="strategy 'tile_cache' needs a cache with a budget"):
        bitplan.load_packed(packed, model=model, strategy="tile_cache")
    assert not any(isinstance(module, QuantLinear) for module in model.modules())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 10**10))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    with pytest.raises(StoreError, match="packed: takes 123456 bytes, and cuda:0 has 1000 free; nothing was read"):
        _check_room("packed", 123456, torch.device("cuda", 0))


def test_force_replaces_a_models_folder(packed, tmp_path):
    model = bitplan.load_packed(packed).model
    shutil.copytree(packed, tmp_path / "old")
    (tmp_path / "old" / "left.txt").touch()
    with pytest.raises(StoreError, match=r"old: exists already; .*replace it \(force=True\)"):
        bitplan.save_packed(model, tmp_path / "old")
    bitplan.save_packed(model, tmp_path / "old", force=True)
    assert contents(tmp_path / "old") == {**contents(packed), "left.txt": b""}
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    with pytest.raises(StoreError, match="packed: holds the input"):
        bitplan.save_packed(model, packed, force=True)


def test_tied_packed_weights_stay_tied_when_transformers_ties_again(packed):
    """As accelerate and lm-eval do once a model is loaded."""
    import bitplan.transformers

    for model in (bitplan.load_packed(packed).model, transformers.AutoModelForCausalLM.from_pretrained(packed)):
        before = logits(model)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        model.tie_weights()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(logits(model), before)


WITHOUT_PLUGIN = """
import sys, transformers
try:
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
except ValueError as error:
    print("refused:", error)
"""


def test_transformers_without_the_plug_in_refuses_a_packed_folder(packed, tmp_path):
    program = Program(WITHOUT_PLUGIN, str(packed), folder=tmp_path)
    assert program.wait() == 0, program.errors
    assert re.fullmatch(
        r"refused: .*packed by bitplan; import bitplan.transformers before from_pretrained, or \S+\n", program.output
    )
    first = next(line for line in program.errors.splitlines() if "quantization" in line)
    assert "got bitplan; import bitplan.transformers before from_pretrained - " in first


def test_codes_in_the_shape_of_their_weight_which_earlier_versions_wrote_are_read(packed, tmp_path):
    shutil.copytree(packed, tmp_path / "old")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "bitplan"  # and so they called it
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    for path in (tmp_path / "old").glob("*.safetensors"):
        with safetensors.safe_open(path, "pt") as file:
            metadata = {key: value for key, value in file.metadata().items() if key != "bitplan_crc32"}
        tensors = safetensors.torch.load_file(path)
        codes = {name: tensor.squeeze(-1) for name, tensor in tensors.items() if tensor.dtype == torch.int8}
        safetensors.torch.save_file(tensors | codes, path, metadata)
    assert torch.equal(logits(bitplan.load_packed(tmp_path / "old").model), logits(bitplan.load_packed(packed).model))


@pytest.mark.parametrize("make", [llama, mixtral, gemma])
def test_a_packed_model_becomes_plain_again(make, tmp_path):
    torch.manual_seed(0)
    quantize_files.quantize_file(save(make(), tmp_path / "source"), tmp_path / "packed", "int8_row")
    decoded = logits(bitplan.load_packed(tmp_path / "packed", model=make(), masters=True).model)
    model = bitplan.load_packed(tmp_path / "packed").model
    with pytest.raises(StoreError, match=r"is packed, not morphed; bitplan.dequantize\(model\) makes it plain"):
        bitplan.files.morph_model(model, None)
    bitplan.dequantize(model)
    torch.testing.assert_close(logits(model), decoded)
    assert not any("bitplan" in type(module).__module__ for module in model.modules())
    save(model, tmp_path / "plain")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(logits(again), decoded)
    with pytest.raises(StoreError, match=r"nothing in this .* is packed"):
        bitplan.dequantize(model)


def test_save_pretrained_keeps_what_training_left(packed, tmp_path):
    model = bitplan.load_packed(packed).model
    (tmp_path / "out" / "checkpoint-500").mkdir(parents=True)
    for name in ("checkpoint-500/optimizer.pt", "trainer_state.json", "notes.md"):
        (tmp_path / "out" / name).write_text("kept")
    for _ in range(2):
        model.save_pretrained(tmp_path / "out")
        assert (tmp_path / "out" / "checkpoint-500" / "optimizer.pt").read_text() == "kept"
        names = {path.name for path in (tmp_path / "out").iterdir()} - {path.name for path in packed.iterdir()}
        assert names == {"checkpoint-500", "trainer_state.json", "notes.md"}
    bitplan.load_packed(tmp_path / "out")


# ---- memory ----------------------------------------------------------------------------------------------------------

PEAK = """
import re, sys
import torch
from bitplan import load_packed
def status(key): return 1024 * int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])
load_packed(sys.argv[1])  # a small one first: code is loaded before the count begins
before = status("VmRSS")
model, report = load_packed(sys.argv[2])
print(report.file_bytes, status("VmHWM") - before)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads its peak memory from Linux's /proc")
def test_peak_host_memory_is_the_file_and_a_tenth(packed, tmp_path):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 4096}
    config = transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True, **sizes)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    plan = bitplan.choose_formats(shapes, "int8_row")
    promises = [
        TensorSpec.of(name, shape, bitplan.get_format(plan[name].format) if len(shape) > 1 else None)
        for name, shape in shapes.items()
    ]
    document = packed_config(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, plan)

    def write(writer, wanted):
        for one in wanted:
            parts = {} if one.fmt is None else one.fmt.part_shapes(one.shape)
            made = {part: torch.ones(size, dtype=dtype) for part, (dtype, size) in parts.items()}
            writer.write(
                one.name, bitplan.formats.Encoded(one.fmt, one.shape, **made) if made else torch.ones(one.shape)
            )

    write_packed_folder(tmp_path / "large", FolderContents(cut_shards(promises, {}), document, plan), write)
    command = [sys.executable, "-c", PEAK, str(packed), str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size, peak = map(int, done.stdout.split())
    assert size > 100 * 2**20
    assert peak < 1.1 * size


def test_a_file_that_cannot_say_how_inputs_are_rounded_is_said(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    bitplan.apply_plan(model, "int8_row", inputs="int8")
    with pytest.warns(UserWarning, match=r"load it with load_packed\(..., inputs='q8_0_gguf'\)"):
        bitplan.save_packed(model, tmp_path / "packed.safetensors")
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    bitplan.load_packed(tmp_path / "packed.safetensors", model=plain, inputs="q8_0_gguf")
    x = torch.randn(3, 64)
    assert torch.equal(plain(x), model(x))


@pytest.mark.parametrize("dtype", ["int8", "load", [["float32"]], {"": 1}])
def test_a_type_that_no_model_is_saved_in_is_refused_by_name(dtype, packed, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(packed, folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    with pytest.raises(FileFormatError, match=r"config.json: dtype: expected float16, bfloat16, float32 or"):
        bitplan.load_packed(folder)


def test_more_layers_than_any_model_has_are_refused_and_not_made(packed, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(packed, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2**64 - 1}))
    with pytest.raises(FileFormatError, match=r"num_hidden_layers: expected at most 10000 layers, got 1844"):
        bitplan.load_packed(folder)


@pytest.mark.parametrize("key", ["architectures", "quant_method"])
def test_a_long_name_in_a_config_makes_no_long_message(key, packed, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(packed, folder)
    config, name = json.loads((folder / "config.json").read_text()), "x" * 100_000
    if key == "architectures":
        config[key] = [name]
    else:
        config["quantization_config"][key] = name
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileFormatError) as refused:
        bitplan.load_packed(folder)
    assert len(str(refused.value)) < 1000

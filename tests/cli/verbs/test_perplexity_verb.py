"""`bitplan judge` on a tiny llama made here, as a Hugging Face folder and as a GGUF file."""

from __future__ import annotations

import io
import json
import shutil
import sys
from contextlib import redirect_stderr
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
import transformers

from bitplan.base.errors import FileFormatError
from bitplan.cli import run
from bitplan.files.gpt_oss import make_checkpoint
from bitplan.files.models.morph import morph_model
from bitplan.files.models.save_load import write_model
from bitplan.files.open_files import open_tensors
from bitplan.files.quantize_files import quantize_file
from bitplan.plan.manifest import shipped_manifest

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MERGES = [("Ġ", letter) for letter in LETTERS] + [(letter, "e") for letter in LETTERS]  # Ġ: a space, in GPT-2's bytes
SPECIAL = ["<unk>", "<s>"]
TOKENS = [*SPECIAL, "Ġ", *LETTERS, *map("".join, MERGES)]


def save_llama(folder, *, seed=0, merges=MERGES, blocks=2):
    """Blocks of 64, weights large enough that formats make a difference."""
    torch.manual_seed(seed)
    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=blocks,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    with redirect_stderr(io.StringIO()):  # its progress bar
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with `llama`, and `text.txt` of about 300 tokens."""
    folder = tmp_path_factory.mktemp("models")
    save_llama(folder / "llama")
    letters = torch.randint(len(LETTERS), (60, 6), generator=torch.Generator().manual_seed(1))
    words = ["".join(LETTERS[number] for number in word) for word in letters]
    (folder / "text.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(autouse=True)
def here(made, monkeypatch):
    monkeypatch.chdir(made)
    monkeypatch.setattr("bitplan.cli.show.LINE_EVERY_S", 1e6)  # a slow machine would write lines of progress
    return made


def measured(*arguments, capsys) -> dict:
    command = ["judge", *map(str, arguments), "--text", "text.txt", "--context", "16", "--json"]
    assert run(command) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def refused(*arguments, capsys) -> str:
    assert run(["judge", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


# ---- what it measures ------------------------------------------------------------------------------------------------


def test_perplexity_is_transformers_own(here, capsys):
    result = measured("llama", "--no-floor", capsys=capsys)
    model = transformers.AutoModelForCausalLM.from_pretrained("llama").eval()
    ids = torch.tensor(
        transformers.AutoTokenizer.from_pretrained("llama")((here / "text.txt").read_text())["input_ids"]
    )
    losses = [(float(model(w[None], labels=w[None]).loss.detach()), len(w) - 1) for w in ids.split(16)]
    row = result["reference_row"]
    assert row["tokens"] == sum(count for _, count in losses) == len(ids) - row["windows"]
    assert row["nll"]["mean"] == pytest.approx(sum(loss * count for loss, count in losses) / row["tokens"], rel=1e-6)
    assert result["noise_floor"] is None
    assert result["rows"] == []


def test_a_row_per_format_on_one_reference(capsys):
    result = measured("llama", "-f", "float32", "-f", "bfloat16", "-f", "int8_row", "-f", "mxfp4", capsys=capsys)
    rows = {row["format"]: row for row in result["rows"]}
    assert list(rows) == ["float32", "bfloat16", "int8_row", "mxfp4"]
    assert rows["float32"]["kl"] == {"mean": 0.0, "standard_error": 0.0, "interval": None}
    assert 0 < rows["bfloat16"]["kl"]["mean"] < rows["int8_row"]["kl"]["mean"] < rows["mxfp4"]["kl"]["mean"]
    assert 0 < result["noise_floor"]["kl"]["mean"] < rows["mxfp4"]["kl"]["mean"]
    for row in rows.values():
        difference = row["nll"]["mean"] - result["reference_row"]["nll"]["mean"]
        assert row["nll_difference"]["mean"] == pytest.approx(difference, abs=1e-12)
        assert len(row["samples"]["kl"]) == row["windows"]
    assert (
        4.25 < rows["mxfp4"]["bits_per_weight"] < rows["int8_row"]["bits_per_weight"]
    )  # embeddings have 8 bits in both


def test_a_manifest_its_plan_and_a_format_agree(capsys):
    """One layout, said in three ways."""
    with open_tensors("llama") as file:
        plan = shipped_manifest("llama").resolve({spec.name: tuple(spec.shape) for spec in file.specs.values()})
    plan.save("plan.json")
    options = ("--manifest", "llama", "--plan", "plan.json", "-f", "int8_row", "--no-floor")
    by_format, by_manifest, by_plan = measured("llama", *options, capsys=capsys)["rows"]
    assert by_manifest["samples"] == by_plan["samples"]
    assert by_manifest["format"] == "manifest llama"
    assert by_format["kl"]["mean"] == pytest.approx(by_manifest["kl"]["mean"], rel=0.1)  # norms: float32 or bfloat16


def test_keep_names_parameters_or_modules(capsys):
    stored = ("--keep", "model.embed_tokens", "--keep", "lm_head.weight", "--keep", "*.self_attn")
    options = ("-f", "mxfp4", "--no-floor")
    (all_packed,), (some_kept,) = (measured("llama", *options, *more, capsys=capsys)["rows"] for more in ((), stored))
    assert some_kept["bits_per_weight"] > all_packed["bits_per_weight"] + 5
    message = refused(
        "llama", "--text", "text.txt", "--context", "16", *options, "--keep", "lm_heat.weight", capsys=capsys
    )
    assert "the pattern 'lm_heat.weight' matches no tensor; did you mean 'lm_head.weight'" in message


def test_against_another_model(capsys):
    save_llama("other", seed=5)
    result = measured("other", "llama", "-f", "bfloat16", capsys=capsys)
    assert result["reference"] == "other"
    as_it_is, cast = result["rows"]
    assert as_it_is["format"] == "llama"
    assert as_it_is["kl"]["mean"] > 10 * result["noise_floor"]["kl"]["mean"]
    assert cast["kl"]["mean"] == pytest.approx(as_it_is["kl"]["mean"], rel=0.01)


def test_the_verb_of_the_version_before_names_the_reference_by_an_option(capsys):
    options = ["--text", "text.txt", "--context", "16", "--tokens", "64", "--no-floor"]
    assert run(["perplexity", "llama", "--against", "llama", *options]) == 0
    shown = capsys.readouterr()
    assert shown.err == "bitplan: warning: `perplexity` is `bitplan judge` now; the next version has no `perplexity`\n"
    assert "too little text" in shown.out
    assert run(["judge", "llama", "llama", "--against", "llama", *options]) == 2
    assert "--against is the reference, and so is A: give one" in capsys.readouterr().err


def test_a_page_of_it(here, capsys):
    options = ["--text", "text.txt", "--context", "16", "--no-floor", "--tokens", "128", "--output", "page.html"]
    assert run(["judge", "llama", "llama", *options]) == 0
    assert "page: page.html" in capsys.readouterr().out
    page = (here / "page.html").read_text()
    assert "llama against llama" in page
    assert "reference: llama" in page
    assert run(["judge", "llama", "llama", *options]) == 2
    assert "page.html: exists" in capsys.readouterr().err


def test_the_table_reads_well(capsys):
    command = ["judge", "llama", "--text", "text.txt", "--context", "16", "--tokens", "100", "-f", "int4_g32"]
    assert run([*command, "--batch", "3", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "llama on text.txt: 90 tokens scored, 6 windows of 16" in out
    for message in ("reference: llama", "noise floor", "int4_g32", "bits a weight", "KL / floor", "95% interval"):
        assert message in out


def test_a_gguf_file_is_the_same_model(capsys):
    write_gguf("llama", "tiny.gguf")
    result = measured("llama", "tiny.gguf", "--no-floor", capsys=capsys)
    assert result["rows"][0]["kl"]["mean"] < 1e-9
    assert result["rows"][0]["top1_agreement"]["mean"] == 1.0
    with open_tensors("tiny.gguf") as file:  # a plan made from it has GGUF's names
        plan = shipped_manifest("llama").resolve({spec.name: tuple(spec.shape) for spec in file.specs.values()})
    plan.save("gguf_plan.json")
    by_plan, by_manifest = (
        measured("tiny.gguf", *option, "--no-floor", capsys=capsys)["rows"][0]["samples"]
        for option in (("--plan", "gguf_plan.json"), ("--manifest", "llama"))
    )
    assert by_plan == by_manifest


# ---- what bitplan wrote, and what is not a whole model ---------------------------------------------------------------


def with_config(folder, source="llama"):
    """Config and tokenizer of a model beside weights of another file."""
    for path in Path(source).iterdir():
        if not path.name.startswith("model"):
            shutil.copy(path, folder)


def test_packed_files_are_read_by_their_formats(capsys):
    quantize_file("llama", "packed.safetensors", "mxfp4")
    expected = measured("llama", "-f", "mxfp4", "--no-floor", capsys=capsys)["rows"][0]
    alone = measured("packed.safetensors", "--config", "llama", "--no-floor", capsys=capsys)["reference_row"]
    assert alone["samples"]["nll"] == pytest.approx(expected["samples"]["nll"], rel=1e-9)
    assert alone["bits_per_weight"] == pytest.approx(4.7, abs=0.1)  # embeddings in 8 bits
    Path("packed").mkdir()
    shutil.move("packed.safetensors", "packed/model.safetensors")
    with_config("packed")
    folder = measured("llama", "packed", "--no-floor", capsys=capsys)
    assert folder["rows"][0]["samples"]["nll"] == alone["samples"]["nll"]
    assert folder["rows"][0]["bits_per_weight"] == alone["bits_per_weight"]
    assert folder["reference_row"]["bits_per_weight"] == 32.0


def test_packed_shards_and_files_of_save_model(capsys):
    with redirect_stderr(io.StringIO()):
        model = transformers.AutoModelForCausalLM.from_pretrained("llama")
        model.save_pretrained("shards", max_shard_size="100KB")
    assert len(list(Path("shards").glob("*.safetensors"))) > 1
    quantize_file("shards", "packed_shards", "int8_row")
    with_config("packed_shards")
    morph_model(model, "int8_row")
    write_model(model, "saved.safetensors")
    rows = [
        measured(*command, "--no-floor", capsys=capsys)["reference_row"]
        for command in (("packed_shards",), ("saved.safetensors", "--config", "llama"))
    ]
    assert rows[0]["samples"]["nll"] == pytest.approx(rows[1]["samples"]["nll"], rel=1e-9)
    assert 8 < rows[0]["bits_per_weight"] < 10


def test_bits_a_weight_are_those_of_the_file_that_quantize_writes(capsys):
    def to_bfloat16(weights):
        weights |= {name: tensor.bfloat16() for name, tensor in weights.items()}

    change_weights("half", to_bfloat16)
    quantize_file("half", "half_packed.safetensors", "mxfp4")
    row = measured("half", "--format", "mxfp4", "--no-floor", capsys=capsys)["rows"][0]
    packed = measured("half_packed.safetensors", "--config", "half", "--no-floor", capsys=capsys)["reference_row"]
    assert row["bits_per_weight"] == packed["bits_per_weight"]


def change_weights(name, change):
    """A copy of the llama with other tensors."""
    shutil.copytree("llama", name)
    weights = safetensors.torch.load_file(f"{name}/model.safetensors")
    change(weights)
    safetensors.torch.save_file(weights, f"{name}/model.safetensors", metadata={"format": "pt"})
    return weights


def test_a_model_that_is_not_whole_is_refused_with_the_names(capsys):
    """transformers fills what is missing with random numbers, and leaves out what it does not know."""
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights("less", lambda weights: weights.pop(name))
    change_weights("more", lambda weights: weights.update({"model.layers.1.mlp.extra": torch.ones(3)}))
    change_weights("misshapen", lambda weights: weights.update({name: torch.ones(96, 32)}))
    text = ("--text", "text.txt", "--context", "16")
    assert f"1 missing: {name}" in refused("less", *text, capsys=capsys)
    assert "1 unknown to the model: model.layers.1.mlp.extra" in refused("more", *text, capsys=capsys)
    assert f"1 of another shape: {name}" in refused("misshapen", *text, capsys=capsys)
    quantize_file("less", "less.safetensors", "int8_row")
    assert f"1 missing: {name}" in refused("less.safetensors", "--config", "llama", *text, capsys=capsys)
    assert "no config.json, give its folder, or a GGUF file of the model (--config)" in refused(
        "less.safetensors", *text, capsys=capsys
    )


def test_every_window_begins_as_the_tokenizer_begins_a_text(here, capsys):
    shutil.copytree("llama", "begun")
    tokenizer = transformers.AutoTokenizer.from_pretrained("begun")
    template = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained("begun")
    row = measured("begun", "--no-floor", capsys=capsys)["reference_row"]
    model = transformers.AutoModelForCausalLM.from_pretrained("llama").eval()
    ids = torch.tensor(tokenizer((here / "text.txt").read_text(), add_special_tokens=False)["input_ids"])
    losses = []
    for piece in ids.split(15):
        window = torch.cat((torch.tensor([1]), piece))[None]
        losses.append((float(model(window, labels=window).loss.detach()), len(piece)))
    assert row["tokens"] == len(ids) == sum(count for _, count in losses)
    assert row["nll"]["mean"] == pytest.approx(sum(loss * count for loss, count in losses) / len(ids), rel=1e-6)


def test_an_encoder_is_no_language_model(capsys):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}
    config = transformers.BertConfig(vocab_size=len(TOKENS), initializer_range=0.15, **sizes)
    with redirect_stderr(io.StringIO()):
        transformers.BertForMaskedLM(config).save_pretrained("bert")
    with_config("bert")
    (Path("bert") / "config.json").write_text(config.to_json_string(use_diff=False))
    message = refused("bert", "--text", "text.txt", "--context", "16", capsys=capsys)
    assert "not a causal language model: what bert says of a token depends on later ones" in message
    assert run(["generate", "bert", "a bee"]) == 2
    assert "as in an encoder: it continues no text" in capsys.readouterr().err
    with redirect_stderr(io.StringIO()):
        transformers.BertModel(config).save_pretrained("body")
    with_config("body")
    (Path("body") / "config.json").write_text(config.to_json_string(use_diff=False))
    for words in (
        ["generate", "body", "a bee"],
        *(
            [verb, "body", "--text", "text.txt", *rest]
            for verb, *rest in (
                ("judge", "--context", "16"),
                ("search", "--bits", "5", "--context", "16", "-o", "of-body"),
            )
        ),
    ):
        assert run(words) == 2
        assert "BertModel is no causal language model but an encoder" in capsys.readouterr().err
    assert not Path("of-body").exists()


def test_bits_of_a_gguf_file_are_its_own(capsys):
    write_gguf("llama", "wide.gguf")
    quantize_file("wide.gguf", "narrow.gguf", "q8_0_gguf")
    result = measured("wide.gguf", "narrow.gguf", "--no-floor", capsys=capsys)
    assert result["reference_row"]["bits_per_weight"] == 32.0
    assert result["rows"][0]["bits_per_weight"] == pytest.approx(8.5, abs=0.3)
    assert result["rows"][0]["kl"]["mean"] > 0


def test_a_perplexity_beyond_any_number_is_shown_as_such(capsys):
    change_weights("wild", lambda weights: weights["model.norm.weight"].mul_(1e5))
    row = measured("wild", "--no-floor", capsys=capsys)["reference_row"]
    assert row["nll"]["mean"] > 709
    assert row["perplexity"] is None
    assert run(["judge", "wild", "--text", "text.txt", "--context", "16", "--no-floor"]) == 0
    assert "inf" in capsys.readouterr().out


def write_gguf(folder, path, blocks=2):
    """The tiny llama as llama.cpp has it: its names, and rows of q and k in its order."""
    weights = safetensors.torch.load_file(f"{folder}/model.safetensors")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(blocks)
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(32)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([2, 3] + [1] * (len(TOKENS) - 2))  # unknown, control, normal
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    aliases = shipped_manifest("llama").aliases
    for name, tensor in weights.items():
        numbers = tensor.numpy()
        for part, heads in (("q_proj", 2), ("k_proj", 1)):
            if part in name:
                numbers = numbers.reshape(heads, 2, -1, numbers.shape[-1]).swapaxes(1, 2).reshape(numbers.shape)
        writer.add_tensor(aliases.to_others(name)[0], np.ascontiguousarray(numbers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- what it refuses, in one line ------------------------------------------------------------------------------------


def test_bad_options_are_refused_before_anything_is_read(here, capsys):
    text = ("--text", "text.txt")
    assert "did you mean 'mxfp4'" in refused("llama", *text, "-f", "mxfp44", capsys=capsys)
    assert "no manifest 'lama'" in refused("llama", *text, "--manifest", "lama", capsys=capsys)
    assert "missing.txt" in refused("llama", "--text", "missing.txt", capsys=capsys)
    assert "go with --format" in refused("llama", *text, "--keep", "lm_head", capsys=capsys)
    assert "Invalid value for '--threads'" in refused("llama", *text, "--threads", "0", capsys=capsys)
    (here / "empty.txt").write_text(" \n")
    assert "empty.txt: the text is empty" in refused("llama", "--text", "empty.txt", capsys=capsys)
    (here / "binary.txt").write_bytes(b"abc\xff\xfe")
    assert "binary.txt: not UTF-8 text (byte 3)" in refused("llama", "--text", "binary.txt", capsys=capsys)


def test_a_short_text_is_refused(here, capsys):
    (here / "short.txt").write_text("ab ab ab")
    message = refused("llama", "--text", "short.txt", "--context", "32", capsys=capsys)
    assert "the text has 6 tokens, and one window of context needs 32; take a longer text" in message


def test_a_context_beyond_the_model_is_refused(capsys):
    message = refused("llama", "--text", "text.txt", "--context", "512", capsys=capsys)
    assert "llama: context must be 64 or less, as the model has, got 512" in message


def test_windows_are_as_long_as_the_model_allows(capsys):
    assert run(["judge", "llama", "--text", "text.txt", "--no-floor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["context"] == 64


def test_rows_that_a_format_does_not_hold(capsys):
    filled, nearest, wanted = (
        measured("llama", "-f", name, *more, "--no-floor", capsys=capsys)["rows"][0]["samples"]
        for name, more in (("int8_g128", ("--pad", "zero")), ("int8_g128", ()), ("int8_row", ()))
    )
    assert nearest == wanted
    assert filled.keys() == wanted.keys()


def test_another_vocabulary_is_refused(capsys):
    save_llama("fewer", merges=MERGES[:30])
    message = refused("fewer", "llama", "--text", "text.txt", "--context", "16", capsys=capsys)
    assert "llama and fewer cut the text into different tokens" in message


def test_a_plan_that_forgets_a_weight_is_refused(capsys):
    shipped_manifest("llama").resolve({"model.norm.weight": (64,)}).save("short.json")
    message = refused("llama", "--text", "text.txt", "--context", "16", "--plan", "short.json", capsys=capsys)
    assert "nothing is said of 'model.embed_tokens.weight'" in message


def test_what_is_not_a_model_is_refused(here, capsys):
    text = ("--text", "text.txt")
    assert "no such file or folder" in refused("gone", *text, capsys=capsys)
    message = refused("text.txt", *text, capsys=capsys)
    assert "expected a folder with config.json, a .safetensors or a .gguf file" in message
    for name, missing, message in (
        ("headless", "config.json", "no config.json"),
        ("mute", "tokenizer.json", "the model has no tokenizer"),
        ("weightless", "model.safetensors", "no .safetensors file"),
    ):
        shutil.copytree("llama", name)
        (here / name / missing).unlink()
        assert message in refused(name, *text, capsys=capsys)
    (here / "broken.gguf").write_bytes(b"GGUF but no more")
    assert "broken.gguf: GGUF version" in refused("broken.gguf", *text, capsys=capsys)


def test_a_gguf_file_without_a_tokenizer_is_told_apart(here, capsys):
    make_checkpoint(here / "bare.gguf", naming="gguf")  # as `bitplan gpt-oss convert --to gguf` writes it
    message = refused("bare.gguf", "--text", "text.txt", capsys=capsys)
    assert "holds no tokenizer; give the Hugging Face folder" in message


def test_transposed_experts_are_measured_as_quantize_packs_them(here, capsys):
    """gpt-oss has experts as [inputs, outputs]; blocks of a packed folder lie along inputs."""
    make_checkpoint(here / "oss", naming="hf", expert_format="bfloat16")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(here / "llama" / name, here / "oss" / name)
    quantize_file("oss", "oss_packed", "mxfp4")
    (expected,) = measured("oss", "oss_packed", "--no-floor", capsys=capsys)["rows"]
    plan = "oss_packed/bitplan_plan.json"
    for row in measured("oss", "--format", "mxfp4", "--plan", plan, "--no-floor", capsys=capsys)["rows"]:
        assert row["bits_per_weight"] == pytest.approx(expected["bits_per_weight"])
        assert row["kl"]["mean"] == pytest.approx(expected["kl"]["mean"], rel=1e-4)


def test_nan_in_a_weight_is_named(capsys):
    shutil.copytree("llama", "sick")
    weights = safetensors.torch.load_file("sick/model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    safetensors.torch.save_file(weights, "sick/model.safetensors", metadata={"format": "pt"})
    message = refused("sick", "--text", "text.txt", "--context", "16", capsys=capsys)
    assert "sick: logits that are not finite in window 0, from its token 0 on" in message


def test_without_transformers_the_way_to_get_it_is_told(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = refused("llama", "--text", "text.txt", capsys=capsys)
    assert "needs transformers, which is not installed: pip install 'bitplan[models]'" in message


def test_text_errors_are_of_the_library_too(here):
    from bitplan.base.records import read_text

    (here / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(FileFormatError, match="not UTF-8"):
        read_text("latin.txt")


def test_inputs_are_rounded_beside_weights(made, capsys):
    options = ["--text", str(made / "text.txt"), "--context", "32", "--no-floor", "--json"]
    assert run(["judge", str(made / "llama"), *options, "-f", "int8_row"]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert run(["judge", str(made / "llama"), *options, "-f", "int8_row", "--inputs", "fp8"]) == 0
    rounded = json.loads(capsys.readouterr().out)
    assert kept["inputs"] is None
    assert rounded["inputs"] == "fp8_e4m3_row"
    labels = [row["format"] for row in rounded["rows"]]
    assert labels == ["llama, inputs fp8_e4m3_row", "int8_row, inputs fp8_e4m3_row"]
    assert rounded["reference_row"] == kept["reference_row"]
    assert rounded["rows"][1]["kl"]["mean"] > 2 * kept["rows"][0]["kl"]["mean"]
    assert run(["judge", str(made / "llama"), *options, "--inputs", "int3"]) == 2
    assert "--inputs: no format of inputs 'int3'" in capsys.readouterr().err

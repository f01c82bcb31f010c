"""The tokenizer that a GGUF file's metadata gives: the tokens of the tokenizer from which the file was made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf.constants import GGUFValueType

from bitplan.base.errors import StoreError
from bitplan.files.engines.gguf_metadata import array, flag, text, whole
from bitplan.files.engines.gguf_tokenizer import PRETOKENIZERS, tokenizer_metadata
from bitplan.files.engines.tokenizer_of_gguf import tokenizer_of_gguf

TOKENS = json.loads((Path(__file__).parent / "llama_cpp_tokens" / "tokens.json").read_text(encoding="utf-8"))
SPECIAL = ["<start>", "<end>", "<pad>"]
LESSON = [
    "In 2024 we don't count 1234567 words, they'll say.",
    "WE'LL see 12 34\n\n  2024 2024 1234567 don't don't",
] * 4
SAMPLE = "In 2024, don't  WE'LL\n\n count 1234567 words… é日本 <end>x"


def rules_of(steps):
    rules = [
        {"type": "Digits", "individual_digits": True}
        if step == "digits"
        else {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        if step == "byte-level regex"
        else {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}
        for step in steps
    ]
    if "byte-level regex" not in steps:
        rules.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    return {"type": "Sequence", "pretokenizers": rules}


def trained(folder, steps, **config):
    """A tokenizer of these rules that learnt from a few lines, saved as transformers does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    empty = json.loads(Tokenizer(models.BPE()).to_str()) | {"pre_tokenizer": rules_of(steps)}
    tokenizer = Tokenizer.from_str(json.dumps(empty))
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(LESSON, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<start>", eos_token="<end>", pad_token="<pad>", chat_template="{{ 1 }}"
    )
    made.save_pretrained(folder)
    if config:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return made


@pytest.mark.parametrize("steps", PRETOKENIZERS, ids=PRETOKENIZERS.values())
def test_tokens_and_special_tokens_are_those_of_the_folder(steps, tmp_path):
    pytest.importorskip("transformers")
    before = trained(tmp_path, steps)
    metadata = tokenizer_metadata(tmp_path, len(before))
    after = tokenizer_of_gguf(metadata, Path("model.gguf"))
    assert after(SAMPLE)["input_ids"] == before(SAMPLE)["input_ids"]
    assert after.decode(after(SAMPLE)["input_ids"]) == SAMPLE
    assert (after.bos_token, after.eos_token, after.pad_token) == ("<start>", "<end>", "<pad>")
    assert after.chat_template == "{{ 1 }}"
    after.save_pretrained(tmp_path / "again")  # and GGUF's keys of it are the same
    again = tokenizer_metadata(tmp_path / "again", len(before))
    for key in ("pre", "tokens", "token_type", "merges", "eos_token_id"):
        assert again[f"tokenizer.ggml.{key}"].value == metadata[f"tokenizer.ggml.{key}"].value


def test_tokens_around_a_text_are_those_that_the_file_asks_for(tmp_path):
    pytest.importorskip("transformers")
    before = trained(tmp_path, ("byte-level regex",))
    keys = tokenizer_metadata(tmp_path, len(before)) | {"tokenizer.ggml.add_bos_token": flag(True)}
    keys["tokenizer.ggml.add_eos_token"] = flag(True)
    plain = before("some words", add_special_tokens=False)["input_ids"]
    assert tokenizer_of_gguf(keys, Path("model.gguf"))("some words")["input_ids"] == [0, *plain, 1]
    keys["tokenizer.ggml.add_eos_token"] = flag(False)
    assert tokenizer_of_gguf(keys, Path("model.gguf"))("some words")["input_ids"] == [0, *plain]
    del keys["tokenizer.ggml.add_bos_token"]
    assert tokenizer_of_gguf(keys, Path("model.gguf"))("some words")["input_ids"] == plain
    keys["tokenizer.ggml.pre"] = text("llama-bpe")  # llama.cpp's default for these
    assert tokenizer_of_gguf(keys, Path("model.gguf"))("some words")["input_ids"][0] == 0


def test_other_kinds_are_left_to_transformers_with_a_warning():
    for keys, said in (
        ({"tokenizer.ggml.model": text("t5")}, "has a tokenizer of the kind 't5'"),
        ({"tokenizer.ggml.model": text("gpt2"), "tokenizer.ggml.pre": text("viking")}, "by the rules 'viking'"),
    ):
        with pytest.warns(UserWarning, match=rf"model\.gguf: .*{said}"):
            assert tokenizer_of_gguf(keys, Path("model.gguf")) is None


def as_gguf(keys):
    """Values of a JSON document in GGUF's types."""
    kinds = {str: GGUFValueType.STRING, int: GGUFValueType.INT32, float: GGUFValueType.FLOAT32}
    single = {str: text, bool: flag, int: whole}
    return {
        key: array(kinds[type(value[0])], value) if isinstance(value, list) else single[type(value)](value)
        for key, value in keys.items()
    }


@pytest.mark.parametrize("name", TOKENS["cases"])
def test_tokens_are_those_of_llama_cpp(name):
    """llama_cpp_tokens/make.py wrote them with llama.cpp's own tokenizer."""
    pytest.importorskip("transformers")
    case = TOKENS["cases"][name]
    keys = as_gguf(TOKENS["vocabularies"][case["vocabulary"]] | case["keys"])
    tokenizer = tokenizer_of_gguf(keys, Path("model.gguf"))
    found = {sample: tokenizer(sample)["input_ids"] for sample in TOKENS["texts"]}
    assert found == dict(zip(TOKENS["texts"], case["ids"], strict=True))


def test_a_saved_tokenizer_of_each_kind_gives_the_same_tokens_and_text(tmp_path):
    """Read again as transformers reads a folder, with a config beside it that names a family."""
    transformers = pytest.importorskip("transformers")
    families = {
        "sentencepiece of gemma": "gemma3_text",
        "sentencepiece between two tokens": "llama",
        "bpe llama-bpe": "llama",
        "wordpiece": "bert",
    }
    for name, model_type in families.items():
        case = TOKENS["cases"][name]
        keys = as_gguf(TOKENS["vocabularies"][case["vocabulary"]] | case["keys"])
        folder = tmp_path / name
        tokenizer_of_gguf(keys, Path("model.gguf")).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        again = transformers.AutoTokenizer.from_pretrained(folder)
        assert [again(sample)["input_ids"] for sample in TOKENS["texts"]] == case["ids"]
        if case["vocabulary"] == "sentencepiece":
            sample = "Ünïcödé  日本語 the king"
            assert again.decode(again(sample)["input_ids"], skip_special_tokens=True) == sample


def test_damaged_tokenizers_are_refused():
    pytest.importorskip("transformers")
    keys = {"tokenizer.ggml.model": text("gpt2"), "tokenizer.ggml.pre": text("gpt-2")}
    with pytest.raises(StoreError, match="0 tokens, 0 kinds of tokens, no merges"):
        tokenizer_of_gguf(keys, Path("model.gguf"))
    keys["tokenizer.ggml.tokens"] = array(GGUFValueType.STRING, ["a", "b"])
    keys["tokenizer.ggml.merges"] = array(GGUFValueType.STRING, ["a c"])
    with pytest.raises(StoreError, match="its tokenizer cannot be used"):
        tokenizer_of_gguf(keys, Path("model.gguf"))
    with pytest.raises(StoreError, match="eos_token_id is 7; the file has 2 tokens"):
        tokenizer_of_gguf(keys | {"tokenizer.ggml.eos_token_id": whole(7)}, Path("model.gguf"))
    numbers = array(GGUFValueType.INT32, [1, 2])
    for changes, said in (
        ({"tokenizer.ggml.tokens": numbers}, "tokenizer.ggml.tokens must be a list of texts"),
        ({"tokenizer.ggml.tokens": text("ab")}, "tokenizer.ggml.tokens must be a list of texts"),
        ({"tokenizer.ggml.merges": numbers}, "tokenizer.ggml.merges must be a list of texts"),
        ({"tokenizer.ggml.tokens": array(GGUFValueType.STRING, ["a", "a"])}, "the token 'a' is there 2 times"),
        ({"tokenizer.ggml.add_bos_token": whole(1)}, "add_bos_token must be true or false, got 1"),
        ({"tokenizer.ggml.add_bos_token": flag(True)}, "add_bos_token is true, and tokenizer.ggml.bos_token_id is not"),
        ({"tokenizer.ggml.model": text("llama"), "tokenizer.ggml.scores": keys["tokenizer.ggml.tokens"]}, "of numbers"),
        ({"tokenizer.ggml.model": text("llama")}, "2 tokens, 2 kinds of tokens, no scores"),
        ({"tokenizer.ggml.model": text("bert")}, "cls_token_id is not there"),
        ({"tokenizer.ggml.token_type": keys["tokenizer.ggml.tokens"]}, "token_type must be a list of numbers"),
    ):
        with pytest.raises(StoreError, match=said):
            tokenizer_of_gguf(keys | changes, Path("model.gguf"))

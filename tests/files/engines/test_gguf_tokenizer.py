"""Tokenizers in GGUF's keys: SentencePiece from both of its files, and the rules that split text by their names."""

from __future__ import annotations

import json
import struct

import pytest

from bitplan.base.errors import StoreError
from bitplan.files.engines.gguf_tokenizer import PRETOKENIZERS, read_pieces, tokenizer_metadata

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
WORDS = ["<unk>", "<s>", "</s>", "<0x41>", "▁", "a", "b", "ab", "▁ab"]
MERGES = [["a", "b"], ["▁", "ab"]]
ADDED = [{"id": number, "content": WORDS[number], "special": True} for number in range(3)]


def write_json(folder, **changes):
    document = {
        "added_tokens": [*ADDED, {"id": 9, "content": "<tool>", "special": False}],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]},
        "pre_tokenizer": None,
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "unk_token": "<unk>",
            "vocab": {word: number for number, word in enumerate(WORDS)},
            "merges": MERGES,
        },
    } | changes
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))


def field(number: int, value: bytes | float | int) -> bytes:
    if isinstance(value, bytes):
        return bytes([number << 3 | 2, len(value)]) + value
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    return bytes([number << 3, value])


def piece(word: str, score: float, kind: int) -> bytes:
    return field(1, field(1, word.encode()) + field(2, score) + (field(3, kind) if kind != NORMAL else b""))


def values(folder, size=12):
    return {key: value.value for key, value in tokenizer_metadata(folder, size).items()}


def test_sentencepiece_from_json_scores_words_by_the_rank_of_their_merge(tmp_path):
    write_json(tmp_path)
    found = values(tmp_path)
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("llama", "default")
    assert found["tokenizer.ggml.tokens"] == [*WORDS, "<tool>", "[PAD10]", "[PAD11]"]
    assert found["tokenizer.ggml.token_type"][:4] == [CONTROL, CONTROL, CONTROL, BYTE]
    assert found["tokenizer.ggml.token_type"][9:] == [USER, UNUSED, UNUSED]
    assert found["tokenizer.ggml.scores"][7:9] == [0.0, -1.0]
    assert found["tokenizer.ggml.add_space_prefix"] is True
    assert (found["tokenizer.ggml.bos_token_id"], found["tokenizer.ggml.add_bos_token"]) == (1, True)
    write_json(tmp_path, normalizer=None)
    assert values(tmp_path)["tokenizer.ggml.add_space_prefix"] is False


def test_sentencepiece_from_its_own_file(tmp_path):
    raw = piece("<unk>", 0.0, UNKNOWN) + piece("<s>", 0.0, CONTROL) + piece("▁ab", -3.5, NORMAL) + field(2, b"trainer")
    (tmp_path / "tokenizer.model").write_bytes(raw)
    assert [tuple(each) for each in read_pieces(tmp_path / "tokenizer.model")] == [
        ("<unk>", 0.0, UNKNOWN),
        ("<s>", 0.0, CONTROL),
        ("▁ab", -3.5, NORMAL),
    ]
    assert values(tmp_path, 4)["tokenizer.ggml.scores"] == [0.0, 0.0, -3.5, 0.0]
    for damaged in (raw[:-20], b"\xff" * 20, b""):
        (tmp_path / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(StoreError, match=r"SentencePiece model"):
            read_pieces(tmp_path / "tokenizer.model")


def test_rules_that_split_text_are_known_by_what_they_are(tmp_path):
    names = {}
    for steps in PRETOKENIZERS:
        rules = [
            {"type": "Digits", "individual_digits": True}
            if step == "digits"
            else {"type": "ByteLevel", "use_regex": True}
            if step == "byte-level regex"
            else {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}
            for step in steps
        ]
        rules.append({"type": "ByteLevel", "use_regex": False})
        model = {"type": "BPE", "byte_fallback": False, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
        write_json(tmp_path, pre_tokenizer={"type": "Sequence", "pretokenizers": rules}, model=model, added_tokens=[])
        names[steps] = values(tmp_path)["tokenizer.ggml.pre"]
    assert names == PRETOKENIZERS
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    llama3 = words + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # as its tokenizer.json has it
    assert PRETOKENIZERS[llama3,] == "llama-bpe"
    write_json(tmp_path, model={"type": "Unigram"})
    with pytest.raises(StoreError, match=r"a tokenizer of type .Unigram."):
        values(tmp_path)


def test_byte_level_pieces_are_no_sentencepiece_whatever_the_tokenizer_falls_back_to(tmp_path):
    model = {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    write_json(tmp_path, pre_tokenizer={"type": "ByteLevel", "use_regex": True}, model=model, added_tokens=[])
    found = values(tmp_path)
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.ggml.pre"] == "gpt-2"


def test_a_space_before_the_text_is_refused_and_no_token_before_it_is_said(tmp_path):
    """llama.cpp's byte-level BPE puts no space before a text; by some rules it adds a token unless told not to."""
    model = {"type": "BPE", "byte_fallback": False, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    rules = {"type": "ByteLevel", "use_regex": True, "add_prefix_space": True}
    write_json(tmp_path, pre_tokenizer=rules, model=model, added_tokens=[])
    with pytest.raises(StoreError, match=r"a space before a text \(add_prefix_space\)"):
        values(tmp_path)
    write_json(tmp_path, pre_tokenizer=rules | {"add_prefix_space": False}, model=model, added_tokens=[])
    (tmp_path / "tokenizer_config.json").unlink()
    assert values(tmp_path)["tokenizer.ggml.add_bos_token"] is False


def test_tokens_beyond_the_model_are_refused_before_anything_is_made_of_them(tmp_path):
    """A file of a hundred bytes must not cost a gigabyte, or never end."""
    for number in (8_000_000, 2**40):
        write_json(tmp_path, added_tokens=[{"id": number, "content": "<far>", "special": True}])
        with pytest.raises(StoreError, match=f"a token of number {number}, the model 12 tokens"):
            values(tmp_path)
    write_json(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ' * 100_000)
    with pytest.raises(StoreError, match=r"tokenizer\.json: cannot be read as JSON"):
        values(tmp_path)
    for changes, said in (
        ({"model": []}, "with a 'model'"),
        ({"added_tokens": [5]}, "added_tokens must be a list of objects"),
        ({"model": {"type": "BPE", "vocab": {"a": "b"}}}, "model.vocab must map tokens"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a"]]}}, "model.merges must be a list of pairs"),
    ):
        write_json(tmp_path, **changes)
        with pytest.raises(StoreError, match=said):
            values(tmp_path)
    write_json(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": 5, "eos_token": {"content": [1]}}))
    assert "tokenizer.ggml.eos_token_id" not in values(tmp_path)

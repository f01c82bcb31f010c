"""Writes tokens.json: small tokenizers of each kind in GGUF's keys, and the tokens that llama.cpp gives with them.

`llama-tokenize` of llama.cpp must be on the PATH; run from the repository's root:
python -m tests.files.engines.llama_cpp_tokens.make. The file beside this one was made with build 11549. The
vocabularies learn from Shakespeare without rules that split text: pieces go over the ends of words, so that rules show
in tokens.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ROOT = Path(__file__).parents[4]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TEXTS = [
    *("", " ", "Hello world", " leading and trailing ", "two  three   four    spaces", "tab\tand\r\nlines\n\n\nhere\n"),
    *(
        "I'm WE'LL they'D don'T 'tis",
        "In 2024 we count 1234567 and 3.14",
        "Ünïcödé straße déjà vu",
        "日本語と漢字。中文",
    ),
    *("Привет мир", "🦙🚀 emoji", "--------- ======= ...", "aaaaaaaaaa thethethe", "x_y __init__(self): return 1"),
    *(
        "http://ex.am/ple?q=1&b=2",
        "the king<end>of the day<end>",
        "<start>twice",
        "don\u2019t — “quotes”…",
        "half ½ ² Ⅷ",
    ),
]
BYTE_RULES = ["gpt-2", "smollm", "llama-bpe", "qwen2", "gpt-4o", "tekken", "deepseek-v3", "falcon", "deepseek-coder"]


def lessons() -> list[str]:
    """Pieces of a few words, cut anywhere."""
    text = (ROOT / "bitplan/data/shakespeare.txt").read_text(encoding="utf-8")[:60_000]
    draw, pieces, at = random.Random(0), [], 0
    while at < len(text):
        length = draw.randint(5, 60)
        pieces.append(text[at : at + length])
        at += length
    return [*pieces, *(["2024 1234567 12 345 two  three   four    --- ==== don't WE'LL I'm"] * 20)]


def byte_level() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<start>", "<end>"]
    tokenizer.train_from_iterator(
        lessons(), trainers.BpeTrainer(vocab_size=420, special_tokens=special, initial_alphabet=alphabet)
    )
    model = json.loads(tokenizer.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [CONTROL if word in special else NORMAL for word in words],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def sentencepiece() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(lessons(), trainers.BpeTrainer(vocab_size=260, show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    special = {"<unk>": UNKNOWN, "<start>": CONTROL, "<end>": CONTROL}
    bytes_of = [f"<0x{number:02X}>" for number in range(256)]
    words = [*special, *bytes_of, *pieces, "    "]
    kinds = [*special.values(), *[BYTE] * 256, *[NORMAL] * len(pieces), USER_DEFINED]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [-1000.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def wordpiece() -> dict[str, Any]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        lessons(), trainers.WordPieceTrainer(vocab_size=260, special_tokens=special, show_progress=False)
    )
    numbers = tokenizer.get_vocab()
    words = sorted(numbers, key=numbers.__getitem__)
    marked = [word if word in special else word[2:] if word.startswith("##") else f"▁{word}" for word in words]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": marked,
        "tokenizer.ggml.token_type": [CONTROL if word in special else NORMAL for word in words],
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
    }


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """A name, the vocabulary it uses, and what it changes."""
    for rules in BYTE_RULES:
        yield f"bpe {rules}", "byte_level", {"tokenizer.ggml.pre": rules}
    before, after, space = (f"tokenizer.ggml.{key}" for key in ("add_bos_token", "add_eos_token", "add_space_prefix"))
    gpt_2, llama_3 = {"tokenizer.ggml.pre": "gpt-2"}, {"tokenizer.ggml.pre": "llama3"}
    yield "bpe between two tokens", "byte_level", {**gpt_2, before: True, after: True}
    yield "bpe llama 3 without its first", "byte_level", {**llama_3, before: False}
    yield "sentencepiece that says nothing", "sentencepiece", {}
    yield "sentencepiece of gemma", "sentencepiece", {space: False, before: True}
    yield "sentencepiece between two tokens", "sentencepiece", {before: True, after: True}
    yield "sentencepiece alone", "sentencepiece", {before: False}
    yield "wordpiece", "wordpiece", {"tokenizer.ggml.pre": "bert-bge"}


def write_gguf(path: Path, keys: dict[str, Any]) -> None:
    """A file without tensors, of which llama.cpp reads the vocabulary."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{key}")(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def tokens_of(path: Path, text: str) -> list[int]:
    command = ["llama-tokenize", "-m", str(path), "--stdin", "--ids", "--log-disable", "--no-escape"]
    out = subprocess.run(command, input=text.encode(), capture_output=True, check=True).stdout
    ids: list[int] = json.loads(out)
    return ids


def main() -> None:
    vocabularies = {"byte_level": byte_level(), "sentencepiece": sentencepiece(), "wordpiece": wordpiece()}
    document: dict[str, Any] = {"vocabularies": vocabularies, "texts": TEXTS, "cases": {}}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, vocabulary, changes) in enumerate(cases()):
            path = Path(folder) / f"{number}.gguf"
            write_gguf(path, vocabularies[vocabulary] | changes)
            ids = [tokens_of(path, text) for text in TEXTS]
            document["cases"][name] = {"vocabulary": vocabulary, "keys": changes, "ids": ids}
    lines = json.dumps(document, ensure_ascii=False)
    (Path(__file__).parent / "tokens.json").write_text(lines.replace('], "', '],\n"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

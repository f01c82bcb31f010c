"""A Hugging Face tokenizer in GGUF's keys: byte-level BPE and SentencePiece, special tokens, chat template.

llama.cpp splits text before BPE by rules it knows by name (`tokenizer.ggml.pre`); here the name is found from the rules
of tokenizer.json themselves. A tokenizer whose rules are none of these is refused: with wrong ones a model still
talks, but worse. SentencePiece pieces come from tokenizer.model, or with ranks of merges as scores from tokenizer.json.
"""

from __future__ import annotations

import json
import logging
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gguf.constants import GGUFValueType, Keys, TokenType
from gguf.vocab import SpecialVocab

from bitplan.base.documents import MAX_DEPTH, is_size, short, show
from bitplan.base.errors import StoreError
from bitplan.base.records import MAX_JSON_BYTES
from bitplan.files.engines.gguf_metadata import array, flag, text, whole
from bitplan.files.gguf import GGUFValue

_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+"
_CAPITAL = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*"
_SLASHES = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
BYTE_LEVEL_REGEX, DIGITS, ADDED_SPACE = "byte-level regex", "digits", "a space before the text"
# How text is split, step by step -> llama.cpp's name for it.
PRETOKENIZERS = {
    (BYTE_LEVEL_REGEX,): "gpt-2",
    (DIGITS, BYTE_LEVEL_REGEX): "smollm",
    (_WORDS + r"\p{N}{1,3}" + _REST,): "llama-bpe",
    (_WORDS + r"\p{N}" + _REST,): "qwen2",
    (f"{_SMALL}{_SUFFIX}?|{_CAPITAL}{_SUFFIX}?" + r"|\p{N}{1,3}" + _SLASHES,): "gpt-4o",
    (f"{_SMALL}|{_CAPITAL}" + r"|\p{N}" + _SLASHES,): "tekken",
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ\u30a0-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ): "deepseek-v3",
}
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
SPECIAL_KEYS = {
    "bos": Keys.Tokenizer.BOS_ID,
    "eos": Keys.Tokenizer.EOS_ID,
    "unk": Keys.Tokenizer.UNK_ID,
    "sep": Keys.Tokenizer.SEP_ID,
    "pad": Keys.Tokenizer.PAD_ID,
    "mask": Keys.Tokenizer.MASK_ID,
}
_ADD_KEYS = {"bos": Keys.Tokenizer.ADD_BOS, "eos": Keys.Tokenizer.ADD_EOS}


class TokenPiece(NamedTuple):
    text: str
    score: float
    kind: TokenType


def tokenizer_metadata(folder: Path, vocabulary: int, pretokenizer: str | None = None) -> dict[str, GGUFValue]:
    """GGUF's keys of the tokenizer in a folder, for a model of so many tokens."""
    document = _read_document(folder / "tokenizer.json", vocabulary)
    if document is not None and _is_byte_level(document):
        name = pretokenizer or _pretokenizer(folder, document)
        pieces, keys = _byte_level(document, vocabulary), {"tokenizer.ggml.model": text("gpt2"), **_pre(name)}
        keys[Keys.Tokenizer.ADD_BOS] = flag(False)  # unless the folder says so: without it llama-bpe's rules add one
    else:
        pieces = _sentencepiece(folder, document, vocabulary)
        keys = {"tokenizer.ggml.model": text("llama"), **_pre(pretokenizer or "default")}
        keys[Keys.Tokenizer.SCORES] = array(GGUFValueType.FLOAT32, [piece.score for piece in pieces])
        keys[Keys.Tokenizer.ADD_PREFIX] = flag(_adds_space(document))
    keys[Keys.Tokenizer.LIST] = array(GGUFValueType.STRING, [piece.text for piece in pieces])
    keys[Keys.Tokenizer.TOKEN_TYPE] = array(GGUFValueType.INT32, [int(piece.kind) for piece in pieces])
    return keys | _special(folder, vocabulary, with_merges="gpt2" in str(keys["tokenizer.ggml.model"].value))


def _is_byte_level(document: dict[str, Any]) -> bool:
    """Whether a tokenizer.json is of a byte-level BPE tokenizer, which spells each byte as one character.

    `byte_fallback` alone does not tell: transformers 5.17 also sets it in a byte-level tokenizer that it read from
    GGUF.
    """
    splits = json.dumps(document.get("pre_tokenizer"))
    return not document["model"].get("byte_fallback") or '"ByteLevel"' in splits


def _pre(name: str) -> dict[str, GGUFValue]:
    return {Keys.Tokenizer.PRE: text(name)}


def _read_document(path: Path, vocabulary: int) -> dict[str, Any] | None:
    """A tokenizer.json of BPE whose parts are what they should be; None where there is none."""
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"more than {MAX_JSON_BYTES} bytes")
        document = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(document, ensure_ascii=False).encode()
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path}: cannot be read as JSON: {short(str(error))}") from None
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise StoreError(f"{path}: expected a JSON object with a 'model', as the library tokenizers writes it")
    model = document["model"]
    if model.get("type") != "BPE":
        raise StoreError(f"{path}: a tokenizer of type {show(model.get('type'))}; exported are BPE and SentencePiece's")
    words, merges, added = model.get("vocab"), model.get("merges", []), document.get("added_tokens") or []
    if not isinstance(words, dict) or not all(map(is_size, words.values())):
        raise StoreError(f"{path}: model.vocab must map tokens to their numbers")
    if not isinstance(merges, list) or not all(map(_is_merge, merges)):
        raise StoreError(f"{path}: model.merges must be a list of pairs of tokens")
    if not isinstance(added, list) or not all(map(_is_added, added)):
        raise StoreError(f"{path}: added_tokens must be a list of objects with a number 'id' and a text 'content'")
    last = max([*words.values(), *(token["id"] for token in added)], default=-1)
    if last >= vocabulary:
        raise StoreError(
            f"{path}: the tokenizer has a token of number {last}, the model {vocabulary} tokens; they do not belong "
            "together"
        )
    return document


def _is_merge(value: Any) -> bool:
    pair = value.split(" ") if isinstance(value, str) else value
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(word, str) for word in pair)


def _is_added(value: Any) -> bool:
    return isinstance(value, dict) and is_size(value.get("id")) and isinstance(value.get("content"), str)


# ---- how text is split ---------------------------------------------------------------------------------------------


def _pretokenizer(folder: Path, document: dict[str, Any]) -> str:
    steps = tuple(_steps(document.get("pre_tokenizer") or {}))
    if ADDED_SPACE in steps:
        raise StoreError(
            f"{folder}: tokenizer.json puts a space before a text (add_prefix_space), which no rules of llama.cpp's "
            "byte-level BPE do; export with add_prefix_space false if the model was trained so, or name its rules",
            settings={"pretokenizer": None},
        )
    if steps not in PRETOKENIZERS:
        raise StoreError(
            f"{folder}: tokenizer.json splits text by rules that are none of {', '.join(PRETOKENIZERS.values())}; "
            "name those that llama.cpp has for it, such as 'tekken' or 'deepseek-v3'",
            settings={"pretokenizer": None},
        )
    return PRETOKENIZERS[steps]


def _steps(rules: Any, depth: int = 0) -> Iterator[str]:
    rules = rules if isinstance(rules, dict) else {}
    kind, inner, pattern = rules.get("type"), rules.get("pretokenizers"), rules.get("pattern")
    if kind == "Sequence" and isinstance(inner, list) and depth < MAX_DEPTH:
        for step in inner:
            yield from _steps(step, depth + 1)
    elif kind == "ByteLevel":
        if rules.get("add_prefix_space"):
            yield ADDED_SPACE
        if rules.get("use_regex", True):
            yield BYTE_LEVEL_REGEX
    elif kind == "Digits" and rules.get("individual_digits"):
        yield DIGITS
    elif (
        kind == "Split"
        and isinstance(pattern, dict)
        and rules.get("behavior") == "Isolated"
        and not rules.get("invert")
    ):
        yield str(pattern.get("Regex"))
    else:
        yield "another kind"


def _adds_space(document: dict[str, Any] | None) -> bool:
    """Whether a space is put before the text, as SentencePiece does unless told otherwise."""
    if document is None:
        return True
    before = json.dumps([document.get("normalizer"), document.get("pre_tokenizer")])
    return '"Prepend"' in before or '"prepend_scheme": "first"' in before or '"prepend_scheme": "always"' in before


# ---- pieces --------------------------------------------------------------------------------------------------------


def _byte_level(document: dict[str, Any], vocabulary: int) -> list[TokenPiece]:
    return _filled(
        {number: TokenPiece(word, 0.0, TokenType.NORMAL) for word, number in document["model"]["vocab"].items()},
        document,
        vocabulary,
    )


def _filled(pieces: dict[int, TokenPiece], document: dict[str, Any] | None, vocabulary: int) -> list[TokenPiece]:
    """All tokens in order; added ones take their place, and numbers without a token are unused."""
    for token in [] if document is None else document.get("added_tokens") or []:
        kind = TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED
        pieces[token["id"]] = TokenPiece(token["content"], 0.0, kind)
    return [pieces.get(number, TokenPiece(f"[PAD{number}]", 0.0, TokenType.UNUSED)) for number in range(vocabulary)]


def _sentencepiece(folder: Path, document: dict[str, Any] | None, vocabulary: int) -> list[TokenPiece]:
    path = folder / "tokenizer.model"
    if path.is_file():
        pieces = read_pieces(path)
        if len(pieces) > vocabulary:
            raise StoreError(
                f"{path}: the tokenizer has {len(pieces)} tokens, the model {vocabulary}; they do not belong together"
            )
        return _filled(dict(enumerate(pieces)), document, vocabulary)
    if document is None:
        raise StoreError(f"{folder}: no tokenizer.json and no tokenizer.model; copy those of the model into the folder")
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(document["model"].get("merges", [])):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    unknown = document["model"].get("unk_token")

    def piece(word: str) -> TokenPiece:
        if _BYTE.fullmatch(word):
            return TokenPiece(word, 0.0, TokenType.BYTE)
        kind = TokenType.UNKNOWN if word == unknown else TokenType.NORMAL
        return TokenPiece(word, -float(ranks.get(word, len(ranks))), kind)

    return _filled({number: piece(word) for word, number in document["model"]["vocab"].items()}, document, vocabulary)


def read_pieces(path: Path) -> list[TokenPiece]:
    """The pieces of a SentencePiece model: field 1 of the message, each with its text, score and kind."""
    raw = path.read_bytes()
    pieces = []
    try:
        for field, value in _fields(raw):
            if field == 1 and isinstance(value, bytes):
                inner = dict(_fields(value))
                (score,) = struct.unpack("<f", inner.get(2, bytes(4)))
                pieces.append(TokenPiece(inner[1].decode(), score, TokenType(inner.get(3, 1))))
    except (IndexError, KeyError, ValueError, struct.error, AttributeError) as error:
        raise StoreError(f"{path}: not a SentencePiece model ({error}); download it again") from None
    if not pieces:
        raise StoreError(f"{path}: a SentencePiece model without pieces; download it again")
    return pieces


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Fields of a protobuf message: numbers, and bytes of fixed or given length."""
    at = 0
    while at < len(raw):
        tag, at = _number(raw, at)
        kind = tag & 7
        if kind == 0:
            value, at = _number(raw, at)
            yield tag >> 3, value
            continue
        length, at = _number(raw, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        if at + length > len(raw):
            raise ValueError(f"a field at byte {at} is cut short")
        yield tag >> 3, raw[at : at + length]
        at += length


def _number(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


# ---- special tokens --------------------------------------------------------------------------------------------------


def _is_of_one_text(record: logging.LogRecord) -> bool:
    """Whether to keep a log message of the gguf package: False for its warning about templates for pairs of texts.

    The package knows BERT's template only, and warns of those of others, as Gemma's.
    """
    return "TemplateProcessing<pair>" not in record.getMessage()


def _special(folder: Path, vocabulary: int, *, with_merges: bool) -> dict[str, GGUFValue]:
    log = logging.getLogger(SpecialVocab.__module__)
    log.addFilter(_is_of_one_text)
    try:
        vocab = SpecialVocab(folder, load_merges=with_merges, n_vocab=vocabulary)
    except Exception as error:  # it goes through these files as if they were sound
        raise StoreError(
            f"{folder}: gguf finds no special tokens in config.json, tokenizer.json and tokenizer_config.json "
            f"({type(error).__name__}: {short(str(error))}); download them again"
        ) from None
    finally:
        log.removeFilter(_is_of_one_text)
    keys: dict[str, GGUFValue] = {}
    if with_merges:
        keys[Keys.Tokenizer.MERGES] = array(GGUFValueType.STRING, vocab.merges)
    keys |= {
        SPECIAL_KEYS[kind]: whole(number) for kind, number in vocab.special_token_ids.items() if kind in SPECIAL_KEYS
    }
    keys |= {
        _ADD_KEYS[kind]: flag(value)
        for kind, value in vocab.add_special_token.items()
        if kind in _ADD_KEYS and isinstance(value, bool)
    }
    if isinstance(vocab.chat_template, str):
        keys[Keys.Tokenizer.CHAT_TEMPLATE] = text(vocab.chat_template)
    elif isinstance(vocab.chat_template, list):
        named = [item for item in vocab.chat_template if isinstance(item, dict) and item.get("name") == "default"]
        if named and isinstance(named[0].get("template"), str):
            keys[Keys.Tokenizer.CHAT_TEMPLATE] = text(named[0]["template"])
    return keys

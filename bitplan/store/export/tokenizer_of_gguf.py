"""The tokenizer of a GGUF file, made from its metadata: byte-level BPE whose way of splitting text is known by name.

transformers makes one of any file, but leaves out how the file splits text (a SmolLM2's digits stay together), and some
versions give it other special tokens. It is asked only for what is not made here: SentencePiece, and rules of other
names, which a warning tells.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf.constants import Keys, TokenType

from bitplan.errors import StoreError
from bitplan.optional import require
from bitplan.store.export.gguf_tokenizer import BYTE_LEVEL_REGEX, DIGITS, PRETOKENIZERS, SPECIAL_KEYS
from bitplan.store.files.gguf_values import GGUFValue

_LLAMA_3 = "llama-bpe"
_SAME_RULES = {"llama3": _LLAMA_3, "llama-v3": _LLAMA_3, "phi-2": "gpt-2"}  # llama.cpp's other names
_NORMALIZERS = {"qwen2": {"type": "NFC"}}
_SPECIAL = {f"{kind}_token": key for kind, key in SPECIAL_KEYS.items()}
_STEPS = {name: steps for steps, name in PRETOKENIZERS.items()}


def tokenizer_of_gguf(metadata: Mapping[str, GGUFValue], where: Path) -> Any | None:
    """A tokenizer of transformers; None for a kind that transformers has to read."""
    if _value(metadata, Keys.Tokenizer.MODEL) != "gpt2":
        return None
    name = _value(metadata, Keys.Tokenizer.PRE)
    name = _SAME_RULES.get(str(name), name)
    if name not in _STEPS:
        warnings.warn(
            f"{where}: splits text by the rules {name!r}, which are none of {', '.join(_STEPS)}; transformers' reader "
            "of GGUF splits by rules of its own, so tokens may differ: give the model's folder if you have it",
            stacklevel=2,
        )
        return None
    library = require("transformers", purpose=f"reading the tokenizer of {where.name}", extra="models")
    made = require("tokenizers", purpose=f"reading the tokenizer of {where.name}", extra="models")
    words = list(_value(metadata, Keys.Tokenizer.LIST) or ())
    special = {kind: words[number] for kind, number in _special_numbers(metadata, len(words), where).items()}
    try:
        tokenizer = made.Tokenizer.from_str(json.dumps(_document(metadata, str(name), words, special, where)))
    except Exception as error:  # the library has no class for what it refuses
        raise StoreError(f"{where}: its tokenizer cannot be used: {' '.join(str(error).split())[:200]}") from error
    template = _value(metadata, Keys.Tokenizer.CHAT_TEMPLATE)
    options = {**special, **({"chat_template": template} if isinstance(template, str) else {})}
    return library.PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **options)


def _value(metadata: Mapping[str, GGUFValue], key: str) -> Any:
    return getattr(metadata.get(key), "value", None)


def _special_numbers(metadata: Mapping[str, GGUFValue], count: int, where: Path) -> dict[str, int]:
    found = {kind: _value(metadata, key) for kind, key in _SPECIAL.items() if key in metadata}
    for kind, number in found.items():
        if type(number) is not int or not 0 <= number < count:
            raise StoreError(f"{where}: {_SPECIAL[kind]} is {number!r}; the file has {count} tokens")
    return found


def _document(
    metadata: Mapping[str, GGUFValue], name: str, words: list[str], special: Mapping[str, str], where: Path
) -> dict[str, Any]:
    """What tokenizer.json says."""
    kinds = list(_value(metadata, Keys.Tokenizer.TOKEN_TYPE) or [int(TokenType.NORMAL)] * len(words))
    merges = _value(metadata, Keys.Tokenizer.MERGES)
    if not words or len(kinds) != len(words) or merges is None:
        counts = f"{len(words)} tokens, {len(kinds)} kinds of tokens, {'no' if merges is None else len(merges)} merges"
        raise StoreError(f"{where}: its tokenizer is not whole ({counts}); export from the model's folder")
    control, own, unknown = int(TokenType.CONTROL), int(TokenType.USER_DEFINED), int(TokenType.UNKNOWN)
    added = [
        {"id": number, "content": word, "special": kind == control}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, (word, kind) in enumerate(zip(words, kinds, strict=True))
        if kind in (control, own)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": _NORMALIZERS.get(name),
        "pre_tokenizer": _pre_tokenizer(_STEPS[name], level),
        "post_processor": _post_processor(metadata, name, words, special, level | {"trim_offsets": False}),
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": next((word for word, kind in zip(words, kinds, strict=True) if kind == unknown), None),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": name == _LLAMA_3,
            "vocab": {word: number for number, word in enumerate(words)},
            "merges": list(merges),
        },
    }


def _pre_tokenizer(steps: tuple[str, ...], level: dict[str, Any]) -> dict[str, Any]:
    made = [
        level
        if step == BYTE_LEVEL_REGEX
        else {"type": "Digits", "individual_digits": True}
        if step == DIGITS
        else {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}
        for step in steps
    ]
    if BYTE_LEVEL_REGEX not in steps:
        made.append(level | {"use_regex": False})
    return made[0] if len(made) == 1 else {"type": "Sequence", "pretokenizers": made}


def _post_processor(
    metadata: Mapping[str, GGUFValue], name: str, words: list[str], special: Mapping[str, str], level: dict[str, Any]
) -> dict[str, Any]:
    """Tokens around a text, where the file says so; a text of llama 3 has one before it even where it does not."""
    said = _value(metadata, Keys.Tokenizer.ADD_BOS)
    before = special.get("bos_token") if (name == _LLAMA_3 if said is None else said) else None
    after = special.get("eos_token") if _value(metadata, Keys.Tokenizer.ADD_EOS) else None
    if before is None and after is None:
        return level
    around = {word: {"id": word, "ids": [words.index(word)], "tokens": [word]} for word in (before, after) if word}

    def parts(sequence: str, kind: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": sequence, "type_id": kind}}
        tokens = [None if word is None else {"SpecialToken": {"id": word, "type_id": kind}} for word in (before, after)]
        return [each for each in (tokens[0], text, tokens[1]) if each is not None]

    return {
        "type": "TemplateProcessing",
        "single": parts("A", 0),
        "pair": [*parts("A", 0), *parts("B", 1)],
        "special_tokens": around,
    }

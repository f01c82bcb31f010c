"""The tokenizer of a GGUF file, made from its metadata: the tokens that llama.cpp gives, first and last ones included.

| tokenizer.ggml.model | is | known by |
|---|---|---|
| gpt2 | byte-level BPE: merges, after rules that split text | the name of the rules, tokenizer.ggml.pre |
| llama | SentencePiece: of two pieces those are joined first whose word scores best | scores |
| bert | WordPiece: the longest piece that fits, word by word | the vocabulary alone |

transformers makes a tokenizer of some files, too, but without the token before a text that the file asks for, and by
rules of its own. It is asked only for what is not made here, which a warning tells. Where a file does not say whether
a token goes before a text, what llama.cpp does then counts.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gguf.constants import Keys, TokenType

from bitplan.base.errors import StoreError
from bitplan.base.optional import require
from bitplan.files.engines.gguf_tokenizer import BYTE_LEVEL_REGEX, DIGITS, PRETOKENIZERS, SPECIAL_KEYS
from bitplan.files.gguf import GGUFValue

_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_STEPS = {name: steps for steps, name in PRETOKENIZERS.items()} | {
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2, "[0-9][0-9][0-9]"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"),  # of files that name no rules
}
# llama.cpp's other names for the same ways of splitting text.
_SAME_RULES = {
    **dict.fromkeys(("phi-2", "mpt", "olmo", "jais", "exaone4", "granite-docling", "trillion", "mellum"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), "smollm"),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), "llama-bpe"),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), "llama-bpe"),
    **dict.fromkeys(("stablelm2", "hunyuan", "megrez", "deepseek-r1-qwen", "kormo", "solar-open"), "qwen2"),
    **dict.fromkeys(("llama4", "kanana2", "minimax-m2"), "gpt-4o"),
    "hunyuan-dense": "deepseek-v3",
}
# A word of the vocabulary is one token whatever the merges say, and a token goes before a text unless the file says no.
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"}
_NORMALIZERS = {"qwen2": {"type": "NFC"}}
_SPECIAL = {f"{kind}_token": key for kind, key in SPECIAL_KEYS.items()} | {"cls_token": "tokenizer.ggml.cls_token_id"}
_LOWERCASE, _STRIP_ACCENTS = (f"tokenizer.ggml.normalizer.{name}" for name in ("lowercase", "strip_accents"))
# llama.cpp's numbers of special tokens where a file names none.
_USUAL = {
    "gpt2": {},
    "llama": {"bos_token": 1, "eos_token": 2, "unk_token": 0},
    "bert": {"cls_token": 101, "sep_token": 102, "unk_token": 100, "pad_token": 0, "mask_token": 103},
}
_SPACE = "\u2581"  # SentencePiece's letter for a space
_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@dataclass(frozen=True)
class _Vocabulary:
    """A file's tokens, what kind each is, merges or scores, and special tokens by number; `value_of` gives its keys."""

    words: list[str]
    kinds: list[int]
    learnt: list[Any]
    special: dict[str, int]
    value_of: Callable[[str], Any]
    where: Path

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    @property
    def unknown(self) -> str | None:
        """The token for what is in no other: the one that the file names, or the first of that kind."""
        if "unk_token" in self.special:
            return self.words[self.special["unk_token"]]
        return next((self.words[at] for at, kind in enumerate(self.kinds) if kind == TokenType.UNKNOWN), None)

    def added(self) -> Iterator[dict[str, Any]]:
        """Special tokens, which are matched in a text before it is split into others."""
        for number, kind in enumerate(self.kinds):
            if kind in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN):
                flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
                special = kind != TokenType.USER_DEFINED
                yield {"id": number, "content": self.words[number], "special": special} | flags

    def flag(self, key: str, default: bool) -> bool:
        value = self.value_of(key)
        if value is not None and type(value) is not bool:
            raise StoreError(f"{self.where}: {key} must be true or false, got {value!r}")
        return default if value is None else value


def tokenizer_of_gguf(metadata: Mapping[str, GGUFValue], where: Path) -> Any | None:
    """A tokenizer of transformers; None for a kind that transformers has to read."""

    def value_of(key: str) -> Any:
        return getattr(metadata.get(key), "value", None)

    kind, rules = value_of(Keys.Tokenizer.MODEL), value_of(Keys.Tokenizer.PRE) or "default"
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "bert": _wordpiece}
    if kind not in builders or (kind == "gpt2" and _SAME_RULES.get(str(rules), rules) not in _STEPS):
        fault = f"splits text by the rules {rules!r}" if kind == "gpt2" else f"has a tokenizer of the kind {kind!r}"
        warnings.warn(
            f"{where}: {fault}, which is not known here; transformers' reader of GGUF goes by rules of its own, so "
            "tokens may differ from llama.cpp's: give the model's folder if you have it",
            stacklevel=2,
        )
        return None
    library = require("transformers", purpose=f"reading the tokenizer of {where.name}", extra="models")
    vocabulary = _vocabulary(value_of, kind, where)
    document = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": list(vocabulary.added())}
    document |= builders[kind](vocabulary)
    options: dict[str, Any] = {name: vocabulary.words[number] for name, number in vocabulary.special.items()}
    template = value_of(Keys.Tokenizer.CHAT_TEMPLATE)
    if isinstance(template, str):
        options["chat_template"] = template
    try:
        # Through a file: transformers copies a tokenizer that it is given, which parses it twice more.
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tokenizer.json"
            path.write_text(json.dumps(document), encoding="utf-8")
            return library.PreTrainedTokenizerFast(
                tokenizer_file=str(path), clean_up_tokenization_spaces=False, **options
            )
    except Exception as error:  # the library has no class for what it refuses
        raise StoreError(f"{where}: its tokenizer cannot be used: {' '.join(str(error).split())[:200]}") from error


def _vocabulary(value_of: Callable[[str], Any], kind: str, where: Path) -> _Vocabulary:
    def items_of(key: str, kind_of_items: str, *types: type) -> list[Any] | None:
        value = value_of(key)
        items = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else None
        if value is not None and (items is None or not set(map(type, items)) <= set(types)):
            raise StoreError(f"{where}: {key} must be a list of {kind_of_items}")
        return items

    words = items_of(Keys.Tokenizer.LIST, "texts", str) or []
    kinds = items_of(Keys.Tokenizer.TOKEN_TYPE, "numbers", int) or [int(TokenType.NORMAL)] * len(words)
    needed = {"gpt2": Keys.Tokenizer.MERGES, "llama": Keys.Tokenizer.SCORES}.get(kind)
    types = (str,) if kind == "gpt2" else (int, float)
    items = items_of(needed, "texts" if kind == "gpt2" else "numbers", *types) if needed else []
    if not words or len(kinds) != len(words) or items is None or (kind == "llama" and len(items) != len(words)):
        counts = f"{len(words)} tokens, {len(kinds)} kinds of tokens"
        counts += f", {'no' if items is None else len(items)} {needed.rpartition('.')[2]}" if needed else ""
        raise StoreError(f"{where}: its tokenizer is not whole: {counts}; export from the model's folder")
    words = [word or f"[EMPTY_{number}]" for number, word in enumerate(words)]  # llama.cpp's name for them
    if len(counted := Counter(words)) < len(words):
        word, times = counted.most_common(1)[0]
        raise StoreError(f"{where}: the token {word!r} is there {times} times; export from the model's folder")
    special = {name: value_of(key) for name, key in _SPECIAL.items() if value_of(key) is not None}
    for name, number in special.items():
        if type(number) is not int or not 0 <= number < len(words):
            raise StoreError(f"{where}: {_SPECIAL[name]} is {number!r}; the file has {len(words)} tokens")
    usual = {name: number for name, number in _USUAL[kind].items() if number < len(words)}
    return _Vocabulary(words, kinds, items or [], usual | special, value_of, where)


# ---- the kinds -----------------------------------------------------------------------------------------------------


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    name = str(vocabulary.value_of(Keys.Tokenizer.PRE) or "default")
    rules = _SAME_RULES.get(name, name)
    model = {
        "unk_token": None,  # llama.cpp leaves out a byte that no token has
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": name in _WHOLE_WORDS_FIRST,
        "merges": vocabulary.learnt,
    }
    around = _around(vocabulary, before=name in _WHOLE_WORDS_FIRST)
    return {
        "normalizer": _NORMALIZERS.get(rules),
        "pre_tokenizer": _pre_tokenizer(_STEPS[rules]),
        "post_processor": around or _LEVEL | {"trim_offsets": False},
        "decoder": _LEVEL,
        "model": _bpe(vocabulary) | model,
    }


def _bpe(vocabulary: _Vocabulary) -> dict[str, Any]:
    absent = dict.fromkeys(("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    return {"type": "BPE", **absent, "vocab": vocabulary.numbers}


def _pre_tokenizer(steps: tuple[str, ...]) -> dict[str, Any]:
    parts = [
        _LEVEL
        if step == BYTE_LEVEL_REGEX
        else {"type": "Digits", "individual_digits": True}
        if step == DIGITS
        else {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}
        for step in steps
    ]
    if BYTE_LEVEL_REGEX not in steps:
        parts.append(_LEVEL | {"use_regex": False})
    return parts[0] if len(parts) == 1 else {"type": "Sequence", "pretokenizers": parts}


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    space = vocabulary.flag(Keys.Tokenizer.ADD_PREFIX, True)
    replaced: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    before = [{"type": "Prepend", "prepend": _SPACE}] if space else []
    back: dict[str, Any] = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    stripped = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if space else []
    model = {"unk_token": vocabulary.unknown, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, replaced]},
        "pre_tokenizer": None,
        "post_processor": _around(vocabulary, before=True),
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *stripped]},
        "model": _bpe(vocabulary) | model | {"merges": _merges_of_scores(vocabulary)},
    }


def _merges_of_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, the best scores first: llama.cpp joins any such pair, by score."""
    words, numbers, scores = vocabulary.words, vocabulary.numbers, vocabulary.learnt
    merges = []
    for number in sorted(range(len(words)), key=lambda at: (-scores[at], at)):
        word = words[number]
        for cut in range(len(word) - 1, 0, -1):
            if (left := word[:cut]) in numbers and (right := word[cut:]) in numbers:
                merges.append((left, right))
    return merges


def _wordpiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    lower = vocabulary.flag(_LOWERCASE, True)
    for name in ("cls_token", "sep_token"):
        if name not in vocabulary.special:
            raise StoreError(f"{vocabulary.where}: {_SPECIAL[name]} is not there, and goes around a text")
    first = vocabulary.special.get("bos_token", vocabulary.special["cls_token"])
    normalizer = {"clean_text": True, "handle_chinese_chars": True, "lowercase": lower}
    return {
        "normalizer": {"type": "BertNormalizer", **normalizer, "strip_accents": vocabulary.flag(_STRIP_ACCENTS, lower)},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _template(vocabulary, first, vocabulary.special["sep_token"]),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": vocabulary.unknown,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {_as_wordpiece(word): number for word, number in vocabulary.numbers.items()},
        },
    }


def _as_wordpiece(word: str) -> str:
    """GGUF marks the pieces that begin a word, BERT's vocabularies the others; names in brackets have no mark."""
    if word.startswith(_SPACE):
        return word.removeprefix(_SPACE)
    return word if word.startswith("[") and word.endswith("]") else f"##{word}"


# ---- tokens around a text ------------------------------------------------------------------------------------------


def _around(vocabulary: _Vocabulary, *, before: bool) -> dict[str, Any] | None:
    """The template that adds BOS before and EOS after a text, as the file's flags say; None if neither is added.

    `before` is the default for BOS in a file without the flag; EOS is not added by default.
    """
    numbers: list[int | None] = []
    for key, token, default in (
        (Keys.Tokenizer.ADD_BOS, "bos_token", before),
        (Keys.Tokenizer.ADD_EOS, "eos_token", False),
    ):
        if not vocabulary.flag(key, default):
            numbers.append(None)
        elif token in vocabulary.special:
            numbers.append(vocabulary.special[token])
        else:
            raise StoreError(f"{vocabulary.where}: {key} is true, and {_SPECIAL[token]} is not there")
    return None if numbers == [None, None] else _template(vocabulary, *numbers)


def _template(vocabulary: _Vocabulary, before: int | None, after: int | None) -> dict[str, Any]:
    def parts(sequence: str, kind: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": sequence, "type_id": kind}}
        around = [
            None if number is None else {"SpecialToken": {"id": vocabulary.words[number], "type_id": kind}}
            for number in (before, after)
        ]
        return [part for part in (around[0], text, around[1]) if part is not None]

    words = {vocabulary.words[number]: number for number in (before, after) if number is not None}
    return {
        "type": "TemplateProcessing",
        "single": parts("A", 0),
        "pair": [*parts("A", 0), *parts("B", 1)],
        "special_tokens": {word: {"id": word, "ids": [number], "tokens": [word]} for word, number in words.items()},
    }

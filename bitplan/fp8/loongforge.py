"""LoongForge's files: a model's YAML, with the FP8 options of each part, and the reports of its layer benchmark.

A file describes one model, or under `model` a `foundation` (the LLM) and an `image_encoder` (the ViT), each with sizes
under Megatron's names and its own FP8 keys:

    fp8: "e4m3"                    the format; "hybrid" takes E5M2 for gradients
    fp8_recipe: "blockwise"        tensorwise, rowwise, blockwise or mxfp8
    fp8_param: true                weights are kept in FP8
    selective_fp8: true            ask the policy, module by module
    fp8_dynamic_policy_path: ...   the policy's file, relative to the YAML or to a folder above it
    fp8_dynamic_num_tokens: 4096   tokens per step in this part, where it is not seq_length x micro_batch_size

`defaults` includes other files, as in Hydra, searched beside the file and in the folders above it. Other keys are
ignored, but an unknown key with one of our prefixes is a spelling mistake, and refused. A config.json describes a model
too (`open_model`); it has no FP8 keys.

The text is untrusted, so it is read within limits and without surprises. PyYAML only splits it into nodes; their
meaning is decided here, because PyYAML's own is that of YAML 1.1: `1:30` is 90, `010` is 8, `!!int ''` is an
IndexError, and ten lines of aliases or merge keys make a billion nodes. Scalars are null, booleans, integers, floats
and strings; dates and base-60 numbers are strings, as in YAML 1.2. Keys are text. An alias counts as many nodes as it
stands for, and so does a merge key (`<<`). Every fault of the text is one ModelConfigError with file and line.

Its layer benchmark reports a JSON list of results, one median time each (`load_list_report`):

    [{"case_name": "...", "model_name": "...", "module_kind": "row", "ub_name": "fc2", "precision": "fp8",
      "num_tokens": 4096, "total_ms": 1.9, "tp_size": 1, "etp_size": 1, "num_gemms": null, ...}, ...]

They hold no samples, no recipe and no name of a GPU, so no interval can be computed and only a policy of version 1 can
be made from them. BF16 and FP8 are paired by case and model, with BF16's token count: FP8's count is padded, and
pairing by counts would lose every expert. A rule begins where an unbroken run of wins up to the largest count begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bitplan.base.documents import (
    FLAG,
    NAME,
    Kind,
    Reader,
    document_key,
    is_text,
    keys_of,
    load_bytes,
    one_of,
    short,
    show,
)
from bitplan.base.errors import did_you_mean
from bitplan.base.records import read_json
from bitplan.fp8.policy.layers import ConfigObject, ModelPart, Parallel, load_model_parts, read_part
from bitplan.fp8.policy.merge import Merged
from bitplan.fp8.policy.rules import LayerRule, Point, Policy
from bitplan.fp8.policy.vocabulary import (
    COUNT,
    DEFAULT_RECIPE,
    GROUPED_KINDS,
    KIND,
    LOSE,
    PRECISIONS,
    TIME_MS,
    WIN,
    BenchReportError,
    MergeError,
    ModelConfigError,
)
from bitplan.fp8.recipes import RECIPES
from bitplan.plan.structure.families import MEGATRON_KEYS

# ---- text to values --------------------------------------------------------------------------------------------------


MAX_YAML_CHARACTERS = 2**17
MAX_NODES = 10_000
MAX_DEPTH = 32
MAX_DIGITS = 40
MERGE = "<<"

_NULL = ("", "~", "null", "Null", "NULL")
_TRUE = ("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON")
_FALSE = ("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0b[01]+|0o[0-7]+)")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_NO_NUMBER = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}
_TAG = "tag:yaml.org,2002:"
_SCALAR_TAGS = ("str", "int", "float", "bool", "null")


def load_yaml(text: str, *, where: str) -> dict[str, Any]:
    """A YAML mapping with text as keys; one document, only plain tags, no duplicate keys."""
    import yaml  # type: ignore[import-untyped]  # when it is asked for; it comes with gguf

    class Composer(yaml.SafeLoader):  # type: ignore[misc]
        def compose_scalar_node(self, anchor: Any) -> Any:
            """A scalar whose tag is what the text says: None where it is plain, so that its letters decide its kind."""
            event = self.peek_event()
            node = super().compose_scalar_node(anchor)
            node.tag = event.tag or (None if event.implicit[0] else "!")
            return node

    if len(text) > MAX_YAML_CHARACTERS:
        raise ModelConfigError(
            f"{where}: {len(text)} characters are too many for a model's YAML, at most {MAX_YAML_CHARACTERS}"
        )
    try:
        root = Composer(text).get_single_node()
    # PyYAML's own errors, and Python's that its scanner lets through: "\UFFFFFFFF", %YAML with a number too long to
    # convert.
    except (yaml.YAMLError, ArithmeticError, ValueError) as fault:
        raise ModelConfigError(f"{where}: not valid YAML: {' '.join(str(fault).split())[:300]}") from None
    except RecursionError:
        raise ModelConfigError(f"{where}: nested more than {MAX_DEPTH} deep") from None
    if root is None:
        raise ModelConfigError(f"{where}: empty; a model's YAML is a mapping of keys")
    document = _Reading(where).value(root, 0)
    if not isinstance(document, dict):
        raise ModelConfigError(f"{where}: a model's YAML must be a mapping of keys, got {show(document)}")
    return document


class _Reading:
    """One pass over the nodes of one text; a node that aliases stand for is visited for each of them."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.nodes = 0
        self.line = 0

    def stop(self, message: str) -> NoReturn:
        raise ModelConfigError(f"{self.where}: line {self.line}: {message}")

    def count(self, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            self.stop(f"more than {MAX_NODES} values, aliases and merge keys written out; a model's YAML is smaller")

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def value(self, node: Any, depth: int) -> Any:
        self.line = node.start_mark.line + 1
        if depth > MAX_DEPTH:
            self.stop(f"nested more than {MAX_DEPTH} deep, or an alias stands within its own anchor")
        self.count(1)
        if node.id == "scalar":
            return self.scalar(node)
        self.check_tag(node.tag, "seq" if node.id == "sequence" else "map")
        if node.id == "sequence":
            return [self.value(item, depth + 1) for item in node.value]
        values: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for name, item in node.value:
            key = self.key(name)
            if key in values or (key == MERGE and merged):
                self.stop(f"key {short(key, 80)!r} appears twice")
            value = self.value(item, depth + 1)
            if key == MERGE:
                merged = self.merged(value)
            else:
                values[key] = value
        return {**merged, **values}

    def key(self, node: Any) -> str:
        self.line = node.start_mark.line + 1
        if node.id != "scalar":
            self.stop("a key must be text, not a list or a mapping")
        self.count(1)
        if node.tag not in (None, "!", f"{_TAG}str"):
            self.check_tag(node.tag, "str")
        return self.text(node.value)

    def merged(self, value: Any) -> dict[str, Any]:
        """The keys that `<<` merges; of several mappings the first that has a key gives its value."""
        merged: dict[str, Any] = {}
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict):
                self.stop(f"<< takes a mapping or a list of mappings, got {show(item)}")
            self.count(len(item))
            merged = {**item, **merged}
        return merged

    # ---- scalars --------------------------------------------------------------------------------------------------

    def scalar(self, node: Any) -> Any:
        text = self.text(node.value)
        if node.tag in (None, "!"):
            return self.plain(text) if node.tag is None else text
        kind = self.check_tag(node.tag, *_SCALAR_TAGS)
        if kind == "str":
            return text
        value = self.plain(text)
        if kind == "float" and type(value) is int:
            value = float(value)
        if {"int": int, "float": float, "bool": bool, "null": type(None)}[kind] is not type(value):
            self.stop(f"!!{kind} must be followed by a value of that kind, got {show(text)}")
        return value

    def plain(self, text: str) -> Any:
        if text in _NULL:
            return None
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        if text[0] not in "+-.0123456789":
            return text
        if text.lower() in _NO_NUMBER:
            return float(_NO_NUMBER[text.lower()])
        if _OCTAL.fullmatch(text):
            self.stop(f"{show(text)} begins with 0, which is octal to some readers; write it without, or in quotes")
        integer = _INTEGER.fullmatch(text)
        if not integer and not _FLOAT.fullmatch(text):
            return text
        if len(text) > MAX_DIGITS:
            self.stop(f"a number of {len(text)} letters, at most {MAX_DIGITS}; put text in quotes")
        return int(text.replace("_", ""), 0) if integer else float(text)

    def text(self, text: str) -> str:
        if not is_text(text):
            self.stop("half of a surrogate pair is no text")
        return text

    def check_tag(self, tag: str | None, *allowed: str) -> str:
        """The plain kind that an explicit tag names; other tags are refused, and no tag runs code."""
        if tag in (None, "!"):
            return allowed[0]
        kind = str(tag).removeprefix(_TAG)
        if kind not in allowed or kind == tag:
            shown = f"!!{kind}" if kind != tag else str(tag)
            self.stop(f"the tag {short(shown, 80)} is not allowed here; only {', '.join(f'!!{k}' for k in allowed)}")
        return kind


# ---- values to a model -----------------------------------------------------------------------------------------------


MAX_FILES = 32
MAX_FILES_DEEP = 8
MAX_PACKAGE_PARTS = 8
COMPONENTS = {"foundation": "llm", "image_encoder": "vit"}
OpenBase = Callable[[str], str]  # the name of another file, as written in `defaults` -> its text


@dataclass(frozen=True)
class Fp8Keys:
    """What the YAML asks of FP8 in one part of a model."""

    fp8: str | None = document_key(one_of("e4m3", "hybrid"), None)
    fp8_recipe: str = document_key(one_of(*RECIPES), DEFAULT_RECIPE)
    fp8_param: bool = document_key(FLAG, False)
    selective_fp8: bool = document_key(FLAG, False)
    fp8_dynamic_policy_path: str | None = document_key(NAME, None)
    fp8_dynamic_num_tokens: int | None = document_key(COUNT, None)


@dataclass(frozen=True)
class YamlModel:
    """The parts of a model, the FP8 keys of each, and the parallel sizes that the file sets (else None)."""

    parts: tuple[ModelPart, ...]
    options: Mapping[str, Fp8Keys]
    tp: int | None = None
    ep: int | None = None
    etp: int | None = None
    tokens: int | None = None  # seq_length x micro_batch_size, of the LLM or of the only part

    def parallel(self, tp: int | None = None, ep: int | None = None, etp: int | None = None) -> Parallel:
        """The given sizes, else those of the file, else 1; with experts etp defaults to tp, as in Megatron."""
        chosen = tp or self.tp or 1
        follows = chosen if any(part.experts for part in self.parts) else 1
        return Parallel(chosen, ep or self.ep or 1, etp or self.etp or follows)


_SIZE_KEYS = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
_PARALLEL_KEYS = {
    "tp": "tensor_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def read_yaml_model(text: str, *, where: str = "model.yaml", open_base: OpenBase | None = None) -> YamlModel:
    """Read the parts of a model, and what it asks of FP8, from a YAML file."""
    document = _compose(text, where, open_base, depth=0, opened=[where])
    model = document.get("model")
    if isinstance(model, Mapping) and any(name in model for name in COMPONENTS):
        components = {COMPONENTS[name]: (model[name], f"model.{name}.") for name in COMPONENTS if name in model}
    else:
        components = {_single_part(document): (document, "")}
    parts, options = [], {}
    sizes: dict[str, int | None] = {}
    for part, (values, prefix) in components.items():
        config = ConfigObject(values, prefix, where)
        options[part] = _options(config)
        # A file that only switches FP8 on need not describe a model.
        if options[part] == Fp8Keys() or any(key in config.values for key in _SIZE_KEYS):
            parts.append(read_part(config, part, MEGATRON_KEYS))
        if part == "llm" or len(components) == 1:
            sizes["tokens"] = _tokens(config) or _tokens(ConfigObject(document, "", where))
        for word, key in _PARALLEL_KEYS.items():
            sizes[word] = sizes.get(word) or config.optional(key)
    return YamlModel(tuple(parts), options, **sizes)


# ---- defaults --------------------------------------------------------------------------------------------------------


def _compose(text: str, where: str, open_base: OpenBase | None, depth: int, opened: list[str]) -> dict[str, Any]:
    """The document merged with its `defaults`: later files win over earlier ones, itself is last, or at `_self_`."""
    document = load_yaml(text, where=where)
    bases = document.pop("defaults", [])
    if not isinstance(bases, list):
        raise ModelConfigError(f"{where}: defaults must be a list, got {show(bases)}")
    if depth > MAX_FILES_DEEP:
        raise ModelConfigError(
            f"{where}: defaults lead more than {MAX_FILES_DEEP} files deep; does a file take itself in?"
        )
    result: dict[str, Any] = {}
    for item in [*bases, *([] if "_self_" in bases else ["_self_"])]:
        if item == "_self_":
            result = _over(result, document)
            continue
        name, package = _base_name(item, where)
        if open_base is None:
            raise ModelConfigError(f"{where}: defaults name {name!r}; give open_base, which reads such files")
        opened.append(name)
        if len(opened) > MAX_FILES:
            raise ModelConfigError(f"{where}: defaults take in more than {MAX_FILES} files")
        below = _compose(open_base(name), name, open_base, depth + 1, opened)
        for key in reversed(package):
            below = {key: below}
        result = _over(result, below)
    return result


def _base_name(item: Any, where: str) -> tuple[str, list[str]]:
    """The file that an item names, and the keys under which it is inserted."""
    if isinstance(item, str):
        return item, []
    if isinstance(item, dict) and len(item) == 1:
        (group, name), *_ = item.items()
        if isinstance(group, str) and isinstance(name, str) and " " not in group:
            folder, _, package = group.partition("@")
            parts = package.split(".") if package else []
            if len(parts) <= MAX_PACKAGE_PARTS:
                return f"{folder}/{name}", parts
    raise ModelConfigError(f"{where}: an item of defaults must be NAME or FOLDER@PACKAGE: NAME, got {show(item)}")


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _over(result[key], value) if both else value
    return result


# ---- one part --------------------------------------------------------------------------------------------------------


def _single_part(document: Mapping[str, Any]) -> str:
    """The part of a file with one part: "vit" for an image encoder, by its class or its type; else "llm"."""
    target, model_type = str(document.get("_target_", "")), str(document.get("model_type", ""))
    return "vit" if ".encoder." in target or model_type.endswith("_vit") else "llm"


def _options(config: ConfigObject) -> Fp8Keys:
    known = keys_of(Fp8Keys)
    for name in config.values:
        if str(name).startswith(("fp8", "selective_fp8")) and name not in known:
            raise config.fail(f"unknown key {config.prefix}{name}{did_you_mean(name, known)}")
    values = {name: value for name, value in config.values.items() if name in known and value is not None}
    for name, value in values.items():
        if not known[name].holds(value):
            raise config.fail(f"{config.prefix}{name} must be {known[name].text}, got {show(value)}")
    options = Fp8Keys(**values)
    if options.selective_fp8 and options.fp8 is None:
        raise config.fail(
            f'{config.prefix}selective_fp8 chooses where FP8 is used, and fp8 is not set; add fp8: "e4m3"'
        )
    if options.selective_fp8 and options.fp8_dynamic_policy_path is None:
        raise config.fail(f"{config.prefix}selective_fp8 asks a policy; add fp8_dynamic_policy_path")
    return options


def _tokens(config: ConfigObject) -> int | None:
    length, batch = config.optional("seq_length"), config.optional("micro_batch_size")
    return length * batch if length and batch else None


# ---- files -----------------------------------------------------------------------------------------------------------


YAML_SUFFIXES = (".yaml", ".yml")
_ROOTS = ("configs", "config", "conf")  # a `defaults` item may be relative to the root of the configurations
_LONGEST_NAME = 200


def open_model(path: str | Path) -> YamlModel:
    """The parts of a model from a config.json, a folder with one, or a YAML; only a YAML can set parallel sizes."""
    source = Path(path)
    if source.suffix not in YAML_SUFFIXES:
        return YamlModel(tuple(load_model_parts(source)), {})
    model = open_yaml_model(source)
    if not model.parts:
        raise ModelConfigError(f"{source}: has FP8 keys and no sizes; add num_layers, hidden_size, ... or `defaults`")
    return model


def open_yaml_model(path: str | Path) -> YamlModel:
    """A YAML model; files that `defaults` names are looked for beside the file, then in the folders above it.

    The search never leaves the root of the configurations: the nearest folder above that is named `configs`, `config`
    or `conf`, else the folder of the file itself. Symbolic links are resolved first.
    """
    source = Path(path)
    beside = source.resolve().parent
    above = [beside, *beside.parents]
    root = next((folder for folder in above if folder.name in _ROOTS), beside)
    folders = above[: above.index(root) + 1]

    def open_base(name: str) -> str:
        _check_name(source, name)
        for folder in folders:
            for suffix in YAML_SUFFIXES:
                path = (folder / f"{name}{suffix}").resolve()
                if not path.is_file():
                    continue
                if not path.is_relative_to(root):
                    raise ModelConfigError(
                        f"{source}: defaults name {name[:120]!r}, which lies outside of {root}; "
                        f"put it there, or name that folder's root `configs`"
                    )
                return _read(path)
        tried = ", ".join(str(folder / f"{name}.yaml") for folder in folders[:2])
        raise ModelConfigError(f"{source}: defaults name {name!r}, and there is no such file (looked for {tried})")

    return read_yaml_model(_read(source), where=str(source), open_base=open_base)


def _check_name(source: Path, name: str) -> None:
    if Path(name).is_absolute() or "\0" in name or len(name) > _LONGEST_NAME:
        raise ModelConfigError(
            f"{source}: an item of defaults must be a relative path of at most {_LONGEST_NAME} letters, "
            f"got {name[:120]!r}"
        )


def find_policy(written: str, beside: str | Path) -> Path:
    """The policy that a YAML names, searched in the YAML's folder, the folders above it and the current folder."""
    folder = Path(beside).resolve().parent
    tried = [above / written for above in (folder, *folder.parents)]
    existing = next((path for path in (*tried, Path(written)) if path.is_file()), None)
    if existing is None:
        raise ModelConfigError(f"{beside}: fp8_dynamic_policy_path names {written!r}, and there is no {tried[0]}")
    return existing


def _read(path: Path) -> str:
    try:
        return load_bytes(path, ModelConfigError, max_bytes=4 * MAX_YAML_CHARACTERS, noun="model's YAML").decode()
    except UnicodeDecodeError:
        raise ModelConfigError(f"{path}: not UTF-8 text, so not a model's YAML") from None


# ---- reports of its layer benchmark ----------------------------------------------------------------------------------


_KEYS: dict[str, Kind] = {
    "case_name": NAME,
    "model_name": NAME,
    "module_kind": KIND,
    "precision": one_of(*PRECISIONS),
    "num_tokens": COUNT,
    "total_ms": TIME_MS,
}
_DENSE: dict[str, Kind] = {"ub_name": NAME, "tp_size": COUNT}
_GROUPED: dict[str, Kind] = {"etp_size": COUNT, "num_gemms": COUNT}


_RULE = ("kind", "name", "tp", "etp", "num_gemms")


@dataclass(frozen=True)
class ListRow:
    """One row of a LoongForge list report: the layer, how it was run, and the time."""

    rule: tuple[Any, ...]  # what _RULE names
    run: tuple[str, str]  # model and case
    precision: str
    tokens: int
    time_ms: float


def load_list_report(path: str | Path) -> list[ListRow] | None:
    """The rows of a list report; None for any other file, which another reader may take."""
    try:
        document = read_json(path)
    except (ValueError, OSError):
        return None  # JSON lines, or no JSON: the reader of our own reports will say what is wrong
    if not isinstance(document, list):
        return None
    reader = Reader(str(path), BenchReportError)
    return [_row(reader, f"[{index}]", item) for index, item in enumerate(document)]


def thresholds_of(rows: Sequence[ListRow], speedup_threshold: float) -> Merged:
    """A version 1 policy, and a sentence for everything that could not be used."""
    runs: dict[tuple[Any, ...], dict[str, ListRow]] = {}
    findings: set[str] = set()
    for row in rows:
        pair = runs.setdefault((row.rule, row.run), {})
        slower = row.precision in pair and pair[row.precision].time_ms >= row.time_ms
        if row.precision not in pair or slower == (row.precision == "bf16"):  # FP8's longest time, BF16's shortest
            pair[row.precision] = row
    speedups: dict[tuple[Any, ...], dict[int, float]] = {}
    for (rule, run), pair in runs.items():
        if len(pair) < len(PRECISIONS):
            findings.add(f"{run[1]} of {run[0]} was measured in {next(iter(pair))} only")
            continue
        counts = speedups.setdefault(rule, {})
        speedup = pair["bf16"].time_ms / pair["fp8"].time_ms
        counts[pair["bf16"].tokens] = min(speedup, counts.get(pair["bf16"].tokens, speedup))
    rules = []
    for rule, counts in speedups.items():
        points = [Point(at, WIN if counts[at] > speedup_threshold else LOSE, counts[at]) for at in sorted(counts)]
        rules.append(LayerRule.without_shape(points, **dict(zip(_RULE, rule, strict=True))))
    return Merged(Policy(rules, None, speedup_threshold).to_thresholds(), tuple(sorted(findings)))


def merge_lists(paths: Sequence[Path], speedup_threshold: float) -> Merged | None:
    """The policy of list reports; None where all reports are our own. A mixture is refused."""
    loaded = {path: load_list_report(path) for path in paths}
    lists = [path for path, rows in loaded.items() if rows is not None]
    if not lists:
        return None
    for path, rows in loaded.items():
        if rows is None:
            raise MergeError(f"{lists[0]} is a list report without samples, {path} is none; merge them apart")
    return thresholds_of([row for rows in loaded.values() for row in rows or ()], speedup_threshold)


def _row(reader: Reader, path: str, item: Any) -> ListRow:
    grouped = isinstance(item, dict) and item.get("module_kind") in GROUPED_KINDS
    known = _KEYS | (_GROUPED if grouped else _DENSE)
    ours = {key: value for key, value in item.items() if key in known} if isinstance(item, dict) else item
    values = reader.keys(path, ours, known, tuple(known))
    sizes = (None, None, values["etp_size"], values["num_gemms"]) if grouped else (values["ub_name"], values["tp_size"])
    rule = (values["module_kind"], *sizes, *(() if grouped else (None, None)))
    return ListRow(
        rule, (values["model_name"], values["case_name"]), values["precision"], values["num_tokens"], values["total_ms"]
    )

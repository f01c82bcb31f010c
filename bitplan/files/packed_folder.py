"""A packed Hugging Face folder: has everything for loading, and the same bytes for the same model.

| file | what |
|---|---|
| config.json | the model's own, with `quantization_config` |
| model.safetensors, or model-N-of-M.safetensors and an index | bitplan's safetensors, of `SHARD_BYTES` at most |
| bitplan_plan.json | the plan: the format of every tensor, and why |
| bitplan_evidence.json | the certificate of what was quantized (`files.certificate`) |
| README.md, bitplan_plan.svg | the model card and its picture, unless somebody else wrote the one that is there |
| the rest | generation config, tokenizer, chat templates, licence: as the model's own folder has them |

`quantization_config` is {"quant_method": "bitplan; ...", "version": 1, "plan": FILE, "plan_sha256": DIGEST,
"load_with": WORDS}, and where inputs of packed layers are rounded, {"inputs": FORMAT}: the plan has the format of each
layer, and `inputs` is BY_LAYER where they differ; folders of earlier versions have `inputs` alone. Where keys and
values are kept in formats, {"kv_cache": {"keys": FORMAT, "values": FORMAT}} (`KVFormats`). transformers looks for
weights in the file that `transformers_weights` names: it holds no file's name but what to import, and goes where our
plug-in is.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bitplan.base.documents import NAME, SIZE, Kind, Reader
from bitplan.base.errors import FileFormatError, Finding, FormatError, StoreError, counted, visible
from bitplan.base.folders import atomic_folder, check_output_folder
from bitplan.base.optional import WEIGHTS_FILE
from bitplan.base.records import Stamps, read_bytes, read_json, require_unchanged, write_json
from bitplan.files.certificate import (
    CARD,
    EVIDENCE_FILE,
    PICTURE,
    is_card_of_ours,
    settled_certificate,
    write_card,
    write_certificate,
)
from bitplan.files.open_files import model_types, write_tensors
from bitplan.files.safetensors import CHECKSUMS, INDEX_SUFFIX, read_index
from bitplan.files.safetensors_tensors import NativeTensors, part_name
from bitplan.files.tensor_file import TensorFile, TensorSpec, Writer
from bitplan.formats import get_format
from bitplan.formats.input_formats import Inputs, input_format
from bitplan.plan.format_choices import multiplied_names
from bitplan.plan.kv_formats import KVFormats
from bitplan.plan.names import listed, natural_order
from bitplan.plan.plan import PACKED_PLAN, Plan
from bitplan.plan.structure.families import has_no_packed_layer, is_packed_transposed
from bitplan.plan.structure.model_view import transposed_shape

log = logging.getLogger("bitplan")
CONFIG = "config.json"
GENERATION = "generation_config.json"
WHOLE, INDEX = "model.safetensors", f"model{INDEX_SUFFIX}"
REPLACED = "replaced"  # a folder for files of a model that another one replaced
PLAN = PACKED_PLAN
# A library that does not know the method prints it: so it says what to do. Earlier versions wrote the name alone.
QUANT_METHOD = "bitplan; import bitplan.transformers before from_pretrained"
QUANT_METHODS = (QUANT_METHOD, "bitplan")
BY_LAYER = "by layer"
VERSION = 1
QUANTIZATION_KEYS = {"quantization_config", "compression_config", "quantization"}  # the last is MLX's
SHARD_BYTES = 5 * 10**9
METADATA = {"format": "pt"}  # transformers requires the name of the library
# The files of a model beside its weights and config; a model's code is not copied.
SIDE_FILES = (
    *(GENERATION, "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt"),
    *("merges.txt", "*.model", "*.tiktoken", "chat_template*", "additional_chat_templates"),
    *("preprocessor_config.json", "processor_config.json", "LICENSE*", "NOTICE*"),
)
# Files that one tokenizer or processor consists of: of an earlier one none stays beside a new one.
TOKENIZER_FILES = {
    *("added_tokens.json", "additional_chat_templates", "chat_template.jinja", "chat_template.json", "merges.txt"),
    *("preprocessor_config.json", "processor_config.json", "sentencepiece.bpe.model", "special_tokens_map.json"),
    *("spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"),
}
SENTENCE_MODULES = "modules.json"
SENTENCE_FILES = (SENTENCE_MODULES, "config_sentence_transformers.json", "sentence_bert_config.json")
# Names that end so are files of weights of other programs, most of them pickles.
_FILE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".onnx", ".npy", ".npz", ".h5", ".msgpack", ".zip"}
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
_ATTENTION = "in_proj_weight"  # of nn.MultiheadAttention, which reads this weight and its out_proj directly
_DIGEST = Kind("64 hexadecimal digits", lambda value: type(value) is str and len(value) == 64)
_HINT = "import bitplan.transformers before from_pretrained, or bitplan.load_packed(folder)"
# transformers that does not know the method only warns of it, and goes on; where WEIGHTS_FILE names no file, it stops
# with the words that stand there at the end of its line.
_KEYS = {"quant_method": NAME, "version": SIZE, "plan": NAME, "plan_sha256": _DIGEST}
WriteShard = Callable[[Writer, Sequence[TensorSpec]], None]


# ---- config and plan of a folder -------------------------------------------------------------------------------------


def is_model_folder(path: str | Path) -> bool:
    return Path(path, CONFIG).is_file()


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a model's folder; raises one line where there is none."""
    path = folder / CONFIG
    if not path.is_file():
        raise FileFormatError(
            f"{folder}: no {CONFIG}, so not a model's folder; copy that of the model the weights came from into it"
        )
    document: dict[str, Any] = Reader(str(path), FileFormatError, strict=False).keys("", read_json(path), {}, ())
    return document


def is_packed_config(config: Mapping[str, Any]) -> bool:
    settings = config.get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") in QUANT_METHODS


def folder_inputs(config: Mapping[str, Any] | None, plan: Plan | Path | None) -> Inputs:
    """The formats that a packed folder's layers round their inputs to, by names of weights where its plan has them.

    plan   the folder's, or the folder itself
    """
    inputs = shown_inputs(config)
    if isinstance(plan, Path):
        plan = None if inputs is None else read_packed_plan(plan, config or {})
    if plan is not None and plan.inputs:
        return plan.inputs
    if inputs == BY_LAYER:
        raise FileFormatError(
            f"the folder's {PLAN} says which layer rounds its inputs to what, and it is not there, or does not say it; "
            "copy or quantize the folder again"
        )
    return inputs


def shown_inputs(config: Mapping[str, Any] | None) -> str | None:
    """What a packed folder's config says of inputs: a format, or BY_LAYER; None: they stay as they are."""
    inputs = config["quantization_config"].get("inputs") if config and is_packed_config(config) else None
    return None if inputs is None else str(inputs)


def _inputs_of(plan: Plan) -> str | None:
    """The entry of config.json for inputs: the one format of all (None: not rounded), or BY_LAYER if layers differ."""
    formats = {plan[name].input for name in (*multiplied_names(plan), *plan.inputs)} or {None}
    return formats.pop() if len(formats) == 1 else BY_LAYER


def folder_kv(config: Mapping[str, Any] | None, where: str = "config") -> KVFormats | None:
    """The formats in which a packed folder's model keeps keys and values; None: as they are."""
    settings = (config or {}).get("quantization_config")
    if not isinstance(settings, dict) or not is_packed_config(config or {}) or settings.get("kv_cache") is None:
        return None
    return KVFormats.from_document(settings["kv_cache"], f"{where}: kv_cache")


def read_packed_plan(folder: Path, config: Mapping[str, Any]) -> Plan:
    """The plan by which a folder was packed, after the config's entry for it was checked."""
    return Plan.load(plan_path(folder, config))


def check_packed_config(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config's `quantization_config`; an error of one line if it is not bitplan's, or of a newer version."""
    where = f"{folder / CONFIG}: quantization_config"
    if not is_packed_config(config):
        other = config.get("quantization_config")
        if not isinstance(other, dict) or other.get("quant_method") is None:
            raise FileFormatError(f"{folder}: is not packed; `bitplan quantize` packs it")
        raise FileFormatError(
            f"{where}: quant_method {other['quant_method']!r:.80}, which bitplan does not load; `bitplan quantize` "
            "packs the folder of the model in bfloat16 or float32"
        )
    reader = Reader(where, FileFormatError, strict=False)  # transformers may add keys of its own
    settings: dict[str, Any] = config["quantization_config"]
    version = settings.get("version")
    if type(version) is int and version > VERSION:
        raise FileFormatError(
            f"{where}: version {version} of quant_method 'bitplan', and this bitplan reads up to {VERSION}; "
            "install a newer bitplan"
        )
    reader.keys("", settings, _KEYS, tuple(_KEYS))
    try:
        if settings.get("inputs") != BY_LAYER:
            input_format(settings.get("inputs"))
        folder_kv(config)
    except FormatError as error:
        raise FileFormatError(f"{where}: {error}") from None
    return settings


def plan_path(folder: Path, config: Mapping[str, Any] | None = None) -> Path:
    """The path of a packed folder's plan; the digest in the config must match it."""
    settings = check_packed_config(folder, read_config(folder) if config is None else config)
    where = f"{folder / CONFIG}: quantization_config"
    name: str = settings["plan"]
    path = folder / name
    if Path(name).name != name or not os.path.isfile(path):  # a Path raises for names that are too long
        raise FileFormatError(f"{where}: the plan {name[:80]!r} is not in the folder; copy or quantize it again")
    if hashlib.sha256(read_bytes(path, noun="plan")).hexdigest() != settings["plan_sha256"]:
        raise FileFormatError(
            f"{path}: is not the plan by which this folder was packed (its sha256 differs from {CONFIG}'s); "
            "copy or quantize the folder again"
        )
    return path


def plan_findings(plan: Plan, file: TensorFile) -> list[Finding]:
    """Findings about tensors for which the plan and the files of a folder disagree."""
    names = {*file.specs, *file.tied}
    lacks = f"{listed([path.name for path in file.files if path.suffix == '.safetensors'], 3)} lacks it"
    findings = [Finding("plan", name, f"missing: its plan has it, and {lacks}") for name in plan if name not in names]
    for name in names - set(plan):
        holder = file.shard_of(file.tied.get(name, name)) if isinstance(file, NativeTensors) else file.path
        findings.append(Finding("plan", name, f"extra: {holder.name!r} has it, and its plan lacks it"))
    for name in names & set(plan):
        spec, entry = file.spec(name), plan.entries[name]
        planned = entry.stored or entry.choice.format
        stored = spec.held
        if entry.shape is not None and tuple(entry.shape) != spec.shape:
            findings.append(Finding("plan", name, f"the plan has shape {entry.shape}, the file {spec.shape}"))
        elif (spec.encoded or not get_format(entry.choice.format).is_cast) and planned != stored:
            findings.append(Finding("plan", name, f"the plan has {planned}, the file {stored}"))
    return sorted(findings, key=lambda finding: finding.where)


def check_plan(plan: Plan, file: TensorFile) -> None:
    """Refuse a folder whose plan is not that of its tensors: files were mixed up or lost."""
    if findings := plan_findings(plan, file):
        first = findings[0]
        raise FileFormatError(
            f"{file.path}: the folder is damaged: {first.where}: {first.message} "
            f"({counted(len(findings), 'finding')}); copy or quantize it again"
        )


def plan_digest(plan: Plan) -> str:
    return hashlib.sha256(plan.to_json().encode()).hexdigest()


def unquantized_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without a word on how its folder was quantized, by whatever library."""
    return {key: value for key, value in config.items() if key not in {*QUANTIZATION_KEYS, WEIGHTS_FILE}}


def packed_config(config: Mapping[str, Any], plan: Plan, kv: KVFormats | None = None) -> dict[str, Any]:
    """A model's config for the folder that holds it packed; `kv`: the formats in which it keeps keys and values."""
    settings = {"quant_method": QUANT_METHOD, "version": VERSION, "plan": PLAN, "plan_sha256": plan_digest(plan)}
    settings["load_with"] = _HINT
    settings |= {} if (inputs := _inputs_of(plan)) is None else {"inputs": inputs}
    settings |= {} if kv is None else {"kv_cache": kv.to_document()}
    return {**unquantized_config(config), "quantization_config": settings, WEIGHTS_FILE: f"packed by bitplan; {_HINT}"}


def side_files(folder: Path) -> dict[str, Path]:
    """The files to copy beside weights and config, by their name in the folder; none that a link brings from elsewhere.

    A model of sentence-transformers has folders of its own, which its modules.json names.
    """
    candidates = {path.name: path for pattern in SIDE_FILES for path in folder.glob(pattern)}
    if (folder / SENTENCE_MODULES).is_file():
        candidates |= {name: folder / name for name in SENTENCE_FILES if (folder / name).is_file()}
        candidates |= {name: folder / name for name in _sentence_folders(folder)}
    inside = {name: path for name, path in sorted(candidates.items()) if _is_of(folder, path)}
    if outside := sorted(candidates.keys() - inside.keys()):
        log.warning("%s: links that lead out of the folder are not copied: %s", folder, visible(listed(outside, 3)))
    return inside


def _sentence_folders(folder: Path) -> list[str]:
    """Folders of sentence-transformers' parts (pooling, dense layers); "" is the model itself."""
    where = folder / SENTENCE_MODULES
    document = read_json(where)
    parts = [part.get("path") if isinstance(part, dict) else None for part in document] if document else []
    if not isinstance(document, list) or not all(isinstance(path, str) for path in parts):
        raise FileFormatError(f'{where}: must be a list of objects with a "path"; copy the model\'s own file again')
    return [path for path in parts if path and Path(path).name == path and (folder / path).is_dir()]


def _is_of(folder: Path, path: Path) -> bool:
    """Whether links of a file or folder stay in the model's folder, or lead to the blobs of its Hugging Face cache."""
    root = Path(os.path.realpath(folder))
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    paths = [path, *path.rglob("*")] if path.is_dir() else [path]
    return all(any(Path(os.path.realpath(link)).is_relative_to(one) for one in roots) for link in paths)


def without_packed_layer(names: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """Matrices that no packed layer can hold: a folder in which they are packed could not be loaded."""
    listed, kinds = list(names), model_types(config)
    owners = {name.removesuffix(_ATTENTION) for name in listed if name.endswith(_ATTENTION)}
    attention = {owner + local for owner in owners for local in (_ATTENTION, "out_proj.weight")}
    return [name for name in listed if name in attention or has_no_packed_layer(name, kinds)]


def transposed_by_names(file: TensorFile) -> list[str]:
    """Tensors that lie transposed in a model's folder, as the table of families has it; none in other files."""
    kinds = model_types(read_config(file.folder)) if is_model_folder(file.folder) else set[str]()
    return [
        name for name, spec in file.specs.items() if len(spec.shape) in (2, 3) and is_packed_transposed(name, kinds)
    ]


def packed_shapes(file: TensorFile, transposed: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """The shapes that these tensors have where they are packed: rows are outputs there."""
    return {name: transposed_shape(file.specs[name].shape_in_model) for name in transposed}


def plan_with_shapes(plan: Plan, names: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> Plan:
    """Copy a plan with other shapes for some of its tensors."""
    changed = {name: replace(plan.entries[name], shape=shapes[name]) for name in names if name in plan.entries}
    return Plan({**plan.entries, **changed}, padding=plan.padding) if changed else plan


# ---- shards ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """One .safetensors file of a folder that will be written: its name, tensors, ties and metadata."""

    name: str
    tensors: tuple[TensorSpec, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=lambda: METADATA)


def cut_shards(tensors: Iterable[TensorSpec], tied: Mapping[str, str], limit: int = SHARD_BYTES) -> list[Shard]:
    """Tensors in natural order of names, in files of at most `limit` bytes; a larger tensor has a file of its own."""
    by_name = {spec.name: spec for spec in tensors}
    groups: list[list[TensorSpec]] = []
    room = 0
    for name in natural_order(by_name):
        spec = by_name[name]
        if not groups or spec.nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append(spec)
        room -= spec.nbytes
    count = len(groups)
    names = [f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)] if count > 1 else [WHOLE]
    aliases: dict[str, list[str]] = {}
    for alias, name_of_tied in tied.items():
        aliases.setdefault(name_of_tied, []).append(alias)
    return [
        Shard(name, tuple(group), {alias: spec.name for spec in group for alias in aliases.get(spec.name, ())})
        for name, group in zip(names, groups, strict=True)
    ]


def index_of(shards: Sequence[Shard]) -> dict[str, Any]:
    """The document model.safetensors.index.json: which file holds which tensor."""
    weight_map: dict[str, str] = {}
    total = 0
    for shard in shards:
        for spec in shard.tensors:
            parts = spec.fmt.part_shapes(spec.shape) if spec.fmt else ("data",)
            weight_map |= {part_name(spec.name, part): shard.name for part in parts}
            total += spec.nbytes
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


# ---- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FolderContents:
    """Everything in a folder except the numbers; without config and plan it is weights alone.

    certificate  of what is written, without the hashes of its files
    earlier      the certificate of the folder that the model was loaded from: kept where its weights are written again
    source       the folder of the model that it was made of, whose card has fields that hold here, too
    target       for whom it is: `bitplan`, or a target of `files.engines`
    """

    shards: Sequence[Shard]
    config: Mapping[str, Any] | None = None
    plan: Plan | None = None
    beside: Mapping[str, Path] = field(default_factory=dict)
    inputs: Stamps = field(default_factory=dict)
    certificate: Mapping[str, Any] | None = None
    earlier: Mapping[str, Any] | None = None
    source: Path | None = None
    target: str = "bitplan"


def check_packed_output(
    output: str | Path, *, inputs: Iterable[Path] = (), force: bool = False, any_folder: bool = False
) -> None:
    """Refuse a folder that exists, unless `force` may write there: a model's folder, and neither it nor in it an input.

    any_folder   a folder that holds no model will do as well, as for transformers' save_pretrained
    """
    if Path(output).suffix.lower() in _FILE_SUFFIXES and not Path(output).is_dir():
        raise StoreError(
            f"{output}: a folder is to be written, and {Path(output).suffix} names a file of a kind that is not; give "
            f"a folder's name, such as {Path(output).with_suffix('')}, or a .safetensors file"
        )
    target = check_output_folder(output, inputs=inputs, replace=True)
    if not target.is_dir() or not any(target.iterdir()) or (force and any_folder):
        return
    if not force:
        raise StoreError(f"{output}: exists already; choose another name, or replace it", settings={"force": True})
    if not is_model_folder(target):
        raise StoreError(
            f"{output}: is not empty and has no {CONFIG}, so it is no model's folder and is not replaced; "
            "remove it or choose another name"
        )


def write_packed_folder(
    output: str | Path,
    contents: FolderContents,
    write_shard: WriteShard,
    *,
    force: bool = False,
    keeps_tokenizer: bool = False,
) -> list[Path]:
    """Write a folder under a temporary name, and rename it when it is complete. Returns what was written.

    force            a model that is there is replaced: its weights, their index, config and plan go; files of its
                     tokenizer and its generation config that the new model lacks are put into a folder `replaced`
                     there; every other file stays
    keeps_tokenizer  where the new model brings no tokenizer, the old one stays, as for transformers' save_pretrained
    """
    replaces = functools.partial(_model_files, keeps_tokenizer=keeps_tokenizer)
    with atomic_folder(output, replaces=replaces if force else None) as folder:
        for shard in contents.shards:
            file = folder / shard.name
            file.parent.mkdir(parents=True, exist_ok=True)
            metadata = {**shard.metadata, **({} if contents.plan is None else {CHECKSUMS: ""})}  # of our own layout
            with write_tensors(file, shard.tensors, metadata=metadata, tied=shard.tied) as writer:
                write_shard(writer, shard.tensors)
        if [shard.name for shard in contents.shards] != [WHOLE]:
            write_json(folder / INDEX, index_of(contents.shards))
        for name, path in contents.beside.items():
            _copy(path, folder / name)
        if contents.plan is not None:
            contents.plan.save(folder / PLAN)
        if contents.config is not None:
            write_json(folder / CONFIG, contents.config)
        certificate = settled_certificate(folder, contents.certificate, contents.earlier)
        if certificate is not None and contents.config is not None and is_card_of_ours(Path(output, CARD)):
            plan = contents.plan or Plan.from_document(certificate["plan"], where=str(output))
            write_card(folder, plan, certificate, contents.source, contents.target)
        written = sorted(path.name for path in folder.iterdir())
        if force:
            _set_aside(Path(output), folder, keeps_tokenizer=keeps_tokenizer)
        if certificate is not None:
            write_certificate(folder, certificate)
            written = sorted([*written, EVIDENCE_FILE])
        require_unchanged(contents.inputs)
    return [Path(output, name) for name in written]


def _set_aside(old: Path, new: Path, *, keeps_tokenizer: bool) -> None:
    """Keep the tokenizer and generation config of an old model, which the new one lacks, where no program reads them.

    They may be a user's own, so they are not lost; beside another model's weights they would make a mix.
    """
    gone = {GENERATION} if keeps_tokenizer and not _has_tokenizer(new) else {GENERATION, *TOKENIZER_FILES}
    names = sorted(name for name in gone if (old / name).exists() and not (new / name).exists())
    if not names:
        return
    numbers = (f"{REPLACED}{number}" for number in itertools.chain([""], itertools.count(2)))
    aside = next(name for name in numbers if not (old / name).exists())
    (new / aside).mkdir()
    for name in names:
        _copy(old / name, new / aside / name)
    log.warning(
        "%s: the new model has no %s; those of the model before are in %s there now",
        *(visible(str(old)), visible(listed(names, 3)), aside),
    )


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def _model_files(old: Path, new: Path, *, keeps_tokenizer: bool) -> set[str]:
    """Files of the model in a folder that has no place beside a new one: shards that its index names included."""
    names = {path.name for path in old.iterdir() if _WEIGHTS.fullmatch(path.name)}
    names |= {CONFIG, GENERATION, PLAN, EVIDENCE_FILE, PICTURE, *([CARD] if is_card_of_ours(old / CARD) else [])}
    with suppress(FileFormatError, OSError):  # an index that cannot be read names none
        names |= {*read_index(old / INDEX).values()}
    return names if keeps_tokenizer and not _has_tokenizer(new) else names | TOKENIZER_FILES

"""Converts gpt-oss checkpoints between OpenAI's, Hugging Face's and GGUF's layouts, and from floats back to MXFP4.

No value changes unless `experts` asks for it: `mxfp4` encodes experts that are floats (a fine-tuned model's),
`bfloat16` expands packed ones. Memory is bounded by one expert's matrix; the output appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from bitplan.base.errors import StoreError, did_you_mean
from bitplan.base.folders import atomic_folder, check_output_folder
from bitplan.base.records import atomic_file, check_output, read_json, write_json
from bitplan.files.gguf import GGUFValue
from bitplan.files.gpt_oss.config import (
    CONFIG,
    check_settings_held,
    gguf_metadata,
    hf_config,
    openai_config,
    with_quantization,
)
from bitplan.files.gpt_oss.layouts import LAYOUTS, Layout, list_slots
from bitplan.files.gpt_oss.source import GptOssFile, GptOssSource
from bitplan.files.gpt_oss.write import OnBytes, Written, write_gpt_oss
from bitplan.formats.scale_rules import ScaleRule

ExpertFormat = Literal["mxfp4", "bfloat16"]
WEIGHTS = "model.safetensors"
# Files beside a Hugging Face model that are valid for the converted one too.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass
class ConvertReport:
    """What was written, and what was done to each tensor; `files` are the other files beside the weights."""

    source: str
    output: str
    from_layout: str
    to_layout: Layout
    tensors: list[Written] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def counts(self) -> list[dict[str, Any]]:
        """Tensors and bytes, by action and by format."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for tensor in self.tensors:
            key = (tensor.action, tensor.format)
            row = rows.setdefault(key, {"action": key[0], "format": key[1], "tensors": 0, "bytes": 0})
            row["tensors"] += 1
            row["bytes"] += tensor.nbytes
        return sorted(rows.values(), key=lambda row: -row["bytes"])

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bytes": self.nbytes, "counts": self.counts()}


def convert_gpt_oss(
    source: str | Path,
    dest: str | Path,
    *,
    to: Layout,
    experts: ExpertFormat = "mxfp4",
    scale_rule: ScaleRule | None = None,
    force: bool = False,
    on_bytes: OnBytes = lambda _count, _name: None,
) -> ConvertReport:
    """Write a gpt-oss checkpoint in another layout.

    source      a .safetensors file, an index of shards or their folder, or a .gguf file
    dest        .gguf for GGUF; else a .safetensors file, or a folder to be made, with config.json
    experts     mxfp4 (packed bytes stay, floats are encoded) or bfloat16 (packed ones are expanded)
    scale_rule  when experts are encoded: None is OCP's floor rule; "mse" tries the neighbouring scales too
    force       replace a file that exists
    """
    with GptOssFile(source) as file:
        if scale_rule is not None and (experts != "mxfp4" or file.experts is None):
            held = "MXFP4 already" if file.experts is None else "floats that stay floats"
            raise StoreError(
                f"{source}: a scale rule is for experts that are encoded, and these are {held}; leave it out"
            )
        own = file.layout == to == "hf"
        companions = [name for name in COMPANIONS if own and (file.folder / name).is_file()]
        with open_destination(dest, to, force=force, sources=file.files) as weights:
            report = save_gpt_oss(
                file,
                weights,
                to,
                experts=experts,
                scale_rule=scale_rule,
                config=file.config if own else None,
                metadata=file.metadata if file.layout == to else None,
                force=force,
                on_bytes=on_bytes,
            )
            if weights != Path(dest):  # the output is a folder
                for name in companions:
                    with (file.folder / name).open("rb") as companion, atomic_file(weights.parent / name) as copy:
                        shutil.copyfileobj(companion, copy)
                report.files += companions
    report.source, report.output, report.from_layout = str(source), str(dest), file.layout
    return report


def save_gpt_oss(
    source: GptOssSource,
    weights: Path,
    to: Layout,
    *,
    experts: ExpertFormat,
    scale_rule: ScaleRule | None = None,
    config: Mapping[str, Any] | None = None,
    metadata: Mapping[str, GGUFValue] | None = None,
    force: bool = False,
    on_bytes: OnBytes = lambda _count, _name: None,
) -> ConvertReport:
    """Write weights and their config; a given `config` and `metadata` are carried over."""
    if experts not in get_args(ExpertFormat):
        raise StoreError(f"experts are written in {' or '.join(get_args(ExpertFormat))}, got {experts!r}")
    packed = experts == "mxfp4"
    list_slots(to, source.shape, packed=packed)  # refuses experts that the layout cannot hold
    if source.layout != to:
        check_settings_held(source.where, source.settings, to)
    report = ConvertReport(source.where, str(weights), "", to)
    document = None
    if to == "gguf":
        own = gguf_metadata(source.shape, source.settings, packed=packed)
        given = dict(metadata or {})
        metadata = {**given, **{key: value for key, value in own.items() if key not in given}}
        metadata["general.file_type"] = own["general.file_type"]
    else:
        document = openai_config(source.shape, source.settings)
        if to == "hf":
            fresh = hf_config(source.shape, source.settings, packed=packed)
            document = fresh if config is None else with_quantization(config, packed=packed)
        _check_config(weights.parent / CONFIG, document, source, force=force)
    dtype = None if packed else torch.bfloat16
    report.tensors = write_gpt_oss(
        source, weights, to, experts=dtype, scale_rule=scale_rule, metadata=metadata, on_bytes=on_bytes
    )
    if document is not None:
        write_json(weights.parent / CONFIG, document)
        report.files.append(CONFIG)
    return report


def _check_config(path: Path, document: Mapping[str, Any], source: GptOssSource, *, force: bool) -> None:
    """Refuse to replace the config of another model."""
    if not path.exists() or json.dumps(read_json(path)) == json.dumps(document):
        return
    own = source.folder / CONFIG if isinstance(source, GptOssFile) else None
    is_its_own = own is not None and own.exists() and os.path.samefile(path, own)
    if is_its_own or not force:
        hint = "" if is_its_own else ", or replace it"
        raise StoreError(
            f"{path}: is there already and says something else than the new one must; give a folder that does not "
            f"exist yet instead of a file{hint}",
            settings={} if is_its_own else {"force": True},
        )


@contextmanager
def open_destination(dest: str | Path, to: Layout, *, force: bool, sources: Sequence[Path] = ()) -> Iterator[Path]:
    """The path for the weights: `dest` itself, or a file in a folder that appears when the block ends without error."""
    path = Path(dest)
    if to not in LAYOUTS:
        raise StoreError(f"no layout {to!r}; there are {', '.join(LAYOUTS)}{did_you_mean(str(to), LAYOUTS)}")
    wanted = ".gguf" if to == "gguf" else ".safetensors"
    if (to == "gguf" or path.suffix in (".gguf", ".json", ".bin")) and path.suffix != wanted:
        folder = "" if to == "gguf" else ", or a folder"
        raise StoreError(f"{path}: the layout {to} is written to a {wanted} file{folder}")
    if path.suffix == wanted:
        check_output(path, inputs=sources, force=force)
        yield path
        return
    check_output_folder(path, inputs=sources)
    with atomic_folder(path) as made:
        yield made / WEIGHTS

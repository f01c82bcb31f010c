"""Converts gpt-oss checkpoints between OpenAI's, Hugging Face's and GGUF's layouts, and from floats back to MXFP4.

No value changes unless `experts` asks for it: `mxfp4` encodes experts that are floats (a fine-tuned model's),
`bfloat16` expands packed ones. Memory is bounded by one expert's matrix; the output appears whole or not at all. The
report says what was done to each tensor:

| action | what happened to the numbers | what happened to the bytes |
|---|---|---|
| copied | nothing | the same bytes, whole tensors or runs of rows |
| rearranged | nothing | gate and up parted or joined, nibbles in another order, floats transposed |
| widened, narrowed | nothing | bfloat16 as float32, and float32 that holds bfloat16 as such |
| encoded | floats became MXFP4 | |
| expanded | MXFP4 became bfloat16, exactly | |
| rounded | wider floats became bfloat16 | |
| drawn | made on the spot, there was no file | |

`make_checkpoint` draws checkpoints of any size, for tests and benchmarks: real packed bytes, realistic numbers.

Weights are drawn from a normal distribution with the deviation of a new layer and encoded by the real encoder, so that
codes and scales are distributed as in a trained model. Each part has its own seed: the same seed gives the same numbers
in every layout (and on every run, on the same kind of device).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from bitplan.base.errors import FormatError, StoreError, did_you_mean
from bitplan.base.folders import atomic_folder, check_output_folder
from bitplan.base.hardware import known_device
from bitplan.base.records import atomic_file, check_output, read_json, require_unchanged, stamps_of, write_json
from bitplan.files.certificate import EVIDENCE_FILE, certificate_of, write_certificate
from bitplan.files.gguf import GGUFValue, write_gguf
from bitplan.files.gpt_oss.config import (
    CONFIG,
    Settings,
    check_settings_held,
    gguf_metadata,
    hf_config,
    openai_config,
    with_quantization,
)
from bitplan.files.gpt_oss.layouts import (
    GGUF_WIDE,
    LAYOUTS,
    GptOssShape,
    Layout,
    LayoutTensor,
    list_slots,
    make_shape,
    part_shape,
)
from bitplan.files.gpt_oss.source import (
    MXFP4,
    GptOssFile,
    GptOssSource,
    Matrix,
    group_experts,
    plain_rows,
    split_expert,
)
from bitplan.files.open_files import require_container
from bitplan.files.safetensors import write_safetensors
from bitplan.files.tensor_bytes import PayloadWriter
from bitplan.formats import Encoded
from bitplan.formats.dispatch import decode, encode
from bitplan.formats.scale_rules import ScaleRule
from bitplan.plan import Choice, Plan, Planned
from bitplan.plan.plan import Part

Action = Literal["copied", "rearranged", "widened", "narrowed", "encoded", "expanded", "rounded", "drawn"]
OnBytes = Callable[[int, str], None]
_GGML_TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
    None: GGMLQuantizationType.MXFP4,
}


_PARTS: dict[str, Part] = {"blocks": "data", "scales": "scales"}
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


@dataclass(frozen=True)
class Written:
    """A row of the report, as its JSON has it: one tensor of the new file, in a torch dtype or mxfp4."""

    name: str
    action: Action
    format: str
    shape: tuple[int, ...]
    nbytes: int


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
        """A summary of the report: number of tensors and bytes, for each action and format."""
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
            numbers = "MXFP4 already" if file.experts is None else "floats that stay floats"
            raise StoreError(
                f"{source}: a scale rule is for experts that are encoded, and these are {numbers}; leave it out"
            )
        stays_hf = file.layout == to == "hf"
        companions = [file.folder / name for name in COMPANIONS if stays_hf and (file.folder / name).is_file()]
        with open_destination(dest, to, force=force, sources=file.files) as weights:
            report = save_gpt_oss(
                file,
                weights,
                to,
                experts=experts,
                scale_rule=scale_rule,
                config=file.config if stays_hf else None,
                metadata=file.metadata if file.layout == to else None,
                companions=companions,
                is_folder=weights != Path(dest),
                force=force,
                on_bytes=on_bytes,
            )
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
    companions: Sequence[Path] = (),
    is_folder: bool = False,
    force: bool = False,
    on_bytes: OnBytes = lambda _count, _name: None,
) -> ConvertReport:
    """Write weights, their config and their certificate; a given `config` and `metadata` are carried over.

    is_folder   the weights lie in a new folder, which has the certificate and the companions; else the file has it
    """
    if experts not in get_args(ExpertFormat):
        raise StoreError(f"experts are written in {' or '.join(get_args(ExpertFormat))}, got {experts!r}")
    packed = experts == "mxfp4"
    list_slots(to, source.shape, packed=packed)  # refuses experts that the layout cannot hold
    if source.layout != to:
        check_settings_held(source.where, source.settings, to)
    report = ConvertReport(source.where, str(weights), "", to)
    document = None
    if to == "gguf":
        fresh_metadata = gguf_metadata(source.shape, source.settings, packed=packed)
        own_metadata = dict(metadata or {})
        metadata = {**own_metadata, **{key: value for key, value in fresh_metadata.items() if key not in own_metadata}}
        metadata["general.file_type"] = fresh_metadata["general.file_type"]
    else:
        document = openai_config(source.shape, source.settings)
        if to == "hf":
            fresh = hf_config(source.shape, source.settings, packed=packed)
            document = fresh if config is None else with_quantization(config, packed=packed)
        _check_config(weights.parent / CONFIG, document, source, force=force)
    dtype = None if packed else torch.bfloat16
    certificate = certificate_of(
        _plan_of(source, to, dtype), Path(source.where), source.files, scale_rule=scale_rule, holds_plan=True
    )
    entries: dict[str, Any] = {**(metadata or {})} if to == "gguf" else {"format": "pt"}  # transformers 4 wants the key
    if not is_folder:
        entries |= require_container(weights).certificate_entry(json.dumps(certificate, separators=(",", ":")))
    report.tensors = write_gpt_oss(
        source, weights, to, experts=dtype, scale_rule=scale_rule, metadata=entries, on_bytes=on_bytes
    )
    if document is not None:
        write_json(weights.parent / CONFIG, document)
        report.files.append(CONFIG)
    if is_folder:
        for companion in companions:
            with companion.open("rb") as original, atomic_file(weights.parent / companion.name) as copy:
                shutil.copyfileobj(original, copy)
            report.files.append(companion.name)
        write_certificate(weights.parent, certificate)
        report.files.append(EVIDENCE_FILE)
    return report


def _plan_of(source: GptOssSource, to: Layout, experts: torch.dtype | None) -> Plan:
    """What becomes of each tensor, for the certificate: its format, and what is done to it."""
    slots = list_slots(to, source.shape, packed=experts is None)
    entries = {}
    for slot in slots:
        dtype = _dtype(source, slot, to, experts)
        action = _expert_action(source, [slot], experts) if slot.is_expert else _plain_action(source, slot, dtype)
        part = _PARTS.get(slot.kind)
        name = "mxfp4_gguf" if dtype is None else _format(slot, dtype)
        entries[slot.name] = Planned(Choice(name, action), slot.shape, part=part)
    return Plan(entries)


def _check_config(path: Path, document: Mapping[str, Any], source: GptOssSource, *, force: bool) -> None:
    """Refuse to replace the config of another model."""
    if not path.exists() or json.dumps(read_json(path)) == json.dumps(document):
        return
    source_config = source.folder / CONFIG if isinstance(source, GptOssFile) else None
    is_its_own = source_config is not None and source_config.exists() and os.path.samefile(path, source_config)
    if is_its_own or not force:
        hint = "" if is_its_own else ", or replace it"
        raise StoreError(
            f"{path}: is there already and says something else than the new one must; give a folder that does not "
            f"exist yet instead of a file{hint}",
            settings={} if is_its_own else {"force": True},
        )


@contextmanager
def open_destination(dest: str | Path, to: Layout, *, force: bool, sources: Sequence[Path] = ()) -> Iterator[Path]:
    """Yield the path for the weights: `dest` itself, or a file in a folder that appears if the block succeeds."""
    path = Path(dest)
    if to not in LAYOUTS:
        raise StoreError(f"no layout {to!r}; there are {', '.join(LAYOUTS)}{did_you_mean(str(to), LAYOUTS)}")
    suffix = ".gguf" if to == "gguf" else ".safetensors"
    if (to == "gguf" or path.suffix in (".gguf", ".json", ".bin")) and path.suffix != suffix:
        folder = "" if to == "gguf" else ", or a folder"
        raise StoreError(f"{path}: the layout {to} is written to a {suffix} file{folder}")
    if path.suffix == suffix:
        check_output(path, inputs=sources, force=force)
        yield path
        return
    check_output_folder(path, inputs=sources)
    with atomic_folder(path) as folder_path:
        yield folder_path / WEIGHTS


# ---- the weights -----------------------------------------------------------------------------------------------------


def write_gpt_oss(
    source: GptOssSource,
    path: str | Path,
    layout: Layout,
    *,
    experts: torch.dtype | None = None,
    scale_rule: ScaleRule | None = None,
    metadata: Mapping[str, Any],
    on_bytes: OnBytes = lambda _count, _name: None,
) -> list[Written]:
    """Write one file, atomically; `experts` None is MXFP4, else their float type."""
    slots = list_slots(layout, source.shape, packed=experts is None)
    dtypes = {slot.name: _dtype(source, slot, layout, experts) for slot in slots}
    actions: dict[str, Action] = {}
    stamps = stamps_of(source.files)
    sizes: Counter[str] = Counter()

    def put(name: str, piece: Tensor | bytes) -> None:
        writer.write_chunk(name, piece)
        count = piece.nbytes if isinstance(piece, Tensor) else len(piece)
        sizes[name] += count
        on_bytes(count, name)

    with _open_writer(path, layout, slots, dtypes, metadata) as writer:
        for slot in slots:
            if not slot.is_expert:
                actions[slot.name] = _plain_action(source, slot, dtypes[slot.name])
                for rows in plain_rows(source, slot):
                    put(slot.name, _exactly(rows, dtypes[slot.name]))
        for (layer, parts), group in group_experts(slots).items():
            action = _expert_action(source, group, experts)
            actions |= dict.fromkeys([slot.name for slot in group], action)
            if action == "copied":
                _copy(source, group, put)
                continue
            for index in range(source.shape.experts):
                name = f"{source.where}: {source.expert_name(layer, parts)}, expert {index}"
                with _naming(name):
                    expert = source.expert(layer, parts, index)
                matrix = _converted(expert, experts, scale_rule, name)
                with _naming(name):
                    for target, piece in split_expert(group, matrix):
                        put(target, piece)
        require_unchanged(stamps)
    return [
        Written(slot.name, actions[slot.name], _format(slot, dtypes[slot.name]), slot.shape, sizes[slot.name])
        for slot in slots
    ]


def _dtype(source: GptOssSource, slot: LayoutTensor, layout: Layout, experts: torch.dtype | None) -> torch.dtype | None:
    """The type of a tensor in the new file; None is GGUF's MXFP4."""
    if slot.kind in ("blocks", "scales"):
        return torch.uint8
    if slot.is_expert:
        return experts
    dtype = functools.reduce(torch.promote_types, [source.dtype(part, slot.layer) for part in slot.parts])
    is_wide = set(slot.parts) <= GGUF_WIDE
    if layout == "gguf":
        return torch.float32 if is_wide else dtype
    if source.is_widened and is_wide and dtype == torch.float32:
        parts = (rows for part in slot.parts for rows in source.rows(part, slot.layer))
        is_wider = any(bool((rows.contiguous().view(torch.int32) & 0xFFFF).any()) for rows in parts)
        return dtype if is_wider else torch.bfloat16
    return dtype


def _format(slot: LayoutTensor, dtype: torch.dtype | None) -> str:
    return "mxfp4" if dtype is None or slot.kind in ("blocks", "scales") else str(dtype).removeprefix("torch.")


def _open_writer(
    path: str | Path,
    layout: Layout,
    slots: Sequence[LayoutTensor],
    dtypes: Mapping[str, torch.dtype | None],
    metadata: Mapping[str, Any],
) -> AbstractContextManager[PayloadWriter]:
    if layout == "gguf":
        types = [(slot.name, _GGML_TYPES[dtypes[slot.name]], slot.shape) for slot in slots]
        return write_gguf(path, types, metadata, checksums=True)
    entries = [(slot.name, dtypes[slot.name] or torch.uint8, slot.shape) for slot in slots]
    return write_safetensors(path, entries, metadata)


def _plain_action(source: GptOssSource, slot: LayoutTensor, dtype: torch.dtype | None) -> Action:
    dtypes = {source.dtype(part, slot.layer) for part in slot.parts}
    if source.twin(slot) is None and set(slot.parts) <= {"gate_bias", "up_bias"}:
        return "rearranged"
    if dtypes == {dtype}:
        return "copied"
    return "narrowed" if dtype == torch.bfloat16 else "widened"


def _exactly(rows: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Convert to another type without rounding; a narrower one takes the upper bits, so a NaN keeps its payload."""
    if rows.dtype == torch.float32 and dtype == torch.bfloat16:
        return (rows.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return rows.to(dtype)


def _expert_action(source: GptOssSource, group: Sequence[LayoutTensor], experts: torch.dtype | None) -> Action:
    if source.experts == experts:
        return "copied" if all(source.twin(slot) for slot in group) else "rearranged"
    if experts is None:
        return "encoded"
    return "expanded" if source.experts is None else "rounded"


def _copy(source: GptOssSource, group: Sequence[LayoutTensor], put: Callable[[str, Tensor], None]) -> None:
    for slot in group:
        twin = source.twin(slot)
        assert twin is not None
        for rows in source.raw(twin):
            put(slot.name, rows)


def _converted(matrix: Matrix, experts: torch.dtype | None, rule: ScaleRule | None, name: str) -> Matrix:
    if isinstance(matrix, Encoded):
        with _naming(name):
            numbers = matrix if experts is None else decode(matrix, experts)
        return numbers if isinstance(numbers, Encoded) else _finite(numbers, name)
    if experts is not None:
        return matrix if matrix.dtype == experts else _finite(matrix.to(experts), name)
    return encode(_finite(matrix, name), MXFP4, scale_rule=rule, name=name)


def _finite(numbers: Tensor, name: str) -> Tensor:
    low, high = torch.aminmax(numbers)
    if not bool(torch.isfinite(low)) or not bool(torch.isfinite(high)):
        count = numbers.numel() - int(numbers.isfinite().sum())
        raise FormatError(f"{name}: {count} of {numbers.numel()} numbers are NaN or infinite; mend the weights")
    return numbers


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """A context that puts the tensor's name in front of the messages of format errors, which do not know it."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None


# ---- drawn checkpoints -----------------------------------------------------------------------------------------------


CHUNK_NUMBERS = 2**25


def make_checkpoint(
    path: str | Path,
    *,
    naming: Layout = "openai",
    size: str = "tiny",
    expert_format: ExpertFormat = "mxfp4",
    seed: int = 0,
    device: str | torch.device = "cpu",
    force: bool = False,
    on_bytes: OnBytes = lambda _count, _name: None,
    **sizes: int | None,
) -> ConvertReport:
    """Write a checkpoint with the tensors of gpt-oss and random numbers, and its config.

    path           as `convert_gpt_oss` takes it: a .safetensors or .gguf file, or a folder to be made
    naming         openai, hf or gguf
    size           a preset (tiny, 20b, 120b)
    expert_format  bfloat16 makes a checkpoint like that of a fine-tuned model (hf and gguf)
    device         where numbers are drawn and encoded; "cuda" for the large ones
    sizes          those of a `GptOssShape`, such as layers=4, in place of the preset's own
    """
    shape = make_shape(size, **sizes)
    source = DrawnCheckpoint(shape, packed=expert_format == "mxfp4", seed=seed, device=device)
    with open_destination(path, naming, force=force) as weights:
        is_folder = weights != Path(path)
        report = save_gpt_oss(
            source, weights, naming, experts=expert_format, is_folder=is_folder, force=force, on_bytes=on_bytes
        )
    report.output, report.from_layout = str(path), "drawn"
    report.tensors = [replace(tensor, action="drawn") for tensor in report.tensors]
    return report


class DrawnCheckpoint(GptOssSource):
    """A gpt-oss checkpoint of random numbers that lies in no file, as a source for writing one."""

    def __init__(self, shape: GptOssShape, *, packed: bool, seed: int, device: str | torch.device) -> None:
        self.where = f"seed {seed}"
        self.shape = shape
        self.settings = Settings(experts_per_token=min(Settings.experts_per_token, shape.experts))
        self.experts = None if packed else torch.bfloat16
        self._seed = seed
        self._device = known_device(device, "draw on the CPU")

    def dtype(self, part: str, layer: int | None) -> torch.dtype:
        return torch.bfloat16

    def rows(self, part: str, layer: int | None) -> Iterator[Tensor]:
        shape = part_shape(part, self.shape)
        inputs = math.prod(shape[1:])
        step = max(1, CHUNK_NUMBERS // inputs)
        for start in range(0, shape[0], step):
            numbers = self._draw((min(step, shape[0] - start), *shape[1:]), part, layer, start)
            yield _scaled(part, numbers, inputs).to(torch.bfloat16)

    def expert(self, layer: int, parts: tuple[str, ...], index: int) -> Matrix:
        outputs, inputs = self.shape.matrix(parts)
        drawn = self._draw((outputs, inputs), "+".join(parts), layer, index)
        numbers = drawn.div_(math.sqrt(inputs)).to(torch.bfloat16)
        return numbers if self.experts is not None else encode(numbers, MXFP4)

    def _draw(self, shape: tuple[int, ...], part: str, layer: int | None, index: int) -> Tensor:
        digest = hashlib.blake2b(f"{self._seed}/{part}/{layer}/{index}".encode(), digest_size=7).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest, "little"))
        return torch.randn(shape, generator=generator, device=self._device)


def _scaled(part: str, numbers: Tensor, inputs: int) -> Tensor:
    """Numbers roughly as in a trained model: norms near one, small biases, weights scaled by their inputs."""
    if part.endswith("norm"):
        return 1 + numbers / 8
    if part.endswith("bias"):
        return numbers / 32
    if part in ("embed", "sinks"):
        return numbers
    return numbers / math.sqrt(inputs)

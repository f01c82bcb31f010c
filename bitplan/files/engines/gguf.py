"""To GGUF, so that llama.cpp runs it: from a Hugging Face folder, or from GGUF itself.

From a folder, names go through gguf-py's table, rows of q and k are put in llama.cpp's order, experts of a layer become
one tensor, and config and tokenizer become metadata. From GGUF everything but the formats stays. Norms, biases and
routers are float32, which is what llama.cpp computes them in. gpt-oss, whose experts are woven, biased and packed in
ways of their own, is written by `files.gpt_oss`.

A model is written in one file or in parts, as llama.cpp's gguf-split names and marks them.

Parts get their names in reverse order, so that the first part, which engines open, appears when all others exist: its
certificate has their hashes. Each says in `split.run` what was written into all of them, so that parts of two runs are
not read as one model.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from gguf.constants import GGMLQuantizationType, GGUFValueType
from torch import Tensor

from bitplan.base.errors import StoreError
from bitplan.base.records import check_output, require_unchanged, stamps_of
from bitplan.files.certificate import certificate_of, part_seals, proof_of, sha256_of, written_plan
from bitplan.files.engines.gguf_metadata import (
    ModelConfig,
    is_gpt_oss,
    model_metadata,
    rope_factors,
    shorter_context,
    text,
)
from bitplan.files.engines.gguf_source import GGUFNames, fit_names, heads_of, is_plus_one, row_order
from bitplan.files.engines.gguf_tokenizer import tokenizer_metadata
from bitplan.files.engines.targets import (
    ExportReport,
    ExportRequest,
    ExportRow,
    OnBytes,
    OutputTensor,
    experts_in_order,
    made_tensors,
    notes_on_inputs,
)
from bitplan.files.gguf import GGUFValue, write_gguf
from bitplan.files.gguf_tensors import GGUF, GGUFTensors, GGUFTensorWriter, file_metadata, gguf_type
from bitplan.files.gpt_oss.convert import save_gpt_oss
from bitplan.files.gpt_oss.layouts import GGUF_WIDE, LayoutTensor, list_slots
from bitplan.files.gpt_oss.source import GptOssFile
from bitplan.files.headers import plan_for_file
from bitplan.files.imatrix import ImatrixFile
from bitplan.files.open_files import open_tensors
from bitplan.files.round_with_evidence import OtherName, WeightEvidence, evidence_file, evidence_for, open_evidence
from bitplan.files.tensor_bytes import PayloadWriter
from bitplan.files.tensor_file import TensorFile, TensorSpec
from bitplan.formats import Encoded, get_format
from bitplan.formats.codec import finite, readable
from bitplan.formats.dispatch import encode
from bitplan.formats.elements import dtype_name
from bitplan.formats.format import Format
from bitplan.plan import Plan
from bitplan.plan.structure.families import split_expert

RUN = "bitplan-"


class PartWriter:
    """Writes tensors into the parts of a split GGUF file; they may come in any order."""

    def __init__(self, paths: list[Path], writers: Mapping[str, GGUFTensorWriter]) -> None:
        self.paths, self._writers = paths, writers

    def write(self, name: str, item: Tensor | Encoded) -> None:
        self._writers[name].write(name, item)


def check_gguf_output(
    output: Path, part_bytes: int | None, *, inputs: Iterable[Path], force: bool, tensors: Sequence[TensorSpec] = ()
) -> None:
    """Refuse an output that is not .gguf, is one of the inputs, or exists without `force`, and parts below 1 MiB."""
    if output.is_dir():
        raise StoreError(f"{output}: is a folder, and GGUF is a file; give a name such as {output / 'model.gguf'}")
    if output.suffix != ".gguf":
        raise StoreError(f"{output}: GGUF files end in .gguf, got {output.suffix!r}")
    if part_bytes is not None and part_bytes < 2**20:
        raise StoreError(f"{output}: parts of {part_bytes} bytes; at least {2**20} (1 MiB) make sense")
    inputs = list(inputs)
    for path in _paths(output, len(_grouped(tensors, part_bytes)), part_bytes):
        check_output(path, inputs=inputs, force=force)


def _paths(output: Path, count: int, part_bytes: int | None) -> list[Path]:
    if part_bytes is None:
        return [output]
    return [output.with_name(f"{output.stem}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]


def _grouped(tensors: Sequence[TensorSpec], part_bytes: int | None) -> list[list[TensorSpec]]:
    """Consecutive tensors, at most `part_bytes` in a part; a larger tensor has a part of its own."""
    if part_bytes is None:
        return [list(tensors)]
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in tensors:
        if groups[-1] and size + spec.nbytes > part_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    return groups


@contextmanager
def write_parts(
    output: Path,
    tensors: Sequence[TensorSpec],
    metadata: Mapping[str, GGUFValue],
    part_bytes: int | None,
    certificate: Mapping[str, Any] | None = None,
) -> Iterator[PartWriter]:
    """Yield a writer of one file, or of parts of at most `part_bytes`; the first part has metadata and certificate."""
    groups = _grouped(tensors, part_bytes)
    paths = _paths(output, len(groups), part_bytes)
    seals = {} if certificate is None else dict(zip(paths[1:], part_seals(len(paths)), strict=True))
    if certificate is not None:
        others = {"files": {path.name: seal for path, seal in seals.items()}} if seals else {}
        text = json.dumps({**certificate, **others}, separators=(",", ":"))
        metadata = {**metadata, **GGUF().certificate_entry(text)}
    writers: dict[str, GGUFTensorWriter] = {}
    files: list[PayloadWriter] = []
    run = f"{RUN}{secrets.token_hex(16)}"  # until the numbers are known
    with ExitStack() as opened:
        for number, (path, group) in enumerate(zip(paths, groups, strict=True)):
            part_metadata = dict(metadata) if number == 0 else {}
            if part_bytes is not None:
                part_metadata |= {
                    "split.no": GGUFValue(GGUFValueType.UINT16, number),
                    "split.count": GGUFValue(GGUFValueType.UINT16, len(groups)),
                    "split.tensors.count": GGUFValue(GGUFValueType.INT32, len(tensors)),
                    "split.run": GGUFValue(GGUFValueType.STRING, run),
                }
            entries = [(item.name, GGMLQuantizationType[gguf_type(item, path)], item.shape) for item in group]
            payloads = opened.enter_context(write_gguf(path, entries, part_metadata, checksums=True))
            if number == 0:
                opened.push(lambda kind, *_: kind is None and _fill_hashes(files[0], seals))
            files.append(payloads)
            writers |= {item.name: GGUFTensorWriter(payloads) for item in group}
        yield PartWriter(paths, writers)
        if part_bytes is not None:
            checksums = [list((file.checksums or {}).items()) for file in files]
            contents = hashlib.sha256(repr((sorted(metadata.items()), checksums)).encode()).hexdigest()
            for file in files:
                file.fill(run.encode(), f"{RUN}{contents[:32]}".encode())


def _fill_hashes(first: PayloadWriter, seals: Mapping[Path, str]) -> bool:
    """Hash the other parts, which are complete, and put the hashes into the first part's certificate."""
    for path, seal in seals.items():
        first.fill(seal.encode(), sha256_of(path).encode())
    return False


# ---- gpt-oss ---------------------------------------------------------------------------------------------------------


_EXPERTS = {"mxfp4": "mxfp4", "mxfp4_gguf": "mxfp4", "bfloat16": "bfloat16"}


class GptOssExport:
    """An export of gpt-oss to GGUF that was checked and can be written (`bitplan.files.engines.targets`)."""

    def __init__(self, request: ExportRequest) -> None:
        fmt = request.formats.name if isinstance(request.formats, Format) else request.formats
        if not isinstance(fmt, str) or fmt not in _EXPERTS or request.keep or request.only:
            raise StoreError(
                f"{request.source}: gpt-oss is exported with its experts in mxfp4 or bfloat16 and the rest as it is; "
                "give mxfp4 or bfloat16 as the format, and no names of tensors that stay or alone change",
                settings={"fmt": "mxfp4"},
            )
        if request.evidence is not None or request.part_bytes is not None or request.dask is not None:
            raise StoreError(f"{request.source}: gpt-oss is exported to one file, takes no evidence and no cluster")
        self._request, self._experts = request, _EXPERTS[fmt]
        folder = request.source if request.source.is_dir() else request.source.parent
        config = ModelConfig(folder)
        self._metadata = {"general.name": text(folder.resolve().name)}
        self._metadata |= tokenizer_metadata(folder, config.vocabulary, request.pretokenizer)
        self._file = GptOssFile(request.source)
        check_gguf_output(request.output, None, inputs=self._file.files, force=request.force)
        slots = list_slots("gguf", self._file.shape, packed=self._experts == "mxfp4")
        rows = [self._row(slot) for slot in slots]
        self.report = ExportReport(str(request.source), str(request.output), "gguf", rows)

    def _row(self, slot: LayoutTensor) -> ExportRow:
        if slot.is_expert:
            name, why = ("mxfp4_gguf" if self._experts == "mxfp4" else "bfloat16"), "experts"
        elif set(slot.parts) <= GGUF_WIDE:
            name, why = "float32", "norms, biases and routers: llama.cpp computes them in float32"
        else:
            name, why = "bfloat16", "stays"
        fmt = get_format(name)
        size = fmt.nbytes(slot.shape) if math.prod(slot.shape) else 0
        return ExportRow(slot.name, ", ".join(slot.parts), slot.shape, "", name, why, size)

    def write(self, on_bytes: OnBytes | None = None) -> None:
        save_gpt_oss(
            self._file,
            Path(self._request.output),
            "gguf",
            experts="mxfp4" if self._experts == "mxfp4" else "bfloat16",
            scale_rule=self._request.scale_rule,
            metadata=self._metadata,
            force=self._request.force,
            on_bytes=on_bytes or (lambda _count, _name: None),
        )
        self.report.files = [str(self._request.output)]

    def close(self) -> None:
        self._file.close()


# ---- all other models ------------------------------------------------------------------------------------------------


FLOAT32 = get_format("float32")
# Parts of a model that reads pictures, which llama.cpp keeps in a file of their own, and tables it computes itself.
_LEFT_OUT = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector|visual)\.|rotary_emb\.inv_freq$|masked_bias$")
_ROUTER = re.compile(r"\.ffn_gate_inp\.weight$")


def prepare(request: ExportRequest) -> GGUFExport | GptOssExport:
    """Plan every tensor for GGUF; all that can be refused is, before a weight is read."""
    folder = request.source if request.source.is_dir() else request.source.parent
    if request.source.suffix != ".gguf" and is_gpt_oss(folder):
        return GptOssExport(request)
    with ExitStack() as opened:
        file = opened.enter_context(open_tensors(request.source))
        statistics = None if request.evidence is None else opened.enter_context(open_evidence(request.evidence))
        inputs = [*file.files, *([request.evidence] if request.evidence else [])]
        check_gguf_output(request.output, request.part_bytes, inputs=inputs, force=request.force)
        plan = plan_for_file(
            file, fit_names(request.formats, file), keep=request.keep, only=request.only, output="out.gguf"
        )
        left_out: dict[str, str] = {}
        if isinstance(file, GGUFTensors):
            outgoing, metadata = list(_same_names(file, plan)), dict(file.metadata)
        else:
            outgoing, metadata, left_out = _from_folder(file, plan, request)
        promises = [item.records[0] for item in outgoing]
        for promise in promises:
            gguf_type(promise, request.output)
        check_gguf_output(request.output, request.part_bytes, inputs=inputs, force=request.force, tensors=promises)
        metadata = file_metadata(metadata, promises)
        evidence = None
        if statistics is not None:
            numbered = {
                source: OtherName(item.name, index if len(item.sources) > 1 else None)
                for item in outgoing
                for index, source in enumerate(item.sources)
            }
            evidence = evidence_for(statistics, file, numbered)
            evidence.require_use(source for item in outgoing if item.is_packed for source in item.sources)
            metadata |= statistics.gguf_keys if isinstance(statistics, ImatrixFile) else {}
        opened.pop_all()
        prepared = GGUFExport(request, file, evidence, outgoing, metadata, left_out, plan)
        if not isinstance(file, GGUFTensors) and (window := shorter_context(ModelConfig(folder))):
            prepared.report.notes.append(
                f"attention reaches back {window} tokens here, and to the beginning in llama.cpp's code for it: "
                f"the file says a context of {window} tokens, in which both compute the same"
            )
        return prepared


def _same_names(file: TensorFile, plan: Plan) -> Iterator[OutputTensor]:
    for name, spec in file.specs.items():
        fmt, reason = _format(plan, name)
        yield OutputTensor((name,), fmt, reason, (_record(name, spec.shape, fmt),))


def _format(plan: Plan, name: str) -> tuple[Format, str]:
    entry = plan.entries[name]
    return get_format(entry.stored or entry.choice.format), entry.choice.reason


# ---- from a Hugging Face folder --------------------------------------------------------------------------------------


def _from_folder(
    file: TensorFile, plan: Plan, request: ExportRequest
) -> tuple[list[OutputTensor], dict[str, GGUFValue], dict[str, str]]:
    folder = request.source if request.source.is_dir() else request.source.parent
    config = ModelConfig(folder)
    metadata = model_metadata(config, folder.resolve().name)
    metadata |= tokenizer_metadata(folder, config.vocabulary, request.pretokenizer)
    names = GGUFNames(config, str(file.path))
    grouped: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    for name in file.specs:
        if _LEFT_OUT.search(name):
            left_out[name] = "llama.cpp has no place for it in a language model's file"
        else:
            grouped.setdefault(names.of(name), []).append(name)
    left_out |= {alias: f"is {name!r}, which llama.cpp uses in its place" for alias, name in file.tied.items()}
    outgoing = [_outgoing(file, plan, config, new, sources) for new, sources in grouped.items()]
    factors = rope_factors(config)
    if factors is not None:
        computed = torch.tensor(factors, dtype=torch.float32)
        record = _record("rope_freqs.weight", tuple(computed.shape), FLOAT32)
        outgoing.append(OutputTensor((), FLOAT32, "llama 3's rotations", (record,), computed=computed))
    names.check_whole({item.name for item in outgoing})
    return outgoing, metadata, left_out


def _outgoing(file: TensorFile, plan: Plan, config: ModelConfig, new: str, sources: list[str]) -> OutputTensor:
    family, first = config.family, sources[0]
    shape = file.spec(first).shape
    if len(sources) > 1 or split_expert(first):
        sources = list(experts_in_order(file, new, sources))
        shape = (len(sources), *shape)
    chosen = {_format(plan, name)[0].name for name in sources}
    if len(chosen) > 1:
        raise StoreError(
            f"{file.path}: the {len(sources)} experts of {new!r} are one tensor in GGUF and need one format, "
            f"the plan gives {', '.join(sorted(chosen))}"
        )
    fmt, reason = _format(plan, first)
    if len(shape) < 2 or _ROUTER.search(new):
        fmt, reason = FLOAT32, "norms, biases and routers: llama.cpp computes them in float32"
    return OutputTensor(
        tuple(sources),
        fmt,
        reason,
        (_record(new, shape, fmt),),
        heads=heads_of(family, config, new),
        plus_one=is_plus_one(family, new),
    )


def _record(name: str, shape: tuple[int, ...], fmt: Format) -> TensorSpec:
    return TensorSpec.of(name, shape, None, fmt.storage) if fmt.is_cast else TensorSpec.of(name, shape, fmt)


# ---- writing ---------------------------------------------------------------------------------------------------------


class GGUFExport:
    """An export to GGUF that was checked and can be written (`bitplan.files.engines.targets`)."""

    def __init__(
        self,
        request: ExportRequest,
        file: TensorFile,
        evidence: WeightEvidence | None,
        outgoing: list[OutputTensor],
        metadata: Mapping[str, GGUFValue],
        left_out: dict[str, str],
        plan: Plan,
    ) -> None:
        self._request, self._file, self._evidence, self._plan = request, file, evidence, plan
        self._outgoing, self._metadata, self._stamps = outgoing, metadata, stamps_of(file.files)
        rows = [item.row(file) for item in outgoing]
        self.report = ExportReport(str(request.source), str(request.output), "gguf", rows, left_out)
        self.report.notes += notes_on_inputs(plan, "gguf")

    def write(self, on_bytes: OnBytes | None = None) -> None:
        promises, request = [item.records[0] for item in self._outgoing], self._request
        certificate = certificate_of(
            written_plan(
                self._plan,
                {name: (item.format_there, item.reason) for item in self._outgoing for name in item.sources},
                self._file.tied,
            ),
            request.source,
            self._file.files,
            evidence=None if request.evidence is None else evidence_file(request.evidence),
            scale_rule=request.scale_rule,
            proof=proof_of(request.source, self._file.certificate, self._file.files),
            holds_plan=True,
        )
        with write_parts(request.output, promises, self._metadata, request.part_bytes, certificate) as writer:
            results = made_tensors(self, request, [item.name for item in self._outgoing if item.computed is None])
            for item in self._outgoing:
                writer.write(item.name, next(results) if item.computed is None else item.computed)
                if on_bytes:
                    on_bytes(item.records[0].nbytes, item.name)
            require_unchanged(self._stamps)
        self.report.files = [str(path) for path in writer.paths]

    def close(self) -> None:
        self._file.close()
        if self._evidence is not None:
            self._evidence.file.close()

    @property
    def files(self) -> Sequence[Path]:
        return self._file.files

    def make(self, job: str) -> Tensor | Encoded:
        """Compute the output's tensor of this name."""
        item = next(item for item in self._outgoing if item.name == job)
        pieces = [self._piece(item, source) for source in item.sources]
        if len(item.records[0].shape) == len(self._file.spec(item.sources[0]).shape):
            return pieces[0]
        return _stacked(pieces, item)

    def _piece(self, item: OutputTensor, source: str) -> Tensor | Encoded:
        spec, where, fmt = self._file.spec(source), f"{self._file.path}: {source}", get_format(item.format_there)
        if spec.encoded and spec.format == fmt.name and not fmt.is_cast:
            encoded = self._file.read(source)
            assert isinstance(encoded, Encoded)
            return encoded if item.heads is None else _permuted_rows(encoded, item.heads)
        numbers = self._file.read_float(source)
        if fmt.is_cast and not numbers.is_floating_point():
            return numbers
        numbers = finite(readable(numbers, where), self._request.nonfinite, where)
        if self._evidence is not None and self._evidence.has(source) and not fmt.is_cast:
            rounded, _ = self._evidence.round(source, numbers, fmt, where=where)
            return rounded if item.heads is None else _permuted_rows(rounded, item.heads)
        if item.heads is not None:
            numbers = numbers[row_order(numbers.shape[0], item.heads)]
        if item.plus_one:
            numbers = numbers.float() + 1
        if fmt.is_cast:
            narrow = numbers.to(fmt.storage)
            finite(narrow, "error", f"{where} as {dtype_name(fmt.storage)}")
            return narrow
        rule = self._request.scale_rule if "absmax" in fmt.rules else None
        return encode(numbers, fmt, scale_rule=rule, name=where)


def _permuted_rows(encoded: Encoded, heads: int) -> Encoded:
    """Reorder packed rows of q or k from Hugging Face's order to llama.cpp's, which interleaves halves of heads."""
    order = row_order(encoded.shape[0], heads)
    parts = {name: part[order] if part.dim() else part for name, part in encoded.parts.items()}
    return Encoded(encoded.fmt, encoded.shape, **parts)


def _stacked(pieces: list[Tensor | Encoded], item: OutputTensor) -> Tensor | Encoded:
    first = pieces[0]
    if not isinstance(first, Encoded):
        return torch.stack([piece for piece in pieces if isinstance(piece, Tensor)])
    packed = [piece for piece in pieces if isinstance(piece, Encoded)]
    parts = {name: torch.stack([piece.parts[name] for piece in packed]) for name in first.parts}
    return Encoded(first.fmt, item.records[0].shape, **parts)

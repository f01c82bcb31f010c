"""Quantizes a file into another, one tensor at a time.

A checkpoint may be far larger than memory: each tensor is read, encoded, written and dropped. The
output takes its final name only when it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bitplan.base.errors import FormatError, StoreError
from bitplan.base.names import keywords_in
from bitplan.base.records import Closing, Stamps, require_unchanged, stamps_of
from bitplan.files.certificate import certificate_of, proof_of
from bitplan.files.cluster import Cluster, file_sizes, opened_as_here
from bitplan.files.headers import is_gguf, is_packed_by, plan_for_file, plan_of_stored
from bitplan.files.input_statistics import EvidenceFile
from bitplan.files.open_files import container_for, open_tensors, require_container
from bitplan.files.packed_folder import (
    SHARD_BYTES,
    FolderContents,
    Shard,
    check_packed_output,
    cut_shards,
    folder_kv,
    is_model_folder,
    is_packed_config,
    packed_config,
    packed_shapes,
    read_config,
    shown_inputs,
    side_files,
    transposed_by_names,
    without_packed_layer,
    write_packed_folder,
)
from bitplan.files.round_with_evidence import WeightEvidence, evidence_file, evidence_for, open_evidence
from bitplan.files.safetensors_tensors import NativeTensors
from bitplan.files.schemes.tensors import SchemeTensors
from bitplan.files.tensor_file import Container, TensorFile, TensorSpec, Writer
from bitplan.formats import get_format
from bitplan.formats.elements import wider_types
from bitplan.formats.format import Format
from bitplan.formats.input_formats import require_scale
from bitplan.plan import Plan
from bitplan.plan.format_choices import Wanted, give_inputs, refuse_inputs_of_experts
from bitplan.plan.kv_formats import KVFormats
from bitplan.plan.manifest import needs_base
from bitplan.plan.names import listed
from bitplan.plan.plan import Planned
from bitplan.plan.structure.families import split_expert

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.files.tensor_recipes import FolderModel
    from bitplan.formats import Encoded
    from bitplan.formats.codec import NonFinite
    from bitplan.formats.quantization_error import ErrorReport
    from bitplan.formats.scale_rules import ScaleRule

MOST_NAMES_SHOWN = 6
# Errors of a tensor are counted over this many of its numbers, evenly spread, in a tenth of the time of encoding it.
MOST_COUNTED = 2**18
# Absmax saturates no number, the floor rule of mxfp4 about 0.7% of Gaussian weights. 4-bit formats reach 15 dB or more.
WARN_SATURATED_SHARE = 0.05
WARN_SQNR_DB = 10.0
WARN_ZERO_SHARE = 0.6  # ternary absmean makes zeros of 31% of Gaussian weights
NO_STATISTICS = "no statistics"


@dataclass
class QuantizeReport:
    """The report of a quantization: a row for every tensor, and notes.

    The row of an encoded tensor has `sqnr_db` (None: exact), and the shares of the `counted` numbers that saturated and
    that became zero; in other rows these are None. With evidence, `rounding` says what was minimised, and the error
    before and after.
    """

    source: str
    output: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def unseen(self) -> list[str]:
        """Names of tensors that were encoded without statistics, although the call had some for other tensors."""
        return [row["name"] for row in self.rows if row.get("rounding") == NO_STATISTICS]

    @property
    def bytes_before(self) -> int:
        return sum(row["bytes_before"] for row in self.rows)

    @property
    def bytes_after(self) -> int:
        return sum(row["bytes_after"] for row in self.rows)

    @property
    def warnings(self) -> list[str]:
        """A line for each format in which tensors lost more than in a suitable format."""
        encoded: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            if row["counted"]:
                encoded.setdefault(row["to"], []).append(row)
        lost = [_warning(fmt, rows, lossy) for fmt, rows in encoded.items() if (lossy := [*filter(_is_lossy, rows)])]
        if self.unseen:
            listed = ", ".join(self.unseen[:MOST_NAMES_SHOWN]) + (
                ", ..." if len(self.unseen) > MOST_NAMES_SHOWN else ""
            )
            lost.append(f"{len(self.unseen)} tensors have no statistics in the evidence, and are as without: {listed}")
        lost += self.notes
        if all(row["from"] == row["to"] for row in self.rows):
            lost.append("every tensor is as it was: none was put into another format; `bitplan inspect` shows them")
        return lost

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "output": self.output,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "warnings": self.warnings,
            "tensors": self.rows,
        }


def _is_lossy(row: dict[str, Any]) -> bool:
    is_noisy = row["sqnr_db"] is not None and row["sqnr_db"] < WARN_SQNR_DB
    is_clipped = row["saturated_share"] > WARN_SATURATED_SHARE
    return bool(is_noisy or is_clipped or row["underflowed_share"] > WARN_ZERO_SHARE)


def _warning(fmt: str, rows: list[dict[str, Any]], lossy: list[dict[str, Any]]) -> str:
    def figures(row: dict[str, Any]) -> str:
        sqnr = "exact" if row["sqnr_db"] is None else f"SQNR {row['sqnr_db']:.1f} dB"
        zeros = f"{100 * row['underflowed_share']:.1f}% to zero"
        return f"{row['name']} ({100 * row['saturated_share']:.1f}% saturated, {zeros}, {sqnr})"

    listed = ", ".join(map(figures, lossy[:MOST_NAMES_SHOWN])) + (", ..." if len(lossy) > MOST_NAMES_SHOWN else "")
    advice = "give them another format or scale rule (scale_rule='mse'), or leave them as they are (keep)"
    if get_format(fmt).block.is_tensor and not get_format(fmt).is_cast:
        advice = f"{fmt} has one scale for a whole tensor; {advice}"
    return f"{fmt}: {len(lossy)} of {len(rows)} tensors lost much: {listed}; {advice}"


OnTensor = Callable[[TensorSpec], None]


@dataclass(frozen=True)
class QuantizeOptions:
    """The less common options of `quantize_file`.

    shard_bytes  for a Hugging Face folder: the most bytes in a file of weights
    on_tensor    is called with every tensor of the source that is done
    kv           for a folder: formats in which its model keeps keys and values, "int8:int4"; None: what a plan says
    dask         the address of a Dask scheduler, whose workers encode the tensors, to the same bytes; they open the
                 source, and the evidence, under the paths that they have here
    """

    shard_bytes: int = SHARD_BYTES
    on_tensor: OnTensor | None = None
    kv: KVFormats | str | None = None
    dask: str | None = None


@keywords_in(QuantizeOptions, written="dict")
def quantize_file(
    source: str | Path,
    output: str | Path,
    fmt: Wanted,
    *,
    keep: Sequence[str] = (),
    only: Sequence[str] = (),
    scale_rule: ScaleRule | None = None,
    pad: Literal["zero"] | None = None,
    nonfinite: NonFinite = "error",
    evidence: str | Path | None = None,
    inputs: str | None = None,
    force: bool = False,
    options: QuantizeOptions | Mapping[str, Any] | None = None,
) -> QuantizeReport:
    """Write `source` (safetensors, sharded or not, or GGUF, or poly's JSON) to `output` in a format, or by a plan.

    fmt          a format, a mapping of names to formats, a manifest or a plan, as `bitplan.choose_formats` takes it
    keep, only   names or shell patterns, of tensors or of modules
    evidence     statistics of the inputs: evidence.safetensors or imatrix.gguf; the same bytes, better numbers
    inputs       for a folder: the format that all its packed layers round their inputs to (`bitplan.round_inputs`), or
                 "keep"; None: the plan's
    force        replace an existing folder
    options      fields of `QuantizeOptions`: {"shard_bytes": 10**9, "kv": "int8:int4"}

    The suffix of `output` says what is written; .gguf needs a GGUF source, whose names and metadata it keeps. Without a
    suffix `output` is a new folder: from a Hugging Face folder (one with config.json) a whole packed model, which
    `bitplan.load_packed` loads; from other sharded sources the same shards. Peak memory: the largest tensor in its old
    and its new form, and some megabytes.
    """
    options = options if isinstance(options, QuantizeOptions) else QuantizeOptions(**(options or {}))
    if evidence is not None and scale_rule is not None:
        raise StoreError(f"{evidence}: evidence chooses the scales, and so does scale_rule={scale_rule!r}; give one")
    with Quantization(
        source,
        output,
        fmt,
        keep=keep,
        only=only,
        pad=pad,
        inputs=inputs,
        kv=options.kv,
        reads=[] if evidence is None else [evidence_file(evidence)],
        force=force or container_for(output) is not None,
        shard_bytes=options.shard_bytes,
    ) as prepared:
        return prepared.write(
            evidence, scale_rule=scale_rule, nonfinite=nonfinite, on_tensor=options.on_tensor, dask=options.dask
        )


class Quantization(Closing):
    """A prepared quantization: the source is open, every format is known, and nothing is written yet.

    Everything that names, shapes and configs show to be impossible is refused here, without torch where no tensor needs
    other names.

    inputs   for a folder: the format that all its packed layers round their inputs to; None: the plan's
    kv       for a folder: the formats in which its model keeps keys and values
    reads    files beside the source that are read, so that the output is none of them
    force    the output may exist
    """

    def __init__(
        self,
        source: str | Path,
        output: str | Path,
        fmt: Wanted,
        *,
        keep: Sequence[str] = (),
        only: Sequence[str] = (),
        pad: Literal["zero"] | None = None,
        inputs: str | None = None,
        kv: KVFormats | str | None = None,
        reads: Sequence[Path] = (),
        force: bool = False,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.report = QuantizeReport(str(source), str(output))
        self._output, self._force, self._shard_bytes = Path(output), force, shard_bytes
        container = container_for(output)
        self._kv = KVFormats.parse(kv, "quantize_file") if isinstance(kv, str) else kv
        if self._kv is None and isinstance(fmt, Plan):
            self._kv = KVFormats.of_plan(fmt)
        if self._kv is not None and container is not None:
            self.report.notes.append(f"{output}: a file of weights says nothing of keys and values; a folder does")
        with ExitStack() as opened:
            self._file = file = opened.enter_context(_open(source, is_folder=container is None))
            self._stamps, read = stamps_of(file.files), [*file.files, *reads]
            if container is None:
                if not is_model_folder(file.folder) and not (isinstance(file, NativeTensors) and len(file.shards) > 1):
                    require_container(output)  # which refuses it: one file alone makes no folder
                check_packed_output(output, inputs=read, force=force)
            else:
                container.check_output(output, inputs=read, force=force)
                container.check_source(file, self._output)
            is_model = container is None and is_model_folder(file.folder)
            described = _described(file) if is_model else None
            transposed = [] if container is not None and not container.holds_transposed else transposed_by_names(file)
            if described is not None and (seen := described.transposed()) is not None:
                transposed = [name for name in transposed if len(file.specs[name].shape) > 2] + seen
            self._packed_shapes = packed_shapes(file, transposed)
            plan = plan_for_file(
                file,
                _fitted(fmt, file),
                keep=keep,
                only=only,
                pad=pad is not None,
                output=output,
                packed_shapes=self._packed_shapes,
            )
            if described is not None:
                plan = self._runnable(plan, described)
            self.report.notes += _packed_before(file, plan)
            plan = give_inputs(plan, inputs, str(source))
            refuse_inputs_of_experts(plan, str(source))
            for name, rounded in () if is_model else plan.inputs.items():
                raise StoreError(
                    f"{output}: only a model's folder, with config.json, says that inputs are rounded; {name} has "
                    f"{rounded}: write a folder, or leave inputs as they are",
                    settings={"inputs": "keep"},
                )
            plan.require_whole(str(source), rounds_inputs=True)
            self.plan = plan
            self._contents = self._folder_contents() if container is None else None
            if container is not None:
                _require_held(self._outputs(list(file.specs)), container, output)
            if described is not None:
                described.require_whole(", or give an OUTPUT that ends in .safetensors: it holds any tensors")
                self.report.notes += described.notes
            if is_model:
                self.report.notes += _left_behind(file, rounds=inputs is not None or bool(plan.inputs), kv=self._kv)
            opened.pop_all()

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors of the source."""
        return sum(spec.nbytes for spec in self._file.specs.values())

    def close(self) -> None:
        self._file.close()

    def give_scales(self, inputs: Mapping[str, str | None]) -> None:
        """Take other formats of inputs: static ones with scales that a text has shown."""
        self.plan = self.plan.with_inputs(inputs)
        self._contents = self._folder_contents()

    def write(
        self,
        evidence: str | Path | None = None,
        *,
        scale_rule: ScaleRule | None = None,
        nonfinite: NonFinite = "error",
        on_tensor: OnTensor | None = None,
        dask: str | None = None,
    ) -> QuantizeReport:
        """Read, encode and write every tensor, one at a time; the output gets its name when it is whole.

        dask   the address of a Dask scheduler, whose workers read and encode them
        """
        for name, rounded in self.plan.inputs.items():
            require_scale(rounded, f"{self.report.source}: {name}")
        with ExitStack() as opened:
            self._on_tensor = on_tensor
            how = Conversion(self.plan.pad, scale_rule, nonfinite, frozenset(self._packed_shapes))
            self._encoder = TensorEncoder(self._file, how, evidence, opened)
            if self._encoder.evidence is not None:
                packed = (name for name in self._file.specs if not get_format(self.plan[name].format).is_cast)
                self._encoder.evidence.require_use(packed)
                self.report.notes += self._encoder.evidence.notes
            used = None if evidence is None else evidence_file(evidence)
            self._cluster = None if dask is None else opened.enter_context(Cluster(dask))
            where, is_folder = Path(self.report.source).absolute(), self._contents is not None
            self._opening = partial(
                open_encoder, where, file_sizes(self._file.files), is_folder, how, used and used.absolute()
            )
            stamps = {**self._stamps, **stamps_of([] if used is None else [used])}
            source, contents = Path(self.report.source), self._contents
            certificate = certificate_of(
                self.plan,
                source,
                self._file.files,
                evidence=used,
                scale_rule=scale_rule,
                proof=proof_of(source, self._file.certificate, self._file.files),
                config=None if contents is None else contents.config,
                holds_plan=contents is None or contents.plan is None,
            )
            if contents is not None:
                contents = replace(contents, inputs=stamps, certificate=certificate, source=self._file.folder)
                write_packed_folder(self._output, contents, self._write_each, force=self._force)
            else:
                self._write_file(stamps, json.dumps(certificate, separators=(",", ":")))
        return self.report

    def _write_file(self, stamps: Stamps, certificate: str) -> None:
        file, container = self._file, require_container(self._output)
        tied = file.tied if container.holds_ties else {}
        outputs = self._outputs([*file.specs, *(file.tied if not tied else ())])
        metadata = dict(file.metadata) if isinstance(file, container.file_type) else {}
        metadata |= container.certificate_entry(certificate)
        with container.write(self._output, outputs, metadata, tied) as writer:
            self._write_each(writer, outputs)
            require_unchanged(stamps)

    def _folder_contents(self) -> FolderContents:
        file = self._file
        if is_model_folder(file.folder):
            config = read_config(file.folder)
            other = config.get("quantization_config")
            if other is not None and not is_packed_config(config) and not isinstance(file, SchemeTensors):
                method = other.get("quant_method") if isinstance(other, dict) else other
                raise StoreError(
                    f"{file.path}: is quantized already ({method!r:.60}), and its tensors are not plain numbers; "
                    "give the folder of the model in bfloat16 or float32"
                )
            shards = cut_shards(self._outputs(list(file.specs)), file.tied, self._shard_bytes)
            new_config = packed_config(config, self.plan, self._kv)
            return FolderContents(shards, new_config, self.plan, side_files(file.folder))
        assert isinstance(file, NativeTensors)
        return FolderContents(self._same_shards(file))

    def _same_shards(self, file: NativeTensors) -> list[Shard]:
        """Divide the output's tensors into files as the source's are divided."""
        names: dict[Path, list[str]] = {shard: [] for shard in file.shards}
        tied: dict[Path, dict[str, str]] = {shard: {} for shard in file.shards}
        for name in file.specs:
            names[file.shard_of(name)].append(name)
        for alias, name in file.tied.items():
            tied[file.shard_of(name)][alias] = name
        return [
            Shard(
                file.shard_name(shard).as_posix(),
                tuple(self._outputs(names[shard])),
                tied[shard],
                file.metadata_of(shard),
            )
            for shard in file.shards
        ]

    # ---- the plan of a folder that runs ------------------------------------------------------------------------------

    def _runnable(self, plan: Plan, described: FolderModel) -> Plan:
        """The plan with tensors unpacked that no packed layer holds, and experts in formats that layers hold."""
        file, changed = self._file, dict(plan.entries)
        packed = [name for name in file.specs if is_packed_by(plan, name)]
        unpackable = dict.fromkeys(without_packed_layer(packed, read_config(file.folder)), "")
        unpackable |= {name: f" ({reason})" for name, reason in described.unpackable(set(packed)).items()}
        if unpacked := [name for name in packed if name in unpackable]:
            stored = plan_of_stored(file, unpacked)
            for name in unpacked:
                entry = replace(stored.entries[name], role=changed[name].role)
                changed[name] = _with_reason(entry, f"no packed layer holds it{unpackable[name]}, so it stays")
            self.report.notes.append(
                f"{len(unpacked)} tensors stay as they are, for no packed layer holds them (convolutions, experts of "
                "other gating, nn.MultiheadAttention, weights that a model's code reads itself): "
                f"{listed(unpacked, MOST_NAMES_SHOWN)}; a .safetensors OUTPUT holds them packed"
            )
        unstackable = {
            name: "int8_row" if file.specs[name].shape[-1] % 32 else "mxfp4"
            for name in packed
            if name not in unpacked and split_expert(name) and needs_base(plan[name].format)
        }
        for name, fmt in unstackable.items():
            reason = f"experts are packed as one weight, and {plan[name].format} has a factor for each"
            changed[name] = _with_reason(changed[name], reason, format=fmt)
        if unstackable:
            first, taken = next(iter(unstackable)), " and ".join(sorted(set(unstackable.values())))
            self.report.notes.append(
                f"{len(unstackable)} experts are in {taken}: {plan[first].format} has a factor for each tensor, and a "
                f"packed layer holds the experts as one weight: {listed(list(unstackable), MOST_NAMES_SHOWN)}; "
                f"a .safetensors OUTPUT holds them in {plan[first].format}"
            )
        return Plan(changed, padding=plan.padding) if unpacked or unstackable else plan

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def _is_turned(self, name: str) -> bool:
        """Whether a tensor is packed here as the transpose of the model's."""
        return name in self._packed_shapes and is_packed_by(self.plan, name)

    def _outputs(self, names: Sequence[str]) -> list[TensorSpec]:
        outputs = []
        for name in names:
            spec, entry = self._file.spec(name), self.plan.entries[name]
            if entry.stored is not None:  # a packed tensor that is left alone stays packed
                fmt = spec.format if spec.encoded else None
                outputs.append(TensorSpec.of(name, spec.shape, fmt, spec.dtype, transposed=spec.transposed))
                continue
            self._file.require_numbers(spec)
            is_turned = self._is_turned(name)
            shape = self._packed_shapes[name] if is_turned else spec.shape_in_model
            outputs.append(TensorSpec.of(name, shape, entry.choice.format, spec.dtype, transposed=is_turned))
        return outputs

    def _write_each(self, writer: Writer, outputs: Sequence[TensorSpec]) -> None:
        for output, (encoded, lost) in zip(outputs, self._encoded(outputs), strict=True):
            spec = self._file.spec(output.name)
            writer.write(output.name, encoded)
            del encoded
            self.report.rows.append(
                {
                    "name": output.name,
                    "shape": list(spec.shape),
                    "from": spec.format,
                    "to": output.format if output.encoded else spec.format,
                    "reason": self.plan[output.name].reason,
                    "bytes_before": spec.nbytes,
                    "bytes_after": output.nbytes,
                    **lost,
                }
            )
            if self._on_tensor:
                self._on_tensor(spec)

    def _encoded(self, outputs: Sequence[TensorSpec]) -> Iterator[tuple[Tensor | Encoded, dict[str, Any]]]:
        """The tensors to write, with their errors; what is copied as it is does not go through a cluster."""
        jobs = [(output.name, None if output.fmt is None else output.fmt.name) for output in outputs]
        if self._cluster is None:
            yield from map(self._encoder.make, jobs)
            return
        results = self._cluster.map(self._opening, [job for job in jobs if not self._encoder.copies(job)])
        for job in jobs:
            yield self._encoder.make(job) if self._encoder.copies(job) else next(results)


@dataclass(frozen=True)
class Conversion:
    """How all tensors of a quantization are encoded; `transposed` names those that are packed as their transpose."""

    pad: Literal["zero"] | None
    scale_rule: ScaleRule | None
    nonfinite: NonFinite
    transposed: frozenset[str]


class TensorEncoder:
    """Reads tensors of a file and encodes them: the one of a quantization, or of a worker that has a part of it."""

    def __init__(
        self, file: TensorFile, how: Conversion, evidence: str | Path | None, opened: ExitStack | None = None
    ) -> None:
        self._file, self._how, self._opened = file, how, opened or ExitStack()
        statistics = None if evidence is None else self._opened.enter_context(open_evidence(evidence))
        self.evidence: WeightEvidence | None = None
        if statistics is not None:
            self.evidence = _evidence_for(statistics, file, how.transposed)

    @property
    def files(self) -> Sequence[Path]:
        return self._file.files

    def close(self) -> None:
        self._opened.close()
        self._file.close()

    def copies(self, job: tuple[str, str | None]) -> bool:
        """Whether a job (tensor, format) copies the tensor's bytes: no format is wanted, or it has it already."""
        name, fmt = job
        spec = self._file.spec(name)
        return fmt is None or (spec.encoded and spec.format == fmt and spec.transposed == self._turns(name, fmt))

    def _turns(self, name: str, fmt: str) -> bool:
        return name in self._how.transposed and not get_format(fmt).is_cast

    def make(self, job: tuple[str, str | None]) -> tuple[Tensor | Encoded, dict[str, Any]]:
        """Encode a job's (name, format), or read it as it is; returns tensor and figures for the report's row."""
        from bitplan.formats.codec import finite, readable
        from bitplan.formats.dispatch import encode
        from bitplan.formats.quantization_error import error_report, sample

        file, how, (name, fmt_name) = self._file, self._how, job
        if fmt_name is None or self.copies(job):
            return file.read(name), _lost(None)
        fmt, where = get_format(fmt_name), f"{file.path}: {name}"
        numbers = file.read_float(name)
        if self._turns(name, fmt_name):
            numbers = numbers.mT.contiguous()
        figures: dict[str, Any] = {}
        owner = file.tied.get(name, name)
        if fmt.is_cast:
            encoded = _cast(finite(numbers, how.nonfinite, where), fmt, where)
        elif self.evidence is not None and self.evidence.has(owner):
            numbers_ = finite(numbers, how.nonfinite, where)
            encoded, rounding = self.evidence.round(owner, numbers_, fmt, pad=how.pad, where=where)
            figures = {"rounding": rounding.to_dict()}
        else:
            encoded = encode(numbers, fmt, scale_rule=how.scale_rule, pad=how.pad, nonfinite=how.nonfinite, name=where)
            figures = {} if self.evidence is None else {"rounding": NO_STATISTICS}
        some, part = sample(numbers, encoded, MOST_COUNTED)
        return encoded, _lost(error_report(finite(readable(some, where), how.nonfinite, where), part)) | figures


def open_encoder(
    source: Path, sizes: Mapping[str, int], is_folder: bool, how: Conversion, evidence: Path | None
) -> TensorEncoder:
    """Make the encoder of a cluster's worker; an error if its files are not of `sizes`."""
    return opened_as_here(source, sizes, lambda: TensorEncoder(_open(source, is_folder=is_folder), how, evidence))


def _open(source: str | Path, *, is_folder: bool) -> TensorFile:
    """Open the source; with `is_folder` its tensors have the names of the model."""
    if not is_folder or not is_gguf(source):
        return open_tensors(source)
    from bitplan.files.engines.gguf_source import open_model

    return open_model(source, with_tokenizer=True)


def _described(file: TensorFile) -> FolderModel:
    from bitplan.files.tensor_recipes import FolderModel

    return FolderModel.of(file, file.folder)


def _require_held(outputs: Sequence[TensorSpec], container: Container, output: str | Path) -> None:
    transposed = [spec.name for spec in outputs if spec.transposed]
    if transposed and not container.holds_transposed:
        raise StoreError(
            f"{output}: {listed(transposed, MOST_NAMES_SHOWN)}: packed as the transpose of the model's, which a "
            f"{container.suffix} file cannot say; write a folder or a .safetensors file"
        )


def _fitted(fmt: Wanted, file: TensorFile) -> Wanted:
    """Return `fmt`; a plan over other names than the file's is renamed to the file's."""
    if not isinstance(fmt, Plan) or fmt.keys() == {*file.specs, *file.tied}:
        return fmt
    from bitplan.files.engines.gguf_source import fit_names

    return fit_names(fmt, file)


def _evidence_for(statistics: EvidenceFile, file: TensorFile, transposed: Collection[str]) -> WeightEvidence:
    """Statistics for a file's tensors, under its own names or, where it has none of them, under GGUF's."""
    if not statistics.names.isdisjoint((*file.specs, *file.tied)):
        return evidence_for(statistics, file, transposed=transposed)
    from bitplan.files.engines.gguf_source import evidence_of

    return evidence_of(statistics, file)


def _with_reason(entry: Planned, reason: str, **changes: Any) -> Planned:
    return replace(entry, choice=replace(entry.choice, reason=reason, **changes))


def _left_behind(file: TensorFile, *, rounds: bool, kv: KVFormats | None) -> list[str]:
    """What a packed folder says of inputs, keys and values, where nothing is said of them for its new folder."""
    config, after = read_config(file.folder), "and the new folder leaves them as they are; ask for formats of them"
    inputs, kept = shown_inputs(config), folder_kv(config, str(file.folder))
    notes = [] if rounds or inputs is None else [f"{file.folder} rounds inputs of its layers ({inputs}), {after}"]
    return notes + (
        [] if kv is not None or kept is None else [f"{file.folder} keeps keys and values in {kept}, {after}"]
    )


def _packed_before(file: TensorFile, plan: Plan) -> list[str]:
    """A note about tensors that are packed again: their errors are counted against numbers that were rounded before."""
    again = [
        spec
        for name, spec in file.specs.items()
        if spec.encoded and not get_format(spec.format).is_cast and is_packed_by(plan, name)
        if spec.format != plan[name].format
    ]
    if not again:
        return []
    formats = ", ".join(sorted({spec.format for spec in again}))
    return [
        f"{len(again)} tensors were packed already ({formats}): their errors here are against those rounded numbers, "
        "not the model's own; quantize the model that they were made from"
    ]


def _lost(errors: ErrorReport | None) -> dict[str, Any]:
    if errors is None or not errors.count:
        return dict.fromkeys(("sqnr_db", "saturated_share", "underflowed_share", "counted"))
    return {
        "sqnr_db": errors.to_dict()["sqnr_db"],
        "saturated_share": errors.saturated / errors.count,
        "underflowed_share": errors.underflowed / errors.count,
        "counted": errors.count,
    }


def _cast(numbers: Tensor, fmt: Format, where: str) -> Encoded:
    """Encode by a plain cast; raises where finite numbers would become infinite."""
    from bitplan.formats.dispatch import encode

    encoded = encode(numbers, fmt)
    if lost := int(encoded.data.isinf().sum()):
        raise FormatError(
            f"{where}: {lost} of {numbers.numel()} numbers are beyond the range of {fmt.name}; "
            f"choose {wider_types(fmt.name)}"
        )
    return encoded

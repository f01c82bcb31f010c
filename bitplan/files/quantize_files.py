"""Quantizes a file into another, one tensor at a time.

A checkpoint may be far larger than memory: each tensor is read, encoded, written and dropped. The
output takes its final name only when it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from bitplan.base.errors import FormatError, StoreError
from bitplan.base.records import require_unchanged, stamps_of
from bitplan.files.engines.gguf_names import evidence_of, fit_names
from bitplan.files.engines.gguf_source import open_model
from bitplan.files.headers import is_packed_by, plan_for_file
from bitplan.files.open_files import container_for, open_tensors, require_container
from bitplan.files.packed_folder import (
    SHARD_BYTES,
    FolderContents,
    Shard,
    check_packed_output,
    cut_shards,
    is_model_folder,
    is_packed_config,
    packed_config,
    read_config,
    shapes_of_transposed,
    side_files,
    without_packed_layer,
    write_packed_folder,
)
from bitplan.files.round_with_evidence import WeightEvidence, open_evidence
from bitplan.files.safetensors_tensors import NativeTensors
from bitplan.files.schemes.tensors import SchemeTensors
from bitplan.files.tensor_file import Promise, TensorFile, TensorSpec, Writer
from bitplan.formats import Encoded, Format, get_format
from bitplan.formats.codec import NonFinite, finite, readable
from bitplan.formats.dispatch import encode
from bitplan.formats.dtypes import wider_types
from bitplan.formats.input_formats import input_format
from bitplan.formats.quantization_error import ErrorReport, error_report, sample
from bitplan.formats.scale_rules import ScaleRule
from bitplan.plan import Plan
from bitplan.plan.format_choices import Wanted
from bitplan.plan.names import listed

MOST_NAMES_SHOWN = 6
# Errors of a tensor are counted over this many of its numbers, evenly spread, in a tenth of the time of encoding it.
MOST_COUNTED = 2**18
# Absmax saturates no number, the floor rule of mxfp4 about 0.7% of Gaussian weights. 4-bit formats reach 15 dB or more.
WARN_SATURATED_SHARE = 0.05
WARN_SQNR_DB = 10.0
WARN_ZERO_SHARE = 0.6  # ternary absmean makes zeros of 31% of Gaussian weights
NO_STATISTICS = "no statistics"
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class QuantizeOptions:
    """The format of each tensor, and how it is encoded."""

    plan: Plan
    scale_rule: ScaleRule | None = None
    pad: Literal["zero"] | None = None
    nonfinite: NonFinite = "error"
    evidence: WeightEvidence | None = None
    transposed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # what is packed as its transpose

    def choose(self, name: str) -> tuple[Format | None, str]:
        """The format of a tensor (None: leave it as it is), and the reason."""
        entry = self.plan.entries[name]
        fmt = None if entry.stored is not None else get_format(entry.choice.format)
        return fmt, entry.choice.reason


@dataclass
class QuantizeReport:
    """What happened to every tensor.

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
        """Tensors that were encoded without statistics, where evidence was given."""
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
    shard_bytes: int = SHARD_BYTES,
    on_tensor: OnTensor | None = None,
) -> QuantizeReport:
    """Write `source` (safetensors, sharded or not, or GGUF, or poly's JSON) to `output` in a format, or by a plan.

    fmt          a format, a mapping of names to formats, a manifest or a plan, as `bitplan.choose_formats` takes it
    keep, only   names or shell patterns, of tensors or of modules
    evidence     statistics of the inputs: evidence.safetensors or imatrix.gguf; the same bytes, better numbers
    inputs       for a folder: the format that its packed layers round their inputs to (`bitplan.round_inputs`)
    force        replace an existing folder
    shard_bytes  for a Hugging Face folder: the most bytes in a file of weights

    The suffix of `output` says what is written; .gguf needs a GGUF source, whose names and metadata it keeps. Without a
    suffix `output` is a new folder: from a Hugging Face folder (one with config.json) a whole packed model, which
    `bitplan.load_packed` loads; from other sharded sources the same shards. Peak memory: the largest tensor in its old
    and its new form, and some megabytes.
    """
    if evidence is not None and scale_rule is not None:
        raise StoreError(f"{evidence}: evidence chooses the scales, and so does scale_rule={scale_rule!r}; give one")
    rounded = input_format(inputs, "quantize_file")
    if rounded is not None and container_for(output) is not None:
        raise StoreError(f"{output}: a file of weights says nothing of inputs in {rounded}; write a folder")
    report = QuantizeReport(str(source), str(output))
    with ExitStack() as opened:
        is_folder = container_for(output) is None
        file = opened.enter_context(open_model(source, with_tokenizer=True) if is_folder else open_tensors(source))
        statistics = None if evidence is None else opened.enter_context(open_evidence(evidence))
        wanted = fit_names(fmt, file)

        def planned(keep: Sequence[str]) -> Plan:
            padded = pad is not None
            return plan_for_file(file, wanted, keep=keep, only=only, pad=padded, output=output, packs_folder=is_folder)

        plan = planned(keep)
        if unpacked := _without_layer(file, plan, output):
            plan = planned((*keep, *unpacked))
            plan = _with_reason(plan, unpacked, "no packed layer holds it, so it stays")
            report.notes.append(
                f"{len(unpacked)} tensors stay as they are, for no packed layer holds them (transposed matrices, "
                "nn.MultiheadAttention, weights that a model's code reads itself): "
                f"{listed(unpacked, MOST_NAMES_SHOWN)}; a .safetensors OUTPUT holds them packed"
            )
        if unstackable := _unstackable(file, plan, output):
            report.notes.append(_other_format(unstackable, plan))
            plan = _with_formats(plan, unstackable)
        report.notes += _packed_before(file, plan)
        plan.require_whole(str(source))
        shapes = shapes_of_transposed(file) if is_folder else {}
        transposed = {name: shape for name, shape in shapes.items() if is_packed_by(plan, name)}
        known = None if statistics is None else evidence_of(statistics, file)
        if known is not None:
            known.require_use(name for name in file.specs if not get_format(plan[name].format).is_cast)
        options = QuantizeOptions(plan, scale_rule, plan.pad, nonfinite, known, transposed)
        report.notes += [] if known is None else known.notes
        sources = [*file.files, *([] if statistics is None else [statistics.path])]
        stamps = stamps_of(sources)
        contents = _folder_contents(file, options, shard_bytes, rounded) if is_folder else None
        if rounded is not None and (contents is None or contents.config is None):
            raise StoreError(f"{output}: only a model's folder, with config.json, says that inputs are in {rounded}")
        if contents is not None:
            check_packed_output(output, inputs=sources, force=force)
            write_packed_folder(
                output,
                replace(contents, inputs=stamps),
                lambda writer, promises: _quantize_each(file, promises, writer, options, report, on_tensor),
                force=force,
            )
            return report
        container = require_container(output)
        container.check_output(output, inputs=sources)
        container.check_source(file, Path(output))
        tied = file.tied if container.holds_ties else {}
        promises = _promises(file, [*file.specs, *(file.tied if not tied else ())], options)
        metadata = file.metadata if isinstance(file, container.file_type) else {}
        with container.write(Path(output), promises, metadata, tied) as writer:
            _quantize_each(file, promises, writer, options, report, on_tensor)
            require_unchanged(stamps)
    return report


def _folder_contents(
    file: TensorFile, options: QuantizeOptions, shard_bytes: int, inputs: str | None
) -> FolderContents | None:
    """The contents of the output folder; None if the output is a single file."""
    is_scheme = isinstance(file, SchemeTensors)
    if is_model_folder(file.folder):
        config = read_config(file.folder)
        said = config.get("quantization_config")
        if said is not None and not is_packed_config(config) and not is_scheme:
            method = said.get("quant_method") if isinstance(said, dict) else said
            raise StoreError(
                f"{file.path}: is quantized already ({method!r:.60}), and its tensors are not plain numbers; "
                "give the folder of the model in bfloat16 or float32"
            )
        shards = cut_shards(_promises(file, list(file.specs), options), file.tied, shard_bytes)
        said = packed_config(config, options.plan, inputs)
        return FolderContents(shards, said, options.plan, side_files(file.folder))
    if not isinstance(file, NativeTensors) or len(file.shards) < 2:
        return None
    return FolderContents(_same_shards(file, options))


def _without_layer(file: TensorFile, plan: Plan, output: str | Path) -> list[str]:
    """Tensors that the plan packs and no packed layer can hold, if the output is a model's folder."""
    if container_for(output) or not is_model_folder(file.folder):
        return []
    packed = [
        name for name in file.specs if plan.entries[name].stored is None and not get_format(plan[name].format).is_cast
    ]
    return without_packed_layer(packed, read_config(file.folder))


def _with_reason(plan: Plan, names: Sequence[str], reason: str) -> Plan:
    """The same plan with another reason for these tensors."""
    changed = dict(plan.entries)
    for name in names:
        changed[name] = replace(changed[name], choice=replace(changed[name].choice, reason=reason))
    return Plan(changed, padding=plan.padding)


def _unstackable(file: TensorFile, plan: Plan, output: str | Path) -> dict[str, str]:
    """Separate experts in a format with a factor for each tensor, and another format for them, in a model's folder.

    A packed layer holds the experts of a layer as one weight, which has one factor.
    """
    if container_for(output) or not is_model_folder(file.path):
        return {}
    found = {}
    for name, spec in file.specs.items():
        scales = get_format(plan[name].format).scales
        if _EXPERT.search(name) and plan.entries[name].stored is None and scales is not None and scales.needs_base:
            found[name] = "int8_row" if spec.shape[-1] % 32 else "mxfp4"
    return found


def _other_format(unstackable: Mapping[str, str], plan: Plan) -> str:
    first = next(iter(unstackable))
    taken = " and ".join(sorted(set(unstackable.values())))
    return (
        f"{len(unstackable)} experts are in {taken}: {plan[first].format} has a factor for each tensor, and a packed "
        f"layer holds the experts as one weight: {listed(list(unstackable), MOST_NAMES_SHOWN)}; "
        f"a .safetensors OUTPUT holds them in {plan[first].format}"
    )


def _with_formats(plan: Plan, formats: Mapping[str, str]) -> Plan:
    """The same plan with other formats for experts, which are packed as one weight."""
    changed = dict(plan.entries)
    for name, fmt in formats.items():
        reason = f"experts are packed as one weight, and {plan[name].format} has a factor for each"
        changed[name] = replace(changed[name], choice=replace(changed[name].choice, format=fmt, reason=reason))
    return Plan(changed, padding=plan.padding)


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


def _same_shards(file: NativeTensors, options: QuantizeOptions) -> list[Shard]:
    """The same shards as in the source."""
    names: dict[Path, list[str]] = {shard: [] for shard in file.shards}
    tied: dict[Path, dict[str, str]] = {shard: {} for shard in file.shards}
    for name in file.specs:
        names[file.shard_of(name)].append(name)
    for alias, name in file.tied.items():
        tied[file.shard_of(name)][alias] = name
    return [
        Shard(
            file.shard_name(shard).as_posix(),
            tuple(_promises(file, names[shard], options)),
            tied[shard],
            file.metadata_of(shard),
        )
        for shard in file.shards
    ]


def _quantize_each(
    file: TensorFile,
    promises: Sequence[Promise],
    writer: Writer,
    options: QuantizeOptions,
    report: QuantizeReport,
    on_tensor: OnTensor | None,
) -> None:
    for promise in promises:
        spec = file.spec(promise.name)
        _, reason = options.choose(promise.name)
        converted, lost = _converted(file, spec, promise, options)
        writer.write(promise.name, converted)
        del converted
        report.rows.append(
            {
                "name": promise.name,
                "shape": list(spec.shape),
                "from": spec.format,
                "to": promise.fmt.name if promise.fmt else spec.format,
                "reason": reason,
                "bytes_before": spec.nbytes,
                "bytes_after": promise.nbytes,
                **lost,
            }
        )
        if on_tensor:
            on_tensor(spec)


def _converted(
    file: TensorFile, spec: TensorSpec, promise: Promise, options: QuantizeOptions
) -> tuple[Tensor | Encoded, dict[str, Any]]:
    """The tensor to write, and its errors."""
    if promise.fmt is None or _is_copied(spec, promise.fmt):
        return file.read(promise.name), _lost(None)
    where = f"{file.path}: {spec.name}"
    numbers = file.read_float(spec.name)
    if promise.name in options.transposed:
        numbers = numbers.transpose(1, 2).contiguous()
    said: dict[str, Any] = {}
    if promise.fmt.is_cast:
        encoded = _cast(finite(numbers, options.nonfinite, where), promise.fmt, where)
    elif options.evidence is not None and options.evidence.has(own := file.tied.get(spec.name, spec.name)):
        whole = finite(numbers, options.nonfinite, where)
        encoded, rounding = options.evidence.round(own, whole, promise.fmt, pad=options.pad, where=where)
        said = {"rounding": rounding.to_dict()}
    else:
        encoded = encode(
            numbers,
            promise.fmt,
            scale_rule=options.scale_rule,
            pad=options.pad,
            nonfinite=options.nonfinite,
            name=where,
        )
        said = {} if options.evidence is None else {"rounding": NO_STATISTICS}
    some, part = sample(numbers, encoded, MOST_COUNTED)
    return encoded, _lost(error_report(finite(readable(some, where), options.nonfinite, where), part)) | said


def _lost(errors: ErrorReport | None) -> dict[str, Any]:
    if errors is None or not errors.count:
        return dict.fromkeys(("sqnr_db", "saturated_share", "underflowed_share", "counted"))
    return {
        "sqnr_db": errors.to_dict()["sqnr_db"],
        "saturated_share": errors.saturated / errors.count,
        "underflowed_share": errors.underflowed / errors.count,
        "counted": errors.count,
    }


def _is_copied(spec: TensorSpec, fmt: Format) -> bool:
    """Whether a tensor is in its format already: its bytes are then copied, with their filling."""
    return spec.encoded and spec.format == fmt.name


def _cast(numbers: Tensor, fmt: Format, where: str) -> Encoded:
    """A cast that refuses to turn finite numbers into infinities."""
    encoded = encode(numbers, fmt)
    if lost := int(encoded.data.isinf().sum()):
        raise FormatError(
            f"{where}: {lost} of {numbers.numel()} numbers are beyond the range of {fmt.name}; "
            f"choose {wider_types(fmt.name)}"
        )
    return encoded


def _promises(file: TensorFile, names: Sequence[str], options: QuantizeOptions) -> list[Promise]:
    promises = []
    for name in names:
        spec = file.spec(name)
        fmt, _ = options.choose(name)
        if fmt is not None:
            file.require_numbers(spec)
        if fmt is None and spec.encoded:  # a packed tensor that is left alone stays packed
            fmt = get_format(spec.format)
        promises.append(Promise(name, options.transposed.get(name, spec.shape), fmt, spec.torch_dtype))
    return promises

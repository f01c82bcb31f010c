"""What targets that are folders share: a model's folder in, another one out, with config, tokenizer and shards.

A target says of every tensor what it becomes (`OutputTensor`) and how packed numbers lie there (`pack`). Tensors are
read, encoded and written one at a time; one that is packed already in the wanted format keeps its bits.

A plain folder is the simplest target: numbers in float32, float16 or bfloat16, for whatever reads those.

From a folder that `bitplan quantize` packed, or a GGUF file, with config and tokenizer. A packed tensor becomes the
type that is asked for, else that of the model's config, else bfloat16; a plain one keeps its type unless one is asked
for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitplan.base.errors import StoreError
from bitplan.base.records import on_failure, stamps_of
from bitplan.files.certificate import certificate_of, proof_of, written_plan
from bitplan.files.describe_files import describe_tensors
from bitplan.files.engines.gguf_source import GGUFModel, evidence_of, fit_names, open_model
from bitplan.files.engines.targets import (
    ExportReport,
    ExportRequest,
    OnBytes,
    OutputTensor,
    made_tensors,
    notes_on_inputs,
)
from bitplan.files.headers import check_model_source, is_gguf, plan_for_file
from bitplan.files.open_files import container_for
from bitplan.files.packed_folder import (
    METADATA,
    FolderContents,
    check_packed_output,
    cut_shards,
    folder_inputs,
    is_packed_config,
    read_config,
    side_files,
    unquantized_config,
    write_packed_folder,
)
from bitplan.files.round_with_evidence import WeightEvidence, evidence_file, open_evidence
from bitplan.files.schemes.tensors import SchemeTensors
from bitplan.files.tensor_file import TensorFile, TensorSpec, Writer
from bitplan.files.tensor_recipes import FolderModel
from bitplan.formats import Encoded, get_format
from bitplan.formats.codec import finite, readable
from bitplan.formats.dispatch import encode
from bitplan.formats.elements import dtype_name, wider_types
from bitplan.formats.format import Format
from bitplan.formats.input_formats import Inputs
from bitplan.plan import Plan
from bitplan.plan.format_choices import Substitutes, give_inputs
from bitplan.plan.structure.model_view import ModelView

PLAIN = ("bfloat16", "float16", "float32")
_INNER = re.compile(r"(layers|h|blocks)\.\d+\.")  # names of blocks in a model without its head
DEFAULT_TYPE = "bfloat16"
_NOT_PACKED = {"router", "embedding", "position_embedding", "norm", "convolution", "bias", "scale"}
Pack = Callable[[Encoded, "OutputTensor", str], list[Tensor]]


@dataclass(frozen=True)
class FolderSource:
    """A model that is open for reading, the plan for its tensors, and its config without keys of quantization.

    folder   where config and tokenizer lie
    notes    what a user of any output must know
    """

    file: TensorFile
    folder: Path
    config: dict[str, Any]
    plan: Plan
    notes: Sequence[str] = ()

    def format_of(self, name: str) -> tuple[Format | None, str]:
        """The format that the plan has for a tensor, None where it stays in its own type, and the reason."""
        entry = self.plan.entries[name]
        return None if entry.stored is not None else get_format(entry.choice.format), entry.choice.reason

    def unpacked(self, name: str, fmt: Format | None, reason: str) -> OutputTensor:
        """A tensor that the output holds as plain numbers: in its own type, or cast."""
        spec = self.file.spec(name)
        cast = fmt if fmt is not None and fmt.is_cast else self.wide if is_quantized(spec) else None
        dtype = spec.torch_dtype if cast is None else cast.storage
        return OutputTensor((name,), cast, reason, (TensorSpec.of(name, spec.shape_in_model, None, dtype),))

    @cached_property
    def view(self) -> ModelView:
        """What the model computes, seen in a run without numbers; the table of families where it cannot be run."""
        return describe_tensors(list(self.file.specs.values()), self.folder)

    def is_linear(self, name: str, *, or_embedding: bool = False) -> bool:
        """Whether a tensor is the weight of a layer that engines pack; routers are not, nor tables of positions."""
        others = _NOT_PACKED - ({"embedding"} if or_embedding else set())
        is_matrix = name.endswith(".weight") and len(self.file.spec(name).shape) == 2
        return is_matrix and self.view.role(name) not in others and name not in self._columns

    @cached_property
    def _columns(self) -> set[str]:
        """Names of weights that lie as [inputs, outputs], such as GPT-2's, which engines cannot pack."""
        return {linear.weight for linear in self.view.linears if linear.is_columns}

    @property
    def wide(self) -> Format:
        """The plain format of the model's type in config.json, to which quantized tensors are decoded."""
        dtype = self.config.get("dtype") or self.config.get("torch_dtype")
        return get_format(dtype if dtype in PLAIN else DEFAULT_TYPE)


def is_quantized(spec: TensorSpec) -> bool:
    """Whether the source holds codes, which the file gives packed or decoded (`gguf:Q4_K`, `awq:uint4_g64`)."""
    return spec.encoded or ":" in spec.format


def open_folder(request: ExportRequest, target: str, substitutes: Substitutes | None = None) -> FolderSource:
    """Open a model for export with the plan for it; refuses what is no model, and outputs that may not be written."""
    if request.part_bytes is not None or request.pretokenizer is not None:
        options = {"part_bytes": request.part_bytes, "pretokenizer": request.pretokenizer}
        settings = dict.fromkeys(name for name, value in options.items() if value is not None)
        raise StoreError(f"{request.output}: what is for GGUF alone was given", settings=settings)
    if container_for(request.output) is not None:
        raise StoreError(
            f"{request.output}: {target} is a folder, and {request.output.suffix} names a file; "
            f"give a folder's name, such as {request.output.with_suffix('')}"
        )
    folder = check_model_source(request.source, None)
    if request.source.is_file() and not is_gguf(request.source):
        raise StoreError(f"{request.source}: {target} is made of a model's folder or a GGUF file; give {folder}")
    file = open_model(request.source, with_tokenizer=True)
    with on_failure(file.close):
        if isinstance(file, GGUFModel):
            folder = file.folder
        config = read_config(folder)
        if "quantization_config" in config and not is_packed_config(config) and not isinstance(file, SchemeTensors):
            raise StoreError(
                f"{request.source}: is quantized in a way that bitplan does not read; "
                "export the model that it was made from"
            )
        if target != "hf":
            _refuse_names_of_a_part(file, config, request.source)
        check_packed_output(request.output, inputs=file.files, force=request.force)
        plan = plan_for_file(
            file,
            fit_names(request.formats, file),
            keep=request.keep,
            only=request.only,
            substitutes=substitutes,
            how_to_fill=None,
        )
        inputs: Inputs = request.inputs
        if inputs is None and not plan.inputs:
            inputs = folder_inputs(config, folder)
        plan = give_inputs(plan, inputs, "export")
        described = FolderModel.of(file, folder)
        described.require_whole()
    return FolderSource(file, folder, unquantized_config(config), plan, described.notes)


def _refuse_names_of_a_part(file: TensorFile, config: Mapping[str, Any], source: Path) -> None:
    """Raise where tensors have a base model's names and the config a whole one's: engines find no layer so."""
    kinds = config.get("architectures") or []
    kind = str(kinds[0]) if isinstance(kinds, list) and kinds else ""
    inner = next((name for name in file.specs if _INNER.match(name)), None)
    if inner is not None and kind.endswith(("ForCausalLM", "LMHeadModel")):
        written = "; ".join(
            f"transformers.{name}.from_pretrained({str(source)!r}).save_pretrained('WHOLE')"
            for name in (kind, "AutoTokenizer")
        )
        raise StoreError(
            f"{source}: holds {inner!r} under the name that it has inside of a {kind}, where engines find no layer; "
            f"write the whole model first: {written}"
        )


def _open_evidence(request: ExportRequest, file: TensorFile, packed: Iterable[str]) -> WeightEvidence | None:
    """Statistics under the model's names, or under those that it has in GGUF; a fault closes both files."""
    if request.evidence is None:
        return None
    with ExitStack() as opened:
        opened.callback(file.close)
        statistics = opened.enter_context(open_evidence(request.evidence))
        evidence = evidence_of(statistics, file)
        evidence.require_use(packed)
        opened.pop_all()
        return evidence


def _format_there(plan: Plan, name: str, layer: OutputTensor) -> str | None:
    """The format that a tensor gets in the output; None where both plan and engine leave it in its own type."""
    return None if layer.fmt is None and plan.entries[name].stored is not None else layer.format_there


class FolderExport:
    """A prepared export; see `bitplan.files.engines.targets`.

    config   what the output's config.json says
    pack     an Encoded, its layer, and what to call it in a message -> the tensors that the layer's promises name
    joined   tensors that the engine computes as one: formats whose scales have a base share it
    metadata what the header of every file says beside the tensors
    """

    def __init__(
        self,
        request: ExportRequest,
        target: str,
        source: FolderSource,
        layers: Sequence[OutputTensor],
        config: Mapping[str, Any],
        pack: Pack,
        joined: Sequence[Sequence[str]] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._request, self._file, self._config, self._pack = request, source.file, config, pack
        self._folder, self._stamps = source.folder, stamps_of(source.file.files)
        self._layers = {promise.name: layer for layer in layers for promise in layer.records}
        self._metadata = {**METADATA, **(metadata or {})}
        self._made: dict[str, Tensor] = {}
        self._rounded: dict[str, int] = {}
        self._joined = {name: tuple(group) for group in joined for name in group}
        self._bases: dict[tuple[str, ...], float] = {}
        written = {
            name: (_format_there(source.plan, name, layer), layer.reason) for layer in layers for name in layer.sources
        }
        self._plan = written_plan(source.plan, written, source.file.tied)
        left_out = {alias: f"is {name!r}" for alias, name in source.file.tied.items()}
        rows = [layer.row(source.file) for layer in layers]
        self.report = ExportReport(
            str(request.source), str(request.output), target, rows, left_out, notes=[*source.notes]
        )
        if not any(layer.input for layer in layers):
            self.report.notes += notes_on_inputs(source.plan, target)
        packed = [name for layer in layers if layer.is_packed for name in layer.sources]
        self._evidence = _open_evidence(request, source.file, packed)

    def write(self, on_bytes: OnBytes | None = None) -> None:
        promises = [promise for layer in dict.fromkeys(self._layers.values()) for promise in layer.records]
        shards = [replace(shard, metadata=self._metadata) for shard in cut_shards(promises, {})]
        evidence = None if self._request.evidence is None else evidence_file(self._request.evidence)
        certificate = certificate_of(
            self._plan,
            self._request.source,
            self._file.files,
            evidence=evidence,
            scale_rule=self._request.scale_rule,
            proof=proof_of(self._request.source, self._file.certificate, self._file.files),
            config=self._config,
            holds_plan=True,
        )
        contents = FolderContents(
            shards,
            self._config,
            None,
            side_files(self._folder),
            self._stamps,
            certificate=certificate,
            source=self._folder,
            target=self.report.target,
        )

        first_names = [
            layer.name for layer in dict.fromkeys(self._layers[spec.name] for shard in shards for spec in shard.tensors)
        ]
        results = made_tensors(self, self._request, first_names)

        def write_shard(writer: Writer, specs: Sequence[TensorSpec]) -> None:
            for promise in specs:
                writer.write(promise.name, self._part(promise.name, results))
                if on_bytes:
                    on_bytes(promise.nbytes, promise.name)

        written = write_packed_folder(self._request.output, contents, write_shard, force=self._request.force)
        self.report.files = [str(path) for path in written]

    def close(self) -> None:
        self._file.close()
        if self._evidence is not None:
            self._evidence.file.close()

    @property
    def files(self) -> Sequence[Path]:
        return self._file.files

    def _part(self, name: str, results: Iterator[Any]) -> Tensor:
        """One tensor of the output. Those of a layer are made when the first is asked for, and given once."""
        if name not in self._made:
            layer, (tensors, rounded) = self._layers[name], next(results)
            self._made |= dict(zip((promise.name for promise in layer.records), tensors, strict=True))
            if rounded:
                self.report.rounded[layer.name] = rounded
        return self._made.pop(name)

    def make(self, job: str) -> tuple[list[Tensor], int]:
        """Make the tensors of layer `job`, and count numbers that the output's type cannot hold exactly."""
        layer = self._layers[job]
        pieces = [self._of(layer, source) for source in layer.sources]
        tensors = pieces[0] if len(pieces) == 1 else [torch.stack(parts) for parts in zip(*pieces, strict=True)]
        return tensors, self._rounded.get(layer.name, 0)

    def _of(self, layer: OutputTensor, source: str) -> list[Tensor]:
        where, spec = f"{self._file.path}: {source}", self._file.spec(source)
        if layer.is_packed:
            assert layer.fmt is not None
            return self._pack(self._encoded(layer.fmt, source), layer, where)
        numbers = self._file.read_float(source) if spec.encoded else self._file.read(source)
        assert isinstance(numbers, Tensor)
        dtype = layer.records[0].torch_dtype
        narrow = numbers.to(dtype)
        if narrow.dtype != numbers.dtype and bool((narrow.isinf() & numbers.isfinite()).any()):
            raise StoreError(
                f"{where}: holds numbers beyond {dtype_name(dtype)}; take {wider_types(dtype_name(dtype))}"
            )
        if narrow.dtype != numbers.dtype:
            lost = int((narrow.to(numbers.dtype) != numbers).sum()) - int(numbers.isnan().sum())
            if lost:
                self._rounded[layer.name] = self._rounded.get(layer.name, 0) + lost
        return [narrow]

    def _encoded(self, fmt: Format, source: str) -> Encoded:
        where, spec = f"{self._file.path}: {source}", self._file.spec(source)
        if spec.encoded and spec.format == fmt.name and not spec.transposed:
            encoded = self._file.read(source)
            assert isinstance(encoded, Encoded)
            base = self._base(fmt, source)
            if base is not None and encoded.base is not None and float(encoded.base) != base:
                raise StoreError(
                    f"{where}: is packed with another base than the layers it is computed with; "
                    "export the model that it was made from"
                )
            return encoded
        numbers = finite(readable(self._file.read_float(source), where), self._request.nonfinite, where)
        base = self._base(fmt, source)
        if self._evidence is not None and self._evidence.has(source):
            return self._evidence.round(source, numbers, fmt, base=base, where=where)[0]
        rule = self._request.scale_rule if "absmax" in fmt.rules else None
        return encode(numbers, fmt, scale_rule=rule, base=base, name=where)

    def _base(self, fmt: Format, source: str) -> float | None:
        """The base factor of layers computed as one, the largest of theirs; None where each has its own."""
        if fmt.scales is None or not fmt.scales.needs_base or source not in self._joined:
            return None
        group = self._joined[source]
        if group not in self._bases:
            self._bases[group] = max(self._own_base(fmt, name) for name in group)
        return self._bases[group]

    def _own_base(self, fmt: Format, name: str) -> float:
        spec = self._file.spec(name)
        stored = self._file.read(name) if spec.encoded and spec.format == fmt.name else None
        encoded = stored if isinstance(stored, Encoded) else encode(self._file.read_float(name), fmt, name=name)
        assert encoded.base is not None
        return float(encoded.base)


# ---- a plain Hugging Face folder -------------------------------------------------------------------------------------


TARGET = "hf"


def prepare(request: ExportRequest) -> FolderExport:
    """Plan every tensor for a plain folder; all that can be refused is, before a weight is read."""
    if isinstance(request.formats, str | Format) and get_format(request.formats).name not in PLAIN:
        raise StoreError(
            f"{request.output}: a plain folder holds {', '.join(PLAIN)}, not {get_format(request.formats).name}; "
            "`bitplan quantize` packs one"
        )
    source = open_folder(request, TARGET)
    with on_failure(source.file.close):
        wide = _wide(request, source)
        layers = [_layer(source, name, wide) for name in source.file.specs]
    return FolderExport(
        request, TARGET, source, layers, _config(source.config, wide), lambda encoded, _layer, _where: [encoded.data]
    )


def _wide(request: ExportRequest, source: FolderSource) -> Format:
    """The plain format to which packed tensors are decoded: the one requested for all, else the model's type."""
    if isinstance(request.formats, str | Format):
        return get_format(request.formats)
    return source.wide


def _layer(source: FolderSource, name: str, wide: Format) -> OutputTensor:
    spec = source.file.spec(name)
    fmt, reason = source.format_of(name)
    if is_quantized(spec):
        chosen = fmt if fmt is not None and fmt.is_cast else wide
        return OutputTensor(
            (name,),
            chosen,
            f"unpacked from {spec.format}",
            (TensorSpec.of(name, spec.shape_in_model, None, chosen.storage),),
        )
    if fmt is not None and not fmt.is_cast:
        raise StoreError(
            f"{source.file.path}: the plan has {fmt.name} for {name!r}, and a plain folder holds {', '.join(PLAIN)}"
            "; `bitplan quantize` packs one"
        )
    return source.unpacked(name, fmt, reason)


def _config(config: dict[str, Any], wide: Format) -> dict[str, Any]:
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return {**config, key: wide.name}

"""export_model: a model in the files of another engine, by a format or a plan; a table says what became of each tensor.

A target is a module with `prepare(request) -> Prepared`: it reads headers and configs, refuses what the engine could
not load, and knows every name, format and size before a weight is read. `Prepared.write` then does the work, whole or
not at all. To add one: a module in this folder, and its line in TARGETS.

`ENGINES` are programs that read compressed-tensors folders, and the formats that each can multiply by.

Taken from the engines' own code, at the version that the table names: vLLM chooses kernels by platform in
`model_executor/kernels/linear`, those of experts in `layers/fused_moe/oracle`. vllm-cpu and transformers were run as
well (docs/engines.md); vllm-cuda was read alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from bitplan.base.errors import StoreError, did_you_mean
from bitplan.files.cluster import Cluster, Maker, file_sizes, opened_as_here
from bitplan.files.packed_folder import folder_kv, is_model_folder, read_config
from bitplan.files.tensor_file import TensorFile
from bitplan.formats import get_format
from bitplan.formats.codec import NonFinite
from bitplan.formats.format import Format
from bitplan.formats.scale_rules import ScaleRule
from bitplan.plan.format_choices import Wanted
from bitplan.plan.kv_formats import ByLayer, KVFormats
from bitplan.plan.plan import Plan
from bitplan.plan.structure.families import split_expert
from bitplan.plan.structure.model_view import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


TARGETS = {
    "gguf": "bitplan.files.engines.gguf",
    "compressed-tensors": "bitplan.files.engines.compressed_tensors",
    "mlx": "bitplan.files.engines.mlx",
    "torchao": "bitplan.files.engines.torchao",
    "hf": "bitplan.files.engines.folder",
}
_ENGINES = {"llama.cpp": "gguf", "llamacpp": "gguf", "ollama": "gguf", "vllm": "compressed-tensors"}
_ENGINES |= {"mlx-lm": "mlx", "ao": "torchao", "huggingface": "hf", "transformers": "hf", "safetensors": "hf"}
# Formats of ours that an engine's files hold, for those who must know before torch is there.
FORMATS = {
    "gguf": (
        *("q2_k_gguf", "q3_k_gguf", "q4_k_gguf", "q5_k_gguf", "q6_k_gguf", "iq4_nl_gguf", "mxfp4", "mxfp4_gguf"),
        *("q4_0_gguf", "q4_1_gguf", "q5_0_gguf", "q5_1_gguf", "q8_0_gguf"),
        *("iq4_xs_gguf", "iq3_s_gguf", "iq3_xxs_gguf", "iq2_s_gguf", "iq2_xs_gguf", "iq2_xxs_gguf"),
    ),
    "compressed-tensors": (
        *("int4_g32", "int4_g64", "int4_g128", "int8_row", "int8_g64", "int8_g128"),
        *("fp8_e4m3_row", "fp8_e4m3_b128", "mxfp8_e4m3", "mxfp4", "nvfp4"),
    ),
    "mlx": (
        *("int4_g32", "int4_g64", "int4_g128", "int8_g64", "int8_g128"),
        *("q4_0_gguf", "q4_1_gguf", "q8_0_gguf", "mxfp4", "mxfp8_e4m3"),
    ),
}
_OWN_LAYOUTS = ("compressed-tensors", "mlx")  # which have more or other parts than our formats
OnBytes = Callable[[int, str], None]


@dataclass(frozen=True)
class ExportRequest:
    """The arguments of an export: the source, the output, and how the tensors are to be written.

    formats      a format for all weights, or a plan or manifest over the source's names
    keep, only   names or shell patterns of tensors that stay, or that alone change
    evidence     statistics of the inputs, evidence.safetensors or imatrix.gguf: the same bytes, better numbers
    pretokenizer GGUF's name of how the tokenizer splits text, where its rules are none that are known
    part_bytes   GGUF: split into files of at most so many bytes of tensors
    engine       compressed-tensors: refuse what this engine of `kernels.ENGINES` has no kernel for
    inputs       compressed-tensors: the format that packed layers round their inputs to; a packed folder may say it
    dask         the address of a Dask scheduler, whose workers read and encode the tensors, to the same bytes
    """

    source: Path
    output: Path
    formats: Wanted
    keep: Sequence[str] = ()
    only: Sequence[str] = ()
    scale_rule: ScaleRule | None = None
    nonfinite: NonFinite = "error"
    evidence: Path | None = None
    pretokenizer: str | None = None
    part_bytes: int | None = None
    engine: str | None = None
    inputs: str | None = None
    force: bool = False
    dask: str | None = None


@dataclass(frozen=True)
class ExportRow:
    """A line of the export's report: which tensor was written, from which one (`source`, `before`), and why so."""

    name: str
    source: str
    shape: tuple[int, ...]
    before: str
    format: str
    reason: str
    nbytes: int


@dataclass(frozen=True)
class OutputTensor:
    """An instruction to the writer: which tensors of the source become which of the output.

    sources   one tensor, the experts of a layer in order, or none where it is computed
    fmt       None: it stays in its type
    records   what is written: one tensor, or codes, scales and what else the engine has apart
    input     the format that the engine rounds the layer's inputs to
    heads     rows are reordered within so many heads
    plus_one  norms of Gemma, which its checkpoints hold one less
    computed  its numbers, where no tensor of the source has them
    """

    sources: tuple[str, ...]
    fmt: Format | None
    reason: str
    records: tuple[TensorSpec, ...]
    input: str | None = None
    heads: int | None = None
    plus_one: bool = False
    computed: Tensor | None = None

    @property
    def name(self) -> str:
        return self.records[0].name

    @property
    def is_packed(self) -> bool:
        return self.fmt is not None and not self.fmt.is_cast

    @property
    def format_there(self) -> str:
        return self.fmt.name if self.fmt is not None else self.records[0].dtype

    def row(self, file: TensorFile) -> ExportRow:
        """This tensor's line of the export's report."""
        size, count = sum(record.nbytes for record in self.records), len(self.sources)
        if not count:
            return ExportRow(self.name, "", self.records[0].shape, "computed", self.format_there, self.reason, size)
        spec, more = file.spec(self.sources[0]), f" and {count - 1} more" if count > 1 else ""
        shape = (count, *spec.shape) if count > 1 else spec.shape
        return ExportRow(self.name, spec.name + more, shape, spec.format, self.format_there, self.reason, size)


@dataclass
class ExportReport:
    """Every tensor of the output, what of the source was left out, and what a reader should know.

    rounded   once written: tensors of plain numbers, and how many of these their type does not hold exactly
    notes     what a user of the output must know
    """

    source: str
    output: str
    target: str
    rows: list[ExportRow] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    rounded: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "nbytes": self.nbytes}


class Prepared(Protocol):
    """An export that was checked and can be written; nothing of the output exists yet, `report` says what will."""

    report: ExportReport

    def write(self, on_bytes: OnBytes | None = None) -> None: ...

    def close(self) -> None: ...


def packed_bytes(to: str | None, fmt: str, shape: tuple[int, ...]) -> int:
    """Bytes of a weight in a target's files: MLX has a bias beside every scale; None counts the format itself."""
    stored = get_format(fmt)
    if to not in _OWN_LAYOUTS or stored.is_cast:
        return stored.nbytes(shape)
    promises = importlib.import_module(TARGETS[to]).promises("", shape, stored)
    return sum(promise.nbytes for promise in promises)


def notes_on_inputs(plan: Plan, target: str) -> list[str]:
    """A note for the user if the plan rounds inputs, for a target whose files cannot say so; else an empty list."""
    if not plan.inputs:
        return []
    return [f"{target} has no word for formats of inputs: the engine takes those of {len(plan.inputs)} layers its way"]


def prepare_export(request: ExportRequest, to: str) -> Prepared:
    """Check an export to the target `to` and return it prepared; raises where it cannot be done. Nothing is written."""
    if to not in TARGETS:
        read = _ENGINES.get(to.lower())
        hint = did_you_mean(to.lower(), TARGETS) if read is None else f"; {to} reads what the target {read} writes"
        settings = {} if read is None else {"to": read}
        raise StoreError(f"no target {to!r}; there are {', '.join(TARGETS)}{hint}", settings=settings)
    if to != "compressed-tensors" and (request.engine is not None or request.inputs is not None):
        raise StoreError(
            f"{request.output}: what is for compressed-tensors alone was given, and {to} asked for",
            settings={"engine" if request.engine is not None else "inputs": None},
        )
    prepared: Prepared = importlib.import_module(TARGETS[to]).prepare(request)
    kv = kv_of_request(request)
    if kv is not None:
        prepared.report.notes.append(kv_note(to, kv))
    return prepared


class TensorExport(Prepared, Maker, Protocol):
    """An export that computes its output one tensor at a time, so that a cluster can share the work."""


def made_tensors(export: TensorExport, request: ExportRequest, names: Sequence[str]) -> Iterator[Any]:
    """Yield `export.make(name)` for each name, in order; computed by a Dask cluster if the request names one."""
    if request.dask is None:
        yield from map(export.make, names)
        return
    evidence = None if request.evidence is None else request.evidence.absolute()
    sent = replace(
        request, source=request.source.absolute(), output=request.output.absolute(), evidence=evidence, dask=None
    )
    with Cluster(request.dask) as cluster:
        yield from cluster.map(partial(_open_export, sent, export.report.target, file_sizes(export.files)), names)


def _open_export(request: ExportRequest, to: str, sizes: Mapping[str, int]) -> TensorExport:
    """Prepare the export on a worker of a cluster; an error if its files are not of `sizes`."""
    return opened_as_here(request.source, sizes, lambda: cast(TensorExport, prepare_export(request, to)))


def kv_of_request(request: ExportRequest) -> KVFormats | None:
    """The formats of keys and values that the plan has, or else the packed folder that is exported."""
    kv = KVFormats.of_plan(request.formats) if isinstance(request.formats, Plan) else None
    if kv is None and is_model_folder(request.source):
        kv = folder_kv(read_config(request.source), str(request.source))
    return kv


def kv_note(to: str, kv: KVFormats) -> str:
    """How the engine is told to keep keys and values so; most have one format for all layers, or none."""
    if to == "gguf":
        keys, values = (_llama_cpp_type(part) for part in (kv.keys, kv.values))
        flash = " -fa on" if values != "f16" else ""
        differs = isinstance(kv.keys, tuple) or isinstance(kv.values, tuple)
        one_for_all = "; it has one type for all layers: this is the widest of each" if differs else ""
        return f"keys and values in {kv}: start llama.cpp with -ctk {keys} -ctv {values}{flash}{one_for_all}"
    if to == "compressed-tensors":
        if kv.is_all("fp8_e4m3_row"):
            return "keys and values in fp8: config.json says so (kv_cache_scheme), as vllm --kv-cache-dtype fp8 does"
        return f"keys and values in {kv}: vLLM keeps them in fp8 or as they are, so config.json says nothing of them"
    return f"keys and values in {kv}: a folder for {to} says nothing of them"


def _llama_cpp_type(formats: ByLayer) -> str:
    """The type of llama.cpp's cache that holds what every layer has: 4 bits where all have, 8 where none has more."""
    names = set(formats if isinstance(formats, tuple) else (formats,))
    if None in names:
        return "f16"
    return "q4_0" if names <= {"int4_g32", "q4_0_gguf"} else "q8_0"


def export_model(
    source: str | Path,
    output: str | Path,
    to: str,
    formats: Wanted,
    **options: Any,
) -> ExportReport:
    """Write a model (a Hugging Face folder, or a file of weights that has all it needs) as `to` asks.

    The options are those of `ExportRequest`. Peak memory: the largest tensor in its old and its new form.
    """
    prepared = prepare_export(ExportRequest(Path(source), Path(output), formats, **options), to)
    try:
        prepared.write()
        return prepared.report
    finally:
        prepared.close()


def experts_in_order(file: TensorFile, new: str, sources: Sequence[str]) -> tuple[str, ...]:
    """The experts of a layer by number, all of one shape and none missing."""
    numbers = {expert[1]: name for name in sources if (expert := split_expert(name))}
    if sorted(numbers) != list(range(len(sources))):
        raise StoreError(
            f"{file.path}: the experts that become {new!r} are not 0 to {len(sources) - 1}: {len(numbers)} found; "
            "download the model again"
        )
    if len({file.spec(name).shape for name in sources}) > 1:
        raise StoreError(f"{file.path}: the experts that become {new!r} differ in shape")
    return tuple(numbers[number] for number in range(len(sources)))


# ---- engines ---------------------------------------------------------------------------------------------------------


_INT4 = ("int4_g32", "int4_g64", "int4_g128")
_INT8 = ("int8_row", "int8_g64", "int8_g128")
_FP8 = ("fp8_e4m3_row", "fp8_e4m3_b128")
_FLOATS = ("mxfp8_e4m3", "mxfp4", "nvfp4")
_WITH_INPUTS = "int8_row with inputs in int8_row"
_EIGHT_BITS = {("int8_row", "int8_row"): 1, ("fp8_e4m3_row", "fp8_e4m3_row"): 1}


@dataclass(frozen=True)
class Engine:
    """The formats of weights and inputs for which an engine has kernels.

    version   whose code says so
    weights   formats of linear layers whose inputs stay as they are
    experts   the same, of experts
    inputs    pairs of formats that weights and inputs can have together, and what sizes are multiples of then
    multiple  both sizes of a packed matrix are multiples of it; of layers that are computed as one, their rows together
    nearest   format -> what to take instead, "*" for all others
    note      what a user of the written folder must know
    """

    version: str
    weights: tuple[str, ...]
    experts: tuple[str, ...]
    inputs: Mapping[tuple[str, str], int]
    multiple: int = 1
    nearest: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def has_kernel(self, fmt: str, inputs: str | None, *, of_expert: bool) -> bool:
        if inputs is not None:
            return (fmt, inputs) in self.inputs
        return fmt in (self.experts if of_expert else self.weights)

    def multiple_of(self, fmt: str, inputs: str | None) -> int:
        return self.multiple if inputs is None else self.inputs[fmt, inputs]

    def instead(self, fmt: str, inputs: str | None) -> str:
        if inputs is not None:
            return " with inputs in ".join(next(iter(self.inputs)))
        return self.nearest.get(fmt, self.nearest.get("*", ""))


ENGINES = {
    "vllm-cpu": Engine(
        "vLLM 0.32.0 on a CPU",
        weights=_INT4,
        experts=_INT4,
        inputs={("int8_row", "int8_row"): 32},
        multiple=32,
        nearest={**dict.fromkeys((*_INT8, *_FP8, "mxfp8_e4m3"), _WITH_INPUTS), "*": "int4_g32"},
        note="vLLM's int4 products on a CPU are in float16 or bfloat16, and those of experts need a CPU with AMX: on "
        "others vLLM stops with 'No WNA16 MoE backend supports the deployment configuration'",
    ),
    "vllm-cuda": Engine(
        "vLLM 0.32.0 on CUDA",
        weights=(*_INT4, *_INT8, *_FP8, *_FLOATS),
        experts=(*_INT4, *_INT8, *_FLOATS),
        inputs={**_EIGHT_BITS, ("int4_g128", "fp8_e4m3_row"): 128},
        nearest={"*": "int8_row"},
        note="vLLM on CUDA was not run; int4_g128 with inputs in FP8 is for Hopper alone, in bfloat16, and vLLM rounds "
        "its scales to FP8",
    ),
    "transformers": Engine(
        "transformers 5.22 with compressed-tensors 0.20",
        weights=(*_INT4, *_INT8, *_FP8, *_FLOATS),
        experts=(*_INT4, *_INT8, *_FP8, *_FLOATS),
        inputs={**_EIGHT_BITS, ("int4_g128", "fp8_e4m3_row"): 1},
        note="transformers runs mxfp4, mxfp8_e4m3 and nvfp4 in bfloat16 alone: compressed-tensors unpacks them to it",
    ),
}


def get_engine(name: str | None) -> Engine | None:
    if name is None:
        return None
    if name not in ENGINES:
        raise StoreError(f"no engine {name!r}; there are {', '.join(ENGINES)}{did_you_mean(name, ENGINES)}")
    return ENGINES[name]

"""Models and formats measured on a text against one reference: KL, perplexities, same top tokens, window by window.

`compare_on_text` takes two models from disk, of any kinds that `load_causal_lm` reads, and any number of formats that
the second of them is put into. `QualityRun` is the same for models that are in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bitplan.base.errors import MeasureError
from bitplan.base.hardware import free_memory, known_device
from bitplan.files.headers import is_gguf
from bitplan.files.models.morph import formats_of, morph_model
from bitplan.formats import get_format
from bitplan.formats.dispatch import decode, encode
from bitplan.formats.elements import dtype_name
from bitplan.formats.format import Format
from bitplan.formats.input_formats import AS_LLAMA_CPP, input_format, llama_cpp_input
from bitplan.formats.scale_rules import ScaleRule
from bitplan.packed.checkpoints.causal_lm import CausalLM, late_logits_of, load_causal_lm
from bitplan.packed.language.perplexity import (
    CachedLogits,
    Quality,
    measure_perplexity,
    round_activations,
    shared_twin,
    spread_windows,
)
from bitplan.packed.layer_replacement import are_columns, packed_shape, with_output_rows
from bitplan.packed.rounded_inputs import round_linear_inputs
from bitplan.packed.rounded_kv import round_kv
from bitplan.plan import Choice, Manifest, Plan, PlanError, Planned, choose_formats
from bitplan.plan.format_choices import Wanted
from bitplan.plan.kv_formats import KVFormats
from bitplan.plan.manifest import name_in_model
from bitplan.plan.names import listed
from bitplan.plan.structure.parameters import NamedParameter, named_parameters_of

CACHED_LOGITS_BYTES = 2**29  # of the reference at most: last states, and logits where they are not made late
BATCH_LOGITS_BYTES = 2**28  # of a batch: a window of 512 tokens and a vocabulary of 131,072 alone has as much
FLOOR = "noise floor"
LONGEST_CONTEXT = 512  # tokens in a window, unless said, and where the model has so many
OnWindows = Callable[[int], None]


@dataclass(frozen=True)
class Variant:
    """The second model in other formats: `formats` may be one, a manifest or a plan; `keep` goes with one format."""

    label: str
    formats: Wanted
    keep: Sequence[str] = ()
    scale_rule: ScaleRule | None = None
    pad: Literal["zero"] | None = None


@dataclass(frozen=True)
class TextSettings:
    """How a text is cut and models are run.

    context   tokens in a window; None: 512, or what the models have
    tokens    about so many tokens, in windows spread over the text; None: all of it
    batch     windows at once
    floor     measure the reference's own noise floor, too
    inputs    the format that linear layers of the second model round their inputs to; None: what plans and packed
              folders say; "llama.cpp": what its code for CPUs rounds them to, by the weight's format
    kv        the formats in which the second model keeps keys and values, such as "int8:int4", or "keep"
    device    where both models compute
    dtype     the type that both compute in; a GPU may be too small for two models in float32
    """

    context: int | None = None
    tokens: int | None = None
    batch: int = 4
    floor: bool = False
    inputs: str | None = None
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    kv: str | None = None


@dataclass(frozen=True)
class TextComparison:
    """The result of comparing models with a reference on one text: a row for each, and how it was measured."""

    reference: str
    candidate: str
    context: int
    batch: int
    inputs: str | None
    reference_row: QualityRow
    noise_floor: QualityRow | None
    rows: Sequence[QualityRow]
    kv: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The result as the JSON document that `bitplan report` draws."""
        return {
            "model": self.candidate,
            "reference": self.reference,
            "context": self.context,
            "batch": self.batch,
            "inputs": self.inputs,
            **({} if self.kv is None else {"kv": self.kv}),
            "reference_row": self.reference_row.to_dict(),
            "noise_floor": self.noise_floor and self.noise_floor.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
        }


def compare_on_text(
    reference: str | Path,
    candidate: str | Path | None,
    text: str | Mapping[str, str],
    *,
    variants: Sequence[Variant] = (),
    config: str | Path | None = None,
    settings: TextSettings | None = None,
    on_windows: Callable[[int], Callable[[int, str], None]] | None = None,
) -> TextComparison:
    """Measure a second model against a first on the same tokens: KL(reference || candidate), perplexities, top tokens.

    Each is a Hugging Face folder, a packed folder or file, a GGUF file, or a folder of compressed-tensors, GPTQ, AWQ,
    MLX or another scheme that `bitplan.open_tensors` reads; they are decoded. Models of different tokens are refused.

    candidate   None: the reference itself, in the formats of `variants`
    text        plain; or by the names of files, of which those that end in .jsonl hold conversations
    config      a folder or GGUF file with config and tokenizer, for a file of weights alone
    on_windows  called with the number of windows to measure; gives what is called with those just done, and of what
    """
    chosen = settings or TextSettings()
    kv = None if chosen.kv is None else KVFormats.parse(chosen.kv)
    rounded = chosen.inputs if chosen.inputs == AS_LLAMA_CPP else input_format(chosen.inputs)
    device = known_device(chosen.device, "compute on the CPU")
    paths = [Path(path) for path in (reference, candidate) if path is not None]
    first, second = (lm.to(device, chosen.dtype) for lm in _load_pair(paths[0], paths[-1], config))
    content = first.plain(text)
    context = chosen.context or min(LONGEST_CONTEXT, *(lm.positions or LONGEST_CONTEXT for lm in (first, second)))
    for lm in (second, first):
        lm.check_context(context)
    if first.model is not second.model:
        require_same_tokens(second, first, content)
    windows = second.windows(content, context)
    windows = windows if chosen.tokens is None else spread_windows(windows, chosen.tokens)
    is_itself = candidate is None and rounded in (None, AS_LLAMA_CPP) and kv is None
    jobs: list[_Job] = [] if is_itself else [(Path(second.where).name, None, None, None)]
    jobs += [_job(second, variant) for variant in variants]
    for _, formats, rule, pad in jobs:  # refuse what a format cannot hold before anything is measured
        morphed_twin(second, formats, scale_rule=rule, pad=pad)
    run = QualityRun(first, windows, chosen.batch)
    advance = (on_windows or _unseen)(len(windows) * (1 + chosen.floor + len(jobs)))

    def counted(label: str) -> OnWindows:
        return lambda count: advance(count, label)

    return TextComparison(
        first.where,
        second.where,
        context,
        chosen.batch,
        rounded,
        run.measure_reference(f"reference: {Path(first.where).name}", counted("reference")),
        run.measure_floor(counted("noise floor")) if chosen.floor else None,
        [
            run.measure(
                label, second, formats, scale_rule=rule, pad=pad, inputs=rounded, kv=kv, on_windows=counted(label)
            )
            for label, formats, rule, pad in jobs
        ],
        None if kv is None else str(kv),
    )


def _unseen(_windows: int) -> Callable[[int, str], None]:
    return lambda _count, _label: None


def _load_pair(reference: Path, candidate: Path, config: str | Path | None) -> list[CausalLM]:
    """Both models, one where they are the same; a reference takes `config` only where it has none of its own."""
    if reference == candidate:
        return 2 * [load_causal_lm(candidate, config=config)]
    has_own = reference.is_dir() or is_gguf(reference)
    return [load_causal_lm(reference, config=None if has_own else config), load_causal_lm(candidate, config=config)]


# A label, the plan of what is measured under it, and how its scales and filling are chosen.
_Job = tuple[str, Plan | None, ScaleRule | None, Literal["zero"] | None]


def _job(second: CausalLM, variant: Variant) -> _Job:
    """A variant's plan for the model's own parameters, and how it is applied."""
    formats, pad = variant.formats, variant.pad
    one = get_format(formats) if isinstance(formats, str) else formats
    where = second.where if isinstance(one, Format) else variant.label
    plan = plan_for_model(one, second.model, variant.keep, pad=pad is not None, where=where)
    if isinstance(one, Format):
        return variant.label, plan, None if one.is_cast else variant.scale_rule, pad
    return variant.label, plan, None, pad or plan.pad


@dataclass(frozen=True)
class QualityRow:
    """The figures of one model, or of one choice of formats, on a text: a line of the printed table."""

    label: str
    bits_per_weight: float
    quality: Quality

    def to_dict(self) -> dict[str, Any]:
        return {"format": self.label, "bits_per_weight": self.bits_per_weight, **self.quality.to_dict()}


@dataclass
class QualityRun:
    """A reference and the windows of text on which everything is measured against it."""

    reference: CausalLM
    windows: Sequence[Tensor]
    batch: int = 4

    def __post_init__(self) -> None:
        self.windows = [window.to(self.reference.device) for window in self.windows]
        window = 4 * self.reference.vocabulary * max(map(len, self.windows))
        self.batch = max(1, min(self.batch, BATCH_LOGITS_BYTES // window))
        logits = late_logits_of(self.reference.model)
        self._cached = CachedLogits(logits, min(CACHED_LOGITS_BYTES, free_memory() // 8))
        self._unscored = max(1, len(self.reference.prefix))

    def measure_reference(self, label: str = "reference", on_windows: OnWindows | None = None) -> QualityRow:
        quality = measure_perplexity(
            self._cached,
            self.windows,
            batch=self.batch,
            unscored=self._unscored,
            name=self.reference.where,
            on_windows=on_windows,
        )
        return QualityRow(label, stored_bits(self.reference), quality)

    def measure_floor(self, on_windows: OnWindows | None = None) -> QualityRow:
        """The reference with activations rounded to bfloat16, against itself."""
        twin = shared_twin(self.reference.model)
        head: nn.Module = twin.get_output_embeddings()  # type: ignore[operator]
        round_activations(twin, torch.bfloat16, keep=[head])
        return self._against(FLOOR, twin, stored_bits(self.reference), on_windows)

    def measure(
        self,
        label: str,
        candidate: CausalLM,
        formats: Wanted | None,
        *,
        scale_rule: ScaleRule | None = None,
        pad: Literal["zero"] | None = None,
        inputs: str | None = None,
        kv: KVFormats | None = None,
        on_windows: OnWindows | None = None,
    ) -> QualityRow:
        """A model in these formats (None: unchanged); the candidate itself is not modified.

        inputs   the format that linear layers round their inputs to, but those whose weights the plan leaves as floats;
                 "llama.cpp": what its code for CPUs rounds them to; None: what the plan says
        kv       the formats in which keys and values are kept; None: what the plan says, or as the candidate does
        """
        twin = morphed_twin(candidate, formats, scale_rule=scale_rule, pad=pad)
        planned = formats if isinstance(formats, Plan) else Plan({})
        if inputs == AS_LLAMA_CPP:
            round_linear_inputs(twin, _inputs_of_llama_cpp(candidate, planned))
        elif inputs is not None:
            plain = {name for name, choice in planned.items() if get_format(choice.format).is_cast}
            round_linear_inputs(twin, inputs, keep=plain)
        else:
            round_linear_inputs(twin, planned.inputs)
        label = label if inputs is None else f"{label}, inputs {inputs}"
        kv = KVFormats.of_plan(planned) if kv is None else kv
        if kv is not None:
            round_kv(twin, kv)
            label = f"{label}, K and V {kv}"
        stored = {**(candidate.stored or {}), **_packed_bytes(candidate.model, formats)}
        bits = stored_bits(candidate) if formats is None else bits_per_weight(twin, stored)
        return self._against(label, twin, bits, on_windows)

    def measure_in_float64(self, label: str) -> QualityRow:
        """The reference against itself in float64: the error of float32 arithmetic that is in every figure."""
        wide = copy.deepcopy(self.reference.model).double()
        return self._against(label, wide, stored_bits(self.reference), None)

    def _against(self, label: str, model: nn.Module, bits: float, on_windows: OnWindows | None) -> QualityRow:
        quality = measure_perplexity(
            late_logits_of(model),
            self.windows,
            reference=self._cached,
            batch=self.batch,
            unscored=self._unscored,
            name=label,
            on_windows=on_windows,
        )
        return QualityRow(label, bits, quality)


def _inputs_of_llama_cpp(candidate: CausalLM, plan: Plan) -> dict[str, str | None]:
    """Formats of inputs by names of weights: those of the file, and of a plan over them."""
    formats = {**candidate.formats, **{name: choice.format for name, choice in plan.items()}}
    inputs = {name: llama_cpp_input(fmt) for name, fmt in formats.items()}
    weights = {name for name, _ in candidate.model.named_parameters()}
    if not any(fmt is not None and name in weights for name, fmt in inputs.items()):
        raise MeasureError(
            f"{candidate.where}: llama.cpp rounds inputs by the formats of weights, and no weight of this model is "
            "known to be packed; give a GGUF file of a known family, a packed folder or a plan"
        )
    return inputs


def morphed_twin(
    candidate: CausalLM, formats: Wanted | None, *, scale_rule: ScaleRule | None, pad: Literal["zero"] | None
) -> nn.Module:
    """A second model over the candidate's Parameters, which computes with them in these formats.

    Experts that a packed folder holds as their transpose are quantized so here too: blocks lie along inputs.
    """
    twin = shared_twin(candidate.model)
    if formats is None:
        return twin
    if isinstance(formats, Plan):
        formats = formats.with_inputs(dict.fromkeys(formats.inputs))  # the caller rounds them
    turned = _packed_transposed(twin, formats)
    for named, fmt in turned:
        filled = pad or (formats.pad if isinstance(formats, Plan) else None)
        packed = encode(with_output_rows(named), fmt, scale_rule=scale_rule, pad=filled)
        numbers = decode(packed, named.parameter.dtype).mT.contiguous()
        named.module._parameters[named.local] = nn.Parameter(numbers, requires_grad=False)
    if turned:
        assert isinstance(formats, Plan)
        stays = {
            named.name: Planned(
                Choice(name, "quantized already", cause="held"), tuple(named.parameter.shape), stored=name
            )
            for named, _ in turned
            if (name := dtype_name(named.parameter.dtype))
        }
        formats = Plan({**formats.entries, **stays}, padding=formats.padding)
        if all(entry.stored is not None for entry in formats.entries.values()):
            return twin
    morph_model(twin, formats, scale_rule=scale_rule, pad=pad)
    return twin


def _packed_transposed(model: nn.Module, formats: Wanted | None) -> list[tuple[NamedParameter, Format]]:
    """Parameters that the plan packs and whose rows are not outputs in the model, and their formats."""
    if not isinstance(formats, Plan):
        return []
    planned = [
        (named, get_format(formats[named.name].format))
        for named in named_parameters_of(model)
        if named.name in formats and formats.entries[named.name].stored is None
    ]
    return [(named, fmt) for named, fmt in planned if not fmt.is_cast and are_columns(named.module, named.local)]


def _packed_bytes(model: nn.Module, formats: Wanted | None) -> dict[str, int]:
    return {
        named.name: fmt.nbytes(packed_shape(named.module, named.local, tuple(named.parameter.shape)))
        for named, fmt in _packed_transposed(model, formats)
    }


def require_same_tokens(first: CausalLM, second: CausalLM, text: str) -> None:
    """Refuse models that split the text into different tokens: they are compared token by token."""
    ids, others = (torch.cat((lm.prefix, lm.encode(text))) for lm in (first, second))
    if torch.equal(ids, others) and len(first.prefix) == len(second.prefix):
        return
    both = min(len(ids), len(others))
    differing = (ids[:both] != others[:both]).nonzero()
    at = int(differing[0]) if len(differing) else both
    raise MeasureError(
        f"{first.where} and {second.where} cut the text into different tokens, from token {at} on; "
        "KL needs models of one tokenizer: give two such"
    )


# ---- which weight gets which format ----------------------------------------------------------------------------------


def plan_for_model(
    formats: Wanted, model: nn.Module, keep: Sequence[str] = (), *, pad: bool = False, where: str = "the model"
) -> Plan:
    """A plan for this model, from one format as in `bitplan quantize --format`, a manifest's rules, or a plan.

    A plan may have GGUF's names, which are translated. A parameter without an entry is an error. Tensors that stay
    count, in bits per weight, with their bytes in the file.
    """
    parameters = named_parameters_of(model)
    if not isinstance(formats, Plan):
        first_names = dict(model.named_parameters(remove_duplicate=isinstance(formats, Manifest)))
        tensors = {
            named.name: replace(named.spec(), shape=packed_shape(named.module, named.local, named.spec().shape))
            for named in parameters
            if named.name in first_names
        }
        formats = choose_formats(tensors, formats, keep=keep, pad=pad, where=where)
    formats.require_whole(where, rounds_inputs=True)
    names = {named.name for named in parameters}
    entries = {name_in_model(name, names) or name: entry for name, entry in formats.entries.items()}
    by_parameter = {id(named.parameter): entries[named.name] for named in parameters if named.name in entries}
    missing = list(dict.fromkeys(named.name for named in parameters if id(named.parameter) not in by_parameter))
    if missing:
        raise PlanError(f"{where}: nothing is said of {listed(missing)}; plan every parameter of the model")
    return Plan(entries, padding=formats.padding)


def stored_bits(lm: CausalLM) -> float:
    """Bits per weight of a model in its file; in memory if it came from no file."""
    return lm.bits_per_weight or bits_per_weight(lm.model, {})


def bits_per_weight(model: nn.Module, stored: Mapping[str, int]) -> float:
    """Bits of all parameters, scales included, over their number; tied ones count once, in their first format.

    A parameter without a format counts with its bytes in the model's file (`stored`, by name), which may be quantized:
    the model in memory is always float32.
    """
    formats = formats_of(model)
    sizes: Mapping[int, tuple[int, int]] = {
        id(named.parameter): (
            formats[named.name].nbytes(tuple(named.parameter.shape))
            if named.name in formats
            else stored.get(named.name, named.parameter.nbytes),
            named.parameter.numel(),
        )
        for named in reversed(named_parameters_of(model))
    }
    return 8 * sum(nbytes for nbytes, _ in sizes.values()) / sum(count for _, count in sizes.values())

"""Calibration: the error of each candidate format in the output of each block and layer, measured, and its file.

    result = run_calibration(stream, batches, formats=["int8_row", "fp8_e4m3_row"], cache="calibration.json")
    policy = SelectivePrecisionPolicy(stream, config, calibration=result)

The figure is relative_error = ||out_bf16 - out_low|| / ||out_bf16||, on real activations, averaged over the samples.
It is taken during ordinary streamed forward passes: the model need not fit the device.

    one pass in bf16 for each batch       every layer: ||(W - W_hat) x|| / ||y|| for every format, from what is there;
                                          every block: its input and output are kept, on the host
    one pass for each format and batch    every block gets the input that it had in bf16, and its output is compared:
                                          a block answers for its own error only

The document, version 1. It is written after every pass, so that a killed run measures only what is missing:

    {"document": "bitplan-calibration", "version": 1,
     "fingerprint": {"weights": {BLOCK: HASH}, "quantizer": {FORMAT: TEXT}, "layout": {BLOCK: TEXT},
                     "data": {"batch 0": HASH}, "versions": {PACKAGE: VERSION}},
     "layers": {"0": {LAYER: {FORMAT: ERROR}}},          by batch
     "blocks": {FORMAT: {"0": {BLOCK: ERROR}}}}          by format and batch

ERROR is null where the output was zero or not finite. A file whose fingerprint differs in any part is refused, and the
error names that part, or replaced on request: a calibration of other weights would never be noticed. Trained adapters
and the order of batches are not in the fingerprint. The host holds twice the activations between blocks, for all
batches.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bitplan.base import __version__
from bitplan.base.documents import OBJECT, SIZE, Reader, is_number, load_document, one_of, short
from bitplan.base.errors import FileFormatError, MeasureError
from bitplan.base.hardware import hash_tensors
from bitplan.base.records import write_json
from bitplan.formats import get_format
from bitplan.plan.names import listed, natural_order
from bitplan.streaming.block_stream import BlockStream, stream_blocks
from bitplan.streaming.selective.config import SelectivePrecisionConfig
from bitplan.streaming.selective.gradient_statistics import relative_output_error, rounding_error
from bitplan.streaming.selective.layer_probes import first_tensor
from bitplan.streaming.selective.precision_units import PrecisionUnits, Weight
from bitplan.streaming.selective.score import mean_of
from bitplan.streaming.selective.state import layout_of

DOCUMENT = "bitplan-calibration"
VERSION = 1
Errors = dict[str, dict[str, float]]
Fingerprint = Mapping[str, Mapping[str, str]]
_PARTS = {
    "weights": "the weights of",
    "quantizer": "the quantizer settings of",
    "layout": "the block layout of",
    "data": "the data of",
    "versions": "the versions of",
}


class CalibrationError(MeasureError):
    """A calibration that cannot be made."""


class CalibrationFileError(CalibrationError, FileFormatError):
    """A file of a calibration that cannot be read."""


class StaleCalibrationError(CalibrationFileError):
    """A cache of other weights, data, formats or versions."""


@dataclass(frozen=True)
class CalibrationResult:
    """Relative output errors: block or layer -> format -> error; `excluded` counts samples without an error."""

    blocks: Errors
    layers: Errors
    excluded: Mapping[str, int] = field(default_factory=dict)

    def of(self, name: str, fmt: str) -> float | None:
        """The error of a block or layer in a format, if it was measured."""
        return self.blocks.get(name, self.layers.get(name, {})).get(fmt)


@dataclass
class Calibration:
    """The errors measured so far, and a fingerprint of the model and data they are of."""

    fingerprint: Fingerprint
    layers: dict[str, dict[str, dict[str, float | None]]] = field(default_factory=dict)
    blocks: dict[str, dict[str, dict[str, float | None]]] = field(default_factory=dict)

    def missing_formats(self, batch: int, formats: Iterable[str]) -> list[str]:
        """Formats whose blocks were not measured on a batch."""
        return [fmt for fmt in formats if str(batch) not in self.blocks.get(fmt, {})]

    def is_done(self, batch: int, formats: Sequence[str]) -> bool:
        return str(batch) in self.layers and not self.missing_formats(batch, formats)

    def result(self) -> CalibrationResult:
        """Return the mean errors over the samples."""
        blocks: dict[str, dict[str, list[float | None]]] = {}
        layers: dict[str, dict[str, list[float | None]]] = {}
        for fmt, batches in self.blocks.items():
            for row in batches.values():
                for name, error in row.items():
                    blocks.setdefault(name, {}).setdefault(fmt, []).append(error)
        for row_of in self.layers.values():
            for name, errors in row_of.items():
                for fmt, error in errors.items():
                    layers.setdefault(name, {}).setdefault(fmt, []).append(error)
        excluded = {
            name: count
            for name, samples in {**blocks, **layers}.items()
            if (count := sum(error is None for measured in samples.values() for error in measured))
        }
        return CalibrationResult(_means(blocks), _means(layers), excluded)

    def save(self, path: str | Path) -> None:
        write_json(
            path,
            {
                "document": DOCUMENT,
                "version": VERSION,
                "fingerprint": {part: dict(rows) for part, rows in self.fingerprint.items()},
                "layers": self.layers,
                "blocks": self.blocks,
            },
        )


def load_calibration(path: str | Path, fingerprint: Fingerprint) -> Calibration:
    """A complete or partial cache, if it is of this model, data and code."""
    reader = Reader(str(path), CalibrationFileError)
    document = load_document(path, CalibrationFileError)
    reader.version(document, VERSION)
    known = {"document": one_of(DOCUMENT), "version": SIZE, "fingerprint": OBJECT, "layers": OBJECT, "blocks": OBJECT}
    item = reader.keys("", document, known, tuple(known))
    differing = compare_fingerprints(item["fingerprint"], fingerprint)
    if differing:
        raise StaleCalibrationError(
            f"{path}: this calibration is stale: {'; '.join(differing)}; calibrate again (on_stale='redo', or delete "
            "the file), or give the cache another path"
        )
    for part in ("layers", "blocks"):
        _check_errors(reader, part, item[part])
    return Calibration(fingerprint, item["layers"], item["blocks"])


def compare_fingerprints(saved: Any, now: Fingerprint) -> list[str]:
    """A text for each part that differs, with the names that differ in it."""
    differences = []
    for part, label in _PARTS.items():
        old = saved.get(part) if isinstance(saved, Mapping) else None
        old = old if isinstance(old, Mapping) else {}
        names = [name for name in natural_order({*old, *now[part]}) if old.get(name) != now[part].get(name)]
        if names:
            first = names[0]
            was, now_is = old.get(first, "not there"), now[part].get(first, "not there")
            differences.append(
                f"{label} {listed(names, 3)} differ ({short(first)} was {short(str(was), 60)}, is {now_is})"
            )
    return differences


def fingerprint_of(
    weights: Mapping[str, Iterable[Tensor]], formats: Iterable[str], layout: Mapping[str, str], batches: Sequence[Any]
) -> Fingerprint:
    """Everything a calibration depends on, by content."""
    return {
        "weights": {name: hash_tensors(tensors) for name, tensors in weights.items()},
        "quantizer": {fmt: _quantizer(fmt) for fmt in formats},
        "layout": dict(layout),
        "data": {f"batch {at}": hash_tensors(tensors_of(batch)) for at, batch in enumerate(batches)},
        "versions": {"bitplan": __version__, "torch": torch.__version__, "calibration": str(VERSION)},
    }


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order: a tensor, or lists and mappings of tensors and plain values."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for key in sorted(batch) for tensor in tensors_of(batch[key])]
    if isinstance(batch, list | tuple):
        return [tensor for one in batch for tensor in tensors_of(one)]
    if isinstance(batch, bool | int | float | str | None):
        return [torch.tensor(list(repr(batch).encode()), dtype=torch.uint8)]
    raise CalibrationError(
        f"a batch must be a tensor, or lists and mappings of tensors, got a {type(batch).__name__} in it"
    )


def relative_error(reference: Tensor, output: Tensor) -> float | None:
    """Compute ||reference - output|| / ||reference||; None where that is no number."""
    reference = reference.float()
    error = float(torch.linalg.vector_norm(reference - output.float()) / torch.linalg.vector_norm(reference))
    return finite_or_none(error)


def finite_or_none(error: float) -> float | None:
    return error if math.isfinite(error) else None


def _quantizer(name: str) -> str:
    fmt = get_format(name)
    return f"{fmt.description}; rule {fmt.default_rule}; {fmt.element}; {fmt.block}"


def _means(samples: Mapping[str, Mapping[str, Sequence[float | None]]]) -> Errors:
    means: Errors = {}
    for name in natural_order(samples):
        row = {fmt: [error for error in errors if error is not None] for fmt, errors in samples[name].items()}
        means[name] = {fmt: mean_of(errors) for fmt, errors in row.items() if errors}
    return means


def _check_errors(reader: Reader, path: str, rows: Mapping[str, Any]) -> None:
    """Check three levels of names, below which is null or a number of at least 0."""
    for outer, middle in rows.items():
        for inner, row in (middle if isinstance(middle, Mapping) else {"": middle}).items():
            if not isinstance(row, Mapping):
                reader.fail(f"{path}.{outer}.{inner}".rstrip("."), "an object", row)
            for name, error in row.items():
                if error is not None and not (is_number(error) and error >= 0):
                    reader.fail(f"{path}.{outer}.{inner}.{name}", "a number from 0, or null", error)


FORMATS = ("int8_row", "fp8_e4m3_row")
Forward = Callable[[nn.Module, Any], Any]
OnProgress = Callable[[int, int, str], None]
OnStale = Literal["refuse", "redo"]
log = logging.getLogger("bitplan")


def run_calibration(
    model: BlockStream | nn.Module,
    batches: Iterable[Any],
    *,
    formats: Sequence[str] = FORMATS,
    samples: int = 4,
    cache: str | Path | None = None,
    on_stale: OnStale = "refuse",
    forward: Forward | None = None,
    progress: bool | OnProgress = True,
    blocks: str = "model.layers.*",
    device: Any = "cuda",
) -> CalibrationResult:
    """Measure the error of every format on every block and layer of a stream, or of a model to be streamed.

    batches   the first `samples` are used: tensors, or lists and mappings of them, as the model takes them
    on_stale  "refuse" a cache of other weights, data, formats or versions, by name; or "redo" the calibration
    forward   (model, batch) -> anything, where the model takes batches in another way
    progress  a bar on standard error if that is a terminal; or a function, called with (done, total, what)
    """
    used = list(itertools.islice(batches, samples))
    if not used:
        raise CalibrationError("no batches: calibration needs real inputs, at least one batch")
    if len(used) < samples:
        log.warning("bitplan: calibrating on %d of %d samples: no more batches came", len(used), samples)
    if on_stale not in get_args(OnStale):
        raise CalibrationError(f"on_stale={on_stale!r}: there are {', '.join(map(repr, get_args(OnStale)))}")
    names = [get_format(name).name for name in dict.fromkeys(formats)]
    if not names:
        raise CalibrationError("no formats: name at least one candidate, such as int8_row")
    opened = None
    if not isinstance(model, BlockStream):
        opened = model = stream_blocks(model, blocks, device=device, train="nothing", slots=3)
    try:
        run = _Run(model, used, names, forward or call_model, None if cache is None else Path(cache), on_stale)
        with _bar(progress) as report:
            return run.measure(report)
    finally:
        if opened is not None:
            opened.close()


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model: a mapping is its keywords, a list or tuple its arguments, anything else its one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context with a model in eval mode, under no_grad; modes and random generators come back after it."""
    modes = [(module, module.training) for module in model.modules()]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training


class _Run:
    def __init__(
        self,
        stream: BlockStream,
        batches: list[Any],
        formats: list[str],
        forward: Forward,
        cache: Path | None,
        on_stale: OnStale,
    ) -> None:
        self.stream, self.formats, self.forward, self.cache = stream, formats, forward, cache
        self.batches = sorted(batches, key=lambda batch: hash_tensors(tensors_of(batch)))  # their order must not matter
        stream.synchronize()  # masters must not be updated while they are hashed
        config = SelectivePrecisionConfig(granularity="layer")
        self.units = PrecisionUnits(stream, config)
        self.fingerprint = fingerprint_of(_weights(self.units), formats, _layout(stream), self.batches)
        self.done = Calibration(self.fingerprint)
        if cache is not None and cache.exists():
            try:
                self.done = load_calibration(cache, self.fingerprint)
            except StaleCalibrationError as error:
                if on_stale == "refuse":
                    raise
                log.info("bitplan: calibrating anew: %s", error)
        # Block -> its (arguments, keywords, output) in bf16, on the host, by batch.
        self._inputs: dict[tuple[int, str], tuple[Any, Any, Tensor]] = {}

    def measure(self, report: OnProgress) -> CalibrationResult:
        open_batches = [at for at in range(len(self.batches)) if not self.done.is_done(at, self.formats)]
        if not open_batches:
            return self.done.result()
        missing = {
            fmt: [at for at in open_batches if fmt in self.done.missing_formats(at, [fmt])] for fmt in self.formats
        }
        total, count = len(open_batches) + sum(map(len, missing.values())), 0
        before = self.stream.formats
        try:
            with evaluating(self.stream.model):
                self._switch(None)
                for at in open_batches:
                    self._reference_pass(at)
                    count += 1
                    report(count, total, f"batch {at} in bf16")
                for fmt, ats in missing.items():
                    if ats:
                        self._switch(fmt)
                    for at in ats:
                        self._format_pass(fmt, at)
                        count += 1
                        report(count, total, f"batch {at} in {fmt}")
        finally:
            self.stream.set_formats(before)
        return self.done.result()

    # ---- passes ------------------------------------------------------------------------------------------------------

    def _reference_pass(self, at: int) -> None:
        row: dict[str, dict[str, float | None]] = {}
        handles = [
            block.module.register_forward_hook(self._keep(at, block.name), with_kwargs=True)
            for block in self.stream.blocks
        ]
        measured: dict[tuple[str, str], list[Tensor]] = {}
        for use in self.units.linear_uses()[0]:
            hook = self._layer_hook(use.weight, use.local, measured)
            handles.append(use.module.register_forward_hook(hook, with_kwargs=True))
        self._run(at, handles)
        for (name, fmt), errors in measured.items():
            row.setdefault(name, {})[fmt] = finite_or_none(float(torch.stack(errors).mean()))
        self.done.layers[str(at)] = row
        self._save()

    def _format_pass(self, fmt: str, at: int) -> None:
        row: dict[str, float | None] = {}
        handles: list[RemovableHandle] = []
        for block in self.stream.blocks:
            handles.append(block.module.register_forward_pre_hook(self._same_input(at, block.name), with_kwargs=True))
            handles.append(block.module.register_forward_hook(self._compare(at, block.name, row)))
        self._run(at, handles)
        self.done.blocks.setdefault(fmt, {})[str(at)] = row
        self._save()

    def _run(self, at: int, handles: list[RemovableHandle]) -> None:
        try:
            self.forward(self.stream.model, _moved(self.batches[at], self.stream.device.torch_device))
        finally:
            for handle in handles:
                handle.remove()

    def _switch(self, fmt: str | None) -> None:
        """Put every matrix in a format, or in bf16. That needs a step, without gradients, which is never ended."""
        high = self.units.formats(dict.fromkeys(self.units.names, "bf16"))
        self.stream.set_formats(high if fmt is None else dict.fromkeys(high, fmt))
        self.stream.begin_step(0)

    def _save(self) -> None:
        if self.cache is not None:
            self.done.save(self.cache)

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def _keep(self, at: int, block: str) -> Callable[..., None]:
        def after(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._inputs[at, block] = _moved(args, CPU), _moved(kwargs, CPU), _output(block, output).cpu()

        return after

    def _same_input(self, at: int, block: str) -> Callable[..., Any]:
        def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            saved_args, saved_kwargs, _ = self._inputs[at, block]
            device = self.stream.device.torch_device
            # Objects that are no tensors (a cache of keys and values, a mask object) are taken from this pass.
            return _merged(args, _moved(saved_args, device)), _merged(kwargs, _moved(saved_kwargs, device))

        return before

    def _compare(self, at: int, block: str, row: dict[str, float | None]) -> Callable[..., None]:
        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            reference = self._inputs[at, block][2]
            row[block] = relative_error(reference, _output(block, output).cpu())

        return after

    def _layer_hook(
        self, weight: Weight, local: str, measured: dict[tuple[str, str], list[Tensor]]
    ) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs, matrix = first_tensor([*args, *kwargs.values()]), module._parameters[local]
            if inputs is None or matrix is None or not isinstance(output, Tensor):
                return
            if tuple(matrix.shape) != (output.shape[-1], inputs.shape[-1]):
                return
            for fmt in self.formats:
                error = relative_output_error(inputs, rounding_error(matrix, fmt), output)
                measured.setdefault((weight.unit, fmt), []).append(error)

        return after


# ---- small parts -----------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


def _weights(units: PrecisionUnits) -> dict[str, list[Tensor]]:
    """The weights that errors depend on, by block; `rest` for those outside of blocks.

    Parameters trained on the device (adapters, with train="adapters") are left out: they are in no unit, and after the
    first step no cache would fit.
    """
    stream, inside = units.stream, set()
    weights: dict[str, list[Tensor]] = {}
    for block in stream.blocks:
        streamed = {id(one.parameter): name for name, one in block.parameters.items()}
        weights[block.name] = []
        for parameter in block.module.parameters():
            inside.add(id(parameter))
            name = streamed.get(id(parameter))
            if name is not None:
                weights[block.name].append(stream.truth_of(block.name, name))
            elif not parameter.requires_grad:
                weights[block.name].append(parameter)
    rest = [one for one in stream.model.parameters() if id(one) not in inside]
    weights["rest"] = [one for one in rest if not (stream.train == "adapters" and one.requires_grad)]
    return weights


def _layout(stream: BlockStream) -> dict[str, str]:
    return layout_of(
        {
            block.name: [
                (name, spec.shape, str(spec.dtype).removeprefix("torch.")) for name, spec in block.specs.items()
            ]
            for block in stream.blocks
        }
    )


def _output(block: str, output: Any) -> Tensor:
    tensor = first_tensor(output)
    if tensor is None:
        raise CalibrationError(f"{block}: gave a {type(output).__name__} without a tensor; there is nothing to compare")
    return tensor


def _moved(value: Any, device: torch.device) -> Any:
    """Lists and mappings with their tensors moved to a device; other values stay as they are."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(one, device) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(_moved(one, device) for one in value)
    return [_moved(one, device) for one in value] if isinstance(value, list) else value


def _merged(now: Any, before: Any) -> Any:
    """A call's arguments with the tensors of an earlier pass in place of its own; all else is this pass's."""
    if isinstance(before, Tensor):
        return before
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return {key: _merged(now[key], before[key]) if key in before else now[key] for key in now}
    if isinstance(before, tuple) and isinstance(now, tuple):
        return tuple(_merged(one, two) for one, two in zip(now, before, strict=True))
    return now


@contextmanager
def _bar(progress: bool | OnProgress) -> Iterator[OnProgress]:
    if callable(progress):
        yield progress
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    hidden = not progress or not console.is_terminal
    with nullcontext() if hidden else Progress(console=console, transient=True) as bar:
        task = None if bar is None else bar.add_task("calibrating", total=1)

        def report(done: int, total: int, what: str) -> None:
            if bar is not None and task is not None:
                bar.update(task, completed=done, total=total, description=f"calibrating: {what}")

        yield report

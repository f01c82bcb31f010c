"""run_calibration: relative output errors of candidate formats, during ordinary streamed forward passes.

    result = run_calibration(stream, batches, formats=["int8_row", "fp8_e4m3_row"], cache="calibration.json")
    policy = SelectivePrecisionPolicy(stream, config, calibration=result)

The model need not fit the device: blocks pass through the slots as in training.

    one pass in bf16 for each batch       every layer: ||(W - W_hat) x|| / ||y|| for every format, from what is there;
                                          every block: its input and output are kept, on the host
    one pass for each format and batch    every block gets the input that it had in bf16, and its output is compared:
                                          a block answers for its own error only

The cache is written after every pass, under a fingerprint of weights, formats, blocks, data and versions; a run that
was killed measures only what is missing, and a cache of something else is refused by name, or replaced on request.
Trained adapters and the order of batches are not in the fingerprint. The host holds twice the activations between
blocks, for all batches.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bitplan.base.fingerprints import hash_tensors
from bitplan.formats import get_format
from bitplan.streaming.selective.calibration import (
    Calibration,
    CalibrationError,
    CalibrationResult,
    StaleCalibrationError,
    fingerprint_of,
    finite_or_none,
    load_calibration,
    relative_error,
    tensors_of,
)
from bitplan.streaming.selective.config import SelectivePrecisionConfig
from bitplan.streaming.selective.gradient_statistics import relative_output_error, rounding_error
from bitplan.streaming.selective.layer_probes import first_tensor
from bitplan.streaming.selective.precision_units import PrecisionUnits, Weight
from bitplan.streaming.selective.state import layout_of
from bitplan.streaming.stream_blocks import BlockStream, stream_blocks

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
    """Run a model in eval mode, under no_grad; afterwards modes and random number generators are as before."""
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
        for place in self.units.linear_places()[0]:
            hook = self._layer_hook(place.weight, place.local, measured)
            handles.append(place.module.register_forward_hook(hook, with_kwargs=True))
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
    """The saved tensors of `before`, and everything else from this pass."""
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

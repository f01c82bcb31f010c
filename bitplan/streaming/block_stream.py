"""stream_blocks: run and train a model whose blocks do not all fit the device.

    with stream_blocks(model, "model.layers.*", device="cuda", formats="int8_row", slots=3) as stream:
        for step, batch in enumerate(batches):
            stream.begin_step(step)
            loss = model(**batch).loss          # as ever, with or without checkpointing
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            stream.end_step()

Blocks wait on the host in their formats, cross the bus in these formats, and are decoded on the device. Weights and
formats change at step boundaries only. Weights that other code changed meanwhile (`model.load_state_dict`, an edit
under torch.no_grad()) are detected there and encoded again (`reencode_blocks`).

Only the `forward` of each block is wrapped (`BlockCalls`). During the call the block's parameters are the streamed
ones, and autograd saves where weights lie, not the weights (`saved_tensors`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bitplan.base.errors import FormatError, StreamError, StreamStateError
from bitplan.base.names import keywords_in
from bitplan.base.records import on_failure
from bitplan.plan.plan import Choice, Plan, Planned
from bitplan.streaming.find_blocks import STREAMED, StreamedBlock, Train, find_blocks, move_resident
from bitplan.streaming.options import (
    BlockFormats,
    Formats,
    StreamOptions,
    StreamRequest,
    check_norm,
    own_format,
)
from bitplan.streaming.reencode_blocks import BlockUpkeep, formats_of, lay_out_all, mergeable_in, refuse_unmerging
from bitplan.streaming.routed_experts import Mixture, RoutedExperts, take_out_experts
from bitplan.streaming.saved_tensors import check_torch, in_backward, save_where_weights_lie
from bitplan.streaming.telemetry import StepRecorder, StreamStats, Telemetry
from bitplan.streaming.training.adamw import AdamWSettings
from bitplan.streaming.training.host_training import HostTraining
from bitplan.streaming.training.optimizers import Settings
from bitplan.streaming.training.processes import Processes, hide_from_ddp, refuse_subgroups, several_processes
from bitplan.streaming.training.training_state import load_training, read_training, training_document, write_training
from bitplan.streaming.transfer.activation_offload import ActivationOffload, Compute
from bitplan.streaming.transfer.copies import FiniteCheck, SentFlags, Transfer, alone
from bitplan.streaming.transfer.devices import StreamDevice, open_device
from bitplan.streaming.transfer.host_memory import HostKind, open_host
from bitplan.streaming.transfer.schedule import Slots
from bitplan.streaming.transfer.transfer_limits import Pressure, RuntimeLimitHints
from bitplan.streaming.weight_loader import WeightLoader

REUSE = "reuse_weight_cast"  # of FP8 layers
MOST_KEPT_OF_A_BUFFER = 2**20  # numbers


class BlockCalls:
    """Replaces the forwards of a stream's blocks, and runs them with weights that lie on the device."""

    def __init__(self, stream: BlockStream) -> None:
        self._stream, self._loader, self._training = stream, stream._loader, stream.training
        self._wrapped: list[tuple[StreamedBlock, Callable[..., Any] | None]] = []
        self._mergeable: list[list[nn.Module]] = [mergeable_in(block) for block in stream.blocks]
        self._buffered = [[one for one in block.module.modules() if one._buffers] for block in stream.blocks]
        self._reusing: list[nn.Module] = []  # layers that keep casts of their weights, by where those lie in memory

    def wrap(self, index: int, block: StreamedBlock, forward: Callable[..., Any]) -> None:
        """Replace a block's forward by one that first brings its weights to the device, then calls `forward`."""

        @functools.wraps(block.module.forward)
        def streamed(*args: Any, **kwargs: Any) -> Any:
            compute = functools.partial(self._compute, index, block, forward)
            try:
                return self._in_turn(compute, index, block, args, kwargs)
            except Exception as error:
                error.add_note(f"bitplan: in streamed block {self._loader.where(index)}")
                if isinstance(error, torch.OutOfMemoryError):
                    self._stream._upkeep.ran_out()
                raise

        self._wrapped.append((block, block.module.__dict__.get("forward")))
        block.module.forward = streamed
        # `model.to(...)`, which every trainer calls, must not move a streamed block: it would no longer be streamed.
        block.module._apply = lambda *_args, **_options: block.module  # type: ignore[method-assign]
        setattr(block.module, STREAMED, True)
        for module in block.module.modules():
            if getattr(module, REUSE, False):  # where a weight lies now, another block's will lie next
                setattr(module, REUSE, False)
                self._reusing.append(module)
        block.module.__reduce_ex__ = functools.partial(_refuse_copy, block.name)  # type: ignore[method-assign]

    def unwrap(self) -> None:
        for block, own_forward in self._wrapped:
            block.put_back()
            for name in (STREAMED, "_apply", "forward", "__reduce_ex__"):
                block.module.__dict__.pop(name, None)
            if own_forward is not None:
                block.module.forward = own_forward
        for module in self._reusing:
            setattr(module, REUSE, True)
        self._wrapped, self._reusing = [], []

    def _in_turn(
        self, compute: Compute, index: int, block: StreamedBlock, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if in_backward():  # a step's own thread waits for it
            return self._run(compute, index, block, args, kwargs)
        with self._loader.turns:
            if self._loader.step is not None:
                self._loader.turns.claim_step(self._loader.serial, self._loader.where(index))
            return self._run(compute, index, block, args, kwargs)

    def _run(
        self, compute: Compute, index: int, block: StreamedBlock, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        grad = torch.is_grad_enabled()
        refuse_unmerging(block.name, self._mergeable[index])
        self._refuse_other_tensors(block)
        if self._loader.step is None:
            if grad:
                raise StreamError(
                    f"{block.name}: computed with gradients outside a step; call begin_step(step), or use "
                    "torch.no_grad()"
                )
            self._stream._before_outside(block)
        if grad and self._stream.train == "nothing" and any(_needs_grad(value) for value in (*args, *kwargs.values())):
            raise StreamError(
                f"{block.name}: train='nothing', but an input requires gradients; stream with train='adapters' or "
                "'weights', or run under torch.no_grad()"
            )
        if grad and self._loader.activations is not None:
            if self._buffered[index]:
                compute = _with_buffers_of_forward(self._loader.where(index), self._buffered[index], compute)
            return self._loader.activations.run(index, compute, args, kwargs)
        return compute(args, kwargs)

    def _refuse_other_tensors(self, block: StreamedBlock) -> None:
        """Refuse tensors that other code has put in the place of Parameters: the streamed ones would replace them."""
        is_in_step = self._loader.step is not None
        for name, one in block.parameters.items():
            for module, local in one.uses:
                held = module._parameters.get(local)
                if held is one.parameter or held is None:
                    continue
                if is_in_step if isinstance(held, nn.Parameter) else self._loader.span_of(held) is None:
                    raise StreamError(
                        f"{block.name}.{name}: its module holds another tensor than its Parameter (functional_call, or "
                        "a weight that was replaced within a step), and the stream would compute with the Parameter; "
                        "change Parameters between steps, or keep this block out of the stream"
                    )

    def _compute(
        self,
        index: int,
        block: StreamedBlock,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        grad = torch.is_grad_enabled()
        if self._training is not None and not in_backward():
            self._training.note_call(block.name)
        settled = None if self._stream.experts is not None else self._loader.settled(index)
        weights = settled
        if weights is None:
            weights = self._loader.weights(index, wraps=not block.module.training or self._stream.train == "nothing")
        if grad and self._training is not None:
            weights = weights | self._leaves(block, weights, self._training)
        written, before = None, {name: (one.data_ptr(), one._version) for name, one in weights.items()}
        try:
            _put_into_modules(block, weights)
            with save_where_weights_lie(self._loader) if grad and settled is None else nullcontext():
                output = forward(*args, **kwargs)
            if settled is None:
                self._loader.refuse_other_block(index)
        finally:
            try:
                written = _written_to(block, weights, before)
                _put_into_modules(block, None)
            except BaseException:  # Ctrl-C
                block.put_back()
                raise
            if written is not None:
                self._loader.drop(index)
        if written is not None:
            raise StreamError(
                f"{self._loader.where(index)}: {written} is changed by the block's own forward, which has a copy on "
                "the device, and the Parameter would stay as it is; change it between steps under torch.no_grad(), "
                "after stream.synchronize(), or compute with a changed tensor (torch.nn.utils.parametrize)"
            )
        output = self._loader.kept_beyond(output)
        if self._stream._finite is not None and not in_backward():
            self._stream._finite.look_at(index, output)
        return output

    def _leaves(self, block: StreamedBlock, weights: Mapping[str, Tensor], training: HostTraining) -> dict[str, Tensor]:
        """Return leaves of this call's graph, whose gradients go to the host as soon as they are computed."""
        recorder, leaves = self._loader.recorder, {}
        assert recorder is not None
        for name in training.trained_in(block.name):
            if block.parameters[name].parameter.requires_grad:
                leaf = leaves[name] = weights[name].detach().requires_grad_()
                receive = functools.partial(training.receive, block.name, name, training.gradients, recorder)
                leaf.register_post_accumulate_grad_hook(receive)
        return leaves


def _put_into_modules(block: StreamedBlock, weights: Mapping[str, Tensor] | None) -> None:
    """Make these tensors the block's parameters (None: its own again); in the modules' dicts any tensor may lie."""
    for name, one in block.parameters.items():
        tensor: Any = one.parameter if weights is None else weights[name]
        for module, local in one.uses:
            module._parameters[local] = tensor
    for one in block.routed.values() if weights is None else ():
        one.put_back()  # Ctrl-C


def _written_to(
    block: StreamedBlock, weights: Mapping[str, Tensor], before: Mapping[str, tuple[int, int]]
) -> str | None:
    """What of the weights on the device the forward that has them wrote to, or put others in the place of."""
    for name, one in block.parameters.items():
        weight, (address, version) = weights[name], before[name]
        is_other = any(module._parameters.get(local) is not weight for module, local in one.uses)
        if is_other or weight.data_ptr() != address:
            return name
        if weight._version != version:  # of the buffer that all of them lie in
            return "one of its weights"
    return None


def _with_buffers_of_forward(where: str, modules: Iterable[nn.Module], compute: Compute) -> Compute:
    """A computation of a block that backward repeats with the buffers as the forward found them.

    So the block computes the same, and what it counts or averages in buffers is not counted twice. Copies are kept of
    all small buffers, for torch does not count what batch norms write.
    """
    buffers = [(one, name, buffer) for one in modules for name, buffer in one._buffers.items() if buffer is not None]
    copies = [(one, name, buffer.clone()) for one, name, buffer in buffers if buffer.numel() <= MOST_KEPT_OF_A_BUFFER]
    large = [(*one, one[2]._version) for one in buffers if one[2].numel() > MOST_KEPT_OF_A_BUFFER]

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not in_backward():
            output = compute(args, kwargs)
            for module, name, buffer, version in large:
                if module._buffers.get(name) is not buffer or buffer._version != version:
                    raise StreamError(
                        f"{where}: its forward changes the buffer {name}, which is too large to keep until backward "
                        "computes the block again; stream without offload_activations"
                    )
            return output
        now = [module._buffers.get(name) for module, name, _ in copies]
        try:
            for module, name, copy in copies:
                module._buffers[name] = copy.clone()
            return compute(args, kwargs)
        finally:
            for (module, name, _), current in zip(copies, now, strict=True):
                module._buffers[name] = current

    return run


def _refuse_copy(name: str, _protocol: object) -> Any:
    raise StreamError(
        f"{name} is streamed: its host memory, slots and threads cannot be copied or pickled; copy the model before "
        "stream_blocks or after close(), or save its state_dict()"
    )


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@keywords_in(StreamOptions)
def stream_blocks(
    model: nn.Module,
    blocks: str = "model.layers.*",
    *,
    device: StreamDevice | torch.device | str = "cuda",
    formats: Formats = None,
    slots: Slots = "auto",
    host: HostKind = "pinned",
    train: Train = "adapters",
    optimizer: Settings | None = None,
    clip_grad_norm: float | None = None,
    telemetry: str | Path | None = None,
    offload_activations: bool = False,
    options: StreamOptions | None = None,
) -> BlockStream:
    """Stream the blocks of a model through a device; everything else of the model moves there and stays.

    blocks        names of the blocks; `*` stands for one part of a name
    device        "cuda", "cuda:1"; "cpu" is a simulated device, for tests and trials
    formats       None (each parameter's own type), a format, a mapping or a Plan; see `options`
    slots         ring slots on the device; "auto" fills the memory that steps leave, with resident blocks first
    host          "pinned", "pageable", or "file" (in `StreamOptions.host_folder`, or a temporary folder)
    train         "adapters": parameters of blocks that require gradients stay on the device, for your optimizer;
                  "weights": they are streamed, and trained on the host by `optimizer`: AdamWSettings, or
                  HostOptimizer for another one of torch's;
                  "nothing": all is streamed, without gradients
    clip_grad_norm    with train="weights": the largest norm of all streamed gradients, as in
                  torch.nn.utils.clip_grad_norm_; `clip_gradients` includes parameters outside of blocks
    telemetry     a file that gets one JSON line a step
    offload_activations   checkpoint every block, and keep its input in pinned memory from its forward to its backward
    options       StreamOptions: what few need to say
    """
    if not isinstance(options, StreamOptions | None):
        raise StreamError(f"options={options!r}: expected StreamOptions(...) of bitplan.streaming")
    request = StreamRequest(
        **vars(StreamOptions() if options is None else options),
        formats=formats,
        slots=slots,
        host=host,
        train=train,
        optimizer=optimizer,
        clip_grad_norm=clip_grad_norm,
        telemetry=telemetry,
        offload_activations=offload_activations,
    )
    request.check()
    streamed = find_blocks(model, blocks, train)
    mixtures = [] if request.experts == "all" else take_out_experts(streamed, train)
    return BlockStream(model, streamed, mixtures, open_device(device), request)


class BlockStream:
    """What `stream_blocks` returns: a model whose blocks are streamed through a device until `close`."""

    def __init__(
        self,
        model: nn.Module,
        blocks: list[StreamedBlock],
        mixtures: list[Mixture],
        device: StreamDevice,
        options: StreamRequest,
    ) -> None:
        check_torch()
        self.model, self.blocks, self.device, self.train = model, blocks, device, options.train
        self._options, self._by_name = options, {block.name: block for block in blocks}
        specs = {block.name: block.specs for block in blocks}
        formats = formats_of(options.formats, blocks)
        lay_out_all(specs, formats)  # refuses formats that do not fit, before anything is opened
        if options.train == "weights" and several_processes():
            refuse_subgroups()
        self._telemetry = Telemetry(options.telemetry)
        self._is_closed = False
        self._step: int | None = None
        self._end_was_called = False  # of the open step
        self._seen_optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._host = open_host(options.host, device, options.host_folder)
        self.training = HostTraining(blocks, device, options) if options.train == "weights" else None
        names = list(self._by_name)
        self._loader = WeightLoader(device, self._host, names, self.training, options.timeout_s)
        if options.offload_activations:
            self._loader.activations = ActivationOffload(
                device, len(blocks), self._loader.where, self._loader.room, options.timeout_s
            )
        self._upkeep = BlockUpkeep(blocks, formats, self._loader, options)
        if self.training is not None:
            self.training.encode_early = self._upkeep.put_updated
            self.training.wait_for_readers = self._loader.wait_for_readers
        self.experts: RoutedExperts | None = None
        with on_failure(self._free):
            self.experts = RoutedExperts(mixtures, self._loader, options) if mixtures else None
            move_resident(model, blocks, device.torch_device)
            self._finite = FiniteCheck(device, names) if options.check_finite else None
            self._upkeep.write(formats, blocks)
        self._calls = BlockCalls(self)
        for index, block in enumerate(blocks):
            self._calls.wrap(index, block, options.compiled(block.module.forward))
        if self.experts is not None:
            self.experts.wrap()
        self._hooks = self._upkeep.hook_state_dicts()
        if self.training is not None and options.optimizer is None:
            self._hooks.append(register_optimizer_step_pre_hook(self._warn_of_idle_optimizer))
        routed = [f"{block.name}.{name}" for block in blocks for name in block.routed]
        self._show_to_ddp = hide_from_ddp(model, [*_by_full_name(formats), *routed])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _traceback: object) -> None:
        failure = self._shut_down(error)
        if failure is not None and error is None:
            raise failure

    def __repr__(self) -> str:
        return f"BlockStream({len(self.blocks)} blocks to {self.device.torch_device}, {self.stats})"

    # ---- steps -------------------------------------------------------------------------------------------------------

    @alone
    def begin_step(self, step: int) -> None:
        """Begin a step: new formats take effect, and the transfer of the first blocks starts.

        A step that was not ended is dropped with its gradients. An error of an earlier step is raised here, once; call
        begin_step again to go on. With train="weights" this waits to know if the last step counts, not for its AdamW.
        """
        self._check_open()
        if isinstance(step, bool) or not hasattr(step, "__index__"):
            raise StreamError(f"begin_step: expected the number of the step, got {step!r}")
        step = int(step)
        if self._step is not None:
            self._warn_of_lost_gradients(step)
            self._abandon()
        if self.training is not None:
            self.training.wait_checked()
        self._raise_failures()
        self._join_processes()
        self._upkeep.bring_up_to_date()
        if self.experts is not None:
            self.experts.bring_up_to_date()
            self.experts.begin()
        self.device.reset_peak()
        if self._finite is not None:
            self._finite.start()
        recorder = StepRecorder(self.device, step, self.device.mark())
        if self.training is not None:
            self.training.begin(step)
        self._loader.start(step, recorder)
        self._step, self._end_was_called = step, False
        self._telemetry.flush()

    def _warn_of_lost_gradients(self, step: int) -> None:
        """Warn if a step with gradients was never ended: such a loop trains nothing."""
        training = self.training
        if training is None or self._step is None or step <= self._step or self._end_was_called:
            return
        if training.find_failure() is not None:
            return
        if training.gradients.expected and not training.gradients.unfinished:
            warnings.warn(
                f"step {self._step} was not ended, so its gradients are dropped and its streamed weights not trained; "
                "call end_step() after your optimizer's step",
                UserWarning,
                stacklevel=4,
            )

    def _warn_of_idle_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Warn where an optimizer has a rate for streamed weights, which are trained at the stream's default one."""
        training = self.training
        if training is None or optimizer in self._seen_optimizers:
            return
        self._seen_optimizers.add(optimizer)
        if training.own_settings or training.lr != AdamWSettings().lr:
            return
        trained = {id(one.parameter): name for name, one in training.parameters().items()}
        held = [trained[id(one)] for group in optimizer.param_groups for one in group["params"] if id(one) in trained]
        if held:
            warnings.warn(
                f"{type(optimizer).__name__} holds {len(held)} streamed weights (as {held[0]}) and cannot step them: "
                f"the stream does, by AdamW with lr={training.lr:g}; give stream_blocks "
                "optimizer=AdamWSettings(lr=...), and this optimizer the parameters outside of blocks",
                UserWarning,
                stacklevel=4,
            )

    def _join_processes(self) -> None:
        """Train with the other processes of the group; it may be younger than the stream, as a trainer makes it."""
        training = self.training
        if training is None or training.processes is not None or not several_processes():
            return
        training.finish()
        self._upkeep.settle()
        processes = Processes(self.device.torch_device, self._options.timeout_s)
        frozen = {
            f"{block.name}.{name}": one.parameter
            for block in self.blocks
            for name, one in block.parameters.items()
            if not training.trains(block.name, name)
        }
        with on_failure(lambda: processes.leave(None)):
            training.join(processes, frozen)

    @alone
    def end_step(self) -> None:
        """End the step; with train="weights" its gradients are applied while the next step runs."""
        self._check_open()
        if self._step is None:
            raise StreamError("end_step: no step is open; call begin_step(step) first")
        self._end_was_called = True
        step, recorder = self._step, self._loader.recorder
        if recorder is None:
            raise StreamError(f"end_step: step {step} was broken off in its end_step; call begin_step(step)")
        if self.training is not None:
            self.training.gradients.require_backward_ended()
        self._upkeep.refuse_changes_within(step)
        flags = None if self._finite is None else self._finite.send(step)
        transfers = self._loader.transfers()
        if self.experts is not None:
            self.experts.end()
        self._loader.stop()
        recorder.close()
        self._upkeep.saw_step(recorder.vram_peak_bytes)
        if self.training is not None:
            self._loader.forget()
            self.training.update(
                self._upkeep.put_updated, lambda: self._check_step(flags, transfers)
            )  # from here on the step counts
        elif self._finite is not None and flags is not None:
            self._finite.keep(flags)
        self._step = None
        self._telemetry.add(recorder)
        self._raise_failures()

    @alone
    def clip_gradients(self, max_norm: float, also: Iterable[Tensor] = ()) -> float:
        """Clip by the norm of all gradients, those of streamed weights and of `also` (parameters on the device).

        Call it after the last backward of the step, before your optimizer. Returns the norm before clipping, so it must
        wait until backward is done and all gradients are on the host.
        """
        training = self._training_within_a_step("clip_gradients")
        check_norm("clip_gradients", max_norm)
        return training.clip(max_norm, list(also))

    @alone
    def unscale_gradients(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Divide the gradients of streamed weights by the scale of the loss; whether any of them overflowed.

        Call it after the last backward of the step, before clipping and `scaler.step(optimizer)`; it waits for the
        gradients. Where one overflowed, of streamed weights or of the optimizer's, neither is stepped, end_step
        raises nothing, and `scaler.update()` lowers the scale.
        """
        return self._training_within_a_step("unscale_gradients").unscale(scaler, optimizer)

    def _training_within_a_step(self, call: str) -> HostTraining:
        self._check_open()
        if self._step is None or self.training is None:
            state = "no step is open" if self.training is not None else f"train={self.train!r} streams no gradients"
            raise StreamError(f"{call}: {state}; it goes with train='weights', between backward and end_step")
        return self.training

    @alone
    def synchronize(self) -> None:
        """Wait for updates and copies that are under way, and raise errors of these or of earlier steps.

        The model's own Parameters are then the weights as they were trained: read them, or save the model. And
        `stats.last` is of the last step: its copies, those made ahead for the next step too, are over.
        """
        if self.training is not None:
            self.training.finish()
        self._loader.finish_copies()
        self._raise_failures(wait=True)
        self._upkeep.settle()

    @alone
    def refresh(self) -> None:
        """Read every parameter again at the next boundary: for changes that torch does not count (`reencode_blocks`).

        With train="weights" call `synchronize` before you write into parameters, and this afterwards.
        """
        self._check_open()
        if self._step is not None:
            raise StreamError(f"refresh: step {self._step} is open; change weights between end_step and begin_step")
        if self.training is not None and not self.training.is_settled:
            raise StreamError(
                "refresh: the model's Parameters are older than the weights that are trained; call synchronize(), "
                "then write into the Parameters, then call refresh()"
            )
        self._upkeep.unread()
        if self.experts is not None:
            self.experts.unread()

    def set_formats(self, formats: Formats) -> None:
        """Use other formats from the next begin_step on; parameters that a mapping does not name keep theirs."""
        self._check_open()
        self._upkeep.pending = self._upkeep.fitting_formats(formats, self._upkeep.chosen)

    def set_slots(self, slots: Slots, *, vram_bytes: int | None = None) -> None:
        """Use other slots from the next begin_step on, as memory allows; all blocks are then sent again."""
        self._check_open()
        self._upkeep.set_slots(slots, vram_bytes)

    def set_limits(self, hints: RuntimeLimitHints) -> None:
        """Limit how much, and how far ahead, is moved, as a conductor asks, until the next begin_step.

        The limits hold at once for every copy that is not started yet; within a step they only tighten. A block that is
        needed is always loaded. `block_precision_map` is no limit and is not read: precisions go through `set_formats`.
        """
        self._check_open()
        if not isinstance(hints, RuntimeLimitHints):
            raise StreamError(
                f"set_limits: expected RuntimeLimitHints (bitplan.streaming.transfer.transfer_limits), got {hints!r}"
            )
        self._loader.tighten(hints)

    def pressure(self) -> Pressure:
        """How full the device is, for a conductor; read from existing counters and events, without waiting."""
        self._check_open()
        return Pressure(self.device.used_bytes(), self.device.total_bytes(), self._loader.slots_full())

    @property
    def formats(self) -> dict[str, str]:
        """The format of every streamed parameter, by full name."""
        return _by_full_name(self._upkeep.formats)

    @property
    def plan(self) -> Plan:
        """What crosses the bus in which format, by full name, and with train="weights" how masters, moments and
        gradients (`NAME.master`, `NAME.moments`, `NAME.gradient`) are kept on the host.
        """
        specs = {f"{block.name}.{name}": spec for block in self.blocks for name, spec in block.specs.items()}
        entries = {
            name: Planned(Choice(fmt, "as it crosses the bus"), specs[name].shape, kind="wire")
            for name, fmt in self.formats.items()
        }
        for block in self.blocks:
            for name, one in block.routed.items():
                choice = Choice(own_format(one.spec, name).name, "when its router chose it", cause="rule")
                entries[f"{block.name}.{name}"] = Planned(choice, one.spec.shape, kind="wire")
        if self.training is not None:
            entries |= self.training.plan.entries
            for name in self.training.trained():
                choice = Choice(
                    str(specs[name].dtype).removeprefix("torch."), "in the type of the weight", cause="default"
                )
                entries[f"{name}.gradient"] = Planned(choice, specs[name].shape, kind="gradient")
        return Plan(entries)

    def truth_of(self, block: str, name: str) -> Tensor:
        """A streamed weight on the host, whatever format it is sent in: its master where it is trained."""
        if self.training is not None and self.training.trains(block, name):
            return self.training.weight(block, name).source(is_own_type=False)
        of_block = self._by_name[block]
        return (of_block.routed | of_block.parameters)[name].parameter.detach()

    @property
    def stats(self) -> StreamStats:
        """Totals, sizes, and figures of the last step whose clocks have been read."""
        self._telemetry.flush()
        ring = self._loader._ring
        return StreamStats(
            steps=self._telemetry.steps,
            bytes_h2d=self.device.bytes_in,
            bytes_d2h=self.device.bytes_out,
            pinned_bytes=self.device.pinned_bytes,
            last=self._telemetry.last,
            experts=None if self.experts is None else self.experts.figures,
            **({} if ring is None else ring.sizes),
        )

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return masters, AdamW's moments and settings, and formats, with train="weights" and between steps; see
        `training_state`.

        The tensors are the ones in use, not copies, as in torch: save or copy them before the next end_step.
        """
        training = self._training_between_steps("state_dict")
        return training_document(training, _by_full_name(self._upkeep.chosen))

    def _training_between_steps(self, call: str) -> HostTraining:
        training = self._require_training(call)
        if self._step is not None:
            raise StreamError(f"{call}: step {self._step} is open; save between end_step and begin_step")
        self.synchronize()
        return training

    def load_state_dict(
        self,
        document: Mapping[str, Any],
        *,
        accept_optimizer_change: bool = False,
        where: str = "the state of the streamed weights",
    ) -> None:
        """Continue as the saved stream would have; a state of another model or optimizer is refused before any change.

        accept_optimizer_change: keep this stream's own settings and learning rate. A step that was not ended is
        abandoned.
        """
        self._restore(document, where, accept_optimizer_change=accept_optimizer_change, copies=True)

    def save(self, path: str | Path | None) -> None:
        """Write `state_dict` into a safetensors file, whole or not at all; tensors are made and written one by one.

        path    None, where states are divided among processes: only give the others this one's parts
        """
        training = self._training_between_steps("save")
        if path is None:
            training.give_parts()
            return
        write_training(path, training, _by_full_name(self._upkeep.chosen))

    def load(self, path: str | Path, *, accept_optimizer_change: bool = False) -> None:
        """Do `load_state_dict` with a file that `save` wrote."""
        self._require_training("load")
        self._restore(load_training(path), str(path), accept_optimizer_change=accept_optimizer_change, copies=False)

    @alone
    def _restore(self, document: Any, where: str, *, accept_optimizer_change: bool, copies: bool) -> None:
        training = self._require_training("load_state_dict")
        state = read_training(
            document, training, self.formats, where=where, accept_optimizer_change=accept_optimizer_change
        )
        try:
            chosen = self._upkeep.fitting_formats(state.formats, self._upkeep.formats)
        except (StreamError, FormatError) as error:
            raise StreamStateError(f"{where}: {error}") from None
        if self._step is not None:
            self._abandon()
        training.finish()
        self._upkeep.replace_weights(
            chosen, lambda: training.restore(state.tensors, state.steps, state.lr, copies=copies)
        )

    def _require_training(self, call: str) -> HostTraining:
        self._check_open()
        if self.training is None:
            raise StreamError(
                f"{call}: train={self.train!r} trains nothing on the host; what is trained is in the model's own "
                "state_dict and in your optimizer's"
            )
        return self.training

    def close(self) -> None:
        """Give all memory back; the model's blocks lie on the host again, with the weights they have now.

        An error of a step that had ended, if it was not raised yet, is raised when all memory is given back.
        """
        failure = self._shut_down()
        if failure is not None:
            raise failure

    @alone
    def _shut_down(self, error: BaseException | None = None) -> Exception | None:
        if self._is_closed:
            return None
        self._is_closed = True
        self._show_to_ddp()
        self._calls.unwrap()
        if self.experts is not None:
            self.experts.unwrap()
        for hook in self._hooks:
            hook.remove()
        try:
            return self._finish()
        finally:
            self._free(error)

    def _finish(self) -> Exception | None:
        """Finish everything under way and give the model its weights; returns an error that was not raised yet."""
        if self._step is not None:
            self._abandon()
        failure: Exception | None = None
        if self.training is not None:
            self.training.finish()
            failure = self.training.failure
            try:
                self._upkeep.settle()
            except StreamError as error:
                failure = failure or error
            if self.training.torn is not None:
                failure = StreamError(self.training.torn)
        elif self._finite is not None:
            failure = self._finite.find(wait=True)
        self.device.finish(self.device.mark())
        self._telemetry.close()
        return failure

    # ---- step boundaries ---------------------------------------------------------------------------------------------

    def _abandon(self) -> None:
        self._loader.stop()
        if self.training is not None:
            self.training.abandon()
        self._step = None

    def _raise_failures(self, *, wait: bool = False) -> None:
        if self.training is not None:
            failure = None if self.training.find_failure() is None else self.training.recover()
            if failure is not None and self.training.torn is None:
                raise failure
            if self.training.torn is not None:
                raise StreamError(self.training.torn)
        elif self._finite is not None:
            not_finite = self._finite.find(wait=wait)
            if not_finite is not None:
                raise not_finite

    def _check_step(self, flags: SentFlags | None, transfers: list[Transfer]) -> None:
        """Raise if the step must not count; runs on the optimizer's thread, before the first master changes."""
        not_finite = None if self._finite is None or flags is None else self._finite.read(flags)
        if not_finite is not None:
            raise not_finite
        self._loader.wait_for_copies(transfers)

    def _before_outside(self, block: StreamedBlock) -> None:
        if self._step is not None:  # its end_step was interrupted
            self._abandon()
        self._upkeep.bring_block_up_to_date(block)
        if self.experts is not None:
            self.experts.bring_up_to_date(block)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StreamError("this stream is closed; call stream_blocks again")

    def _free(self, error: BaseException | None = None) -> None:
        """Give all memory back and end all threads; this may be called in any state."""
        self._loader.close()
        self._upkeep.close()
        if self.experts is not None:
            self.experts.close()
        if self.training is not None:
            self.training.close(error)
        self._host.close()


def _by_full_name(formats: BlockFormats) -> dict[str, str]:
    return {f"{block}.{name}": fmt.name for block, names in formats.items() for name, fmt in names.items()}

"""Callbacks of selective precision for Hugging Face's Trainer, Lightning and TensorBoard.

    Trainer(model, args, callbacks=[trainer_callback(policy)])
    lightning.Trainer(callbacks=[lightning_callback(policy)])
    trainer_callback(policy, scalars=TensorBoardScalars("runs/one"))

Stream the model and make the policy first, then the trainer: streamed blocks stay where they are when a trainer moves
the model to its device. Each checkpoint holds the policy's state and, where the stream trains the weights
(train="weights"), masters and moments; a resumed run restores both.

If the config sets `run_calibration`, calibration runs before the first step on the trainer's own data: the first
batches of the dataset, unshuffled, so that neither the order of training nor its random numbers change.

With train="weights" the trainer's AdamW also holds for the streamed weights, each by its group: rates and schedule,
betas, eps, decay (of norms and biases none, in Hugging Face's Trainer); another optimizer is refused. So do its limit
on the norm of gradients, on the device and on the host together, and its scaler of the loss (fp16).

None of the libraries is imported until it is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim import AdamW, Optimizer

from bitplan.base.optional import require
from bitplan.base.records import on_failure
from bitplan.plan.names import listed
from bitplan.streaming.selective.config import SelectiveError
from bitplan.streaming.selective.run_calibration import Forward
from bitplan.streaming.selective.training_policy import SelectivePrecisionPolicy
from bitplan.streaming.stream_blocks import BlockStream
from bitplan.streaming.training.adamw_settings import AdamWSettings
from bitplan.streaming.training.host_training import HostTraining

log = logging.getLogger("bitplan")
STATE_FILE = "selective_precision.json"
WEIGHTS_FILE = "streamed_weights.safetensors"
WEIGHTS_KEY = "streamed_weights"  # key in a Lightning checkpoint, beside the policy's
EXTRA = "train"


class TensorBoardScalars:
    """Writes the policy's scalars (share of each precision, bytes saved, highest sensitivity) to a TensorBoard log.

    target: a folder, or an existing SummaryWriter
    """

    def __init__(self, target: Any) -> None:
        if isinstance(target, str | Path):
            require("tensorboard", purpose="TensorBoard scalars", extra=EXTRA)
            from torch.utils.tensorboard import SummaryWriter

            self.writer: Any = SummaryWriter(str(target))
        else:
            self.writer = target

    def write(self, policy: SelectivePrecisionPolicy, step: int) -> None:
        for name, value in policy.scalars().items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


def trainer_callback(
    policy: SelectivePrecisionPolicy,
    *,
    scalars: TensorBoardScalars | None = None,
    resume_from: str | Path | None = None,
) -> Any:
    """A callback for transformers.Trainer.

    The state is saved into each checkpoint. A resumed run reads it from `output_dir/checkpoint-STEP`, or from
    `resume_from` where the checkpoint lies elsewhere.
    """
    base = require("transformers", purpose="a Trainer callback", extra=EXTRA).TrainerCallback
    stream = policy.stream
    trains, adamw = stream.training is not None, _FollowedOptimizer(stream)

    class SelectivePrecisionCallback(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self._max_norm = 0.0  # of the open step

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not state.global_step and policy.lacks_calibration:
                policy.calibrate(_unshuffled(kwargs["train_dataloader"], args.train_batch_size), progress=False)
            if state.global_step:
                folder = Path(resume_from or Path(args.output_dir) / f"checkpoint-{state.global_step}")
                weights = (lambda: stream.load(folder / WEIGHTS_FILE)) if trains else None
                _restore(policy, lambda: policy.load(folder / STATE_FILE), weights)
            if kwargs.get("optimizer") is not None:  # an optimizer that cannot be followed is refused before a step
                adamw.follow(kwargs["optimizer"])

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            policy.begin_step(state.global_step)
            if trains and args.max_grad_norm:
                # The trainer would clip by the norm of the gradients on the device alone: we clip instead, for this
                # step.
                self._max_norm, args.max_grad_norm = args.max_grad_norm, 0.0

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            _unscale(stream, kwargs["optimizer"], getattr(kwargs["optimizer"], "scaler", None))
            if self._max_norm:
                stream.clip_gradients(self._max_norm, kwargs["model"].parameters())
                self._max_norm, args.max_grad_norm = 0.0, self._max_norm
            adamw.follow(kwargs["optimizer"])
            policy.collect_block_grad_stats()
            policy.compute_hints(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            policy.end_step()
            if scalars is not None:
                scalars.write(policy, state.global_step)
            self._make_current(control)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._make_current(control)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            policy.save(folder / STATE_FILE)
            if trains:
                stream.save(folder / WEIGHTS_FILE)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if trains:
                stream.synchronize()

        def _make_current(self, control: Any) -> None:
            """Before the trainer saves the model, copy the masters into its Parameters."""
            if trains and control.should_save:
                stream.synchronize()

    return SelectivePrecisionCallback()


def lightning_callback(
    policy: SelectivePrecisionPolicy,
    *,
    scalars: TensorBoardScalars | None = None,
    calibration_forward: Forward | None = None,
) -> Any:
    """A callback for Lightning's Trainer; scalars also go to the logger that the trainer has.

    calibration_forward   (module, batch) -> anything: how to run a batch of the training data for calibration, which a
                          LightningModule does not define. Without it nothing is calibrated, and the log says so.
    """
    base = require("lightning.pytorch", purpose="a Lightning callback", extra=EXTRA).Callback
    stream = policy.stream
    trains, adamw = stream.training is not None, _FollowedOptimizer(stream)

    class SelectivePrecisionCallback(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self._opened: int | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if calibration_forward is not None and not trainer.global_step and policy.lacks_calibration:
                batches = _unshuffled(trainer.train_dataloader)
                policy.calibrate(batches, forward=calibration_forward, progress=False)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if self._opened is None:  # not while gradients are accumulated
                self._opened = trainer.global_step
                policy.begin_step(self._opened)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            assert self._opened is not None
            _unscale(stream, optimizer, getattr(trainer.precision_plugin, "scaler", None))
            if trains and trainer.gradient_clip_val:
                if str(trainer.gradient_clip_algorithm or "norm") not in ("norm", "GradClipAlgorithmType.NORM"):
                    raise SelectiveError(
                        f"gradient_clip_algorithm={trainer.gradient_clip_algorithm!r}: the streamed weights' gradients "
                        "are clipped by their norm; use 'norm', or gradient_clip_val=None"
                    )
                # Before the trainer clips: it then finds the norm within the limit.
                parameters = (one for group in optimizer.param_groups for one in group["params"])
                stream.clip_gradients(float(trainer.gradient_clip_val), parameters)
            adamw.follow(optimizer)
            policy.collect_block_grad_stats()
            policy.compute_hints(self._opened)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == self._opened:
                return
            self._opened = None
            policy.end_step()
            pl_module.log_dict(policy.scalars())
            if scalars is not None:
                scalars.write(policy, trainer.global_step)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if trains:
                stream.synchronize()

        def state_dict(self) -> dict[str, Any]:
            # The stream's state_dict updates the model's Parameters, which the checkpoint holds by reference.
            return {**policy.state_dict(), **({WEIGHTS_KEY: stream.state_dict()} if trains else {})}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            state = dict(state_dict)
            weights = state.pop(WEIGHTS_KEY, None)
            if trains and weights is None:
                raise SelectiveError(
                    "the Lightning checkpoint has no streamed weights, and this stream trains them (train='weights'); "
                    "resume from a checkpoint of such a run"
                )
            if not trains and weights is not None:
                raise SelectiveError(
                    f"the Lightning checkpoint has streamed weights, and with train={stream.train!r} none are trained"
                )
            _restore(
                policy,
                lambda: policy.load_state_dict(state, where="the Lightning checkpoint's selective precision state"),
                (lambda: stream.load_state_dict(weights, where="the Lightning checkpoint's streamed weights"))
                if trains
                else None,
            )

    return SelectivePrecisionCallback()


def _unshuffled(loader: Any, batch_size: int | None = None) -> Any:
    """A loader of our own over the data of a trainer's loader, from the beginning."""
    from torch import Generator
    from torch.utils.data import DataLoader

    size = loader.batch_size or batch_size or 1
    return DataLoader(loader.dataset, batch_size=size, collate_fn=loader.collate_fn, generator=Generator())


def _unscale(stream: BlockStream, optimizer: Any, scaler: Any) -> None:
    """Before clipping: a trainer in fp16 scales the loss, and skips a step whose gradients overflow."""
    if stream.training is not None and scaler is not None:
        stream.unscale_gradients(scaler, unwrapped(optimizer))


class _FollowedOptimizer:
    """Passes the settings of a trainer's AdamW on to the stream, which trains the streamed weights itself."""

    def __init__(self, stream: BlockStream) -> None:
        self._stream = stream
        self._optimizer: Any = None
        self._groups: dict[int, list[tuple[str, str]]] = {}  # number of a group -> the streamed weights in it

    def follow(self, optimizer: Any) -> None:
        """Take over the settings, before the optimizer steps; it may be wrapped, as accelerate does."""
        training, optimizer = self._stream.training, unwrapped(optimizer)
        if training is None:
            return
        if optimizer is not self._optimizer:
            self._groups = self._find_streamed(training, optimizer)
            self._optimizer = optimizer
            self._say_what_holds(training)
        settings = {at: _settings_of(optimizer.param_groups[at]) for at in self._groups}
        training.own_settings = {key: settings[at] for at, keys in self._groups.items() for key in keys}
        rates = {one.lr for one in settings.values()}
        training.lr = rates.pop() if len(rates) == 1 else training.lr

    def _find_streamed(self, training: HostTraining, optimizer: Any) -> dict[int, list[tuple[str, str]]]:
        trained = {
            id(one.parameter): (block.name, name)
            for block in self._stream.blocks
            for name, one in block.parameters.items()
            if training.trains(block.name, name) and one.parameter.requires_grad
        }
        groups: dict[int, list[tuple[str, str]]] = {}
        for at, group in enumerate(optimizer.param_groups):
            if keys := [trained.pop(id(one)) for one in group["params"] if id(one) in trained]:
                groups[at] = keys
        if not groups:
            log.warning(
                "bitplan: the trainer's optimizer holds none of the streamed weights, so its settings are not theirs: "
                "they keep those of stream_blocks, and a learning rate of %g (stream.training.lr)",
                training.lr,
            )
            return groups
        if type(optimizer) is not AdamW:
            kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            raise SelectiveError(
                f"the trainer's optimizer is {kind}, and streamed weights are trained by AdamW on the host: use "
                "torch.optim.AdamW (in TrainingArguments: optim='adamw_torch'), or train adapters (train='adapters')"
            )
        if trained:
            raise SelectiveError(
                f"{listed([f'{block}.{name}' for block, name in trained.values()])}: streamed and trained, and not "
                "among the parameters of the trainer's optimizer; add them to it, or call requires_grad_(False) on them"
            )
        return groups

    def _say_what_holds(self, training: HostTraining) -> None:
        given, default = training.settings, AdamWSettings()
        for at in self._groups:
            of_group = _settings_of(self._optimizer.param_groups[at])
            for name in ("betas", "eps", "weight_decay"):
                asked, holds = getattr(given, name), getattr(of_group, name)
                if asked not in (getattr(default, name), holds):
                    log.warning(
                        "bitplan: %s=%s of the trainer's optimizer holds for streamed weights of its group %d, not the "
                        "%s that stream_blocks was given",
                        *(name, holds, at, asked),
                    )


def unwrapped(optimizer: Any) -> Any:
    """torch's optimizer, out of a trainer's wrapper."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, Optimizer) else optimizer


def _settings_of(group: dict[str, Any]) -> AdamWSettings:
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise SelectiveError(
                f"the trainer's AdamW has {name}=True, which the host's AdamW does not know; leave it out"
            )
    return AdamWSettings(group["lr"], group["betas"], group["eps"], group["weight_decay"])


def _restore(
    policy: SelectivePrecisionPolicy, load_policy: Callable[[], None], load_weights: Callable[[], None] | None
) -> None:
    """Load both or neither: a policy must not decide from a training that the stream's weights have not had."""
    if load_weights is None:
        load_policy()
        return
    before = policy.state_dict()
    load_policy()
    with on_failure(lambda: policy.load_state_dict(before)):
        load_weights()

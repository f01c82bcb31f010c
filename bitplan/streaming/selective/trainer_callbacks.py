"""Callbacks for Hugging Face's Trainer (and TRL's, which are made of it), Lightning and TensorBoard.

    Trainer(model, args, callbacks=[streaming_callback(model, "model.layers.*", train="weights")])
    Trainer(model, args, callbacks=[trainer_callback(policy)])        with selective precision
    lightning.Trainer(callbacks=[lightning_callback(policy)])         or lightning_callback(stream)
    trainer_callback(policy, scalars=TensorBoardScalars("runs/one"))

Stream the model and make the policy first, then the trainer: streamed blocks stay where they are when a trainer moves
the model to its device. Each checkpoint holds the policy's state and, where the stream trains the weights
(train="weights"), masters and moments; a resumed run restores both.

If the config sets `run_calibration`, calibration runs before the first step on the trainer's own data: the first
batches of the dataset, unshuffled, so that neither the order of training nor its random numbers change.

With train="weights" the trainer's optimizer also holds for the streamed weights, each by its group: rates and schedule,
betas, eps, decay (of norms and biases none, in Hugging Face's Trainer); one that cannot step weights one by one on the
host is refused. So do its limit on the norm of gradients, on the device and on the host together, and its scaler of the
loss (fp16).

None of the libraries is imported until it is asked for.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from bitplan.base.errors import StreamError
from bitplan.base.optional import require
from bitplan.base.records import on_failure
from bitplan.plan.names import listed
from bitplan.streaming.block_stream import BlockStream, stream_blocks
from bitplan.streaming.selective.calibration import Forward
from bitplan.streaming.selective.config import SelectiveError
from bitplan.streaming.selective.training_policy import SelectivePrecisionPolicy
from bitplan.streaming.training.adamw import AdamWSettings
from bitplan.streaming.training.host_training import HostTraining
from bitplan.streaming.training.optimizers import HostOptimizer, Settings
from bitplan.streaming.training.processes import hide_from_ddp

if TYPE_CHECKING:
    from bitplan.streaming.selective.run_controller import RunController

log = logging.getLogger("bitplan")
Policy: TypeAlias = "SelectivePrecisionPolicy | RunController"
STATE_FILE = "selective_precision.json"
NO_LIMIT = sys.float_info.max  # norms are measured, and nothing is clipped
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

    def write(self, policy: Policy, step: int) -> None:
        for name, value in policy.scalars().items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _TrainerSteps:
    """A trainer's steps on a stream, with a policy of selective precision, a plan over the run, or neither."""

    def __init__(self, subject: Policy | BlockStream, scalars: TensorBoardScalars | None) -> None:
        self.policy = None if isinstance(subject, BlockStream) else subject
        self.stream = subject if isinstance(subject, BlockStream) else subject.stream
        self.trains, self.adamw = self.stream.training is not None, _FollowedOptimizer(self.stream)
        self._scalars = scalars

    def begin(self, step: int, optimizer: Any = None) -> None:
        if optimizer is not None:  # with update_in_backward the backward steps weights by these settings
            self.adamw.follow(optimizer)
        (self.policy or self.stream).begin_step(step)

    @property
    def updates_early(self) -> bool:
        return self.stream.training is not None and self.stream.training.updates_early

    def check_model(self, model: Any) -> None:
        """Refuse another model than the streamed one."""
        streamed = self.stream.model
        if model is not None and not {*model.modules()} & {streamed} and not {*streamed.modules()} & {model}:
            raise SelectiveError(
                f"the trainer trains another {type(model).__name__} than the one that is streamed, which would get no "
                "gradients; give the trainer the model that was given to streaming_callback, not model_init="
            )

    def check_settings(self, settings: Any, where: str, needed: Mapping[str, float]) -> None:
        """Refuse settings that update_in_backward=True cannot follow."""
        for name, value in needed.items() if self.updates_early else ():
            given = getattr(settings, name)
            if (given or 0) != value:
                raise SelectiveError(
                    f"update_in_backward=True steps weights as their gradients come, so the trainer's {name} must be "
                    f"{value}, got {given}; pass {where}(..., {name}={value}), or stream without update_in_backward"
                )

    def before_optimizer(
        self, step: int, optimizer: Any, scaler: Any, max_norm: float, parameters: Iterable[Tensor]
    ) -> None:
        """Unscale and clip the gradients, take the optimizer's settings over, and let the policy decide."""
        if self.trains and scaler is not None:  # before clipping; a step that overflows is skipped
            self.stream.unscale_gradients(scaler, unwrapped(optimizer))
        if self.trains and max_norm and not self.updates_early:
            self.stream.clip_gradients(max_norm, parameters)
        self.adamw.follow(optimizer)
        if isinstance(self.policy, SelectivePrecisionPolicy):
            self.policy.collect_block_grad_stats()
            self.policy.compute_hints(step)

    def end(self, step: int) -> dict[str, float]:
        """End the step; returns the policy's scalars."""
        (self.policy or self.stream).end_step()
        if self.policy is None:
            return {}
        if self._scalars is not None:
            self._scalars.write(self.policy, step)
        return self.policy.scalars()

    def synchronize(self) -> None:
        """Make the model's Parameters the trained weights, before the trainer saves or ends."""
        if self.trains:
            self.stream.synchronize()

    @property
    def lacks_calibration(self) -> bool:
        return isinstance(self.policy, SelectivePrecisionPolicy) and self.policy.lacks_calibration

    def calibrate(self, loader: Any, batch_size: int | None = None, forward: Forward | None = None) -> None:
        if self.lacks_calibration:
            assert isinstance(self.policy, SelectivePrecisionPolicy)
            self.policy.calibrate(_unshuffled(loader, batch_size), forward=forward, progress=False)

    def restore(self, load_policy: Callable[[Policy], None], load_weights: Callable[[], None]) -> None:
        """Load both or neither: a policy must not decide from a training that the stream's weights have not had."""
        with ExitStack() as undo:
            if self.policy is not None:
                undo.enter_context(on_failure(partial(self.policy.load_state_dict, self.policy.state_dict())))
                load_policy(self.policy)
            if self.trains:
                load_weights()


def streaming_callback(
    model: nn.Module, blocks: str = "model.layers.*", *, resume_from: str | Path | None = None, **options: Any
) -> Any:
    """A callback for transformers.Trainer, and TRL's trainers, that streams the model's blocks: `stream_blocks` in one
    line, called before the trainer moves the model. Options are those of `stream_blocks`.

    The stream is `callback.stream`; it stays open after training, for evaluation: close it when you are done.
    """
    return trainer_callback(stream_blocks(model, blocks, **options), resume_from=resume_from)


def trainer_callback(
    subject: Policy | BlockStream,
    *,
    scalars: TensorBoardScalars | None = None,
    resume_from: str | Path | None = None,
) -> Any:
    """A callback for transformers.Trainer, of a policy of selective precision (or `over_run`), or of a stream alone.

    The state is saved into each checkpoint. A resumed run reads it from `output_dir/checkpoint-STEP`, or from
    `resume_from` where the checkpoint lies elsewhere.
    """
    base = require("transformers", purpose="a Trainer callback", extra=EXTRA).TrainerCallback
    steps = _TrainerSteps(subject, scalars)

    class StreamingCallback(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.stream = steps.stream
            self._max_norm: float | None = None  # of the open step
            self._unlimited: Any = None  # the arguments whose limit is switched off for it

        def _give_limit_back(self) -> None:
            if self._unlimited is not None:
                self._unlimited.max_grad_norm = self._max_norm
            self._max_norm = self._unlimited = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._give_limit_back()  # of a training that broke off within a step
            steps.check_model(kwargs.get("model"))
            steps.check_settings(args, "TrainingArguments", {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1})
            if not state.global_step and steps.lacks_calibration:
                steps.calibrate(kwargs["train_dataloader"], args.train_batch_size)
            if kwargs.get("optimizer") is not None:  # an optimizer that cannot be followed is refused before a step
                steps.adamw.follow(kwargs["optimizer"])
            if state.global_step:
                folder = Path(resume_from or Path(args.output_dir) / f"checkpoint-{state.global_step}")
                if steps.trains and not (folder / WEIGHTS_FILE).is_file():
                    raise SelectiveError(
                        f"{folder} has no {WEIGHTS_FILE}, the masters and moments of streamed weights: it is of a run "
                        "that did not train them. If the checkpoint is elsewhere, pass streaming_callback(..., "
                        "resume_from=FOLDER); to go on without moments load the model from it (from_pretrained) and "
                        "train without resume_from_checkpoint"
                    )
                steps.restore(
                    lambda policy: policy.load(folder / STATE_FILE), lambda: steps.stream.load(folder / WEIGHTS_FILE)
                )

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._give_limit_back()
            steps.begin(state.global_step, kwargs.get("optimizer"))
            if steps.trains:
                # The trainer would clip by the norm of the gradients on the device alone, and log it: we clip instead,
                # for this step, or measure the norm of all.
                self._max_norm, self._unlimited, args.max_grad_norm = args.max_grad_norm, args, 0.0

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer, limit = kwargs["optimizer"], self._max_norm or NO_LIMIT
            scaler = getattr(optimizer, "scaler", None)
            steps.before_optimizer(state.global_step, optimizer, scaler, limit, kwargs["model"].parameters())
            self._give_limit_back()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps.end(state.global_step)
            self.on_epoch_end(args, state, control)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if control.should_save:
                steps.synchronize()

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if steps.policy is not None and args.should_save:  # of several processes one writes
                steps.policy.save(folder / STATE_FILE)
            if steps.trains and args.should_save:
                steps.stream.save(folder / WEIGHTS_FILE)
            elif steps.trains:
                steps.stream.save(None)  # the others give their masters and moments, if these are divided

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            # The trainer has the norm of what lies on the device alone.
            norm = None if steps.stream.training is None else steps.stream.training.gradient_norm
            for entry in (logs, *state.log_history[-1:]):
                if norm is not None and entry is not None and "grad_norm" in entry:
                    entry["grad_norm"] = norm

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps.synchronize()

    return StreamingCallback()


def lightning_callback(
    subject: Policy | BlockStream,
    *,
    scalars: TensorBoardScalars | None = None,
    calibration_forward: Forward | None = None,
) -> Any:
    """A callback for Lightning's Trainer, of a policy or of a stream alone; scalars also go to the trainer's logger.

    calibration_forward   (module, batch) -> anything: how to run a batch of the training data for calibration, which a
                          LightningModule does not define. Without it nothing is calibrated, and the log says so.
    """
    base = require("lightning.pytorch", purpose="a Lightning callback", extra=EXTRA).Callback
    steps = _TrainerSteps(subject, scalars)
    stream = steps.stream

    class StreamingCallback(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.stream = stream
            self._opened: int | None = None

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            for path, module in pl_module.named_modules():
                if module is stream.model and path:  # DistributedDataParallel wraps the LightningModule
                    hide_from_ddp(pl_module, [f"{path}.{name}" for name in stream.formats])

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            steps.check_settings(trainer, "Trainer", {"gradient_clip_val": 0.0, "accumulate_grad_batches": 1})
            if calibration_forward is not None and not trainer.global_step:
                steps.calibrate(trainer.train_dataloader, forward=calibration_forward)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if self._opened is None:  # not while gradients are accumulated
                self._opened = trainer.global_step
                steps.begin(self._opened, next(iter(trainer.optimizers), None))

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            assert self._opened is not None
            max_norm, how = float(trainer.gradient_clip_val or 0.0), str(trainer.gradient_clip_algorithm or "norm")
            if steps.trains and max_norm and how not in ("norm", "GradClipAlgorithmType.NORM"):
                raise SelectiveError(
                    f"gradient_clip_algorithm={trainer.gradient_clip_algorithm!r}: the streamed weights' gradients "
                    "are clipped by their norm; use 'norm', or gradient_clip_val=None"
                )
            # Before the trainer clips: it then finds the norm within the limit.
            parameters = (one for group in optimizer.param_groups for one in group["params"])
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            steps.before_optimizer(self._opened, optimizer, scaler, max_norm, parameters)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step != self._opened:
                self._opened = None
                pl_module.log_dict(steps.end(trainer.global_step))

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            steps.synchronize()

        def state_dict(self) -> dict[str, Any]:
            # The stream's state_dict updates the model's Parameters, which the checkpoint holds by reference.
            decided = {} if steps.policy is None else steps.policy.state_dict()
            return {**decided, **({WEIGHTS_KEY: stream.state_dict()} if steps.trains else {})}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            state = dict(state_dict)
            weights = state.pop(WEIGHTS_KEY, None)
            if steps.trains and weights is None:
                raise SelectiveError(
                    "the Lightning checkpoint has no streamed weights, and this stream trains them (train='weights'); "
                    "resume from a checkpoint of such a run"
                )
            if not steps.trains and weights is not None:
                raise SelectiveError(
                    f"the Lightning checkpoint has streamed weights, and with train={stream.train!r} none are trained"
                )
            where = "the Lightning checkpoint's"
            steps.restore(
                lambda policy: policy.load_state_dict(state, where=f"{where} selective precision state"),
                lambda: stream.load_state_dict(weights, where=f"{where} streamed weights"),
            )

    return StreamingCallback()


def _unshuffled(loader: Any, batch_size: int | None = None) -> Any:
    """A loader of our own over the data of a trainer's loader, from the beginning."""
    from torch import Generator
    from torch.utils.data import DataLoader

    size = loader.batch_size or batch_size or 1
    return DataLoader(loader.dataset, batch_size=size, collate_fn=loader.collate_fn, generator=Generator())


class _FollowedOptimizer:
    """Passes the settings of a trainer's AdamW on to the stream, which trains the streamed weights itself."""

    def __init__(self, stream: BlockStream) -> None:
        self._stream = stream
        self._optimizer: Any = None
        self._groups: dict[int, list[tuple[str, str]]] = {}  # number of a group -> the streamed weights in it
        self._settings: dict[int, Settings] = {}  # of each group, as last seen

    def follow(self, optimizer: Any) -> None:
        """Take over the settings, before the optimizer steps; it may be wrapped, as accelerate does."""
        training, optimizer = self._stream.training, unwrapped(optimizer)
        if training is None:
            return
        if optimizer is not self._optimizer:
            self._groups, self._settings = self._find_streamed(training, optimizer), {}
            self._optimizer = optimizer
            self._say_what_holds(training)
        self._settings = settings = {at: _settings_of(optimizer, at, self._settings.get(at)) for at in self._groups}
        by_weight = {
            key: settings[at].of(training.weight(*key).shape) for at, keys in self._groups.items() for key in keys
        }
        try:
            training.own_settings = by_weight
        except StreamError as error:
            raise SelectiveError(f"the trainer's optimizer cannot train streamed weights: {error}") from None
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
        if trained:
            raise SelectiveError(
                f"{listed([f'{block}.{name}' for block, name in trained.values()])}: streamed and trained, and not "
                "among the parameters of the trainer's optimizer; add them to it, or call requires_grad_(False) on them"
            )
        return groups

    def _say_what_holds(self, training: HostTraining) -> None:
        settings, default = training.settings, AdamWSettings()
        for at in self._groups:
            of_group = _settings_of(self._optimizer, at)
            if not (isinstance(settings, AdamWSettings) and isinstance(of_group, AdamWSettings)):
                log.info("bitplan: streamed weights of group %d are trained by %s", at, of_group)
                continue
            for name in ("betas", "eps", "weight_decay"):
                asked, holds = getattr(settings, name), getattr(of_group, name)
                if asked not in (getattr(default, name), holds):
                    log.warning(
                        "bitplan: %s=%s of the trainer's optimizer holds for streamed weights of its group %d, not the "
                        "%s that stream_blocks was given",
                        *(name, holds, at, asked),
                    )


def unwrapped(optimizer: Any) -> Any:
    """Return torch's optimizer inside a trainer's wrapper."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, Optimizer) else optimizer


def _settings_of(optimizer: Optimizer, at: int, before: Settings | None = None) -> Settings:
    """The settings of one group, for the host: AdamW's, or those that the optimizer's class takes.

    before: those of the last step; where only the rate differs, the optimizer is not tried again.
    """
    group = optimizer.param_groups[at]
    if type(optimizer) is not AdamW:
        known = inspect.signature(type(optimizer)).parameters.keys() - {"params", "lr"}
        settings = {name: group[name] for name in known if name in group}
        if isinstance(before, HostOptimizer) and before.settings == settings:
            return before.with_lr(float(group["lr"]))
        try:
            return HostOptimizer(type(optimizer), group["lr"], settings)
        except StreamError as error:
            raise SelectiveError(
                f"the trainer's optimizer cannot train streamed weights: {error}; with AdamW "
                "(in TrainingArguments: optim='adamw_torch') it does, or train adapters (train='adapters')"
            ) from None
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise SelectiveError(
                f"the trainer's AdamW has {name}=True, which the host's AdamW does not know; leave it out"
            )
    return AdamWSettings(group["lr"], group["betas"], group["eps"], group["weight_decay"])

"""Selective precision where people train: Hugging Face's Trainer, Lightning, TensorBoard.

    Trainer(model, args, callbacks=[trainer_callback(policy)])
    lightning.Trainer(callbacks=[lightning_callback(policy)])
    trainer_callback(policy, scalars=TensorBoardScalars("runs/one"))

Stream the model and make the policy first, then the trainer: streamed blocks stay where they are when a trainer moves
the model to its device. The policy's state goes into each checkpoint, and comes back with it; so do masters and moments
where the stream trains the weights (train="weights"), without which only the policy would go on.

None of the libraries is imported until it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bitplan.optional import require
from bitplan.plan.selective_config import SelectiveError
from bitplan.runtime.selective_precision import SelectivePrecisionPolicy

STATE_FILE = "selective_precision.json"
WEIGHTS_FILE = "streamed_weights.safetensors"
WEIGHTS_KEY = "streamed_weights"  # in a Lightning checkpoint, beside the policy's keys
EXTRA = "train"


class TensorBoardScalars:
    """Writes the policy's scalars (share of each precision, bytes saved, highest sensitivity) to a TensorBoard log.

    target: a folder, or a SummaryWriter that you have
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
    trains = stream.training is not None

    class SelectivePrecisionCallback(base):  # type: ignore[misc, valid-type]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step:
                folder = Path(resume_from or Path(args.output_dir) / f"checkpoint-{state.global_step}")
                weights = (lambda: stream.load(folder / WEIGHTS_FILE)) if trains else None
                _restore(policy, lambda: policy.load(folder / STATE_FILE), weights)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            policy.begin_step(state.global_step)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
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
            """Before the trainer saves the model: its Parameters become what the masters are."""
            if trains and control.should_save:
                stream.synchronize()

    return SelectivePrecisionCallback()


def lightning_callback(policy: SelectivePrecisionPolicy, *, scalars: TensorBoardScalars | None = None) -> Any:
    """A callback for Lightning's Trainer; scalars also go to the logger that the trainer has."""
    base = require("lightning.pytorch", purpose="a Lightning callback", extra=EXTRA).Callback
    stream = policy.stream
    trains = stream.training is not None

    class SelectivePrecisionCallback(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self._opened: int | None = None

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if self._opened is None:  # not in the middle of an accumulation
                self._opened = trainer.global_step
                policy.begin_step(self._opened)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            assert self._opened is not None
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
            # The stream's own makes the model's Parameters current; the checkpoint holds these by reference.
            return {**policy.state_dict(), **({WEIGHTS_KEY: stream.state_dict()} if trains else {})}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            found = dict(state_dict)
            weights = found.pop(WEIGHTS_KEY, None)
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
                lambda: policy.load_state_dict(found, where="the Lightning checkpoint's selective precision state"),
                (lambda: stream.load_state_dict(weights, where="the Lightning checkpoint's streamed weights"))
                if trains
                else None,
            )

    return SelectivePrecisionCallback()


def _restore(
    policy: SelectivePrecisionPolicy, load_policy: Callable[[], None], load_weights: Callable[[], None] | None
) -> None:
    """Both or none: a policy that knows another training than the stream has would decide from what never was."""
    if load_weights is None:
        load_policy()
        return
    before = policy.state_dict()
    load_policy()
    try:
        load_weights()
    except BaseException:
        policy.load_state_dict(before)
        raise

"""Selective precision where people train: Hugging Face's Trainer, Lightning, TensorBoard.

    Trainer(model, args, callbacks=[trainer_callback(policy)])
    lightning.Trainer(callbacks=[lightning_callback(policy)])
    trainer_callback(policy, scalars=TensorBoardScalars("runs/one"))

Stream the model and make the policy first, then the trainer. Trainers move a whole model to their device when they
start; a streamed block must stay where it is, so a callback keeps `model.to` from reaching into the blocks until
training ends. Policy state goes into each checkpoint, and comes back with it.

None of the libraries is imported until it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from bitplan.plan.selective_config import SelectiveError
from bitplan.runtime.selective_precision import SelectivePrecisionPolicy
from bitplan.runtime.stream_blocks import BlockStream

STATE_FILE = "selective_precision.json"
INSTALL = "pip install 'bitplan[train]'"


class TensorBoardScalars:
    """Writes the policy's scalars (share of each precision, bytes saved, highest sensitivity) to a TensorBoard log.

    target: a folder, or a SummaryWriter that you have
    """

    def __init__(self, target: Any) -> None:
        if isinstance(target, str | Path):
            _import("tensorboard", "TensorBoard scalars")
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
    base = _import("transformers", "a Trainer callback").TrainerCallback
    release = keep_in_place(policy.stream)

    class SelectivePrecisionCallback(base):  # type: ignore[misc, valid-type]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step:
                folder = Path(resume_from or Path(args.output_dir) / f"checkpoint-{state.global_step}")
                policy.load(folder / STATE_FILE)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            policy.begin_step(state.global_step)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            policy.collect_block_grad_stats()
            policy.compute_hints(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            policy.end_step()
            if scalars is not None:
                scalars.write(policy, state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            policy.save(Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE_FILE)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            release()

    return SelectivePrecisionCallback()


def lightning_callback(policy: SelectivePrecisionPolicy, *, scalars: TensorBoardScalars | None = None) -> Any:
    """A callback for Lightning's Trainer; scalars also go to the logger that the trainer has."""
    base = _import("lightning.pytorch", "a Lightning callback").Callback
    release = keep_in_place(policy.stream)

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
            release()

        def state_dict(self) -> dict[str, Any]:
            return policy.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            policy.load_state_dict(state_dict, where="the Lightning checkpoint's selective precision state")

    return SelectivePrecisionCallback()


def keep_in_place(stream: BlockStream) -> Callable[[], None]:
    """Streamed blocks ignore `model.to(...)` until the function that comes back is called."""
    modules = [block.module for block in stream.blocks]

    def stay(module: nn.Module) -> Callable[..., nn.Module]:
        return lambda *_args, **_options: module

    for module in modules:
        module._apply = stay(module)  # type: ignore[method-assign]

    def release() -> None:
        for module in modules:
            module.__dict__.pop("_apply", None)

    return release


def _import(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name.split(".")[0]):
            raise  # it is there, and something that it needs is not
        raise SelectiveError(f"{what} needs {name.split('.')[0]}, which is not installed: {INSTALL}") from None

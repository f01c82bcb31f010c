"""What real processes do in the tests of several processes: each job returns what its process has at the end."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitplan.base import process_status
from bitplan.base.errors import BitplanError, StreamError
from bitplan.streaming.block_stream import BlockStream
from bitplan.streaming.selective.trainer_callbacks import lightning_callback, trainer_callback
from bitplan.streaming.training import processes
from bitplan.streaming.training.adamw import AdamWSettings
from bitplan.streaming.training.host_training import HostTraining
from bitplan.streaming.training.optimizers import Settings
from bitplan.streaming.training.trained_weight import TrainedWeight
from tests.processes import SERVER
from tests.streaming.stream_samples import batch, bytes_of, make_stack, streaming

SETTINGS = AdamWSettings(lr=1e-2, weight_decay=0.1)
STEPS = 3
HANGS_S = 300.0  # what takes longer on the slowest machine does not end
Result = dict[str, Any]


def in_processes(count: int, jobs: list[tuple[str, dict[str, Any]]], folder: Path) -> list[list[Result | None]]:
    """Run jobs one after the other in `count` processes of one group; what each returned, by job and rank."""
    pipes, started = [], []
    for rank in range(count):
        ours, theirs = SERVER.Pipe()
        started.append(
            SERVER.Process(target=_serve, args=(theirs, str(folder / "store"), rank, count, jobs), daemon=True)
        )
        started[-1].start()
        theirs.close()
        pipes.append(ours)
    results: list[list[Result | None]] = []
    for _ in jobs:
        results.append([])
        for pipe in pipes:
            try:
                assert pipe.poll(HANGS_S), "a process hangs"
                results[-1].append(pickle.loads(pipe.recv_bytes()))
            except EOFError:  # it died
                results[-1].append(None)
    for process in started:
        process.join(HANGS_S)
        process.kill()
    return results


def _serve(pipe: Any, store: str, rank: int, count: int, jobs: list[tuple[str, dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    process_status.ANSWER_WAIT_S = processes.SUBGROUP_WAIT_S = HANGS_S  # jobs that must wait to the end set their own
    limit = timedelta(seconds=3 * HANGS_S)  # of torch: in_processes is there first
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=limit)
    for name, options in jobs:
        try:
            result: Result = globals()[name](rank, count, **options)
        except Exception as error:
            result = {"error": type(error).__name__, "message": str(error)}
        pipe.send_bytes(pickle.dumps(result))  # numbers, not shared memory
    dist.destroy_process_group()


# ---- jobs ------------------------------------------------------------------------------------------------------------


def train(rank: int, _count: int, *, dtype: torch.dtype = torch.float32, **options: Any) -> Result:
    """Train the blocks; everything else is frozen. One batch a process and step."""
    model = frozen_outside(make_stack(adapters=False, count=2, dtype=dtype))
    losses, early = [], []
    with streaming(model, **{"train": "weights", "optimizer": SETTINGS, **options}) as stream:
        assert stream.training is not None
        for step in range(STEPS):
            with one_step(stream, step):
                losses.append(backward(model, batch(10 * step + rank, dtype)))
                if step == 1:
                    early = stepped_early(stream.training)
        stream.synchronize()
        nbytes = {**stream.training.host_bytes, "held": bytes_of(model.layers, stream._host, stream.training)}
        state = stream.state_dict()
        tensors = {name: one.clone() for name, one in state["tensors"].items()}
        parameters = {name: one.clone() for name, one in model.layers.state_dict().items()}
        return {
            "losses": losses,
            "tensors": tensors,
            "bytes": nbytes,
            "parameters": parameters,
            "state": state,
            "early": early,
        }


def train_alone(count: int, *, dtype: torch.dtype = torch.float32, joined: bool = False, **options: Any) -> Result:
    """The same in one process: the batches of all processes one by one (accumulated), or as one."""
    model = frozen_outside(make_stack(adapters=False, count=2, dtype=dtype))
    losses = []
    with streaming(model, **{"train": "weights", "optimizer": SETTINGS, **options}) as stream:
        for step in range(STEPS):
            with one_step(stream, step):
                inputs = [batch(10 * step + rank, dtype) for rank in range(count)]
                inputs = [torch.cat(inputs)] if joined else inputs
                losses.append(sum(backward(model, one, 1 / len(inputs)) for one in inputs))
        return {"losses": losses, "tensors": tensors_of(stream)}


def train_with_ddp(rank: int, _count: int, *, max_norm: float | None = None) -> Result:
    """All of the model, under DistributedDataParallel, two batches a step; one norm for clipping."""
    model = make_stack(adapters=False, count=2)
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        ddp = DistributedDataParallel(model)
        outside = [one for name, one in model.named_parameters() if name not in stream.formats]
        adamw, norms = torch.optim.AdamW(outside, lr=SETTINGS.lr, weight_decay=SETTINGS.weight_decay), []
        for step in range(STEPS):
            with one_step(stream, step):
                for micro in range(2):
                    with ddp.no_sync() if micro == 0 else nullcontext():
                        backward(ddp, batch(10 * step + 2 * rank + micro), 0.5)
                if max_norm is not None:
                    norms.append(stream.clip_gradients(max_norm, outside))
                adamw.step()
                adamw.zero_grad()
        tensors = {**tensors_of(stream), **{name: one.detach().clone() for name, one in model.named_parameters()}}
        return {"tensors": tensors, "norms": norms}


def train_with_hugging_face(rank: int, count: int, *, folder: str) -> Result:
    """Hugging Face's Trainer as torchrun starts it: accumulation, clipping, decay, a checkpoint of divided moments."""
    from transformers import Trainer, TrainingArguments

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in place.items()})
    model, warned = Task(), warnings.catch_warnings()
    arguments = {"max_steps": STEPS, "save_steps": 2, "gradient_accumulation_steps": 2, "weight_decay": 0.5}
    with warned, streaming(model, train="weights", blocks="stack.layers.*", shard_optimizer=True) as stream:
        warnings.simplefilter("ignore")
        settings = TrainingArguments(folder, use_cpu=True, report_to="none", disable_tqdm=True, **arguments)
        rows = [{"x": batch(seed)[0], "labels": torch.zeros(4)} for seed in range(32)]
        Trainer(model, settings, train_dataset=rows, callbacks=[trainer_callback(stream)]).train()
        return {"tensors": {**tensors_of(stream), **{f"{name}.p": one for name, one in model.state_dict().items()}}}


class Task(nn.Module):
    """A stack with a loss, as trainers want it."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = make_stack(adapters=False, count=2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.stack(x) - labels).square().mean()}


def fit_with_lightning(_rank: int, count: int) -> Result:
    """Lightning's "ddp", which wraps the LightningModule around the model."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.task = Task()

        def training_step(self, data: dict[str, Tensor], _: int) -> Tensor:
            return self.task(**data)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Module()
    with warnings.catch_warnings(), streaming(module.task, train="weights", blocks="stack.layers.*") as stream:
        warnings.simplefilter("ignore")
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        environment = TorchElasticEnvironment()
        strategy = pl.strategies.DDPStrategy(process_group_backend="gloo", cluster_environment=environment)
        callback, size = lightning_callback(stream), {"devices": count, "accelerator": "cpu", "max_steps": STEPS}
        trainer = pl.Trainer(strategy=strategy, callbacks=[callback], gradient_clip_val=0.05, **size, **quiet)
        rows = [{"x": batch(seed)[0], "labels": torch.zeros(4)} for seed in range(16)]
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))
        tensors = {**tensors_of(stream), **{f"{name}.p": one.clone() for name, one in module.named_parameters()}}
        return {"tensors": tensors}


def train_unevenly(rank: int | None, _count: int) -> Result:
    """Process 1 has shorter batches, then more of them, then none; None: one process has all of them, halved."""
    model = frozen_outside(make_stack(adapters=False, count=2))
    of_ranks = [[[batch(0)[: 5 - 3 * one]], [batch(1)] * (1 + one), [batch(2)] * (1 - one)] for one in range(2)]
    steps = of_ranks[rank] if rank is not None else [first + second for first, second in zip(*of_ranks, strict=True)]
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        for step, inputs in enumerate(steps):
            with one_step(stream, step):
                for one in inputs:
                    backward(model, one, 0.5 if rank is None else 1.0)
        return {"tensors": tensors_of(stream)}


def train_unalike(rank: int, _count: int, **options: Any) -> Result:
    """Processes compute other blocks in a step, in another order, more than once or not at all."""
    model = frozen_outside(make_stack(adapters=False, count=2))
    orders = (
        [[0, 1], [0, 1], [0, 1, 0], [1, 0], [0, 1]],
        [[], [0], [0, 1], [0, 1], [0, 1]],
    )
    with streaming(model, train="weights", optimizer=SETTINGS, **options) as stream:
        training = stream.training
        assert training is not None
        training._bundle_bytes, early = 1, []  # gradients are handed over one by one
        for step, order in enumerate(orders[rank]):
            with one_step(stream, step):
                hidden = model.first(batch(10 * step + rank))
                for at in order:
                    hidden = model.layers[at](hidden)
                if order:
                    model.head(hidden).square().mean().backward()
                if step > 1:
                    early.append(stepped_early(training))
        return {"tensors": tensors_of(stream), "early": early}


def tear(rank: int, _count: int) -> Result:
    """Gradients of process 1 are not finite for the first block of step 1, when the other one was stepped."""
    model = frozen_outside(make_stack(adapters=False, count=2))
    result: Result = {}
    with streaming(model, train="weights", optimizer=SETTINGS, check_finite=False, update_in_backward=True) as stream:
        training = stream.training
        assert training is not None
        with one_step(stream, 0):
            backward(model, batch(rank))
        saved = copy.deepcopy(stream.state_dict())

        def spoil(gradient: Tensor) -> Tensor:
            result["early"] = stepped_early(training)
            return gradient * float("nan")

        try:
            with one_step(stream, 1):
                hidden = model.layers[0](model.first(batch(10 + rank)))
                if rank == 1:
                    hidden.register_hook(spoil)
                model.head(model.layers[1](hidden)).square().mean().backward()
            stream.synchronize()
        except StreamError as error:
            result["torn"] = str(error)
        stream.load_state_dict(saved)
        for step in range(1, STEPS):
            with one_step(stream, step):
                backward(model, batch(10 * step + rank))
        return {**result, "tensors": tensors_of(stream)}


def meet_nan(rank: int, _count: int, **options: Any) -> Result:
    """The gradients of process 1 are not finite in step 1; then all go on."""
    model = frozen_outside(make_stack(adapters=False, count=2))
    with streaming(model, train="weights", optimizer=SETTINGS, check_finite=False, **options) as stream:
        errors = []
        for step in range(STEPS):
            try:
                with one_step(stream, step):
                    backward(model, batch(step), float("nan") if (step, rank) == (1, 1) else 1.0)
                    if stream.training.updates_early:
                        stepped_early(stream.training)  # the end of the step does nothing that its backward can do
                stream.synchronize()
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        return {"tensors": tensors_of(stream), "errors": errors}


def overflow(rank: int, _count: int) -> Result:
    """The scaled gradients of process 1 overflow in step 1: no process takes that step."""
    model = frozen_outside(make_stack(adapters=False, count=2))
    scaler, skipped = torch.amp.GradScaler("cpu", init_scale=2.0), []
    with streaming(model, train="weights", optimizer=SETTINGS, check_finite=False) as stream:
        for step in range(STEPS):
            with one_step(stream, step):
                loss = model(batch(step)).square().mean() * (float("inf") if (step, rank) == (1, 1) else 1.0)
                scaler.scale(loss).backward()
                skipped.append(stream.unscale_gradients(scaler))
                scaler.update()
        return {"tensors": tensors_of(stream), "skipped": skipped, "scale": scaler.get_scale()}


def resume(rank: int, _count: int, optimizer: Settings = SETTINGS) -> Result:
    """Sharded moments go through a state and back, into sharded ones and into whole ones."""
    results = {}
    for name, later in ("sharded", True), ("whole", False):
        model = frozen_outside(make_stack(adapters=False, count=2))
        with streaming(model, train="weights", optimizer=optimizer, shard_optimizer=True) as stream:
            with one_step(stream, 0):
                backward(model, batch(rank))
            state = {**stream.state_dict()}
            state["tensors"] = {name: one.clone() for name, one in state["tensors"].items()}
        other = frozen_outside(make_stack(adapters=False, count=2))
        with torch.no_grad():
            for parameter in other.layers.parameters():
                parameter.add_(1.0)
        with streaming(other, train="weights", optimizer=optimizer, shard_optimizer=later) as stream:
            stream.load_state_dict(state)
            for step in range(1, STEPS):
                with one_step(stream, step):
                    backward(other, batch(10 * step + rank))
            results[name] = tensors_of(stream)
    return results


def save(rank: int, _count: int, **options: Any) -> Result:
    """Process 0 writes divided states, first where it cannot, and holds those of two weights at most."""
    model = frozen_outside(make_stack(adapters=False, count=2))
    with streaming(model, train="weights", shard_optimizer=True, **options) as stream:
        with one_step(stream, 0):
            backward(model, batch(rank))
        stream.synchronize()
        if rank:
            stream.save(None)
            stream.save(None)
            return {"tensors": tensors_of(stream)}
        training, held = stream.training, [0]
        assert training is not None
        read_tensors = training.read_tensors
        gathered: list[weakref.ref[Tensor]] = []

        def watched(weight: TrainedWeight) -> dict[str, Tensor]:
            held.append(sum(one() is not None for one in gathered))
            tensors = read_tensors(weight)
            gathered.extend(weakref.ref(one) for one in tensors.values())
            return tensors

        with TemporaryDirectory() as folder:
            try:
                stream.save(Path(folder) / "missing" / "state.safetensors")
            except BitplanError as error:
                refused = str(error)
            training.read_tensors = watched  # type: ignore[method-assign]
            stream.save(Path(folder) / "state.safetensors")
            del training.read_tensors
            saved = load_file(Path(folder) / "state.safetensors")
        return {"tensors": tensors_of(stream), "saved": saved, "refused": refused, "held": max(held)}


def clip_too_early(_rank: int, _count: int) -> Result:
    """A backward after clipping, which has averaged the gradients already."""
    model = frozen_outside(make_stack(adapters=False, count=2))
    with streaming(model, train="weights") as stream:
        with one_step(stream, 0):
            backward(model, batch(0))
            stream.clip_gradients(1.0)
            backward(model, batch(0))
        stream.synchronize()
    return {}


def train_adapters(rank: int, _count: int) -> Result:
    """Adapters under DistributedDataParallel, which leaves the streamed base alone."""
    model = make_stack(adapters=True, count=2)
    with streaming(model, formats="int8_row") as stream:
        ddp = DistributedDataParallel(model)
        with one_step(stream, 0):
            backward(ddp, batch(rank))
        return {"tensors": {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}}


def differ(rank: int, _count: int) -> Result:
    """The processes have other weights, and each other's name for it."""
    model = make_stack(adapters=False, count=2)
    with torch.no_grad():
        model.layers[1].norm.bias[3] += rank
    with streaming(model, train="weights") as stream:
        stream.begin_step(0)
    return {}


def freeze_in_one(rank: int, _count: int) -> Result:
    """Process 1 freezes a weight that the other trains; in step 0 both have frozen another one."""
    model = frozen_outside(make_stack(adapters=False, count=2))
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        model.layers[0].up.bias.requires_grad_(False)
        with one_step(stream, 0):
            backward(model, batch(rank))
        stream.synchronize()
        model.layers[1].up.weight.requires_grad_(rank == 0)
        with one_step(stream, 1):
            backward(model, batch(rank))
        stream.synchronize()
    return {}


def train_unlike(rank: int, _count: int, what: str) -> Result:
    """Process 1 alone has another rate or limit, changes a weight, or loads a state; at first it undoes a change."""
    model = make_stack(adapters=False, count=2)
    weight, options = model.layers[1].up.weight, {"update_in_backward": "early" in what}
    with streaming(model, train="weights", optimizer=SETTINGS, shard_optimizer="sharded" in what, **options) as stream:
        for step in range(2):
            stream.synchronize()
            state = {name: one.detach().clone() for name, one in model.state_dict().items()}
            changes = rank == 1 and step == 1  # in step 0 all weights are compared
            if changes and what in ("undone", "change", "change sharded"):
                with torch.no_grad():
                    weight.mul_(3.0)
                    model(batch(0))
                if what == "undone":
                    model.load_state_dict(state)
            elif changes and what in ("rate", "rate early"):
                stream.training.lr = 0.5
            elif changes and what == "load":
                stream.load_state_dict(stream.state_dict())
            with one_step(stream, step):
                backward(model, batch(rank))
                if what == "limit":
                    stream.clip_gradients(1.0 + rank)
        stream.synchronize()
        return {"tensors": tensors_of(stream)}


def disagree(rank: int, _count: int) -> Result:
    """Process 1 ends a step of another number."""
    model = make_stack(adapters=False, count=2)
    with streaming(model, train="weights") as stream:
        with one_step(stream, rank):
            backward(model, batch(0))
        stream.synchronize()
    return {}


def stream_in_a_subgroup(rank: int, count: int) -> Result:
    """All but the last process have a group, and open a stream without it; then one with it."""
    group = dist.new_group(list(range(count - 1)))
    result: Result = {"message": ""}
    if rank < count - 1:
        processes.SUBGROUP_WAIT_S = 0.0  # the last process opens nothing before the barrier
        try:
            with streaming(make_stack(adapters=False, count=2), train="weights"):
                pass
        except StreamError as error:
            result["message"] = str(error)
        processes.SUBGROUP_WAIT_S = HANGS_S
    dist.barrier()
    result |= train(rank, count)
    if rank < count - 1:
        dist.destroy_process_group(group)
    return result


def lose(rank: int, count: int, *, how: str, **options: Any) -> Result:
    """The last process ends within step 1, by an error or killed; the others see it before their limit."""
    model = make_stack(adapters=False, count=2)
    if how == "killed":
        process_status.ANSWER_WAIT_S = 0.5  # it leaves no message
    with streaming(model, train="weights", timeout_s=3 * HANGS_S, **options) as stream:
        for step in range(STEPS):
            with one_step(stream, step):
                backward(model, batch(0))
                if (rank, step) == (count - 1, 1):
                    if how == "killed":
                        os._exit(9)
                    raise ValueError("no such\nfile")
        stream.synchronize()
    return {}


# ---- parts of jobs ---------------------------------------------------------------------------------------------------


def frozen_outside(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("layers."))
    return model


@contextmanager
def one_step(stream: BlockStream, step: int) -> Iterator[None]:
    stream.begin_step(step)
    yield
    stream.end_step()


def backward(model: nn.Module, x: Tensor, factor: float = 1.0) -> float:
    loss = model(x).square().mean()
    (loss * factor).backward()
    return float(loss.detach()) * factor


def stepped_early(training: HostTraining) -> list[str]:
    """The blocks that were stepped before the step ends, when all that a backward has set off is over."""
    assert training._gradients.drain(HANGS_S)
    assert training._updates.drain(HANGS_S)
    update = training.gradients.update
    return [] if update is None else list(update.stepped)


def tensors_of(stream: BlockStream) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in stream.state_dict()["tensors"].items()}

"""The callbacks with the real libraries: the policy decides, is saved with a checkpoint, and comes back with it."""

from __future__ import annotations

import copy
import json
import re
import shutil
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bitplan.base.errors import StreamStateError
from bitplan.streaming.selective.config import SelectiveError, SelectivePrecisionConfig
from bitplan.streaming.selective.trainer_callbacks import (
    STATE_FILE,
    WEIGHTS_FILE,
    TensorBoardScalars,
    lightning_callback,
    streaming_callback,
    trainer_callback,
)
from bitplan.streaming.selective.training_policy import SelectivePrecisionPolicy
from bitplan.streaming.training.adamw import AdamWSettings
from tests.crosses import few
from tests.streaming.stream_samples import assert_equal, batch, make_stack, streaming

# The libraries' own warnings: about workers, loggers and folders, not about us.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
CONFIG = SelectivePrecisionConfig(
    warmup_steps=1, update_interval_steps=2, min_steps_between_switches=2, grad_weight=0.2, telemetry_enabled=False
)


class Task(nn.Module):
    """A stack with a loss, as the Trainer wants it."""

    def __init__(self, train="adapters", seed=0):
        super().__init__()
        self.stack = make_stack(adapters=train == "adapters", seed=seed, count=4)
        if train == "adapters":
            for layer in self.stack.layers:
                nn.init.normal_(layer.up.up.weight, std=0.02)

    def forward(self, x, labels=None):
        out = self.stack(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


def rows(count=16):
    return [{"x": batch(seed)[0], "labels": torch.zeros(4)} for seed in range(count)]


def train_with_hugging_face(folder, steps, resume=None, train="adapters", seed=0, **options):
    from transformers import Trainer, TrainingArguments

    model = Task(train, seed)
    seen = []
    with (
        streaming(model, blocks="stack.layers.*", train=train) as stream,
        SelectivePrecisionPolicy(stream, CONFIG) as policy,
    ):
        begin = policy.begin_step
        policy.begin_step = lambda step: (begin(step), seen.append((step, dict(policy.applied))))
        arguments = TrainingArguments(
            str(folder),
            per_device_train_batch_size=2,
            max_steps=steps,
            save_steps=4,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            **options,
        )
        callback = trainer_callback(policy, scalars=options.pop("scalars", None), resume_from=resume)
        trainer = Trainer(model, arguments, train_dataset=rows(), callbacks=[callback])
        trainer.train(resume_from_checkpoint=resume)
        if train == "weights":
            return seen, policy.state_dict(), copy.deepcopy(stream.state_dict()), model
        return seen, policy.state_dict()


@pytest.fixture(scope="module")
def adapters_run(tmp_path_factory):
    """(its folder with checkpoints 4 and 8, what `train_with_hugging_face` gave)"""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("adapters")
    return folder, train_with_hugging_face(folder, 8)


@pytest.fixture(scope="module")
def weights_run(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("weights")
    return folder, train_with_hugging_face(folder, 8, train="weights")


def test_hugging_face_trainer_saves_and_resumes(adapters_run, tmp_path):
    """The resumed run begins with other random weights: it runs on the base of the checkpoint."""
    folder, (whole, end) = adapters_run
    assert [step for step, _ in whole] == list(range(8))
    assert {precision for _, applied in whole for precision in applied.values()} == {"bf16", "int8"}
    saved = json.loads((folder / "checkpoint-4" / STATE_FILE).read_text())
    assert saved["policy"]["state"]["last_step"] == 3
    assert all(row["int8"] > 0 for row in end["quant_errors"].values())  # run_calibration: on the trainer's data
    shutil.copytree(folder / "checkpoint-4", tmp_path / "checkpoint-4")
    resumed = train_with_hugging_face(tmp_path, 8, resume=str(tmp_path / "checkpoint-4"), seed=7)
    assert resumed == (whole[4:], end)


def test_hugging_face_trainer_resumes_weights_trained_on_the_host(weights_run, tmp_path):
    from safetensors.torch import load_file

    folder, (whole, end, weights, model) = weights_run
    assert {precision for _, applied in whole for precision in applied.values()} == {"bf16", "int8"}
    assert_equal(load_file(folder / "checkpoint-8" / WEIGHTS_FILE), weights["tensors"])
    saved = load_file(folder / "checkpoint-8" / "model.safetensors")  # as people would load it: as they were trained
    assert_equal(saved, dict(model.state_dict()))
    name = "stack.layers.2.down.weight"
    assert torch.equal(saved[name], weights["tensors"][f"{name}.master"])
    shutil.copytree(folder / "checkpoint-4", tmp_path / "checkpoint-4")
    resumed, resumed_end, resumed_weights, resumed_model = train_with_hugging_face(
        tmp_path, 8, resume=str(tmp_path / "checkpoint-4"), train="weights", seed=7
    )
    assert resumed == whole[4:]
    assert resumed_end == end
    assert_equal(resumed_weights["tensors"], weights["tensors"])
    assert_equal(dict(resumed_model.named_parameters()), dict(model.named_parameters()))


@contextmanager
def resuming(folder, train):
    """(a policy, what the trainer calls where it goes on after step 4)"""
    with (
        streaming(Task(train), blocks="stack.layers.*", train=train) as stream,
        SelectivePrecisionPolicy(stream, CONFIG) as policy,
    ):
        callback = trainer_callback(policy)
        state = SimpleNamespace(global_step=4)
        yield policy, lambda: callback.on_train_begin(SimpleNamespace(output_dir=folder), state, None)


def test_hugging_face_resume_without_the_weights_is_refused_and_the_policy_is_as_it_was(weights_run, tmp_path):
    shutil.copytree(weights_run[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / WEIGHTS_FILE).unlink()
    with resuming(tmp_path, "weights") as (policy, resume):
        before = policy.state
        with pytest.raises(SelectiveError, match=r"checkpoint-4 has no streamed_weights\.safetensors, .* resume_from="):
            resume()
        assert policy.state == before


def test_hugging_face_trainer_accumulates(tmp_path):
    pytest.importorskip("transformers")
    seen, end = train_with_hugging_face(tmp_path, 4, gradient_accumulation_steps=2)
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert end["policy"]["state"]["steps_collected"] == 4


def test_hugging_face_resume_without_a_state_is_refused(adapters_run, tmp_path):
    shutil.copytree(adapters_run[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / STATE_FILE).unlink()
    with (
        resuming(tmp_path, "adapters") as (_, resume),
        pytest.raises(SelectiveError, match=r"checkpoint-4/selective_precision\.json: cannot be read"),
    ):
        resume()


OFF = SelectivePrecisionConfig(mode="off", telemetry_enabled=False)  # the streamed weights cross as they are
ADAMW = AdamWSettings(lr=123.0, weight_decay=0.0)  # a rate that nobody wants: the trainer's holds


@contextmanager
def maybe_streamed(model, blocks, is_streamed, make_callback):
    """The callbacks for a model whose blocks are streamed and trained on the host, or none."""
    if not is_streamed:
        yield []
        return
    with streaming(model, blocks=blocks, train="weights", optimizer=ADAMW) as stream:
        yield [make_callback(stream)]


def test_one_line_streams_a_model_in_a_trainer_and_resumes(tmp_path):
    transformers = pytest.importorskip("transformers")
    options = {"train": "weights", "device": "cpu", "slots": 3}
    states, weights = [], []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = Task("weights", seed=7 if resume else 0)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True
        )
        callback = streaming_callback(model, "stack.layers.*", **options)
        with callback.stream:
            trainer = transformers.Trainer(model, arguments, train_dataset=rows(), callbacks=[callback])
            trainer.train(resume_from_checkpoint=resume)
            states.append(copy.deepcopy(callback.stream.state_dict()["tensors"]))
        weights.append(dict(model.named_parameters()))
    assert_equal(*states)
    assert_equal(*weights)
    assert (tmp_path / "checkpoint-4" / WEIGHTS_FILE).exists()
    assert not (tmp_path / "checkpoint-4" / STATE_FILE).exists()  # there is no policy


def test_a_trainer_of_another_model_is_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    with streaming_callback(Task("weights"), "stack.layers.*", train="weights", device="cpu", slots=2).stream as stream:
        arguments = transformers.TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none")
        callbacks = [trainer_callback(stream)]
        trainer = transformers.Trainer(Task("weights"), arguments, train_dataset=rows(), callbacks=callbacks)
        with pytest.raises(
            SelectiveError, match=r"trains another Task than the one that is streamed.* not model_init="
        ):
            trainer.train()


def train_with_a_schedule(folder, **given):
    """The weights after four steps whose rate falls, and the trainer that made them."""
    from transformers import Trainer, TrainingArguments

    model = Task("weights")
    arguments = TrainingArguments(
        str(folder),
        **{"max_steps": 4, "max_grad_norm": 0.0, "learning_rate": 1e-2} | given.pop("arguments", {}),
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    with streaming(model, blocks="stack.layers.*", train="weights", **given) as stream:
        Trainer(model, arguments, train_dataset=rows(), callbacks=[trainer_callback(stream)]).train()
    return dict(model.named_parameters())


def test_a_trainer_updates_in_the_backward_where_its_settings_allow_that(tmp_path):
    pytest.importorskip("transformers")
    expected = train_with_a_schedule(tmp_path)
    assert_equal(train_with_a_schedule(tmp_path, update_in_backward=True), expected)
    for name, value in ("max_grad_norm", 1.0), ("gradient_accumulation_steps", 2):
        with pytest.raises(SelectiveError, match=rf"the trainer's {name} must be \d.* got {value}; pass Training"):
            train_with_a_schedule(tmp_path, update_in_backward=True, arguments={name: value})


def train_to_the_best(folder, *, is_streamed):
    """A schedule, tight clipping, and the best of several checkpoints at the end, by Hugging Face's Trainer."""
    from transformers import Trainer, TrainingArguments

    model = Task("weights")
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        max_steps=6,
        learning_rate=0.02,  # too large: the last weights are not the best
        lr_scheduler_type="linear",
        warmup_steps=2,
        max_grad_norm=0.05,
        weight_decay=2.0,  # of weights alone: not of norms and biases
        adam_beta1=0.7,
        adam_beta2=0.95,
        adam_epsilon=1e-4,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    with maybe_streamed(model, "stack.layers.*", is_streamed, trainer_callback) as callbacks:
        trainer = Trainer(model, arguments, train_dataset=rows(), eval_dataset=rows(4), callbacks=callbacks)
        trainer.train()
        best = int(trainer.state.best_model_checkpoint.rsplit("-", 1)[1])
        loss = trainer.evaluate()["eval_loss"]
        assert arguments.max_grad_norm == 0.05
    return best, trainer.state.best_metric, loss, dict(model.named_parameters())


def test_hugging_face_schedule_clipping_and_best_model_hold_for_streamed_weights(tmp_path):
    pytest.importorskip("transformers")
    best, metric, loss, weights = train_to_the_best(tmp_path / "streamed", is_streamed=True)
    expected_best, expected_metric, expected_loss, expected = train_to_the_best(tmp_path / "plain", is_streamed=False)
    assert best == expected_best < 6
    assert loss == pytest.approx(metric, rel=1e-6)  # what is evaluated at the end are the best weights
    assert (metric, loss) == pytest.approx((expected_metric, expected_loss), rel=1e-3)
    for name, one in expected.items():
        torch.testing.assert_close(weights[name], one, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(("optim", "max_norm"), few([("sgd", 0.1), ("rmsprop", 0.1), ("adafactor", 0.0)], 2))
def test_another_optimizer_of_a_trainer_trains_streamed_weights_and_goes_on(optim, max_norm, tmp_path):
    """As it trains the same weights without a stream; by its state, after an interruption, to the bit."""
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        str(tmp_path), optim=optim, max_steps=4, save_steps=2, learning_rate=1e-3, max_grad_norm=max_norm, use_cpu=True,
        report_to="none", disable_tqdm=True, logging_steps=1, weight_decay=0.1,
    )  # fmt: skip
    weights, norms = [], []
    for resume in (None, str(tmp_path / "checkpoint-2"), False):
        model = Task("weights")
        with maybe_streamed(model, "stack.layers.*", resume is not False, trainer_callback) as callbacks:
            trainer = transformers.Trainer(model, arguments, train_dataset=rows(), callbacks=callbacks)
            trainer.train(resume_from_checkpoint=resume or None)
        weights.append({name: one.detach().clone() for name, one in model.named_parameters()})
        norms.append([one["grad_norm"] for one in trainer.state.log_history if "grad_norm" in one])
    assert arguments.max_grad_norm == max_norm
    assert norms[0] == pytest.approx(norms[2], rel=1e-4)  # of all gradients, not of those on the device alone
    assert_equal(weights[0], weights[1])
    for name, one in weights[2].items():
        torch.testing.assert_close(weights[0][name], one, rtol=1e-4, atol=1e-5, msg=name)


def test_a_training_that_broke_off_within_a_step_is_clipped_when_it_is_begun_again(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Break(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 1 and len(norms) < 1:
                raise KeyboardInterrupt

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=2,
        max_grad_norm=0.1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    model, norms = Task("weights"), []
    with maybe_streamed(model, "stack.layers.*", True, trainer_callback) as callbacks:
        trainer = transformers.Trainer(model, arguments, train_dataset=rows(), callbacks=[*callbacks, Break()])
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        norms.append(0.0)
        training = callbacks[0].stream.training
        clip = training.clip
        training.__dict__["clip"] = lambda norm, also: [norms.append(norm), clip(norm, also)][1]
        trainer.train()
    assert norms == [0.0, 0.1, 0.1]
    assert arguments.max_grad_norm == 0.1


def test_trls_trainer_trains_streamed_weights_as_it_trains_others(tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is not installed: SFTTrainer cannot be tried")
    datasets, transformers = pytest.importorskip("datasets"), pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(number): number for number in range(32)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2")
    rows = datasets.Dataset.from_dict({"input_ids": [[(3 + one * two) % 32 for two in range(8)] for one in range(16)]})
    weights = []
    for is_streamed in (True, False):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, pad_token_id=2,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        arguments = trl.SFTConfig(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=1e-3, weight_decay=0.1, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
            save_strategy="no",
        )  # fmt: skip
        with maybe_streamed(model, "model.layers.*", is_streamed, trainer_callback) as callbacks:
            trl.SFTTrainer(
                model, args=arguments, train_dataset=rows, processing_class=tokenizer, callbacks=callbacks
            ).train()
        weights.append(dict(model.named_parameters()))
    for name, one in weights[1].items():
        torch.testing.assert_close(weights[0][name], one, rtol=1e-4, atol=1e-6, msg=name)


def fit_to_the_best(folder, *, is_streamed):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.task = Task("weights")

        def training_step(self, data, _):
            return self.task(**data)["loss"]

        def validation_step(self, data, _):
            self.log("loss", self.task(**data)["loss"])

        def configure_optimizers(self):
            down = [layer.down.weight for layer in self.task.stack.layers]  # a rate and a decay of their own
            rest = [one for one in self.parameters() if not any(one is other for other in down)]
            groups = [{"params": rest}, {"params": down, "lr": 0.01, "weight_decay": 2.0}]
            optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.0, betas=(0.7, 0.95), eps=1e-4)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module = Module()
    with maybe_streamed(module, "task.stack.layers.*", is_streamed, lightning_callback) as callbacks:
        best = pl.callbacks.ModelCheckpoint(folder, monitor="loss", save_top_k=1)
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=6,
            val_check_interval=1,
            gradient_clip_val=0.05,
            callbacks=[best, *callbacks],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        train = torch.utils.data.DataLoader(rows(12), batch_size=2)
        check = torch.utils.data.DataLoader(rows(4), batch_size=4)
        trainer.fit(module, train, check)
        result = trainer.validate(module, check, ckpt_path="best", verbose=False)[0]["loss"]
        score = float(best.best_model_score)
    return score, result, dict(module.named_parameters())


def test_lightning_schedule_clipping_and_best_model_hold_for_streamed_weights(tmp_path):
    pytest.importorskip("lightning")
    score, result, weights = fit_to_the_best(tmp_path / "streamed", is_streamed=True)
    expected_score, expected_result, expected = fit_to_the_best(tmp_path / "plain", is_streamed=False)
    assert result == pytest.approx(score, rel=1e-6)
    assert (score, result) == pytest.approx((expected_score, expected_result), rel=1e-3)
    for name, one in expected.items():
        torch.testing.assert_close(weights[name], one, rtol=1e-3, atol=1e-4, msg=name)


def optimizers_of(model):
    """Optimizers of a trainer, and what is said of each."""
    weights, adamw = list(model.parameters()), torch.optim.AdamW
    outside = [model.head.weight]
    return {
        r"cannot train streamed weights: torch\.optim\.lbfgs\.LBFGS.*adamw_torch": torch.optim.LBFGS(weights),
        r"SparseAdam cannot step a matrix on the host": torch.optim.SparseAdam(weights),
        "has amsgrad=True": adamw(weights, amsgrad=True),
        "has maximize=True": adamw(weights, maximize=True),
        r"layers\.0\.norm\.weight', .*not among the parameters": adamw([*outside, model.layers[1].down.weight]),
        "holds none of the streamed weights": torch.optim.SGD(outside),
        r"weight_decay=0\.5 of the trainer's optimizer holds": adamw(weights, weight_decay=0.5),
    }


@pytest.mark.parametrize("number", range(7))
def test_an_optimizer_that_the_stream_cannot_follow_is_refused_and_other_settings_are_said(number, caplog):
    pytest.importorskip("transformers")
    model = make_stack(adapters=False)
    says, optimizer = list(optimizers_of(model).items())[number]
    settings = AdamWSettings(lr=123.0, weight_decay=0.25)
    with (
        streaming(model, train="weights", optimizer=settings) as stream,
        SelectivePrecisionPolicy(stream, OFF) as policy,
    ):
        callback = trainer_callback(policy)
        is_refused = number < 5
        with pytest.raises(SelectiveError, match=says) if is_refused else nullcontext():
            callback.on_train_begin(SimpleNamespace(), SimpleNamespace(global_step=0), None, optimizer=optimizer)
        assert is_refused or re.search(says, caplog.text)
        assert stream.training.lr == (1e-3 if number == 6 else 123.0)


def test_a_trainers_scaler_holds_for_streamed_weights():
    """Scaled gradients are clipped and stepped as plain ones; a step that overflows is skipped."""
    pytest.importorskip("transformers")
    weights = []
    for scales in (False, True):
        model = make_stack(adapters=False, count=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        scaler = torch.amp.GradScaler("cpu", enabled=scales)
        with streaming(model, train="weights") as stream, SelectivePrecisionPolicy(stream, OFF) as policy:
            callback = trainer_callback(policy)
            wrapper = SimpleNamespace(optimizer=optimizer, scaler=scaler if scales else None)
            for step in range(3 if scales else 2):
                state, arguments = SimpleNamespace(global_step=step), SimpleNamespace(max_grad_norm=0.05)
                callback.on_step_begin(arguments, state, None)
                scaler.scale(model(batch(step)).square().mean() * (1.0 if step < 2 else 1e38)).backward()
                callback.on_pre_optimizer_step(arguments, state, None, optimizer=wrapper, model=model)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                callback.on_step_end(arguments, state, SimpleNamespace(should_save=False))
        weights.append(dict(model.named_parameters()))
    assert_equal(*weights)


def train_with_lightning(folder, steps, resume=None, train="adapters", seed=0, calibration_forward=None, **options):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.task = Task(train, seed)

        def training_step(self, data, _):
            return self.task(**data)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.01)

    module, seen = Module(), []
    with (
        streaming(module, blocks="task.stack.layers.*", train=train) as stream,
        SelectivePrecisionPolicy(stream, CONFIG) as policy,
    ):
        begin = policy.begin_step
        policy.begin_step = lambda step: (begin(step), seen.append((step, dict(policy.applied))))
        checkpoints = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")
        logger = pl.loggers.CSVLogger(folder)
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=steps,
            callbacks=[checkpoints, lightning_callback(policy, calibration_forward=calibration_forward)],
            logger=logger,
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        # An epoch is the four steps to the checkpoint: a plain loader does not know where it was.
        data = torch.utils.data.DataLoader(rows(8), batch_size=2)
        trainer.fit(module, data, ckpt_path=resume)
        if train == "weights":
            return seen, policy.state_dict(), copy.deepcopy(stream.state_dict())
        return seen, policy.state_dict(), logger.log_dir


def test_lightning_saves_and_resumes(tmp_path, caplog):
    pytest.importorskip("lightning")
    whole, end, logs = train_with_lightning(tmp_path, 8)
    assert caplog.text.count("run_calibration is true, but nothing was calibrated") == 1
    assert [step for step, _ in whole] == list(range(8))
    assert {precision for _, applied in whole for precision in applied.values()} == {"bf16", "int8"}
    with open(f"{logs}/metrics.csv") as file:
        assert "selective_precision/share_int8" in file.readline()
    resumed, resumed_end, _ = train_with_lightning(tmp_path, 8, resume=str(tmp_path / "step=4.ckpt"))
    assert resumed == whole[4:]
    assert resumed_end == end


def test_lightning_resumes_weights_trained_on_the_host(tmp_path):
    pytest.importorskip("lightning")
    whole, end, weights = train_with_lightning(tmp_path, 8, train="weights")
    assert {precision for _, applied in whole for precision in applied.values()} == {"bf16", "int8"}
    saved = torch.load(tmp_path / "step=8.ckpt", weights_only=True)
    name = "task.stack.layers.2.down.weight"
    assert torch.equal(saved["state_dict"][name], weights["tensors"][f"{name}.master"])
    resumed, resumed_end, resumed_weights = train_with_lightning(
        tmp_path, 8, resume=str(tmp_path / "step=4.ckpt"), train="weights", seed=7
    )
    assert resumed == whole[4:]
    assert resumed_end == end
    assert_equal(resumed_weights["tensors"], weights["tensors"])


def test_a_lightning_checkpoint_of_the_other_kind_of_training_is_refused():
    pytest.importorskip("lightning")
    states = {}
    for train in ("adapters", "weights"):
        with (
            streaming(make_stack(adapters=train == "adapters"), train=train) as stream,
            SelectivePrecisionPolicy(stream, CONFIG) as policy,
        ):
            callback = lightning_callback(policy)
            states[train] = callback.state_dict()
            if train == "weights":
                without = {key: one for key, one in states[train].items() if key != "streamed_weights"}
                with pytest.raises(SelectiveError, match="has no streamed weights, and this stream trains them"):
                    callback.load_state_dict(without)
                before = policy.state
                broken = {**states[train], "streamed_weights": {"version": 1}}
                with pytest.raises(StreamStateError, match="the Lightning checkpoint's streamed weights: document is"):
                    callback.load_state_dict(broken)
                assert policy.state == before
    with (
        streaming(make_stack(adapters=True)) as stream,
        SelectivePrecisionPolicy(stream, CONFIG) as policy,
        pytest.raises(SelectiveError, match="has streamed weights, and with train='adapters' none are trained"),
    ):
        lightning_callback(policy).load_state_dict(states["weights"])


def test_lightning_accumulates_and_calibrates_where_it_is_told_how(tmp_path, caplog):
    pytest.importorskip("lightning")
    run_batch = lambda module, data: module.task(**data)
    seen, end, _ = train_with_lightning(tmp_path, 3, accumulate_grad_batches=2, calibration_forward=run_batch)
    assert all(row["int8"] > 0 for row in end["quant_errors"].values())
    assert "nothing was calibrated" not in caplog.text
    assert [step for step, _ in seen] == [0, 1, 2]
    assert end["policy"]["state"]["steps_collected"] == 3


def test_tensorboard_scalars_are_in_the_file(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = make_stack(adapters=True)
    scalars = TensorBoardScalars(tmp_path)
    with streaming(model) as stream, SelectivePrecisionPolicy(stream, CONFIG) as policy:
        for step in range(4):
            policy.begin_step(step)
            model(batch(step)).square().mean().backward()
            policy.collect_block_grad_stats()
            policy.compute_hints(step)
            policy.end_step()
            scalars.write(policy, step)
        expected = policy.scalars()
    scalars.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(expected)
    for name, value in expected.items():
        assert events.Scalars(name)[-1].value == pytest.approx(value, rel=1e-6)
        assert events.Scalars(name)[-1].step == 3
    assert {"share_int8", "bytes_saved", "max_sensitivity"} <= {name.split("/")[1] for name in expected}


def train_over_a_run(folder, resume=None):
    from transformers import Trainer, TrainingArguments

    model = Task("weights")
    x, target = batch(100)[:1], torch.zeros(1, 4)
    with streaming(model, blocks="stack.layers.*", train="weights") as stream:
        control = SelectivePrecisionPolicy.over_run(
            stream, total_steps=8, final_share=0.5, probe=lambda number: model(x + number, target)["loss"],
            log=folder / "run.jsonl", times={"high": 2.0, "wire": 1.0}, groups=2,
        )  # fmt: skip
        arguments = TrainingArguments(
            str(folder), per_device_train_batch_size=2, max_steps=8, save_steps=4, use_cpu=True, report_to="none",
            disable_tqdm=True, logging_strategy="no", learning_rate=1e-3,
        )  # fmt: skip
        callback = trainer_callback(control)
        Trainer(model, arguments, train_dataset=rows(), callbacks=[callback]).train(resume_from_checkpoint=resume)
        control.close()
        return control.state_dict(), control.scalars(), copy.deepcopy(stream.state_dict())


def test_a_plan_over_a_run_goes_with_the_trainer_and_its_checkpoints(tmp_path):
    pytest.importorskip("transformers")
    whole = train_over_a_run(tmp_path)
    reasons = [one["reason"] for one in whole[0]["state"]["reasons"].values()]
    assert reasons
    assert all(reason.startswith("final part") for reason in reasons)
    assert whole[1] == {"run_plan/low_wire": 0.0}
    middle = json.loads((tmp_path / "checkpoint-4" / STATE_FILE).read_text())["state"]
    assert middle["low"]
    again = train_over_a_run(tmp_path, resume=str(tmp_path / "checkpoint-4"))
    assert again[0] == whole[0]
    assert_equal(again[2]["tensors"], whole[2]["tensors"])

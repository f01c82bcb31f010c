"""The packed model beside the trained one: its KL is measured after every evaluation, and limited by more bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bitplan.base.errors import ArgumentError, StreamError
from bitplan.streaming.training.packed_mismatch import METRIC, PackedMismatch
from tests.streaming.stream_samples import streaming

WORDS, WIDTH, LENGTH = 16, 64, 4


class Policy(nn.Module):
    """A next word for every position."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(hidden)
        loss = logits.mean() if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def policy() -> Policy:
    torch.manual_seed(0)
    return Policy()


def prompts(seed: int, count: int = 16) -> Tensor:
    return torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


def test_the_kl_is_that_of_the_packed_model_and_nothing_is_changed():
    model = policy()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    mismatch = PackedMismatch(model, {"layers.*": "mxfp4"}, [{"ids": prompts(0)}])
    kl = mismatch.measure(model)
    with torch.no_grad():
        p, q = (one(prompts(0))["logits"].log_softmax(-1) for one in (model, mismatch.packed(model)))
    assert kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-5)
    assert kl > 1e-4
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(not isinstance(one, nn.Linear) for one in mismatch.packed(model).layers[0])
    assert PackedMismatch(model, {"layers.*": None}, [{"ids": prompts(0)}]).measure(model) == 0


def test_layers_are_kept_in_more_bits_until_the_kl_is_within():
    model = policy()
    free = PackedMismatch(model, {"layers.*": "mxfp4"}, [{"ids": prompts(0)}]).measure(model)
    mismatch = PackedMismatch(model, {"layers.*": "mxfp4"}, [{"ids": prompts(0)}], max_mismatch=free / 2)
    assert mismatch.measure(model, step=3) <= free / 2
    assert mismatch.kept
    assert set(mismatch.kept.values()) == {"int8_row"}
    (noted,) = mismatch.history
    assert noted["step"] == 3
    assert [one["layer"] for one in noted["raised"]] == list(mismatch.kept)
    assert noted["raised"][0]["kl_before"] == pytest.approx(free)
    tight = PackedMismatch(model, {"layers.*": "mxfp4"}, [{"ids": prompts(0)}], max_mismatch=1e-9)
    assert tight.measure(model) <= 1e-9
    assert set(tight.kept.values()) == {None}


def test_a_model_that_computes_something_else_each_time_is_refused():
    model = policy()
    model.layers[0].register_forward_hook(lambda _module, _given, output: output + torch.randn_like(output))
    mismatch = PackedMismatch(model, {"head": "int8_row"}, [{"ids": prompts(0)}], max_mismatch=1e-9)
    with pytest.raises(StreamError, match=r"above max_mismatch=1e-09, with every layer in its own type"):
        mismatch.measure(model)


def test_a_policy_that_learns_from_its_packed_twin_keeps_its_kl():
    """64 steps of policy gradients, streamed: the packed model answers, the trained one learns; the reward rises, and
    the KL between them stays where it was.
    """
    model, rewards = policy(), []
    mismatch = PackedMismatch(model, {"layers.*": "mxfp4"}, [{"ids": prompts(99, 64)}], max_mismatch=4e-3)
    outside = [one for name, one in model.named_parameters() if not name.startswith("layers.")]
    optimizer, random = torch.optim.SGD(outside, lr=0.05), torch.Generator().manual_seed(0)
    with streaming(model, train="weights", moments="int8") as stream:
        stream.training.lr = 1e-3
        packed = mismatch.packed(model)
        for step in range(64):
            if step % 16 == 0:
                mismatch.measure(model, step)
            packed = mismatch.packed(model) if step % 4 == 0 else packed
            ids = prompts(step, 32)
            with torch.no_grad():
                chances = packed(ids)["logits"].softmax(-1).flatten(0, 1)
            answers = torch.multinomial(chances, 1, generator=random).view(ids.shape)
            reward = (answers == (ids + 1) % WORDS).float()
            rewards.append(float(reward.mean()))
            stream.begin_step(step)
            chosen = model(ids)["logits"].log_softmax(-1).gather(-1, answers[..., None])[..., 0]
            (-(chosen * (reward - reward.mean())).mean() * 4).backward()
            optimizer.step()
            optimizer.zero_grad()
            stream.end_step()
        stream.synchronize()
        mismatch.measure(model, 64)
    assert sum(rewards[-8:]) > 2 * sum(rewards[:8])
    assert len(mismatch.history) == 5
    assert max(one["kl"] for one in mismatch.history) <= 4e-3


def test_a_trainer_logs_it_after_every_evaluation(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = policy()
    rows = [{"ids": ids, "labels": (ids + 1) % WORDS} for ids in prompts(1)]
    mismatch = PackedMismatch(model, {"layers.*": "int8_row"}, [{"ids": prompts(2)}])
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, eval_strategy="steps", eval_steps=2, save_strategy="no", use_cpu=True,
        report_to="none", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[mismatch.callback()]
    )
    trainer.train()
    logged = [one for one in trainer.state.log_history if METRIC in one]
    assert [one["step"] for one in logged] == [2, 4]
    assert all(0 < one[METRIC] < 0.01 for one in logged)
    assert trainer.evaluate()[METRIC] == logged[-1][METRIC]


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ArgumentError, match="batches must hold at least one batch"):
        PackedMismatch(policy(), "int8_row", [])
    with pytest.raises(ArgumentError, match=r"max_mismatch: expected a KL above 0, got 0"):
        PackedMismatch(policy(), "int8_row", [{}], max_mismatch=0)

"""The whole flow on a small model: train, calibrate, morph, save, load, infer, train on."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bitplan.files.compare import compare_models
from bitplan.files.models.morph import morph_model, observe_model
from bitplan.files.models.save_load import load_model, write_model
from bitplan.files.models.weight_store import ActivationObserver
from tests.crosses import few

TOKENS, LENGTH = 12, 8


class Tagger(nn.Module):
    """Says for each place of a sequence whether its token was seen before; a layer of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 32)
        self.conv = nn.Conv1d(32, 32, 3, padding=1)
        self.lstm = nn.LSTM(32, 32, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.conv(hidden.mT).mT
        hidden = hidden + self.lstm(hidden)[0]
        return self.head(self.attention(hidden))


def batch(count: int, seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    earlier = torch.ones(LENGTH, LENGTH).tril(-1).bool()
    return tokens, ((tokens[:, :, None] == tokens[:, None, :]) & earlier).any(dim=-1).long()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first_seed: int) -> None:
    model.train()
    for seed in range(first_seed, first_seed + steps):
        tokens, wanted = batch(24, seed)
        optimizer.zero_grad()
        cross_entropy(model(tokens).flatten(0, 1), wanted.flatten()).backward()
        optimizer.step()


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    tokens, wanted = batch(256, 10**6)
    return float(cross_entropy(model.eval()(tokens).flatten(0, 1), wanted.flatten()))


@pytest.fixture(scope="module")
def trained() -> tuple[Tagger, float]:
    torch.manual_seed(0)
    model = Tagger()
    untrained = loss_of(model)
    train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), steps=60, first_seed=0)
    loss = loss_of(model)
    assert loss < 0.7 * untrained
    return model, loss


def save(model: nn.Module) -> bytes:
    """The file, as bytes that can be compared."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(model, Path(folder) / "model.safetensors")
        return (Path(folder) / "model.safetensors").read_bytes()


def load(file: bytes) -> Tagger:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").write_bytes(file)
        model = Tagger()
        load_model(Path(folder) / "model.safetensors", model)
        return model


def calibrated(model: Tagger) -> dict[str, ActivationObserver]:
    with observe_model(model.eval()) as observers, torch.no_grad():
        for seed in range(3):
            model(batch(32, 2000 + seed)[0])
    return observers


@pytest.mark.parametrize("fmt", few(["bfloat16", "int8", "uint4", "q4_0_poly", "mxfp4"], 2))
def test_the_whole_flow(trained: tuple[Tagger, float], fmt: str) -> None:
    model, fp32_loss = copy.deepcopy(trained[0]), trained[1]
    fp32 = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    report = morph_model(model, fmt, observers=calibrated(model))
    assert len(report.formats) == 9
    morphed_loss = loss_of(model)
    assert abs(morphed_loss - fp32_loss) < 0.03

    file = save(model)
    tokens, _ = batch(8, 3000)
    with torch.no_grad():
        wanted = model(tokens)
    loaded = load(file).eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens), wanted), "the bytes in the file are those the model ran on"
    assert save(loaded) == file, "save, load, save: the same bytes"
    assert compare_models(model, loaded).overall.cosine == 1.0

    # Train on, both the model that never left FP32 and the one that comes from a file.
    assert all(torch.equal(tensor, fp32[name]) for name, tensor in model.state_dict().items()), "masters untouched"
    for each in (model, loaded):
        before = loss_of(each)
        train(each, torch.optim.AdamW(each.parameters(), lr=3e-3, fused=True), steps=6, first_seed=5000)
        assert loss_of(each) < before
        assert save(each) != file, "the versions follow the weights"
        assert torch.equal(each.eval()(tokens), load(save(each)).eval()(tokens))


@torch.no_grad()
def deviation(model: nn.Module, reference: nn.Module) -> float:
    """How far the outputs are from those in FP32, relative."""
    tokens, _ = batch(256, 10**6)
    exact = reference.eval()(tokens)
    return float((model.eval()(tokens) - exact).norm() / exact.norm())


@pytest.mark.parametrize("fmt", ["int4", pytest.param("int2", marks=pytest.mark.long)])
def test_calibration_brings_outputs_closer(trained: tuple[Tagger, float], fmt: str) -> None:
    plain, observed = copy.deepcopy(trained[0]), copy.deepcopy(trained[0])
    morph_model(plain, fmt)
    report = morph_model(observed, fmt, observers=calibrated(observed), scale_rule="mse")
    gains = [choice.calibration for choice in report.choices.values() if choice.calibration]
    assert len(gains) == 6
    assert all(gain.error_after <= gain.error_before for gain in gains)
    assert deviation(observed, trained[0]) < 0.9 * deviation(plain, trained[0])


def test_the_comparison_sees_what_the_outputs_lose(trained: tuple[Tagger, float]) -> None:
    """The original's similarity cannot see quantization loss; ours falls as outputs drift."""
    figures = []
    for fmt in ("bfloat16", "int8", "int4_g32", "int4", "int2"):
        model = copy.deepcopy(trained[0])
        morph_model(model, fmt)
        overall = compare_models(trained[0], model).overall
        figures.append((overall.sqnr_db, overall.cosine, -deviation(model, trained[0])))
    for column in zip(*figures, strict=True):
        assert sorted(column, reverse=True) == list(column)
    assert figures[1][1] > 0.9995
    assert figures[4][1] < 0.8

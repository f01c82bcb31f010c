"""generate and bench: what they print, their JSON, and that a packed model says what transformers says."""

from __future__ import annotations

import json
import math

import pytest
import torch

import bitplan
from bitplan.cli import run
from bitplan.errors import MeasureError
from bitplan.runtime import generation
from bitplan.runtime.bench_model import bench_models
from bitplan.runtime.generation import generate_text, load_for_running
from tests.cli.verbs.test_perplexity_verb import save_llama

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_llama(folder / "llama")
    assert run(["quantize", str(folder / "llama"), str(folder / "packed"), "--format", "int8_row"]) == 0
    return folder


def test_generate_continues_as_transformers_does(models, capsys):
    packed = str(models / "packed")
    assert run(["generate", packed, "abe", "--max-tokens", "6", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    model = bitplan.load_packed(packed, dtype=torch.float32).model
    tokenizer = transformers.AutoTokenizer.from_pretrained(packed)
    ids = torch.tensor([tokenizer("abe")["input_ids"]])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert result["text"] == tokenizer.decode(made[0, ids.shape[1] :])
    assert (result["prompt_tokens"], result["tokens"], result["device"]) == (ids.shape[1], 6, "cpu")
    assert result["weight_bytes"] < sum(tensor.nbytes for tensor in model.parameters()) + 100_000
    assert run(["generate", packed, "abe", "--max-tokens", "6"]) == 0
    shown = capsys.readouterr().out
    assert result["text"].replace("\n", "").strip() in shown.replace("\n", "")
    assert "tokens a second; 6 tokens; weights" in shown


def test_drawn_tokens_are_the_same_for_a_seed(models, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        assert run(["generate", str(models / "llama"), "abe", "--temperature", "1.5", "--seed", seed, "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1] != texts[2]


def test_bench_times_both_in_turns(models, capsys):
    small = ["--batch", "1", "--batch", "2", "--prompt-tokens", "4", "--tokens", "2", "--repeats", "1", "--json"]
    assert run(["bench", str(models / "packed"), "--against", str(models / "llama"), *small]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["batch"], row["speedup"] is None) for row in rows] == [(1, False), (1, True), (2, False), (2, True)]
    assert rows[0]["weight_bytes"] < rows[1]["weight_bytes"] / 3
    assert all(row["decode_ms"] > 0 and row["prefill_tokens_per_second"] > 0 for row in rows)


def test_refusals(models, capsys):
    for words, said in (
        (["generate", str(models), "x"], "no config.json, so not a Hugging Face model"),
        (
            ["generate", str(models / "llama/config.json"), "x"],
            "expected a folder with config.json, a .safetensors or a .gguf file",
        ),
        (["generate", str(models / "packed"), "x", "--chat"], "the tokenizer has no chat template"),
        (["bench", str(models / "packed"), "--prompt-tokens", "64"], "context must be 64 or less"),
        (["bench", str(models / "packed"), "--against", str(models / "nothing")], "nothing: no such file or folder"),
    ):
        assert run(words) == 2
        message = capsys.readouterr().err
        assert said in message
        assert message.count("\n") == 1


def test_logits_that_are_not_finite_are_no_tokens(models, monkeypatch):
    lm = load_for_running(models / "llama")
    monkeypatch.setattr(generation, "_end_tokens", lambda _lm: set())

    def spoil(*_):
        with torch.no_grad():
            next(lm.model.model.norm.parameters())[0] = math.nan

    lm.model.register_forward_hook(spoil)  # after the first token
    for run_it, tokens in (
        (lambda: generate_text(lm, "abe", most_tokens=2), len(lm.tokenizer("abe")["input_ids"]) + 1),
        (lambda: bench_models([lm], batches=[2], prompt_tokens=3, tokens=2, repeats=1), 3),
    ):
        with pytest.raises(MeasureError, match=f"llama: logits that are not finite after {tokens} tokens; look for"):
            run_it()

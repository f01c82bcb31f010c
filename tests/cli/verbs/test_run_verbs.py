"""generate and bench: what they print, their JSON, and that a packed model says what transformers says."""

from __future__ import annotations

import io
import json
import math
import shutil
from unittest.mock import ANY

import pytest
import torch

import bitplan
from bitplan.base.errors import MeasureError
from bitplan.cli import run
from bitplan.packed.language import generation
from bitplan.packed.language.generation import Sampling, bench_models, generate_text, load_for_running
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
        (["generate", "/dev/null", "x"], "/dev/null: is a device, and a regular file is expected"),
        (
            ["generate", str(models / "llama/config.json"), "x"],
            "expected a folder with config.json, a .safetensors or a .gguf file",
        ),
        (["generate", str(models / "packed"), "x", "--chat"], "the tokenizer has no chat template"),
        (["generate", str(models / "packed")], "the tokenizer has no chat template"),
        (["generate", str(models / "packed"), "x", "--system", "y"], "a system prompt is a part of a conversation"),
        (["generate", str(models / "packed"), "x", "--top-k", "3"], "give a temperature above 0, too"),
        (["generate", str(models / "packed"), "x", "--temperature", "1", "--top-p", "0"], "top-p must be above 0"),
        (["generate", str(models / "packed"), "ab " * 40], "the prompt has 81 tokens, and the model's context of 64"),
        (["generate", str(models / "packed"), "x", "--chat", "--raw"], "give one of them"),
        (["generate", str(models / "packed"), "--json"], "give a PROMPT, or - to read it from standard input"),
        (["bench", str(models / "packed"), "--prompt-tokens", "64"], "context must be 64 or less"),
        (["bench", str(models / "packed"), "--against", str(models / "nothing")], "nothing: no such file or folder"),
    ):
        assert run(words) == 2
        message = capsys.readouterr().err
        assert said in message
        assert message.count("\n") == 1


def test_what_loading_has_freed_goes_back_to_the_system(models, monkeypatch):
    given_back = []
    monkeypatch.setattr(generation, "give_back_memory", lambda: given_back.append(True))
    load_for_running(models / "packed")
    assert given_back == [True]


def test_logits_that_are_not_finite_are_no_tokens(models, monkeypatch):
    lm = load_for_running(models / "llama")
    monkeypatch.setattr(generation, "_end_tokens", lambda _lm, **_: set())

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


TEMPLATE = (
    "{% for turn in messages %}{{ turn.role[0] }}{{ turn.content }}{% if turn.role == 'assistant' %}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(models):
    """The model with a chat template, whose turns end with a token that no config names."""
    folder = models / "chatty"
    shutil.copytree(models / "llama", folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    assert tokenizer.convert_tokens_to_ids("<end>") == len(tokenizer) - 1
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    return folder


def test_a_question_goes_into_the_template_unless_it_is_raw(chatty, capsys):
    def generated(*words):
        assert run(["generate", str(chatty), *words, "--max-tokens", "3", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    as_asked, raw = generated("ab"), generated("ab", "--raw")
    assert (as_asked["chat"], raw["chat"]) == (True, False)
    assert raw["text"] != as_asked["text"] == generated("uaba", "--raw")["text"]
    assert generated("ab", "--system", "d")["text"] == generated("sduaba", "--raw")["text"]
    assert generated("ab", "--chat") == {
        **as_asked,
        **dict.fromkeys(("prefill_s", "tokens_per_second", "peak_bytes"), ANY),
    }


def test_a_turn_ends_with_the_token_that_the_template_puts_after_an_answer(chatty):
    lm = load_for_running(chatty)
    end = lm.tokenizer.convert_tokens_to_ids("<end>")
    assert end in generation._end_tokens(lm, is_chat=True)
    assert end not in generation._end_tokens(lm, is_chat=False)
    with torch.no_grad():
        lm.model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(lm.model.lm_head.weight))
        lm.model.lm_head.bias = torch.nn.Parameter(torch.eye(lm.vocabulary)[end])
    result = generate_text(lm, [{"role": "user", "content": "ab"}], most_tokens=5)
    assert (result.text, result.tokens, result.ended) == ("", 0, "end")
    assert generate_text(lm, "ab", most_tokens=5).ended == "max tokens"


def test_a_prompt_and_a_conversation_come_from_standard_input(chatty, capsys, monkeypatch):
    lm = load_for_running(chatty)
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n"))
    assert run(["generate", str(chatty), "-", "--max-tokens", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "ab"
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\nde\n\nnever\n"))
    assert run(["generate", str(chatty), "--max-tokens", "3", "--system", "d"]) == 0
    turns = [{"role": "system", "content": "d"}, {"role": "user", "content": "ab"}]
    first = generate_text(lm, turns, most_tokens=3).text
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "de"}]
    second = generate_text(lm, turns, most_tokens=3).text
    shown = capsys.readouterr().out
    assert shown.index(first.split("\n")[0]) < shown.rindex(second.split("\n")[0])
    assert shown.count("tokens read in") == 2


def test_the_context_ends_a_text(models, capsys):
    assert run(["generate", str(models / "packed"), "ab " * 30, "--max-tokens", "50"]) == 0
    out = capsys.readouterr().out
    assert "61 tokens read" in out
    assert "; 3 tokens; " in out
    assert "The model's context is full." in out


def test_tokens_are_drawn_among_the_likeliest():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for options, allowed in (
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.79}, {0, 1}),
        ({"top_p": 0.81}, {0, 1, 2}),
        ({"top_k": 1, "top_p": 1.0}, {0}),
        ({"top_k": 9}, {0, 1, 2, 3}),
    ):
        draw = torch.Generator().manual_seed(0)
        sampling = Sampling(1.0, **options)
        assert {sampling.next_token(logits, draw) for _ in range(300)} == allowed


def test_a_template_that_raises_is_one_line(chatty):
    lm = load_for_running(chatty)
    lm.tokenizer.chat_template = "{{ raise_exception('no system\n\nturns') }}"
    with pytest.raises(
        MeasureError, match=r"chatty: its chat template refuses this conversation: no system turns; .*chat=False"
    ):
        generate_text(lm, [{"role": "user", "content": "ab"}])


def test_code_that_comes_with_a_model_is_not_run(models, tmp_path, capsys, monkeypatch):
    """A prompt of transformers would ask, and `yes |` would answer."""
    shutil.copytree(models / "llama", tmp_path / "odd")
    config = json.loads((tmp_path / "odd" / "config.json").read_text())
    own = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.T", "code.T"]}
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config | {"model_type": "odd", "auto_map": own}))
    (tmp_path / "odd" / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "text.txt").write_text("ab " * 99)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    for words in (
        ["generate", str(tmp_path / "odd"), "ab"],
        ["judge", str(tmp_path / "odd"), "--text", str(tmp_path / "text.txt")],
    ):
        assert run(words) == 2
        message = capsys.readouterr().err
        assert "which is not run unless BITPLAN_TRUST_REMOTE_CODE=1 is in the environment" in message
        assert message.count("\n") == 1
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("BITPLAN_TRUST_REMOTE_CODE", "yes")
    assert run(["generate", str(tmp_path / "odd"), "ab"]) == 2
    assert "must be 0 or 1, got 'yes'" in capsys.readouterr().err

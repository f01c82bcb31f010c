"""`bitplan fit` as it is typed: its example, the command that it prints next, other goals from evidence, refusals."""

from __future__ import annotations

import io
import json
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import bitplan
from bitplan.cli import run
from bitplan.cli.verbs import fit as verb
from bitplan.packed.rounded_kv import kv_of
from bitplan.plan.kv_formats import KVFormats
from bitplan.plan.plan import Plan
from bitplan.searching import fit as fit_of_models
from bitplan.searching import memory_probe
from bitplan.searching.memory_probe import MemoryProbe, TokenTimes
from tests.cli.verbs.test_perplexity_verb import save_llama
from tests.searching.tiny_mixtral import rounding_to_nearest

LEFT = 1_300_000  # for weights, keys and values


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    save_llama(folder / "llama", blocks=1)
    config = folder / "llama" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 2**15}))
    (folder / "text.txt").write_text(" ".join(["abandon hope all ye who enter here"] * 40))
    return folder


def fake_probe(_model, context, batch, device, **_options):
    return MemoryProbe(context, batch, device, 24 * 10**9 - LEFT)


@pytest.fixture(scope="module")
def shown(folder):
    """What the example prints."""
    with pytest.MonkeyPatch.context() as patch, rounding_to_nearest(), redirect_stdout(io.StringIO()) as out:
        patch.chdir(folder)
        patch.setattr(memory_probe, "probe_memory", fake_probe)
        assert run(example()) == 0
    return out.getvalue()


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("bitplan.cli.show.LINE_EVERY_S", 1e6)
    monkeypatch.setattr(memory_probe, "probe_memory", fake_probe)


def example() -> list[str]:
    found = re.search(r"Example: bitplan (.*)", " ".join((verb.fit.__doc__ or "").split()))
    assert found
    return shlex.split(found[1])


def test_the_example_finds_a_plan_that_its_next_command_packs_and_generate_runs(shown, capsys):
    words = " ".join(shown.split())
    assert "memory: 24.00 GB of 24.00 GB" in words
    assert "noise floor of KL: " in words
    command = shlex.split(shown.rpartition("apply it: bitplan ")[2])
    assert run(command) == 0
    packed = command[2]
    made = json.loads(Path("fit/fit.json").read_text())
    kv = kv_of(bitplan.load_packed(packed).model)
    assert kv is not None
    assert kv.of_layer(0) == KVFormats.from_document(made["kv_cache"], "fit.json").of_layer(0)
    capsys.readouterr()
    assert run(["generate", packed, "abandon", "--max-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv"] == str(kv)


def test_a_fit_for_llama_cpp_says_how_to_export_and_to_run_it(capsys):
    words = [*example(), "--for", "llama.cpp", "--formats", "q4_0_gguf,q8_0_gguf", "--output", "gguf"]
    words[words.index("--memory") + 1] = "404MB"
    with rounding_to_nearest():
        assert run(words) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    exported, started = re.search(r"apply it: bitplan (.*)", said), re.search(r"run it: (.*)", said)
    assert exported
    assert started
    assert "llama.cpp itself was not run" in " ".join(said.split())
    assert re.fullmatch(r"llama-server -m llama-gguf\.gguf -c 32768 -np 1 -ctk \w+ -ctv \w+ -fa on", started[1].strip())
    assert run([*words, "--formats", "mxfp4_g9"]) == 2
    assert run([*example(), "--for", "mlx"]) == 2
    assert "a fit is for one of bitplan, llama.cpp, vllm" in capsys.readouterr().err


def test_evidence_answers_for_another_context_as_one_document(shown, capsys):
    assert shown
    shorter = [word.replace("32k", "30k") for word in example()]
    assert run([*shorter, "--plan-only", "--json"]) == 0, capsys.readouterr().err
    document = json.loads(capsys.readouterr().out)
    assert document["goal"]["context"] == 30 * 1024
    assert document["needed_bytes"] <= 24 * 10**9


def test_the_command_that_follows_an_answer_from_evidence_applies_that_plan(shown, capsys):
    assert shown
    measured, memory = Path("fit/plan.json").read_bytes(), 24 * 10**9 + LEFT
    words = [*example(), "--plan-only"]
    words[words.index("--memory") + 1] = str(memory)
    assert run(words) == 0, capsys.readouterr().err
    applied = shlex.split(capsys.readouterr().out.rpartition("apply it: bitplan ")[2])
    found = bitplan.fit("llama", goal={"memory": memory, "context": 32 * 1024}, out="fit", plan_only=True).plan
    assert Plan.load(applied[applied.index("--plan") + 1]) == found != Plan.load("fit/plan.json")
    assert Path("fit/plan.json").read_bytes() == measured


def test_two_memories_are_answered_from_evidence_with_the_time_of_a_token(shown, capsys, monkeypatch):
    assert shown
    times = TokenTimes(gpu_rate=4000.0, bus_rate=50.0, crossing=2.0, rest=100.0, launch=50.0)
    probed = MemoryProbe(32 * 1024, 1, "cpu", 24 * 10**9 - LEFT, times)
    monkeypatch.setattr(memory_probe, "probe_memory", lambda *_args, **_options: probed)
    words = [*example(), "--plan-only", "--ram", "1GB"]
    assert run(words) == 0, capsys.readouterr().err
    said = " ".join(capsys.readouterr().out.split())
    assert "ms a token" in said
    assert "on the host" in said
    assert "for all" in said
    assert run([*words, "--ms", "5", "--json"]) == 0, capsys.readouterr().err
    document = json.loads(capsys.readouterr().out)
    assert document["goal"]["ram"] == 10**9
    assert document["plan"]["ms"] <= 5
    assert run([*words, "--ms", "0.05"]) == 2
    assert "a token takes 0.10 ms beside products" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--memory", "2MB"], "2,000,000 bytes are too few"),
        (["--memory", "24GBs"], "expected a size such as 6GB"),
        (["--context", "many"], "such as 8192 or 32k"),
        (["--context", "4k"], "the model fits as it is"),
        (
            ["--context", "64k", "--for", "llama.cpp", "--formats", "q4_0_gguf"],
            "texts of 32,768 tokens or fewer, got a context of 65,536",
        ),
        (["--output", "nowhere", "--plan-only"], "no evidence.json"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(change, said, capsys):
    words = example()
    if change[0] in words:
        words[words.index(change[0]) + 1] = change[1]
        change = change[2:]
    assert run([*words, *change, "--output", "other"] if "--output" not in change else [*words, *change]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert message.startswith("bitplan: ")


def test_a_fit_without_text_says_what_to_give(capsys):
    assert run(["fit", "llama", "--memory", "1GB", "--context", "64"]) == 2
    assert "--text FILE" in capsys.readouterr().err


def test_kinds_of_text_are_measured_each_conversations_by_the_chat_template(folder, capsys):
    template = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    path = folder / "llama" / "tokenizer_config.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {"chat_template": template}))
    chats = [{"messages": [{"role": "user", "content": "who goes there"}]}, {"text": "nobody of note"}]
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, 30 * chats)))
    words = [*example(), "--text", "chats.jsonl", "--output", "kinds", "--json", "--goal", "worst"]
    try:
        with rounding_to_nearest():
            assert run(words) == 0, capsys.readouterr().err
        document = json.loads(capsys.readouterr().out)
        assert set(document["plan"]["kinds"]) == {"text.txt", "chats.jsonl"}
        assert all(kl > 0 for kl in document["plan"]["kinds"].values())
        assert document["goal"]["kinds"] == "worst"
        known = json.loads(Path("kinds/evidence.json").read_text())["groups"]
        assert all(set(group["kinds"]) == {"text.txt", "chats.jsonl"} for group in known.values())
        measured = {row["label"]: max(row["kinds"].values()) for row in document["measured"]}
        assert max(document["plan"]["kinds"].values()) == min(measured.values())
        page = Path("kinds/report.html").read_text()
        assert "KL against memory" in page
        assert "KL, chats.jsonl" in page
        Path("chats.jsonl").write_text('{"messages": "none"}\n')
        assert run(words) == 2
        assert "chats.jsonl: line 1: expected" in capsys.readouterr().err
    finally:
        path.write_text(before)


def test_the_probe_of_a_folder_holds_its_tokenizer():
    assert memory_probe._tokenizer("llama")("abandon hope")["input_ids"]


def test_a_fit_that_is_interrupted_says_what_is_there_and_how_it_goes_on(shown, tmp_path, monkeypatch, capsys):
    def interrupted(*_given, **_options):
        raise KeyboardInterrupt

    assert shown
    monkeypatch.setattr(fit_of_models._Fitter, "_kv", interrupted)
    with rounding_to_nearest():
        assert run([*example(), "--output", str(tmp_path / "out")]) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert "what formats cost" in said
    assert "the same command goes on from there" in said
    monkeypatch.setattr(memory_probe, "probe_memory", interrupted)
    assert run([*example(), "--output", str(tmp_path / "new")]) == 130
    assert "nothing was measured yet: start the same command again" in capsys.readouterr().err

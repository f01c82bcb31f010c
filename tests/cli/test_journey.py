"""The first journey with a GGUF file, as a new user walks it: search, the command that it prints, and on from there."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex

import pytest

from bitplan.base.records import atomic_file
from bitplan.cli import SPINS, main, run
from bitplan.files.engines import gguf_source
from bitplan.files.engines.targets import export_model
from bitplan.plan import Plan
from tests.crosses import few
from tests.files.engines.tiny_models import save_tiny

TEXT = "the hen and the cat then ran there and hid in the shed with a thin hat and that other hen\n" * 40
SEARCH = ("--text", "text.txt", "--context", "16", "--windows", "2")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny llama as a GGUF file, and a text."""
    folder = tmp_path_factory.mktemp("journey")
    save_tiny(folder / "llama", "llama", tie_word_embeddings=False)
    export_model(folder / "llama", folder / "tiny.gguf", "gguf", "float32")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def here(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


def ran(*arguments, capsys):
    """What a command prints; it must succeed."""
    code = run([str(each) for each in arguments])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return shown.out


def printed_command(text):
    (found,) = re.findall(r"apply it: bitplan (.*)", text)
    return shlex.split(found)


def perplexity_of(model, *options, capsys):
    options = ("--text", "text.txt", "--context", 16, "--tokens", 160, "--no-floor", "--json", *options)
    return json.loads(ran("judge", model, *options, capsys=capsys))


def test_a_gguf_file_from_search_to_text_and_report(here, capsys):
    shown = ran(
        "search", "tiny.gguf", *SEARCH, "--bits", 9, "--formats", "int8_row,mxfp4", "-o", "found", capsys=capsys
    )
    before_work = shown.partition("tiny.gguf: 9 bits")[0]  # said before it, not after it
    assert "--for llama.cpp" in before_work
    assert re.search(r"the search takes about .* and [0-9.]+ GB of memory, of [\d.]+ GB$", before_work, re.M)
    command = printed_command(shown)
    ran(*command, capsys=capsys)
    packed = command[2]
    assert {"config.json", "tokenizer.json", "bitplan_plan.json"} <= {path.name for path in (here / packed).iterdir()}
    names = Plan.load(here / packed / "bitplan_plan.json").keys()
    assert "model.layers.0.self_attn.q_proj.weight" in names
    same = perplexity_of("tiny.gguf", packed, capsys=capsys)["rows"][0]
    by_plan = perplexity_of("tiny.gguf", "--plan", "found/plan.json", capsys=capsys)["rows"][0]
    assert same["kl"]["mean"] < 2 * by_plan["kl"]["mean"]  # rows of q and k back in place: else it would be far off
    assert ran("generate", packed, "the", "--max-tokens", 3, capsys=capsys)
    assert "Search, Decisions" in ran("report", "found", "-o", "page.html", "--force", capsys=capsys)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("target", few(["llama.cpp", "mlx"], 1))
def test_the_command_of_a_search_for_another_engine_works(target, capsys):
    formats = {"llama.cpp": "q8_0_gguf,q4_0_gguf", "mlx": "mxfp4,int8_g64"}[target]
    shown = ran(
        *("search", "tiny.gguf", *SEARCH, "--bits", 9.5, "--formats", formats, "--for", target),
        *("-o", f"found-{target}"),
        capsys=capsys,
    )
    ran(*printed_command(shown), capsys=capsys)


@pytest.mark.usefixtures("here")
def test_generate_bench_and_perplexity_take_a_gguf_file_and_a_file_of_weights(capsys):
    ran("quantize", "tiny.gguf", "gguf-names.safetensors", "--format", "int8_row", "--force", capsys=capsys)
    ran("quantize", "llama", "own-names.safetensors", "--format", "int8_row", "--force", capsys=capsys)
    ran("quantize", "llama", "packed-llama", "--format", "int8_row", "--force", capsys=capsys)
    expected = perplexity_of("packed-llama", capsys=capsys)["reference_row"]["nll"]["mean"]
    for weights, config in (
        ("gguf-names.safetensors", "tiny.gguf"),
        ("own-names.safetensors", "tiny.gguf"),
        ("own-names.safetensors", "llama"),
    ):
        found = perplexity_of(weights, "--config", config, capsys=capsys)["reference_row"]["nll"]["mean"]
        assert found == pytest.approx(expected, rel=1e-6), (weights, config)
        text = ran("generate", weights, "the", "--config", config, "--max-tokens", 4, "--json", capsys=capsys)
        assert json.loads(text)["tokens"] == 4
    wide = perplexity_of("llama", capsys=capsys)["reference_row"]["nll"]["mean"]
    assert perplexity_of("tiny.gguf", capsys=capsys)["reference_row"]["nll"]["mean"] == pytest.approx(wide, rel=1e-6)
    texts = [
        json.loads(ran("generate", model, "the hen", "--max-tokens", 8, "--json", capsys=capsys))["text"]
        for model in ("tiny.gguf", "llama")
    ]
    assert texts[0] == texts[1]
    rows = json.loads(
        ran(
            *("bench", "tiny.gguf", "--against", "llama", "--batch", 1, "--prompt-tokens", 4, "--tokens", 2),
            *("--repeats", 1, "--json"),
            capsys=capsys,
        )
    )["rows"]
    assert [row["model"] for row in rows] == ["tiny.gguf", "llama"]


@pytest.mark.usefixtures("here")
def test_a_plan_for_one_naming_fits_the_other(capsys):
    for source, name in (("tiny.gguf", "gguf.json"), ("llama", "own.json")):
        ran("plan", source, "--format", "q8_0_gguf", "-o", name, "--force", capsys=capsys)
    ran("quantize", "llama", "by-gguf", "--plan", "gguf.json", "--force", capsys=capsys)
    ran("quantize", "llama", "by-own", "--plan", "own.json", "--force", capsys=capsys)
    ran("quantize", "tiny.gguf", "from-gguf", "--plan", "own.json", "--force", capsys=capsys)
    for other in ("by-own", "from-gguf"):
        assert "values identical" in ran("compare", "by-gguf", other, capsys=capsys)
    for plan in ("gguf", "own"):
        ran("quantize", "tiny.gguf", f"{plan}.gguf", "--plan", f"{plan}.json", "--force", capsys=capsys)
        ran("export", "llama", f"{plan}-of-llama.gguf", "--plan", f"{plan}.json", "--force", capsys=capsys)
    for other in ("gguf.gguf", "gguf-of-llama.gguf", "own-of-llama.gguf"):
        assert "values identical" in ran("compare", "own.gguf", other, capsys=capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quantize", "tiny.gguf", "x.bin", "--format", "int8_row"], "x.bin: a folder is to be written, and .bin"),
        (["quantize", "tiny.gguf", "x", "--format", "Q4_K_M"], "llama.cpp's Q4_K_M is 'q4_k_gguf'"),
        (["quantize", "tiny.gguf", "x", "--format", "bf16"], "did you mean 'bfloat16'?"),
        (
            ["export", "tiny.gguf", "x", "--to", "vllm"],
            "target compressed-tensors writes (--to compressed-tensors)",
        ),
        (["export", "tiny.gguf", "x"], "give --to, for which engine x is"),
        (["search", "tiny.gguf", *SEARCH, "--bits", "40", "-o", "new"], "the model fits as it is"),
        (["search", "tiny.gguf", *SEARCH, "--bits", "4", "--for", "llamacpp"], "did you mean 'llama.cpp'"),
        (["generate", "own.safetensors", "a"], "give its folder, or a GGUF file of the model (--config)"),
    ],
)
def test_what_people_type_is_answered_with_what_they_meant(words, message, here, capsys):
    (here / "own.safetensors").write_bytes(b"")
    assert run(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_a_plan_is_compared_with_the_files_own_bytes(capsys):
    assert "times smaller than tiny.gguf as it is: " in ran("plan", "tiny.gguf", "-f", "int8_row", capsys=capsys)


def test_a_full_disk_is_named_with_its_bytes(tmp_path):
    def write():
        with atomic_file(tmp_path / "big.bin") as file:
            file.write(b"12345")
            file.flush()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space left on device after 5 bytes of it; [\d,]+ bytes are free") as full:
        write()
    assert full.value.filename == str(tmp_path / "big.bin")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("policy", [None, "active"])
def test_threads_sleep_soon_unless_the_user_says_otherwise(policy, monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert os.environ.get("GOMP_SPINCOUNT") == (SPINS if policy is None else None)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)


@pytest.mark.usefixtures("here")
def test_the_tokenizer_of_a_gguf_file_is_made_once(monkeypatch, capsys):
    calls = []
    make = gguf_source.tokenizer_of_gguf
    monkeypatch.setattr(gguf_source, "tokenizer_of_gguf", lambda *args: [calls.append(1), make(*args)][1])
    ran("generate", "tiny.gguf", "the hen", "--max-tokens", 1, capsys=capsys)
    assert len(calls) == 1
    perplexity_of("tiny.gguf", capsys=capsys)
    assert len(calls) == 2

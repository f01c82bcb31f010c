"""README's first steps, from file to answer, on small files of each kind of tokenizer; tokens are llama.cpp's."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from bitplan.cli import run
from bitplan.files.engines.targets import export_model
from bitplan.files.engines.tokenizer_of_gguf import tokenizer_of_gguf
from tests.files.engines.test_tokenizer_of_gguf import TOKENS, as_gguf
from tests.files.engines.tiny_models import save_tiny

transformers = pytest.importorskip("transformers")
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^bitplan (?:plan|quantize|compare|generate|judge) mymodel.*|^bitplan generate .*", README, re.M)
FAMILIES = {
    "sentencepiece of gemma": ("gemma3", "gguf"),
    "sentencepiece that says nothing": ("llama", "gguf"),
    "bpe llama-bpe": ("llama", "gguf"),
    "wordpiece": ("llama", "folder"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_steps_end_with_an_answer(name, tmp_path, monkeypatch, capsys, caplog):
    case, (family, kind) = TOKENS["cases"][name], FAMILIES[name]
    keys = as_gguf(TOKENS["vocabularies"][case["vocabulary"]] | case["keys"])
    tokenizer = tokenizer_of_gguf(keys, Path("model.gguf"))
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "in", family, vocab_size=len(tokenizer))
    (tmp_path / "in" / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(tmp_path / "in")
    if kind == "gguf":
        export_model(tmp_path / "in", tmp_path / "mymodel.gguf", "gguf", "float32")
        assert not caplog.records  # remarks of gguf's own
    model = "mymodel.gguf" if kind == "gguf" else "in"
    (tmp_path / "sample.txt").write_text("the king of the day said this to them and then went home\n" * 20)
    steps = [step for step in STEPS if "--plan found" not in step]  # a search is walked in test_journey
    assert len(steps) == 5
    for step in steps:
        words = [model if word == "mymodel" else word for word in shlex.split(step, comments=True)[1:]]
        words += {"generate": ["--max-tokens", "3", "--json"], "judge": ["--context", "16", "--json"]}.get(words[0], [])
        assert run([{"10240": "64"}.get(word, word) for word in words]) == 0, capsys.readouterr().err
        shown = capsys.readouterr().out
        if words[0] == "generate":
            assert json.loads(shown)["prompt_tokens"] == len(tokenizer(words[2])["input_ids"])
    packed = transformers.AutoTokenizer.from_pretrained(tmp_path / "packed")
    assert [packed(sample)["input_ids"] for sample in TOKENS["texts"]] == case["ids"]

"""`bitplan search`, `bitplan plan --from` and `bitplan diff`, as they are typed."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from bitplan.cli import run
from bitplan.cli.verbs.search import next_step
from bitplan.files.certificate import EVIDENCE_FILE, write_certificate
from bitplan.files.tensor_bytes import SEAL
from bitplan.formats.dispatch import encode
from bitplan.plan import Plan
from bitplan.searching import collect, damage, statistics, verify_model
from bitplan.searching.runtime_formats import TARGETS
from tests.cli.verbs.test_perplexity_verb import save_llama

FORMATS = "mxfp4,nvfp4,int8_row"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A folder with a llama, a text, and in `out` what a search of it wrote."""
    folder = tmp_path_factory.mktemp("search")
    save_llama(folder / "llama")
    (folder / "text.txt").write_text(" ".join(["abandon hope all ye who enter here"] * 60))
    (folder / "short.txt").write_text("abandon hope")
    patch = pytest.MonkeyPatch()
    patch.setattr(damage, "round_weight", lambda weight, fmt, **_options: encode(weight, fmt))
    command = ["search", str(folder / "llama"), "--text", str(folder / "text.txt"), "--context", "16", "--bits", "6"]
    assert run([*command, "--formats", FORMATS, "--output", str(folder / "out")]) == 0
    patch.undo()
    return folder


@pytest.fixture(autouse=True)
def here(found, monkeypatch):
    monkeypatch.chdir(found)


def refused(*words, capsys) -> str:
    assert run([*map(str, words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_quantize_takes_the_evidence_of_a_search_along_and_warns_without(capsys):
    front = json.loads(Path("out/front.json").read_text())
    assert run(["quantize", "llama", "proven", "--plan", "out", "--json"]) == 0
    shown = capsys.readouterr()
    assert "warning" not in shown.err
    assert any("rounding" in row for row in json.loads(shown.out)["tensors"])
    certificate = json.loads(Path("proven/bitplan_evidence.json").read_text())
    assert certificate["search"]["measured"]["kl"] == front["plan"]["kl"]
    assert f"KL from the model {front['plan']['kl']:.4g}" in Path("proven/README.md").read_text()
    assert run(["verify", "proven", "--source", "llama"]) == 0
    assert "the plan follows from its evidence, for 6 bits a weight" in capsys.readouterr().out
    assert run(["quantize", "llama", "bare", "--plan", "out/plan.json"]) == 0
    warning = " ".join(capsys.readouterr().err.split())
    figures = f"proven with statistics of its text, KL {front['plan']['kl']:.4g}, and without them it has "
    assert figures + f"{front['nearest']['kl']:.4g}" in warning
    assert "with the folder out as the plan they are taken along" in warning
    assert json.loads(Path("bare/bitplan_evidence.json").read_text())["search"] is None


def test_a_plan_that_its_evidence_does_not_give_is_a_finding(tmp_path):
    """Evidence of a certificate in which another choice was proven, sealed again: the bytes hold, the plan does not."""
    assert run(["quantize", "llama", str(tmp_path / "packed"), "--plan", "out"]) == 0
    certificate = json.loads((tmp_path / "packed" / EVIDENCE_FILE).read_text())
    (proven,) = certificate["search"]["evidence"]["proven"]
    proven["choice"] = dict.fromkeys(proven["choice"], "mxfp4")
    write_certificate(tmp_path / "packed", {**certificate, "seal": SEAL})
    (finding,) = verify_model(tmp_path / "packed").findings
    assert finding.code == "plan"
    assert "its evidence gives another plan for 6 bits a weight" in finding.message


def test_a_second_search_goes_on_from_the_evidence_for_another_goal(monkeypatch, capsys):
    monkeypatch.setattr(damage, "round_weight", lambda weight, fmt, **_options: encode(weight, fmt))
    monkeypatch.setattr(collect, "add_windows", None)  # they are there
    shutil.copytree("out", "again", dirs_exist_ok=True)
    words = ["search", "llama", "--text", "text.txt", "--context", "16", "--max-kl", "0.2", "--formats", FORMATS]
    assert run([*words, "--output", "again", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["goal"] == {"max_kl": 0.2}
    assert document["plan"]["bytes"] == Plan.load("again/plan.json").nbytes


def test_a_search_that_is_interrupted_says_what_is_there_and_how_it_goes_on(tmp_path, monkeypatch, capsys):
    real = collect.add_windows
    calls = []

    def add_windows(*given):
        calls.append(given)
        if len(calls) in (1, 3):
            raise KeyboardInterrupt
        real(*given)

    def predicted(rounded, _experts, weights, _fmt):
        rows, columns = rounded.subject.sites[weights[0]].shape
        if rows == columns:
            raise KeyboardInterrupt
        return 0.1

    def interrupted(*more):
        words = ["search", "llama", "--text", "text.txt", "--context", "16", "--bits", "6", "--formats", FORMATS]
        assert run([*words, "--output", str(tmp_path / "out"), *more]) == 130
        return capsys.readouterr().err.splitlines()[-1]

    monkeypatch.setattr(collect, "add_windows", add_windows)
    monkeypatch.setattr(statistics, "AT_ONCE", 32)
    monkeypatch.setattr(collect, "_predicted", predicted)
    assert "interrupted; nothing was measured yet" in interrupted()
    assert "the statistics of 2 windows: the same command without --force goes on" in interrupted("--force")
    assert "what formats cost 3 groups: the same command goes on" in interrupted()


def test_force_keeps_earlier_evidence_until_the_new_one_is_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(damage, "round_weight", lambda weight, fmt, **_options: encode(weight, fmt))
    shutil.copytree("out", tmp_path / "out")
    (tmp_path / "out" / "notes.md").touch()
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    words = ["search", "llama", "--text", "text.txt", "--context", "16", "--formats", "mxfp4,int8_row", "--force"]
    words += ["--output", str(tmp_path / "out"), "--bits"]

    def unchanged():
        return before == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    assert run([*words, "0.01"]) == 2
    assert unchanged()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with monkeypatch.context() as patch:
        patch.setattr(collect, "_predicted", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run([*words, "6"]) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(f": the same command goes on from there; {tmp_path / 'out'} is as it was")
    assert unchanged()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.unfinished"}
    monkeypatch.setattr(collect, "add_windows", None)  # they are there
    assert run([*words, "6"]) == 0
    assert not unchanged()
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(before)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_plan_of_the_evidence_needs_no_model_and_is_the_same_each_time(found, capsys):
    for name in ("a.json", "b.json"):
        assert run(["plan", "--from", "out/evidence.json", "--bits", "5", "-o", name, "--force"]) == 0
    capsys.readouterr()
    assert (found / "a.json").read_bytes() == (found / "b.json").read_bytes()
    assert Plan.load("a.json").nbytes < Plan.load("out/plan.json").nbytes
    assert run(["plan", "--from", "out/evidence.json", "--max-kl", "0.05", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["document"] == "bitplan-plan"


def test_diff_says_what_changed_and_what_it_costs(capsys):
    assert run(["plan", "--from", "out/evidence.json", "--bits", "5", "-o", "small.json", "--force"]) == 0
    capsys.readouterr()
    assert run(["diff", "out/plan.json", "small.json", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bytes"] == Plan.load("small.json").nbytes - Plan.load("out/plan.json").nbytes < 0
    assert result["nats"] > 0
    assert {row["name"] for row in result["rows"]} == {
        name
        for name, choice in Plan.load("small.json").items()
        if choice.format != Plan.load("out/plan.json")[name].format
    }
    assert run(["diff", "small.json", "small.json"]) == 0
    assert "the same format" in capsys.readouterr().out
    assert result["nats_of"] == len(result["rows"])
    document = json.loads(Path("small.json").read_text())
    del document["tensors"][result["rows"][0]["name"]]["evidence"]
    Path("unknown.json").write_text(json.dumps(document))
    assert run(["diff", "out/plan.json", "unknown.json"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"predicted KL of {len(result['rows']) - 1} of {len(result['rows'])} parts +" in said


def test_diff_shows_both_plans_whatever_their_names_and_members_of_a_group_without_nats(found, capsys):
    for folder, bits in (("large", "7"), ("small", "4.5")):
        (found / folder).mkdir(exist_ok=True)
        assert run(["plan", "--from", "out/evidence.json", "--bits", bits, "-o", f"{folder}/plan.json", "--force"]) == 0
    capsys.readouterr()
    assert run(["diff", "large/plan.json", "small/plan.json", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["nats"] is None for row in rows} == {True, False}
    assert run(["diff", "large/plan.json", "small/plan.json"]) == 0
    shown = capsys.readouterr().out
    assert "predicted KL +" in shown
    assert all(row["from"] in shown and row["to"] in shown for row in rows)


def test_plans_of_two_models_are_not_compared(found, capsys):
    document = json.loads((found / "out/plan.json").read_text())
    name, entry = next(iter(document["tensors"].items()))
    entry["shape"][0] *= 2
    entry["bytes"] *= 2
    (found / "other.json").write_text(json.dumps(document))
    message = refused("diff", "out/plan.json", "other.json", capsys=capsys)
    assert "plans of different models" in message
    assert name in message


def test_the_report_shows_the_search(tmp_path, capsys):
    page = tmp_path / "report.html"
    assert run(["report", "out/front.json", "out/plan.json", "-o", str(page)]) == 0
    text = page.read_text()
    for title in ("What was decided", "Why", "What it cost", "What it gained", "Where precision matters"):
        assert title in text
    capsys.readouterr()
    assert "kB, more than the goal allows, and is" in text  # plans without a search are of no fewer bytes
    best = re.search(r'<polyline points="([^"]+)" class="line k0"', text)[1]
    places = [place.split(",") for place in best.split()]
    assert all(x == next_x or y == next_y for (x, y), (next_x, next_y) in pairwise(places))  # sizes are discrete


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "--from", "out/evidence.json"], "needs a goal"),
        (["plan", "--from", "out/evidence.json", "--bits", "2"], "the smallest has"),
        (["plan", "--from", "out/evidence.json", "--faster", "2"], "no times"),
        (["plan", "--from", "out/evidence.json", "--bytes", "many"], "such as 6GB"),
        (["plan", "--from", "out/plan.json", "--bits", "4"], "no evidence.json of a search"),
        (["plan", "--from", "llama/config.json", "--bits", "4"], "no evidence.json of a search"),
        (["diff", "llama/config.json", "out/plan.json"], "expected a plan"),
        (["search", "llama", "--text", "text.txt"], "needs a goal"),
        (["search", "llama", "--text", "text.txt", "--bits", "5", "--formats", "int9"], "no format 'int9'"),
        (
            ["search", "llama", "--text", "text.txt", "--bits", "7", "--context", "16", "-o", "llama"],
            "a model's folder",
        ),
        (
            ["fit", "llama", "--text", "text.txt", "--memory", "1GB", "--context", "9", "-o", "llama"],
            "a model's folder",
        ),
        (["search", "llama", "--text", "short.txt", "--bits", "5", "--context", "16", "--output", "x"], "window"),
    ],
)
def test_bad_input_is_one_line(words, message, capsys):
    assert message in refused(*words, capsys=capsys)


def test_a_refused_search_leaves_no_folder(found, capsys):
    words = ["search", "llama", "--text", "text.txt", "--context", "16", "--output", "new/folder"]
    assert "the smallest has" in refused(*words, "--bits", "1", capsys=capsys)
    assert not (found / "new").exists()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("bitplan", "bitplan quantize m m-packed --plan"),
        ("llama.cpp", "bitplan export m m-gguf.gguf --to gguf --plan"),
        ("vllm", "bitplan export m m-compressed-tensors --to compressed-tensors --plan"),
        ("mlx", "bitplan export m m-mlx --to mlx --plan"),
        (
            "training",
            "bitplan.stream_blocks(model, formats=bitplan.plan.Plan.load('out/plan.json'), train=\"weights\")",
        ),
    ],
)
def test_the_last_line_says_how_the_plan_is_applied(target, words):
    assert words in next_step(TARGETS[target], "m", Path("out"))

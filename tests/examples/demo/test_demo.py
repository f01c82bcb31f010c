"""The demo with `--fast` from the shell: every file, the page in a browser, the same figures again, and Ctrl-C."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stdout

import pytest
import torch

from bitplan.cli import run
from bitplan.files.open_files import open_tensors
from bitplan.formats.dispatch import encode
from bitplan.plan import Manifest, Plan
from bitplan.report.read_records import read_records
from bitplan.searching import damage
from examples.demo import run as demo_run
from examples.demo import tiny_model
from examples.demo.__main__ import main as demo
from examples.demo.run import EVIDENCE, PLAN, RECORDS, REFERENCE, prepare_folder
from tests.report.browser import Browser

BLOCKS = 1  # of six: a sixth of the layers to search formats for
CANDIDATES = ("mxfp4", "int8_row", "bfloat16")  # of five
FORMATS = ("bfloat16", "int8_row", "mxfp4", "ternary_absmean")  # of nine
GPU_RECORDS = {"fp8-policy.json", "crossover.json"}
SECTIONS = [
    "run",
    "search",
    "decisions",
    "quality",
    "training",
    "precision",
    "streaming",
    "errors",
    "benchmarks",
    "machine",
]


def plainly(weight, fmt, **_options):
    """The search of a demo rounds for a third of the time, and has tests of its own."""
    return encode(weight, fmt)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demo") / "new" / "out"


@pytest.fixture(scope="module")
def one_demo(folder):
    """(what one fast demo returned, what it printed)"""
    real, results = demo_run.run_demo, []

    def run_demo(*arguments, **options):
        results.append(real(*arguments, **options))
        return results[-1]

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(demo_run, "run_demo", run_demo)
        patch.setattr(tiny_model, "BLOCKS", BLOCKS)
        patch.setattr(demo_run, "CANDIDATES", CANDIDATES)
        patch.setattr(demo_run, "FORMATS", FORMATS)
        patch.setattr(damage, "round_weight", plainly)
        assert demo(["--fast", "-o", str(folder)]) == 0
    return json.loads(json.dumps(results[0])), printed.getvalue()


@pytest.fixture(scope="module")
def figures(one_demo):
    return one_demo[0]


def without_times(result):
    """Figures that the seed decides: no seconds."""
    if isinstance(result, dict):
        timed = ("_s", "_s_samples", "seconds")
        return {key: without_times(value) for key, value in result.items() if not key.endswith(timed)}
    return [without_times(item) for item in result] if isinstance(result, list) else result


def test_every_file_is_written_and_is_a_record(folder, figures):
    expected = {*RECORDS} - GPU_RECORDS
    assert set(figures["records"]) == expected
    models = {f"model.{name}.safetensors" for name in (REFERENCE, PLAN, *FORMATS)}
    assert {path.name for path in folder.iterdir()} == expected | models | {"manifest.json", "report.html", *EVIDENCE}
    assert len(read_records(folder / name for name in figures["records"])) == len(expected)
    stored = json.loads((folder / "demo.json").read_text())
    assert stored == {key: value for key, value in figures.items() if key not in ("records", "report")}


def test_the_shell_shows_each_part_and_the_report(one_demo, folder):
    words = ("perplexity", "INT8 at the first decision", "worst layers", "times smaller than bfloat16", "* plan", "AUC")
    assert [each for each in words if each not in one_demo[1]] == []
    assert one_demo[1].rstrip().endswith(f"report: {folder / 'report.html'}")


def test_figures_as_json(figures, tmp_path, capsys, monkeypatch):
    """Nothing else is printed: the run itself is quiet."""
    given = []
    monkeypatch.setattr(demo_run, "run_demo", lambda *_, **options: (given.append(options), figures)[1])
    assert demo(["--fast", "--json", "--seed", "3", "-o", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == figures
    assert given == [{"fast": True, "quiet": True, "seed": 3, "force": False}]


def test_training_learned_and_layers_moved_for_a_reason(figures):
    result = figures["training"]
    assert result["last_loss"] < result["first_loss"] - 0.5
    assert result["moves"]
    assert all(move["before"] != move["after"] and move["reason"].startswith("score ") for move in result["moves"])
    assert sum(result["layers_by_precision"].values()) == result["layers"] == 4 * BLOCKS
    assert result["layers_by_precision"]["int8"] > 0
    assert result["bytes_not_sent"] > 0


def test_telemetry_says_what_the_figures_say(folder, figures):
    updates = [json.loads(line) for line in (folder / "precision.jsonl").read_text().splitlines()]
    last = {name: row["precision"] for name, row in updates[-1]["block_details"].items()}
    for move in figures["training"]["moves"]:
        update = next(row for row in updates if row["step_id"] == move["step"])
        assert update["block_details"][move["layer"]]["precision"] == move["after"]
    assert sum(precision == "int8" for precision in last.values()) == updates[-1]["blocks_int8"]
    streamed = [json.loads(line) for line in (folder / "stream.jsonl").read_text().splitlines()]
    assert len(streamed) == figures["steps"]
    assert streamed[-1]["bytes_h2d_by_format"]["int8_row"] > 0
    assert "int8_row" not in streamed[0]["bytes_h2d_by_format"]


def test_manifest_plan_and_packed_file_agree(folder, figures):
    plan, manifest = Plan.load(folder / "plan.json"), Manifest.load(folder / "manifest.json")
    with open_tensors(folder / "model.plan.safetensors") as file:
        held = {name: spec.format for name, spec in file.specs.items()}
        shapes = {name: spec.shape for name, spec in file.specs.items()}
    resolved = manifest.resolve(shapes)
    assert {name: choice.format for name, choice in plan.items()} == held == figures["plan"]["formats"]
    assert {name: choice.format for name, choice in resolved.items()} == held
    assert run(["check", str(folder / "manifest.json"), str(folder / "model.plan.safetensors")]) == 0
    packed = {name for name, fmt in held.items() if fmt not in ("float32", "bfloat16")}
    assert {row["name"] for row in figures["drift"]} == packed


def test_the_plan_is_far_smaller_than_bf16_and_about_as_good(figures):
    rows = {row["format"]: row for row in figures["formats"]}
    assert rows[PLAN]["bytes"] < 0.5 * rows["bfloat16"]["bytes"]
    assert abs(rows[PLAN]["perplexity"] / rows["bfloat16"]["perplexity"] - 1) < 0.02
    assert rows["ternary_absmean"]["perplexity"] > rows[PLAN]["perplexity"]


def test_formats_are_measured_and_their_files_are_as_large_as_told(folder, figures):
    rows = {row["format"]: row for row in figures["formats"]}
    assert rows["float32"]["sqnr_db"] is None
    assert rows["int8_row"]["sqnr_db"] > rows["mxfp4"]["sqnr_db"] > rows["ternary_absmean"]["sqnr_db"]
    assert rows["mxfp4"]["bytes"] < rows["float32"]["bytes"] / 7
    assert all((folder / row["file"]).stat().st_size == row["bytes"] for row in rows.values())
    assert abs(rows["bfloat16"]["perplexity"] / rows["float32"]["perplexity"] - 1) < 0.01


def test_trees_and_what_a_gpu_would_add(figures):
    runs = {row["contender"]: row for row in figures["trees"]}
    assert set(runs) == {"bitplan_f32", "bitplan_i16"}
    assert all(row["auc"] > 0.7 and row["train_s"] > 0 and row["compile_s"] > 0 for row in runs.values())
    assert figures["gpu"]["measured"] is False
    assert "no CUDA GPU" in figures["gpu"]["reason"]


def test_the_page_renders_in_a_browser(folder, figures):
    with Browser() as browser:
        page = browser.open(folder / "report.html")
        try:
            result = page.run("[...document.querySelectorAll('main > section')].map((part) => part.id)")
            assert result == ["summary", *SECTIONS]
            assert page.run("document.querySelectorAll('.heatmap svg').length") == 1
            rows = page.run("document.querySelectorAll('#decisions tbody tr').length")
            assert rows == len(figures["plan"]["formats"])
            assert page.problems == []
            assert page.requests == [page.address]
        finally:
            page.close()


@pytest.mark.long
def test_the_same_seed_gives_the_same_figures_over_old_files(figures, folder, tmp_path, capsys, monkeypatch):
    """Of all formats two are packed and measured again; training, plan and trees are those of the first run."""
    some = ("bfloat16", "mxfp4")
    monkeypatch.setattr(demo_run, "FORMATS", some)
    monkeypatch.setattr(demo_run, "CANDIDATES", CANDIDATES)
    monkeypatch.setattr(tiny_model, "BLOCKS", BLOCKS)
    monkeypatch.setattr(damage, "round_weight", plainly)
    folder = shutil.copytree(folder, tmp_path / "again")
    before = {name: (folder / name).read_bytes() for name in ("plan.json", "model.plan.safetensors", "training.jsonl")}
    (folder / "notes.txt").write_text("mine")
    assert demo(["--fast", "--json", "-o", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == figures["records"]
    again = json.loads((folder / "demo.json").read_text())
    rows = [row for row in figures["formats"] if row["format"] in (REFERENCE, PLAN, *some)]
    assert without_times(again) == without_times({key: figures[key] for key in again} | {"formats": rows})
    assert before == {name: (folder / name).read_bytes() for name in before}
    assert (folder / "notes.txt").read_text() == "mine"


def test_ctrl_c_leaves_whole_files(tmp_path, monkeypatch, capsys):
    write = demo_run.TrainingLog.write

    def stop_at_twelve(self, step, loss, **figures):
        write(self, step, loss, **figures)
        if step == 12:
            raise KeyboardInterrupt

    monkeypatch.setattr(demo_run.TrainingLog, "write", stop_at_twelve)
    monkeypatch.setattr(tiny_model, "BLOCKS", 2)
    assert demo(["--fast", "-o", str(tmp_path)]) == 130
    assert "interrupted" in capsys.readouterr().err
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["demo.json", "machine.json", "precision.jsonl", "stream.jsonl", "training.jsonl"]
    left.remove("demo.json")  # not complete
    records = {record.name: record for record in read_records(tmp_path / name for name in left)}
    assert len(records["training.jsonl"].content) == 1 + 13
    assert all(record.torn == 0 for record in records.values())


def test_files_that_no_demo_wrote_stay(tmp_path, capsys):
    (tmp_path / "plan.json").write_text("mine")
    assert demo(["--fast", "-o", str(tmp_path)]) == 2
    assert "plan.json: exists already, and no demo wrote it; replace it" in capsys.readouterr().err
    assert (tmp_path / "plan.json").read_text() == "mine"
    prepare_folder(tmp_path, force=True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "plan.json").touch()
    (tmp_path / "demo.json").write_text('{"seed": 0, "fast": true, "weights": 1}')
    prepare_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_used_is_told_before_any_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for folder, words in (("file", "is a file"), ("file/out", "cannot write there")):
        assert demo(["--fast", "-o", str(tmp_path / folder)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert words in captured.err

"""Every Python snippet and every command of the README, CONTRIBUTING and docs runs.

A `python` block runs in a process and a folder of its own, one with trees in this process; a `bash` block, which holds
bitplan commands alone, in a folder that `prepared` filled. The tutorial's follow one another in one folder. A `text`
block right below one that runs shows lines that it prints, in order: whole numbers are the same, numbers with a point
may differ by a tenth, `~12` is any number, for machines differ, and `...` stands for anything. Commands that tests must
not run stand in blocks without a name, and so does what they print.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import re
import runpy
import shlex
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import safetensors.torch
import torch

import bitplan
from bitplan.base.errors import MissingLibraryError
from bitplan.cli import run
from bitplan.formats.registry import list_formats
from bitplan.fp8.recipes import RECIPES
from bitplan.plan.manifest import shipped_manifest
from examples.demo.tiny_model import Corpus, TinyTransformer, shipped_text
from tests.processes import Program, run_code

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
TUTORIAL = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(python|bash|text)\n(.*?)^```$(?:\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
NUMBER = r"(?<!\d)(?<!\d\.)(?<!e[+-])[+-]?\d+(?:\.\d+)?(?:e[+-]\d+)?"


def blocks(language):
    """The blocks of a language, but for the tutorial's, each with what the page shows below it; a search is long."""
    return [
        pytest.param(code, shown, id=f"{page.name}-{number}", marks=[pytest.mark.long] * ("bitplan search " in code))
        for page in PAGES
        if page != TUTORIAL
        for number, (code, shown) in enumerate(
            (code, shown) for kind, code, shown in BLOCK.findall(page.read_text()) if kind == language
        )
    ]


def run_python(code):
    """Run a block in this process, which has torch and transformers loaded already, and return what it prints."""
    output = io.StringIO()
    with redirect_stdout(output):
        exec(compile(code, "<block>", "exec"), {"__name__": "__main__"})
    return output.getvalue()


def run_bash(block):
    """Run each command of a block in this process, which has torch loaded already, and return what they print."""
    printed = ""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        command, target = (words[: words.index(">")], words[-1]) if ">" in words else (words, None)
        assert command[0] == "bitplan", f"{line}: a bash block holds bitplan commands alone"
        assert not {"|", "&&", "||", ";"} & set(words), f"{line}: one command to a line"
        if "-o" in command:  # the folder has a plan already; a reader has none yet
            Path(command[command.index("-o") + 1]).unlink(missing_ok=True)
        output = io.StringIO()
        with redirect_stdout(output):
            code = run(command[1:])
        assert code == (1 if line.endswith("# exits 1") else 0), f"{line}: exit code {code}"
        if target is None:
            printed += output.getvalue()
        else:
            Path(target).write_text(output.getvalue())
    return printed


def assert_shows(shown, printed):
    """Every line of `shown` was printed, in this order; the module's first lines say what may differ."""
    printed_lines = iter(printed.splitlines())
    for line in shown.splitlines():
        if line.strip() != "...":
            assert any(is_line_of(line, other) for other in printed_lines), f"{line!r} is not (in order) in\n{printed}"


def is_line_of(shown, printed):
    shown, printed = (" ".join(line.replace("┃", "│").split()) for line in (shown, printed))
    pieces = [re.split(f"~?{NUMBER}", piece.strip()) for piece in shown.split("...")]
    pattern = ".*".join(f"({NUMBER})".join(map(re.escape, texts)) for texts in pieces)
    match = re.fullmatch(pattern, printed)
    return match is not None and all(map(agree, re.findall(f"~?{NUMBER}", shown), match.groups()))


def agree(shown, printed):
    if {".", "e"} & {*shown, *printed} and "~" not in shown:
        return math.isclose(float(shown), float(printed), rel_tol=0.1)
    return "~" in shown or shown == printed


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    """A folder with the model and the text that the tutorial's first block makes, which other pages call theirs."""
    folder = tmp_path_factory.mktemp("tutorial")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_python(BLOCK.search(TUTORIAL.read_text())[2])
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, tiny_llama):
    """What pages may take for granted: a reader's own models, a llama's plan and packed twin, the demo's first file."""
    folder = tmp_path_factory.mktemp("prepared")
    shutil.copytree(tiny_llama, folder, dirs_exist_ok=True)
    (folder / "mymodel").symlink_to(folder / "tiny-llama")
    (folder / "sample.txt").symlink_to(folder / "held-out.txt")
    shapes = {"model.embed_tokens.weight": (64, 128), "lm_head.weight": (64, 128), "model.norm.weight": (128,)}
    for prefix in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{prefix}.{norm}_layernorm.weight": (128,) for norm in ("input", "post_attention")}
        shapes |= {f"{prefix}.self_attn.{part}_proj.weight": (128, 128) for part in "qkvo"}
        shapes |= {f"{prefix}.mlp.{part}_proj.weight": (128, 128) for part in ("gate", "up", "down")}
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    shipped_manifest("llama").resolve(shapes).save(folder / "plan.json")
    bitplan.quantize_file(folder / "model.safetensors", folder / "packed.safetensors", "mxfp4")
    (folder / "demo-out").mkdir()
    demo = TinyTransformer(Corpus(shipped_text()).vocabulary)
    bitplan.save_packed(demo, folder / "demo-out" / "model.float32.safetensors")
    return folder


SEED = 0


@pytest.mark.parametrize(("code", "shown"), blocks("python"))
def test_snippet_runs(code, shown, tmp_path, monkeypatch):
    code = f"import torch; torch.manual_seed({SEED})\n{code}"  # random numbers are the same in every run
    if "from bitplan.trees import" in code:  # here, where compiled loops stay loaded: that takes two seconds
        monkeypatch.chdir(tmp_path)
        printed = run_python(code)
    else:
        program = Program(code, folder=tmp_path, strict=True)
        assert program.wait() == 0, program.errors
        printed = program.output
    assert_shows(shown, printed)


@pytest.mark.parametrize(("block", "shown"), blocks("bash"))
def test_commands_run(block, shown, prepared, tmp_path, monkeypatch):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert_shows(shown, run_bash(block))


def test_the_tutorial_runs_and_shows_what_it_prints(tiny_llama, tmp_path, monkeypatch):
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for language, code, shown in BLOCK.findall(TUTORIAL.read_text())[1:]:
        assert_shows(shown, run_python(code) if language == "python" else run_bash(code))


def test_what_is_shown_stands_below_what_prints_it():
    alone = [page.name for page in PAGES for kind, *_ in BLOCK.findall(page.read_text()) if kind == "text"]
    assert alone == []


def test_a_block_that_fails_or_warns_is_seen(tmp_path):
    assert "NameError" in run_code("import bitplan\nnothing_of_this_name", tmp_path)
    assert "UserWarning: careful" in run_code("import warnings\nwarnings.warn('careful')", tmp_path)
    assert run_code("assert __name__ == '__main__'", tmp_path) == ""


def test_the_check_of_what_is_shown_can_fail():
    printed = "┃ format ┃ SQNR dB ┃\n│ mxfp4  │   18.91 │ 4352 │\nplan: plan.json\n"
    assert_shows("│ format ... │\n│ mxfp4 │ 17.50 │ 4352 │\n...\nplan: plan.json\n", printed)
    assert_shows("│ mxfp4 │ ~3 │ ~4 │", printed)
    assert_shows("│ ... 18.91 │ 4352 │", printed)
    for wrong in (
        "│ int8 │ 18.91 │ 4352 │",
        "│ mxfp4 │ 15.00 │ 4352 │",
        "│ mxfp4 │ 18.91 │ 4353 │",
        "│ mxfp4 │ 18.91 │",
        "plan: other.json",
        "json ... plan",
        "│ mxfp~5 │ ~18.91 │ ~4352 |",
        "plan: plan.json\n│ format │ SQNR dB │",
    ):
        with pytest.raises(AssertionError):
            assert_shows(wrong, printed)


def test_pages_quote_the_results_and_nothing_else():
    tables = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))
    for page, made in tables["PLACES"].items():
        text = (ROOT / page).read_text()
        for table in made:
            assert table() in text, (
                f"{page}: {table.__name__} is not that of the results; python benchmarks/tables.py --write"
            )


def test_pictures_are_drawn_from_the_results():
    for place, draw in runpy.run_path(str(ROOT / "benchmarks" / "pictures.py"))["PICTURES"].items():
        assert (ROOT / place).read_text() == draw(), f"{place}: python benchmarks/pictures.py --write"


def test_the_layer_table_is_the_one_that_is_held():
    may_import = runpy.run_path(str(ROOT / "tests" / "test_layers.py"))["MAY_IMPORT"]
    message = {0: "nothing", len(may_import) - 1: "everything"}
    rows = [
        f"| {part} | {message.get(len(others)) or ', '.join(sorted(others))} |" for part, others in may_import.items()
    ]
    assert "|---|---|\n" + "\n".join(rows) + "\n" in (ROOT / "docs" / "architecture.md").read_text()


def test_the_picture_of_the_folders_is_the_package():
    shown, path = set(), []
    for indent, name in re.findall(r"^((?:  )+)(\w+)/ ", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE):
        path = [*path[: len(indent) // 2 - 1], name]
        shown.add("/".join(path))
    package = Path(bitplan.__file__).parent
    assert shown == {str(each.parent.relative_to(package)) for each in package.glob("*/**/__init__.py")}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "NOTES.md"], ids=lambda page: page.name)
def test_modules_that_pages_name_exist(page):
    text = page.read_text()
    files = re.findall(r"\b(?:bitplan|tests|benchmarks|examples|tools)(?:/\w+)+\.py\b", text)
    assert [file for file in files if not (ROOT / file).exists()] == []
    names = set(re.findall(r"\bbitplan(?:\.[A-Za-z_]\w*)+(?![\w/])", text)) - {"bitplan.json"}
    assert [name for name in sorted(names) if not resolves(name)] == []


def resolves(name):
    """Whether a dotted name is a module, or a name in one; an optional library that is missing skips the test."""
    module, *rest = name.split(".")
    found = importlib.import_module(module)
    for part in rest:
        module = f"{module}.{part}"
        if not hasattr(found, part):
            try:
                importlib.import_module(module)
            except MissingLibraryError as error:
                pytest.skip(str(error))
            except ImportError:
                return False
        found = getattr(found, part)
    return True


def test_results_have_a_row_to_a_line_and_the_command_that_makes_them(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    format_rows = runpy.run_path(str(ROOT / "benchmarks" / "harness.py"))["format_rows"]
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        document = json.loads(path.read_text())
        program = re.match(r"python (benchmarks/\w+\.py)\b", document["command"])
        assert program, path.name
        assert (ROOT / program[1]).exists(), path.name
        assert path.read_text() == format_rows(document) + "\n", path.name


def test_every_format_is_in_its_page():
    text = (ROOT / "docs" / "formats.md").read_text()
    assert [fmt.name for fmt in list_formats() if not re.search(rf"\b{fmt.name}\b", text)] == []


def test_every_fp8_recipe_is_in_its_page():
    text = (ROOT / "docs" / "adaptive-fp8.md").read_text()
    for each in RECIPES.values():
        told = ["yes" if is_so else "no" for is_so in (each.experts, each.is_storable)]
        capability = ".".join(map(str, each.capability or ()))
        row = rf"^\| {each.name} \| .* \| {each.multiple} \| {told[0]} \| {told[1]} \| {capability} \|$"
        assert re.search(row, text, re.MULTILINE), each.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target

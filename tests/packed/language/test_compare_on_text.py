"""Any two models on one text: whatever kind of folder or file a model is in, it has the same perplexity."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bitplan.base.errors import MeasureError, StoreError
from bitplan.cli import run
from bitplan.files.engines.targets import export_model
from bitplan.files.quantize_files import quantize_file
from bitplan.packed import compare_on_text
from bitplan.packed.language.compare_on_text import TextSettings, Variant
from bitplan.plan import Manifest, Plan
from tests.cli.verbs.test_perplexity_verb import save_llama, write_gguf
from tests.files.quantized_folders import AWQ_ORDER, stream

GROUP = 32
TEXT = " ".join(["abandon hope all ye who enter here", "the bee sees a dead tree", "we were here before he came"] * 8)
SETTINGS = TextSettings(context=16, tokens=128)


def quantized(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes of 4 bits around 8 [N, K], and a scale for each group of a row [N, K / GROUP]."""
    blocks = weight.reshape(len(weight), -1, GROUP)
    scales = (blocks.abs().amax(-1) / 7).half()
    codes = (blocks / scales.float()[..., None]).round().clamp(-8, 7) + 8
    return codes.reshape(weight.shape).numpy().astype(np.int64), scales.numpy()


def as_gptq(weight: torch.Tensor) -> dict[str, np.ndarray]:
    codes, scales = quantized(weight)
    zeros = stream(np.full(scales.T.shape, 7), 4)  # stored less one
    of = (np.arange(weight.shape[1]) // GROUP).astype(np.int32)
    return {"qweight": stream(codes, 4).T, "qzeros": zeros, "scales": scales.T, "g_idx": of}


def as_awq(weight: torch.Tensor) -> dict[str, np.ndarray]:
    codes, scales = quantized(weight)

    def packed(columns: np.ndarray) -> np.ndarray:
        eights = columns.reshape(len(columns), -1, 8)[..., AWQ_ORDER]
        return stream(eights.reshape(columns.shape), 4)

    return {"qweight": packed(codes.T), "qzeros": packed(np.full(scales.T.shape, 8)), "scales": scales.T}


def write_scheme(folder: Path, source: Path, pack, said: dict) -> None:
    """The model with its linear layers in another library's layout."""
    shutil.copytree(source, folder)
    tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts = pack(weight).items()
            owner = name.removesuffix("weight")
            tensors |= {f"{owner}{part}": torch.from_numpy(np.ascontiguousarray(one)) for part, one in parts}
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """One tiny llama as seven kinds of folders and files."""
    folder = tmp_path_factory.mktemp("kinds")
    source = folder / "llama"
    save_llama(source)
    write_gguf(source, folder / "wide.gguf")
    quantize_file(folder / "wide.gguf", folder / "llama.gguf", "q8_0_gguf")
    quantize_file(source, folder / "packed", "int8_row")
    export_model(source, folder / "compressed", "compressed-tensors", "int8_row")
    export_model(source, folder / "mlx", "mlx", "int4_g32")
    said = {"bits": 4, "group_size": GROUP}
    write_scheme(folder / "gptq", source, as_gptq, {**said, "quant_method": "gptq", "desc_act": False, "sym": True})
    write_scheme(folder / "awq", source, as_awq, {**said, "quant_method": "awq", "zero_point": True, "version": "gemm"})
    kinds = ("llama", "llama.gguf", "packed", "compressed", "gptq", "awq", "mlx")
    return {kind: folder / kind for kind in kinds}


def test_a_model_of_any_kind_is_itself_on_either_side(models):
    """Each is measured once as the reference and once against another: both ways give one perplexity."""
    ring = [*models.values(), models["llama"]]
    results = [compare_on_text(one, two, TEXT, settings=SETTINGS) for one, two in pairwise(ring)]
    seen = {Path(result.reference).name: result.reference_row.quality for result in results}
    assert seen.keys() == models.keys()
    for result in results:
        (row,) = result.rows
        assert row.quality.perplexity == pytest.approx(seen[row.label].perplexity, rel=1e-9)
        against = row.quality.against
        assert 0 < against.kl.mean < 0.2
        assert against.kl.interval is None  # 128 tokens
        difference = row.quality.nll.mean - result.reference_row.quality.nll.mean
        assert against.nll_difference.mean == pytest.approx(difference, abs=1e-12)
    gptq, awq = results[4].reference_row.quality, results[5].reference_row.quality
    assert gptq.perplexity == pytest.approx(awq.perplexity, rel=1e-3)  # AWQ decodes to float16


def test_progress_reaches_what_was_announced(models):
    announced, done = [], []

    def on_windows(count):
        announced.append(count)
        return lambda windows, what: done.append((windows, what))

    settings = replace(SETTINGS, floor=True)
    compare_on_text(models["llama"], models["packed"], TEXT, settings=settings, on_windows=on_windows)
    assert announced == [sum(windows for windows, _ in done)]
    assert {what for _, what in done} == {"reference", "noise floor", "packed"}


def test_a_folder_that_rounds_inputs_is_measured_so(models, tmp_path):
    quantize_file(models["llama"], tmp_path / "rounded", "int8_row", inputs="fp8")
    plain, rounded = (
        compare_on_text(models["llama"], path, TEXT, settings=SETTINGS).rows[0].quality.against.kl.mean
        for path in (models["packed"], tmp_path / "rounded")
    )
    assert rounded > 2 * plain


def kl_of(first: Path, second: Path | None, inputs: str | None = None, *variants: Variant) -> float:
    settings = replace(SETTINGS, inputs=inputs)
    result = compare_on_text(first, second, TEXT, variants=variants, settings=settings)
    return result.rows[-1].quality.against.kl.mean


def test_inputs_of_a_plan_are_rounded_as_in_its_folder(models, tmp_path):
    """Some layers round their inputs: a plan over the float model, and the folder packed by it, are one distance."""
    rules = [
        {"regex": ".*mlp.*weight", "format": "int8_row", "input": "fp8"},
        {"regex": ".*proj.weight", "format": "int8_row"},
        {"regex": ".*", "format": "FP32"},
    ]
    manifest = Manifest.from_document({"version": 1, "patterns": rules})
    quantize_file(models["llama"], tmp_path / "some", manifest)
    from_folder = kl_of(models["llama"], tmp_path / "some")
    from_plan = kl_of(models["llama"], None, None, Variant("plan", Plan.load(tmp_path / "some" / "bitplan_plan.json")))
    assert from_folder == pytest.approx(from_plan, rel=1e-4)
    without = [{key: value for key, value in rule.items() if key != "input"} for rule in rules]
    kept = Variant("kept", Manifest.from_document({"version": 1, "patterns": without}))
    assert from_folder > 1.5 * kl_of(models["llama"], None, None, kept)


def test_gguf_is_measured_with_inputs_as_llama_cpp_rounds_them(models):
    """All weights are q8_0: blocks of 32 for all, so the same as asking for those; a float model has none."""
    file, source = models["llama.gguf"], models["llama"]
    rounded = kl_of(source, file, "llama.cpp")
    assert rounded == pytest.approx(kl_of(source, file, "int8"), rel=1e-6)
    assert rounded == pytest.approx(kl_of(source, None, "llama.cpp", Variant("packed", "q8_0_gguf")), rel=1e-3)
    with pytest.raises(MeasureError, match="no weight of this model is known to be packed"):
        kl_of(source, source, "llama.cpp")


def test_a_text_gives_static_scales(models, tmp_path, capsys):
    text, packed = tmp_path / "text.txt", tmp_path / "packed"
    text.write_text(TEXT)
    command = ["quantize", str(models["llama"]), str(packed), "-f", "int8_row", "--inputs", "int8_static"]
    command += ["--only", "*q_proj*", "--only", "*down_proj*"]
    assert run(command) == 2
    assert "int8_static has no scale yet; a text gives one" in capsys.readouterr().err
    assert run([*command, "--text", str(text), "--windows", "2"]) == 0
    scales = set(Plan.load(packed / "bitplan_plan.json").inputs.values())
    assert len(scales) > 2
    assert all(fmt.startswith("int8_static@0.") for fmt in scales)
    assert 0 < kl_of(models["llama"], packed) < 0.1


def test_lines_of_json_are_measured_as_their_text_and_a_mark_of_encoding_is_none(models, tmp_path, capsys):
    """The syntax of .jsonl is no text; a separator of lines within a string of JSON ends no line of the file."""
    lines = [TEXT[:200], TEXT[200:] + "\u2028 end"]
    written = {
        "text.txt": "\n".join(lines),
        "marked.txt": "\ufeff" + "\n".join(lines),
        "text.jsonl": "\n".join(json.dumps({"text": line}, ensure_ascii=False) for line in lines),
    }
    figures = []
    for name, content in written.items():
        (tmp_path / name).write_text(content)
        words = ["judge", models["llama"], models["packed"], "--text", tmp_path / name, "--context", "16", "--json"]
        assert run([*map(str, words), "--no-floor"]) == 0, capsys.readouterr().err
        figures.append(json.loads(capsys.readouterr().out)["rows"][0]["kl"])
    assert figures[0] == figures[1] == figures[2]
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n{"text": \n')
    assert run(
        ["verify", str(models["packed"]), "--source", str(models["llama"]), "--text", str(tmp_path / "text.jsonl")]
    )
    assert "text.jsonl: line 2: expected" in capsys.readouterr().err


def test_models_of_other_tokens_are_refused_by_name(models, tmp_path):
    save_llama(tmp_path / "other", merges=[("a", "e")])
    with pytest.raises(MeasureError, match=r"other and .*llama cut the text into different tokens, from token"):
        compare_on_text(models["llama"], tmp_path / "other", TEXT, settings=SETTINGS)


def test_a_device_that_is_not_there_is_refused(models):
    with pytest.raises(StoreError, match="cuda:99"):
        compare_on_text(models["llama"], None, TEXT, settings=TextSettings(device="cuda:99"))
    half = TextSettings(context=16, tokens=64, dtype=torch.bfloat16)
    assert compare_on_text(models["llama"], models["llama"], TEXT, settings=half).rows[0].quality.against.kl.mean == 0

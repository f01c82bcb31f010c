"""Any two models on one text: whatever kind of folder or file a model is in, it has the same perplexity."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bitplan.base.errors import MeasureError, StoreError
from bitplan.files.engines.targets import export_model
from bitplan.files.quantize_files import quantize_file
from bitplan.packed import compare_on_text
from bitplan.packed.language.compare_on_text import TextSettings
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


def test_a_folder_that_rounds_inputs_is_measured_so(models, tmp_path):
    quantize_file(models["llama"], tmp_path / "rounded", "int8_row", inputs="fp8")
    plain, rounded = (
        compare_on_text(models["llama"], path, TEXT, settings=SETTINGS).rows[0].quality.against.kl.mean
        for path in (models["packed"], tmp_path / "rounded")
    )
    assert rounded > 2 * plain


def test_models_of_other_tokens_are_refused_by_name(models, tmp_path):
    save_llama(tmp_path / "other", merges=[("a", "e")])
    with pytest.raises(MeasureError, match=r"other and .*llama cut the text into different tokens, from token"):
        compare_on_text(models["llama"], tmp_path / "other", TEXT, settings=SETTINGS)


def test_a_device_that_is_not_there_is_refused(models):
    with pytest.raises(StoreError, match="cuda:99"):
        compare_on_text(models["llama"], None, TEXT, settings=TextSettings(device="cuda:99"))
    half = TextSettings(context=16, tokens=64, dtype=torch.bfloat16)
    assert compare_on_text(models["llama"], models["llama"], TEXT, settings=half).rows[0].quality.against.kl.mean == 0

"""Exported folders in the libraries they are for: compressed-tensors and torchao in transformers, MLX in mlx_lm.

Each format of each target is exported and run by the library, which must give what the model gives here with the same
weights decoded by us. `--model` takes a real model and scores perplexity over the second half of each window; so does
`--gguf` with a GGUF file: as it is, and in a few formats by way of a plain float32 folder. `--families` takes a tiny
model of every family with random weights and compares logits. What a library refuses is a row with its own words.

python benchmarks/engine_folders.py --families --model FOLDER --gguf FILE --text TEXT
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, commit, machine, save, versions
from torch import Tensor
from torch.nn import functional

from bitplan.base.errors import BitplanError
from bitplan.files.engines import compressed_tensors, mlx, torchao
from bitplan.files.engines.targets import ExportReport, export_model
from bitplan.files.headers import is_gguf
from bitplan.files.transformers_names import silence_transformers
from bitplan.formats import get_format
from bitplan.formats.codec import decode, encode
from bitplan.packed.checkpoints.causal_lm import load_causal_lm

CONTEXT = {"compressed-tensors": 128, "mlx": 32, "torchao": 128, "hf": 128}  # MLX is slow on a CPU
FORMATS: dict[str, tuple[str, ...]] = {
    "compressed-tensors": tuple(compressed_tensors.SCHEMES),
    "mlx": tuple(mlx.QUANTIZATIONS),
    "torchao": torchao.FORMATS,
    "hf": ("bfloat16",),
}
AS_IT_IS = "as it is"  # without --format: what is packed keeps its bits
GGUF_FORMATS: dict[str, tuple[str, ...]] = {
    "compressed-tensors": ("int4_g32", "fp8_e4m3_row", "nvfp4"),
    "mlx": (AS_IT_IS,),
    "torchao": ("int8_row", "int4_g32"),
    "hf": (AS_IT_IS,),
}
LIBRARIES = {"compressed-tensors": "compressed-tensors", "mlx": "mlx-lm", "torchao": "torchao", "hf": "transformers"}
FAMILY_FORMATS = {"compressed-tensors": "int4_g32", "mlx": "int4_g32", "torchao": "int8_row", "hf": "float32"}
# compressed-tensors decompresses these to bfloat16 whatever the type of the model, which is computed in it here, too.
IN_BFLOAT16 = ("mxfp4", "nvfp4", "mxfp8_e4m3")
Logits = Callable[[Tensor], Tensor]


def engine(target: str, folder: Path, fmt: str) -> Logits:
    """What the library computes from a folder: ids [1, T] -> logits [1, T, V] in float32."""
    if target == "mlx":
        import mlx.core as mx
        import numpy as np
        from mlx_lm.utils import load_model

        mx.set_default_device(mx.cpu)
        theirs, _ = load_model(folder)
        theirs.set_dtype(mx.float32)  # what MLX makes of the numbers, without the rounding of narrow arithmetic
        return lambda ids: torch.from_numpy(np.array(theirs(mx.array(ids.numpy())).astype(mx.float32)))
    import transformers

    with silence_transformers():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=computes(target, fmt, folder)).eval()

    def logits(ids: Tensor) -> Tensor:
        with torch.no_grad(), silence_transformers():
            found: Tensor = model(ids).logits
            return found.float()

    return logits


def computes(target: str, fmt: str, folder: Path) -> torch.dtype:
    """In what the library computes: torchao's tensors in the type of the model, whatever is asked for."""
    if target == "torchao":
        dtype: torch.dtype = getattr(torch, json.loads((folder / "config.json").read_text(encoding="utf-8"))["dtype"])
        return dtype
    return torch.bfloat16 if target == "compressed-tensors" and fmt in IN_BFLOAT16 else torch.float32


def ours(source: Path, report: ExportReport, dtype: torch.dtype) -> Logits:
    """The model of the source with the formats of the export, decoded by us; where bitplan reads it, the export."""
    if report.target == "compressed-tensors":
        model = load_causal_lm(report.output).model
    else:
        model = load_causal_lm(source).model
        formats = {row.source: row.format for row in report.rows if row.format != row.before}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(decode(encode(parameter, get_format(formats.get(name, "float32")))))
    for parameter in model.parameters():  # not the rotations, which transformers keeps in float32
        parameter.data = parameter.data.to(dtype)

    def logits(ids: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = model(ids).logits
            return found.float()

    return logits


def said(error: Exception, place: str) -> str:
    """An error in a line, without the temporary folder."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".replace(f"{place}/", "")[:200]


def perplexity(logits: Logits, windows: Sequence[Tensor]) -> float:
    total = count = 0.0
    for window in windows:
        first = len(window) // 2
        found = logits(window[None])[0, first:-1]
        total += float(functional.cross_entropy(found.double(), window[first + 1 :], reduction="sum"))
        count += len(window) - first - 1
    return float(torch.tensor(total / count, dtype=torch.float64).exp())


def run_model(source: Path, text: str, windows: int, formats: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    ids = load_causal_lm(source).encode(text)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        plain = source
        if is_gguf(source):  # it names no type to compute in: in float32 a library's differences are not bfloat16's
            plain = Path(place) / "plain"
            export_model(source, plain, "hf", "float32")
        for target, names in formats.items():
            own_windows = ids[: windows * CONTEXT[target]].split(CONTEXT[target])
            for fmt in names:
                rows.append(run_format(source if fmt == AS_IT_IS else plain, target, fmt, own_windows))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def run_format(source: Path, target: str, fmt: str, windows: Sequence[Tensor]) -> dict[str, Any]:
    row: dict[str, Any] = {"target": target, "format": fmt}
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "out"
        try:
            report = export_model(source, output, target, {} if fmt == AS_IT_IS else fmt)
            theirs = perplexity(engine(target, output, fmt), windows)
        except (BitplanError, ValueError, RuntimeError, ImportError) as error:
            row["refused"] = said(error, place)
        else:
            own = perplexity(ours(source, report, computes(target, fmt, output)), windows)
            row |= {"bytes": report.nbytes, "engine": round(theirs, 4), "bitplan": round(own, 4)}
            row["difference"] = round(theirs / own - 1, 6)
    return row


def run_families(targets: Sequence[str]) -> list[dict[str, Any]]:
    """Logits of tiny models: the largest difference from those of the folder that the export was made of."""
    sys.path.insert(0, str(ROOT))
    from tests.files.engines.tiny_models import MODELS, save_tiny

    rows = []
    ids = torch.arange(3, 19).reshape(1, -1)
    for kind in MODELS:
        with tempfile.TemporaryDirectory() as place:
            source, plain = Path(place) / "in", Path(place) / "plain"
            changes: dict[str, Any] = {"dtype": "float32"} if kind == "gpt_oss" else {}
            if kind == "gemma3":
                changes["layer_types"] = ["sliding_attention", "full_attention"]
            save_tiny(source, kind, **changes)
            for target in targets:
                row: dict[str, Any] = {"target": target, "family": kind, "format": FAMILY_FORMATS[target]}
                output = Path(place) / target
                try:
                    formats = FAMILY_FORMATS[target]
                    report = export_model(source, output, target, formats, keep=() if target == "hf" else ("*embed*",))
                    found = engine(target, output, formats)(ids)
                except (BitplanError, ValueError, RuntimeError, ImportError, TypeError, KeyError) as error:
                    row["refused"] = said(error, place)
                else:
                    save_decoded(source, plain, report)
                    wanted = engine("hf", plain, "float32")(ids)
                    row["difference"] = round(float((found - wanted).abs().max() / wanted.abs().max()), 7)
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def save_decoded(source: Path, plain: Path, report: ExportReport) -> None:
    """The source with every weight that is packed in the export replaced by its numbers."""
    import shutil

    import safetensors.torch

    shutil.copytree(source, plain, dirs_exist_ok=True)
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    packed = {row.source.partition(" and ")[0]: row.format for row in report.rows if not get_format(row.format).is_cast}
    stacked = {_expert(name): fmt for name, fmt in packed.items()}
    for name, tensor in tensors.items():
        fmt = packed.get(name) or stacked.get(_expert(name))
        if fmt is not None:
            # transformers' own code for experts decompresses them in the type of their scales, and computes in it.
            narrow = ".experts." in name and report.target == "compressed-tensors"
            tensors[name] = decode(encode(tensor, fmt), torch.bfloat16 if narrow else torch.float32).float()
    safetensors.torch.save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})


def _expert(name: str) -> str:
    """A name without the number of its expert; names of other tensors stand for themselves."""
    before, found, after = name.partition(".experts.")
    return f"{before}{found}{after.partition('.')[2]}" if found else name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--gguf", type=Path, help="a GGUF file")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--families", action="store_true", help="tiny models of every family")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--targets", nargs="*", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--formats", nargs="*", help="of real models: these alone")
    parser.add_argument("--most", type=float, default=0.005, help="the largest difference that passes")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if (given.model or given.gguf) and not given.text:
        parser.error("--model and --gguf need a --text")
    families = run_families(given.targets) if given.families else []
    models = {}
    for source, known in ((given.model, FORMATS), (given.gguf, GGUF_FORMATS)):
        if source is not None:
            wanted = {
                target: [each for each in known[target] if not given.formats or each in given.formats]
                for target in given.targets
            }
            models[source.stem] = run_model(source, given.text.read_text(encoding="utf-8"), given.windows, wanted)
    packages = [LIBRARIES[target] for target in given.targets] + (["mlx"] if "mlx" in given.targets else [])
    own = {package: importlib.metadata.version(package) for package in packages}
    document = {
        "benchmark": "engine_folders",
        "machine": machine("cpu"),
        "versions": {**versions(), **own},
        "commit": commit(),
        "text": {"file": given.text.name if given.text else None, "context": CONTEXT, "windows": given.windows},
        "families": families,
        "models": models,
    }
    print(save("engine_folders", document, given.output))
    measured = [row for rows in (families, *models.values()) for row in rows if "difference" in row]
    worst = max((abs(row["difference"]) for row in measured), default=0.0)
    if worst > given.most:
        sys.exit(f"the engines differ by {worst:.2%}, more than {given.most:.2%}")


if __name__ == "__main__":
    main()

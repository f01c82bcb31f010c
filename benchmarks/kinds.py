"""Weights rounded by the given text, by text that the model writes itself, and by both, on two kinds of text held out.

python benchmarks/kinds.py --model FOLDER --text TEXT --other OTHER --work FOLDER --ggml xllamacpp.abi3.so

Statistics come from the first part of the text; KL is measured on the rest, and on another kind of text: with every
matrix in one format, and by a plan of `search_gguf.py`. Beside them llama.cpp's own types, encoded by its library (a
wheel of xllamacpp has one) with squares of inputs on the given text as importance matrix. Finished rows are kept: the
same command goes on.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import harness
import numpy as np
import torch
from search_gguf import kl_at
from torch import Tensor

from bitplan.base.records import read_json, read_text
from bitplan.packed.checkpoints.causal_lm import load_causal_lm
from bitplan.packed.language.perplexity import spread_windows
from bitplan.searching.collect import GATHERED_WINDOWS, gather_evidence
from bitplan.searching.damage import RoundedWeights
from bitplan.searching.plan_meter import PlanMeter, kl_by_kind
from bitplan.searching.searched_model import Text, open_subject
from bitplan.searching.statistics import InputStatistics

CALIBRATION_SHARE = 0.6
PLANS = harness.RESULTS / "search_gguf_lm26m.json"
CONTEXT = 512
TYPES = ("Q3_K_M", "IQ4_XS", "IQ4_NL", "Q4_K_M", "Q5_K_M")
PLAIN = {"Q3_K_M": "Q3_K", "Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K"}


def main() -> None:
    options = _arguments()
    torch.set_num_threads(options.threads)
    found: dict[str, Any] = read_json(options.result) if options.result.exists() else {"benchmark": "kinds", "rows": {}}
    found |= {"command": harness.command(), "model": options.model.name, "machine": harness.machine("cpu")}
    found |= {"commit": harness.commit(), "versions": harness.versions()}
    found["settings"] = {"text": options.text.name, "other": options.other.name, "calibration_share": CALIBRATION_SHARE}
    found["settings"] |= {"context": CONTEXT, "windows": options.windows, "held_out_windows": options.held_out}
    text = read_text(options.text)
    given = text[: int(len(text) * CALIBRATION_SHARE)]
    lm = load_causal_lm(options.model)
    meter, kinds = meter_of(options, lm, {"same": text[len(given) :], "other": read_text(options.other)})
    texts: dict[str, Text] = {"given": given, "both": {"given": given, "self": None}, "self": {"self": None}}

    def row(label: str, by: str, make: Callable[[], tuple[int, dict[str, Tensor]]]) -> None:
        if label in found["rows"]:
            return
        nbytes, weights = make()
        kl = kl_by_kind(meter.watch(list, label, meter.rounded.subject.replaced_by(weights.get)), kinds)
        found["rows"][label] = {"by": by, "tensor_bytes": nbytes, "kl": kl}
        found["comparison"] = comparison(found["rows"])
        harness.save("kinds", found, options.result)
        print(label, nbytes, kl, flush=True)

    plan = read_json(options.plan)["rows"][options.row]["choice"]
    choices = {options.row: {f"{group}.weight": fmt for group, fmt in plan.items()}}
    choices[options.format] = dict.fromkeys(meter.rounded.subject.sites, options.format)
    if options.ggml:
        for kind in TYPES:
            row(kind, "llama.cpp", partial(theirs, options, given, kind))
    for name, content in texts.items():
        for label, choice in choices.items():
            by = "plan" if label == options.row else "uniform"
            row(f"{label}, {name}", by, partial(rounded, options, name, content, choice))


def meter_of(options: argparse.Namespace, lm: Any, texts: Mapping[str, str]) -> tuple[PlanMeter, list[str]]:
    """A meter of the model over windows of each kind, and the kind of each window."""
    windows = {
        name: spread_windows(lm.windows(content, CONTEXT)[:-1], options.held_out * CONTEXT)
        for name, content in texts.items()
    }
    rounded = RoundedWeights(open_subject(options.model, None), InputStatistics())
    every = [window for of_kind in windows.values() for window in of_kind]
    kinds = [name for name, of_kind in windows.items() for _ in of_kind]
    return PlanMeter(rounded, every, unscored=max(1, len(lm.prefix)), kept_bytes=4 << 30), kinds


def statistics_of(options: argparse.Namespace, name: str, text: Text) -> InputStatistics:
    """What `quantize --text` gathers; it stays in the folder for files on the way."""
    folder = options.work / name
    if not folder.exists():
        part = options.work / f"part-{name}"
        part.mkdir(parents=True, exist_ok=True)
        gather_evidence(options.model, text, part, windows=options.windows)
        part.rename(folder)
    return InputStatistics.load(folder, {})


def rounded(
    options: argparse.Namespace, name: str, text: Text, choice: Mapping[str, str]
) -> tuple[int, dict[str, Tensor]]:
    """Weights in formats, rounded by the statistics of a text."""
    weights = RoundedWeights(open_subject(options.model, None), statistics_of(options, name, text))
    weights.round_all(choice.items(), lambda _name, _fmt: None)
    nbytes = sum(weights.encoded(name, fmt).nbytes for name, fmt in choice.items())
    return nbytes, {name: weights.decoded(name, fmt) for name, fmt in choice.items()}


def theirs(options: argparse.Namespace, text: str, kind: str) -> tuple[int, dict[str, Tensor]]:
    """A type of llama-quantize: its mixture for a llama without much grouping, its encoders, an importance matrix."""
    quantize = ctypes.CDLL(str(options.ggml)).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    subject, weights, nbytes = open_subject(options.model, None), {}, 0
    layers = len(subject.runner.blocks)
    statistics = statistics_of(options, "given", text)
    for name in subject.sites:
        weight = np.ascontiguousarray(subject.weight(name).float().numpy())
        ggml = gguf.GGMLQuantizationType[type_of(kind, name, layers)]
        importance = None
        if ".layers." in name:
            hessian = statistics.hessian(name)
            assert hessian is not None
            importance = np.ascontiguousarray((hessian.diagonal() / statistics.tokens).float().numpy())
        block, size = gguf.GGML_QUANT_SIZES[ggml]
        data = np.empty((weight.shape[0], weight.shape[1] // block * size), np.uint8)
        at = None if importance is None else importance.ctypes.data
        shape = (0, *weight.shape)
        written = quantize(int(ggml), weight.ctypes.data, data.ctypes.data, *shape, at)
        if written != data.nbytes:
            raise SystemExit(f"{kind}: {name}: the library wrote {written} bytes, not {data.nbytes}")
        nbytes += written
        weights[name] = torch.from_numpy(np.array(gguf.quants.dequantize(data, ggml)))
    return nbytes, weights


def type_of(kind: str, name: str, layers: int) -> str:
    """What llama-quantize gives a tensor of a llama whose embedding is its head, given an importance matrix."""
    if ".layers." not in name:
        return "Q6_K"
    layer, part = int(name.split(".layers.")[1].split(".")[0]), name.split(".")[-2]
    if kind == "Q3_K_M":
        if part == "v_proj":
            return "Q5_K" if layer < 2 else "Q4_K"
        return "Q4_K" if part in ("down_proj", "o_proj") else "Q3_K"
    eighth = layers // 8
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if kind in PLAIN and more and part in ("v_proj", "down_proj") else PLAIN.get(kind, kind)


def comparison(rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The plan of ours, rounded by each text, beside the best of llama.cpp's in its bytes, for both kinds."""
    lines = []
    for label, row in rows.items():
        if row["by"] == "plan":
            line: dict[str, Any] = {"plan": label, "mb": row["tensor_bytes"] / 1e6}
            for kind, kl in row["kl"].items():
                of_kind = {name: {**other, "kl": other["kl"][kind]} for name, other in rows.items()}
                best = kl_at(of_kind, "llama.cpp", row["tensor_bytes"])
                line |= {f"kl_{kind}": kl, f"llama.cpp_{kind}": best, f"of_{kind}": None if best is None else kl / best}
            lines.append(line)
    return lines


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder of a llama")
    parser.add_argument("--text", type=Path, required=True, help="the given text; its end is held out")
    parser.add_argument("--other", type=Path, required=True, help="text of another kind")
    parser.add_argument("--work", type=Path, required=True, help="a folder for files on the way")
    parser.add_argument("--ggml", type=Path, help="a shared library with ggml_quantize_chunk")
    parser.add_argument("--format", default="int4_g32")
    parser.add_argument(
        "--plan", type=Path, default=harness.RESULTS / "search_gguf_lm26m.json", help="a result with plans"
    )
    parser.add_argument("--row", default="searched, 4.5 bits", help="which of its plans")
    parser.add_argument("--windows", type=int, default=GATHERED_WINDOWS, help="windows of the given text")
    parser.add_argument("--held-out", type=int, default=20, help="windows of each kind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    options.result = options.result or harness.RESULTS / f"kinds_{options.model.name}.json"
    return options


if __name__ == "__main__":
    main()

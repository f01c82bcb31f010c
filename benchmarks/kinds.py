"""Searched plans and rivals on two kinds of text that nobody saw, from 2.5 bits a weight on, measured in one run.

python benchmarks/kinds.py --model FOLDER --text TEXT --other OTHER --work FOLDER --ggml xllamacpp.abi3.so
python benchmarks/kinds.py ... --texts both --rivals hqq auto-round modelopt

Statistics, and what rivals calibrate with, are of the first part of the text; KL is measured on the rest and on
another kind of text. `--texts` says what our searches see: the given text, text that the model writes itself, or both.
Rivals: llama.cpp's types, encoded by its library (a wheel of xllamacpp has one) with squares of inputs on the given
text as importance matrix; hqq's Quantizer; auto-round's tuning; nvidia-modelopt's auto_quantize: what is on the path.
Every matrix counts, the embedding too, with its scales. Finished rows are kept: the same command goes on.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import gguf
import harness
import numpy as np
import torch
import transformers
from search_gguf import kl_at
from torch import Tensor

from bitplan.base.records import read_json, read_text
from bitplan.packed.checkpoints.causal_lm import CausalLM, load_causal_lm
from bitplan.packed.language.perplexity import clustered_mean, spread_windows
from bitplan.searching import Goal
from bitplan.searching.collect import gather_evidence
from bitplan.searching.damage import RoundedWeights
from bitplan.searching.evidence import SearchEvidence
from bitplan.searching.plan_meter import PlanMeter
from bitplan.searching.run import Searcher, solve_and_correct
from bitplan.searching.runtime_formats import candidates, target_of
from bitplan.searching.searched_model import SearchSubject, Text, open_subject, prepare
from bitplan.searching.solver import solve
from bitplan.searching.statistics import STATISTICS, InputStatistics

CALIBRATION_SHARE = 0.6
CONTEXT = 512
BITS = (2.5, 3.0, 3.5, 4.0, 4.5)
TYPES = {  # llama-quantize's types for a llama without much grouping, given an importance matrix: matrices, and others
    "IQ2_XXS": ("IQ2_XXS", {"v_proj": "Q2_K"}),
    "IQ2_M": ("IQ2_S", {"v_proj": "IQ3_S", "o_proj": "IQ3_S"}),
    "IQ3_XXS": ("IQ3_XXS", {"q_proj": "IQ2_S", "k_proj": "IQ2_S", "o_proj": "IQ3_S"}),
    "IQ3_S": ("IQ3_S", {}),
    "IQ3_M": ("IQ3_S", {"v_proj": "Q4_K", "o_proj": "Q4_K"}),
    "IQ4_XS": ("IQ4_XS", {}),
}
EMBEDDINGS = {  # an embedding that is the head, too: as --output-tensor-type says; unless given Q5_K or Q6_K
    "IQ2_XXS": ("IQ3_S",),
    "IQ2_M": ("IQ3_S",),
    "IQ3_XXS": ("IQ4_XS",),
    "IQ3_S": ("IQ4_XS",),
    "IQ3_M": ("Q6_K",),
    "IQ4_XS": ("IQ4_XS", "Q6_K"),
}
SCHEMES = ((2, 64), (2, 32), (3, 64), (3, 32), (4, 64))  # hqq's bits and groups: 2.5, 3.0, ... 4.5 bits a weight
TUNED = {  # auto-round's bits: how hqq rounds the embedding, which auto-round leaves in 16 bits (None)
    2: ((3, 64), (4, 64), None),
    3: ((4, 64), None),
    4: ((4, 64), (8, 64), None),
}
AUTO_WIDTHS = (2, 3, 4, 8)  # of its AutoScheme, in groups of 64
AUTO_BITS = (4.375,)  # modelopt's, which leave out scales: 4.5 bits a weight with them and the embedding
EMBEDDING = (4, 64)  # hqq's, where a rival leaves the embedding as it is


@dataclass(frozen=True)
class Made:
    """A model's matrices as a rival or a plan of ours leaves them, in how many bits altogether; what else is known."""

    nbits: float
    weights: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)


Rival = tuple[str, Callable[[], Made]]  # its label, and what makes it


def main() -> None:
    options = _arguments()
    torch.set_num_threads(options.threads)
    found: dict[str, Any] = read_json(options.result) if options.result.exists() else {"benchmark": "kinds", "rows": {}}
    found |= {"command": harness.command(), "model": options.model.name, "machine": harness.machine("cpu")}
    found |= {"commit": harness.commit(), "versions": found.get("versions", {}) | harness.versions()}
    named = ("windows", "held_out", "formats")
    found["settings"] = {name: getattr(options, name) for name in named}
    found["settings"] |= {"text": options.text.name, "other": options.other.name, "context": CONTEXT}
    found["settings"] |= {"calibration_share": CALIBRATION_SHARE}
    text = read_text(options.text)
    given = text[: int(len(text) * CALIBRATION_SHARE)]
    lm = load_causal_lm(options.model)
    meter, kinds = meter_of(options, lm, {"same": text[len(given) :], "other": read_text(options.other)})
    subject = meter.rounded.subject
    rows = found["rows"]

    def row(label: str, by: str, make: Callable[[], Made]) -> None:
        if label in rows:
            return
        began = time.process_time()
        made = make()
        spent = time.process_time() - began
        quality = meter.watch(list, label, subject.replaced_by(made.weights.get))
        rows[label] = {"by": by, "tensor_bytes": math.ceil(made.nbits / 8), "bits": made.nbits / numbers(subject)}
        rows[label] |= {"cpu_seconds": round(spent, 1), "kl": {}, "kl_error": {}, **made.facts}
        for kind in dict.fromkeys(kinds):
            pairs = zip(kinds, quality.samples["kl"], quality.samples["tokens"], strict=True)
            sums, tokens = zip(*((kl, count) for name, kl, count in pairs if name == kind), strict=True)
            estimate = clustered_mean(sums, [int(count) for count in tokens])
            rows[label]["kl"][kind], rows[label]["kl_error"][kind] = estimate.mean, estimate.standard_error
        found["comparison"] = comparison(rows)
        harness.save("kinds", found, options.result)
        print(label, {**rows[label], "choice": None}, flush=True)

    if options.ggml:
        encoders = TheirEncoders(options.ggml, subject, squares_of_inputs(options, given))
        for kind in options.types:
            for embedding in EMBEDDINGS[kind]:
                label = f"{kind}, embedding {embedding}"
                row(label, "llama.cpp", partial(encoders.file, kind, embedding))
    for rival in options.rivals:
        for label, make in RIVALS[rival](options, subject, lm, given):
            row(label, rival, make)
    texts: dict[str, Text] = {"given": given, "both": {"given": given, "self": None}, "self": {"self": None}}
    for name in options.texts:
        labels = [f"searched, {bits:g} bits, {', '.join([name, *options.note])}" for bits in options.bits]
        if any(label not in rows for label in labels):
            search_all(options, texts[name], name, dict(zip(labels, options.bits, strict=True)), row)


def numbers(subject: SearchSubject) -> int:
    """How many numbers all matrices have."""
    return sum(math.prod(site.shape) for site in subject.sites.values())


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


# ---- searched plans --------------------------------------------------------------------------------------------------


def searcher_of(options: argparse.Namespace, text: Text, name: str) -> Searcher:
    """A search as `bitplan search` begins it; its evidence stays in a folder for files on the way."""
    subject, cut = prepare(options.model, None, text, (), windows=options.windows)
    target = target_of("bitplan")
    subject.aim_at(target)
    folder = options.work / name
    folder.mkdir(parents=True, exist_ok=True)
    return Searcher(subject, cut, candidates(target, options.formats, min(options.bits)), folder)


def search_all(options: argparse.Namespace, text: Text, name: str, labels: Mapping[str, float], row: Any) -> None:
    """A plan of each size, by evidence that is gathered once."""
    searcher = searcher_of(options, text, name)
    began = time.process_time()
    evidence, meter = searcher.collect(Goal(bits=3.5))
    print(f"evidence of {name}: {time.process_time() - began:.0f} CPU s", flush=True)
    for label, bits in labels.items():
        is_corrected = options.correct is None or bits in options.correct
        row(label, "searched", partial(searched, searcher, evidence, meter, bits, is_corrected=is_corrected))


def searched(
    searcher: Searcher, evidence: SearchEvidence, meter: PlanMeter, bits: float, *, is_corrected: bool
) -> Made:
    """The plan of a size with its rounding; corrected by measurements on the text of the search, or by those before."""
    goal, corrections = Goal(bits=bits), 0
    if is_corrected:
        solution, corrections, _ = solve_and_correct(evidence, goal, meter)
    else:
        solution = solve(evidence, goal)
    formats = {
        weight: fmt
        for group, fmt in solution.choice.items()
        for tensor in evidence.groups[group].tensors
        for weight in searcher.subject.tensors[tensor].weights
    }
    meter.rounded.round_all(formats.items(), lambda _name, _fmt: None)
    weights = {weight: meter.rounded.decoded(weight, fmt) for weight, fmt in formats.items()}
    nbytes = sum(meter.rounded.encoded(weight, fmt).nbytes for weight, fmt in formats.items())
    predicted = evidence.predict(solution.choice)
    facts = {
        "windows": len(searcher.text.statistics),
        "predicted": predicted,
        "corrected": is_corrected,
        "corrections": corrections,
        "choice": dict(solution.choice),
    }
    return Made(8 * nbytes, weights, facts)


# ---- llama.cpp -------------------------------------------------------------------------------------------------------


def squares_of_inputs(options: argparse.Namespace, text: str) -> Mapping[str, Tensor]:
    """What llama-imatrix gathers: the mean square of each column of a layer's inputs on the given text."""
    folder = options.work / "given"
    if not (folder / STATISTICS).exists():
        folder.mkdir(parents=True, exist_ok=True)
        gather_evidence(options.model, text, folder, windows=options.windows)
    statistics = InputStatistics.load(folder, {})
    subject = open_subject(options.model, None)
    found = {}
    for name in subject.sites:
        hessian = statistics.hessian(name) if ".layers." in name else None
        if hessian is not None:
            found[name] = (hessian.diagonal() / statistics.tokens).float()
    return found


@dataclass
class TheirEncoders:
    """ggml's encoders with an importance matrix; a matrix is encoded once for a type."""

    library: Path
    subject: SearchSubject
    squares: Mapping[str, Tensor]
    _encoded: dict[tuple[str, str], tuple[int, Tensor]] = field(default_factory=dict)

    def file(self, kind: str, embedding: str) -> Made:
        """A type of llama-quantize as a whole."""
        usual, others = TYPES[kind]
        weights, nbytes = {}, 0
        for name in self.subject.sites:
            ggml = others.get(name.split(".")[-2], usual) if ".layers." in name else embedding
            written, weights[name] = self._encode(name, ggml)
            nbytes += written
        return Made(8 * nbytes, weights)

    def _encode(self, name: str, kind: str) -> tuple[int, Tensor]:
        if (name, kind) not in self._encoded:
            ggml, library = gguf.GGMLQuantizationType[kind], ctypes.CDLL(str(self.library))
            library.ggml_quantize_init(int(ggml))
            quantize = library.ggml_quantize_chunk
            quantize.restype = ctypes.c_size_t
            quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
            weight = np.ascontiguousarray(self.subject.weight(name).float().numpy())
            squares = self.squares.get(name, torch.ones(weight.shape[1]))
            importance = np.ascontiguousarray(squares.numpy())
            block, size = gguf.GGML_QUANT_SIZES[ggml]
            data = np.empty((weight.shape[0], weight.shape[1] // block * size), np.uint8)
            shape = (0, *weight.shape)
            written = quantize(int(ggml), weight.ctypes.data, data.ctypes.data, *shape, importance.ctypes.data)
            if written != data.nbytes:
                raise SystemExit(f"{kind}: {name}: the library wrote {written} bytes, not {data.nbytes}")
            self._encoded[name, kind] = written, torch.from_numpy(np.array(gguf.quants.dequantize(data, ggml)))
        return self._encoded[name, kind]


# ---- other libraries -------------------------------------------------------------------------------------------------


def by_hqq(weight: Tensor, bits: int, group: int) -> tuple[float, Tensor]:
    """hqq's Quantizer: bits with a scale and a zero point in float16 for each group, as packed without gaps."""
    from hqq.core.quantize import Quantizer  # type: ignore[import-not-found]

    codes, meta = Quantizer.quantize(
        weight, nbits=bits, group_size=group, axis=1, device="cpu", compute_dtype=torch.float32, bitpack=False
    )
    scale, zero = (meta[name].half().float() for name in ("scale", "zero"))
    return weight.numel() * (bits + 32 / group), ((codes - zero) * scale).reshape(weight.shape)


def with_hqq(
    subject: SearchSubject,
    bits: int,
    group: int,
    embedding: tuple[int, int],
    layers: Mapping[str, Tensor] | None = None,
) -> Made:
    """All matrices by hqq, or those that `layers` lacks."""
    weights, nbits = dict(layers or {}), 0.0
    for name in subject.sites:
        if name in weights:
            continue
        scheme = (bits, group) if ".layers." in name else embedding
        size, weights[name] = by_hqq(subject.weight(name).float(), *scheme)
        nbits += size
    return Made(nbits, weights)


def with_embedding_of(subject: SearchSubject, layers: Mapping[str, Tensor], embedding: tuple[int, int] | None) -> Made:
    """Layers of a rival that leaves the embedding as it is: rounded by hqq, or left in 16 bits."""
    if embedding is not None:
        return with_hqq(subject, *embedding, embedding, layers)
    left = {name: subject.weight(name).float() for name in subject.sites if name not in layers}
    return Made(16 * sum(weight.numel() for weight in left.values()), {**layers, **left})


def named_embedding(embedding: tuple[int, int] | None) -> str:
    return "embedding in 16 bits" if embedding is None else f"embedding by hqq in {embedding[0]} bits"


def hqq(_options: argparse.Namespace, subject: SearchSubject, _lm: CausalLM, _text: str) -> Iterator[Rival]:
    for bits, group in SCHEMES:
        yield f"hqq, {bits} bits in groups of {group}", partial(with_hqq, subject, bits, group, (bits, group))


def calibration_of(options: argparse.Namespace, lm: CausalLM, text: str) -> list[Tensor]:
    windows = lm.windows(text, CONTEXT)[:-1]
    return [window[None] for window in spread_windows(windows, options.samples * CONTEXT)]


def auto_round(options: argparse.Namespace, subject: SearchSubject, lm: CausalLM, text: str) -> Iterator[Rival]:
    """Layers tuned by auto-round, asymmetric: all in one number of bits, then as its AutoScheme chooses them."""
    windows = calibration_of(options, lm, text)
    batches = [{"input_ids": window, "attention_mask": torch.ones_like(window)} for window in windows]
    common = {"seqlen": CONTEXT, "nsamples": len(windows), "batch_size": options.batch, "device_map": "cpu"}
    common |= {"iters": options.iterations, "amp": False, "enable_torch_compile": False}

    def rounder(**named: Any) -> Any:
        from auto_round import AutoRound  # type: ignore[import-not-found]

        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        return AutoRound(model, lm.tokenizer, **common, **named)

    @lru_cache(maxsize=1)
    def tuned(bits: int, group: int) -> tuple[float, Mapping[str, Tensor]]:
        return rounded(scheme=f"W{bits}A16", bits=bits, group_size=group, sym=False, dataset=batches)

    def rounded(**named: Any) -> tuple[float, Mapping[str, Tensor]]:
        tuning = rounder(**named)
        state = {name: each.detach().float() for name, each in tuning.quantize()[0].state_dict().items()}
        layers = {name: state[name] for name in subject.sites if ".layers." in name}
        nbits = 0.0
        for name, weight in layers.items():
            scheme = tuning.layer_config[name.removesuffix(".weight")]
            zeros = 0 if scheme["sym"] else scheme["bits"]
            nbits += weight.numel() * (scheme["bits"] + (16 + zeros) / scheme["group_size"])
        return nbits, layers

    def chosen(bits: float) -> tuple[float, Mapping[str, Tensor]]:
        """AutoScheme reads a data set by name; it gets the windows that all rivals get."""
        from auto_round import AutoScheme
        from auto_round.auto_scheme import delta_loss  # type: ignore[import-not-found]
        from auto_round.schemes import preset_name_to_scheme  # type: ignore[import-not-found]

        delta_loss.get_dataloader = lambda *_args, **_named: batches[: options.scored]
        widths = [preset_name_to_scheme(f"W{width}A16G64") for width in AUTO_WIDTHS]
        asymmetric = [replace(width, sym=width.bits == 8) for width in widths]  # it has no asymmetric 8 bits
        scored = {"nsamples": options.scored, "seqlen": CONTEXT, "batch_size": 1, "low_gpu_mem_usage": False}
        choosing = rounder(scheme=AutoScheme(avg_bits=bits, options=asymmetric, **scored), dataset="the given text")
        choosing.post_init()
        layers = choosing.layer_config
        return rounded(scheme="W4A16", group_size=64, sym=False, layer_config=layers, dataset=batches)

    def with_embedding(
        make: Callable[[], tuple[float, Mapping[str, Tensor]]], embedding: tuple[int, int] | None
    ) -> Made:
        nbits, layers = make()
        others = with_embedding_of(subject, layers, embedding)
        facts = {"windows": options.samples, "iterations": options.iterations, "batch": options.batch}
        return Made(others.nbits + nbits, others.weights, facts)

    steps = f"{options.iterations} steps of {options.batch}" if options.iterations else "no steps"
    for bits, group in (map(int, scheme.split(":")) for scheme in options.schemes):
        for embedding in TUNED[bits]:
            label = f"auto-round, {bits} bits in groups of {group}, {steps}, {named_embedding(embedding)}"
            yield label, partial(with_embedding, partial(tuned, bits, group), embedding)
    for average in options.average:
        label = f"auto-round's AutoScheme, layers in {average:g} bits, {steps}, {named_embedding(EMBEDDING)}"
        yield label, partial(with_embedding, partial(chosen, average), EMBEDDING)


def modelopt(options: argparse.Namespace, subject: SearchSubject, lm: CausalLM, text: str) -> Iterator[Rival]:
    """Layers by nvidia-modelopt's auto_quantize among AWQ's int4 and int8, which it runs on a CPU."""

    def chosen(bits: float) -> Made:
        import modelopt.torch.quantization as mtq  # type: ignore[import-not-found]

        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        windows = calibration_of(options, lm, text)
        sizes = {name: math.prod(site.shape) for name, site in subject.sites.items()}
        kept = sum(size for name, size in sizes.items() if ".layers." not in name) / sum(sizes.values())
        model, _ = mtq.auto_quantize(
            model,
            constraints={"effective_bits": bits * (1 - kept) + 16 * kept},  # it counts the head that it leaves
            quantization_formats=[mtq.INT4_AWQ_CFG, mtq.INT8_WEIGHT_ONLY_CFG],
            data_loader=windows,
            forward_step=lambda model, ids: model(input_ids=ids, labels=ids),
            loss_func=lambda output, _ids: output.loss,
            disabled_layers=["*lm_head*"],
            num_calib_steps=len(windows),
            num_score_steps=len(windows),
        )
        layers, nbits = {}, 0.0
        for name in subject.sites:
            if ".layers." in name:
                layer = model.get_submodule(name.removesuffix(".weight"))
                with torch.no_grad():  # scales of AWQ's inputs, too
                    layers[name] = layer(torch.eye(layer.in_features)).T.contiguous()
                quantizer = layer.weight_quantizer
                of_row = 8 + 16 / layer.in_features
                width = 16 if not quantizer.is_enabled else of_row if quantizer.num_bits == 8 else 4 + 16 / 128
                nbits += layers[name].numel() * width
        made = with_hqq(subject, *EMBEDDING, EMBEDDING, layers)
        return Made(made.nbits + nbits, made.weights, {"windows": len(windows)})

    for bits in AUTO_BITS:
        yield f"modelopt, {bits} effective bits, embedding by hqq", partial(chosen, bits)


RIVALS: dict[str, Callable[[argparse.Namespace, SearchSubject, CausalLM, str], Iterator[Rival]]] = {
    "hqq": hqq,
    "auto-round": auto_round,
    "modelopt": modelopt,
}


# ---- figures ---------------------------------------------------------------------------------------------------------


def comparison(rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Searched plans beside the best of each rival in their bytes, for both kinds of text."""
    lines = []
    rivals = dict.fromkeys(row["by"] for row in rows.values() if row["by"] != "searched")
    for label, row in rows.items():
        if row["by"] == "searched":
            line: dict[str, Any] = {"plan": label, "bytes": row["tensor_bytes"], "bits": row["bits"]}
            for kind, kl in row["kl"].items():
                of_kind = {name: {**other, "kl": other["kl"][kind]} for name, other in rows.items()}
                best = {by: kl_at(of_kind, by, row["tensor_bytes"]) for by in rivals}
                least = min((other for other in best.values() if other is not None), default=None)
                line[kind] = {"kl": kl, "rivals": best, "of_best": None if least is None else kl / least}
            lines.append(line)
    return lines


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder of a llama")
    parser.add_argument("--text", type=Path, required=True, help="the given text; its end is held out")
    parser.add_argument("--other", type=Path, required=True, help="text of another kind")
    parser.add_argument("--work", type=Path, required=True, help="a folder for files on the way")
    parser.add_argument("--ggml", type=Path, help="a shared library with ggml_quantize_chunk")
    parser.add_argument("--types", nargs="*", default=list(EMBEDDINGS), help="llama.cpp's types")
    parser.add_argument("--rivals", nargs="*", default=[], choices=list(RIVALS), help="libraries on the Python path")
    parser.add_argument("--texts", nargs="*", default=["given"], choices=["given", "both", "self"])
    parser.add_argument("--bits", nargs="*", type=float, default=list(BITS), help="sizes of searched plans")
    parser.add_argument("--correct", nargs="*", type=float, help="sizes whose plans are measured and corrected; all")
    parser.add_argument("--formats", nargs="*", help="candidates of the search, unless all")
    parser.add_argument("--note", nargs="*", default=[], help="added to labels of searched plans")
    parser.add_argument("--windows", type=int, default=32, help="windows of the given text")
    parser.add_argument("--held-out", type=int, default=12, help="windows of each kind")
    parser.add_argument("--iterations", type=int, default=50, help="of auto-round, for each block")
    parser.add_argument("--batch", type=int, default=2, help="windows of auto-round's steps")
    parser.add_argument("--samples", type=int, default=32, help="windows that auto-round and modelopt calibrate with")
    parser.add_argument("--schemes", nargs="*", default=["2:64", "3:64", "4:64"], help="auto-round's bits and groups")
    parser.add_argument("--average", nargs="*", type=float, default=[], help="bits of auto-round's AutoScheme")
    parser.add_argument("--scored", type=int, default=8, help="windows by which AutoScheme chooses")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    options.result = options.result or harness.RESULTS / f"kinds_{options.model.name}.json"
    return options


if __name__ == "__main__":
    main()

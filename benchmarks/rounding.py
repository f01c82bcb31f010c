"""What better rounding does to a real language model at the same bytes: KL and perplexity, for docs/rounding.md.

python benchmarks/rounding.py --model lm26m --text lm26m_valid.txt

Rows: round to nearest, scales by weighted search, error-compensated rounding. Statistics come from the first part of
the text, figures from the rest. Layers are rounded one after another: each meets the inputs that the layers before it,
already rounded, give, and in rows with "exact targets" is to make of them what the unrounded layer makes of exact
inputs. Finished rows are kept in the result file: after a crash the same command goes on where it stopped. `--rows`
measures some rows only; `--formats` other formats than those of the page, and `--llama-library` (a shared library with
ggml's functions, such as xllamacpp's) the same formats as ggml encodes them, with the same importance. `--bfloat16`
computes layers in bfloat16, on CPUs that are fast at it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import fnmatch
import functools
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import harness
import torch
from gguf import GGMLQuantizationType
from torch import Tensor, nn

from bitplan.base.records import read_json, read_text
from bitplan.files.gguf_tensors import GGUF_TYPES
from bitplan.formats import Encoded, get_format
from bitplan.formats.dispatch import decode, encode
from bitplan.packed.checkpoints.causal_lm import load_causal_lm, logits_of
from bitplan.packed.language.perplexity import CachedLogits, measure_perplexity, spread_windows
from bitplan.rounding.weights import round_weight

FORMATS = ("q4_0_gguf", "int4_g32", "mxfp4", "nvfp4", "q3_k_gguf", "q4_k_gguf", "q5_k_gguf", "q6_k_gguf")
METHODS = ("nearest", "weighted", "compensated")
EXACT_TARGETS = "compensated, exact targets"
PARTS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
CALIBRATION_SHARE = 0.6
CONTEXT = 512
BATCH = 8


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    name = f"rounding_{re.sub('[^a-z0-9]+', '_', arguments.model.name.lower())}"
    path = arguments.output or harness.RESULTS / f"{name}.json"
    settings = {
        "model": arguments.model.name,
        "text": arguments.text.name,
        "text_sha256": hashlib.sha256(arguments.text.read_bytes()).hexdigest(),
        "calibration_share": CALIBRATION_SHARE,
        "calibration_windows": arguments.windows,
        "context": CONTEXT,
        "tokens": arguments.tokens,
        "layers_in": "bfloat16" if arguments.bfloat16 else "float32",
    }
    document = _resumed(path, settings) | {
        "machine": harness.machine("cpu"),
        "versions": harness.versions(),
        "commit": harness.commit(),
    }
    lm = load_causal_lm(arguments.model)
    text = read_text(arguments.text)
    cut = int(len(text) * CALIBRATION_SHARE)
    seen = spread_windows(lm.windows(text[:cut], CONTEXT), arguments.windows * CONTEXT)
    batches = [torch.stack(seen[at : at + BATCH]) for at in range(0, len(seen), BATCH)]
    windows = spread_windows(lm.windows(text[cut:], CONTEXT), arguments.tokens)
    passes = Passes(arguments.bfloat16)
    reference = CachedLogits(functools.partial(passes.logits, lm.model), 2**31)
    done = {row["row"]: row for row in document["rows"]}
    jobs = list(_jobs(arguments.formats, arguments.llama_library))
    for job in jobs:
        if job.label in done or not fnmatch.fnmatchcase(job.label, arguments.rows):
            continue
        started = time.process_time()
        rounded = round_model(lm.model, batches, job, passes)
        seconds = time.process_time() - started
        quality = measure_perplexity(functools.partial(passes.logits, rounded), windows, reference=reference)
        done[job.label] = {
            "row": job.label,
            "bits_per_weight": bits_per_weight(lm.model, job),
            "cpu_seconds": round(seconds, 1),
            **quality.to_dict(),
        }
        document["rows"] = [done[each.label] for each in jobs if each.label in done]
        harness.save(name, document, path)
        print(f"{job.label}: KL {done[job.label]['kl']['mean']:.4f}, {seconds:.0f} s", flush=True)


def _jobs(formats: list[str], library: Path | None) -> Iterator[Settings]:
    for fmt in formats or FORMATS:
        for method in METHODS:
            yield Settings(fmt, method)
        if library is not None:
            yield Settings(fmt, "llama.cpp", library=library)
        yield Settings(fmt, "compensated", exact_targets=True)
    if formats:
        return
    # llama.cpp's Q4_0 has its embedding, which is the output head as well, in Q6_K.
    for method in METHODS:
        yield Settings("q4_0_gguf", method, embedding="q6_k_gguf")
    yield Settings("q4_0_gguf", "compensated", embedding="q6_k_gguf", exact_targets=True)


def bits_per_weight(model: nn.Module, job: Settings) -> float:
    """Of all matrices, norms left out."""
    head = get_format(job.embedding or job.fmt)
    sizes = [
        (parameter.shape, head if "embed" in name else get_format(job.fmt))
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2
    ]
    return 8 * sum(fmt.nbytes(tuple(shape)) for shape, fmt in sizes) / sum(shape.numel() for shape, _ in sizes)


def _resumed(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    if path.exists():
        document: dict[str, Any] = read_json(path)
        if document["settings"] == settings:
            return document
    return {"benchmark": "rounding", "command": harness.command(), "settings": settings, "rows": []}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder of a llama")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=96, help="windows of text that statistics come from")
    parser.add_argument("--tokens", type=int, default=10240, help="tokens that figures come from")
    parser.add_argument("--rows", default="*", help="a shell pattern of the rows to measure")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=[])
    parser.add_argument("--llama-library", type=Path)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


class _EnoughError(Exception):
    """The inputs wanted are there: the rest of the pass is not needed."""


@dataclass(frozen=True)
class LayerCall:
    """What a layer is called with for one batch."""

    state: Tensor
    keywords: dict[str, Any]


@dataclass
class Statistics:
    """X^T X of a layer's inputs, and their products with what an unrounded model gives there."""

    hessian: Tensor | None = None
    cross: Tensor | None = None
    count: int = 0

    def add(self, inputs: Tensor, exact: Tensor | None = None) -> None:
        rows = inputs.reshape(-1, inputs.shape[-1]).float()
        product = rows.T @ rows
        self.hessian = product if self.hessian is None else self.hessian + product
        if exact is not None:
            crossed = exact.reshape(rows.shape).float().T @ rows
            self.cross = crossed if self.cross is None else self.cross + crossed
        self.count += len(rows)


@dataclass
class Settings:
    """How one row is rounded."""

    fmt: str
    method: str
    damping: float = 0.01
    options: dict[str, Any] = field(default_factory=dict)
    exact_targets: bool = False
    embedding_damping: float = 0.1
    embedding: str | None = None
    library: Path | None = None

    def encode(self, weight: Tensor, statistics: Statistics) -> Tensor:
        if self.method == "nearest":
            return decode(encode(weight, self.fmt))
        hessian = statistics.hessian
        assert hessian is not None
        if self.library is not None:
            return encoded_by_ggml(self.library, weight, self.fmt, hessian.diagonal())
        if self.method == "weighted":
            return decode(round_weight(weight, self.fmt, moments=hessian.diagonal()))
        if statistics.cross is not None:
            weight = towards_exact(weight, statistics, self.damping)
        return decode(round_weight(weight, self.fmt, hessian=hessian, damping=self.damping, **self.options))

    @property
    def label(self) -> str:
        method = EXACT_TARGETS if self.exact_targets else self.method
        return f"{self.fmt}{f', embedding {self.embedding}' if self.embedding else ''}, {method}"

    @property
    def of_embedding(self) -> Settings:
        """A row is also what a token starts as, where every column counts alike: more damping."""
        return replace(self, fmt=self.embedding or self.fmt, damping=self.embedding_damping, exact_targets=False)


def encoded_by_ggml(library: Path, weight: Tensor, fmt: str, importance: Tensor) -> Tensor:
    """The numbers of what ggml's encoder makes of a weight with an importance matrix."""
    ggml, kind = ctypes.CDLL(str(library)), GGMLQuantizationType[GGUF_TYPES[fmt]]
    rows, data = (
        weight.float().contiguous(),
        torch.empty(get_format(fmt).nbytes(tuple(weight.shape)), dtype=torch.uint8),
    )
    numbers = rows, data, importance.float().contiguous()
    given = [ctypes.c_void_p(part.data_ptr()) for part in numbers]
    sizes = [ctypes.c_int64(number) for number in (0, *weight.shape)]
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    written = ggml.ggml_quantize_chunk(ctypes.c_int(kind), given[0], given[1], *sizes, given[2])
    assert written == len(data)
    return decode(Encoded.from_bytes(fmt, tuple(weight.shape), data.numpy().tobytes()))


def towards_exact(weight: Tensor, statistics: Statistics, damping: float) -> Tensor:
    """The weight that makes of rounded inputs what the weight makes of exact ones, by damped least squares."""
    assert statistics.hessian is not None
    assert statistics.cross is not None
    hessian = statistics.hessian.double()
    ridge = damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    change: Tensor = torch.linalg.solve(hessian + ridge, (statistics.cross.double() - hessian).T)
    return (weight.double() + weight.double() @ change.T).float()


@dataclass
class Passes:
    """Runs models, or pieces of them, in float32 or in bfloat16."""

    bfloat16: bool

    def logits(self, model: Any, ids: Tensor) -> Tensor:
        with self._computing():
            return logits_of(model, ids).float()

    def hidden(self, inner: Any, ids: Tensor) -> Tensor:
        with self._computing():
            state: Tensor = inner(input_ids=ids, use_cache=False).last_hidden_state
        return state

    def first_calls(self, inner: Any, batches: list[Tensor]) -> list[LayerCall]:
        """What the first layer is called with."""
        runs = [functools.partial(self.hidden, inner, ids) for ids in batches]
        return [LayerCall(*self._call_of(inner.layers[0], run)) for run in runs]

    def inputs(self, layer: nn.Module, module: nn.Module, call: LayerCall) -> Tensor:
        """What a module of a layer is called with; what comes after it is not computed."""
        return self._call_of(module, lambda: self.output(layer, call))[0]

    def output(self, layer: nn.Module, call: LayerCall) -> Tensor:
        with self._computing():
            out = layer(call.state, **call.keywords)
        state: Tensor = out if isinstance(out, Tensor) else out[0]
        return state

    def _computing(self) -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16)

    def _call_of(self, module: nn.Module, run: Callable[[], object]) -> tuple[Tensor, dict[str, Any]]:
        caught: list[tuple[Tensor, dict[str, Any]]] = []

        def catch(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            others = {key: value for key, value in keywords.items() if key != "hidden_states"}
            caught.append((args[0] if args else keywords["hidden_states"], others))
            raise _EnoughError

        handle = module.register_forward_pre_hook(catch, with_kwargs=True)
        with contextlib.suppress(_EnoughError):
            run()
        handle.remove()
        return caught[0]


def round_model(model: Any, batches: list[Tensor], settings: Settings, passes: Passes) -> Any:
    """A copy with every linear and the embedding rounded, layer by layer."""
    rounded = copy.deepcopy(model)
    inner, exact = rounded.model, model.model
    head = Statistics()
    if settings.method != "nearest":
        for ids in batches:
            head.add(passes.hidden(exact, ids))
    inner.embed_tokens.weight.data = settings.of_embedding.encode(inner.embed_tokens.weight.data, head)
    if settings.method == "nearest":
        for module in inner.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = settings.encode(module.weight.data, head)
        return rounded
    calls = passes.first_calls(inner, batches)
    exact_calls = passes.first_calls(exact, batches) if settings.exact_targets else []
    for layer, exact_layer in zip(inner.layers, exact.layers, strict=True):
        ours, theirs = ({n.rpartition(".")[2]: m for n, m in each.named_modules()} for each in (layer, exact_layer))
        for names in PARTS:
            statistics = Statistics()
            for place, call in enumerate(calls):
                wanted = None
                if settings.exact_targets:
                    wanted = passes.inputs(exact_layer, theirs[names[0]], exact_calls[place])
                statistics.add(passes.inputs(layer, ours[names[0]], call), wanted)
            for name in names:
                ours[name].weight.data = settings.encode(ours[name].weight.data, statistics)
        calls = [replace(call, state=passes.output(layer, call)) for call in calls]
        exact_calls = [replace(call, state=passes.output(exact_layer, call)) for call in exact_calls]
    return rounded


if __name__ == "__main__":
    main()

"""Do outlier channels of inputs matter, and does moving them into the weights help? KL of a llama with both in 8 bits.

python benchmarks/input_outliers.py --model FOLDER --text FILE --result FILE

Three ways, each a change of the weights that leaves the model's numbers as they are:

as it is   unchanged
scaled A   columns of a norm are divided by s, those of the layers that read it multiplied, as SmoothQuant does;
           s = max |x|^A / max |W|^(1 - A)
rotated    norms' factors go into the layers behind them, and the stream between blocks is turned by a Hadamard matrix

Weights are then int8_row, rounded to nearest, and inputs of all linear layers in each format of inputs.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor, nn

from bitplan.base.records import read_text
from bitplan.formats.dispatch import decode, encode
from bitplan.packed.language.causal_lm import load_causal_lm
from bitplan.packed.language.perplexity import measure_perplexity, round_linear_inputs

WEIGHTS, INPUTS, POWERS = "int8_row", ("keep", "int8", "int8_row", "fp8"), (0.3, 0.5, 0.7)


def readers_of_norms(model: Any) -> Iterator[tuple[nn.Module, list[nn.Linear]]]:
    """Each norm of a llama, and the layers that read it."""
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        yield block.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]
        yield block.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]
    yield model.model.norm, [model.lm_head]


def untied(model: Any) -> Any:
    """A copy whose head is a tensor of its own."""
    other = copy.deepcopy(model)
    other.lm_head.weight = nn.Parameter(other.lm_head.weight.detach().clone(), requires_grad=False)
    return other


def largest_inputs(model: Any, windows: Sequence[Tensor]) -> dict[nn.Module, Tensor]:
    """The largest magnitude of every column that each norm's readers get."""
    largest: dict[nn.Module, Tensor] = {}

    def see(norm: nn.Module, _args: object, out: Tensor) -> None:
        top = out.detach().abs().flatten(0, -2).amax(0)
        largest[norm] = torch.maximum(largest[norm], top) if norm in largest else top

    hooks = [norm.register_forward_hook(see) for norm, _ in readers_of_norms(model)]
    for window in windows:
        model(window[None])
    for hook in hooks:
        hook.remove()
    return largest


def scaled(model: Any, windows: Sequence[Tensor], power: float) -> Any:
    other = untied(model)
    largest = largest_inputs(other, windows)
    for norm, layers in readers_of_norms(other):
        of_weights = torch.stack([layer.weight.abs().amax(0) for layer in layers]).amax(0)
        factors = (largest[norm].clamp_min(1e-5) ** power / of_weights.clamp_min(1e-5) ** (1 - power)).clamp_min(1e-5)
        norm.weight.div_(factors)  # type: ignore[operator]
        for layer in layers:
            layer.weight.mul_(factors)
    return other


def hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def rotated(model: Any, _windows: Sequence[Tensor], signs: int = 0) -> Any:
    other = untied(model)
    size = other.config.hidden_size
    turn = hadamard(size) * (torch.randint(2, (size,), generator=torch.Generator().manual_seed(signs)) * 2.0 - 1)
    for norm, layers in readers_of_norms(other):
        for layer in layers:
            layer.weight.copy_((layer.weight * norm.weight) @ turn)
        norm.weight.fill_(1.0)  # type: ignore[operator]
    other.model.embed_tokens.weight.copy_(other.model.embed_tokens.weight @ turn)
    for block in other.model.layers:
        for layer in (block.self_attn.o_proj, block.mlp.down_proj):
            layer.weight.copy_(turn.T @ layer.weight)
    return other


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    lm = load_causal_lm(options.model)
    windows = lm.windows(read_text(options.text), options.context)
    shown, measured = windows[: options.windows], windows[-options.windows :]
    ways: dict[str, Callable[[], Any]] = {"as it is": lambda: untied(lm.model)}
    ways |= {f"scaled {power}": lambda power=power: scaled(lm.model, shown, power) for power in POWERS}
    ways["rotated"] = lambda: rotated(lm.model, shown)
    rows: dict[str, dict[str, float]] = {}
    for label, change in ways.items():
        model = change()
        exact = measure_perplexity(logits_of(model), measured, reference=logits_of(lm.model), name=label)
        assert exact.against is not None
        rows[label] = {"before rounding": exact.against.kl.mean}
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.copy_(decode(encode(layer.weight, WEIGHTS)))
        for inputs in INPUTS:
            handles = round_linear_inputs(model, inputs)
            quality = measure_perplexity(logits_of(model), measured, reference=logits_of(lm.model), name=label)
            assert quality.against is not None
            rows[label][inputs] = quality.against.kl.mean
            for handle in handles:
                handle.remove()
        print(label, rows[label], flush=True)
    document = {"benchmark": "input_outliers", "model": options.model.name, "text": options.text.name, "rows": rows}
    document |= {"weights": WEIGHTS, "context": options.context, "windows": options.windows}
    document |= {"machine": harness.machine("cpu"), "versions": harness.versions()}
    harness.save("input_outliers", document, options.result)


def logits_of(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda ids: model(ids).logits


if __name__ == "__main__":
    main()

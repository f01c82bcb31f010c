"""Does at once what the first calls of a packed model would do: compiles kernels in parallel, measures launches.

    warm_up(model, rows=(1, 16))        # returns seconds; does nothing where calls were made before

Without it the layers do so one after the other, each when it is first called with a number of rows. It also makes the
tensors that graphs read, so that torch.compile of a single block fits all blocks that are alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bitplan.packed.crossover import MOST_FUSED_ROWS, bucket_of, compile_together, crossovers_of
from bitplan.packed.products.fused import Launch, fused_for
from bitplan.packed.quant_linear import QuantLinear


def warm_up(model: nn.Module, rows: Sequence[int] = (1,), dtype: torch.dtype = torch.bfloat16) -> float:
    """Make a model's packed linear layers ready for inputs of these numbers of rows (all leading axes together)."""
    started = time.perf_counter()
    alone, joint = [], {}
    for layer in model.modules():
        if isinstance(layer, QuantLinear):
            if layer.joint is not None and layer.joint.joined_layer() is not None:
                joint[id(layer.joint)] = layer.joint
            else:
                alone.append(layer)
    layers = [*alone, *(projection.joined_layer() for projection in joint.values())]
    with torch.no_grad():
        unlike = {(layer.weight.fmt.name, *layer.weight.shape, layer.weight.device): layer for layer in layers}
        calls = [call for layer in unlike.values() for count in rows for call in _products(layer, count, dtype)]
        if calls:
            compile_together(layers[0].weight.device, calls)
        for count in rows:
            for projection in joint.values():
                for layer in [projection.joined_layer()] if projection.decide(count, dtype) else projection.layers:
                    layer.settle(count, dtype)
            for layer in alone:
                layer.settle(count, dtype)
    return time.perf_counter() - started


def _products(layer: QuantLinear, rows: int, dtype: torch.dtype) -> list[Callable[[], Tensor]]:
    """Calls of every launch that may be chosen, or of the launch that a record names."""
    weight, fused = layer.weight, fused_for(layer.weight.device.type)
    if fused is None or weight.device.type != "cuda" or rows > MOST_FUSED_ROWS:
        return []
    if layer.strategy not in ("auto", "fused") or fused.why_not(weight.encoded, dtype) is not None:
        return []
    bucket = bucket_of(rows)
    record = crossovers_of(weight.device).find(weight.fmt.name, *weight.shape)
    launches: Sequence[Launch | None] = fused.launches(weight.encoded, bucket)
    if record is not None and (record.refused or record.has(bucket)):
        launches = [] if record.refused else [record.at(bucket).launch]
    x = torch.zeros((bucket, weight.shape[1]), dtype=dtype, device=weight.device)
    prepared = layer.prepared(fused)

    def product(launch: Launch | None) -> Callable[[], Tensor]:
        return lambda: fused.run(x, weight.encoded, prepared, None, launch)

    return [product(launch) for launch in launches]

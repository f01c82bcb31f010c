"""FP8 folders: DeepSeek's, with a float32 scale for every 128 x 128 tile, and those with one for a row or a tensor.

| part | type | shape |
|---|---|---|
| NAME.weight | float8_e4m3fn | [rows, cols] |
| NAME.weight_scale_inv | float32 or bfloat16 | [rows / 128, cols / 128], rounded up; weight = codes * scale |
| NAME.weight_scale | the same | one number, or one for each row |
| NAME.input_scale | | of activations, which are not quantized here: left out |
"""

from __future__ import annotations

from collections.abc import Iterator

from bitplan.base.documents import show
from bitplan.files.schemes.floats import FP8, TILE, fp8_weight
from bitplan.files.schemes.scheme import QuantizedFolder, SchemeWeight, is_tile

ACTIVATION_SCALES = ("input_scale", "input_scale_ub", "activation_scale")


def list_weights(folder: QuantizedFolder) -> Iterator[SchemeWeight]:
    said = folder.said.get("weight_block_size") or TILE
    if not is_tile(said):
        folder.refuse(f"config.json: quantization_config: weight_block_size is {show(said)}, not two sizes")
    tensors = folder.checkpoint.tensors
    for name, entry in tensors.items():
        scales = next((each for each in (f"{name}_scale_inv", f"{name}_scale") if each in tensors), None)
        if entry.dtype in FP8 and scales is not None:
            owner = name.rpartition(".")[0]
            beside = tuple(each for part in ACTIVATION_SCALES if (each := f"{owner}.{part}") in tensors)
            yield fp8_weight(folder, name, name, scales, (said[0], said[1]), beside)

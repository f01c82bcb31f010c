"""Loads a gpt-oss checkpoint as a model that runs on packed experts: headers are checked before any tensor is read.

    model, report = load_packed("gpt-oss-20b", device="cuda")    # transformers' model, its experts packed

The order makes loading all or nothing: headers against the manifest, the checkpoint as a whole, the model and the room
on the device are checked; then every tensor is read into memory of its own; and only then is a model changed. An error
on the way is one line that names file and tensor, and frees the memory of what was read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bitplan.errors import FileFormatError
from bitplan.formats import Encoded
from bitplan.plan import Header, require_clean
from bitplan.records import read_json
from bitplan.runtime.packed.gpt_oss.model import (
    GptOssPackedExperts,
    check_fits,
    check_packed_experts,
    empty_model,
    experts_of,
    fill_model,
    load_experts,
    load_plain,
    model_shapes,
    plain_slots,
)
from bitplan.runtime.packed.quant_experts import QuantExperts
from bitplan.runtime.packed.read_packed import (
    Loaded,
    LoadReport,
    ManifestLike,
    PeakMemory,
    as_manifest,
    check_filled,
    check_room,
    device_of,
    list_headers,
    refuse_bad_numbers,
    require_transformers,
)
from bitplan.runtime.packed.tile_cache import TileCache
from bitplan.store.files.gguf_tensors import GGUFTensors
from bitplan.store.files.open_files import open_tensors
from bitplan.store.files.tensor_file import TensorFile
from bitplan.store.gpt_oss import GptOssFile
from bitplan.store.gpt_oss.config import ARCHITECTURE
from bitplan.store.gpt_oss.experts import DOWN, GATE_UP
from bitplan.store.gpt_oss.layouts import GGUF_WIDE, LayoutTensor, list_slots
from bitplan.store.packed_folder import QUANT_METHOD

CONFIG = "config.json"
_BIASES = ("gate_up_proj_bias", "down_proj_bias")
PACKED_EXPERTS = (".mlp1_weight.blocks", ".experts.gate_up_proj_blocks")
FLOAT_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")  # Hugging Face's names of plain experts


def is_gpt_oss(path: Path) -> bool:
    """Whether a file or folder is a gpt-oss checkpoint in one of its own layouts, not in that of `bitplan quantize`."""
    if path.is_dir() and (path / CONFIG).is_file():
        config = read_json(path / CONFIG)
        said = isinstance(config, dict) and config.get("quantization_config")
        is_ours = isinstance(said, dict) and said.get("quant_method") == QUANT_METHOD
        if not isinstance(config, dict) or is_ours:
            return False
        if config.get("model_type") is not None:
            return bool(config["model_type"] == "gpt_oss")
    with open_tensors(path) as file:
        if isinstance(file, GGUFTensors):
            kind = file.file.metadata.get("general.architecture")
            return kind is not None and kind.value == ARCHITECTURE
        return any(name.endswith(PACKED_EXPERTS + FLOAT_EXPERTS) for name in file.specs)


def load_gpt_oss(
    path: str | Path,
    *,
    manifest: ManifestLike = "gpt-oss",
    device: torch.device | str = "cpu",
    model: nn.Module | None = None,
    strategy: str = "auto",
    cache: TileCache | None = None,
    dtype: torch.dtype | None = None,
    check: Literal["headers", "deep"] = "headers",
) -> Loaded:
    """`load_packed` of a gpt-oss checkpoint in OpenAI's, Hugging Face's or GGUF's layout; its experts stay in MXFP4.

    manifest  what the file must hold: a shipped manifest, a file, or a Manifest
    model     a GptOssForCausalLM to fill, on meta or not; None builds one from config.json, or from the file's sizes
    strategy  how the experts run, with `cache` for "tile_cache"; see QuantExperts
    dtype     type of all weights but the experts. None: the type of the stored embedding; numbers of other tensors that
              it cannot hold are an error. To a type that you give, numbers are rounded (CPUs run float32 best)
    check     "headers" refuses NaN in scales and norms as they are read; "deep" reads and checks every tensor first
    """
    started, place = time.perf_counter(), device_of(device)
    require_transformers(str(path))
    with _open_checked(Path(path), manifest, deep=check == "deep") as file:
        compute_dtype = dtype or file.dtype("embed", None)
        target = model if model is not None else empty_model(file, compute_dtype)
        check_fits(target, model_shapes(file), file.where)
        slots = plain_slots(file)
        check_room(file.where, _needed_bytes(file, slots, compute_dtype), place)
        peak = PeakMemory(place)
        plain: dict[str, Tensor] = {}
        packed: dict[tuple[int, tuple[str, ...]], Encoded] = {}
        experts: dict[int, QuantExperts] = {}
        try:
            for layer in range(file.shape.layers):
                for parts in (GATE_UP, DOWN):
                    packed[layer, parts] = load_experts(file, layer, parts, place)
            for slot in slots:
                plain[slot.name] = load_plain(file, slot, place, compute_dtype, round_to=dtype is not None)
            options = {"strategy": strategy, "cache": cache}
            for layer in range(file.shape.layers):
                experts[layer] = _experts(target, layer, plain, packed, options)
            experts[0].explain(1, compute_dtype)  # refuse a strategy that cannot run now, not at the first token
        except BaseException:  # the traceback keeps this frame, and would keep the memory
            plain.clear()
            packed.clear()
            experts.clear()
            raise
        packed_bytes = sum(item.nbytes for item in packed.values())
        plain_bytes = sum(item.nbytes for item in plain.values())
        fill_model(target, {name: item for name, item in plain.items() if not name.endswith(_BIASES)}, experts, place)
        check_filled(target, file.where)
        check_packed_experts(target, file.where)
        report = LoadReport(
            path=str(path),
            layout=file.layout,
            device=str(place),
            file_bytes=sum(own.stat().st_size for own in file.files),
            device_bytes=packed_bytes + plain_bytes,
            packed_bytes=packed_bytes,
            packed_tensors=len(packed),
            plain_tensors=len(plain),
            seconds=time.perf_counter() - started,
            peak_bytes=peak.read(),
        )
    return Loaded(target, report)


def _experts(
    model: nn.Module,
    layer: int,
    plain: Mapping[str, Tensor],
    packed: Mapping[tuple[int, tuple[str, ...]], Encoded],
    options: Mapping[str, Any],
) -> QuantExperts:
    replaced: Any = experts_of(model, layer)
    gate_up_bias, down_bias = (plain[f"model.layers.{layer}.mlp.experts.{name}"] for name in _BIASES)
    return GptOssPackedExperts(
        packed[layer, GATE_UP],
        packed[layer, DOWN],
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        alpha=float(replaced.alpha),
        limit=float(replaced.limit),
        name=f"model.layers.{layer}.mlp.experts",
        **options,
    )


# ---- before anything is read -----------------------------------------------------------------------------------------


def _open_checked(path: Path, manifest: ManifestLike, *, deep: bool) -> GptOssFile:
    """The open file, after its headers were checked against the manifest."""
    rules = as_manifest(manifest)
    with open_tensors(path) as headers:
        is_gguf = isinstance(headers, GGUFTensors)
        if not is_gguf:
            _refuse_floats(headers)
            require_clean(rules, list_headers(headers), checkpoint=str(path))
        if deep:
            refuse_bad_numbers(headers, rules)
    file = GptOssFile(path)
    try:
        if file.experts is not None:
            raise _floats(path, file.expert_name(0, GATE_UP), file.experts)
        if is_gguf:
            require_clean(rules, _translated(file), checkpoint=str(path))
    except BaseException:
        file.close()
        raise
    return file


def _refuse_floats(headers: TensorFile) -> None:
    """Refuse experts as floats before the manifest, which knows packed experts only, asks for a rule for them."""
    for name, spec in headers.specs.items():
        if name.endswith(FLOAT_EXPERTS) and spec.dtype.is_floating_point:
            raise _floats(headers.path, name, spec.dtype)


def _floats(path: Path, name: str, dtype: torch.dtype) -> FileFormatError:
    return FileFormatError(
        f"{path}: {name!r} is {dtype}: these experts are not packed, and are not loaded as floats; "
        "pack them with `bitplan convert` first"
    )


def _translated(file: GptOssFile) -> dict[str, Header]:
    """A GGUF file's headers under Hugging Face's names; tensors that GGUF stores wider count as bfloat16."""
    headers = {}
    for slot in list_slots("hf", file.shape):
        count = torch.Size(slot.shape).numel()
        if slot.is_expert:
            headers[slot.name] = Header("uint8", slot.shape, count)
            continue
        dtypes = {file.dtype(part, slot.layer) for part in slot.parts}
        is_wide = dtypes == {torch.float32} and set(slot.parts) <= GGUF_WIDE
        dtype = torch.bfloat16 if is_wide else dtypes.pop()
        headers[slot.name] = Header(str(dtype).removeprefix("torch."), slot.shape, count * dtype.itemsize)
    return headers


def _needed_bytes(file: GptOssFile, slots: list[LayoutTensor], dtype: torch.dtype) -> int:
    plain = sum(torch.Size(slot.shape).numel() * dtype.itemsize for slot in slots)
    return plain + sum(file.tensors[slot.name].nbytes for slot in file.slots if slot.is_expert)

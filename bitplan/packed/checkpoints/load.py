"""load_packed: a packed checkpoint as a model that runs, checked before a number is read.

    model, report = load_packed("packed", device="cuda")        # any transformers model that `bitplan quantize` packed
    load_packed("small.safetensors", model=mine)                # into a model of your own
    load_packed("llama-gptq")                                   # a folder that another library quantized
    load_packed("llama.gguf")                                   # a GGUF file, on its own bytes
    load_packed("gpt-oss-20b", device="cuda")                   # gpt-oss in OpenAI's, Hugging Face's or GGUF's layout

The order makes loading all or nothing: config and plan, headers against the model, and room on the device are checked;
then every tensor is read into memory of its own; and only then is a model changed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from bitplan.base.errors import ArgumentError, FileFormatError, StoreError
from bitplan.base.records import on_failure
from bitplan.files.engines.gguf_source import GGUFModel, open_model
from bitplan.files.gpt_oss import GptOssFile
from bitplan.files.open_files import open_tensors
from bitplan.files.packed_folder import CONFIG, check_plan, folder_inputs, read_config, read_packed_plan
from bitplan.files.schemes.tensors import SchemeTensors, scheme_of
from bitplan.formats.input_formats import input_format
from bitplan.packed.checkpoints import gpt_oss_load
from bitplan.packed.checkpoints import gpt_oss_load as gpt_oss
from bitplan.packed.checkpoints.build import empty_model, plain_types
from bitplan.packed.checkpoints.fill import (
    Value,
    check_layers,
    make_layers,
    make_parameters,
    needed_bytes,
    place_all,
    read_values,
)
from bitplan.packed.checkpoints.gpt_oss_load import is_gpt_oss, make_experts, open_checked
from bitplan.packed.checkpoints.save import adapt_to_transformers
from bitplan.packed.checkpoints.tensor_sources import assign, remember
from bitplan.packed.fused_projections import fuse_what_is_seen
from bitplan.packed.layer_replacement import format_fault
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.product_strategy import INPUTS, check_strategy
from bitplan.packed.quant_experts import QuantExperts
from bitplan.packed.read_tensors import (
    CHECKS,
    Loaded,
    LoadReport,
    ManifestLike,
    PeakMemory,
    check_filled,
    check_room,
    device_of,
    refuse_bad_numbers,
    require_transformers,
)
from bitplan.packed.rounded_inputs import check_inputs, round_inputs
from bitplan.packed.tile_cache import TileCache
from bitplan.plan.plan import Plan


def load_packed(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    check: Literal["headers", "deep"] = "headers",
    strategy: str = "auto",
    cache: TileCache | None = None,
    inputs: str | None = None,
    manifest: ManifestLike = "gpt-oss",
) -> Loaded:
    """Load a folder of `bitplan quantize` or of another library, a GGUF file, packed weights, or a gpt-oss checkpoint.

    model     your own model to fill, on meta or not; None builds transformers' model of the folder's config
    dtype     type of the weights that are not packed. None: the type of the config or of your model; numbers that this
              type cannot hold are an error. To a type that you give, numbers are rounded (CPUs run float32 best)
    check     "headers" checks names, shapes and formats first, scales and norms as they are read; "deep" first reads
              every tensor and refuses bad numbers, as `bitplan check --deep` does
    strategy  how packed layers run, with `cache` for "tile_cache"; see QuantLinear
    inputs    the format that packed layers round their inputs to, or "keep"; None: what the folder says
    manifest  for a gpt-oss checkpoint: what the checkpoint must hold
    """
    started, place = time.perf_counter(), device_of(device)
    check_strategy(strategy, str(path))
    _check_arguments(path, model, dtype, check)
    rounded = input_format(inputs, "load_packed")
    source = Path(path)
    if model is None:
        require_transformers(str(path))
    if is_gpt_oss(source):
        require_transformers(str(path))
        with open_checked(source, manifest, deep=check == "deep") as checkpoint:
            target, values, peak = _load_gpt_oss(checkpoint, model, place, dtype, strategy=strategy, cache=cache)
            check_inputs(target.named_modules(), rounded)
            report = _report(str(path), checkpoint.layout, checkpoint.files, place, values, started, peak)
        _remember_gpt_oss(target, source)
        return Loaded(target, report)
    is_bare = model is not None and not (source / CONFIG).is_file()  # the source holds weights alone
    with open_tensors(source) if is_bare else open_model(source) as file:
        config, plan = (None, None) if is_bare else _read_folder(source, file.folder)
        if plan is not None:
            check_plan(plan, file)
        if isinstance(file, SchemeTensors):
            file.decode_where(format_fault)  # formats that no packed layer holds, such as tiles of several rows
        target = model if model is not None else empty_model(file.folder, config or {}, dtype, place)
        assignment = assign(target, file, str(path))
        check_layers(target, assignment, file, str(path))
        dtypes = plain_types(target, dtype)
        needed = needed_bytes(target, assignment, file, dtypes)
        check_room(str(path), needed, place)
        if check == "deep":
            refuse_bad_numbers(file)
        peak = PeakMemory(place)
        values = read_values(target, assignment, file, place, dtypes, may_round=dtype is not None)
        parameters = make_parameters(target, values)
        layers = make_layers(target.get_submodule, values, parameters, strategy=strategy, cache=cache, dtypes=dtypes)
        rounded = folder_inputs(config) if inputs is None else rounded
        check_inputs(layers.items(), rounded)
        place_all(target, values, parameters, layers)
        round_inputs(target, rounded)
        check_filled(target, str(path))
        target.to(place)  # buffers that a model of the user's computes itself
        if place.type in ("cuda", "cpu"):
            fuse_what_is_seen(target)
        folder = source if source.is_dir() else None
        remember(target, file, assignment.recipes, folder=folder, config=config, plan=plan)
        adapt_to_transformers(target)
        layout = file.kind if isinstance(file, SchemeTensors | GGUFModel) else "bitplan"
        report = _report(str(path), layout, file.files, place, values, started, peak)
    return Loaded(target, report)


def _load_gpt_oss(
    file: GptOssFile, model: nn.Module | None, place: torch.device, dtype: torch.dtype | None, **options: Any
) -> tuple[nn.Module, Mapping[str, Value], PeakMemory]:
    computes = dtype or file.dtype("embed", None)
    target = model if model is not None else gpt_oss.empty_model(file, computes)
    gpt_oss.check_fits(target, gpt_oss.model_shapes(file), file.where)
    check_room(file.where, gpt_oss_load.needed_bytes(file, computes), place)
    peak = PeakMemory(place)
    values = gpt_oss_load.read_values(file, place, computes, may_round=dtype is not None)
    parameters, experts = make_parameters(target, values), dict[str, QuantExperts]()
    with on_failure(lambda: [held.clear() for held in (values, parameters, experts)]):
        experts |= make_experts(target, file.shape.layers, values, parameters, **options)
        next(iter(experts.values())).explain(1, computes)  # refuse a strategy that cannot run now
    place_all(target, values, parameters, experts)
    gpt_oss.fill_computed(target, place)
    check_filled(target, file.where)
    return target, values, peak


def _report(
    path: str,
    layout: str,
    files: Sequence[Path],
    place: torch.device,
    values: Mapping[str, Value],
    started: float,
    peak: PeakMemory,
) -> LoadReport:
    distinct = list({id(value): value for value in values.values()}.values())
    packed = [value for value in distinct if isinstance(value, PackedWeight)]
    return LoadReport(
        path=path,
        layout=layout,
        device=str(place),
        file_bytes=sum(own.stat().st_size for own in files),
        device_bytes=sum(value.nbytes for value in distinct),
        packed_bytes=sum(value.nbytes for value in packed),
        packed_tensors=len(packed),
        plain_tensors=len(distinct) - len(packed),
        seconds=time.perf_counter() - started,
        peak_bytes=peak.read(),
    )


def _check_arguments(path: object, model: object, dtype: object, check: object) -> None:
    if not isinstance(path, str | Path) or (model is not None and not isinstance(model, nn.Module)):
        raise ArgumentError(
            "load_packed(path, model=...): path must be a str or Path and model a torch.nn.Module, "
            f"got a {type(path).__name__} and a {type(model).__name__}"
        )
    if dtype is not None and dtype not in INPUTS:
        known = ", ".join(str(one).removeprefix("torch.") for one in INPUTS)
        raise StoreError(f"{path}: dtype must be a float type of torch ({known}), got {dtype!r}")
    if check not in CHECKS:
        raise StoreError(f"{path}: check must be {' or '.join(map(repr, CHECKS))}, got {check!r}")
    if not Path(path).exists():
        raise FileFormatError(f"{path}: no such file or folder; nothing is downloaded")


def _read_folder(source: Path, folder: Path) -> tuple[dict[str, Any], Plan | None]:
    """The config of a model, and its plan where bitplan packed it; a GGUF file has its folder elsewhere."""
    if folder != source:
        return read_config(folder), None
    if not source.is_dir():
        raise FileFormatError(
            f"{source}: is a file of weights, which does not say what model they are of; give the folder that "
            "`bitplan quantize` wrote, a GGUF file, or your own model as model=..."
        )
    config = read_config(source)
    return config, None if scheme_of(source) else read_packed_plan(source, config)


def _remember_gpt_oss(model: nn.Module, source: Path) -> None:
    with open_tensors(source) as file:
        has_config = source.is_dir() and (source / CONFIG).is_file()
        config = read_config(source) if has_config and "model_type" in read_config(source) else None
        folder = source if source.is_dir() else None
        remember(model, file, (), folder=folder, config=config, plan=None)
    adapt_to_transformers(model)

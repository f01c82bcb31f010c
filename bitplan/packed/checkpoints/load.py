"""load_packed: a packed checkpoint as a model that runs, checked before a number is read.

    model, report = load_packed("packed", device="cuda")        # any transformers model that `bitplan quantize` packed
    load_packed("small.safetensors", model=mine)                # into a model of your own
    load_packed("llama-gptq")                                   # a folder that another library quantized
    load_packed("llama.gguf")                                   # a GGUF file, on its own bytes
    load_packed("gpt-oss-20b", device="cuda")                   # gpt-oss in OpenAI's, Hugging Face's or GGUF's layout

The order makes loading all or nothing: config and plan, headers against the model, and room on the device are checked
(`decide`); then every tensor is read once, into the memory where it stays (`read_values`); and only then is a model
changed (`place_all`). transformers' own `from_pretrained` takes the same steps (`quantizer`).

A model is built on the meta device, where it takes no memory. Buffers that it computes and does not save (rotary
frequencies, position ids) are computed while all parameters are still there: transformers' initialisation then finds no
real memory to fill with random numbers.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from bitplan.base.documents import show
from bitplan.base.errors import ArgumentError, FileFormatError, StoreError, counted
from bitplan.base.hardware import known_device
from bitplan.base.optional import remote_code_allowed, require
from bitplan.base.records import on_failure
from bitplan.files import describe_files
from bitplan.files.deep_check import deep_check
from bitplan.files.engines.gguf_source import GGUFModel
from bitplan.files.gguf_tensors import GGUFTensors
from bitplan.files.models.save_load import fill_model
from bitplan.files.open_files import open_tensors
from bitplan.files.packed_folder import CONFIG, check_plan, folder_inputs, folder_kv, read_config, read_packed_plan
from bitplan.files.schemes.tensors import SchemeTensors
from bitplan.files.tensor_file import TensorFile
from bitplan.files.tensor_recipes import (
    Assignment,
    TensorRecipe,
    assign,
    computed_parameters,
    convert_plain,
    shape_of,
    shortened,
)
from bitplan.files.transformers_names import foreign_faults, read_generation_config, silence_transformers
from bitplan.formats import Encoded, get_format
from bitplan.formats.elements import torch_dtype
from bitplan.formats.gguf.blocks import GgufBlocks
from bitplan.formats.input_formats import Inputs
from bitplan.packed.checkpoints.gpt_oss_tensors import GptOssTensors, ManifestLike, holds_gpt_oss
from bitplan.packed.checkpoints.save import adapt_to_transformers, remember
from bitplan.packed.fused_projections import fuse_what_is_seen
from bitplan.packed.layer_replacement import format_fault, lacking, packed_layer
from bitplan.packed.packed_weight import PackedWeight, wait_in_host
from bitplan.packed.product_strategy import INPUTS, check_strategy
from bitplan.packed.rounded_inputs import set_inputs
from bitplan.packed.rounded_kv import round_kv
from bitplan.packed.tile_cache import TileCache
from bitplan.plan.names import listed
from bitplan.plan.plan import Plan
from bitplan.plan.structure.families import guess_role
from bitplan.plan.structure.packable import why_not_packed_in

CHECKS = ("headers", "deep")
_CHECKED_AT_ONCE = 2**20  # scales: those of a large stack as float32 would be a seventh of a model more
Value = Tensor | PackedWeight
Dtypes = Mapping[str, torch.dtype]  # the type of every tensor of the model that is not packed


@dataclass(frozen=True)
class LoadReport:
    """What was loaded: bytes of the file and on the device, and the peak of memory there while loading.

    `peak_bytes` is the peak of torch's allocator minus what was allocated before; None on a CPU, where nothing counts.
    """

    path: str
    layout: str
    device: str
    file_bytes: int
    device_bytes: int
    packed_bytes: int
    packed_tensors: int
    plain_tensors: int
    seconds: float
    peak_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Loaded(NamedTuple):
    """A model that runs, and the report of loading it."""

    model: nn.Module
    report: LoadReport


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
    masters: bool = False,
) -> Loaded:
    """Load a folder of `bitplan quantize` or of another library, a GGUF file, packed weights, or a gpt-oss checkpoint.

    model     your own model to fill, on meta or not; None builds transformers' model of the folder's config
    dtype     type of the weights that are not packed. None: the type of the config or of your model; numbers that this
              type cannot hold are an error. To a type that you give, numbers are rounded (CPUs run float32 best)
    check     "headers" checks names, shapes and formats first, scales and norms as they are read; "deep" first reads
              every tensor and refuses bad numbers, as `bitplan verify` does
    strategy  how packed layers run, with `cache` for "tile_cache"; see QuantLinear
    inputs    the format that packed layers round their inputs to, or "keep"; None: what the folder says
    manifest  for a gpt-oss checkpoint: what the checkpoint must hold
    masters   fill the Parameters of `model` where they are, which can be trained on: a packed tensor becomes a version
              of its Parameter, as `morph_model` makes one, and eval-mode forwards use it
    """
    started, target_device, where = time.perf_counter(), device_of(device), str(path)
    check_strategy(strategy, where)
    _check_arguments(path, model, dtype, check)
    set_inputs({}, inputs, "load_packed")  # refuses an unknown name before anything is read
    source = Path(path)
    if masters:
        return _load_masters(source, model, dtype, check, started)
    if model is None:
        require_transformers(where)
    with _open(source, has_model=model is not None, manifest=manifest, device=target_device) as file:
        config, plan = _read_folder(source, file, has_model=model is not None)
        if isinstance(file, SchemeTensors):
            file.decode_where(format_fault)  # formats that no packed layer holds, such as tiles of several rows
        if model is not None:
            target = model
        else:
            built_type = file.dtype if isinstance(file, GptOssTensors) else None
            target = empty_model(file.folder, config or {}, dtype or built_type, target_device)
        assignment, dtypes = decide(target, file, plan, dtype, target_device, where)
        if check == "deep":
            _refuse_bad_numbers(file)
        allocated = _start_counting(target_device)
        values = read_values(target, assignment, file, target_device, dtypes, plan=plan, may_round=dtype is not None)
        parameters = make_parameters(target, values)
        layers = make_layers(target.get_submodule, values, parameters, strategy=strategy, cache=cache, dtypes=dtypes)
        rounded = folder_inputs(config, plan) if inputs is None else inputs
        set_inputs(layers, inputs_by_target(rounded, assignment, where), where)
        is_on_meta = all(tensor.is_meta for tensor in (*target.parameters(), *target.buffers()))
        if model is not None and hasattr(target, "initialize_weights") and is_on_meta:
            _compute_buffers(target, target_device)
        place_all(target, values, parameters, layers)
        if (kv := folder_kv(config, where)) is not None and hasattr(target, "config"):
            round_kv(target, kv)
        own_config = config if file.folder == source else None  # one that was made for a file is not kept
        folder = source if source.is_dir() else None
        finish(target, file, assignment, target_device, folder=folder, config=own_config, plan=plan, where=where)
        distinct = list({id(value): value for value in values.values()}.values())
        packed = [value for value in distinct if isinstance(value, PackedWeight)]
        report = LoadReport(
            path=where,
            layout=file.kind if isinstance(file, SchemeTensors | GGUFModel | GptOssTensors) else "bitplan",
            device=str(target_device),
            file_bytes=sum(one.stat().st_size for one in file.files),
            device_bytes=sum(value.nbytes for value in distinct),
            packed_bytes=sum(value.nbytes for value in packed),
            packed_tensors=len(packed),
            plain_tensors=len(distinct) - len(packed),
            seconds=time.perf_counter() - started,
            peak_bytes=None if allocated is None else torch.cuda.max_memory_allocated(target_device) - allocated,
        )
    return Loaded(target, report)


def _load_masters(path: Path, model: nn.Module | None, dtype: torch.dtype | None, check: str, started: float) -> Loaded:
    if model is None or dtype is not None:
        raise ArgumentError(
            f"{path}: masters=True fills the Parameters of your own model, in their types: give model=, and no dtype"
        )
    with open_tensors(path) as file:
        if check == "deep":
            _refuse_bad_numbers(file)
        fill_model(file, model)
        packed = [spec.nbytes for spec in file.specs.values() if spec.encoded]
        report = LoadReport(
            path=str(path),
            layout=file.kind,
            device=str(next((parameter.device for parameter in model.parameters()), "cpu")),
            file_bytes=sum(one.stat().st_size for one in file.files),
            device_bytes=sum(parameter.nbytes for parameter in model.parameters()) + sum(packed),
            packed_bytes=sum(packed),
            packed_tensors=len(packed),
            plain_tensors=len(file.specs) - len(packed),
            seconds=time.perf_counter() - started,
            peak_bytes=None,
        )
    return Loaded(model, report)


def _start_counting(device: torch.device) -> int | None:
    """Bytes that are allocated on a GPU now, from where on torch counts its peak anew; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def decide(
    model: nn.Module, file: TensorFile, plan: Plan | None, dtype: torch.dtype | None, device: torch.device, where: str
) -> tuple[Assignment, Dtypes]:
    """Decide where each tensor of the model comes from, and the types of those that are not packed; nothing is read.

    A file that does not fit its plan, the model or the device is an error.
    """
    if plan is not None:
        check_plan(plan, file)
    assignment = assign(model, file, where)
    _check_layers(model, assignment, file, where)
    dtypes = plain_types(model, dtype)
    _check_room(where, _needed_bytes(model, assignment, file, dtypes, plan), device)
    return assignment, dtypes


def inputs_by_target(inputs: Inputs, assignment: Assignment, where: str) -> Inputs:
    """Formats of inputs by the names of a model's weights, for those by the names of a file's."""
    if not isinstance(inputs, Mapping):
        return inputs
    formats: dict[str, str | None] = {}
    for recipe in assignment.recipes:
        of_pieces = {piece.name: inputs.get(piece.name) for piece in recipe.pieces}
        if len(set(of_pieces.values())) > 1:
            shown = ", ".join(f"{name} {fmt or 'as they are'}" for name, fmt in list(of_pieces.items())[:4])
            raise StoreError(
                f"{where}: {recipe.targets[0]} is one layer of the model, and its plan has several formats for its "
                f"inputs: {shown}; give them one"
            )
        formats |= dict.fromkeys(recipe.targets, next(iter(of_pieces.values())))
    return formats | {name: fmt for name, fmt in inputs.items() if name in assignment.ties}


def finish(
    model: nn.Module,
    file: TensorFile,
    assignment: Assignment,
    device: torch.device,
    *,
    folder: Path | None,
    config: Mapping[str, Any] | None,
    plan: Plan | None,
    where: str,
) -> None:
    """Make a model that is filled ready to run and to be saved again."""
    check_filled(model, where)
    model.to(device)  # buffers that a model of the user's computes itself
    if device.type in ("cuda", "cpu"):
        is_joined = bool(fuse_what_is_seen(model))
        if is_joined and device.type == "cpu" and importlib.util.find_spec("numba") is not None:
            from bitplan.packed.quick_blocks import quicken_blocks  # which needs numba

            quicken_blocks(model)
    remember(model, file, assignment.recipes, folder=folder, config=config, plan=plan)
    adapt_to_transformers(model)


# ---- before anything is read -----------------------------------------------------------------------------------------


def device_of(device: torch.device | str) -> torch.device:
    """The device, with its index; a device that does not exist is an error, before anything is read."""
    checked = known_device(device, "load to the CPU")
    if checked.type == "cuda" and checked.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return checked


def require_transformers(where: str) -> None:
    """Raise one line where transformers is missing or too old; `open_tensors` gives the tensors without it."""
    require("transformers", purpose=f"{where}: running it", extra="models", least=5)


def _check_arguments(path: object, model: object, dtype: object, check: object) -> None:
    if not isinstance(path, str | Path) or (model is not None and not isinstance(model, nn.Module)):
        raise ArgumentError(
            "load_packed(path, model=...): path must be a str or Path and model a torch.nn.Module, "
            f"got a {type(path).__name__} and a {type(model).__name__}"
        )
    if dtype is not None and dtype not in INPUTS:
        types = ", ".join(str(one).removeprefix("torch.") for one in INPUTS)
        raise StoreError(f"{path}: dtype must be a float type of torch ({types}), got {dtype!r}")
    if check not in CHECKS:
        raise StoreError(f"{path}: check must be {' or '.join(map(repr, CHECKS))}, got {check!r}")
    if not Path(path).exists():
        raise FileFormatError(f"{path}: no such file or folder; nothing is downloaded")


def _open(source: Path, *, has_model: bool, manifest: ManifestLike, device: torch.device) -> TensorFile:
    """The file under the names of the model: of gpt-oss in any layout, and of a GGUF file whose model is to be made."""
    file = open_tensors(source)
    with on_failure(file.close):
        if holds_gpt_oss(file):
            require_transformers(str(source))
            return GptOssTensors(file, manifest, device)
        if not isinstance(file, GGUFTensors) or has_model:
            return file
        file.close()
        return GGUFModel(source)


def _read_folder(source: Path, file: TensorFile, *, has_model: bool) -> tuple[dict[str, Any] | None, Plan | None]:
    """The config of a model, and its plan where bitplan packed it; weights alone have neither."""
    if file.folder != source or isinstance(file, GptOssTensors):
        return read_config(file.folder), None
    if has_model and not (source / CONFIG).is_file():
        return None, None
    if not source.is_dir():
        raise FileFormatError(
            f"{source}: is a file of weights, which does not say what model they are of; give the folder that "
            "`bitplan quantize` wrote, a GGUF file, or your own model as model=..."
        )
    config = read_config(source)
    return config, None if isinstance(file, SchemeTensors) else read_packed_plan(source, config)


def empty_model(folder: Path, config: Mapping[str, Any], dtype: torch.dtype | None, device: torch.device) -> nn.Module:
    """The model of a folder's config; its parameters lie on meta, its computed buffers on the device."""
    model_dtype = dtype or _stored_type(config, folder / CONFIG)
    model = describe_files.empty_model(folder, model_dtype, ties=False, remote_code=remote_code_allowed())
    with silence_transformers():
        with foreign_faults(FileFormatError, f"{folder / CONFIG}: no model can be made of it"):
            _compute_buffers(model, device)
        if model.can_generate():  # type: ignore[operator]
            read_generation_config(model, folder)
    return model


def _stored_type(config: Mapping[str, Any], where: Path) -> torch.dtype:
    """The type in which the model was saved, by its config; float32 where the config names none."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(dtype).removeprefix("torch.")
    if name not in ("float16", "bfloat16", "float32", "float64"):
        raise FileFormatError(f"{where}: dtype: expected float16, bfloat16, float32 or float64, got {show(dtype)}")
    return torch_dtype(name)


def _compute_buffers(model: Any, device: torch.device) -> None:
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, local = name.rpartition(".")
        model.get_submodule(owner)._buffers[local] = torch.empty_like(buffer, device="cpu")
    for name in computed_parameters(model):
        owner, _, local = name.rpartition(".")
        computed = torch.empty_like(model.get_parameter(name), device="cpu")
        model.get_submodule(owner)._parameters[local] = nn.Parameter(computed, requires_grad=False)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta:
            tensor._is_hf_initialized = True  # it is read from the file: transformers need not fill it
    model.initialize_weights()
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, local = name.rpartition(".")
        model.get_submodule(owner)._buffers[local] = buffer.to(device)


def plain_types(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """The type of each tensor where it is not packed: `dtype`, or its own; float32 where transformers insists."""
    types = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    wide: Mapping[str, torch.dtype] = {}
    if hasattr(model, "_get_dtype_plan"):
        wide = model._get_dtype_plan(dtype or model.dtype)  # type: ignore[operator]
    for name, kind in types.items():
        if kind.is_floating_point:
            types[name] = next((type_ for pattern, type_ in wide.items() if re.search(pattern, name)), dtype or kind)
    return types


def _check_layers(model: nn.Module, assignment: Assignment, file: TensorFile, where: str) -> None:
    """Refuse packed tensors whose layer or format has no packed layer; one error lists them all."""
    packed: dict[str, set[str]] = {}
    faults = []
    sources = {recipe.targets[0]: recipe for recipe in assignment.recipes}
    sources |= {target: sources[source] for target, source in assignment.ties.items() if source in sources}
    for target, recipe in sources.items():
        fmt = recipe.format_in(file)
        if fmt is None:
            continue
        owner, _, local = target.rpartition(".")
        reason = format_fault(get_format(fmt)) or why_not_packed_in(model, target)
        if reason is not None:
            faults.append(f"{target} ({fmt}): {reason}")
        packed.setdefault(owner, set()).add(local)
    for owner, locals_ in packed.items():
        if missing := lacking(model.get_submodule(owner), locals_):
            faults.append(f"{owner}: {listed(missing)} is not packed and {listed(sorted(locals_))} is")
    if faults:
        raise FileFormatError(
            f"{where}: {len(faults)} packed tensors have no packed layer: {shortened(faults)}; "
            "quantize the model again and leave them as they are",
            settings={"keep": "NAME"},
        )


def _waits(recipe: TensorRecipe, plan: Plan | None) -> bool:
    """Whether the plan says that a tensor lies in the host's memory while the GPU computes."""
    return plan is not None and all(
        piece.name in plan and plan[piece.name].place is not None for piece in recipe.pieces
    )


def _needed_bytes(model: nn.Module, assignment: Assignment, file: TensorFile, dtypes: Dtypes, plan: Plan | None) -> int:
    """The bytes that the model will take on its device: packed tensors in their format, others in their type."""
    tensors = model.state_dict()
    total = 0
    for recipe in assignment.recipes:
        fmt = recipe.format_in(file)
        if fmt is not None and _waits(recipe, plan):
            continue
        if fmt is not None:
            total += sum(get_format(fmt).nbytes(file.spec(piece.name).shape) for piece in recipe.pieces)
        else:
            total += sum(tensors[name].numel() * dtypes[name].itemsize for name in recipe.targets)
    return total


def _check_room(where: str, needed: int, device: torch.device) -> None:
    """Refuse a model that the GPU has no memory for, before anything is read."""
    if device.type != "cuda":
        return
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if needed > free:
        raise StoreError(f"{where}: takes {needed} bytes, and {device} has {free} free; nothing was read")


def _refuse_bad_numbers(file: TensorFile) -> None:
    """Raise what `bitplan verify` finds in the file's numbers: the first finding, and how many more."""
    findings = deep_check(file.rules, file.stored) if isinstance(file, GptOssTensors) else deep_check(None, file)
    if findings:
        first = findings[0]
        more = f" (and {counted(len(findings) - 1, 'more finding')})" if len(findings) > 1 else ""
        raise FileFormatError(f"{file.path}: {first.where}: {first.message}{more}")


def check_numbers(file: TensorFile, name: str, item: Tensor | Encoded) -> None:
    """Refuse NaN and infinity in scales and norms: these are few, and a bad one spoils all that it multiplies."""
    pieces: Iterable[Tensor]
    if isinstance(item, Encoded) and item.fmt.scales is not None and item.scales is not None:
        load, base = item.fmt.scales.load, item.base
        rows = (item.scales,) if base is not None else item.scales.flatten().split(_CHECKED_AT_ONCE)
        pieces, noun = (load(some, base) for some in rows), f"scales of {item.fmt.name}"
    elif isinstance(item, Encoded) and isinstance(item.fmt, GgufBlocks):
        pieces, noun = (item.fmt.stored_scales(item.data),), f"scales of {item.fmt.name}"
    elif isinstance(item, Tensor) and item.is_floating_point() and guess_role(name) == "norm":
        pieces, noun = (item.float() if item.itemsize == 1 else item,), "numbers of a norm"
    else:
        return
    bad = total = 0
    for numbers in pieces:
        bad, total = bad + int((~numbers.isfinite()).sum()), total + numbers.numel()
    if bad:
        raise FileFormatError(
            f"{file.path}: {name!r}: {bad} of {total} {noun} are NaN or infinite; "
            "mend the checkpoint, or download it again"
        )


def check_norms(file: TensorFile) -> None:
    """Run `check_numbers` on the plain norms alone, for a caller that lets transformers read them."""
    for name, spec in file.specs.items():
        if guess_role(name) == "norm" and (not spec.encoded or get_format(spec.format).is_cast):
            item = file.read(name)
            check_numbers(file, name, item.data if isinstance(item, Encoded) else item)


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_values(
    model: nn.Module,
    assignment: Assignment,
    file: TensorFile,
    device: torch.device,
    dtypes: Dtypes,
    *,
    plan: Plan | None,
    may_round: bool,
) -> dict[str, Value]:
    """Every tensor of the model by name, on the device; tied names give the same object.

    plan        which packed tensors lie in the host's memory instead
    may_round   plain numbers that their type cannot hold are rounded; otherwise they are an error
    """
    values: dict[str, Value] = {}
    tensors = model.state_dict()
    with on_failure(values.clear):  # the traceback keeps this frame, and would keep the memory
        for recipe in assignment.recipes:
            if recipe.format_in(file) is not None:
                waits, transposed = _waits(recipe, plan), file.spec(recipe.pieces[0].name).transposed
                values[recipe.targets[0]] = weight = PackedWeight(
                    _read_packed(recipe, file, torch.device("cpu") if waits else device), transposed=transposed
                )
                if waits:
                    wait_in_host(weight, device)
                del weight  # a failure later leaves nothing
                continue
            for name, tensor in read_plain(recipe, file, model).items():
                if name not in tensors or tuple(tensor.shape) != tuple(tensors[name].shape):
                    raise FileFormatError(
                        f"{file.path}: {listed([piece.name for piece in recipe.pieces], 3)} give {name!r} of shape "
                        f"{tuple(tensor.shape)}, which is not the model's"
                    )
                _check_held(str(file.path), name, tensor, dtypes[name], may_round=may_round)
                values[name] = tensor.to(device=device, dtype=dtypes[name])
        return values | {target: values[source] for target, source in assignment.ties.items()}


def _read_packed(recipe: TensorRecipe, file: TensorFile, device: torch.device) -> Encoded:
    """Read a packed tensor; the pieces that it consists of in the file become rows of one encoding."""
    if recipe.is_one and recipe.pieces[0].item is None:
        item = file.read(recipe.pieces[0].name)
        assert isinstance(item, Encoded)
        check_numbers(file, recipe.pieces[0].name, item)
        return item.to(device)
    shape = shape_of(recipe.pieces)
    assert shape is not None  # `assign` has refused pieces that leave holes
    fmt = get_format(file.spec(recipe.pieces[0].name).format)
    parts = {
        part: torch.empty(size, dtype=dtype, device=device) for part, (dtype, size) in fmt.part_shapes(shape).items()
    }
    for piece in recipe.pieces:
        item = file.read(piece.name)
        assert isinstance(item, Encoded)
        check_numbers(file, piece.name, item)
        for part, numbers in item.parts.items():
            parts[part][piece.place].copy_(numbers)
    return Encoded(fmt, shape, **parts)


def read_plain(recipe: TensorRecipe, file: TensorFile, model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model that a recipe makes, in the types of the file."""
    tensors = []
    for piece in recipe.pieces:
        item = file.read(piece.name)
        tensor = item.data if isinstance(item, Encoded) else item
        check_numbers(file, piece.name, tensor)
        tensors.append(tensor)
    if recipe.converter is not None:
        return convert_plain(recipe, tensors, model)
    if recipe.is_one and recipe.pieces[0].item is None:
        return {recipe.targets[0]: tensors[0]}
    shape = shape_of(recipe.pieces)
    assert shape is not None
    out = tensors[0].new_empty(shape)
    for piece, tensor in zip(recipe.pieces, tensors, strict=True):
        out[piece.place].copy_(tensor)
    return {recipe.targets[0]: out}


def _check_held(where: str, name: str, numbers: Tensor, dtype: torch.dtype, *, may_round: bool) -> None:
    """Refuse numbers that `dtype`, the model's type, cannot hold; floats may be rounded."""
    if numbers.is_floating_point() != dtype.is_floating_point:
        raise FileFormatError(f"{where}: {name!r} is {numbers.dtype}, and the model's is {dtype}; load its own file")
    if may_round or torch.promote_types(numbers.dtype, dtype) == dtype:
        return
    lost = int(((numbers.to(dtype).to(numbers.dtype) != numbers) & ~numbers.isnan()).sum())
    if lost:
        raise FileFormatError(
            f"{where}: {name!r} is {numbers.dtype}, and {lost} of {numbers.numel()} numbers do not fit {dtype}, the "
            f"model's type; pass dtype={numbers.dtype} to keep them, or dtype={dtype} to round them"
        )


# ---- into the model --------------------------------------------------------------------------------------------------


def make_layers(
    layer_of: Callable[[str], nn.Module],
    values: Mapping[str, Value],
    parameters: Mapping[str, nn.Parameter],
    *,
    strategy: str,
    cache: TileCache | None,
    dtypes: Dtypes,
) -> dict[str, nn.Module]:
    """The packed layers, each by the name of the layer that it replaces. A strategy that cannot run is an error here.

    layer_of   gives the layer of a name, which is to be replaced
    """
    packed: dict[str, dict[str, PackedWeight]] = {}
    for name, value in values.items():
        if isinstance(value, PackedWeight):
            owner, _, local = name.rpartition(".")
            packed.setdefault(owner, {})[local] = value
    layers: dict[str, nn.Module] = {}
    for owner, weights in packed.items():
        dtype = dtypes[f"{owner}.{next(iter(weights))}"]
        layers[owner] = layer = packed_layer(
            layer_of(owner),
            weights,
            plain={
                name.removeprefix(f"{owner}."): one for name, one in parameters.items() if name.startswith(f"{owner}.")
            },
            dtype=dtype,
            name=owner,
            strategy=strategy,
            cache=cache,
        )
        explain = getattr(layer, "explain", None)
        if strategy != "auto" and explain is not None:
            explain(1, dtype)
    return layers


def make_parameters(model: nn.Module, values: Mapping[str, Value]) -> dict[str, nn.Parameter]:
    """Make Parameters of the plain tensors, by name; tied names get the same object."""
    by_value: dict[int, nn.Parameter] = {}
    parameters: dict[str, nn.Parameter] = {}
    for name, before in model.named_parameters(remove_duplicate=False):
        value = values.get(name)
        if isinstance(value, Tensor):
            grad = before.requires_grad and value.is_floating_point()
            parameters[name] = by_value.setdefault(id(value), nn.Parameter(value, requires_grad=grad))
    return parameters


def place_all(
    model: nn.Module,
    values: Mapping[str, Value],
    parameters: Mapping[str, nn.Parameter],
    layers: Mapping[str, nn.Module],
) -> None:
    """Put the loaded parameters, buffers and packed layers into the model. Nothing can fail here."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, value in values.items():
        owner, _, local = name.rpartition(".")
        if name in parameters:
            modules[owner]._parameters[local] = parameters[name]
        elif isinstance(value, Tensor):
            modules[owner]._buffers[local] = value
    same: dict[int, nn.Module] = {}  # a module in two places becomes one layer in both
    for owner, layer in layers.items():
        same.setdefault(id(modules[owner]), layer)
    for owner in layers:
        model.set_submodule(owner, same[id(modules[owner])])


def check_filled(model: nn.Module, where: str) -> None:
    """Raise if a tensor was left on meta."""
    unfilled = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if unfilled:
        raise StoreError(
            f"{where}: {len(unfilled)} tensors were not loaded, and are still on the meta device: {listed(unfilled)}; "
            "load the files that have them"
        )

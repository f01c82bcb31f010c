"""save_packed: a packed model as the folder or file that `bitplan quantize` writes.

A model that was loaded from a checkpoint is saved under the checkpoint's own names, files and types, so that loading
and saving give the same bytes. A model that was packed in memory (`apply_plan`) is saved under its own names, which
load as well.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from bitplan.base.errors import ArgumentError, BitplanError, StoreError
from bitplan.files.certificate import certificate_of, earlier_certificate
from bitplan.files.gpt_oss.config import with_quantization
from bitplan.files.models.save_load import own_tensors, write_model
from bitplan.files.open_files import container_for, open_tensors
from bitplan.files.packed_folder import (
    CONFIG,
    SHARD_BYTES,
    FolderContents,
    Shard,
    check_packed_output,
    cut_shards,
    packed_config,
    side_files,
    write_packed_folder,
)
from bitplan.files.safetensors_tensors import NativeTensors
from bitplan.files.tensor_file import TensorFile, TensorSpec
from bitplan.files.tensor_recipes import TensorRecipe, computed_parameters
from bitplan.formats import Encoded, get_format
from bitplan.formats.elements import dtype_name
from bitplan.formats.encoded import EncodedModule
from bitplan.packed.checkpoints.gpt_oss_tensors import GptOssTensors
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.quant_embedding import QuantEmbedding
from bitplan.packed.rounded_inputs import inputs_of, shown_inputs
from bitplan.packed.rounded_kv import kv_of
from bitplan.plan.format_choices import choose_formats
from bitplan.plan.plan import Choice, Plan, Planned
from bitplan.plan.structure.families import guess_role

_HELD = "as the model holds it"
_BLOCK = 32  # numbers of mxfp4 that share a scale


def save_packed(model: nn.Module, path: str | Path, *, force: bool = False, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model whose weights are packed to a folder, or any model to one file (.safetensors, .gguf, .json).

    A file holds what `apply_plan` or `morph_model` packed under the model's own names, and the rest as it is.

    force        the file may exist, or the folder: files of a model there are replaced, all others stay
    shard_bytes  the most that a file of weights may hold; a model that was loaded keeps its files

    Tokenizer and generation config are copied from the folder that the model was loaded from, where there is one.
    """
    if not isinstance(model, nn.Module) or not isinstance(path, str | Path):
        raise ArgumentError(
            "save_packed(model, path): model must be a torch.nn.Module and path a str or Path, "
            f"got a {type(model).__name__} and a {type(path).__name__}"
        )
    is_packed = any(isinstance(module, PackedWeight) for module in model.modules())
    container = container_for(path)
    if container is None and not is_packed:
        raise StoreError(f"{path}: nothing in this {type(model).__name__} is packed; apply_plan packs it")
    if hasattr(model, "peft_config"):
        raise StoreError(
            f"{path}: the model has adapters; save them with its save_pretrained, and pack the model alone"
        )
    if container is not None:
        container.check_output(path, inputs=(), force=force)
        write_model(model, path, *_loaded_from(model))
        if (rounded := shown_inputs(model)) is not None:
            warnings.warn(
                f"{path}: a file does not say that layers round their inputs to {rounded}, as a folder does; load it "
                f"with load_packed(..., inputs={rounded!r}), or save a folder where layers differ",
                stacklevel=2,
            )
        return
    source = remembered(model)
    saved, tied = _items(model, source)
    inputs = [] if source is None or source.folder is None else _files(source)
    check_packed_output(path, inputs=inputs, force=force, any_folder=True)
    config, beside = _config(model, source), {} if (folder := _folder_of(model)) is None else side_files(folder)
    plan: Plan | None = None
    if source is None or not source.is_gpt_oss:
        plan = _plan(saved, source).with_inputs(_inputs(model, source))
        config = None if config is None else packed_config(config, plan, kv_of(model))
    else:  # in Hugging Face's layout; `bitplan gpt-oss convert` brings it into the others
        saved = {part.name: part for one in saved.values() for part in _in_gpt_oss_layout(one)}
        if source.folder is not None and config is source.config:
            beside, config = beside | {CONFIG: source.folder / CONFIG}, None  # as it is, to the byte
        else:
            config = with_quantization(config or {}, packed=True)
    shards = _shards(saved, tied, source, shard_bytes)

    def write(writer: Any, tensors: Any) -> None:
        for spec in tensors:
            writer.write(spec.name, saved[spec.name].read())

    _, files = _loaded_from(model)
    written = plan or choose_formats(saved, {}, where=str(path))
    origin = folder or Path(type(model).__name__)
    certificate = certificate_of(written, origin, files, held=True, config=config, holds_plan=plan is None)
    earlier = None if folder is None else earlier_certificate(folder)
    contents = FolderContents(shards, config, plan, beside, certificate=certificate, earlier=earlier, source=folder)
    write_packed_folder(path, contents, write, force=force, keeps_tokenizer=True)


def adapt_to_transformers(model: nn.Module) -> None:
    """Replace the methods of transformers that assume that every weight is a plain tensor.

    transformers' save_pretrained would write packed parts under names that nothing reads, and its models take their
    device and type from their first parameter.
    """
    methods: dict[str, Callable[..., Any]] = {
        "save_pretrained": _save_pretrained,
        "resize_token_embeddings": _resize_token_embeddings,
        "get_expanded_tied_weights_keys": _tied_plain_weights,
    }
    for name, ours in methods.items():
        if hasattr(model, name):
            setattr(model, name, functools.partial(ours, model))  # which can be pickled, as a method cannot
    for part in model.modules():  # a model and its body, where norms have no weights (OLMo 1) and all else is packed
        if hasattr(type(part), "save_pretrained") and next(part.parameters(), None) is None:
            setattr(part, "parameters", functools.partial(_parameters_or_type, part))  # noqa: B010 (mypy)


def _parameters_or_type(model: nn.Module, recurse: bool = True) -> Iterator[Tensor]:
    """The parameters; where there is none an empty tensor of the model's device and type, for code that asks these."""
    parameters = type(model).parameters(model, recurse)
    tables = (module for module in model.modules() if isinstance(module, QuantEmbedding))
    stand_ins = (torch.empty(0, dtype=table.dtype, device=table.weight.device) for table in tables)
    first = next(parameters, None)
    yield from itertools.islice(stand_ins, 1) if first is None else itertools.chain((first,), parameters)


def _resize_token_embeddings(model: Any, new_num_tokens: int | None = None, *args: Any, **options: Any) -> Any:
    """Raise: rows cannot be added to packed tables. In place of transformers' own method."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    packed = [layer for layer in layers if isinstance(getattr(layer, "weight", None), PackedWeight)]
    if not packed:
        return type(model).resize_token_embeddings(model, new_num_tokens, *args, **options)
    rows = packed[0].weight.shape[0]
    if new_num_tokens in (None, rows) and not args and not options.get("pad_to_multiple_of"):
        return layers[0]
    raise StoreError(
        f"resize_token_embeddings({new_num_tokens}): {packed[0].name} is packed ({packed[0].weight.fmt.name}) and "
        f"keeps its {rows} rows; resize the unpacked model, then pack it"
    )


def _tied_plain_weights(model: Any, *args: Any, **options: Any) -> dict[str, str]:
    """The pairs that `tie_weights` shall tie: packed layers that are tied share their parts since they were loaded."""
    layers = model.named_modules()
    packed = {f"{path}.weight" for path, layer in layers if isinstance(getattr(layer, "weight", None), PackedWeight)}
    pairs = type(model).get_expanded_tied_weights_keys(model, *args, **options)
    return {target: source for target, source in pairs.items() if packed.isdisjoint((target, source))}


def _save_pretrained(model: nn.Module, save_directory: str | Path, **options: Any) -> None:
    """Save a packed model by `save_packed`, in place of transformers' method; the folder may exist."""
    unknown = sorted(set(options) - {"safe_serialization", "max_shard_size"})
    if unknown or not isinstance(options.get("max_shard_size", 0), int):
        raise StoreError(
            f"save_pretrained: bitplan.save_packed writes a packed model, and takes no {unknown or 'units'}; "
            "call bitplan.save_packed(model, folder)"
        )
    save_packed(model, save_directory, force=True, shard_bytes=options.get("max_shard_size") or SHARD_BYTES)


# ---- tensors, plan and files to write --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SavedTensor(TensorSpec):
    """A tensor of the file, and a function that gives its numbers when they are written."""

    _: KW_ONLY
    read: Callable[[], Tensor | Encoded]


def _in_gpt_oss_layout(one: _SavedTensor) -> list[_SavedTensor]:
    """Experts in mxfp4 as two tensors of bytes, blocks and scales; others as they are."""
    if not one.encoded:
        return [one]
    encoded = one.read()
    assert isinstance(encoded, Encoded)
    blocks = encoded.parts["data"].unflatten(-1, (-1, _BLOCK // 2))
    scales = encoded.parts["scales"]
    return [_saved(f"{one.name}_blocks", blocks, None), _saved(f"{one.name}_scales", scales, None)]


def _items(model: nn.Module, source: LoadedFrom | None) -> tuple[dict[str, _SavedTensor], dict[str, str]]:
    """Every tensor of the file by name, and the names that share one."""
    held = own_tensors(model)
    items = {name: item if isinstance(item, Tensor) else item.encoded for name, item in held.items()}
    objects = {name: id(item) for name, item in held.items()}
    turned = {name for name, item in held.items() if isinstance(item, EncodedModule) and item.transposed}
    recipes = {} if source is None else {target: recipe for recipe in source.recipes for target in recipe.targets}
    saved: dict[str, _SavedTensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name in set(computed_parameters(model)).difference(recipes):
        del items[name]
    for name in sorted(items, key=lambda name: name not in recipes):
        if objects[name] in first and name not in recipes:
            tied[name] = first[objects[name]]
            continue
        first.setdefault(objects[name], name)
        recipe = recipes.get(name)
        if recipe is None:
            saved[name] = _saved(name, items[name], None, transposed=name in turned)
            continue
        _require_pieces(recipe)
        for piece in recipe.pieces:
            dtype = None if source is None else source.dtypes.get(piece.name)
            part = items[name] if recipe.is_one and piece.item is None else _cut(items[name], piece.place, piece.shape)
            saved[piece.name] = _saved(piece.name, part, dtype, transposed=name in turned)
    if hasattr(model, "all_tied_weights_keys"):
        tied = {}  # its config says which tensors are tied
    if source is not None:
        tied |= {alias: name for alias, name in source.tied.items() if alias not in saved}
        for alias in source.tied:
            saved.pop(alias, None)
    return saved, tied


def _require_pieces(recipe: TensorRecipe) -> None:
    if recipe.converter is not None:
        raise StoreError(
            f"{recipe.targets[0]!r} was made of {len(recipe.pieces)} tensors by transformers' own steps, which "
            "save_packed does not undo; the folder that the model came from still holds them"
        )


def _cut(item: Tensor | Encoded, index: tuple[int | slice, ...], shape: tuple[int, ...]) -> Tensor | Encoded:
    if isinstance(item, Tensor):
        return item[index]
    return Encoded(item.fmt, shape, **{name: part[index] for name, part in item.parts.items()})


def _saved(name: str, item: Tensor | Encoded, stored: torch.dtype | None, *, transposed: bool = False) -> _SavedTensor:
    if isinstance(item, Encoded):
        return _SavedTensor.of(name, item.shape, item.fmt, read=lambda: item, transposed=transposed)
    dtype = item.dtype
    if stored is not None and stored != dtype and _holds(item, stored):
        dtype = stored
    return _SavedTensor.of(name, tuple(item.shape), dtype=dtype, read=lambda: item.detach().to(dtype))


def _holds(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether `dtype`, the type in the file, holds all numbers of the tensor exactly."""
    return bool(((tensor.to(dtype).to(tensor.dtype) == tensor) | tensor.isnan()).all())


def _plan(saved: Mapping[str, _SavedTensor], source: LoadedFrom | None) -> Plan:
    """The plan that the model was packed by; tensors that have changed since get new entries."""
    planned = {} if source is None or source.plan is None else source.plan.entries
    stays = choose_formats({name: one for name, one in saved.items() if not one.encoded}, {})
    entries = {}
    for name, one in saved.items():
        if one.encoded:
            entry = Planned(Choice(one.format, _HELD, cause="held"), one.shape, guess_role(name))
        else:
            entry = stays.entries[name]
            choice = Choice(entry.choice.format, _HELD, cause="held")
            entry = Planned(choice, entry.shape, entry.role, stored=entry.stored)
        before = planned.get(name)
        same = before is not None and _layout(before) == _layout(entry)
        entries[name] = before if before is not None and same else entry
    if source is not None and source.plan is not None:
        entries |= {alias: planned[alias] for alias in source.tied if alias in planned}
    return Plan(entries, padding="none" if source is None or source.plan is None else source.plan.padding)


def _inputs(model: nn.Module, source: LoadedFrom | None) -> dict[str, str | None]:
    """The format to which products with each packed weight round their inputs, by the file's names."""
    formats = inputs_of(model)
    recipes = () if source is None else source.recipes
    pieces = {
        piece.name: formats[target]
        for one in recipes
        for target in one.targets
        if target in formats
        for piece in one.pieces
    }
    return formats | pieces


def _layout(entry: Planned) -> tuple[Any, ...]:
    """Type and shape, which decide a tensor's bytes. A plain tensor's type is in `stored` or in `format`."""
    fmt = get_format(entry.choice.format)
    plain = entry.stored or (dtype_name(fmt.storage) if fmt.is_cast else None)
    return (plain or fmt.name, tuple(entry.shape or ()))


def _shards(
    tensors: Mapping[str, TensorSpec], tied: Mapping[str, str], source: LoadedFrom | None, shard_bytes: int
) -> list[Shard]:
    if source is None or {name for names in source.shards.values() for name in names} != set(tensors):
        return cut_shards(tensors.values(), tied, shard_bytes)
    return [
        Shard(
            file,
            tuple(tensors[name] for name in names),
            {alias: name for alias, name in tied.items() if name in names},
            source.metadata[file],
        )
        for file, names in source.shards.items()
    ]


def _folder_of(model: nn.Module) -> Path | None:
    """The folder that bitplan or transformers loaded a model from, if any."""
    source = remembered(model)
    if source is not None and source.folder is not None:
        return source.folder
    name = getattr(model, "name_or_path", None)
    return Path(name) if isinstance(name, str) and name and Path(name).is_dir() else None


def _loaded_from(model: nn.Module) -> tuple[Path | None, list[Path]]:
    """The folder that a model was loaded from, and the files of its weights, none where they cannot be read."""
    folder = _folder_of(model)
    with suppress(BitplanError, OSError):
        if folder is not None:
            with open_tensors(folder) as file:
                return folder, file.files
    return folder, []


def _config(model: nn.Module, source: LoadedFrom | None) -> Mapping[str, Any] | None:
    """The original config.json if the model's config has not changed since loading; else the model's own."""
    now = config_of(model)
    if source is not None and source.config is not None and now == source.config_then:
        return source.config
    if now is None:
        return None
    names = {"architectures": [type(model).__name__]}
    return names | {key: value for key, value in now.items() if value is not None} | names


def _files(source: LoadedFrom) -> list[Path]:
    assert source.folder is not None
    return [source.folder / name for name in source.shards]


# ---- what a loaded model remembers of its checkpoint -----------------------------------------------------------------

_ATTRIBUTE = "_bitplan_checkpoint"


@dataclass(frozen=True)
class LoadedFrom:
    """Names, files and types of a checkpoint; `config` is its document, `config_then` the model's as it was loaded.

    `is_gpt_oss`: it is saved in Hugging Face's layout of gpt-oss, whichever it was loaded from.
    """

    folder: Path | None
    config: Mapping[str, Any] | None
    config_then: Mapping[str, Any] | None
    plan: Plan | None
    recipes: tuple[TensorRecipe, ...]
    dtypes: Mapping[str, torch.dtype]  # of the plain tensors in the file
    shards: Mapping[str, tuple[str, ...]]  # file -> its tensors
    metadata: Mapping[str, Mapping[str, str]]  # file -> its metadata
    tied: Mapping[str, str]
    is_gpt_oss: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copied model shares this object, which never changes."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model loses this object; save_packed then uses the model's own names."""
        return _nothing, ()


def _nothing() -> None:
    return None


def forget(model: nn.Module) -> None:
    """Undo what makes a model packed for transformers: methods that were replaced, and where it was loaded from."""
    methods = ("save_pretrained", "resize_token_embeddings", "get_expanded_tied_weights_keys")
    for name in (_ATTRIBUTE, *methods, "hf_quantizer"):
        model.__dict__.pop(name, None)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def remembered(model: nn.Module) -> LoadedFrom | None:
    source: LoadedFrom | None = getattr(model, _ATTRIBUTE, None)
    return source


def remember(
    model: nn.Module,
    file: TensorFile,
    recipes: tuple[TensorRecipe, ...],
    *,
    folder: Path | None,
    config: Mapping[str, Any] | None,
    plan: Plan | None,
) -> None:
    """Note in a model what it must know of this open file."""
    shards: dict[str, tuple[str, ...]] = {}
    metadata: dict[str, Mapping[str, str]] = {}
    stored = file.stored if isinstance(file, GptOssTensors) else file
    if isinstance(stored, NativeTensors):
        for shard in stored.shards:
            shard_name = stored.shard_name(shard).as_posix()
            shards[shard_name] = tuple(name for name in stored.specs if stored.shard_of(name) == shard)
            metadata[shard_name] = stored.metadata_of(shard)
    dtypes = {name: spec.torch_dtype for name, spec in file.specs.items() if not spec.encoded}
    if isinstance(file, GptOssTensors) and file.kind != "hf":
        dtypes = dict.fromkeys(dtypes, torch.bfloat16)  # the layout's own type
    source = LoadedFrom(
        folder=folder,
        config=config,
        config_then=config_of(model),
        plan=plan,
        recipes=recipes,
        dtypes=dtypes,
        shards=shards,
        metadata=metadata,
        tied=dict(file.tied),
        is_gpt_oss=isinstance(file, GptOssTensors),
    )
    setattr(model, _ATTRIBUTE, source)


def config_of(model: nn.Module) -> dict[str, Any] | None:
    """A model's config as a document; None where it has none."""
    config: Any = getattr(model, "config", None)
    return config.to_dict() if hasattr(config, "to_dict") else None

"""Decisions and refusals from a file's header and the files beside it, before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from bitplan.base.errors import FormatError, MeasureError, counted
from bitplan.base.records import check_input
from bitplan.files.open_files import container_for
from bitplan.files.packed_folder import plan_with_shapes
from bitplan.files.safetensors import INDEX_SUFFIX
from bitplan.formats import get_format
from bitplan.plan.format_choices import GGUF_SUBSTITUTES, Substitutes, Wanted, choose_formats
from bitplan.plan.names import ShellPatterns
from bitplan.plan.plan import Choice, Plan, Planned

if TYPE_CHECKING:
    from bitplan.files.tensor_file import TensorFile


_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_WEIGHT_FILES = (".safetensors", INDEX_SUFFIX)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a file of those that transformers reads tokenizers from."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def is_gguf(path: str | Path) -> bool:
    """Whether a file of this name belongs to the container of GGUF's formats, which holds config and tokenizer."""
    container = container_for(path)
    return container is not None and container.has_gguf_formats


def plan_of_stored(file: TensorFile, names: Sequence[str] | None = None) -> Plan:
    """A plan that leaves every tensor of a file, or those in `names`, in the format that it has there."""
    listed = (*file.specs, *file.tied) if names is None else names
    return choose_formats({name: file.spec(name) for name in listed}, {}, where=str(file.path))


def plan_for_file(
    file: TensorFile,
    formats: Wanted,
    *,
    keep: Sequence[str] = (),
    only: Sequence[str] = (),
    pad: bool = False,
    output: str | Path | None = None,
    substitutes: Substitutes | None = None,
    how_to_fill: str | Mapping[str, object] | None = MappingProxyType({"pad": "zero"}),
    packed_shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Plan:
    """The plan of `choose_formats` for a file that is to be written as `output`; rows that do not fit are refused.

    substitutes   what an engine holds in place of a format that does not fit
    packed_shapes  of tensors that lie transposed in the model's file: the shapes that they have where they are packed,
                   in a plan that is given, too; those that are not packed have the model's
    """
    ShellPatterns((*keep, *only)).check(file.specs, str(file.path))  # a tied name follows its tensor's
    gguf = output is not None and is_gguf(output)
    if isinstance(formats, Plan):
        formats = plan_with_shapes(formats, packed_shapes, packed_shapes)
    tensors = {name: file.spec(name) for name in (*file.specs, *file.tied)}
    shapes = {name: spec.shape_in_model for name, spec in tensors.items() if spec.transposed} | {**packed_shapes}
    tensors |= {name: replace(tensors[name], shape=shape) for name, shape in shapes.items()}
    plan = choose_formats(
        tensors,
        formats,
        keep=keep,
        only=only,
        pad=pad,
        gguf=gguf,
        substitutes=substitutes,
        where=str(file.path),
    )
    if gguf:
        plan = _wide_norms(plan)
    _check_rows(file, plan, how_to_fill, substitutes or GGUF_SUBSTITUTES, shapes)
    left = {name: file.spec(name) for name in shapes if not is_packed_by(plan, name)}
    plain = {
        name: spec.shape_in_model if plan.entries[name].stored is None else spec.shape for name, spec in left.items()
    }
    return plan_with_shapes(plan, plain, plain)


def is_packed_by(plan: Plan, name: str) -> bool:
    """Whether a plan packs a tensor: it is not packed already, and does not stay a plain type."""
    entry = plan.entries[name]
    return entry.stored is None and not get_format(entry.choice.format).is_cast


def _wide_norms(plan: Plan) -> Plan:
    """The plan with tensors of one axis in float32: llama.cpp takes norms and biases only so."""
    changed = dict(plan.entries)
    for name, entry in plan.entries.items():
        fmt = entry.stored or entry.choice.format
        if entry.shape is not None and len(entry.shape) == 1 and fmt in ("float16", "bfloat16"):
            reason = f"{entry.choice.reason}; one axis is float32 in GGUF"
            choice = Choice("float32", reason, cause=entry.choice.cause)
            changed[name] = Planned(choice, entry.shape, entry.role, entry.part)
    return Plan(changed, padding=plan.padding)


def _check_rows(
    file: TensorFile,
    plan: Plan,
    how_to_fill: str | Mapping[str, object] | None,
    substitutes: Substitutes,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Refuse rows that are not whole blocks of their format, unless the plan fills them.

    how_to_fill   what the message tells the user to do, or to set, so that rows are filled; None: nothing fills them
    """
    if plan.pad is not None:
        return
    faults = []
    for name, entry in plan.entries.items():
        spec, fmt = file.spec(name), get_format(entry.choice.format)
        if entry.stored is not None or entry.part is not None or (spec.encoded and spec.format == fmt.name):
            continue
        shape = shapes.get(name, spec.shape)
        cols = fmt.matrix_shape(shape)[1]
        if fmt.padded_cols(cols) != cols:
            faults.append((name, fmt, cols, shape))
    if faults:
        name, fmt, cols, shape = faults[0]
        more = f" (nor {counted(len(faults) - 1, 'other tensor')})" if len(faults) > 1 else ""
        nearest = (name for name in substitutes.of(fmt.name) if get_format(name).padded_cols(cols) == cols)
        settings = dict(how_to_fill) if isinstance(how_to_fill, Mapping) else {}
        ways = [
            *(f"{other} holds it" for other in list(nearest)[:1]),
            *([f"{how_to_fill} fills the last block"] if isinstance(how_to_fill, str) else []),
            "the last block can be filled, or the tensor left as it is" if settings else "it can be left as it is",
        ]
        raise FormatError(
            f"{file.path}: {name}: {fmt.name} has blocks of {fmt.block.cols}, and {cols} of shape {shape} is not a "
            f"multiple{more}; {', '.join(ways)}",
            settings=settings | {"keep": name},
        )


def check_model_source(source: Path, config: Path | None) -> Path:
    """The folder with config.json and tokenizer; both must exist, except for GGUF, which contains them."""
    if not source.exists():
        raise MeasureError(f"{source}: no such file or folder; nothing is downloaded, so give a path on this machine")
    if not source.is_dir():
        check_input(source)
    if source.is_file() and not is_gguf(source) and not source.name.endswith(_WEIGHT_FILES):
        raise MeasureError(
            f"{source}: expected a folder with config.json, a .safetensors or a .gguf file, "
            f"got a {source.suffix or 'nameless'} file"
        )
    folder = config or (source if source.is_dir() else source.parent)
    if config is not None and is_gguf(config) and not config.is_file():
        raise MeasureError(
            f"{config}: no such file; a folder with config.json or a GGUF file is needed", settings={"config": None}
        )
    if is_gguf(config or source):
        return folder
    lone = source.is_file() or config is not None
    where = f"{source}: in {folder.resolve()}" if source.is_file() and config is None else f"{folder}:"
    if not (folder / "config.json").is_file():
        hint = (
            "give its folder, or a GGUF file of the model"
            if lone
            else "so not a Hugging Face model; a GGUF file is given by its own path"
        )
        raise MeasureError(f"{where} no config.json, {hint}", settings={"config": None} if lone else {})
    if not lone and not any(source.glob("*.safetensors")) and not any(source.glob(f"*{INDEX_SUFFIX}")):
        raise MeasureError(f"{source}: no .safetensors file; other weight files (pickles) are not opened")
    if not has_tokenizer(folder):
        alone = source.is_file() and config is None
        hint = ", or give the folder of that model" if alone else ""
        raise MeasureError(
            f"{where} the model has no tokenizer ({', '.join(_TOKENIZERS)}); "
            f"copy that of the model it was made from into the folder{hint}",
            settings={"config": None} if alone else {},
        )
    return folder

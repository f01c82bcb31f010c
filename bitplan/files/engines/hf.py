"""To a plain Hugging Face folder: numbers in float32, float16 or bfloat16, for whatever reads those.

From a folder that `bitplan quantize` packed, or a GGUF file, with config and tokenizer. A packed tensor becomes the
type that is asked for, else that of the model's config, else bfloat16; a plain one keeps its type unless one is asked
for.
"""

from __future__ import annotations

from typing import Any

from bitplan.base.errors import StoreError
from bitplan.base.records import on_failure
from bitplan.files.engines.folder import PLAIN, FolderExport, FolderSource, is_quantized, open_folder
from bitplan.files.engines.targets import ExportRequest, OutputTensor
from bitplan.files.tensor_file import TensorSpec
from bitplan.formats import Format, get_format

TARGET = "hf"


def prepare(request: ExportRequest) -> FolderExport:
    """Everything that can be refused is, before a weight is read."""
    if isinstance(request.formats, str | Format) and get_format(request.formats).name not in PLAIN:
        raise StoreError(
            f"{request.output}: a plain folder holds {', '.join(PLAIN)}, not {get_format(request.formats).name}; "
            "`bitplan quantize` packs one"
        )
    source = open_folder(request, TARGET)
    with on_failure(source.file.close):
        wide = _wide(request, source)
        layers = [_layer(source, name, wide) for name in source.file.specs]
    return FolderExport(
        request, TARGET, source, layers, _config(source.config, wide), lambda encoded, _layer, _where: [encoded.data]
    )


def _wide(request: ExportRequest, source: FolderSource) -> Format:
    """What packed tensors become."""
    if isinstance(request.formats, str | Format):
        return get_format(request.formats)
    return source.wide


def _layer(source: FolderSource, name: str, wide: Format) -> OutputTensor:
    spec = source.file.spec(name)
    fmt, reason = source.format_of(name)
    if is_quantized(spec):
        chosen = fmt if fmt is not None and fmt.is_cast else wide
        return OutputTensor((name,), chosen, f"unpacked from {spec.format}", (_promise(name, spec.shape, chosen),))
    if fmt is not None and not fmt.is_cast:
        raise StoreError(
            f"{source.file.path}: the plan has {fmt.name} for {name!r}, and a plain folder holds {', '.join(PLAIN)}"
        )
    return source.unpacked(name, fmt, reason)


def _promise(name: str, shape: tuple[int, ...], fmt: Format) -> TensorSpec:
    return TensorSpec.of(name, shape, None, fmt.storage)


def _config(config: dict[str, Any], wide: Format) -> dict[str, Any]:
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return {**config, key: wide.name}

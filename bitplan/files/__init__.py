"""Bytes at rest: containers of tensors, packed folders, whole models, and files for other engines.

Which module does which step:

    open_files, tensor_file    any file of tensors under one view; a new kind is a `Container` in a module of its own
    safetensors, gguf, poly_network    one kind of file each; `schemes` reads folders that others quantized
    packed_folder          a folder that `quantize_files` wrote: its config, shards and plan
    quantize_files         a file or folder encoded by a plan; `round_with_evidence` rounds by statistics of inputs
    compare, deep_check, drift    how far numbers are from their master, and whether they are sound
    models                 weights with their versions, in a model
    engines                models written for other engines, and read back
    gpt_oss                gpt-oss checkpoints in three layouts
"""

from typing import TYPE_CHECKING

from bitplan.base.names import lazy_names

if TYPE_CHECKING:
    from bitplan.base.errors import FileFormatError as FileFormatError, StoreError as StoreError
    from bitplan.files.drift import DriftLog as DriftLog
    from bitplan.files.engines.targets import export_model as export_model
    from bitplan.files.gpt_oss import (
        GptOssFile as GptOssFile,
        convert_gpt_oss as convert_gpt_oss,
        make_checkpoint as make_checkpoint,
    )
    from bitplan.files.models.morph import observe_model as observe_model
    from bitplan.files.open_files import register_container as register_container
    from bitplan.files.tensor_file import Container as Container, TensorFile as TensorFile
    from bitplan.files.models.weight_store import WeightStore as WeightStore
    from bitplan.files.models.morph import morph_model as morph_model

__getattr__, __dir__, __all__ = lazy_names(__name__)

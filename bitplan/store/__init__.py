"""Stored bytes: weights with their versions, whole models, and their files."""

from typing import TYPE_CHECKING

from bitplan.lazy_names import lazy_names

if TYPE_CHECKING:
    from bitplan.errors import FileFormatError as FileFormatError, StoreError as StoreError
    from bitplan.store.checks.drift import DriftLog as DriftLog, log_drift as log_drift, read_drift as read_drift
    from bitplan.store.compare import compare_models as compare_models
    from bitplan.store.export.targets import export_model as export_model
    from bitplan.store.files.open_files import open_tensors as open_tensors, register_container as register_container
    from bitplan.store.files.tensor_file import (
        Container as Container,
        Promise as Promise,
        TensorFile as TensorFile,
        TensorSpec as TensorSpec,
    )
    from bitplan.store.gpt_oss import (
        GptOssFile as GptOssFile,
        convert_gpt_oss as convert_gpt_oss,
        make_checkpoint as make_checkpoint,
    )
    from bitplan.store.models.morph import (
        morph_model as morph_model,
        observe_model as observe_model,
        unmorph_model as unmorph_model,
    )
    from bitplan.store.models.save_load import load_model as load_model, save_model as save_model
    from bitplan.store.models.weight_store import WeightStore as WeightStore
    from bitplan.store.quantize_files import quantize_file as quantize_file
    from bitplan.store.rounding.round_weight import round_weight as round_weight, round_with_report as round_with_report

__getattr__, __dir__, __all__ = lazy_names(__name__)

"""Stored bytes: weights with their versions, whole models, and their files."""

from typing import TYPE_CHECKING

from bitplan.errors import FileFormatError, StoreError
from bitplan.lazy_names import lazy_names

if TYPE_CHECKING:
    from bitplan.store.checks.drift_log import DriftLog, log_drift, read_drift
    from bitplan.store.compare import compare_models
    from bitplan.store.export.targets import export_model
    from bitplan.store.files.open_files import open_tensors, register_container
    from bitplan.store.files.tensor_file import Container, Promise, TensorFile, TensorSpec
    from bitplan.store.gpt_oss import GptOssFile, convert_gpt_oss, make_checkpoint
    from bitplan.store.models.morph import morph_model, observe_model, unmorph_model
    from bitplan.store.models.save_load import load_model, save_model
    from bitplan.store.models.weight_store import WeightStore
    from bitplan.store.quantize import quantize_file
    from bitplan.store.rounding.round_weight import round_weight, round_with_report

__all__ = [
    "Container",
    "DriftLog",
    "FileFormatError",
    "GptOssFile",
    "Promise",
    "StoreError",
    "TensorFile",
    "TensorSpec",
    "WeightStore",
    "compare_models",
    "convert_gpt_oss",
    "export_model",
    "load_model",
    "log_drift",
    "make_checkpoint",
    "morph_model",
    "observe_model",
    "open_tensors",
    "quantize_file",
    "read_drift",
    "register_container",
    "round_weight",
    "round_with_report",
    "save_model",
    "unmorph_model",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "compare": ("compare_models",),
        "checks.drift_log": ("DriftLog", "log_drift", "read_drift"),
        "export.targets": ("export_model",),
        "gpt_oss": ("GptOssFile", "convert_gpt_oss", "make_checkpoint"),
        "models.save_load": ("load_model", "save_model"),
        "models.morph": ("morph_model", "observe_model", "unmorph_model"),
        "quantize": ("quantize_file",),
        "rounding.round_weight": ("round_weight", "round_with_report"),
        "files.open_files": ("open_tensors", "register_container"),
        "files.tensor_file": ("Container", "Promise", "TensorFile", "TensorSpec"),
        "models.weight_store": ("WeightStore",),
    },
)

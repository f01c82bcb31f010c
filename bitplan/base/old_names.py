"""Public names and keywords that had another place: they work for one release, and a warning names the new one."""

from __future__ import annotations

import functools
import importlib
import operator
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

# old package: {new package: names}
_ERRORS, _VIEW = "bitplan.base.errors", "bitplan.plan.structure.model_view"
_STREAM_ERRORS, _LIMITS = "bitplan.streaming.errors", "bitplan.streaming.transfer.transfer_limits"
_STATE, _DECIDE = "bitplan.streaming.selective.state", "bitplan.streaming.selective.decide"
_CALIBRATION = "bitplan.streaming.selective.calibration"
_STATISTICS, _POLICY = "bitplan.streaming.selective.gradient_statistics", "bitplan.streaming.selective.training_policy"
_MOVED = {
    "bitplan": {
        "bitplan.formats": "Encoded Format error_report list_formats repack",
        "bitplan.formats.quantization_error": "ErrorReport",
        _VIEW: "ModelView",
        "bitplan.plan": "combine",
        "bitplan.packed": "QuantEmbedding QuantExperts QuantLinear TileCache fuse_projections",
        "bitplan.streaming": "SelectivePrecisionConfig SelectivePrecisionPolicy run_calibration",
        "bitplan.files": "WeightStore morph_model unmorph_model",
        "bitplan.fp8": "apply_fp8_config",
    },
    "bitplan.formats": {
        "bitplan.formats.dispatch": "Picked",
        "bitplan.formats.quantization_error": "ErrorReport",
        "bitplan.formats.registry": "DTYPE_NAMES",
    },
    "bitplan.fp8": {"bitplan.fp8.layer_settings": "Fp8LayerError Fp8UnavailableError"},
    "bitplan.kernels": {
        "bitplan.formats": "explain_decode explain_encode",
        "bitplan.formats.dispatch": "Picked",
        "bitplan": "decode encode",
    },
    "bitplan.measure": {
        _CALIBRATION: "CalibrationError",
        _STATISTICS: "GradStatsCollector GradStatsError collect_grad_stats",
        "bitplan.packed": "MeasureError examine_machine",
    },
    "bitplan.packed": {"bitplan.packed.apply_plan": "ApplyError"},
    "bitplan.plan": {
        "bitplan.fp8": (
            "BenchOptions Fingerprint Fp8Error Parallel Report Row bench_cases load_policy local_layers "
            "merge_reports model_parts should_use_fp8 to_thresholds"
        ),
        "bitplan.streaming": "RuntimeLimitHints SelectiveError SelectivePrecisionConfig",
        _LIMITS: "HeuristicPolicyBridge Phase Pressure",
        _STATE: "PolicyState layout_of load_state observe save_state",
        _DECIDE: "compute_hints describe_changes",
        _ERRORS: "Finding ManifestError PlanFileError",
        _VIEW: "ModelView TensorRecord",
        "bitplan.plan.check_manifest": "require_clean",
        "bitplan.plan.manifest": "Aliases Rule SHIPPED Tag expand_raw_map manifest_schema open_manifest",
        "bitplan.plan.plan": "PlanDiff SizeRow TableRow",
    },
    "bitplan.runtime": {
        "bitplan.streaming": (
            "AdamWSettings CudaDevice SelectivePrecisionPolicy SimulatedDevice StreamDevice StreamError "
            "TensorBoardScalars lightning_callback trainer_callback"
        ),
        _STREAM_ERRORS: "BlockNonFiniteError StreamStateError TransferError",
        _POLICY: "PrecisionTelemetry TelemetryError",
        "bitplan.packed": "LayerError QuantEmbedding QuantExperts QuantLinear TileCache fuse_projections",
        "bitplan.packed.apply_plan": "ApplyError",
        "bitplan.fp8": "apply_fp8_config gather_weights_in_fp8",
        "bitplan.fp8.layer_settings": "Fp8LayerError Fp8UnavailableError",
        "bitplan": "apply_fp8 apply_plan load_packed save_packed warm_up",
    },
    "bitplan.searching": {
        "bitplan.searching.explain": "explain_plan",
        "bitplan.searching.fit": "FitResult",
        "bitplan.searching.goal": "EvidenceFileError GoalError",
        "bitplan.searching.run": "SearchResult",
        "bitplan.searching.solver": "Solution solve",
    },
    "bitplan.streaming": {
        _STREAM_ERRORS: "BlockNonFiniteError StreamStateError TransferError",
        _CALIBRATION: "CalibrationError",
        _STATISTICS: "GradStatsCollector GradStatsError collect_grad_stats",
        _POLICY: "PrecisionTelemetry TelemetryError",
        _LIMITS: "HeuristicPolicyBridge Phase Pressure",
        _STATE: "PolicyState layout_of load_state observe save_state",
        _DECIDE: "compute_hints describe_changes",
    },
    "bitplan.store": {
        "bitplan.files": (
            "Container DriftLog FileFormatError GptOssFile StoreError TensorFile TensorSpec "
            "WeightStore convert_gpt_oss export_model log_drift make_checkpoint morph_model "
            "observe_model read_drift register_container unmorph_model"
        ),
        "bitplan": "compare_models open_tensors quantize_file",
        "bitplan.rounding": "round_weight round_with_report",
    },
    "bitplan.trees": {
        "bitplan.trees.distributed.fit": "DistributedFit",
        "bitplan.trees.estimator_base": "RoundState",
        "bitplan.trees.gradients": "GradientPrecision Gradients GradientsF32 GradientsI16 GradientsI8",
        "bitplan.trees.pieces": "TablePieces",
        "bitplan.trees.recommend": "PrecisionAdvice",
    },
}
# Names that another one does the work of now: where it is, and what to call.
_SAVE_LOAD = "bitplan.files.models.save_load"
_LOAD = (_SAVE_LOAD, "load_model", "bitplan.load_packed(path, model=model, masters=True).model")
_SAVE = (_SAVE_LOAD, "write_model", "bitplan.save_packed(model, path)")
_PROMISE = (_VIEW, "TensorSpec.of", "bitplan.files.TensorSpec.of(name, shape, fmt, dtype)")
_REPLACED = {
    "bitplan": {"load_model": _LOAD, "save_model": _SAVE},
    "bitplan.store": {"load_model": _LOAD, "save_model": _SAVE, "Promise": _PROMISE},
    "bitplan.files": {"Promise": _PROMISE},
    "bitplan.plan": {
        "Header": (__name__, "_header", "a tuple (dtype, shape, nbytes), or a bitplan.files.TensorSpec,"),
        "Stored": (__name__, "_stored", _PROMISE[2]),
    },
}
_HOMES = {old: {name: new for new, names in homes.items() for name in names.split()} for old, homes in _MOVED.items()}
_OLD_PARTS = ("kernels", "measure", "runtime", "store")  # they are no packages any more


def is_old_name(package: str, name: str) -> bool:
    return name in _HOMES.get(package, {}) or name in _REPLACED.get(package, {})


def old_name(package: str, name: str) -> Any:
    """What a name of this package stands for, from its new place."""
    if not is_old_name(package, name):
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules.get(package))
    home, found, call = _REPLACED.get(package, {}).get(name) or (_HOMES[package][name], name, None)
    message = f"{package}.{name} is {call or f'{home}.{name}'} now; the next version has no {package}.{name}"
    warnings.warn(message, FutureWarning, stacklevel=3)
    return operator.attrgetter(found)(importlib.import_module(home))


def _header(dtype: str, shape: tuple[int, ...], nbytes: int) -> tuple[str, tuple[int, ...], int]:
    return dtype, shape, nbytes


def _stored(shape: tuple[int, ...], dtype: str = "float32", packed: bool = False) -> Any:
    return importlib.import_module(_VIEW).TensorSpec.of("", shape, dtype if packed else None, dtype)


def add_old_parts() -> None:
    """Parts that are gone stay importable: modules that hold nothing and look their names up."""
    for part in _OLD_PARTS:
        package = f"bitplan.{part}"
        module = ModuleType(package, f"The names of {package} have other places now.")
        module.__dict__["__getattr__"] = functools.partial(_name_of_old_part, package)
        module.__dict__["__all__"] = sorted(_HOMES[package])
        sys.modules[package] = module
        setattr(sys.modules["bitplan"], part, module)


def keywords_in(kind: type) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """For a function whose keywords have become fields of `options`, a dataclass: it takes them still, and warns."""

    def decorate(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @functools.wraps(function)
        def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            old = {one.name: kwargs.pop(one.name) for one in fields(kind) if one.name in kwargs}
            if old:
                shown = ", ".join(f"{name}=..." for name in old)
                message = f"{function.__name__}({shown}) is {function.__name__}(options={kind.__name__}({shown})) now; "
                warnings.warn(f"{message}the next version takes options alone", FutureWarning, stacklevel=2)
                kwargs["options"] = replace(kwargs.get("options") or kind(), **old)  # type: ignore[type-var]
            return function(*args, **kwargs)

        return call

    return decorate


def _name_of_old_part(package: str, name: str) -> Any:
    return old_name(package, name)

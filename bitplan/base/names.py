"""Looks up a package's public names when they are first used; names and keywords of before work for one release.

torch takes seconds to import; `bitplan --help`, and a script that only reads a plan, need none of it. So a package
writes its names once, as imports under `if TYPE_CHECKING`, which type checkers and editors read, and `lazy_names` makes
of them what happens at run time.

A public name or keyword that had another place gives a warning that says the new one.
"""

from __future__ import annotations

import ast
import functools
import importlib
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

# Where names are now.
_HOMES = {
    "bitplan": (
        "apply_fp8 apply_plan compare_models decode encode load_packed open_tensors quantize_file save_packed warm_up"
    ),
    "bitplan.base.errors": (
        "BlockNonFiniteError Finding ManifestError MeasureError NonFiniteError PlanFileError StreamStateError "
        "TransferError"
    ),
    "bitplan.files": (
        "Container convert_gpt_oss DriftLog export_model FileFormatError GptOssFile make_checkpoint morph_model "
        "observe_model register_container StoreError TensorFile WeightStore"
    ),
    "bitplan.files.quantize_files": "QuantizeOptions",
    "bitplan.formats": "Encoded error_report",
    "bitplan.formats.dispatch": "explain_decode explain_encode Picked",
    "bitplan.formats.format": "Format",
    "bitplan.formats.quantization_error": "ErrorReport",
    "bitplan.formats.reencode": "repack",
    "bitplan.formats.registry": "DTYPE_NAMES list_formats",
    "bitplan.fp8": "gather_weights_in_fp8 merge_reports should_use_fp8",
    "bitplan.fp8.bench.layer_bench": "BenchOptions",
    "bitplan.fp8.layer_settings": "Fp8LayerError Fp8UnavailableError",
    "bitplan.fp8.policy.layers": "bench_cases local_layers model_parts Parallel",
    "bitplan.fp8.policy.report": "Fingerprint Report Row",
    "bitplan.fp8.policy.rules": "load_policy",
    "bitplan.fp8.policy.vocabulary": "Fp8Error",
    "bitplan.packed": "examine_machine fuse_projections QuantExperts QuantLinear TileCache",
    "bitplan.packed.apply_plan": "ApplyError",
    "bitplan.packed.product_strategy": "LayerError",
    "bitplan.packed.quant_embedding": "QuantEmbedding",
    "bitplan.plan": "combine",
    "bitplan.plan.check_manifest": "require_clean",
    "bitplan.plan.manifest": "Aliases expand_raw_map manifest_schema Rule SHIPPED Tag",
    "bitplan.plan.plan": "PlanDiff SizeRow TableRow",
    "bitplan.plan.structure.model_view": "ModelView TensorRecord TensorSpec",
    "bitplan.report.read_records": "ReportError",
    "bitplan.rounding": "round_with_report",
    "bitplan.searching.evidence": "SearchEvidence",
    "bitplan.searching.explain": "explain_plan",
    "bitplan.searching.fit": "FitResult",
    "bitplan.searching.goal": "EvidenceFileError GoalError SearchError",
    "bitplan.searching.run": "SearchResult",
    "bitplan.searching.solver": "Solution solve",
    "bitplan.streaming": (
        "AdamWSettings lightning_callback run_calibration RuntimeLimitHints SelectivePrecisionConfig "
        "SelectivePrecisionPolicy SimulatedDevice StreamError TensorBoardScalars trainer_callback"
    ),
    "bitplan.streaming.selective.calibration": "CalibrationError",
    "bitplan.streaming.selective.config": "SelectiveError",
    "bitplan.streaming.selective.decide": "compute_hints describe_changes",
    "bitplan.streaming.selective.gradient_statistics": "collect_grad_stats GradStatsCollector GradStatsError",
    "bitplan.streaming.selective.state": "layout_of load_state observe PolicyState save_state",
    "bitplan.streaming.selective.training_policy": "PrecisionTelemetry TelemetryError",
    "bitplan.streaming.transfer.devices": "CudaDevice StreamDevice",
    "bitplan.streaming.transfer.transfer_limits": "HeuristicPolicyBridge Phase Pressure",
    "bitplan.trees.distributed.fit": "DistributedFit",
    "bitplan.trees.distributed.shards": "ProcessLostError",
    "bitplan.trees.estimator_base": "RoundState",
    "bitplan.trees.gradients": "GradientPrecision Gradients GradientsF32 GradientsI16 GradientsI8",
    "bitplan.trees.pieces": "TablePieces",
    "bitplan.trees.recommend": "PrecisionAdvice",
}
# Names that another call does the work of now: who still does it as before, and what to call.
_SPEC = "bitplan.plan.structure.model_view.TensorSpec.of(name, shape, fmt, dtype)"
_MANIFEST, _SAVE_LOAD = "bitplan.plan.manifest", "bitplan.files.models.save_load"
_REPLACED = {
    "Header": (__name__, "_header", "a tuple (dtype, shape, nbytes)"),
    "Promise": ("bitplan.plan.structure.model_view", "TensorSpec.of", _SPEC),
    "Stored": (__name__, "_stored", _SPEC),
    "apply_fp8_config": (__name__, "_apply_fp8_config", 'bitplan.apply_fp8(model, "model.yaml")'),
    "load_model": (_SAVE_LOAD, "load_model", "bitplan.load_packed(path, model=model, masters=True).model"),
    "log_drift": (__name__, "_log_drift", "bitplan.files.DriftLog.add(step, layers)"),
    "open_manifest": (_MANIFEST, "open_manifest", "bitplan.Manifest.load(name)"),
    "read_drift": ("bitplan.files.drift", "DriftLog.read", "bitplan.files.DriftLog.read(path)"),
    "round_weight": ("bitplan.rounding.weights", "round_weight", "bitplan.rounding.round_with_report(weight, fmt)[0]"),
    "save_model": (_SAVE_LOAD, "write_model", "bitplan.save_packed(model, path)"),
    "shipped_manifest": (_MANIFEST, "shipped_manifest", "bitplan.Manifest.load(name)"),
    "to_thresholds": ("bitplan.fp8.policy.rules", "Policy.to_thresholds", "policy.to_thresholds()"),
    "unmorph_model": ("bitplan.files.models.morph", "unmorph_model", "bitplan.files.morph_model(model, None)"),
}
# Which package had which names.
_NAMES = {
    "bitplan": (
        "apply_fp8_config combine Encoded error_report ErrorReport Format fuse_projections list_formats load_model "
        "ModelView morph_model QuantEmbedding QuantExperts QuantLinear repack run_calibration save_model "
        "SelectivePrecisionConfig SelectivePrecisionPolicy TileCache unmorph_model WeightStore"
    ),
    "bitplan.files": "log_drift Promise QuantizeOptions read_drift TensorSpec unmorph_model",
    "bitplan.formats": (
        "DTYPE_NAMES ErrorReport explain_decode explain_encode Format list_formats NonFiniteError Picked repack"
    ),
    "bitplan.fp8": (
        "apply_fp8_config bench_cases BenchOptions Fingerprint Fp8Error Fp8LayerError Fp8UnavailableError "
        "load_policy local_layers model_parts Parallel Report Row to_thresholds"
    ),
    "bitplan.kernels": "decode encode explain_decode explain_encode Picked",
    "bitplan.measure": (
        "CalibrationError collect_grad_stats examine_machine GradStatsCollector GradStatsError MeasureError"
    ),
    "bitplan.packed": "ApplyError LayerError MeasureError QuantEmbedding",
    "bitplan.plan": (
        "Aliases bench_cases BenchOptions compute_hints describe_changes expand_raw_map Finding Fingerprint "
        "Fp8Error Header HeuristicPolicyBridge layout_of load_policy load_state local_layers manifest_schema "
        "ManifestError merge_reports model_parts ModelView observe open_manifest Parallel Phase PlanDiff "
        "PlanFileError PolicyState Pressure Report require_clean Row Rule RuntimeLimitHints save_state "
        "SelectiveError SelectivePrecisionConfig SHIPPED shipped_manifest should_use_fp8 SizeRow Stored TableRow "
        "Tag TensorRecord to_thresholds"
    ),
    "bitplan.report": "ReportError",
    "bitplan.rounding": "round_weight",
    "bitplan.runtime": (
        "AdamWSettings apply_fp8 apply_fp8_config apply_plan ApplyError BlockNonFiniteError CudaDevice "
        "Fp8LayerError Fp8UnavailableError fuse_projections gather_weights_in_fp8 LayerError lightning_callback "
        "load_packed PrecisionTelemetry QuantEmbedding QuantExperts QuantLinear save_packed "
        "SelectivePrecisionPolicy SimulatedDevice StreamDevice StreamError StreamStateError TelemetryError "
        "TensorBoardScalars TileCache trainer_callback TransferError warm_up"
    ),
    "bitplan.searching": (
        "EvidenceFileError explain_plan FitResult GoalError SearchError SearchEvidence SearchResult Solution solve"
    ),
    "bitplan.store": (
        "compare_models Container convert_gpt_oss DriftLog export_model FileFormatError GptOssFile load_model "
        "log_drift make_checkpoint morph_model observe_model open_tensors Promise quantize_file read_drift "
        "register_container round_weight round_with_report save_model StoreError TensorFile TensorSpec "
        "unmorph_model WeightStore"
    ),
    "bitplan.streaming": (
        "BlockNonFiniteError CalibrationError collect_grad_stats compute_hints CudaDevice describe_changes "
        "GradStatsCollector GradStatsError HeuristicPolicyBridge layout_of load_state observe Phase PolicyState "
        "PrecisionTelemetry Pressure save_state SelectiveError StreamDevice StreamStateError TelemetryError "
        "TransferError"
    ),
    "bitplan.trees": (
        "DistributedFit GradientPrecision Gradients GradientsF32 GradientsI16 GradientsI8 PrecisionAdvice "
        "ProcessLostError RoundState TablePieces"
    ),
}
_OLD_PARTS = ("kernels", "measure", "runtime", "store")  # they are no packages any more


@functools.cache
def _home_of(name: str) -> str:
    return next(home for home, names in _HOMES.items() if name in names.split())


def is_old_name(package: str, name: str) -> bool:
    return name in _NAMES.get(package, "").split()


def old_name(package: str, name: str) -> Any:
    """The object that the old name `package.name` stands for, imported from its new module, with a FutureWarning."""
    if not is_old_name(package, name):
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules.get(package))
    home, attribute, call = _REPLACED.get(name) or (_home_of(name), name, f"{_home_of(name)}.{name}")
    message = f"{package}.{name} is {call} now; the next version has no {package}.{name}"
    warnings.warn(message, FutureWarning, stacklevel=3)
    return operator.attrgetter(attribute)(importlib.import_module(home))


def _header(dtype: str, shape: tuple[int, ...], nbytes: int) -> tuple[str, tuple[int, ...], int]:
    return dtype, shape, nbytes


def _stored(shape: tuple[int, ...], dtype: str = "float32", packed: bool = False) -> Any:
    return importlib.import_module("bitplan.plan.structure.model_view").TensorSpec.of(
        "", shape, dtype if packed else None, dtype
    )


def _apply_fp8_config(model: Any, path: Any, **options: Any) -> Any:
    return importlib.import_module("bitplan.fp8.apply").apply_fp8(model, path, **options)


def _log_drift(log: Any, step: int, layers: Any) -> Any:
    return (
        importlib.import_module("bitplan.files.drift").drift_of(step, layers) if log is None else log.add(step, layers)
    )


def add_old_parts() -> None:
    """Make packages that are gone importable: as modules that look their names up where these are now."""
    for part in _OLD_PARTS:
        package = f"bitplan.{part}"
        module = ModuleType(package, f"The names of {package} have other places now.")
        module.__dict__["__getattr__"] = functools.partial(_name_of_old_part, package)
        module.__dict__["__all__"] = sorted(_NAMES[package].split())
        sys.modules[package] = module
        setattr(sys.modules["bitplan"], part, module)


def _name_of_old_part(package: str, name: str) -> Any:
    return old_name(package, name)


def keywords_in(kind: type, *, written: str = "") -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Decorates a function whose keywords have become fields of `options`, a dataclass: it takes them still, and warns.

    written    what the warning calls the options' class, if not by its name
    """

    def decorate(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @functools.wraps(function)
        def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            old = {field.name: kwargs.pop(field.name) for field in fields(kind) if field.name in kwargs}
            if old:
                name, shown = function.__name__, ", ".join(f"{key}=..." for key in old)
                message = f"{name}({shown}) is {name}(options={written or kind.__name__}({shown})) now; "
                warnings.warn(f"{message}the next version takes options alone", FutureWarning, stacklevel=2)
                options: Any = kwargs.get("options") or kind()
                chosen = kind(**options) if isinstance(options, Mapping) else options
                kwargs["options"] = replace(chosen, **old)
            return function(*args, **kwargs)

        return call

    return decorate


# ---- names that are imported when they are first used ----------------------------------------------------------------


def lazy_names(
    package: str, *, parts: Iterable[str] = (), present: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a package.

    parts    its sub-packages, imported when they are first used
    present  public names that it has already

    A name of `bitplan` itself is public there alone: the part that defines it has it, too, and does not list it.
    A name is looked up in its module each time, so that a test may replace it there.
    """
    module_of = _modules_of_names(package)
    names = {*module_of, *parts}

    def get(name: str) -> Any:
        if name not in names:
            if is_old_name(package, name):
                return old_name(package, name)
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules.get(package)
            )
        if name in module_of:
            return getattr(importlib.import_module(module_of[name]), name)
        return importlib.import_module(f"{package}.{name}")

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    elsewhere = set() if package == "bitplan" else _modules_of_names("bitplan").keys()
    return get, list_names, sorted({*module_of, *present} - elsewhere)


@functools.cache
def _modules_of_names(package: str) -> dict[str, str]:
    """Which module defines which name, by the imports under `if TYPE_CHECKING` in the package's own source."""
    module: Any = sys.modules[package]
    source = module.__loader__.get_data(module.__file__)
    guarded = next(node for node in ast.parse(source).body if isinstance(node, ast.If)).body
    imports = [node for node in guarded if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}

"""Which part gets which format, and why: plans, manifests, and checks that need no tensor."""

from typing import TYPE_CHECKING

from bitplan.errors import ManifestError, PlanError, PlanFileError
from bitplan.lazy_names import lazy_names

if TYPE_CHECKING:
    from bitplan.plan.aliases import Aliases
    from bitplan.plan.check import Finding, Header, check_headers, require_clean
    from bitplan.plan.choose import Stored, choose_formats
    from bitplan.plan.fp8.bench_options import BenchOptions
    from bitplan.plan.fp8.layers import Parallel, bench_cases, local_layers
    from bitplan.plan.fp8.merge import merge_reports, to_thresholds
    from bitplan.plan.fp8.model_parts import model_parts
    from bitplan.plan.fp8.policy import load_policy, should_use_fp8
    from bitplan.plan.fp8.report import Fingerprint, Report, Row
    from bitplan.plan.fp8.vocabulary import Fp8Error
    from bitplan.plan.json_schema import manifest_schema
    from bitplan.plan.manifest import Manifest, Rule, Tag, expand_raw_map
    from bitplan.plan.plan import Choice, Plan, PlanDiff, Planned, SizeRow, TableRow, combine
    from bitplan.plan.selective.config import SelectiveError, SelectivePrecisionConfig
    from bitplan.plan.selective.decide import compute_hints, describe_changes
    from bitplan.plan.selective.state import PolicyState, layout_of, load_state, observe, save_state
    from bitplan.plan.selective.transfer_limits import HeuristicPolicyBridge, Phase, Pressure, RuntimeLimitHints
    from bitplan.plan.shipped_manifests import SHIPPED, open_manifest, shipped_manifest

__all__ = [
    "SHIPPED",
    "Aliases",
    "BenchOptions",
    "Choice",
    "Finding",
    "Fingerprint",
    "Fp8Error",
    "Header",
    "HeuristicPolicyBridge",
    "Manifest",
    "ManifestError",
    "Parallel",
    "Phase",
    "Plan",
    "PlanDiff",
    "PlanError",
    "PlanFileError",
    "Planned",
    "PolicyState",
    "Pressure",
    "Report",
    "Row",
    "Rule",
    "RuntimeLimitHints",
    "SelectiveError",
    "SelectivePrecisionConfig",
    "SizeRow",
    "Stored",
    "TableRow",
    "Tag",
    "bench_cases",
    "check_headers",
    "choose_formats",
    "combine",
    "compute_hints",
    "describe_changes",
    "expand_raw_map",
    "layout_of",
    "load_policy",
    "load_state",
    "local_layers",
    "manifest_schema",
    "merge_reports",
    "model_parts",
    "observe",
    "open_manifest",
    "require_clean",
    "save_state",
    "shipped_manifest",
    "should_use_fp8",
    "to_thresholds",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "fp8.vocabulary": ("Fp8Error",),
        "aliases": ("Aliases",),
        "check": ("Finding", "Header", "check_headers", "require_clean"),
        "choose": ("Stored", "choose_formats"),
        "selective.transfer_limits": ("HeuristicPolicyBridge", "Phase", "Pressure", "RuntimeLimitHints"),
        "fp8.bench_options": ("BenchOptions",),
        "fp8.layers": ("Parallel", "bench_cases", "local_layers"),
        "fp8.merge": ("merge_reports", "to_thresholds"),
        "fp8.model_parts": ("model_parts",),
        "fp8.policy": ("load_policy", "should_use_fp8"),
        "fp8.report": ("Fingerprint", "Report", "Row"),
        "manifest": ("Manifest", "Rule", "Tag", "expand_raw_map"),
        "plan": ("Choice", "Plan", "PlanDiff", "Planned", "SizeRow", "TableRow", "combine"),
        "json_schema": ("manifest_schema",),
        "selective.config": ("SelectiveError", "SelectivePrecisionConfig"),
        "selective.decide": ("compute_hints", "describe_changes"),
        "selective.state": ("PolicyState", "layout_of", "load_state", "observe", "save_state"),
        "shipped_manifests": ("SHIPPED", "open_manifest", "shipped_manifest"),
    },
)

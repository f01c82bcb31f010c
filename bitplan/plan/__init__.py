"""Which part gets which format, and why: plans, manifests, and checks that need no tensor."""

from typing import TYPE_CHECKING

from bitplan.lazy_names import lazy_names

if TYPE_CHECKING:
    from bitplan.plan.aliases import Aliases
    from bitplan.plan.check import Finding, Header, check_headers, require_clean
    from bitplan.plan.choose import Stored, choose_formats
    from bitplan.plan.conductor import HeuristicPolicyBridge, Phase, Pressure, RuntimeLimitHints
    from bitplan.plan.documents import ManifestError, PlanError
    from bitplan.plan.fp8_environment import BenchOptions
    from bitplan.plan.fp8_layers import Parallel, bench_cases, local_layers
    from bitplan.plan.fp8_merge import merge_reports, to_thresholds
    from bitplan.plan.fp8_models import model_parts
    from bitplan.plan.fp8_policy import load_policy, should_use_fp8
    from bitplan.plan.fp8_report import Fingerprint, Report, Row
    from bitplan.plan.manifest import Manifest, Rule, Tag, expand_raw_map
    from bitplan.plan.plan import Choice, Plan, PlanDiff, Planned, SizeRow, TableRow, combine
    from bitplan.plan.schema import manifest_schema
    from bitplan.plan.selective_config import SelectivePrecisionConfig
    from bitplan.plan.selective_decide import compute_hints, describe_changes
    from bitplan.plan.selective_state import PolicyState, layout_of, load_state, observe, save_state
    from bitplan.plan.shipped import SHIPPED, open_manifest, shipped_manifest

__all__ = [
    "SHIPPED",
    "Aliases",
    "BenchOptions",
    "Choice",
    "Finding",
    "Fingerprint",
    "Header",
    "HeuristicPolicyBridge",
    "Manifest",
    "ManifestError",
    "Parallel",
    "Phase",
    "Plan",
    "PlanDiff",
    "PlanError",
    "Planned",
    "PolicyState",
    "Pressure",
    "Report",
    "Row",
    "Rule",
    "RuntimeLimitHints",
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
        "aliases": ("Aliases",),
        "check": ("Finding", "Header", "check_headers", "require_clean"),
        "choose": ("Stored", "choose_formats"),
        "conductor": ("HeuristicPolicyBridge", "Phase", "Pressure", "RuntimeLimitHints"),
        "documents": ("ManifestError", "PlanError"),
        "fp8_environment": ("BenchOptions",),
        "fp8_layers": ("Parallel", "bench_cases", "local_layers"),
        "fp8_merge": ("merge_reports", "to_thresholds"),
        "fp8_models": ("model_parts",),
        "fp8_policy": ("load_policy", "should_use_fp8"),
        "fp8_report": ("Fingerprint", "Report", "Row"),
        "manifest": ("Manifest", "Rule", "Tag", "expand_raw_map"),
        "plan": ("Choice", "Plan", "PlanDiff", "Planned", "SizeRow", "TableRow", "combine"),
        "schema": ("manifest_schema",),
        "selective_config": ("SelectivePrecisionConfig",),
        "selective_decide": ("compute_hints", "describe_changes"),
        "selective_state": ("PolicyState", "layout_of", "load_state", "observe", "save_state"),
        "shipped": ("SHIPPED", "open_manifest", "shipped_manifest"),
    },
)

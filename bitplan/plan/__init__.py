"""Which part gets which format, and why: plans, manifests, and checks that need no tensor."""

from bitplan.plan.aliases import Aliases
from bitplan.plan.check import Finding, Header, check_headers, require_clean
from bitplan.plan.choose import Stored, choose_formats
from bitplan.plan.documents import ManifestError, PlanError
from bitplan.plan.manifest import Manifest, Rule, Tag, expand_raw_map
from bitplan.plan.plan import Choice, Plan, PlanDiff, Planned, SizeRow, TableRow, combine
from bitplan.plan.schema import manifest_schema
from bitplan.plan.shipped import SHIPPED, open_manifest, shipped_manifest

__all__ = [
    "SHIPPED",
    "Aliases",
    "Choice",
    "Finding",
    "Header",
    "Manifest",
    "ManifestError",
    "Plan",
    "PlanDiff",
    "PlanError",
    "Planned",
    "Rule",
    "SizeRow",
    "Stored",
    "TableRow",
    "Tag",
    "check_headers",
    "choose_formats",
    "combine",
    "expand_raw_map",
    "manifest_schema",
    "open_manifest",
    "require_clean",
    "shipped_manifest",
]

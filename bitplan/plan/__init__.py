"""Which part gets which format, and why: plans, manifests, and checks that need no tensor.

Which module does which step:

    plan              Plan and Choice: the value that every pass hands to the next; `combine` makes one of several
    format_choices    from whatever a user gives (a format, a mapping, a manifest, a Plan) to a Plan
    manifest          rules in a file; `name_patterns` matches them, `aliases` translates names
    check_manifest    a manifest against the headers of a checkpoint
    names             shell patterns, natural order, roles guessed from names
    mermaid           a plan as a chart
    structure         what a model computes: `describe` gives a ModelView, which all other parts ask
    selective         BF16 or INT8 for a block at a training step: `selective.decide`, by scores of `selective.score`
    fp8               FP8 or BF16 for a layer at a token count: `fp8.choice`, by the rules of `fp8.policy`
"""

from typing import TYPE_CHECKING

from bitplan.lazy_names import lazy_names

if TYPE_CHECKING:
    from bitplan.errors import ManifestError as ManifestError, PlanError as PlanError, PlanFileError as PlanFileError
    from bitplan.plan.aliases import Aliases as Aliases
    from bitplan.plan.check_manifest import (
        Finding as Finding,
        Header as Header,
        check_headers as check_headers,
        require_clean as require_clean,
    )
    from bitplan.plan.format_choices import Stored as Stored, choose_formats as choose_formats
    from bitplan.plan.fp8.bench_options import BenchOptions as BenchOptions
    from bitplan.plan.fp8.layers import Parallel as Parallel, bench_cases as bench_cases, local_layers as local_layers
    from bitplan.plan.fp8.merge import merge_reports as merge_reports, to_thresholds as to_thresholds
    from bitplan.plan.fp8.model_parts import model_parts as model_parts
    from bitplan.plan.fp8.policy import load_policy as load_policy, should_use_fp8 as should_use_fp8
    from bitplan.plan.fp8.report import Fingerprint as Fingerprint, Report as Report, Row as Row
    from bitplan.plan.fp8.vocabulary import Fp8Error as Fp8Error
    from bitplan.plan.json_schema import manifest_schema as manifest_schema
    from bitplan.plan.manifest import Manifest as Manifest, Rule as Rule, Tag as Tag, expand_raw_map as expand_raw_map
    from bitplan.plan.plan import (
        Choice as Choice,
        Plan as Plan,
        PlanDiff as PlanDiff,
        Planned as Planned,
        SizeRow as SizeRow,
        TableRow as TableRow,
        combine as combine,
    )
    from bitplan.plan.selective.config import (
        SelectiveError as SelectiveError,
        SelectivePrecisionConfig as SelectivePrecisionConfig,
    )
    from bitplan.plan.selective.decide import compute_hints as compute_hints, describe_changes as describe_changes
    from bitplan.plan.selective.state import (
        PolicyState as PolicyState,
        layout_of as layout_of,
        load_state as load_state,
        observe as observe,
        save_state as save_state,
    )
    from bitplan.plan.selective.transfer_limits import (
        HeuristicPolicyBridge as HeuristicPolicyBridge,
        Phase as Phase,
        Pressure as Pressure,
        RuntimeLimitHints as RuntimeLimitHints,
    )
    from bitplan.plan.structure.model_view import ModelView as ModelView, TensorRecord as TensorRecord
    from bitplan.plan.manifest import (
        SHIPPED as SHIPPED,
        open_manifest as open_manifest,
        shipped_manifest as shipped_manifest,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__)

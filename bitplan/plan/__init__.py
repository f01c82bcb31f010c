"""Which part gets which format, and why: plans, manifests, and checks that need no tensor.

Which module does which step:

    plan              Plan and Choice: the value that every pass hands to the next; `combine` makes one of several
    format_choices    from whatever a user gives (a format, a mapping, a manifest, a Plan) to a Plan
    manifest          rules in a file, the patterns that match names, and aliases of names
    check_manifest    a manifest against the headers of a checkpoint
    names             shell patterns, natural order of names, layer numbers
    structure         what a model computes, and the one record of a tensor
    from_records      what FP8's policy, selective precision and trees decided, as a Plan
    mermaid           a plan as a chart
"""

from typing import TYPE_CHECKING

from bitplan.base.names import lazy_names

if TYPE_CHECKING:
    from bitplan.base.errors import PlanError as PlanError
    from bitplan.plan.check_manifest import check_headers as check_headers
    from bitplan.plan.format_choices import choose_formats as choose_formats
    from bitplan.plan.manifest import Manifest as Manifest
    from bitplan.plan.plan import (
        Choice as Choice,
        Plan as Plan,
        Planned as Planned,
        combine as combine,
    )
    from bitplan.plan.from_records import read_plan as read_plan

__getattr__, __dir__, __all__ = lazy_names(__name__)

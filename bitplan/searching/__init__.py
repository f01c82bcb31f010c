"""The best plan for a model, a text and a goal: evidence once, solved exactly, proven before it is handed over.

Which module does which step:

    goal, runtime_formats    what is asked for, and the formats that a target loads
    prepare, groups          the model, its text, and which tensors are decided together
    gather                   what formats cost the model: statistics of its text, rounded weights, distances of plans
    evidence                 these costs as a file
    solver                   the plan, by evidence alone; `rivals`, `correct` and `explain` beside it
    run, result              all of it in turn, the proof on held-out text, and the files
"""

from typing import TYPE_CHECKING

from bitplan.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from bitplan.searching.goal import (
        EvidenceFileError as EvidenceFileError,
        GoalError as GoalError,
        SearchError as SearchError,
    )
    from bitplan.searching.evidence import (
        FormatCost as FormatCost,
        SearchEvidence as SearchEvidence,
        TensorGroup as TensorGroup,
    )
    from bitplan.searching.explain import explain_plan as explain_plan
    from bitplan.searching.goal import Goal as Goal
    from bitplan.searching.result import SearchResult as SearchResult
    from bitplan.searching.run import Searcher as Searcher, search as search
    from bitplan.searching.solver import Solution as Solution, solve as solve

__getattr__, __dir__, __all__ = lazy_names(__name__)

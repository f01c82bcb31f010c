"""The best plan for a model, a text and a goal: evidence once, solved exactly, proven before it is handed over."""

from typing import TYPE_CHECKING

from bitplan.lazy_names import lazy_names

if TYPE_CHECKING:
    from bitplan.searching.decide.explain import explain_plan
    from bitplan.searching.decide.solve import Solution, solve
    from bitplan.searching.errors import EvidenceFileError, GoalError, SearchError
    from bitplan.searching.evidence import FormatCost, SearchEvidence, TensorGroup
    from bitplan.searching.goal import Goal
    from bitplan.searching.result import SearchResult
    from bitplan.searching.run import Searcher, search

__all__ = [
    "EvidenceFileError",
    "FormatCost",
    "Goal",
    "GoalError",
    "SearchError",
    "SearchEvidence",
    "SearchResult",
    "Searcher",
    "Solution",
    "TensorGroup",
    "explain_plan",
    "search",
    "solve",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "errors": ("EvidenceFileError", "GoalError", "SearchError"),
        "evidence": ("FormatCost", "SearchEvidence", "TensorGroup"),
        "decide.explain": ("explain_plan",),
        "goal": ("Goal",),
        "result": ("SearchResult",),
        "run": ("Searcher", "search"),
        "decide.solve": ("Solution", "solve"),
    },
)

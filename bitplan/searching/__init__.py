"""The best plan for a model, a text and a goal: evidence once, solved exactly, proven before it is handed over.

Which module does which step:

    goal, runtime_formats    what is asked for, and the formats that a target loads
    searched_model, blocks   the model, its text, which tensors are decided together; run block by block
    forecast                 what it will take: time, and memory within a limit
    statistics, damage       what its text says of every weight, and what a format costs it by that
    collect, evidence        these costs, group by group, and their file
    plan_meter, timing       distances of plans from the model, and times of layers; `training_evidence` beside them
    solver, explain          the plan, by evidence alone, with its rivals and reasons
    run                      all of it in turn, the proof on held-out text, and the files
    fit, memory_probe        weights, keys and values for a memory and a context, and what a model takes beside them
    verify                   whether what was quantized holds, by its certificate
"""

from typing import TYPE_CHECKING

from bitplan.base.names import lazy_names

if TYPE_CHECKING:
    from bitplan.searching.goal import Goal as Goal
    from bitplan.searching.run import Searcher as Searcher, SearchOptions as SearchOptions, search as search
    from bitplan.searching.verify import verify_model as verify_model

__getattr__, __dir__, __all__ = lazy_names(__name__)

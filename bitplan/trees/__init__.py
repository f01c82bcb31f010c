"""Gradient-quantized boosted trees: histograms of integers, so that training is fast and exactly reproducible."""

import importlib.util
from typing import TYPE_CHECKING

from bitplan.base.names import lazy_names
from bitplan.base.optional import require

if TYPE_CHECKING:
    from bitplan.trees.distributed.fit import fit_distributed as fit_distributed
    from bitplan.trees.estimators import (
        BoostedTreesClassifier as BoostedTreesClassifier,
        BoostedTreesRegressor as BoostedTreesRegressor,
    )
    from bitplan.trees.gradients import TreesError as TreesError
    from bitplan.trees.load import from_lightgbm as from_lightgbm, load_trees as load_trees
    from bitplan.trees.pieces import open_pieces as open_pieces
    from bitplan.trees.plots import plot_importance as plot_importance, plot_tree as plot_tree
    from bitplan.trees.ranker import BoostedTreesRanker as BoostedTreesRanker
    from bitplan.trees.recommend import recommend_gradient_precision as recommend_gradient_precision

if importlib.util.find_spec("sklearn") is None:
    require("sklearn", purpose="bitplan.trees", extra="trees")  # says what is missing before a part of it is used
__getattr__, __dir__, __all__ = lazy_names(__name__, parts=("dask",))

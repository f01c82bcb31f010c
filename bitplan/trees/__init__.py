"""Gradient-quantized boosted trees: histograms of integers, so that training is fast and exactly reproducible."""

from bitplan.base.optional import require

require("sklearn", purpose="bitplan.trees", extra="trees")  # before the modules below import it

from bitplan.trees.distributed.fit import DistributedFit, fit_distributed
from bitplan.trees.distributed.shards import ProcessLostError
from bitplan.trees.estimators import BoostedTreesClassifier, BoostedTreesRegressor
from bitplan.trees.estimator_base import RoundState
from bitplan.trees.load import from_lightgbm, load_trees
from bitplan.trees.pieces import TablePieces, open_pieces
from bitplan.trees.gradients import (
    GradientPrecision,
    Gradients,
    GradientsF32,
    GradientsI8,
    GradientsI16,
    TreesError,
)
from bitplan.trees.plots import plot_importance, plot_tree
from bitplan.trees.ranker import BoostedTreesRanker
from bitplan.trees.recommend import PrecisionAdvice, recommend_gradient_precision

__all__ = [
    "BoostedTreesClassifier",
    "BoostedTreesRanker",
    "BoostedTreesRegressor",
    "DistributedFit",
    "GradientPrecision",
    "Gradients",
    "GradientsF32",
    "GradientsI8",
    "GradientsI16",
    "PrecisionAdvice",
    "ProcessLostError",
    "RoundState",
    "TablePieces",
    "TreesError",
    "fit_distributed",
    "from_lightgbm",
    "load_trees",
    "open_pieces",
    "plot_importance",
    "plot_tree",
    "recommend_gradient_precision",
]

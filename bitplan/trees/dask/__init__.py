"""Boosted trees on a Dask cluster: estimators that take dask arrays and dataframes."""

from bitplan.base.optional import require

require("dask", purpose="bitplan.trees.dask", extra="dask")  # before the modules below import them
require("distributed", purpose="bitplan.trees.dask", extra="dask")

from bitplan.trees.dask.estimators import DaskBoostedTreesClassifier, DaskBoostedTreesRegressor

__all__ = ["DaskBoostedTreesClassifier", "DaskBoostedTreesRegressor"]

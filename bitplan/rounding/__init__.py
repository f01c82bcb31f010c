"""Better numbers in the same bytes, from statistics of a layer's inputs.

Which module does which step:

    weights                the definition: a weight rounded by moments or a Hessian of its inputs
    error_compensation     columns that make up for the errors of those before them
    scale_search, group_scales                  scales by weighted error; formats with scales of scales
    pick_loops             which loops run: `round_columns` in torch, `round_columns_cpu` by numba, `triton_rounding`
"""

from typing import TYPE_CHECKING

from bitplan.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from bitplan.rounding.weights import round_with_report as round_with_report

__getattr__, __dir__, __all__ = lazy_names(__name__)

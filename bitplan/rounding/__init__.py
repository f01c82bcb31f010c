"""Better numbers in the same bytes, from statistics of a layer's inputs.

Which module does which step:

    weights                the definition: a weight rounded by moments or a Hessian of its inputs
    error_compensation     columns that make up for the errors of those before them
    scale_search           scales by weighted error; GGUF's scales of scales
    round_vectors          GGUF's vectors of eight numbers, rounded as columns are
    round_columns          the loops in torch, and which loops run: these, `round_columns_cpu` or `triton_rounding`
"""

from typing import TYPE_CHECKING

from bitplan.base.names import lazy_names

if TYPE_CHECKING:
    from bitplan.rounding.weights import round_with_report as round_with_report

__getattr__, __dir__, __all__ = lazy_names(__name__)

"""Models that run on packed weights.

How a Plan becomes packed layers, step by step:

    apply_plan            decides for every tensor of a model, packs the weights, then changes the model
    layer_replacement     which layer can be packed, and the packed layer that takes its place
    quant_linear, quant_embedding, quant_experts    the packed layers
    product_strategy      how a layer's product runs: fused, decoded, from the tile cache; `crossover` measures it
    linear_operator       the product itself, and the operator that torch.compile and torch.export see
    products              its kernels with their launchers
    fused_projections     faster calls of a model that is packed already

A packed checkpoint becomes a model: `checkpoints.load`. `language` runs language models and measures their quality.
"""

from typing import TYPE_CHECKING

from bitplan.base.names import lazy_names

if TYPE_CHECKING:
    from bitplan.packed.kv_cache import KVCache as KVCache
    from bitplan.packed.machine import examine_machine as examine_machine
    from bitplan.packed.quant_experts import QuantExperts as QuantExperts
    from bitplan.packed.quant_linear import QuantLinear as QuantLinear
    from bitplan.packed.tile_cache import TileCache as TileCache
    from bitplan.packed.fused_projections import fuse_projections as fuse_projections
    from bitplan.packed.rounded_kv import round_kv as round_kv
    from bitplan.packed.language.compare_on_text import compare_on_text as compare_on_text

__getattr__, __dir__, __all__ = lazy_names(__name__)

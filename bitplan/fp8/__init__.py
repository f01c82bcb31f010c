"""Faster training in FP8 where it was measured to be faster.

Which module does which step:

    recipes, casts        the table of recipes, and their definition (a new one is a row there, and of its page)
    kernels               the same casts and products on GPUs, of one matrix and of all experts
    layers                linear layers in FP8, and what they keep of their weights
    bench                 the layer benchmark, its report, and its confirmation on whole blocks
    policy                reports into policies, and their answer for a layer and a count of tokens
    apply                 `apply_fp8`: asks the policy about every layer and puts FP8 where it wins
    find_linears, recorded_wiring    where FP8 may go, by what the model computes
    decide                what each layer becomes, and why; a table of it
    self_check            one block of each make beside its BF16 self
    build, fused_projections         the layers, put into the model
    loongforge            LoongForge's files
"""

from typing import TYPE_CHECKING

from bitplan.base.names import lazy_names

if TYPE_CHECKING:
    from bitplan.fp8.layers.linear import gather_weights_in_fp8 as gather_weights_in_fp8
    from bitplan.fp8.policy.merge import merge_reports as merge_reports
    from bitplan.fp8.policy.policy import should_use_fp8 as should_use_fp8

__getattr__, __dir__, __all__ = lazy_names(__name__)

"""Adaptive FP8: a policy applied to a model.

Which module does which step:

    apply                 `apply_fp8`: asks the policy about every layer and puts FP8 where it wins
    find_linears          where FP8 may go in a model; `recorded_wiring` says what may be joined, by what was seen
    self_check            compares one block of each make with its BF16 self
    build, replacements   make the FP8 layer of one place and put it there; `fused_projections` fuses q/k/v and gate/up
    experts               experts of a mixture as two grouped products
    layer_settings        a layer's recipe (of `formats.fp8_recipes`), and whether this machine can
    summary, token_watch  what was decided, and a warning where tokens are others than planned
    layers, bench         the layers themselves; their benchmark and its confirmation
"""

"""FP8 casts and products of one matrix, and of all experts of a layer in one launch (`experts_*`).

Which module does which step:

    cast               casts by any recipe: picks a kernel, or the definition
    triton_cast        its kernels on a GPU: `fast_tile` for bfloat16, `general_tile` for everything
    guessed_cast       tensorwise casts in one read, by a guessed scale that is then checked
    amax               the largest magnitudes, from which scales are computed
    product            products of scaled operands; `triton_product` for those by blocks
    norm, triton_norm  a norm in front of a cast
"""

"""FP8 casts and products of one matrix, and of all experts of a layer in one launch (`experts_*`).

Which module does which step:

    cast               casts by any recipe, behind a norm or an activation: picks a kernel, or the definition
    triton_cast        its kernels on a GPU: `fast_tile` for bfloat16, its own for everything else
    guessed_cast       tensorwise casts in one read, by a guessed scale that is then checked
    amax               the largest magnitudes, from which scales are computed
    product            products of scaled operands; `triton_product` for those by blocks and of experts
    triton_norm, triton_activation     kernels of what lies in front of a cast
"""

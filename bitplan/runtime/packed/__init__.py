"""Models that run on packed weights.

How a Plan becomes packed layers, step by step:

    apply_plan            decides for every tensor of a model, packs the weights, then changes the model
    dtype_checks          refuses plans under which float types would clash
    layer_replacement     which layer can be packed, and the packed layer that takes its place
    quant_linear, quant_embedding, quant_experts    the packed layers
    product_strategy      how a layer's product runs: fused, decoded, from the tile cache
    operators             the same products as torch.compile and torch.export see them
    fused_projections, warm_up    faster calls of a model that is packed already

A packed checkpoint becomes a model: `checkpoints.load`, for gpt-oss `gpt_oss.load`; `read_packed` gives tensors only.
"""

"""Linear layers in FP8, and what they keep of their weights.

Which module does which step:

    linear, grouped_linear                 the layers: plain or behind a norm, and of all experts
    linear_function                        the one function of autograd that they run through
    products                               its three products, each by its own recipe
    weight_source                          where they get the weight: cast, kept cast, stored in FP8, shared scale
    weight_casts, scale_guesses            what is kept from one step to the next
    bound_operators                        what generated code calls, with little work for the host
    stored_weight                          a weight stored in FP8, or gathered in FP8 from other processes
    parallel                               layers over several processes
"""

"""FP8 or BF16, layer by layer: reports of measured times, policies made from them, and their answers.

Which module does which step:

    layers                 from a model's config to its linear layers
    report                 what a layer benchmark measured, and whether FP8 is faster, by an interval
    rules                  the policy: rules of measured token counts; read and written in both versions
    merge                  reports into a policy
    policy                 `should_use_fp8`: the answer for one layer and count of tokens, with its reason
    choice                 which products of a layer run in FP8, with estimates of what was not measured
    vocabulary             the kinds and names that policies know
"""

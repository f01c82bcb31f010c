"""FP8 or BF16, layer by layer: reports of measured times, policies made from them, and their answers.

Which module does which step:

    model_parts, layers    from a model's config to its linear layers
    report                 what a layer benchmark measured
    merge                  reports into a policy; `speedup_interval` judges whether FP8 is faster
    policy                 `should_use_fp8`: the answer for one layer and count of tokens, with its reason
    token_ranges           policies by bands of tokens; `thresholds`: by one number; `estimate`: what was not measured
    choice, vocabulary     an answer, and the kinds and names that policies know
"""

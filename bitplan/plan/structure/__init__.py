"""What a model computes, seen in one run of its forward without numbers; or read from one table of names.

Which module does which step:

    model_view      the records: ModelView, TensorRecord, TensorSpec, LinearUse, NormUse, ...; they need no torch
    parameters      the Parameters of a module under every name, and how a user may name them
    families        the one table of names, for files without code
    describe        from a module to its view; `bitplan.describe` takes paths, too (store.describe_files)
    recorder        one run: every torch function with what goes in and out; `untouched` keeps the model as it was,
                    says what others put on it, and makes inputs where the user gives none
    graph           walks through a recording
    recognise       the parts: products, norms, then MLPs, attention, residuals, and blocks that repeat; `activations`
                    names functions
    joined_calls    layers that read one tensor as one product, whose parts are given to them call by call
"""

"""Which block gets which precision during training: pure decisions, and the policy that watches a stream.

Which module does which step:

    training_policy      a training step: gathers statistics, asks `decide`, changes the stream's formats
    decide               the answer for every block at a step, with its reason: BF16, INT8 or FP8
    score                how sensitive a block is, from gradients or in units of loss
    state, config              what decisions are made from, what survives a restart, every switch
    precision_units, layer_probes, gradient_statistics    what is decided on, and what is measured of it
    run_calibration, calibration    relative output errors of candidate formats, before training, and their file
    trainer_callbacks               a line of JSON per update; the same steps for Trainer, Lightning and TensorBoard
"""

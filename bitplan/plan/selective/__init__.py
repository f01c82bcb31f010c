"""Which block gets which precision during training: pure decisions over statistics.

Which module does which step:

    decide               the answer for every block at a step, with its reason: BF16, INT8 or FP8
    byte_budget          the same under a budget of bytes, with 4 bits as a third rung
    score                how sensitive a block is, from gradients or in units of loss
    choose_low_units     which blocks go low, within a budget of damage; `choose_rungs` for three rungs
    loss_trials          measures what a switch did to the loss, and undoes it
    transfer_limits      how fast and how far ahead blocks may be moved
    evidence, state, config    what decisions are made from, what survives a restart, every switch
"""

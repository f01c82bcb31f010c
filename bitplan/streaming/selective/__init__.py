"""Which block gets which precision during training: pure decisions, and the policy that watches a stream.

training_policy      a training step: gathers statistics, asks `decide`, changes formats, tries switches
decide, score        the answer for every block at a step, with its reason; how sensitive a block is
config, state        every switch; what survives a restart
precision_units, layer_probes, gradient_statistics    what is decided on, and what is measured of it
calibration          relative output errors of candidate formats, before training, and their file
run_controller       FP8 products and formats on the bus as one plan over a run, logged and replayed
trainer_callbacks    the same steps for Hugging Face's Trainer, Lightning and TensorBoard
"""

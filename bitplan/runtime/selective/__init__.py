"""Selective precision: a policy that watches a stream and decides its formats.

Which module does which step:

    training_policy      a training step: gathers statistics, asks `plan.selective.decide`, changes the stream's formats
    precision_units      what is decided on (blocks or layers): their weights, bytes and gradients
    layer_probes         what the policy needs of a streamed model, by module hooks
    run_calibration      relative output errors of candidate formats, before training
    setup_checks         a policy checked before training
    telemetry            a line of JSON per update
    trainer_callbacks    the same steps for Trainer, Lightning and TensorBoard
"""

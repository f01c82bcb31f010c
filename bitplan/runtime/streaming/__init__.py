"""Models whose blocks wait on the host and cross to the device when they are needed.

Which module does which step:

    stream_blocks      the entry: changes a model so that its blocks are streamed; `options` checks what was asked for
    block_calls        loads a block before it computes and frees it afterwards
    weight_loader      loads the block that is asked for, and prefetches what comes next
    block_bytes        the encoded bytes on the host; `reencode_blocks` renews them before a step
    policy_link        where `runtime.selective` changes a block's format; it is decided in `plan.selective.decide`
    telemetry          what a step moved and waited for
    blocks, transfer, training    a block's parts and formats; copies and slots; weights trained on the host
"""

"""An unmodified transformers Llama: trained and run through the ring as if it were resident."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bitplan.base.errors import StreamError
from bitplan.streaming.block_stream import stream_blocks
from bitplan.streaming.training.adamw import AdamWSettings
from tests.streaming.stream_samples import OPTIONS, LowRank, assert_equal, decoded_twin, gradients

transformers = pytest.importorskip("transformers")
IDS = torch.arange(24).reshape(2, 12) % 50


def make_llama(*, adapters: bool) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config)
    if adapters:
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    return loss


@pytest.mark.cross("checkpointing", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
@pytest.mark.cross("formats", [None, {"model.layers.*": "int8_row", "model.layers.2.mlp.up_proj.weight": "mxfp4"}])
def test_adapters_of_a_llama(checkpointing, formats):
    model = make_llama(adapters=True).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    source = copy.deepcopy(model)
    with stream_blocks(model, device="cpu", formats=formats, slots=2, options=OPTIONS) as stream:
        twin = decoded_twin(source, stream.formats)
        for step in range(2):
            stream.begin_step(step)
            loss = loss_of(model)
            loss.backward()
            stream.end_step()
            expected = loss_of(twin)
            expected.backward()
            assert torch.equal(loss, expected)
            assert_equal(gradients(model), gradients(twin))


def test_a_llama_with_offloaded_activations():
    model = make_llama(adapters=True).train()
    resident = copy.deepcopy(model)
    loss_of(resident).backward()
    options = {"device": "cpu", "slots": 2, "options": OPTIONS, "offload_activations": True}
    with stream_blocks(model, **options) as stream:
        stream.begin_step(0)
        loss_of(model).backward()
        stream.end_step()
        assert_equal(gradients(model), gradients(resident))
        stream.synchronize()
        assert stream.stats.last.bytes_d2h == 4 * IDS.numel() * 64 * 4  # hidden states, and no mask or rotary table
        model.gradient_checkpointing_enable({"use_reentrant": False})
        stream.begin_step(1)
        with pytest.raises(StreamError, match=r"model\.layers\.0, step 1: the model checkpoints this block itself"):
            loss_of(model)


def test_weights_of_a_llama():
    model = make_llama(adapters=False).train()
    resident = copy.deepcopy(model)
    options = {"device": "cpu", "slots": 2, "options": OPTIONS}
    settings = AdamWSettings(lr=1e-3, weight_decay=0.0)
    with stream_blocks(model, **options, train="weights", optimizer=settings) as stream:
        outside = [one for name, one in model.named_parameters() if name not in stream.formats]
        optimizer = torch.optim.AdamW(outside, lr=1e-3, weight_decay=0.0, fused=True)
        for step in range(3):
            stream.begin_step(step)
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            stream.end_step()
        stream.synchronize()
    optimizer = torch.optim.AdamW(resident.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    for _ in range(3):
        loss_of(resident).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(dict(model.named_parameters()), dict(resident.named_parameters()))


def test_generation_with_a_cache():
    model = make_llama(adapters=False).eval()
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(IDS[:1], **settings)
    with stream_blocks(model, device="cpu", slots=2, train="nothing", options=OPTIONS):
        assert torch.equal(model.generate(IDS[:1], **settings), expected)

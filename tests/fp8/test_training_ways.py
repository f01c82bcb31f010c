"""FP8 layers as people train: adapters of peft, activation checkpointing, micro-batches, Lightning, whole graphs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bitplan.fp8.apply import apply_fp8
from bitplan.fp8.layers import weight_casts
from bitplan.fp8.layers.linear import Fp8Linear
from tests.fp8.test_apply import ALL, llama, policy_of, tokens_of

IDS = tokens_of(100)


def in_fp8(model):
    applied = apply_fp8(model, policy_of(**ALL), tokens=100, emulate=True)
    return model, applied


def gradients(model):
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def test_adapters_of_peft_keep_their_type_and_their_bases_become_fp8(tmp_path):
    peft = pytest.importorskip("peft")
    plain = llama(num_hidden_layers=1).bfloat16()
    wanted = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=2, init_lora_weights=False)
    model, applied = in_fp8(peft.get_peft_model(plain, wanted, autocast_adapter_dtype=False))
    assert {row.name: row.precision for row in applied.rows} == dict.fromkeys(("qkv", "proj", "fc1", "fc2"), "fp8")
    layer = model.base_model.model.model.layers[0]
    assert isinstance(layer.mlp.down_proj.base_layer, Fp8Linear)
    assert isinstance(layer.self_attn.q_proj.base_layer.fused, Fp8Linear)  # q, k and v, of which two have adapters
    assert {one.dtype for name, one in model.named_parameters() if "lora_" in name} == {torch.bfloat16}
    bases = {name: one.clone() for name, one in model.named_parameters() if not one.requires_grad}
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        assert all(one.grad is not None and one.grad.dtype == torch.bfloat16 for one in trained)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert all(torch.equal(bases[name], one) for name, one in model.named_parameters() if name in bases)
    expected = model(input_ids=IDS).logits
    model.save_pretrained(tmp_path)
    again = llama(num_hidden_layers=1).bfloat16()
    again = peft.PeftModel.from_pretrained(again, tmp_path, autocast_adapter_dtype=False)
    assert torch.equal(in_fp8(again)[0](input_ids=IDS).logits, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_no_gradient(use_reentrant):
    model, _ = in_fp8(llama(num_hidden_layers=1))
    layer = model.model.layers[0]
    x = torch.randn(1, 64, 128, requires_grad=True)
    position = model.model.rotary_emb(x, torch.arange(64)[None])
    run = lambda one: layer(one, position_embeddings=position)
    run(x).square().mean().backward()
    expected, of_x = gradients(layer), x.grad.clone()
    layer.zero_grad()
    x.grad = None
    checkpoint(run, x, use_reentrant=use_reentrant).square().mean().backward()
    assert torch.equal(x.grad, of_x)
    assert all(torch.equal(one, expected[name]) for name, one in gradients(layer).items())
    assert expected


def test_micro_batches_of_a_step_share_one_cast_of_each_weight(monkeypatch):
    model, _ = in_fp8(llama(num_hidden_layers=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    casts = []
    cast = weight_casts._cast
    monkeypatch.setattr(weight_casts, "_cast", lambda *args, **more: casts.append(1) or cast(*args, **more))
    layers = sum(isinstance(module, Fp8Linear) for module in model.modules())
    for step in range(2):
        for _ in range(3):
            model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert len(casts) == layers * (step + 1)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")  # its own
def test_lightning_trains_and_its_checkpoint_comes_back(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = in_fp8(llama(num_hidden_layers=1))[0]

        def training_step(self, batch, _index):
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_steps=2, default_root_dir=tmp_path, enable_checkpointing=False, **quiet)
    module = Module()
    before = module.model(input_ids=IDS).logits
    trainer.fit(module, torch.utils.data.DataLoader(IDS.repeat(2, 1), batch_size=1))
    after = module.model(input_ids=IDS).logits
    assert not torch.equal(before, after)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert "model.model.layers.0.self_attn.q_proj.weight" in state  # the names of the model as it was loaded
    plain = llama(num_hidden_layers=1)
    plain.load_state_dict({name.removeprefix("model."): one for name, one in state.items()})
    assert torch.equal(in_fp8(plain)[0].eval()(input_ids=IDS).logits, module.model.eval()(input_ids=IDS).logits)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.parametrize("way", [pytest.param("adapters", marks=pytest.mark.long), "checkpointed"])
def test_compiles_as_one_graph_forward_and_backward(way):
    plain = llama(num_hidden_layers=1)
    if way == "adapters":
        peft = pytest.importorskip("peft")
        wanted = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=2, init_lora_weights=False)
        plain = peft.get_peft_model(plain, wanted).base_model.model
    model, applied = in_fp8(plain)
    assert applied.fp8_layers == 4
    layer = model.model.layers[0]
    x = torch.randn(1, 64, 128, requires_grad=True)
    position = model.model.rotary_emb(x, torch.arange(64)[None])

    def run(one):
        if way == "checkpointed":
            return checkpoint(layer, one, position_embeddings=position, use_reentrant=False)
        return layer(one, position_embeddings=position)

    run(x).square().mean().backward()
    expected = gradients(layer)
    layer.zero_grad()
    # Fused projections keep their parts from call to call, which dynamo refuses within a checkpoint unless it is told.
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        torch.compile(run, backend="aot_eager", fullgraph=True)(x).square().mean().backward()
    result = gradients(layer)
    assert result.keys() == expected.keys()
    for name, one in result.items():
        assert torch.allclose(one, expected[name], rtol=1e-4, atol=1e-6), name

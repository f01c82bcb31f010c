"""FSDP2 with weights gathered in FP8: two processes over gloo train as one does, and checkpoints hold plain numbers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoints
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bitplan.fp8.layer_settings import Fp8LayerError, Fp8Recipe
from bitplan.fp8.layers import stored_weight, weight_source
from bitplan.fp8.layers.grouped_linear import GroupedLinear
from bitplan.fp8.layers.linear import Fp8Linear, Fp8NormLinear, gather_weights_in_fp8
from bitplan.fp8.layers.weight_source import CastsWeight
from tests.fp8.layers.test_parallel import in_processes

STEPS, MICRO_BATCHES = 3, 2


def make_model(seed=0, recipe="tensorwise"):
    torch.manual_seed(seed)
    how = {"recipe": Fp8Recipe(recipe)}
    blocks = [
        nn.Sequential(Fp8NormLinear(32, 64, **how), nn.Tanh()),
        nn.Sequential(Fp8Linear(64, 32, **how), nn.Tanh()),
    ]
    return nn.Sequential(*blocks, nn.Linear(32, 16))


def shard(model):
    mesh = init_device_mesh("cpu", (2,))
    for block in list(model)[:2]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch(step, micro, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(8, 32, generator=generator) * (1 + 2 * rank)


def test_two_processes_train_as_one(tmp_path):
    in_processes(_train_as_one, tmp_path)


def _train_as_one(rank):
    counts = {"all_reduce": 0, "cast": 0}

    def counting(name, run):
        def counted(*args, **more):
            counts[name] += 1
            return run(*args, **more)

        return counted

    stored_weight.dist.all_reduce = counting("all_reduce", dist.all_reduce)
    stored_weight.shared_amax_cast = counting("cast", stored_weight.shared_amax_cast)
    one, model = make_model(), make_model()
    assert gather_weights_in_fp8(model) == {}
    shard(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (one, model)]
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            for other in range(2):
                (one(batch(step, micro, other)).square().mean() / 2).backward()
            model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
            model(batch(step, micro, rank)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        # Two weights: each once a step. The first step meets them one by one; later ones find both maxima together.
        assert counts == {"cast": 2 * (step + 1), "all_reduce": 2 + step}
    model[0].unshard()
    gathered = model[0][0].weight
    assert gathered.codes.dtype == torch.uint8
    assert gathered.codes.shape == (64, 32)
    model[0].reshard()

    whole = checkpoints.get_model_state_dict(model, options=checkpoints.StateDictOptions(full_state_dict=True))
    own = model.state_dict()
    for name, expected in one.state_dict().items():
        assert type(own[name]._local_tensor) is torch.Tensor
        assert type(whole[name]) is torch.Tensor
        assert whole[name].dtype == torch.float32
        assert torch.allclose(whole[name], expected, rtol=1e-5, atol=1e-7), name

    fresh = make_model(seed=1)
    gather_weights_in_fp8(fresh)
    shard(fresh).load_state_dict(own)
    x = batch(9, 0, 0)
    assert torch.equal(fresh(x), model(x))
    plain = make_model(seed=1)
    plain.load_state_dict(whole)
    assert torch.equal(plain(x), model(x))  # the codes that were gathered are those of the whole weight
    fresh.reshard()  # after a forward alone FSDP2 leaves the outermost weights whole
    checkpoints.set_model_state_dict(
        fresh,
        make_model(seed=2).state_dict(),
        options=checkpoints.StateDictOptions(full_state_dict=True),
    )
    assert torch.equal(fresh(x), make_model(seed=2)(x))

    uneven = nn.Sequential(Fp8Linear(32, 16, bias=False, recipe=Fp8Recipe("tensorwise")))
    gather_weights_in_fp8(uneven)
    fully_shard(uneven, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda _: _second_axis())
    with pytest.raises(Fp8LayerError, match="gathered in FP8 from equal shards of rows"):
        uneven(x)


def _second_axis():
    from torch.distributed.tensor import Shard

    return Shard(1)


def test_other_recipes_cross_as_they_are_and_are_named():
    model = make_model(recipe="rowwise")
    left = gather_weights_in_fp8(model)
    assert list(left) == ["0.0", "1.0"]
    assert "only tensorwise has one scale" in left["0.0"]
    assert not any(layer.reuse_weight_cast for layer in model.modules() if isinstance(layer, Fp8Linear))
    with pytest.raises(Fp8LayerError, match="has no FP8 layers; call apply_fp8 first"):
        gather_weights_in_fp8(nn.Linear(2, 2))


def test_a_sharded_layer_without_fp8_gathering_reuses_no_cast_and_says_so(caplog, monkeypatch):
    monkeypatch.setattr(weight_source, "_said", False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, one = make_model(), make_model()
        model.append(GroupedLinear(2, 16, 16, recipe=Fp8Recipe("tensorwise")))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert not any(each.reuse_weight_cast for each in model.modules() if isinstance(each, CastsWeight))
        assert caplog.text.count("call gather_weights_in_fp8(model) before fully_shard") == 1
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, one)]
        del model[3]
        for step in range(3):
            outputs = [each(batch(step, 0, 0)) for each in (model, one)]
            assert torch.equal(*outputs)
            for output, optimizer in zip(outputs, optimizers, strict=True):
                output.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        dist.destroy_process_group()


def test_experts_are_named_among_what_crosses_as_it_is():
    model = nn.Sequential(GroupedLinear(2, 16, 16, recipe=Fp8Recipe("tensorwise")))
    assert gather_weights_in_fp8(model) == {"0": "its experts have a scale each"}
    assert not model[0].reuse_weight_cast

"""peft's adapters on packed layers: they train, are saved and loaded, and cannot be merged."""

from __future__ import annotations

import pytest
import torch

import bitplan

peft = pytest.importorskip("peft")

from bitplan.packed.product_strategy import LayerError  # noqa: E402
from bitplan.peft import LoraPackedLinear, get_peft_model, load_adapter  # noqa: E402


def packed_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    bitplan.apply_plan(model, {"0.weight": "int8_row", "*": "float32"})
    return model


@pytest.mark.parametrize("targets", ["all-linear", ["0", "2"]])
def test_adapters_train_and_come_back(targets, tmp_path):
    model = get_peft_model(packed_model(), peft.LoraConfig(target_modules=targets, r=2))
    assert isinstance(model.base_model.model[0], LoraPackedLinear)
    assert type(model.base_model.model[2]) is peft.tuners.lora.layer.Linear
    rows, packed = torch.randn(4, 32), model.base_model.model[0].get_base_layer().weight
    before, codes = model(rows), {name: one.clone() for name, one in packed.encoded.parts.items()}
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    model(rows).square().mean().backward()
    optimizer.step()
    after = model(rows)
    assert not torch.equal(before, after)
    assert all(torch.equal(packed.encoded.parts[name], one) for name, one in codes.items())
    model.save_pretrained(tmp_path)
    assert torch.equal(load_adapter(packed_model(), tmp_path)(rows), after)
    with pytest.raises(LayerError, match=r"cannot be merged into a weight packed in int8_row: save the adapter"):
        model.merge_and_unload()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (lambda: peft.LoraConfig(target_modules=["0"], use_dora=True), "no DoRA adapters"),
        (lambda: peft.LoraConfig(target_modules=["2"], modules_to_save=["0"]), "modules_to_save: 0 is packed"),
        (lambda: peft.IA3Config(target_modules=["0"], feedforward_modules=[]), "expected a LoraConfig, got IA3Config"),
    ],
)
def test_other_adapters_are_refused(config, says):
    with pytest.raises(LayerError, match=says):
        get_peft_model(packed_model(), config())


def test_what_is_no_model_or_no_adapter_is_refused(tmp_path):
    with pytest.raises(LayerError, match=r"a model that is loaded, a torch\.nn\.Module, got a str"):
        get_peft_model("folder", peft.LoraConfig(target_modules=["0"]))
    with pytest.raises(LayerError, match=r"no adapter_config.json, so not an adapter's folder"):
        load_adapter(packed_model(), tmp_path)
    model = get_peft_model(packed_model(), peft.LoraConfig(target_modules=["0"]))
    with pytest.raises(bitplan.BitplanError, match="the model has adapters; save them with its save_pretrained"):
        bitplan.save_packed(model, tmp_path / "packed")

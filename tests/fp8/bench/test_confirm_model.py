"""The small model that a policy is confirmed on: which blocks, of what shapes, on which tokens, and what is refused."""

from __future__ import annotations

import json
import socket
import sys

import pytest
import torch

from bitplan.base.errors import MissingLibraryError
from bitplan.fp8.bench.confirm_policy import count_blocks, plan_small_model
from bitplan.fp8.find_linears import find_sites
from bitplan.fp8.policy.layers import Parallel, local_layers, model_parts
from bitplan.fp8.policy.vocabulary import ModelConfigError
from tests.fp8.test_find_linears import DEEPSEEK, MOE, SMALL

CPU, META = torch.device("cpu"), torch.device("meta")
LLAMA = SMALL | {"model_type": "llama", "num_hidden_layers": 5}
LATENT = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
FAMILIES = {
    "llama": (LLAMA, 1),
    "qwen3": (LLAMA | {"model_type": "qwen3", "head_dim": 32}, 1),
    "mixtral": (LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, 1),
    "every second block": (LLAMA | MOE | {"model_type": "qwen3_moe", "head_dim": 32, "decoder_sparse_step": 2}, 2),
    "dense blocks named": (LLAMA | MOE | {"model_type": "qwen3_moe", "head_dim": 32, "mlp_only_layers": [2]}, 3),
    "dense first": (
        LLAMA | DEEPSEEK | LATENT | {"model_type": "deepseek_v3", "first_k_dense_replace": 3, "n_shared_experts": 1},
        4,
    ),
    "no dense": (LLAMA | DEEPSEEK | LATENT | {"model_type": "deepseek_v3", "first_k_dense_replace": 0}, 1),
}


def save(folder, document):
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def layers_of(model):
    return {(site.shape, site.norm is not None, site.num_gemms) for site in find_sites(model).sites}


def measured(document, tp=1):
    layers = local_layers(model_parts(document), Parallel(tp=tp))
    return {(layer.shape, layer.kind == "layernorm_column", layer.num_gemms) for layer in layers}


@pytest.mark.parametrize("family", FAMILIES)
def test_as_few_blocks_as_show_every_layer(family, tmp_path):
    document, blocks = FAMILIES[family]
    document = document | ({"n_shared_experts": 1} if "deepseek" in document["model_type"] else {})
    small = plan_small_model(save(tmp_path, document))
    assert (small.blocks, small.of_blocks) == (blocks, 5)
    assert ("all blocks are alike" in small.reason) == (blocks == 1)
    model = small.build(META)
    assert len(model.model.layers) == blocks
    assert layers_of(model) == measured(document)


def test_the_share_of_one_gpu(tmp_path):
    small = plan_small_model(save(tmp_path, LLAMA), tp=2)
    assert layers_of(small.build(META)) == measured(LLAMA, tp=2)
    assert ((128, 128), False, None) in measured(LLAMA, tp=2)


def test_only_blocks_are_kept_as_they_are(tmp_path):
    kinds = ["sliding_attention", "full_attention"] * 2 + ["full_attention"]
    document = LLAMA | {"model_type": "qwen2", "vocab_size": 150_000, "pad_token_id": 149_999, "eos_token_id": [7, 9]}
    document |= {"layer_types": kinds, "sliding_window": 32, "use_sliding_window": True, "torch_dtype": "float16"}
    document |= {"quantization_config": {"quant_method": "fp8"}, "auto_map": {"AutoConfig": "evil.py"}}
    small = plan_small_model(save(tmp_path, document))
    model = small.build(CPU)
    assert model.config.layer_types == ["sliding_attention"]
    assert model.get_input_embeddings().weight.shape == (1024, 128)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.training
    before = torch.random.get_rng_state()
    again = small.build(CPU).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("positions", "tokens", "shape"),
    [
        (64, 10, (1, 10)),
        (64, 64, (1, 64)),
        (64, 65, (2, 33)),
        (64, 200, (4, 50)),
        (None, 4096, (1, 4096)),
        (None, 6000, (2, 3000)),
        (131072, 16384, (4, 4096)),
    ],
)
def test_examples_have_the_count_that_was_asked_for(positions, tokens, shape, tmp_path):
    document = LLAMA if positions is None else LLAMA | {"max_position_embeddings": positions}
    small = plan_small_model(save(tmp_path, document))
    example = small.example(tokens, CPU)["input_ids"]
    assert example.shape == small.example_shape(tokens) == shape
    assert 0 <= shape[0] * shape[1] - tokens < shape[0]
    assert int(example.max()) < 64
    assert torch.equal(example, small.example(tokens, CPU)["input_ids"])


def test_it_runs_without_a_network(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("nothing is to be downloaded")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    small = plan_small_model(save(tmp_path, LLAMA | {"max_position_embeddings": 16}))
    assert small.build(CPU)(**small.example(40, CPU)).logits.shape == (3, 14, 64)


@pytest.mark.parametrize(
    ("document", "tp", "message"),
    [
        ([1], 1, "a model's config.json must be an object"),
        ({"hello": 1}, 1, "model_type null is not known; .*in Python, apply_fp8"),
        (LLAMA | {"model_type": "gpt2"}, 1, 'model_type "gpt2" is not known.*in Python, apply_fp8'),
        ({key: LLAMA[key] for key in LLAMA if key != "hidden_size"}, 1, "hidden_size is missing; it must be"),
        (LLAMA | {"vision_config": {}}, 1, "a vision-language model, .*text model's config.json was expected"),
        (LLAMA | {"model_type": "qwen2_5_vl_text"}, 1, "transformers cannot build a causal language model of it"),
        (
            LLAMA | {"hidden_act": "none such"},
            1,
            "transformers cannot build a causal language model of it: KeyError: .*none such",
        ),
        (LLAMA | {"max_position_embeddings": 0}, 1, "max_position_embeddings must be an integer from 1, got 0"),
        (LLAMA | {"vocab_size": -3}, 1, "vocab_size must be an integer from 1, got -3"),
        (LLAMA, 4, "num_key_value_heads is 2, which tp 4 does not divide"),
        (FAMILIES["mixtral"][0], 2, "tp 2 takes dense models"),
        (FAMILIES["no dense"][0], 2, "tp 2 takes dense models"),
    ],
)
def test_refused_in_one_line(document, tp, message, tmp_path):
    with pytest.raises(ModelConfigError, match=message) as result:
        plan_small_model(save(tmp_path, document), tp=tp)
    assert str(result.value).startswith(str(tmp_path / "config.json"))
    assert "\n" not in str(result.value)
    assert len(str(result.value)) < 700


def test_refused_files(tmp_path):
    with pytest.raises(ModelConfigError, match=r"config.json: cannot be read: No such file"):
        plan_small_model(tmp_path)
    with pytest.raises(ModelConfigError, match=r"model.yaml: a YAML cannot be built by transformers"):
        plan_small_model(tmp_path / "model.yaml")


def test_an_old_transformers_is_said(tmp_path, monkeypatch):
    plan_small_model(save(tmp_path, LLAMA))  # transformers replaces its own module when it is first used
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(MissingLibraryError, match=r"needs transformers 5, 4.57.1 is installed: pip install"):
        plan_small_model(tmp_path)


def test_a_model_without_layers_of_a_policy():
    with pytest.raises(ModelConfigError, match="Sequential has no layers that a policy knows"):
        count_blocks(torch.nn.Sequential(torch.nn.Linear(4, 4)))

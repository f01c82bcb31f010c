"""Blocks that run one token in a few calls: the numbers of their own forward, which runs wherever it must."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("numba")

import bitplan
from bitplan.base.errors import StoreError
from bitplan.packed.fused_projections import fuse_projections
from bitplan.packed.quick_blocks import QuickBlock, quicken_blocks, why_own_forward
from tests.packed.linear_samples import SMALL

transformers = pytest.importorskip("transformers")
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def packed(kind: str = "Llama", fmt: str = "int8_row", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SMALL | settings))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    bitplan.apply_plan(model, fmt, unsupported="skip")
    fuse_projections(model)
    return model


def quick(kind: str = "Llama", fmt: str = "int8_row", **settings: Any) -> Any:
    model = packed(kind, fmt, **settings)
    assert quicken_blocks(model) == ["model.layers.0", "model.layers.1"]
    return model


def logits_of(model: Any, ids: list[int] = IDS, prompt: int = 3, **options: Any) -> Tensor:
    """Of all tokens from the prompt's last on, one after the other."""
    out = model(torch.tensor([ids[:prompt]]), use_cache=True, **options)
    made = [out.logits[:, -1]]
    for token in ids[prompt:]:
        out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True, **options)
        made.append(out.logits[:, -1])
    return torch.cat(made)


@contextmanager
def own_calls(model: Any) -> Iterator[list[int]]:
    """The rows of what the attentions' own forwards get in the block."""
    calls: list[int] = []
    attention: Any = type(model.model.layers[0].self_attn)
    forward = attention.forward

    def count(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        calls.append(hidden_states.shape[1])
        return forward(self, hidden_states, *args, **options)

    attention.forward = count
    try:
        yield calls
    finally:
        attention.forward = forward


def in_own_forward(model: Any, prompt: int = 3, **options: Any) -> bool:
    """Whether tokens ran in the blocks' own forward, once blocks were tried."""
    with own_calls(model) as calls:
        logits_of(model, prompt=prompt, **options)
    assert calls.count(1) in (0, len(model.model.layers) * (len(IDS) - prompt))
    return 1 in calls


@pytest.mark.parametrize(
    ("kind", "fmt", "settings"),
    [
        ("Llama", "q4_0_gguf", {}),
        ("Llama", "nvfp4", {"attention_bias": True, "tie_word_embeddings": True}),
        ("Llama", "int8_row", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("Mistral", "int8_row", {"sliding_window": None}),
        ("Qwen2", "mxfp4", {"hidden_act": "gelu"}),
    ],
)
def test_tokens_have_the_logits_of_the_blocks_own_forward(kind: str, fmt: str, settings: dict[str, Any]) -> None:
    model = quick(kind, fmt, **settings)
    expected = packed(kind, fmt, **settings)
    for no_gradients in (torch.no_grad, torch.inference_mode):
        with no_gradients():
            torch.testing.assert_close(logits_of(model), logits_of(expected), rtol=1e-4, atol=1e-5)
            assert why_own_forward(model) == {}
            assert not in_own_forward(model)


def test_a_cache_holds_what_the_own_forward_would_have_entered() -> None:
    caches = []
    with torch.no_grad():
        for model in (quick(), packed()):
            out = model(torch.tensor([IDS[:4]]), use_cache=True)
            for token in IDS[4:]:
                model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
            caches.append(out.past_key_values)
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-5)


def test_hidden_states_given_out_are_not_written_later() -> None:
    with torch.no_grad():
        made, expected = (
            [
                model(
                    torch.tensor([IDS[4:5]]),
                    past_key_values=model(torch.tensor([IDS[:4]]), use_cache=True).past_key_values,
                    use_cache=True,
                    output_hidden_states=True,
                ).hidden_states
                for _ in range(2)
            ][1]
            for model in (quick(), packed())
        )
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Gemma2", {"head_dim": 32}),
        ("Mistral", {"sliding_window": 4}),
        ("Qwen3", {"head_dim": 32}),
        ("Granite", {"residual_multiplier": 0.5}),
        ("Llama", {"head_dim": 8}),
    ],
)
def test_models_that_compute_something_else_keep_their_forward(kind: str, settings: dict[str, Any]) -> None:
    model = packed(kind, **settings)
    quicken_blocks(model)
    with torch.no_grad():
        assert torch.equal(logits_of(model), logits_of(packed(kind, **settings)))


def double_scores(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def test_a_scale_that_the_structure_does_not_show_is_seen_in_the_trial() -> None:
    model, expected = quick(), packed()
    double_scores(model)
    double_scores(expected)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(model), logits_of(expected), rtol=1e-4, atol=1e-5)
    reason = "the input of model.layers.0.self_attn.o_proj would be other numbers than in its own forward"
    assert why_own_forward(model) == {"model.layers.0": reason}


def test_what_is_changed_after_the_trial_runs_in_the_own_forward() -> None:
    model, seen = quick(), []
    with torch.no_grad():
        before = logits_of(model)
        assert not in_own_forward(model)
        hook = model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: seen.append(1))
        hook_logits = logits_of(model)
        assert len(seen) == len(IDS) - 2
        torch.testing.assert_close(hook_logits, before, rtol=1e-4, atol=1e-5)
        hook.remove()
        assert not in_own_forward(model)
        expected = packed()
        for one in (model, expected):
            double_scores(one)
        torch.testing.assert_close(logits_of(model), logits_of(expected), rtol=1e-4, atol=1e-5)
        for one in (model, expected):
            one.model.layers[0].mlp.act_fn = nn.GELU()
            one.model.layers[1].input_layernorm.weight.mul_(2)
            one.model.layers[1].self_attn.o_proj = nn.Identity()
        torch.testing.assert_close(logits_of(model), logits_of(expected), rtol=1e-4, atol=1e-5)


def test_weights_and_norms_that_are_written_are_read_anew() -> None:
    model, other = quick(), packed()
    with torch.no_grad():
        logits_of(model)
        for one in (model, other):
            state = one.state_dict()
            parts = {name: part * 1.5 for name, part in state.items() if part.is_floating_point()}
            one.load_state_dict(state | parts)
        torch.testing.assert_close(logits_of(model), logits_of(other), rtol=1e-4, atol=1e-5)
        assert not in_own_forward(model)


def test_gradients_training_masks_and_other_caches_take_the_own_forward() -> None:
    model, expected = quick(), packed()
    ids = torch.tensor([IDS])
    out = model(ids[:, :4], use_cache=True)
    token = model(ids[:, 4:5], past_key_values=out.past_key_values, use_cache=True).logits
    assert token.requires_grad  # embeddings and norms learn
    with torch.no_grad():
        logits_of(model)
        model.train()
        assert in_own_forward(model)
        model.eval()
        with torch.autocast("cpu", torch.bfloat16):
            assert in_own_forward(model)
        padded, mask = torch.tensor([[0, *IDS]]), torch.tensor([[0] + [1] * len(IDS)])
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        for settings in (
            {"inputs": padded, "attention_mask": mask},
            {"inputs": ids, "attention_mask": mask[:, 1:], "cache_implementation": "static"},
            {"inputs": ids.repeat(2, 1), "attention_mask": mask[:, 1:].repeat(2, 1)},
            {"inputs": ids, "attention_mask": mask[:, 1:], "num_beams": 3},
        ):
            with own_calls(model) as calls:
                made = model.generate(**settings, **options)
            assert calls.count(1) == 2 * 3
            assert torch.equal(made, expected.generate(**settings, **options))


def test_default_types_and_devices_of_torch_are_not_those_of_its_memory() -> None:
    model = quick()
    with torch.no_grad():
        expected = logits_of(model)
        with torch.device("cpu"):
            assert in_own_forward(model)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float16)
        try:
            made = logits_of(model)
        finally:
            torch.set_default_dtype(before)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


def test_attentions_are_given_where_they_are_asked_for() -> None:
    model = quick()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        cache = model(torch.tensor([IDS[:4]]), use_cache=True).past_key_values
        out = model(torch.tensor([IDS[4:5]]), past_key_values=cache, use_cache=True, output_attentions=True)
    assert [one.shape for one in out.attentions] == [(1, 4, 1, 5)] * 2


def test_copies_and_pickles_have_weights_of_their_own() -> None:
    model = quick()
    with torch.no_grad():
        expected = logits_of(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twins: list[Any] = [copy.deepcopy(model), torch.load(file, weights_only=False)]
        for twin in twins:
            layer: Any = twin.model.layers[0]
            assert isinstance(twin.model.layers[0], QuickBlock)
            torch.testing.assert_close(logits_of(twin), expected, rtol=1e-4, atol=1e-5)
            assert not in_own_forward(twin)
            layer.input_layernorm.weight.mul_(3)
            assert not torch.allclose(logits_of(twin), expected, atol=1e-3)
            torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-5)


def test_threads_do_not_write_into_each_others_memory() -> None:
    model = quick()
    texts = [IDS, IDS[::-1]]
    with torch.no_grad():
        expected = [logits_of(packed(), ids) for ids in texts]
    made: dict[int, list[Tensor]] = {number: [] for number in range(len(texts))}

    def work(number: int) -> None:
        with torch.no_grad():
            made[number] += [logits_of(model, texts[number]) for _ in range(2)]

    threads = [threading.Thread(target=work, args=(number,)) for number in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, results in made.items():
        assert len(results) == 2
        for result in results:
            torch.testing.assert_close(result, expected[number], rtol=1e-4, atol=1e-5)


def test_a_loaded_folder_generates_the_tokens_of_its_own_forward(tmp_path: Path) -> None:
    import bitplan.transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    model.save_pretrained(tmp_path / "float32")
    bitplan.quantize_file(tmp_path / "float32", tmp_path / "packed", "q8_0_gguf")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    layer = loaded.model.layers[0]
    assert isinstance(layer, QuickBlock)
    assert type(layer).__name__ == "LlamaDecoderLayer"
    assert isinstance(layer, type(model.model.layers[0]))
    ids = torch.tensor([IDS])
    options: Any = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "eos_token_id": None}
    with own_calls(loaded) as calls:
        made = loaded.generate(ids, do_sample=False, **options)
    assert calls.count(1) == 2  # each block's trial
    with torch.no_grad():
        for length in range(len(IDS), made.shape[1]):
            assert loaded(made[:, :length]).logits[0, -1].argmax() == made[0, length]
    assert torch.equal(copy.deepcopy(loaded).generate(ids, do_sample=False, **options), made)
    with pytest.raises(StoreError, match="a packed LlamaForCausalLM is not unpacked in place"):
        loaded.dequantize()
    loaded.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert torch.equal(again.generate(ids, do_sample=False, **options), made)

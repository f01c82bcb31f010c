"""Tokens made without a model's own modules: the same logits; models that compute anything else keep their forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bitplan
from bitplan.base.errors import MeasureError
from bitplan.packed.language.token_steps import ROOM, Decoding, structure_of
from tests.packed.linear_samples import SMALL

transformers = pytest.importorskip("transformers")


def packed(kind: str = "Llama", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SMALL | settings))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    bitplan.apply_plan(model, "int8_row", unsupported="skip")
    return model


def logits_of(ids: list[int], prompt: int, decoding: Decoding) -> torch.Tensor:
    """Of all tokens from the prompt's last on."""
    made = [decoding(torch.tensor([ids[:prompt]]))]
    return torch.cat([*made, *(decoding(torch.tensor([[token]])) for token in ids[prompt:])])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {}),
    ],
)
def test_steps_give_the_logits_of_the_model(kind: str, settings: dict[str, Any]) -> None:
    model, ids = packed(kind, **settings), [3, 1, 4, 1, 5, 9, 2, 6]
    decoding = Decoding(model)
    with torch.inference_mode():
        made = logits_of(ids, 3, decoding)
        expected = model(torch.tensor([ids])).logits[0, 2:]
    assert decoding.why_not is None
    assert decoding._steps is not None
    assert decoding._steps._loops is not None
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


def test_a_model_of_states_makes_tokens_and_one_that_gives_none_back_is_refused() -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).eval()
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.inference_mode():
        made = logits_of(ids, 3, Decoding(model))
        torch.testing.assert_close(made, model(torch.tensor([ids])).logits[0, 2:], rtol=1e-4, atol=1e-5)
    encoder = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )
    with pytest.raises(MeasureError, match="BertForMaskedLM gives back no states in past_key_values"):
        Decoding(encoder)(torch.tensor([ids]))


@pytest.mark.parametrize("settings", [{"head_dim": 8}, {"hidden_size": 132, "head_dim": 32}])
def test_sizes_that_compiled_loops_do_not_take_are_made_by_torch(settings: dict[str, Any]) -> None:
    model, ids = packed(**settings), [3, 1, 4, 1, 5, 9]
    decoding = Decoding(model)
    with torch.inference_mode():
        made = logits_of(ids, 3, decoding)
        expected = model(torch.tensor([ids])).logits[0, 2:]
    assert decoding._steps is not None
    assert decoding._steps._loops is None
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


def test_inputs_in_8_bits_and_joined_layers_take_the_same_steps() -> None:
    from bitplan.packed.fused_projections import fuse_projections

    model, ids = packed(), [3, 1, 4, 1, 5, 9, 2, 6]
    assert len(fuse_projections(model)) == 4
    bitplan.round_inputs(model, "int8")
    decoding = Decoding(model)
    with torch.inference_mode():
        made = logits_of(ids, 3, decoding)
        expected = model(torch.tensor([ids])).logits[0, 2:]
    assert decoding._steps is not None
    assert ((made - expected).norm() / expected.norm()) < 0.02  # a code that is rounded the other way
    assert torch.equal(made.argmax(-1), expected.argmax(-1))


def test_keys_and_values_outgrow_their_memory() -> None:
    model = packed(num_hidden_layers=1)
    ids = torch.arange(ROOM + 20).remainder(96).tolist()
    with torch.inference_mode():
        made = logits_of(ids, 2, Decoding(model))
        expected = model(torch.tensor([ids])).logits[0, 1:]
    torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("Gemma2", {"head_dim": 32}, "window|block|norm"),
        ("Mistral", {"sliding_window": 4}, "window"),
        ("Qwen3", {"head_dim": 32}, "norm"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "length"),
        ("Granite", {"attention_multiplier": 0.5}, "block|input|between"),
    ],
)
def test_other_models_keep_their_forward_and_say_why(kind: str, settings: dict[str, Any], reason: str) -> None:
    import re

    model, ids = packed(kind, **settings), [3, 1, 4, 1, 5, 9]
    decoding = Decoding(model)
    with torch.inference_mode():
        made = logits_of(ids, 3, decoding)
        expected = model(torch.tensor([ids])).logits[0, 2:]
    assert decoding.why_not is not None
    assert re.search(reason, decoding.why_not), decoding.why_not
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


def test_a_scale_that_the_structure_does_not_show_is_seen_in_the_numbers() -> None:
    model = packed()
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2
    decoding = Decoding(model)
    with torch.inference_mode():
        logits_of([3, 1, 4, 1, 5], 3, decoding)
    assert decoding.why_not == "model.layers.0.self_attn.o_proj would get another input than in the model's forward"


def test_logits_that_are_changed_after_the_head_are_seen() -> None:
    model = packed()
    forward = type(model).forward

    def capped(*args: Any, **options: Any) -> Any:
        out = forward(model, *args, **options)
        out.logits = 0.1 * torch.tanh(out.logits / 0.1)
        return out

    decoding = Decoding(model)
    model.forward = capped
    with torch.inference_mode():
        logits_of([3, 1, 4, 1, 5], 3, decoding)
    assert decoding.why_not == "there would be other logits than in the model's forward"


def test_several_sequences_and_plain_models_keep_their_forward() -> None:
    model = packed()
    decoding = Decoding(model)
    with torch.inference_mode():
        decoding(torch.tensor([[1, 2], [3, 4]]))
        assert decoding(torch.tensor([[5], [6]])).shape == (2, 96)
    assert decoding._steps is None
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    assert structure_of(plain) == "not all of its products are packed"


def test_several_tokens_after_single_ones_see_all_before_them() -> None:
    model, ids = packed(), torch.arange(12).remainder(96).unsqueeze(0)
    decoding = Decoding(model)
    with torch.inference_mode():
        for part in ids[:, :4].split((2, 1, 1), dim=1):
            decoding(part)
        assert decoding._steps is not None
        made = torch.cat([decoding(ids[:, 4:9]), decoding(ids[:, 9:10]), decoding(ids[:, 10:])])
        expected = model(ids).logits[0, [8, 9, 11]]
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


def test_a_window_of_a_config_inside_another_is_seen() -> None:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = transformers.MistralConfig(**SMALL, sliding_window=8)
    torch.manual_seed(0)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=95)
    model: Any = transformers.LlavaForConditionalGeneration(config).eval()
    bitplan.apply_plan(model, "int8_row", unsupported="skip")
    ids, decoding = torch.arange(20).tolist(), Decoding(model)
    with torch.inference_mode():
        made = logits_of(ids, 3, decoding)
        expected = model(torch.tensor([ids])).logits[0, 2:]
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
    assert decoding.why_not == "attention goes through a window"


@pytest.mark.parametrize("change", ["norm", "packed again", "packed first"])
def test_a_model_that_was_changed_is_looked_at_again(change: str) -> None:
    from bitplan.packed.apply_plan import dequantize

    model, ids = packed(), [3, 1, 4, 1, 5, 9]
    if change == "packed first":
        dequantize(model)
    assert isinstance(structure_of(model), str) == (change == "packed first")
    if change == "norm":
        model.model.norm.weight = torch.nn.Parameter(2 * model.model.norm.weight.detach())
    elif change == "packed again":
        dequantize(model)
    bitplan.apply_plan(model, "int8_row", unsupported="skip")
    decoding = Decoding(model)
    with torch.inference_mode():
        made = logits_of(ids, 3, decoding)
        expected = model(torch.tensor([ids])).logits[0, 2:]
    assert decoding.why_not is None
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)

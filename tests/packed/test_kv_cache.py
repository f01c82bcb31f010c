"""Keys and values in formats: the bytes promised, the numbers of the definition, and one pass equal to many steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bitplan
from bitplan.base.errors import FormatError, MeasureError
from bitplan.formats import codec
from bitplan.plan.kv_formats import KV_FORMATS, KVFormats

transformers = pytest.importorskip("transformers")
from bitplan.packed.kv_cache import KVCache, kv_bytes  # noqa: E402
from bitplan.packed.kv_rows import PackedRows, pack_rows  # noqa: E402
from bitplan.packed.language.token_steps import Decoding  # noqa: E402
from bitplan.packed.rounded_kv import kv_of, round_kv  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
IDS = torch.arange(7, 55).remainder(96).reshape(2, 24)


def tiny(kind: str = "Llama", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SMALL | settings))
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny()


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("width", [64, 40, 8])
def test_rows_have_the_bits_of_the_formats_definition(name: str, width: int) -> None:
    torch.manual_seed(1)
    rows = torch.randn(1, 3, 5, width)
    rows[0, 1, 2] = 0.0
    encoded = codec.encode(rows.reshape(-1, width), name, pad="zero")
    held = PackedRows(encoded.fmt, width, torch.float32, pack_rows(rows, encoded.fmt))
    for part, tensor in encoded.parts.items():
        assert torch.equal(held.parts[part].reshape(tensor.shape).view(torch.uint8), tensor.view(torch.uint8))
    assert torch.equal(held.numbers().reshape(-1, width), codec.decode(encoded, torch.float32))


@pytest.mark.parametrize(
    ("formats", "share"), [("int8", 68 / 128), ("fp8", 68 / 128), ("int4", 36 / 128), ("int8:int4", 104 / 256)]
)
def test_a_cache_takes_the_bytes_that_its_formats_promise(llama: Any, formats: str, share: float) -> None:
    model = llama.to(torch.bfloat16)
    plain, packed = transformers.DynamicCache(config=model.config), KVCache(model.config, formats)
    with torch.inference_mode():
        for cache in (plain, packed):
            model(IDS, past_key_values=cache, use_cache=True)
    assert packed.nbytes == share * kv_bytes(plain)
    rows, known = 2 * 2 * 24, KVFormats.parse(formats)
    assert packed.nbytes == sum(known.nbytes(layer, (rows, rows), (64, 64), 2) for layer in range(3))
    llama.to(torch.float32)


@pytest.mark.cross("kind", ["Llama", "Qwen2", "Mistral", "Gemma3"])
@pytest.mark.cross("formats", ["int8", "int4", "keep:fp8", "keep"])
def test_token_by_token_gives_the_logits_of_one_pass(kind: str, formats: str) -> None:
    model = _gemma() if kind == "Gemma3" else tiny(kind, **({"sliding_window": 9} if kind == "Mistral" else {}))
    cache = KVCache(model.config, formats)
    with torch.inference_mode():
        steps = [model(IDS[:, :5], past_key_values=cache, use_cache=True).logits]
        steps += [model(IDS[:, at : at + 1], past_key_values=cache, use_cache=True).logits for at in range(5, 24)]
        plain = model(IDS, use_cache=False).logits
        round_kv(model, formats)
        whole = model(IDS, use_cache=False).logits
    # A number between two codes may be rounded to either where products of few rows differ in their last bit.
    apart = float((torch.cat(steps, dim=1) - whole).abs().mean())
    assert apart <= 1e-6 + 0.05 * float((plain - whole).abs().mean())
    assert torch.equal(plain, whole) == (formats == "keep")


def _gemma() -> Any:
    torch.manual_seed(0)
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**SMALL, sliding_window=9, layer_types=types)
    return transformers.Gemma3ForCausalLM(config).eval()


def test_a_window_holds_no_more_than_the_next_token_sees() -> None:
    model = tiny("Mistral", sliding_window=9)
    cache = KVCache(model.config, "int8")
    with torch.inference_mode():
        model(IDS, past_key_values=cache, use_cache=True)
    assert cache.layers[0].keys.shape == (2, 2, 8, 64)
    assert cache.get_seq_length() == 24
    assert cache.nbytes == 3 * 2 * KVFormats("int8", None).nbytes(0, (2 * 2 * 8, 0), (64, 64), 4)


def test_generate_of_transformers_makes_the_cache_itself(llama: Any) -> None:
    inputs: dict[str, Any] = {
        "max_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
    }
    mask = torch.ones_like(IDS)
    given = llama.generate(IDS, attention_mask=mask, past_key_values=KVCache(llama.config, "int4"), **inputs)
    round_kv(llama, "int4")
    assert str(kv_of(llama)) == "int4_g32"
    try:
        made = llama.generate(IDS, attention_mask=mask, **inputs)
        beams = llama.generate(IDS, attention_mask=mask, num_beams=2, **inputs)
        with pytest.raises(MeasureError, match="layer 0: keys and values of a StaticLayer cannot be kept in formats"):
            llama.generate(IDS, attention_mask=mask, cache_implementation="static", **inputs)
    finally:
        round_kv(llama, None)
    assert kv_of(llama) is None
    assert torch.equal(given.sequences, made.sequences)
    assert made.past_key_values.layers[0].keys.fmt.name == "int4_g32"
    assert beams.sequences.shape == made.sequences.shape


def test_formats_differ_by_layer_and_what_is_not_named_stays(llama: Any) -> None:
    formats = KVFormats(("int8", None, "int4"), ("keep", "fp8"))
    cache = KVCache(llama.config, formats)
    with torch.inference_mode():
        llama(IDS, past_key_values=cache, use_cache=True)
    shown = [[part.fmt and part.fmt.name for part in (layer.keys, layer.values)] for layer in cache.layers]
    assert shown == [["int8_row", None], [None, "fp8_e4m3_row"], ["int4_g32", None]]
    assert KVFormats.from_document(formats.to_document(), "config") == formats
    reasons = {f"layers.{layer}.{part}": "measured" for layer in range(3) for part in ("keys", "values")}
    plan = bitplan.Plan(formats.entries(reasons))
    assert [*plan] == ["layers.0.keys", "layers.1.values", "layers.2.keys"]
    found = KVFormats.of_plan(bitplan.Plan.from_document(plan.to_document()))
    assert found is not None
    assert [found.of_layer(layer) for layer in range(4)] == [formats.of_layer(layer) for layer in range(4)]
    assert KVFormats.of_plan(plan.of_kind("weight")) is None


def test_tokens_can_be_dropped_chosen_and_repeated(llama: Any) -> None:
    cache = KVCache(llama.config, "fp8:int4")
    with torch.inference_mode():
        llama(IDS, past_key_values=cache, use_cache=True)
    before = cache.layers[1].values.numbers()
    cache.crop(-4)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.layers[1].values.numbers(), before[[1, 0], :, :20])
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(("least", "pieces"), [(5, [7, 7, 7, 3]), (9, [9, 9, 6])])
def test_a_long_prompt_is_read_in_pieces_with_the_same_result(
    llama: Any, monkeypatch: pytest.MonkeyPatch, least: int, pieces: list[int]
) -> None:
    """So many tokens of all texts together, and no fewer of each than is said."""
    monkeypatch.setattr("bitplan.packed.language.token_steps.PIECE_TOKENS", 7 * len(IDS))
    monkeypatch.setattr("bitplan.packed.language.token_steps.LEAST_PIECE", least)
    lengths: list[int] = []
    handle = llama.register_forward_pre_hook(
        lambda _model, _args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    round_kv(llama, "int8")
    try:
        with torch.inference_mode():
            logits = Decoding(llama)(IDS)
            expected = llama(input_ids=IDS, use_cache=False).logits[:, -1]
    finally:
        round_kv(llama, None)
        handle.remove()
    assert lengths == [*pieces, 24]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_steps_without_modules_leave_formats_of_keys_to_the_model(llama: Any) -> None:
    round_kv(llama, "int8")
    try:
        assert Decoding(llama).why_not == "keys and values are kept in formats"
    finally:
        round_kv(llama, None)


@pytest.mark.parametrize("text", ["int9", "int8:int4:int8", "mxfp4", ""])
def test_formats_that_no_cache_has_are_refused_with_those_that_it_has(text: str) -> None:
    with pytest.raises(FormatError, match="int8"):
        KVFormats.parse(text)

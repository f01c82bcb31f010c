"""Attention that reads codes gives what attention over the decoded cache gives, whatever happened to the cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from bitplan.base.errors import MeasureError
from bitplan.plan.kv_formats import KV_FORMATS

transformers = pytest.importorskip("transformers")
pytest.importorskip("triton")
from bitplan.formats import get_format  # noqa: E402
from bitplan.packed import kv_attention, rounded_kv  # noqa: E402
from bitplan.packed.kv_attention import JoinedRows, SharedCount, can_join, encode_rows  # noqa: E402
from bitplan.packed.kv_cache import KVCache, _JoinedLayer  # noqa: E402
from bitplan.packed.rounded_kv import round_kv  # noqa: E402
from tests.packed.test_kv_cache import IDS, tiny  # noqa: E402
from tests.processes import compile_with_triton  # noqa: E402

PAIRS = [(name, name) for name in KV_FORMATS] + [("int8_row", "int4_g32")]


def joined(names: tuple[str, str], tokens: int, batch: int = 2, heads: int = 2, width: int = 64) -> Any:
    torch.manual_seed(0)
    formats = get_format(names[0]), get_format(names[1])
    rows = JoinedRows(formats, width, torch.float32, SharedCount())
    before = torch.randn(2, batch, heads, tokens - 1, width)
    for which, fmt in enumerate(formats if tokens > 1 else ()):
        rows.extend(which, encode_rows(before[which], fmt), tokens - 1)
    rows.tokens = tokens - 1
    rows.append(*torch.randn(2, batch, heads, 1, width))
    return rows


def decoded(rows: Any) -> list[torch.Tensor]:
    return [rows.rows(which).numbers() for which in (0, 1)]


@pytest.mark.cross("names", PAIRS)
@pytest.mark.cross("tokens", [1, 70, 300])
def test_it_is_attention_over_the_decoded_rows(names: tuple[str, str], tokens: int) -> None:
    rows = joined(names, tokens)
    query = torch.randn(2, 6, 1, 64)
    keys, values = decoded(rows)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=0.2, enable_gqa=True)
    got = rows.attend(query, None, 0.2)
    torch.testing.assert_close(got, wanted.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_masked_tokens_are_not_seen() -> None:
    rows = joined(("int8_row", "int8_row"), 90)
    query, mask = torch.randn(2, 2, 1, 64), torch.ones(2, 1, 1, 90, dtype=torch.bool)
    mask[1, ..., :40] = False
    keys, values = decoded(rows)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    got = rows.attend(query, mask, 64**-0.5)
    torch.testing.assert_close(got, wanted.transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("names", [("int8_row", "fp8_e4m3_row"), ("int4_g32", "int4_g32")])
def test_a_token_is_written_with_the_bits_of_the_format(names: tuple[str, str]) -> None:
    rows = joined(names, 5)
    new = torch.randn(2, 2, 2, 1, 64)
    rows.append(new[0], new[1])
    for which, fmt in enumerate(rows.formats):
        for name, part in encode_rows(new[which], fmt).items():
            assert torch.equal(rows.rows(which).parts[name][:, :, -1:].view(torch.uint8), part.view(torch.uint8))


def test_room_grows_and_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitplan.packed.kv_rows.LEAST_ROOM", 3)
    rows = joined(("int8_row", "int4_g32"), 61, batch=1, heads=1, width=32)
    first, room = decoded(rows)[1][:, :, :61].clone(), rows.capacity
    assert room == 64
    for _ in range(6):
        rows.append(*torch.randn(2, 1, 1, 1, 32))
    assert (rows.tokens, rows.capacity) == (67, 128)
    assert torch.equal(decoded(rows)[1][:, :, :61], first)


def test_what_the_kernels_cannot_read_is_not_joined() -> None:
    rows, groups = get_format("int8_row"), get_format("int4_g32")
    device = torch.device("cpu")
    assert can_join((rows, groups), 64, device)
    assert can_join((rows, None), 64, device, torch.bfloat16)
    assert not can_join((rows, groups), 80, device)


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the kernels run in Triton's interpreter."""
    monkeypatch.setattr(rounded_kv, "_join_attention", rounded_kv._set_attention)


@pytest.mark.cross("formats", ["int8", "fp8:int4", "keep:int8"])
@pytest.mark.cross("kind", ["Llama", "Qwen2", "Mistral"])
@pytest.mark.usefixtures("joins")
def test_a_model_makes_the_tokens_that_it_makes_without(kind: str, formats: str) -> None:
    model = tiny(kind, num_hidden_layers=2, **({"sliding_window": 9} if kind == "Mistral" else {}))
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    inputs: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    inputs |= {"return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(IDS, past_key_values=KVCache(model.config, formats), **inputs)
    round_kv(model, formats)
    made = model.generate(IDS, **inputs)
    assert model.config._attn_implementation == kv_attention.ATTENTION
    round_kv(model, None)
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(torch.stack(made.logits), torch.stack(plain.logits), rtol=1e-3, atol=1e-4)
    assert torch.equal(made.sequences, plain.sequences)


@pytest.mark.usefixtures("joins")
def test_models_that_share_a_config_read_codes_each_and_decode_where_another_ends_it() -> None:
    first = tiny()
    second = type(first)(first.config).eval()
    inputs: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "use_cache": True}
    round_kv(first, "int8")
    round_kv(second, "int8")
    with torch.inference_mode():
        codes = second(IDS, **inputs)
    assert all(isinstance(layer, _JoinedLayer) for layer in codes.past_key_values.layers)
    round_kv(first, None)
    with torch.inference_mode():
        decoded_again = second(IDS, **inputs)
    torch.testing.assert_close(decoded_again.logits, codes.logits, rtol=1e-3, atol=1e-4)
    assert not any(isinstance(layer, _JoinedLayer) for layer in decoded_again.past_key_values.layers)


@pytest.mark.usefixtures("joins")
def test_tokens_can_be_dropped_chosen_and_repeated() -> None:
    model = tiny(num_hidden_layers=1)
    kv_attention.register()
    caches = [KVCache(model.config, "int8"), KVCache(model.config, "int8", joined=True)]
    logits = []
    for cache in caches:
        model.set_attn_implementation(kv_attention.ATTENTION)
        with torch.inference_mode():
            model(IDS, past_key_values=cache, use_cache=True)
            model(IDS[:, :1], past_key_values=cache, use_cache=True)
            assert cache.get_seq_length() == 25
            cache.crop(-4)
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([0, 3]))
            cache.reorder_cache(torch.tensor([1, 0]))
            assert cache.get_seq_length() == 21
            logits.append(model(IDS[:, 4:5], past_key_values=cache, use_cache=True).logits)
    assert caches[0].nbytes == caches[1].nbytes
    again = copy.deepcopy(caches[1])
    with torch.inference_mode():
        following = [model(IDS[:, 5:6], past_key_values=one, use_cache=True).logits for one in (caches[1], again)]
    assert torch.equal(*following)
    assert again.get_seq_length() == caches[1].get_seq_length() == 23
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-4)
    model.set_attn_implementation("sdpa")
    with pytest.raises(MeasureError, match=r"made for a model that reads codes; call round_kv"):
        model(IDS[:, :1], past_key_values=caches[1], use_cache=True)
    caches[1].reset()
    assert caches[1].get_seq_length() == 0


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bitplan.packed import kv_attention as kernels

def build(kernel, pointers, numbers, constants, warps):
    signature = pointers | numbers | {name: "constexpr" for name in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 2})

FORMATS = {
    "int8_row": ("int8", "bytes", 0, "f32", "*i8", "*fp32"),
    "fp8_e4m3_row": ("e4m3", "bytes", 0, "f32", "*u8", "*fp32"),
    "int4_g32": ("int4", "low_first", 32, "bf16", "*u8", "*i16"),
    "q8_0_gguf": ("int8_half_away", "bytes", 32, "f16", "*i8", "*fp16"),
    "q4_0_gguf": ("int4", "halves", 32, "f16", "*u8", "*fp16"),
}
for name, (element, order, group, scale, data, scales) in FORMATS.items():
    pointers = dict(query_ptr="*i16", key_data_ptr=data, key_scales_ptr=scales, value_data_ptr=data)
    pointers |= dict(value_scales_ptr=scales, before_ptr="*i32", partial_ptr="*fp32", stats_ptr="*fp32", mask_ptr="*u8")
    numbers = dict(capacity="i32", chunk="i32", mask_stride="i32", scaling="fp32")
    constants = dict(HEADS=32, KV_HEADS=8, SHARED=4, TALL=16, WIDTH=128, CHUNKS=8, TOKENS=64, MASKED=True)
    constants |= dict(SOURCE="bf16")
    for letter in "KV":
        pairs = zip(("ELEMENT", "ORDER", "GROUP", "SCALE"), (element, order, group, scale))
        constants |= {f"{letter}_{key}": value for key, value in pairs}
    build(kernels._attend_chunk, pointers, numbers, constants, 4)
rows = dict(keys_ptr="*i16", values_ptr="*i16", key_data_ptr="*i8", key_scales_ptr="*fp32", value_data_ptr="*u8")
rows |= dict(value_scales_ptr="*fp32", before_ptr="*i32")
constants = dict(WIDTH=128, K_ELEMENT="int8", V_ELEMENT="e4m3", K_LARGEST=127.0, V_LARGEST=448.0)
constants |= dict(K_LARGEST_SCALE=1e36, V_LARGEST_SCALE=1e35, SOURCE="bf16")
build(kernels._append_rows, rows, dict(capacity="i32"), constants, 1)
joined = dict(partial_ptr="*fp32", stats_ptr="*fp32", out_ptr="*i16")
build(kernels._join_chunks, joined, {}, dict(WIDTH=128, CHUNKS=33, TALL=64, SOURCE="bf16"), 4)
"""


@pytest.mark.long
def test_the_kernels_compile_for_hopper(tmp_path: Any) -> None:
    compile_with_triton(COMPILE, folder=tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("names", PAIRS)
@pytest.mark.parametrize(("tokens", "batch"), [(1, 1), (1000, 3), (5000, 2)])
def test_on_a_gpu_it_is_attention_over_the_decoded_rows(names: tuple[str, str], tokens: int, batch: int) -> None:
    torch.manual_seed(0)
    formats = get_format(names[0]), get_format(names[1])
    rows = JoinedRows(formats, 128, torch.bfloat16, SharedCount())
    new = torch.randn(2, batch, 8, tokens, 128, device="cuda", dtype=torch.bfloat16)
    for which, fmt in enumerate(formats if tokens > 1 else ()):
        rows.extend(which, encode_rows(new[which, :, :, 1:], fmt), tokens - 1)
    rows.tokens = tokens - 1
    for count in range(tokens, tokens + 3):
        rows.append(*new[:, :, :, :1])
        assert rows.tokens == count
        query = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
        keys, values = (each.float() for each in decoded(rows))
        wanted = torch.nn.functional.scaled_dot_product_attention(query.float(), keys, values, enable_gqa=True)
        got = rows.attend(query, None, 128**-0.5)
        torch.testing.assert_close(got.float(), wanted.transpose(1, 2), rtol=0.02, atol=0.01)


@pytest.mark.gpu
def test_a_model_on_a_gpu_reads_codes() -> None:
    model = tiny().to("cuda", torch.bfloat16)
    round_kv(model, "int8")
    assert model.config._attn_implementation == kv_attention.ATTENTION
    ids = IDS.cuda()
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert made.shape == (2, 32)
    round_kv(model, None)
    assert model.config._attn_implementation == "sdpa"


def test_one_token_that_sees_all_has_no_mask_also_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)
    sizes = {"batch_size": 1, "q_length": 1, "kv_length": 5, "q_offset": 4, "allow_is_causal_skip": True}
    assert kv_attention._mask(**sizes) is None
    assert kv_attention._mask(**sizes, attention_mask=torch.tensor([[False, True, True, True, True]])) is not None
    assert kv_attention._mask(**sizes, local_size=3) is not None

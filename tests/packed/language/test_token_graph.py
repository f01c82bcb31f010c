"""Tokens from a graph are the model's own, also when memory grows; what a graph cannot repeat is not recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("triton")
from bitplan.packed import kv_rows, rounded_kv  # noqa: E402
from bitplan.packed.kv_cache import KVCache  # noqa: E402
from bitplan.packed.language import token_graph  # noqa: E402
from bitplan.packed.language.token_graph import TokenGraph  # noqa: E402
from bitplan.packed.language.token_steps import Decoding  # noqa: E402
from bitplan.packed.rounded_kv import round_kv  # noqa: E402
from tests.packed.test_kv_cache import tiny  # noqa: E402

PROMPT = torch.arange(59).reshape(1, 59) % 17  # in front of room for 64


class Replayed:
    """In place of a CUDA graph: runs again with the host's numbers as they were, which a graph has by heart."""

    def __init__(self, run: Callable[[], None], tokens: TokenGraph) -> None:
        self._run, self._tokens = run, tokens
        rows = tokens._rows()
        self._recorded = [one.tokens for one in rows], rows[0].shared.count
        held = rows[0].shared.tensor.clone(), tokens._positions.clone()
        run()  # recording leaves the device's memory as it was, but for rows that are written anew
        rows[0].shared.tensor.copy_(held[0])
        tokens._positions.copy_(held[1])

    def replay(self) -> None:
        rows = self._tokens._rows()
        for one, count in zip(rows, self._recorded[0], strict=True):
            one.tokens = count
        rows[0].shared.count = self._recorded[1]
        with rounded_kv.attending_as_held(self._tokens._model):
            self._run()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    """As on a GPU: the kernels run in Triton's interpreter, and graphs are `Replayed`; those that were recorded."""
    made: list[Replayed] = []
    current: list[TokenGraph] = []

    def captured(run: Callable[[], None], _device: torch.device) -> Replayed:
        made.append(Replayed(run, current[-1]))
        return made[-1]

    def remember(self: TokenGraph, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        current.append(self)

    begin = TokenGraph.__init__
    monkeypatch.setattr(TokenGraph, "__init__", remember)
    monkeypatch.setattr(token_graph, "captured", captured)
    monkeypatch.setattr(rounded_kv, "_join_attention", rounded_kv._set_attention)
    monkeypatch.setattr(kv_rows, "LEAST_ROOM", 1)
    return made


def logits_of(read: Callable[[torch.Tensor], torch.Tensor], tokens: int) -> torch.Tensor:
    with torch.inference_mode():
        made = [read(PROMPT)]
        made += [read(torch.full((1, 1), token % 17)) for token in range(tokens)]
    return torch.stack(made)


def by_model(model: Any, cache: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda ids: model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]


@pytest.mark.parametrize(("kind", "formats"), [("Llama", None), ("Llama", "int8"), ("Qwen2", "int8:int4")])
def test_a_graph_makes_the_models_logits_and_is_recorded_again_when_memory_grows(
    kind: str, formats: str | None, graphs: list[Replayed]
) -> None:
    model = tiny(kind, num_hidden_layers=2)
    cache = transformers.DynamicCache(config=model.config) if formats is None else KVCache(model.config, formats)
    expected = logits_of(by_model(model, cache), 7)
    round_kv(model, formats)
    tokens = TokenGraph(model)
    made = logits_of(tokens, 7)
    assert tokens.why_not is None
    assert len(graphs) == 2
    assert tokens.cache.get_seq_length() == cache.get_seq_length() == 66
    torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-4)
    round_kv(model, None)
    assert model.config._attn_implementation == "sdpa"


def test_a_number_that_was_recorded_as_it_was_then_is_seen(
    graphs: list[Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(num_hidden_layers=2)
    forward = type(model.model).forward

    def counting(self: Any, *args: Any, **options: Any) -> Any:
        out = forward(self, *args, **options)
        out.last_hidden_state[..., 0] += options["past_key_values"].get_seq_length()
        return out

    monkeypatch.setattr(type(model.model), "forward", counting)
    expected = logits_of(by_model(model, transformers.DynamicCache(config=model.config)), 6)
    tokens = TokenGraph(model)
    made = logits_of(tokens, 6)
    assert len(graphs) == 1
    assert tokens.why_not is not None
    assert "differs from the model's own by" in tokens.why_not
    torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-4)


def test_a_forward_that_waits_for_the_gpu_is_not_recorded(
    graphs: list[Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_graph, "waiting_seen", lambda _device: nullcontext(["model.py:3"]))
    model = tiny(num_hidden_layers=2)
    expected = logits_of(by_model(model, transformers.DynamicCache(config=model.config)), 5)
    tokens = TokenGraph(model)
    made = logits_of(tokens, 5)
    assert (tokens.why_not, graphs) == ("its forward waits for the GPU: model.py:3", [])
    assert type(tokens.cache) is transformers.DynamicCache
    torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sliding_window": 9}, "not all of its layers attend to all tokens"),
        ({"attn_implementation": "eager"}, "its attention is not torch's, which transformers lets be replaced"),
    ],
)
@pytest.mark.usefixtures("graphs")
def test_models_that_are_not_recorded_say_why(change: dict[str, Any], reason: str) -> None:
    model = tiny("Mistral", sliding_window=change.get("sliding_window"))
    model.set_attn_implementation(change.get("attn_implementation", "sdpa"))
    assert TokenGraph(model).why_not == reason


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [None, "int8"])
def test_on_a_gpu_a_packed_model_is_recorded(formats: str | None) -> None:
    import bitplan

    model = tiny(num_hidden_layers=2).to("cuda", torch.bfloat16)
    bitplan.apply_plan(model, "int8_row", unsupported="skip")
    round_kv(model, formats)
    decoding = Decoding(model)
    with torch.inference_mode():
        cache = KVCache(model.config, formats or "keep", joined=formats is not None)
        ids = PROMPT.cuda()
        for _ in range(300):
            expected = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]
            made = decoding(ids)
            assert float((made - expected).float().norm()) <= 0.02 * float(expected.float().norm())
            ids = expected.argmax(-1, keepdim=True)
    assert decoding.why_not is None
    assert decoding._graph is not None
    assert decoding._graph._verified == token_graph.VERIFIED_TOKENS
    assert decoding.kv_bytes == cache.nbytes

"""Groups of a search, as the model's view has them or by names; its text, of files and of the model itself."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from bitplan import apply_plan, dequantize, describe, open_tensors, quantize_file
from bitplan.files.input_statistics import EvidenceFile, weight_digest, write_evidence
from bitplan.formats.codec import decode, encode
from bitplan.packed.checkpoints.causal_lm import load_causal_lm
from bitplan.packed.language.own_text import write_own_text
from bitplan.packed.rounded_inputs import round_linear_inputs
from bitplan.searching import searched_model
from bitplan.searching.collect import gather_evidence
from bitplan.searching.evidence import place_of
from bitplan.searching.goal import Advance, SearchError
from bitplan.searching.searched_model import group_tensors, groups_seen, open_subject, prepare
from tests.files.engines.tiny_models import LETTERS, save_tiny, save_tokenizer
from tests.plan.structure import handwritten_models as models


def grouped(model: nn.Module) -> list[list[str]]:
    names = {name: name for name, _ in model.named_parameters() if name.endswith(".weight")}
    view = describe(model)
    projections = [name for name in names if view.uses(name)]
    return [
        group for group in group_tensors(projections, joined_names=groups_seen(view, names)).values() if len(group) > 1
    ]


def test_projections_of_one_input_are_a_group_whatever_they_are_called() -> None:
    assert grouped(models.Titan(layers=1)) == [
        [f"layers.0.attention.w{letter}.weight" for letter in "kqv"],
        [f"layers.0.feed_forward.w{number}.weight" for number in (1, 3)],
    ]


class Misnamed(nn.Module):
    """Names of a llama's MLP, in which gate and up read different inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(self.gate_proj(x).tanh()))


def test_names_do_not_make_a_group_where_the_inputs_differ() -> None:
    assert grouped(nn.Sequential(Misnamed())) == []


def test_without_a_view_the_table_of_names_decides() -> None:
    tensors = ["blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight", "blk.0.ffn_down.weight"]
    assert group_tensors(tensors) == {
        "blk.0.ffn_down": tensors[3:],
        "blk.0.qkv": [*tensors[1:2], tensors[0], tensors[2]],
    }
    assert len(group_tensors(tensors, fused=False)) == 4


LETTERS_OF_TEXT = torch.randint(26, (800,), generator=torch.Generator().manual_seed(0)).tolist()
TEXT = "".join(LETTERS[number] for number in LETTERS_OF_TEXT)


def gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 96, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.2)
    return transformers.GPT2LMHeadModel(config).eval()


def test_matrices_that_lie_transposed_are_searched_as_outputs_by_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = gpt2()
    with redirect_stderr(io.StringIO()):
        model.transformer.save_pretrained(tmp_path)  # names of a model without its head, as GPT-2's own folder has them
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_tokenizer(tmp_path)
    name, matrix = "h.0.attn.c_attn.weight", model.transformer.h[0].attn.c_attn.weight.detach()
    subject = open_subject(tmp_path, None)
    assert {site.shape for site in subject.sites.values() if site.transposed} == {
        (96, 32),
        (32, 32),
        (128, 32),
        (32, 128),
    }
    assert torch.equal(subject.weight(name), matrix.T)
    assert subject.digests()[name] == weight_digest(matrix.T)
    ids, numbers = torch.arange(8)[None], decode(encode(matrix.T.contiguous(), "int4_g32"))
    with torch.no_grad():
        matrix.copy_(numbers.T)  # the parameter's own numbers
        torch.testing.assert_close(subject.logits(ids, {name: numbers}), model(ids).logits)
    assert [place_of(f"h.0.{part}.c_proj") for part in ("attn", "mlp")] == [("0", "attn.c_proj"), ("0", "mlp.c_proj")]


def test_transposed_matrices_are_rounded_by_their_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = gpt2()
    with redirect_stderr(io.StringIO()):
        model.save_pretrained(tmp_path / "gpt2")
    name, matrix = "transformer.h.0.mlp.c_proj.weight", model.transformer.h[0].mlp.c_proj.weight.detach()
    inputs = torch.randn(300, 128) @ torch.randn(128, 128)
    with write_evidence(tmp_path / "evidence.safetensors", {f"{name}.hessian": (128, 128)}) as out:
        out.write(f"{name}.hessian", inputs.T @ inputs)
    errors = []
    for evidence, output in (
        (None, "near"),
        (tmp_path / "evidence.safetensors", "rounded"),
        (None, "near.safetensors"),
    ):
        quantize_file(tmp_path / "gpt2", tmp_path / output, "int4_g32", evidence=evidence)
        with open_tensors(tmp_path / output) as file:
            assert file.spec(name).shape == (32, 128)
            errors.append(float((inputs @ (file.read_float(name) - matrix)).square().sum()))
    assert errors[1] < 0.5 * errors[0] == 0.5 * errors[2]


def test_decoded_layers_that_lie_transposed_round_their_inputs() -> None:
    torch.manual_seed(0)
    model = gpt2()
    packed, ids = copy.deepcopy(model), torch.arange(8)[None]
    apply_plan(packed, {"*.c_*.weight": "int8_row", "*": "float32"}, inputs="int8_row")
    plain = copy.deepcopy(packed)
    dequantize(plain)
    names = [name for name, _ in model.named_parameters() if ".c_" in name and name.endswith("weight")]
    with torch.no_grad():
        exact = plain(ids).logits
        assert len(round_linear_inputs(plain, dict.fromkeys(names, "int8_row"))) == 4
        torch.testing.assert_close(plain(ids).logits, packed(ids).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(exact, plain(ids).logits, rtol=1e-4, atol=1e-4)


def test_text_that_the_model_writes_stands_beside_the_given_in_the_statistics_alone(tmp_path: Path) -> None:
    save_tiny(tmp_path / "llama", "llama")
    settings = {"context": 16, "windows": 6}
    _, given = prepare(tmp_path / "llama", None, TEXT, None, **settings)
    _, both = prepare(tmp_path / "llama", None, {"text.txt": TEXT, "self": None}, None, **settings)
    own = write_own_text(load_causal_lm(tmp_path / "llama"), len(given.statistics), 16)
    assert all(torch.equal(*pair) for pair in zip(both.statistics[::2], given.statistics, strict=True))
    assert all(torch.equal(*pair) for pair in zip(both.statistics[1::2], own, strict=True))
    for part in ("checks", "proof"):
        assert all(torch.equal(*pair) for pair in zip(getattr(both, part), getattr(given, part), strict=True))
    assert both.kinds == ()


def test_a_model_alone_writes_text_for_statistics_checks_and_proof(tmp_path: Path) -> None:
    save_tiny(tmp_path / "llama", "llama")
    steps: list[int] = []

    @contextmanager
    def stage(what: str, total: int) -> Iterator[Advance]:
        steps.append(-total)
        assert what == "writing text"
        yield lambda count, _label: steps.append(count)

    _, cut = prepare(tmp_path / "llama", None, {"self": None}, None, context=16, windows=5, stage=stage)
    assert (len(cut.statistics), len(cut.checks), len(cut.proof)) == (5, 2, 3)
    windows = [*cut.statistics, *cut.checks, *cut.proof]
    assert len({tuple(window.tolist()) for window in windows}) == len(windows)
    assert -steps[0] == 16 * 12
    assert sum(steps[1:]) == 15 * 12
    (tmp_path / "in").mkdir()
    evidence = gather_evidence(tmp_path / "llama", {"self": None}, tmp_path / "in", windows=4, context=16)
    with EvidenceFile(evidence) as file:
        assert file.metadata["windows"] == "4"


def test_a_model_that_is_too_large_to_write_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "llama", "llama")
    monkeypatch.setattr(searched_model, "free_memory", lambda: 10**5)
    with pytest.raises(SearchError, match=r"0.0 GB are free; give text of a file alone"):
        prepare(tmp_path / "llama", None, {"self": None}, None)

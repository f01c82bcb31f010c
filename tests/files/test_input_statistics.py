"""Files of statistics: what was written comes back, and others are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bitplan.base.errors import FileFormatError, StoreError
from bitplan.files.imatrix import gguf_names, write_imatrix
from bitplan.files.input_statistics import write_evidence
from bitplan.files.round_with_evidence import open_evidence

SHAPES: dict[str, tuple[int, ...]] = {"a.weight.hessian": (2, 2), "b.weight.moments": (3,), "c.weight.outputs": (4, 4)}


def test_statistics_come_back(tmp_path: Path) -> None:
    path = tmp_path / "evidence.safetensors"
    with write_evidence(path, SHAPES, {"fingerprint.text": "abc", "shared.c.weight": "a.weight"}) as writer:
        for key, shape in SHAPES.items():
            writer.write(key, torch.ones(shape))
    with open_evidence(path) as evidence:
        assert evidence.names == {"a.weight", "b.weight", "c.weight"}
        assert torch.equal(evidence.hessian("c.weight"), torch.ones(2, 2))
        assert torch.equal(evidence.moments("b.weight"), torch.ones(3))
        assert torch.equal(evidence.outputs("c.weight"), torch.ones(4, 4))
        assert evidence.outputs("a.weight") is None
        assert evidence.hessian("b.weight") is None
        assert evidence.moments("d.weight") is None
        assert evidence.metadata["fingerprint.text"] == "abc"


@pytest.mark.parametrize(
    ("key", "shape", "metadata", "fault"),
    [
        ("a.moments", (3,), {}, "expected statistics"),
        ("a.moments", (3, 2), {"bitplan": "evidence", "version": "1"}, "expected NAME.moments"),
        ("a.hessian", (3, 2), {"bitplan": "evidence", "version": "1"}, "expected NAME.moments"),
        ("a.moments", (3,), {"bitplan": "evidence", "version": "1", "shared.b": "c"}, 'refers to "c"'),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, key: str, shape: tuple[int, ...], metadata: dict[str, str], fault: str
) -> None:
    path = tmp_path / "other.safetensors"
    save_file({key: torch.ones(shape)}, path, metadata)
    with pytest.raises(FileFormatError, match=fault):
        open_evidence(path)


def test_an_imatrix_comes_back(tmp_path: Path) -> None:
    path, moments = tmp_path / "imatrix.gguf", torch.tensor([0.5, 2.0, 0.0])
    write_imatrix(path, {"blk.0.attn_q.weight": moments}, tokens=1000, datasets=["text"])
    with open_evidence(path) as evidence:
        assert evidence.names == {"blk.0.attn_q.weight"}
        assert torch.allclose(evidence.moments("blk.0.attn_q.weight"), moments)
        assert evidence.hessian("blk.0.attn_q.weight") is None
        assert evidence.metadata["imatrix.chunk_count"] == "2"
    with pytest.raises(StoreError, match="finite and not below 0"):
        write_imatrix(path, {"x": -moments}, tokens=1)


def test_a_gguf_file_of_weights_is_no_imatrix(tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFValueType

    from bitplan.files.gguf import GGUFValue, write_gguf

    path = tmp_path / "model.gguf"
    kind = {"general.type": GGUFValue(GGUFValueType.STRING, "imatrix")}
    for metadata, name, fault in (({}, "x.in_sum2", "expected an importance"), (kind, "x.in_sum2", "is missing")):
        with write_gguf(path, [(name, GGMLQuantizationType.F32, (1, 4))], metadata) as writer:
            writer.write(name, torch.ones(1, 4))
        with pytest.raises(FileFormatError, match=fault):
            open_evidence(path)


def test_names_of_hugging_face_in_gguf() -> None:
    names = ["model.layers.3.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight", "unheard.of"]
    assert gguf_names(names) == {names[0]: "blk.3.attn_q.weight", names[1]: "blk.0.ffn_down.weight"}

"""Names that had another place work for one release, and say the new one."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import bitplan
from bitplan import choose_formats, get_format
from bitplan.base import names
from bitplan.files import DriftLog
from bitplan.plan import check_headers
from bitplan.plan.manifest import shipped_manifest

OLD_PARTS = {f"bitplan.{part}" for part in names._OLD_PARTS}


@pytest.mark.parametrize(
    ("package", "name", "home"),
    [
        ("bitplan.store", "open_tensors", "bitplan"),
        ("bitplan", "QuantLinear", "bitplan.packed"),
        ("bitplan.store", "morph_model", "bitplan.files"),
        ("bitplan.store", "TensorFile", "bitplan.files"),
        ("bitplan.runtime", "ApplyError", "bitplan.packed.apply_plan"),
        ("bitplan.packed", "ApplyError", "bitplan.packed.apply_plan"),
        ("bitplan.plan", "ModelView", "bitplan.plan.structure.model_view"),
        ("bitplan.streaming", "TransferError", "bitplan.base.errors"),
        ("bitplan.trees", "GradientsI8", "bitplan.trees.gradients"),
        ("bitplan.runtime", "StreamError", "bitplan.streaming"),
        ("bitplan.kernels", "explain_encode", "bitplan.formats.dispatch"),
        ("bitplan.plan", "Fp8Error", "bitplan.fp8.policy.vocabulary"),
        ("bitplan.report", "ReportError", "bitplan.report.read_records"),
        ("bitplan.trees", "ProcessLostError", "bitplan.trees.distributed.shards"),
    ],
)
def test_an_old_name_is_the_new_one_and_warns(package: str, name: str, home: str) -> None:
    with pytest.warns(FutureWarning, match=f"{package}.{name} is {home}.{name} now") as warned:
        value = getattr(importlib.import_module(package), name)
    assert value is getattr(importlib.import_module(home), name)
    assert warned[0].filename == __file__


def test_keywords_that_became_options_still_count_and_warn() -> None:
    @names.keywords_in(Options)
    def act(what: str, *, options: Options | None = None) -> tuple[str, Options | None]:
        return what, options

    assert act("run") == ("run", None)
    assert act("run", options=Options(depth=3)) == ("run", Options(depth=3))
    says = r"act\(depth=\.\.\.\) is act\(options=Options\(depth=\.\.\.\)\) now"
    with pytest.warns(FutureWarning, match=says) as warned:
        assert act("run", depth=2) == ("run", Options(depth=2))  # type: ignore[call-arg]
    with pytest.warns(FutureWarning, match=says):
        assert act("run", depth=2, options=Options(width=4)) == ("run", Options(2, 4))  # type: ignore[call-arg]
    assert warned[0].filename == __file__


def test_keywords_join_options_that_are_a_mapping() -> None:
    @names.keywords_in(Options, written="dict")
    def act(*, options: Options | dict[str, int] | None = None) -> Any:
        return options

    with pytest.warns(FutureWarning, match=r"act\(depth=\.\.\.\) is act\(options=dict\(depth=\.\.\.\)\) now"):
        assert act(depth=2, options={"width": 4}) == Options(2, 4)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Options:
    depth: int = 1
    width: int = 1


def test_every_old_name_has_its_new_place() -> None:
    for package, old in names._NAMES.items():
        for name in old.split():
            with pytest.warns(FutureWarning, match=re.escape(f"{package}.{name} is ")):
                assert getattr(importlib.import_module(package), name) is not None
            assert name not in getattr(importlib.import_module(package), "__all__", ()) or package in OLD_PARTS


def test_a_call_that_another_has_replaced_does_what_it_did(tmp_path: Path) -> None:
    weight = torch.randn(64, 64)
    with pytest.warns(
        FutureWarning, match=r"bitplan.files.log_drift is bitplan.files.DriftLog.add\(step, layers\) now"
    ):
        from bitplan.files import log_drift  # type: ignore[attr-defined]
    with pytest.warns(FutureWarning, match=r"bitplan.store.read_drift is bitplan.files.DriftLog.read\(path\) now"):
        from bitplan.store import read_drift  # type: ignore[attr-defined]
    layers = [("w", weight, bitplan.encode(weight, "mxfp4"))]
    assert [row.name for row in log_drift(None, 3, layers)] == ["w"]
    with DriftLog(tmp_path / "drift.jsonl") as log:
        log_drift(log, 4, layers)
    assert [line["step"] for line in read_drift(tmp_path / "drift.jsonl")] == [4]
    with pytest.warns(FutureWarning, match=r'bitplan.apply_fp8_config is bitplan.apply_fp8\(model, "model.yaml"\) now'):
        from bitplan import apply_fp8_config  # type: ignore[attr-defined]
    with pytest.raises(bitplan.BitplanError, match=r"none\.yaml"):
        apply_fp8_config(torch.nn.Linear(2, 2), path=tmp_path / "none.yaml", tokens=8)
    with pytest.warns(FutureWarning, match=r"bitplan.plan.shipped_manifest is bitplan.Manifest.load\(name\) now"):
        from bitplan.plan import shipped_manifest as old_shipped_manifest  # type: ignore[attr-defined]
    assert old_shipped_manifest("llama") == bitplan.Manifest.load("llama")
    with pytest.warns(FutureWarning, match=r"bitplan.rounding.round_weight is bitplan.rounding.round_with_report"):
        from bitplan.rounding import round_weight  # type: ignore[attr-defined]
    assert round_weight(weight, "mxfp4").nbytes == bitplan.encode(weight, "mxfp4").nbytes


def test_what_never_was_is_no_old_name() -> None:
    with pytest.raises(AttributeError, match=r"module 'bitplan\.store' has no attribute 'nothing'"):
        bitplan.store.nothing  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from bitplan.store import nothing  # noqa: F401


def test_old_records_of_a_tensor_make_the_one_that_is_left() -> None:
    with pytest.warns(FutureWarning, match=r"bitplan.files.Promise is .*TensorSpec.of\(name, shape, fmt"):
        from bitplan.files import Promise  # type: ignore[attr-defined]
    with pytest.warns(FutureWarning, match=r"bitplan.plan.Stored is .*TensorSpec.of"):
        from bitplan.plan import Stored  # type: ignore[attr-defined]
    with pytest.warns(FutureWarning, match=r"bitplan.plan.Header is a tuple \(dtype, shape, nbytes\)"):
        from bitplan.plan import Header  # type: ignore[attr-defined]
    packed = Promise("w", (2, 32), get_format("mxfp4"))
    assert (packed.format, packed.nbytes, packed.encoded) == ("mxfp4", 34, True)
    assert choose_formats({"w": Stored((2, 32), "mxfp4", packed=True)}, {})["w"].format == "mxfp4"
    assert choose_formats({"w": Stored((2, 32), "bfloat16")}, {}).entries["w"].stored == "bfloat16"
    assert [finding.code for finding in check_headers(shipped_manifest("llama"), {"w": Header("float32", (2,), 8)})]

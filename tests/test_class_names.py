"""Over all classes of the package, from their source: each name means one thing, and each error is a BitplanError."""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bitplan
from bitplan.base.errors import BitplanError, FileFormatError
from bitplan.fp8.layer_settings import Fp8Recipe
from bitplan.fp8.layers.linear import Fp8Linear

# Of a class alone: to parse the whole module takes longer.
HEAD = re.compile(r"^class [^_\W].*?:(?=\s*(?:#.*)?$)", re.MULTILINE | re.DOTALL)


def public_classes() -> Iterator[ast.ClassDef]:
    """Those at the top of a module whose name has no underscore: no other module sees the rest."""
    for path in Path(bitplan.__file__).parent.rglob("*.py"):
        for head in HEAD.findall(path.read_text()):
            (node,) = ast.parse(f"{head} pass").body
            assert isinstance(node, ast.ClassDef)
            yield node


CLASSES = list(public_classes())
BASES = {node.name: [ast.unparse(base) for base in node.bases] for node in CLASSES}


def is_error(name: str) -> bool:
    known = getattr(builtins, name, None)
    if isinstance(known, type):
        return issubclass(known, Exception)
    return any(map(is_error, BASES.get(name, ())))


def is_ours(name: str) -> bool:
    return name == "BitplanError" or any(map(is_ours, BASES.get(name, ())))


def test_a_class_name_means_one_thing() -> None:
    assert len(CLASSES) > 300
    assert [name for name, count in Counter(node.name for node in CLASSES).items() if count > 1] == []


def test_every_error_is_a_bitplan_error() -> None:
    errors = [name for name in BASES if is_error(name)]
    assert len(errors) > 30
    assert [name for name in errors if not is_ours(name)] == []


def test_a_bad_shape_is_no_bad_file() -> None:
    layer = Fp8Linear(32, 32, recipe=Fp8Recipe("tensorwise"))
    with pytest.raises(BitplanError, match=r"a layer of 32 inputs .*got") as caught:
        layer(torch.ones(2, 48))
    assert not isinstance(caught.value, FileFormatError)
    assert isinstance(caught.value, ValueError)

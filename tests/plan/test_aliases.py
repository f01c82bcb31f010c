"""Aliases: one map, both ways."""

from __future__ import annotations

import pytest

from bitplan.plan.manifest import AliasError, Aliases

MAP = Aliases({"block.[i].qkv": ("h.[i].q", "h.[i].k"), "e.[i].[j]": ("x.[j].y.[i]",), "norm": ("final",)})


@pytest.mark.parametrize(
    ("ours", "others"),
    [
        ("block.12.qkv", ("h.12.q", "h.12.k")),
        ("e.3.7", ("x.7.y.3",)),
        ("norm", ("final",)),
        ("unknown.1", ("unknown.1",)),
        ("block.x.qkv", ("block.x.qkv",)),
        ("block.\u0661.qkv", ("block.\u0661.qkv",)),
    ],
)
def test_both_ways(ours, others):
    assert MAP.to_others(ours) == others
    assert {MAP.to_ours(other) for other in others} == {ours}


def test_the_template_behind_an_alias():
    assert MAP.template_of("h.0.k") == "block.[i].qkv"
    assert MAP.template_of("block.0.qkv") is None


@pytest.mark.parametrize(
    ("templates", "message"),
    [
        ({"a.[i]": ("b.[j]",)}, "placeholders of 'a.\\[i\\]'"),
        ({"a.[i].[i]": ("b.[i].[i]",)}, "each once"),
        ({"a": ("b",), "c": ("b",)}, "'b' stands for two names, 'a' and 'c'"),
        ({"a.[i]": ("b.[i]",), "a.[j]": ("c.[j]",)}, "same form"),
        ({"a": ("b",), "b": ("c",)}, "both namings"),
        ({"a": ()}, "no other name"),
        ({"a[i]": ("b[i]",)}, "between dots"),
    ],
)
def test_maps_that_cannot_be_read_both_ways(templates, message):
    with pytest.raises(AliasError, match=message):
        Aliases(templates)

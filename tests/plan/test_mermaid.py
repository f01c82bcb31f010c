"""The chart: layers that agree are one, those that do not are two, and no name breaks out of its box."""

from __future__ import annotations

import re

from bitplan.plan import Choice, Plan, Planned
from bitplan.plan.manifest import shipped_manifest

from .samples import gpt_oss_openai, shapes


def test_gpt_oss_as_a_chart():
    lines = shipped_manifest("gpt-oss").resolve(shapes(gpt_oss_openai())).to_mermaid().splitlines()
    assert lines[0] == "graph TD"
    boxes = re.findall(r'\["(.*?)"\]', "\n".join(lines))
    assert boxes == [
        "embedding: bfloat16",
        "block 0..23",
        "attn.norm: bfloat16",
        "attn.qkv: bfloat16",
        "attn.sinks: bfloat16",
        "attn.out: bfloat16",
        "mlp.norm: bfloat16",
        "mlp.gate: bfloat16",
        "mlp.mlp1: bfloat16, mxfp4 data+scales",
        "mlp.mlp2: bfloat16, mxfp4 data+scales",
        "norm: bfloat16",
        "unembedding: bfloat16",
    ]
    assert [line.strip() for line in lines if "-->" in line] == [f"N{i} --> N{i + 1}" for i in range(10)]


def test_layers_that_differ_are_drawn_apart():
    formats = ["int8", "int8", "bfloat16", "int8"]
    text = Plan({f"block.{i}.w": Planned(Choice(name, "r")) for i, name in enumerate(formats)}).to_mermaid()
    assert re.findall(r'subgraph L\d\["(.*?)"\]', text) == ["block 0..1", "block 2", "block 3"]


def test_parts_of_one_rank_stand_side_by_side():
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
    text = Plan({name: Planned(Choice("int8", "r")) for name in names}).to_mermaid()
    assert re.findall(r"N\d --> N\d", text) == ["N0 --> N3", "N1 --> N3", "N2 --> N3"]


def test_a_name_cannot_leave_its_box():
    text = Plan({'a"]\nN9 --> x<b>.w': Planned(Choice("int8", "r"))}).to_mermaid()
    assert len(text.splitlines()) == 2
    assert text.count('"') == 2
    assert "<b>" not in text

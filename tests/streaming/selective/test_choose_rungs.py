"""A ladder of three precisions under a byte budget: against all choices of small cases, and its hysteresis."""

from __future__ import annotations

import itertools
import random

from bitplan.streaming.selective.decide import RungCandidate, choose_rungs

BYTES = {"bf16": 200, "int8": 102, "int4": 58}


def unit(name, int4_damage, current="bf16", locked=False):
    damage = {"bf16": 0.0, "int8": int4_damage / 200, "int4": int4_damage}
    return RungCandidate(name, BYTES, damage, current, locked)


def precisions(units, limit, margin=0.0):
    return list(choose_rungs(units, limit, margin=margin).precisions.values())


def test_all_descend_to_eight_bits_before_one_descends_to_four():
    units = [unit("a", 0.01), unit("b", 0.03), unit("c", 0.02)]
    assert precisions(units, 600) == ["bf16"] * 3
    assert precisions(units, 502) == ["int8", "bf16", "bf16"]
    assert precisions(units, 306) == ["int8"] * 3
    assert precisions(units, 262) == ["int4", "int8", "int8"]
    assert precisions(units, 218) == ["int4", "int8", "int4"]
    assert precisions(units, 0) == ["int4"] * 3
    added = [
        RungCandidate(name, BYTES, {"bf16": 0.0, "int8": eight, "int4": four}, "bf16", False)
        for name, eight, four in (("a", 0.5, 0.9), ("b", 0.01, 0.6))
    ]
    assert precisions(added, 160) == ["int4", "int8"]  # a step costs what it adds


def test_bytes_fit_and_no_unit_could_rise_and_damage_is_near_the_best():
    draw = random.Random(3)
    for _ in range(20):
        units = [unit(str(index), draw.random() ** 3) for index in range(5)]
        limit = draw.randint(5 * 58, 5 * 200)
        chosen = choose_rungs(units, limit)
        damage = sum(one.damage[chosen.precisions[one.name]] for one in units)
        assert chosen.nbytes == sum(BYTES[name] for name in chosen.precisions.values()) <= limit
        fits = (c for c in itertools.product(BYTES, repeat=5) if sum(map(BYTES.__getitem__, c)) <= limit)
        best = min(sum(one.damage[rung] for one, rung in zip(units, choice, strict=True)) for choice in fits)
        assert best <= damage <= best + max(one.damage["int4"] for one in units)  # greedy: at most one step too many


def test_the_present_rung_stays_unless_another_is_better_by_the_margin():
    close = [unit("a", 0.0105, "int4"), unit("b", 0.01, "int8")]
    assert precisions(close, 160) == ["int8", "int4"]
    assert precisions(close, 160, margin=0.1) == ["int4", "int8"]
    far = [unit("a", 0.02, "int4"), unit("b", 0.01, "int8")]
    assert precisions(far, 160, margin=0.1) == ["int8", "int4"]
    assert precisions([unit("a", 0.02, "int4", locked=True), unit("b", 0.01, "int8")], 160) == ["int4", "int8"]

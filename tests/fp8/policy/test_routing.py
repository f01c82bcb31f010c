"""Routing for a benchmark: every token is given away, evenly or with favourites."""

from __future__ import annotations

import pytest

from bitplan.fp8.bench.session import route_tokens
from bitplan.fp8.policy.vocabulary import Fp8Error


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
@pytest.mark.parametrize("experts", [1, 2, 3, 8, 64, 128])
@pytest.mark.parametrize("tokens", [1, 7, 424, 32768])
def test_every_token_is_given_away(tokens, experts, routing):
    counts = route_tokens(tokens, experts, routing)
    assert len(counts) == experts
    assert sum(counts) == tokens
    assert min(counts) >= 0
    assert counts == route_tokens(tokens, experts, routing)


def test_uniform_differs_by_one_at_most():
    assert set(route_tokens(1000, 64, "uniform")) == {15, 16}


def test_zipf_falls_as_one_over_rank_and_favourites_are_not_neighbours():
    counts = route_tokens(100_000, 8, "zipf")
    ordered = sorted(counts, reverse=True)
    assert ordered[0] == pytest.approx(2 * ordered[1], rel=1e-3)
    assert ordered[0] == pytest.approx(8 * ordered[7], rel=1e-3)
    assert abs(counts.index(ordered[0]) - counts.index(ordered[1])) > 1


@pytest.mark.parametrize("arguments", [(0, 8, "zipf"), (8, 0, "zipf"), (8, 8, "random"), (8.0, 8, "zipf")])
def test_bad_input(arguments):
    with pytest.raises(Fp8Error, match="must be"):
        route_tokens(*arguments)

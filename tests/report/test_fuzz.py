"""Records with pieces missing, swapped or of another type: a page or a clear error, and never a traceback."""

from __future__ import annotations

import copy
import json
import random

import pytest

from bitplan.errors import FileFormatError
from bitplan.report.page import build_page, build_sections
from bitplan.report.read import read_records

from . import samples

ROUNDS = [8, pytest.param(25, marks=pytest.mark.long)]
ODD = (None, True, -1, 0, 1.5, 1e308, -1e308, 10**30, "", "text", [], {}, [[]], [{}], {"a": {}}, [None], "\ud800<b>")


def small_samples(folder):
    """One record of each kind, cut to a few lines so that a change hits something."""
    writers = (
        samples.write_plan,
        samples.write_findings,
        samples.write_training,
        samples.write_precision,
        samples.write_stream,
        samples.write_fp8,
        samples.write_crossover,
        samples.write_drift,
        samples.write_calibration,
    )
    paths = [path for write in writers for path in write(folder)]
    return [*paths, *samples.RESULTS.glob("*.json")]


def documents(path):
    text = path.read_text()
    if path.suffix == ".json":
        return [json.loads(text)], False
    return [json.loads(line) for line in text.splitlines()[:4]], True


def change(value, rng, depth=0):
    """Descend at random, and there remove, replace or double something."""
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        if depth < 5 and isinstance(value[key], dict | list) and value[key] and rng.random() < 0.8:
            change(value[key], rng, depth + 1)
        elif rng.random() < 0.3:
            del value[key]
        else:
            value[key] = copy.deepcopy(rng.choice(ODD))
    elif isinstance(value, list) and value:
        index = rng.randrange(len(value))
        if isinstance(value[index], dict | list) and value[index] and rng.random() < 0.8:
            change(value[index], rng, depth + 1)
        else:
            value[index] = copy.deepcopy(rng.choice(ODD))


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    return [(path.name, *documents(path)) for path in small_samples(tmp_path_factory.mktemp("fuzz"))]


def refusal(path):
    """Why there is no page of this record; empty where there is one."""
    try:
        build_page(build_sections(read_records([path])), title="t").encode()
    except FileFormatError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rounds", ROUNDS)
def test_changed_records_give_a_page_or_a_clear_error(rounds, originals, tmp_path):
    path, refused, shown = tmp_path / "record.json", 0, 0
    for name, lines, is_log in originals:
        for seed in range(rounds):
            rng = random.Random(f"{name}{seed}")
            changed = copy.deepcopy(lines)
            for _ in range(rng.choice((1, 1, 3))):
                change(changed if is_log else changed[0], rng)
            path.write_text("".join(json.dumps(line) + "\n" for line in changed))
            try:
                told = refusal(path)
            except Exception as error:
                raise AssertionError(f"{name}, seed {seed}") from error
            assert not told or ("record.json" in told and len(told) < 1200), (name, seed, told)
            refused += bool(told)
            shown += not told
    assert min(refused, shown) > 2 * rounds

"""Every reader, given damaged files: it reads them, or refuses them in one line, quickly and in little memory."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

from tests.fuzz.json_changes import change_json, spans
from tests.fuzz.readers import READERS


def test_damaged_files_are_read_or_refused(tmp_path):
    command = [sys.executable, "-m", "tests.fuzz", "--inputs", "20000", "--seed", "1", "--failures", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^(.*): \d+ inputs: (\d+) read, (\d+) refused, 0 failed;", done.stdout, re.MULTILINE)
    assert [name for name, _, _ in found] == [reader.name for reader in READERS]
    assert [name for name, read, refused in found if not int(read) or not int(refused)] == []


def test_a_change_depends_on_its_seed_alone_and_is_none_of_the_text_outside():
    text = '{"a": [1, {"b": "x"}], "c": null}'
    places = spans(text)
    assert [text[place.start : place.end] for place in places] == [
        "1",
        '"x"',
        '{"b": "x"}',
        '[1, {"b": "x"}]',
        "null",
        text,
    ]
    changed = [change_json(text, places, random.Random(seed)) for seed in range(200)]
    assert changed == [change_json(text, places, random.Random(seed)) for seed in range(200)]
    assert len(set(changed)) > 120

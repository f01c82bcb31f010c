"""Every reader, given damaged files: it reads them, or refuses them in one line, quickly and in little memory."""

from __future__ import annotations

import random
import re
from pathlib import Path

from tests.fuzz.json_changes import change_json, spans
from tests.fuzz.readers import READERS
from tests.processes import Program


def test_damaged_files_are_read_or_refused(tmp_path):
    code = "import sys; from tests.fuzz.__main__ import main; sys.exit(main())"
    arguments = ("--inputs", "1000", "--seed", "3", "--failures", str(tmp_path))
    program = Program(code, *arguments, folder=Path(__file__).parents[2])
    assert program.wait() == 0, program.output + program.errors
    result = re.findall(r"^(.*): \d+ inputs: (\d+) read, (\d+) refused, 0 failed;", program.output, re.MULTILINE)
    assert [name for name, _, _ in result] == [reader.name for reader in READERS]
    # Readers that take long get too few inputs here for both.
    shares = {reader.name: reader.share for reader in READERS}
    assert [name for name, read, refused in result if shares[name] > 0.3 and not (int(read) and int(refused))] == []


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

"""The fuzzer itself: an input that ends the process is saved and the rest is read, missing libraries are said."""

from __future__ import annotations

import os
import signal

from tests.fuzz.readers import Reader
from tests.fuzz.run import fuzz


def test_an_input_that_ends_the_process_is_saved_and_the_others_are_read(tmp_path, capfd):
    read = []

    def make(folder):
        (folder / "x.json").write_text('{"a": 1}')
        return [folder / "x.json"]

    def reads(path):
        if len(read) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        read.append(path)

    def lacks(_folder):
        raise ModuleNotFoundError("No module named 'absent'")

    readers = [Reader("killed", "a", make, reads), Reader("lacking", "a", lacks, reads)]
    assert fuzz(readers, 12, "1", tmp_path / "failed") == 1
    lines = capfd.readouterr().out.splitlines()
    assert "lacking: left out: No module named 'absent'" in lines
    assert sum("ends the process by signal SIGKILL" in line for line in lines) == 2  # each process reads three
    assert lines[-1].startswith("6 inputs, 2 failures, 6 of readers whose libraries are missing; see ")
    assert len(list((tmp_path / "failed").iterdir())) == 2

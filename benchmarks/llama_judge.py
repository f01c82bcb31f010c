"""llama.cpp's own tools as a judge: KL of a GGUF file from the float32 file, and llama-quantize's own files."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CONTEXT = 512
BASE = "--kl-divergence-base"
# After each window its number, then means so far and their errors: of the perplexity, its change, the KL, the change of
# probabilities, the same top token. The last of them is at times lost when its log closes: one more is asked for.
_MEAN = r"\s+\S+\s+±\s+\S+"
RUNNING = re.compile(rf"^\s*(\d+){_MEAN}{_MEAN}\s+(\S+)\s+±\s+(\S+){_MEAN}\s+%\s+(\S+)\s+±\s+\S+\s+%", re.MULTILINE)
TRIES = 3


@dataclass(frozen=True)
class Judge:
    """The tools in `bin`, on the texts calibration.txt and judge.txt, and on float32.gguf, all in `work`."""

    bin: Path
    work: Path
    threads: int

    def prepare(self, chunks: int, calibration_chunks: int) -> None:
        """What all rows need: the float32 file's own predictions, and an importance matrix, unless of no chunks."""
        plain, matrix, base = self.work / "float32.gguf", self.work / "imatrix.gguf", self._base(chunks)
        if not base.exists():
            text, options = self.work / "judge.txt", self._options(chunks)
            self._make(base, lambda part: ["llama-perplexity", "-m", plain, "-f", text, *options, BASE, part])
        if calibration_chunks and not matrix.exists():
            text, more = self.work / "calibration.txt", self._options(calibration_chunks)
            self._make(matrix, lambda part: ["llama-imatrix", "-m", plain, "-f", text, "-o", part, *more])

    def kl(self, model: Path, chunks: int) -> dict[str, float]:
        """KL from the float32 file, in nats a token, over the second half of each window."""
        said, base = "", self._base(chunks)
        for _ in range(TRIES):
            said = self._run("llama-perplexity", "-m", model, *self._options(chunks), BASE, base, "--kl-divergence")
            found = {int(row[1]): row for row in RUNNING.finditer(said)}.get(chunks)
            if found is not None:
                return {"kl": float(found[2]), "kl_error": float(found[3]), "same_top": float(found[4]) / 100}
        raise SystemExit(f"llama-perplexity gave no KL of {model.name}: {said[-600:]}")

    def quantized(self, kind: str) -> Path:
        """llama-quantize's file of a type, with an importance matrix."""
        plain, matrix, output = (self.work / name for name in ("float32.gguf", "imatrix.gguf", f"theirs-{kind}.gguf"))
        if not output.exists():
            threads = self.threads
            self._make(output, lambda part: ["llama-quantize", "--imatrix", matrix, plain, part, kind, threads])
        return output

    def _base(self, chunks: int) -> Path:
        return self.work / f"base-{chunks}.kld"

    def _make(self, path: Path, command: Callable[[Path], list[object]]) -> None:
        """A file that a tool writes: it has its name only when it is whole."""
        part = path.with_stem(f"part-{path.stem}")
        self._run(*command(part))
        part.replace(path)

    def _options(self, chunks: int) -> list[object]:
        return ["-c", CONTEXT, "-b", CONTEXT, "--chunks", chunks + 1, "-t", self.threads]

    def _run(self, *words: object) -> str:
        tool, *rest = map(str, words)
        done = subprocess.run([str(self.bin / tool), *rest], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{tool} ended with {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
        return done.stdout + done.stderr

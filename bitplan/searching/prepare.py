"""What a search works on: the model with its weights, and windows of text for statistics, checks and the proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from bitplan.files.headers import check_model_source
from bitplan.files.packed_folder import CONFIG, read_config
from bitplan.packed.language.causal_lm import CausalLM, load_causal_lm, require_causal
from bitplan.packed.language.model_on_disk import ModelOnDisk, is_plain_folder
from bitplan.packed.language.perplexity import spread_windows
from bitplan.searching.gather.expert_products import ExpertSlice
from bitplan.searching.gather.searched_model import SearchSubject, subject_of
from bitplan.searching.goal import WINDOWS, SearchError

CHECKS, HELD_OUT = 4, 12
LEAST_WINDOWS = 4


@dataclass(frozen=True)
class SearchText:
    """Windows of token ids: no window serves twice. `unscored` tokens at the head of each are context only."""

    statistics: list[Tensor]
    checks: list[Tensor]
    proof: list[Tensor]
    unscored: int


def prepare(
    model: nn.Module | str | Path,
    batches: Sequence[Tensor] | None,
    text: str | None,
    held_out: Sequence[Tensor] | str | None,
    *,
    keep: Sequence[str] = (),
    only: Sequence[str] = (),
    context: int | None = None,
    windows: int = WINDOWS,
    device: str | None = None,
) -> tuple[SearchSubject, SearchText]:
    """Open the model where it is a path, cut the text, and keep some of it for the proof."""
    if isinstance(model, nn.Module):
        if batches is None or isinstance(held_out, str):
            raise SearchError("a model in memory has no tokenizer: batches and held_out must be token ids")
        proof = None if held_out is None else _windows_of_batches(held_out)
        subject = subject_of(model, keep=keep, only=only, device=device)
        return subject, _split(_windows_of_batches(batches), proof, windows, 1)
    if batches is None and text is None:
        raise SearchError("a search needs text, or batches of token ids", settings={"text": "FILE"})
    lm, subject = _read_model(Path(model), keep, only, device)
    length = min(512, lm.positions or 512) if context is None else context
    lm.check_context(length)
    calibration = _whole(lm.windows(text, length)) if text is not None else _windows_of_batches(batches or ())
    if isinstance(held_out, str):
        proof = _whole(lm.windows(held_out, length))
    else:
        proof = None if held_out is None else _windows_of_batches(held_out)
    return subject, _split(calibration, proof, windows, len(lm.prefix))


def _read_model(
    path: Path, keep: Sequence[str], only: Sequence[str], device: str | None
) -> tuple[CausalLM, SearchSubject]:
    """Plain weights of a folder stay on disk; GGUF files and packed models are decoded as a whole."""
    check_model_source(path, None)
    _refuse_packed_gpt_oss(path)
    if not is_plain_folder(path):
        lm = load_causal_lm(path)
        return lm, subject_of(lm.model, path=path, keep=keep, only=only, device=device)
    on_disk = ModelOnDisk(path)
    slices = {
        name: ExpertSlice(name, stack, piece.item, slice(piece.start, piece.start + piece.shape[0]))
        for name, (stack, piece) in on_disk.stacked.items()
        if piece.item is not None
    }
    subject = subject_of(
        on_disk.lm.model, path=path, read=on_disk.read, slices=slices, keep=keep, only=only, device=device
    )
    require_causal(on_disk.lm, subject.logits)
    return on_disk.lm, subject


def _refuse_packed_gpt_oss(path: Path) -> None:
    """gpt-oss as it was published: its experts would stay as they are, and nothing could be packed beside them."""
    said = read_config(path).get("quantization_config") if path.is_dir() and (path / CONFIG).is_file() else None
    if isinstance(said, dict) and said.get("quant_method") == "mxfp4":
        raise SearchError(
            f"{path}: its experts are in MXFP4, and a search begins with floats: search WIDE, into which `bitplan "
            f"gpt-oss convert {path} WIDE` decodes them without a change of a number",
            settings={"to": "hf", "experts": "bfloat16"},
        )


def _whole(windows: Sequence[Tensor]) -> list[Tensor]:
    return [window for window in windows if len(window) == len(windows[0])]


def _windows_of_batches(batches: Sequence[Tensor]) -> list[Tensor]:
    for batch in batches:
        if not isinstance(batch, Tensor) or batch.is_floating_point() or batch.dim() not in (1, 2):
            came = f"{batch.dtype} {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
            raise SearchError(f"batches must be token ids, whole numbers [length] or [windows, length], got {came}")
    return [row for batch in batches for row in (batch if batch.dim() == 2 else batch[None])]


def _split(calibration: Sequence[Tensor], proof: Sequence[Tensor] | None, windows: int, unscored: int) -> SearchText:
    if len(calibration) < LEAST_WINDOWS:
        raise SearchError(
            f"the text has {len(calibration)} windows, and a search needs {LEAST_WINDOWS} or more, of which some are "
            "kept for the proof; give a longer text, or shorter windows",
            settings={"context": None},
        )
    if proof is None:
        cut = max(LEAST_WINDOWS - 1, len(calibration) * 3 // 4)
        calibration, proof = calibration[:cut], calibration[cut:]
    checks = max(1, min(CHECKS, len(calibration) // 4))
    chosen = _spread(calibration, windows + checks)
    every = max(1, len(chosen) // checks)
    check_at = {index * every for index in range(checks)}
    statistics = [window for index, window in enumerate(chosen) if index not in check_at]
    return SearchText(statistics, [chosen[index] for index in sorted(check_at)], _spread(proof, HELD_OUT), unscored)


def _spread(windows: Sequence[Tensor], count: int) -> list[Tensor]:
    return list(windows) if len(windows) <= count else spread_windows(windows, count * len(windows[0]))

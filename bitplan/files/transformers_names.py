"""Puts tensors under the names of a Hugging Face file into a model: transformers loads them, and we check.

transformers renames and merges tensors when it loads (the experts of a mixture become one tensor, ViT's layers lose a
prefix), and fills what is missing with random numbers. Only transformers knows the names, so it loads; tensors that it
reports as missing, unknown or of another shape are an error here.
"""

from __future__ import annotations

import copy
import io
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from torch import Tensor

from bitplan.base.documents import Fields, short
from bitplan.base.errors import BitplanError, FileFormatError
from bitplan.base.optional import REMOTE_CODE, WEIGHTS_FILE
from bitplan.base.records import read_json

GENERATION = "generation_config.json"
MOST_NAMES_SHOWN = 8
# Options of from_pretrained: it reports shapes that differ, and `require_complete` refuses them.
REPORTED = {"output_loading_info": True, "ignore_mismatched_sizes": True}


def model_from_tensors(model_class: Any, config: Any, tensors: Mapping[str, Tensor], where: str, **options: Any) -> Any:
    """A model of this class that holds these tensors, all of them and nothing else."""
    config = forget_weights_file(copy.deepcopy(config))
    with silence_transformers(), foreign_faults(FileFormatError, f"{where}: transformers cannot load it"):
        model, info = model_class.from_pretrained(None, config=config, state_dict=dict(tensors), **REPORTED, **options)
    require_complete(info, where)
    return model


def forget_weights_file(config: Any) -> Any:
    """Take out of a config which file transformers reads, for the tensors come from elsewhere."""
    if hasattr(config, WEIGHTS_FILE):
        delattr(config, WEIGHTS_FILE)
    return config


def require_complete(info: Mapping[str, Any], where: str) -> None:
    """Refuse a model for which transformers reports tensors that are missing, unused or of another shape."""
    missing, unknown = sorted(info.get("missing_keys") or ()), sorted(info.get("unexpected_keys") or ())
    shapes = [
        f"{name} (the file has {tuple(came)}, the model {tuple(expected)})"
        for name, came, expected in sorted(info.get("mismatched_keys") or (), key=lambda item: str(item[0]))
    ]
    errors = [foreign_reason(error) for error in info.get("error_msgs") or ()]
    faults = [("missing", missing), ("unknown to the model", unknown), ("of another shape", shapes), ("errors", errors)]
    if any(names for _, names in faults):
        message = "; ".join(listed_names(fault, names) for fault, names in faults if names)
        raise FileFormatError(f"{where}: the file does not fit its config's model: {message}; get both of one model")


def listed_names(fault: str, names: Iterable[str]) -> str:
    """Names behind their fault, the first few: '3 missing: a, b and 1 more'."""
    listed = list(names)
    more = f" and {len(listed) - MOST_NAMES_SHOWN} more" if len(listed) > MOST_NAMES_SHOWN else ""
    return f"{len(listed)} {fault}: {', '.join(listed[:MOST_NAMES_SHOWN])}{more}"


def foreign_reason(error: object) -> str:
    """Another library's error on one line: in some the first line is a title, and the second the reason."""
    if "trust_remote_code" in str(error):  # an option of transformers that nobody here can give
        return f"it needs code of its own (auto_map), which is not run unless {REMOTE_CODE}=1 is in the environment"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return short(" ".join(lines[:2]), 300) if lines else type(error).__name__


@contextmanager
def foreign_faults(
    kind: type[BitplanError], where: str, hint: str = "", settings: Mapping[str, object] | None = None
) -> Iterator[None]:
    """A context that turns other libraries' errors about a user's file, panics too, into ours of one line."""
    try:
        yield
    except (BitplanError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise kind(f"{where}: {foreign_reason(error)}{hint}", settings=settings) from error


_one_at_a_time = threading.RLock()


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Hide transformers' progress bars: callers show their own, and the bar of GGUF's dequantization has no switch.

    One thread at a time: stderr is the process's, and so are the patches of its own classes under which transformers
    makes a model. Two threads that leave them in another order would leave them on.
    """
    with _one_at_a_time:
        yield from _silenced()


def _silenced() -> Iterator[None]:
    from transformers.utils import logging as theirs

    had_bar, level = theirs.is_progress_bar_enabled(), theirs.get_verbosity()
    theirs.disable_progress_bar()
    theirs.set_verbosity(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        theirs.set_verbosity(level)
        if had_bar:
            theirs.enable_progress_bar()


def read_generation_config(model: Any, folder: Path) -> None:
    """Give a model the generation_config.json of a folder, where there is one."""
    import transformers

    path = folder / GENERATION
    if path.is_file():
        Fields(read_json(path), str(path))
        with foreign_faults(FileFormatError, f"{path}: cannot be read"):
            model.generation_config = transformers.GenerationConfig.from_pretrained(str(folder))

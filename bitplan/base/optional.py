"""Optional libraries: imported when needed; if one is missing, the error is one line with the pip command."""

from __future__ import annotations

import importlib
import os
from typing import Any

from bitplan.base.errors import BitplanError, MissingLibraryError

REMOTE_CODE = "BITPLAN_TRUST_REMOTE_CODE"
WEIGHTS_FILE = "transformers_weights"  # of a transformers config: the file of weights to read
_DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # modules whose name for pip differs


def require(module: str, *, purpose: str, extra: str | None = None, least: int = 0) -> Any:
    """The module, imported; `purpose` begins the line that says what needs it.

    extra  the extra of bitplan that brings the library; None: the message names the library itself
    least  the smallest major version that is accepted
    """
    library = module.partition(".")[0]
    name = _DISTRIBUTIONS.get(library, library)
    install = f"pip install 'bitplan[{extra}]'" if extra else f"pip install {name}"
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == library:
            raise MissingLibraryError(
                f"{purpose} needs {name}, which is not installed: {install}", name=library
            ) from None
        message = " ".join(str(error).split())[:200]
        raise MissingLibraryError(
            f"{purpose} needs {name}, which is installed and cannot be imported: {message}; "
            f"pip install --force-reinstall {name}",
            name=library,
        ) from error
    version = str(getattr(imported, "__version__", "")) if least else ""
    if least and int(version.partition(".")[0]) < least:
        raise MissingLibraryError(f"{purpose} needs {name} {least}, {version} is installed: {install}", name=library)
    return imported


def remote_code_allowed() -> bool:
    """Whether transformers may run code that comes with a model: only where the user's environment says so."""
    value = os.environ.get(REMOTE_CODE, "0")
    if value not in ("0", "1"):
        raise BitplanError(f"{REMOTE_CODE} must be 0 or 1, got {value!r}; 1 runs the code that comes with a model")
    return value == "1"

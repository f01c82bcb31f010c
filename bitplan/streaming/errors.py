"""Errors of streaming: what it refuses, and what can break in the middle of a step.

Every message names the block and, inside a step, the step: among forty equal blocks there is no other clue. An error of
a block's own forward keeps its type (callers catch torch.OutOfMemoryError) and gets block and step as a note.
"""

from __future__ import annotations

from bitplan.base.errors import BitplanError, FileFormatError, NonFiniteError


class StreamError(BitplanError, RuntimeError):
    """Streaming was asked for something that it cannot do."""


class TransferError(StreamError):
    """A block did not reach the device, or its gradients did not come back; begin_step starts afresh."""


class BlockNonFiniteError(StreamError, NonFiniteError):
    """A block computed NaN or infinity."""


class StreamStateError(StreamError, FileFormatError):
    """A state of streamed weights that cannot be read, or is of another model or optimizer; nothing was changed."""

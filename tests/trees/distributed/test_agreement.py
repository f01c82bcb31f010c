"""What processes agree on before they train together."""

from __future__ import annotations

import numpy as np

from bitplan.trees.distributed.agreement import merge_classes
from bitplan.trees.distributed.shards import ALONE


def test_one_process_keeps_classes_of_any_type():
    here = np.array([b"no", b"yes"])  # a type that could not be sent to others
    assert merge_classes(here, ALONE) is here

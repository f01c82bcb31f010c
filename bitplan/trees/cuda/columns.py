"""Columns of the tables that go to the GPU and come back."""

from __future__ import annotations

COLUMNS = 16
# Of a node's row of `table`
START, STOP, SIDE, FEATURE, BIN, MISSING_LEFT, FIRST_BLOCK = range(7)
SMALL_START, SMALL_STOP, SMALL_SIDE, SMALL_SLOT, LARGE_SLOT, GROUPS, FIRST_SEGMENT, LEFTS, RIGHTS = range(7, 16)
# and of its last row
NODES, BLOCKS, SEGMENTS, SEGMENT_ROWS = range(4)
# Of a node's row of the result: the gain's bits, the split, three sums of its left side, three of the node
RESULT_GAIN, RESULT_FEATURE, RESULT_BIN, RESULT_MISSING_LEFT, RESULT_LEFT = range(5)
RESULT_NODE, RESULT = 7, 10

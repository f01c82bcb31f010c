"""What is watched while trees are boosted: metrics, sets of rows, callbacks."""

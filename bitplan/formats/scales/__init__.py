"""Scales of blocks: how they are stored, the rules that choose them, and checks of them."""

"""Scales of blocks: how they are stored, the rules that choose them, and checks of them.

Which module does which step:

    rules       how a scale is stored and computed from a block's numbers; MXFP4's powers of two are here
    choose      applies a rule to every block of a matrix
    reencode    encodes changed weights again, with new scales only where they are needed
    checks      which scales and codes are at the end of their range, at zero, or undefined
"""

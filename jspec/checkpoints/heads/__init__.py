"""File formats of draft heads.

Functions raise ValueError for config.jsons and tensors that are malformed, contradictory, not
supported or made for another target, and for heads that a layout cannot express.
"""

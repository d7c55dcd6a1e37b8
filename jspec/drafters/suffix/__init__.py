"""Suffix decoding (arXiv 2411.04975)."""

"""Attention of tree nodes over a committed prefix and over each other."""

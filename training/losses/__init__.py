"""Losses of drafters: distances between distributions, and means over all rows of a batch."""

"""Losses of drafters: distances between distributions, and means over all rows of a batch.

``guesses`` is the loss of guessed tokens, which ``unrolled`` makes one after another and ``slots``
in one pass.
"""

"""Shared code of drafters that have a network."""

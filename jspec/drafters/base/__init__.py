"""Shared code of drafters that have a head."""

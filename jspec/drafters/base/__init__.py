"""Shared code of drafters that have a head, and of those whose K changes."""

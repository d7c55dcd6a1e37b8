"""Drafting with a language model."""

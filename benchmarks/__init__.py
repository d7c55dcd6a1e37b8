"""Benchmarks behind the published numbers."""

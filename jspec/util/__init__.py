"""Checks of values, limits of requests, text of messages, threads, and atomic file writes."""

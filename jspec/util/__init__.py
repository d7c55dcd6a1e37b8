"""Checks of values, text of messages, buckets of sizes, and atomic file writes."""

"""Command lines, errors, digests, locks, progress bars and provenance of all scripts."""

"""The arrays of a round: trees, caches, histories, sampling. Free of methods, models and files."""

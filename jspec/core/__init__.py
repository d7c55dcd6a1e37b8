"""Arrays and values of a round: trees, caches, histories, sampling. It knows no method, model or file."""

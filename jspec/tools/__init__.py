"""Libraries over the API: bench, certify, tune, trace."""

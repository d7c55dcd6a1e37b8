"""Products of few rows with a matrix whose values are quantised in groups."""

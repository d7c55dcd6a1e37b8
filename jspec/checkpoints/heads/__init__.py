"""File formats of draft heads."""

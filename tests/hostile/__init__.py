"""Input that somebody made to break things."""

"""Measuring methods side by side on a user's own model and questions: ``jspec bench``."""

"""Finding the ``speculative_config`` that serves a user's own prompts fastest: ``jspec tune``."""

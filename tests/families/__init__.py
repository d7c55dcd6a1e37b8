"""Every model family beside transformers."""

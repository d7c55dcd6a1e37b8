"""Draft networks that read the target's hidden states."""

"""Draft networks that read the target's hidden states, and their formats in files."""

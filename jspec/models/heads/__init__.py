"""Draft networks that read the target's hidden states: EAGLE-1, -2 and -3, and Medusa."""

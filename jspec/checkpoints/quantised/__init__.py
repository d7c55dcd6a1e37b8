"""Quantised weights of checkpoints: formats of files, and schemes for weights in any format."""

"""jspec: lossless speculative decoding in JAX."""

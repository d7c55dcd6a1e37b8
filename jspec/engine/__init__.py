"""The decoding loop and its host side: plan, loop, batches, sequences."""

"""Other programs for speculative decoding, in processes and environments of their own."""

"""Networks, which know neither drafters nor rules."""

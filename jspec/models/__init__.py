"""Networks, which import neither drafters nor rules."""

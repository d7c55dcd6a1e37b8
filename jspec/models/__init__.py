"""Networks: they know weights, never what a draft or a verdict is for."""

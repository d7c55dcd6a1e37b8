"""Acceptance of a draft and the draw of the next token, from raw logits."""

"""Acceptance of a draft and the draw of the token after it, over logits that stay as they are."""

"""The interface that users touch, with vLLM's names."""

"""Kernels, one folder an operation: ``reference.py`` is the specification in jnp.

Installed as ``jspec.kernels``; only ``jspec.ops`` imports it. No ``__version__`` here: transformers
mistakes a top-level package of this name that has one for Hugging Face's own ``kernels``.
"""

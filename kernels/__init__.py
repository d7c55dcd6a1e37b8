"""Kernels, one folder an operation: ``reference.py`` is the specification in jnp.

Installed as ``jspec.kernels``; only ``jspec.ops`` imports it. No ``__version__`` here: transformers
mistakes a top-level package of this name that has one for Hugging Face's own ``kernels``.
"""

if __name__ == "kernels":
    # Imported by its folder, because the root of the repository leads sys.path: Hugging Face's
    # package is meant (transformers' modelling code imports it), so it takes this one's place.
    import sys
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from pathlib import Path

    _root = Path(__file__).resolve().parents[1]
    _elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != _root]
    _theirs = PathFinder.find_spec("kernels", _elsewhere)
    if _theirs is not None:
        sys.modules["kernels"] = module_from_spec(_theirs)
        _theirs.loader.exec_module(sys.modules["kernels"])

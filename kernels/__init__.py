"""Kernels, one folder per operation: ``reference.py`` is the specification, others are back-ends.

Installed as ``jspec.kernels``; only ``jspec.ops`` imports it. It has no ``__version__``, because
transformers takes a top-level package ``kernels`` with one for Hugging Face's package.
"""

if __name__ == "kernels":
    # transformers' modelling code imports Hugging Face's package, but the root of the repository
    # comes first in sys.path: hand over to that package.
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

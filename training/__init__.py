"""Training of drafters, and of the small models that jspec is shown with."""

import importlib.util
import os
import sys

_EXTRA = ("filelock", "grain", "matplotlib", "optax", "orbax", "tensorboardX", "tyro")

if sys.argv[:1] == ["-m"]:  # a command, before its module is imported
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        remedy = "run `pip install 'jspec-decoding[train]'`"
        print(f"error: training needs {', '.join(missing)}; {remedy}", file=sys.stderr)
        sys.exit(2)
    # transformers reads it at import. Its advice to install torch would mislead: jspec needs none.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

"""jspec: lossless speculative decoding in JAX.

``LLM`` is the main entry point, with vLLM's names. Below it lies the functional layer: ``load`` a
model, ``generate`` with it, or build a ``Plan`` and run ``decode`` or ``step`` yourself.
"""

import importlib
import importlib.util
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jspec.api.llm import LLM as LLM
    from jspec.api.outputs import CompletionOutput as CompletionOutput
    from jspec.api.outputs import RequestOutput as RequestOutput
    from jspec.api.sampling_params import SamplingParams as SamplingParams
    from jspec.checkpoints.loading import LoadedModel as LoadedModel
    from jspec.checkpoints.loading import load as load
    from jspec.core.types import Draft as Draft
    from jspec.core.types import Drafter as Drafter
    from jspec.core.types import Params as Params
    from jspec.core.types import Request as Request
    from jspec.core.types import Target as Target
    from jspec.core.types import Verdict as Verdict
    from jspec.drafters.draft_model.sequential import DraftModel as DraftModel
    from jspec.drafters.eagle import Eagle as Eagle
    from jspec.drafters.medusa import Medusa as Medusa
    from jspec.drafters.methods import METHODS as METHODS
    from jspec.drafters.ngram import NGram as NGram
    from jspec.drafters.none import NoDrafter as NoDrafter
    from jspec.engine.functional import decode as decode
    from jspec.engine.functional import generate as generate
    from jspec.engine.plan import Plan as Plan
    from jspec.engine.round import step as step
    from jspec.models import adapters as adapters
    from jspec.tools.certify import certify as certify
    from jspec.tools.trace import trace as trace
    from jspec.verify import RULES as RULES

# The module of every public name. Each is imported at its first use (PEP 562), so that
# `import jspec.core.trees` loads neither drafters nor transformers.
_MODULE_OF = {
    "LLM": "jspec.api.llm",
    "METHODS": "jspec.drafters.methods",
    "RULES": "jspec.verify",
    "CompletionOutput": "jspec.api.outputs",
    "Draft": "jspec.core.types",
    "DraftModel": "jspec.drafters.draft_model.sequential",
    "Drafter": "jspec.core.types",
    "Eagle": "jspec.drafters.eagle",
    "LoadedModel": "jspec.checkpoints.loading",
    "Medusa": "jspec.drafters.medusa",
    "NGram": "jspec.drafters.ngram",
    "NoDrafter": "jspec.drafters.none",
    "Params": "jspec.core.types",
    "Plan": "jspec.engine.plan",
    "Request": "jspec.core.types",
    "RequestOutput": "jspec.api.outputs",
    "SamplingParams": "jspec.api.sampling_params",
    "Target": "jspec.core.types",
    "Verdict": "jspec.core.types",
    "adapters": "jspec.models",
    "certify": "jspec.tools.certify",
    "decode": "jspec.engine.functional",
    "generate": "jspec.engine.functional",
    "load": "jspec.checkpoints.loading",
    "step": "jspec.engine.round",
    "trace": "jspec.tools.trace",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("jspec-decoding")
    if name not in _MODULE_OF:
        path = f"{__name__}.{name}"
        if name.startswith("_") or not name.isidentifier() or not importlib.util.find_spec(path):
            raise AttributeError(f"module 'jspec' has no attribute {name!r}")
        return importlib.import_module(path)  # a package, such as `verify`
    module = importlib.import_module(_MODULE_OF[name])
    if not hasattr(module, name):  # a module itself, such as `adapters`
        module = importlib.import_module(f"{_MODULE_OF[name]}.{name}")
        return globals().setdefault(name, module)
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""jspec: lossless speculative decoding in JAX.

``LLM`` is the front door, with vLLM's names. Below it lies the functional layer: ``load`` a model,
``generate`` with it, or put together a ``Plan`` and run ``decode`` or ``step`` yourself.
"""

# The functions `certify`, `generate` and `decode` take the place of the modules they come from:
# import what else those have by name, `from jspec.generate import Row`.
from jspec.certify import certify
from jspec.decode import decode, step
from jspec.drafters import METHODS, DraftModel, Eagle, Medusa, NGram, NoDrafter
from jspec.generate import generate
from jspec.llm import LLM
from jspec.loading import LoadedModel, load
from jspec.models import adapters
from jspec.outputs import CompletionOutput, RequestOutput
from jspec.params import SamplingParams
from jspec.plan import Plan
from jspec.types import Draft, Drafter, Params, Request, Target, Verdict
from jspec.verify import RULES

__all__ = [
    "LLM",
    "METHODS",
    "RULES",
    "CompletionOutput",
    "Draft",
    "DraftModel",
    "Drafter",
    "Eagle",
    "LoadedModel",
    "Medusa",
    "NGram",
    "NoDrafter",
    "Params",
    "Plan",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Target",
    "Verdict",
    "adapters",
    "certify",
    "decode",
    "generate",
    "load",
    "step",
]

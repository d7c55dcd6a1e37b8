"""``METHODS``: the drafting methods by their names in ``speculative_config``."""

from jspec.drafters.dflash import DFlash, DSpark
from jspec.drafters.draft_model.parallel import ParallelDraftModel
from jspec.drafters.draft_model.sequential import DraftModel
from jspec.drafters.eagle import Eagle
from jspec.drafters.hybrid import Hybrid
from jspec.drafters.hydra import Hydra
from jspec.drafters.medusa import Medusa
from jspec.drafters.mlp_speculator import MlpSpeculator
from jspec.drafters.mtp import Mtp
from jspec.drafters.ngram import NGram
from jspec.drafters.none import NoDrafter
from jspec.drafters.parallel_eagle import ParallelEagle
from jspec.drafters.suffix.drafter import Suffix
from jspec.drafters.token_recycling import TokenRecycling

METHODS = {
    "none": NoDrafter,
    "ngram": NGram,
    "draft_model": DraftModel,
    "eagle": Eagle,
    "eagle3": Eagle,
    "medusa": Medusa,
    "mlp_speculator": MlpSpeculator,
    "hydra": Hydra,
    "dflash": DFlash,
    "dspark": DSpark,
    "mtp": Mtp,
    "suffix": Suffix,
    "token_recycling": TokenRecycling,
    "hybrid": Hybrid,
}

# The drafters that draft all tokens in one pass, for ``parallel_drafting``.
PARALLEL = {"draft_model": ParallelDraftModel, "eagle3": ParallelEagle}
ALWAYS_PARALLEL = ("dflash", "dspark")  # parallel with or without the key, as in vLLM

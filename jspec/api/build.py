"""Build a plan and its weights from a target and a ``speculative_config``.

Every error is raised before the target's weights are loaded, which may take minutes.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from jspec.api import config
from jspec.api.backends import DRAFT_KEY, Backends
from jspec.api.config import SpeculativeConfig
from jspec.api.config.keys import HYBRID
from jspec.checkpoints import checkpoint, loading
from jspec.checkpoints.heads.head_files import HeadConfig, LoadedHead
from jspec.checkpoints.loading import LoadedModel
from jspec.core.types import Drafter, Params
from jspec.drafters.draft_model import vocabularies
from jspec.drafters.draft_model.vocabularies import SharedVocabulary
from jspec.engine.memory_plan import MemoryPlan
from jspec.engine.plan import Plan
from jspec.models import partition, quantised
from jspec.models.batch_invariant import BatchInvariantDecoder
from jspec.models.decoder import Decoder, DecoderConfig
from jspec.sharding import mesh as mesh_lib
from jspec.sharding.placement import Placements
from jspec.util.messages import shown
from jspec.util.values import is_whole


@dataclasses.dataclass(frozen=True, eq=False)
class Build:
    """A target with its drafter, ready to run."""

    model: LoadedModel
    tokenizer: Any  # None: the model's own, if it has one
    max_model_len: int
    plan: Plan
    params: Params
    memory_plan: MemoryPlan | None = None

    def with_params(self, params: Params) -> "Build":
        """Return the build with other weights, and without a reference to the present target's."""
        model = self.model.with_params(params.target)
        return dataclasses.replace(self, model=model, params=params)


def build_plan(
    model: str | os.PathLike | LoadedModel,
    speculative: SpeculativeConfig,
    *,
    check: Callable[[Plan, Params], MemoryPlan] | None = None,
    **settings: Any,
) -> Build:
    """Load a target and its drafter.

    ``settings`` are those of ``outline``; errors are those of ``jspec.LLM``. ``check`` makes the
    memory plan, from shapes where weights are not loaded yet. It is not called for a class of the
    user that makes its own weights.
    """
    loading.check_files(model)
    outlined = outline(model, speculative, **settings)
    memory_plan = None
    if check is not None and not speculative.drafter_class:
        memory_plan = check(outlined.plan, outlined.params)
    return dataclasses.replace(outlined.load(), memory_plan=memory_plan)


@dataclasses.dataclass(frozen=True, eq=False)
class Outline:
    """A target with its drafter before weights are loaded, but for those of heads.

    Attributes:
      model: the target, with shapes for weights.
      max_model_len: longest sequence.
      plan: static, as for one device.
      params: weights of heads and of loaded models, and shapes of others.
      part: the drafter that fits.
      settings: how the weights are loaded.
    """

    model: LoadedModel
    max_model_len: int
    plan: Plan
    params: Params
    part: "_Part"
    settings: "_Settings"

    def load(self) -> Build:
        """Return the target and its drafter with their weights."""
        settings, mesh = self.settings, self.settings.mesh
        whole = settings.config_of(self.model.config)
        rules = partition.rules(whole, mesh_lib.size_of(mesh))
        placements = partition.placements(rules, mesh)
        loaded = loading.load(settings.model, settings.dtype, placements, settings.quantization)
        if loaded is settings.model:
            loaded = loaded.with_params(partition.placed(loaded.params, rules, mesh))
        split = partition.split(settings.config_of(loaded.config), mesh_lib.size_of(mesh))
        loaded = dataclasses.replace(loaded, config=split)
        part, weights = _load(self.part, loaded, settings, loading.load)
        plan = _plan(part.split(settings), split, settings.deterministic, settings.backends)
        weights = _separate_weights(part, plan.drafter, weights, loaded)
        if settings.backends.attention == "xla":
            loaded = loaded.with_params(quantised.by_xla(loaded.params))
        params = Params(loaded.params, part.placed(weights, settings))
        return Build(loaded, settings.tokenizer, self.max_model_len, plan, params)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The arguments of ``outline``; ``draft_dtype`` is that of the drafter."""

    model: str | os.PathLike | LoadedModel
    dtype: str | None
    draft_dtype: str | None
    max_model_len: int
    tokenizer: Any
    deterministic: bool
    backends: Backends
    mesh: Mesh | None
    expert_parallel: bool
    draft_size: int  # devices that share the drafter's weights
    quantization: str | None = None  # "int8", ..., for the target

    def config_of(self, config: DecoderConfig) -> DecoderConfig:
        """Return the config of the target, whole."""
        return partition.by_experts(config) if self.expert_parallel else config

    def network_of(self, network: Any) -> Any:
        """Return the config of a drafter's network, whole."""
        if self.draft_size == 1:
            return network
        return partition.of_draft(
            lambda config: self.config_of(config) if config.has_experts else config, network
        )

    def rules_of(self, network: Any) -> dict[partition.Path, partition.Rule]:
        """Return the rules of the weights of a drafter's network."""
        return partition.draft_rules(self.network_of(network), self.draft_size)

    def placements_of(self, network: Any) -> Placements | None:
        """Return the placements of these weights."""
        return partition.placements(self.rules_of(network), self.mesh)


def outline(
    model: str | os.PathLike | LoadedModel,
    speculative: SpeculativeConfig,
    *,
    dtype: str | None = None,
    max_model_len: int | None = None,
    tokenizer: Any = None,
    deterministic: bool = False,
    backends: Backends = Backends(),  # noqa: B008 (frozen)
    mesh: Mesh | None = None,
    expert_parallel: bool = False,
    quantization: str | None = None,
) -> Outline:
    """Return a target with its drafter before weights are loaded: a config.json is enough.

    ``mesh`` has the devices among which the target is split, and the drafter if it says so; None
    for one device. With ``expert_parallel`` they have some experts each. Other arguments are those
    of ``jspec.LLM``.
    """
    tokenizer = _tokenizer(tokenizer)
    if tokenizer is None and speculative.needs_model:
        tokenizer = loading.tokenizer_if_any(model)
    target = loading.outline(model, dtype, quantization)
    max_model_len = _length_limit(max_model_len, target.config.max_positions)
    draft_dtype = dtype
    if isinstance(model, LoadedModel) and dtype in (None, "auto"):
        draft_dtype = model.params.embedding.dtype.name  # float32 targets get exact drafts
    settings = _Settings(
        model=model,
        dtype=dtype,
        draft_dtype=draft_dtype,
        max_model_len=max_model_len,
        tokenizer=tokenizer,
        deterministic=deterministic,
        backends=backends,
        mesh=mesh,
        expert_parallel=expert_parallel,
        draft_size=1 if mesh is None else speculative.draft_tensor_parallel_size,
        quantization=quantization,
    )
    # Raises if it cannot be split so.
    whole, ways = settings.config_of(target.config), mesh_lib.size_of(mesh)
    partition.split(whole, ways)
    partition.check_groups(target.params, partition.rules(whole, ways), mesh)
    part = _open(speculative, target.config, settings)
    drafted, shapes = _load(part, target, settings, _outlined)
    plan = _plan(drafted, target.config, deterministic, backends)
    return Outline(target, max_model_len, plan, Params(target.params, shapes), part, settings)


def _tokenizer(given: Any) -> Any:
    """Return a tokenizer, read if ``given`` is its directory; None for the model's own."""
    if isinstance(given, str | os.PathLike):
        try:
            return checkpoint.load_tokenizer(given)
        except ValueError as error:
            raise ValueError(f"tokenizer={shown(str(given))}: {error}") from None
    if given is None or hasattr(given, "all_special_ids"):
        return given
    remedy = ""
    if type(given).__module__.startswith("tokenizers"):
        remedy = "; wrap it: transformers.PreTrainedTokenizerFast(tokenizer_object=...)"
    raise ValueError(
        f"tokenizer={shown(given, 60)} must be a directory, or a tokenizer of transformers{remedy}."
    )


@dataclasses.dataclass(frozen=True)
class _Part:
    """A drafter that fits its target, and its network, if any."""

    speculative: SpeculativeConfig
    network: DecoderConfig | HeadConfig | None = None
    head: LoadedHead | None = None
    vocabulary: SharedVocabulary | None = None  # if the draft model has another one
    parts: tuple["_Part", ...] = ()  # parts of a hybrid

    def networks(self, backends: Backends) -> Any:
        """Return the networks, as ``SpeculativeConfig.drafter`` takes them."""
        if self.parts:
            return tuple(part.networks(backends) for part in self.parts)
        return backends.running(
            self.network,
            self.speculative.attention_backend,
            self.speculative.kv_cache_dtype,
            owner=DRAFT_KEY,
        )

    def split(self, settings: _Settings) -> "_Part":
        """Return the part with its network in parts for the devices that share its weights."""
        if self.parts:
            return dataclasses.replace(self, parts=tuple(x.split(settings) for x in self.parts))
        whole = settings.network_of(self.network)
        network = partition.split_draft(whole, settings.draft_size)
        return dataclasses.replace(self, network=network)

    def placed(self, weights: Any, settings: _Settings) -> Any:
        """Return the weights on their devices."""
        if self.parts:
            pairs = zip(self.parts, weights, strict=True)
            return tuple(part.placed(x, settings) for part, x in pairs)
        rules = settings.rules_of(self.network)
        if self.vocabulary:
            rules = {("model", *path): rule for path, rule in rules.items()}
        return partition.placed(weights, rules, settings.mesh)


def _open(speculative: SpeculativeConfig, target: DecoderConfig, settings: _Settings) -> _Part:
    """Read the sizes of the drafter's network and check that it fits the target."""
    if speculative.parts:
        parts = tuple(_open(part, target, settings) for part in speculative.parts)
        opened = tuple(part.speculative for part in parts)
        return _Part(dataclasses.replace(speculative, parts=opened), parts=parts)
    if speculative.needs_head:  # small, so loaded at once
        config.check_lengths(speculative, target.max_positions, settings.max_model_len)
        path = speculative.model
        if path is None:  # in the target's own files
            path = getattr(settings.model, "path", settings.model)
        head = _load_head(path, target, speculative.method, settings)
        return _Part(speculative, head.config, head)
    if not speculative.needs_model:
        return _Part(speculative)
    draft = loading.sizes(speculative.model)
    config.check_lengths(speculative, draft.max_positions, settings.max_model_len)
    if speculative.parallel:
        mask = {"mask_token_id": loading.mask_token_id(speculative.model)}
        speculative = dataclasses.replace(speculative, settings={**speculative.settings, **mask})
    tokenizer, other = settings.tokenizer, loading.tokenizer_if_any(speculative.model)
    if speculative.translates and not vocabularies.are_same(tokenizer, other):
        shared = vocabularies.share(tokenizer, other, target.vocab_size, draft.vocab_size)
        return _Part(speculative, draft, vocabulary=shared)
    vocabularies.check_same(target.vocab_size, draft.vocab_size, tokenizer, other)
    if speculative.translates:  # the vocabularies are the same
        same = {**speculative.settings, "use_heterogeneous_vocab": False}
        speculative = dataclasses.replace(speculative, settings=same)
    return _Part(speculative, draft)


def _load_head(
    head: str | os.PathLike | LoadedHead, target: DecoderConfig, kind: str, settings: _Settings
) -> LoadedHead:
    """Load a head onto its devices."""
    loaded = loading.load_head(
        head,
        target,
        kind=kind,
        dtype=settings.draft_dtype,
        placements=settings.placements_of,
    )
    if loaded is head:
        rules = settings.rules_of(head.config)
        params = partition.placed(head.params, rules, settings.mesh)
        loaded = dataclasses.replace(head, params=params)
    return loaded


def _load(
    part: _Part, target: LoadedModel, settings: _Settings, load: Callable[..., LoadedModel]
) -> tuple[_Part, Any]:
    """Load the network of a part; return the part with the loaded sizes, and the weights.

    ``load`` is ``loading.load``, or ``_outlined`` for shapes of weights.
    """
    if part.parts:
        pairs = [_load(each, target, settings, load) for each in part.parts]
        parts, weights = zip(*pairs, strict=True)
        return dataclasses.replace(part, parts=parts), weights
    if part.head:
        head = loading.sharing(part.head, target.params.embedding)
        return dataclasses.replace(part, network=head.config, head=head), head.params
    if not part.speculative.needs_model:
        return part, None
    placements = settings.placements_of(part.network)
    speculative = part.speculative
    draft = load(speculative.model, settings.draft_dtype, placements, speculative.quantization)
    weights = (
        quantised.by_xla(draft.params) if speculative.attention_backend == "xla" else draft.params
    )
    if part.vocabulary:
        weights = part.vocabulary.translating(weights, target.config.vocab_size)
    return dataclasses.replace(part, network=draft.config), weights


def _outlined(
    model: Any, dtype: str | None, placements: Placements | None, quantization: str | None
) -> LoadedModel:
    """Return ``loading.outline``."""
    del placements
    return loading.outline(model, dtype, quantization)


def _separate_weights(part: _Part, drafter: Drafter, weights: Any, target: LoadedModel) -> Any:
    """Return the weights, made by the drafter class of the user if there is one."""
    if part.speculative.method == HYBRID:
        every = zip(part.parts, drafter.parts, weights, strict=True)
        return tuple(_separate_weights(*one, target) for one in every)
    if part.speculative.drafter_class:
        return drafter.load_params(target.params)
    return weights


def _plan(part: _Part, sizes: DecoderConfig, deterministic: bool, backends: Backends) -> Plan:
    sizes = backends.running(sizes, backends.attention, backends.kv_cache_dtype)
    backends.check_vocabulary(sizes.vocab_size)
    target = BatchInvariantDecoder(sizes) if deterministic else Decoder(sizes)
    drafter = part.speculative.drafter(part.networks(backends), target)
    if deterministic and drafter.tree_size != drafter.max_depth + 1:
        raise ValueError(
            f"deterministic=True takes chains, but method={part.speculative.method!r} is set to "
            f"draft trees of {drafter.tree_size} nodes; leave its tree out, or deterministic."
        )
    return Plan(
        target,
        drafter,
        part.speculative.rule,
        packed=target.packs_nodes,
        lengths=part.speculative.lengths,
        batch_sizes=part.speculative.batch_sizes,
        sampling_backend=backends.sampling,
    )


def _length_limit(asked: int | None, max_positions: int) -> int:
    if asked is None:
        return max_positions
    if not is_whole(asked, 1, max_positions):
        raise ValueError(
            f"max_model_len={shown(asked)} must be a whole number from 1 to {max_positions}, the "
            "positions of the model; change it or leave it out."
        )
    return int(asked)

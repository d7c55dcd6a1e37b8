"""What a request changes of the logits themselves, before they become a law.

In vLLM's order: what a grammar allows, tokens that are allowed, bad words, tokens that would end
the text too soon, biases, penalties, and functions of the user's. Several of these look at the text
so far, which for a drafted node is the committed text and its own branch: counts, ends of phrases
and states of grammars advance along each branch, so every node has the logits that plain decoding
would have there.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jspec.core import token_fsm, trees
from jspec.core.token_fsm import Automaton
from jspec.core.types import Array, Draft, History, Tree

# (logits [V], token ids [T], their number []) -> logits [V]; of one row, pure and jittable. Token
# ids are the prompt, what was generated, and what was drafted on the branch; undefined behind.
LogitsProcessor = Callable[[Array, Array, Array], Array]

KINDS = (
    "structured_outputs",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "logit_bias",
    "penalties",
    "logits_processors",
)


@struct.dataclass
class Penalties:
    """Of tokens that were said; a row that wants none has 0, 0 and 1."""

    presence: Array  # [B] float32, taken off the logits of what was generated
    frequency: Array  # [B] float32, taken off for each time
    repetition: Array  # [B] float32, divides (below 0: multiplies) what is in prompt or answer


@struct.dataclass
class LogitsProcessors:
    """Rows that change their logits. What no row of the batch uses is None, and costs nothing."""

    prompt_length: Array  # [B] int32
    automaton: Automaton | None = None  # the rows' grammars
    allowed: Array | None = None  # [B, V] bool
    bad_words: Array | None = None  # [B, W, L] int32, ends at L; -1 before it begins, and for none
    too_soon: Array | None = None  # [B, E] int32, not to be said before ``least``; -1 for none
    least: Array | None = None  # [B] int32, history length
    biased: Array | None = None  # [B, E] int32, -1 for none
    bias: Array | None = None  # [B, E] float32
    penalties: Penalties | None = None
    processes: Array | None = None  # [B, P] bool, whether the row wants the processor
    processors: tuple[LogitsProcessor, ...] = struct.field(pytree_node=False, default=())

    @property
    def of_any_branch(self) -> "LogitsProcessors":
        """Without what depends on the last tokens of a branch; the rest hardly differs below."""
        return self.replace(automaton=None, bad_words=None, processes=None, processors=())


@struct.dataclass
class Branches:
    """The text before each of F nodes: the committed one, and what was drafted down to the node."""

    history: History
    drafted: Array  # [B, F, M] int32, from below the root; -1 behind the node itself

    @property
    def length(self) -> Array:
        """Tokens of the text [B, F]."""
        return self.history.length[:, None] + (self.drafted >= 0).sum(-1)


def at_root(history: History) -> Branches:
    """Nothing drafted yet; one node."""
    return Branches(history, jnp.zeros((len(history.length), 1, 0), jnp.int32))


def of_draft(history: History, draft: Draft, tree: Tree) -> Branches:
    """The branches of all nodes of a draft."""
    nodes = draft.tokens.shape[1]
    above = trees.unpack_bits(tree.ancestors, nodes)  # [B, N, N]
    depth = tree.depth[:, None, :, None] == jnp.arange(1, tree.max_depth + 1)
    here = above[..., None] & depth  # [B, N, N, M]
    tokens = jnp.where(here, draft.tokens[:, None, :, None], -1)
    return Branches(history, tokens.max(2, initial=-1))


def shape(logits: Array, settings: LogitsProcessors | None, branches: Branches) -> Array:
    """The target's logits [B, F, V] of nodes as the request wants them; None changes nothing.

    One row of logits serves several branches, and one branch several rows.
    """
    if settings is None:
        return logits
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    nodes = max(logits.shape[1], branches.drafted.shape[1])
    wide = lambda x: jnp.broadcast_to(x, (len(x), nodes, x.shape[-1]))
    logits, branches = wide(logits), branches.replace(drafted=wide(branches.drafted))
    if settings.automaton is not None:
        state = _states(settings.automaton, branches)
        free = token_fsm.allowed(settings.automaton, state, logits.shape[-1])
        logits = jnp.where(free, logits, -jnp.inf)
    if settings.allowed is not None:
        logits = jnp.where(settings.allowed[:, None], logits, -jnp.inf)
    if settings.bad_words is not None:
        logits = _without_bad_words(logits, settings, branches)
    if settings.too_soon is not None:
        early = branches.length < settings.least[:, None]
        logits = _forbid(logits, settings.too_soon[:, None], early[..., None])
    if settings.biased is not None:
        logits = _add(logits, settings.biased[:, None], settings.bias[:, None])
    if settings.penalties is not None:
        logits = _penalised(logits, settings, branches)
    for index, processor in enumerate(settings.processors):
        wanted = settings.processes[:, index, None, None]
        logits = jnp.where(wanted, _processed(logits, processor, branches), logits)
    return logits


def shape_draft(
    logits: Array,
    settings: LogitsProcessors | None,
    branches: Branches,
    vocab_size: int,
    target_ids: Array | None = None,
) -> Array:
    """``shape`` of a drafter's logits [B, F, Vd]: what the target forbids needs no drafting.

    A drafter that knows no token that is left drafts as it would, in vain.

    Args:
      logits: of nodes.
      shaping: None changes nothing.
      branches: of the nodes.
      vocab_size: V.
      target_ids: of a drafter's own vocabulary, int32 [Vd]; None where that is the target's.
    """
    if settings is None:
        return logits
    if target_ids is None:
        shaped = shape(logits, settings, branches)
    else:
        all_of_it = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype)
        all_of_it = all_of_it.at[..., target_ids].set(logits)
        shaped = shape(all_of_it, settings, branches)[..., target_ids]
    return jnp.where((shaped > -jnp.inf).any(-1, keepdims=True), shaped, logits)


def first_state(settings: LogitsProcessors | None) -> Array | None:
    """States of the rows' grammars behind their prompts; None where there are none."""
    has_grammar = settings is not None and settings.automaton is not None
    return settings.automaton.start if has_grammar else None


def state_after(
    settings: LogitsProcessors | None, history: History, said: Array, valid: Array
) -> Array | None:
    """``history.state`` once the ``valid`` ones of tokens [B, M] are said too."""
    if history.state is None:
        return None
    return token_fsm.advance(settings.automaton, history.state, said, valid)


def prune(settings: LogitsProcessors | None, history: History, draft: Draft, tree: Tree) -> Draft:
    """Drops what was looked up and no grammar allows, with all below it.

    Such a node could never be accepted. One that was drawn is left alone: it was drawn from a law
    of what is allowed, and to drop it for its value would not be exact.
    """
    if settings is None or settings.automaton is None:
        return draft
    states = _states(settings.automaton, of_draft(history, draft, tree))
    before = jnp.take_along_axis(states, tree.parents, 1)
    _, fits = token_fsm.find(settings.automaton, before, draft.tokens)
    nodes = draft.tokens.shape[1]
    wrong = ~fits & ~draft.drawn & (jnp.arange(nodes) > 0)
    above = trees.unpack_bits(tree.ancestors, nodes)
    return draft.replace(valid=draft.valid & ~(above & wrong[:, None]).any(-1))


def force(settings: LogitsProcessors | None, history: History, draft: Draft) -> Draft:
    """A chain of point masses, gone on with where a grammar allows one token alone: it is certain.

    Other drafts stay as they are: laws of what is allowed draft such tokens by themselves.
    """
    if settings is None or settings.automaton is None or draft.logits is not None:
        return draft
    size = draft.tokens.shape[1]
    if not trees.is_chain(draft.parents):
        return draft
    automata, state = settings.automaton, history.state
    tokens, valid = [draft.tokens[:, 0]], [draft.valid[:, 0]]
    for node in range(1, size):
        only, alone = token_fsm.forced(automata, state)
        known = draft.valid[:, node]
        tokens.append(jnp.where(known, draft.tokens[:, node], only))
        valid.append(valid[-1] & (known | alone))
        state, _ = token_fsm.find(automata, state, tokens[-1])
    return draft.replace(tokens=jnp.stack(tokens, 1), valid=jnp.stack(valid, 1))


def _states(automata: Automaton, branches: Branches) -> Array:
    """States behind the tokens of each branch: [B, F]."""
    drafted = branches.drafted
    start = jnp.broadcast_to(branches.history.state[:, None], drafted.shape[:2])
    return token_fsm.advance(automata, start, drafted, drafted >= 0)


def _add(logits: Array, ids: Array, values: Array) -> Array:
    """Adds ``values`` to the logits [B, F, V] of ``ids``, both broadcast to [B, F, E]; -1: none."""
    ids = jnp.where(ids < 0, logits.shape[-1], ids)
    ids = jnp.broadcast_to(ids, (*logits.shape[:2], ids.shape[-1]))
    rows, nodes = jnp.indices(ids.shape[:2], sparse=True)
    values = jnp.broadcast_to(values, ids.shape).astype(logits.dtype)
    return logits.at[rows[..., None], nodes[..., None], ids].add(values, mode="drop")


def _forbid(logits: Array, ids: Array, where: Array) -> Array:
    return _add(logits, ids, jnp.where(where, -jnp.inf, 0))


def _without_bad_words(logits: Array, settings: LogitsProcessors, branches: Branches) -> Array:
    """Forbids the last token of each phrase whose other tokens the answer ends with."""
    words, (batch, nodes, _) = settings.bad_words, branches.drafted.shape
    width = words.shape[-1] - 1
    history = branches.history
    # The last L - 1 tokens before each node: the end of the history, then the branch.
    places = history.length[:, None] - width + jnp.arange(width)
    said = jnp.take_along_axis(history.tokens, jnp.maximum(places, 0), 1)
    said = jnp.where(places < settings.prompt_length[:, None], -2, said)  # which no phrase holds
    said = jnp.broadcast_to(said[:, None], (batch, nodes, width))
    depth = (branches.drafted >= 0).sum(-1, keepdims=True)
    end = jnp.take_along_axis(
        jnp.concatenate([said, branches.drafted], -1), depth + jnp.arange(width), -1
    )
    before, last = words[:, None, :, :-1], words[:, None, :, -1]
    met = ((before < 0) | (before == end[:, :, None])).all(-1)
    return _forbid(logits, last, met)


def _penalised(logits: Array, settings: LogitsProcessors, branches: Branches) -> Array:
    """Penalties by how often each token stands in the text before each node."""
    history, vocab = branches.history, logits.shape[-1]
    column = lambda x: x.astype(logits.dtype)[:, None, None]
    presence, frequency, repetition = (
        column(x)
        for x in (
            settings.penalties.presence,
            settings.penalties.frequency,
            settings.penalties.repetition,
        )
    )

    def penalise(logits: Array, seen: Array, times: Array) -> Array:
        divided = jnp.where(logits > 0, logits / repetition, logits * repetition)
        lowered = frequency * times.astype(logits.dtype) + jnp.where(times > 0, presence, 0)
        return jnp.where(seen, divided, logits) - lowered

    place = jnp.arange(history.tokens.shape[1])
    committed = place < history.length[:, None]
    answer = committed & (place >= settings.prompt_length[:, None])
    rows = jnp.arange(len(history.tokens))[:, None]
    count = lambda which: (
        jnp.zeros((len(which), vocab), jnp.int32).at[rows, history.tokens].add(which, mode="drop")
    )
    seen, times = count(committed) > 0, count(answer)
    shaped = penalise(logits, seen[:, None], times[:, None])

    # Of the tokens on its own branch a node counts more: [B, F, M].
    drafted = branches.drafted
    again = (drafted[..., None] == drafted[..., None, :]).sum(-1)
    ids = jnp.where(drafted < 0, vocab, drafted)
    take = lambda x: jnp.take_along_axis(jnp.broadcast_to(x, logits.shape), ids, -1, mode="clip")
    own = penalise(take(logits), jnp.bool_(True), take(times[:, None]) + again)
    rows, nodes = jnp.indices(drafted.shape[:2], sparse=True)
    return shaped.at[rows[..., None], nodes[..., None], ids].set(own, mode="drop")


def _processed(logits: Array, processor: LogitsProcessor, branches: Branches) -> Array:
    history, drafted = branches.history, branches.drafted

    def one(logits: Array, tokens: Array, length: Array, drafted: Array) -> Array:
        places = jnp.where(drafted >= 0, length + jnp.arange(drafted.size), tokens.size)
        text = tokens.at[places].set(drafted, mode="drop")
        return processor(logits, text, length + (drafted >= 0).sum())

    nodes = jax.vmap(one, (0, None, None, 0))
    return jax.vmap(nodes)(logits, history.tokens, history.length, drafted).astype(logits.dtype)

"""Logits processors: the changes that requests make to the target's logits.

They apply before the sampling filters, in vLLM's order: grammar, allowed tokens, bad words, tokens
that would end the text too soon, biases, penalties, and functions of the user. Several depend on
the text so far. For a drafted node that text is the committed one and the node's own branch:
counts, phrases and grammar states advance along each branch, so every node has the logits of plain
decoding.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jspec.core import token_fsm
from jspec.core.branches import Branches, NodeMasks, keep_masked
from jspec.core.parameters import Parameter, between, column, padded
from jspec.core.token_fsm import Automaton
from jspec.core.types import Array
from jspec.util.values import bucket

# (logits [V], token ids [T], their number []) -> logits [V]; of one sequence, pure and jittable.
# Token ids are the prompt, the answer and the drafted branch; undefined past their number.
LogitsProcessor = Callable[[Array, Array, Array], Array]


FOLLOWED = "followed_grammars"


@struct.dataclass
class LogitsProcessors:
    """Arrays of the logits processors that some sequence of the batch uses.

    ``values`` maps a name in ``PROCESSORS`` to its arrays. Its keys are static, so unused
    processors cost nothing.
    """

    values: dict[str, Any]

    @property
    def automaton(self) -> Automaton | None:
        """The grammars of the batch."""
        return self.values.get("structured_outputs")

    @property
    def of_any_branch(self) -> "LogitsProcessors":
        """The processors that hardly depend on the last tokens of a branch."""
        return LogitsProcessors(
            {name: x for name, x in self.values.items() if not PROCESSORS[name].reads_branch}
        )


@dataclasses.dataclass(frozen=True)
class Processor:
    """A logits processor."""

    name: str  # name of the parameter, or of the group of parameters
    used: Callable[[Any], Any]  # true if a ``SequenceParams`` uses it
    # (sequences, vocab_size, form) -> arrays of a batch; None for grammars, which live above core
    arrays: Callable[[Sequence[Any], int, Any], Any] | None
    apply: Callable[[Array, Any, Branches], Array]  # (logits [B, F, V], arrays, branches) -> logits
    # (arrays, branches) -> bool []: whether it changes any logits; if not, it costs nothing
    acts: Callable[[Any, Branches], Array]
    parameters: tuple[Parameter, ...] = ()
    reads_branch: bool = False  # whether the last tokens before a node decide
    # What the arrays are compiled for: hashable, of a ``SequenceParams``. ``join`` unites two. The
    # form of grammars belongs to all sequences of a batch: see ``Profile.grown``.
    form: Callable[[Any], Any] = lambda _: ()
    join: Callable[[Any, Any], Any] = lambda one, other: tuple(map(_widest, one, other))
    # The form of short lists, which every engine's program for numeric settings takes. None for
    # processors that have programs of their own.
    short: Any = None


def _widest(one: int, other: int) -> int:
    return bucket(max(one, other), smallest=1, factor=4)


def apply(logits: Array, settings: LogitsProcessors | None, branches: Branches) -> Array:
    """Apply the logits processors to the target's logits [B, F, V]; None changes nothing.

    The axes F of logits and branches broadcast against each other.
    """
    if settings is None:
        return logits
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    nodes = max(logits.shape[1], branches.drafted.shape[1])
    wide = lambda x: jnp.broadcast_to(x, (len(x), nodes, x.shape[-1]))
    logits, branches = wide(logits), branches.replace(drafted=wide(branches.drafted))
    for name, processor in PROCESSORS.items():
        if name in settings.values:
            logits = _apply_if_asked(processor, logits, settings.values[name], branches)
    return logits


def _apply_if_asked(processor: Processor, logits: Array, arrays: Any, branches: Branches) -> Array:
    """Apply a processor if some row asks for it: a batch is compiled for what others asked."""
    return lax.cond(
        processor.acts(arrays, branches),
        lambda: processor.apply(logits, arrays, branches).astype(logits.dtype),
        lambda: logits,
    )


def apply_to_draft(
    logits: Array,
    settings: LogitsProcessors,
    branches: Branches,
    vocab_size: int,
    target_ids: Array | None = None,
) -> Array:
    """Apply the logits processors to a drafter's logits [B, F, Vd].

    Where no token of the drafter is allowed, its logits stay as they are; no draft is accepted.
    ``target_ids`` int32 [Vd] are the target ids of a drafter's smaller vocabulary, or None.
    """
    if target_ids is None:
        processed = apply(logits, settings, branches)
    else:
        full = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype)
        full = full.at[..., target_ids].set(logits)
        processed = apply(full, settings, branches)[..., target_ids]
    return jnp.where((processed > -jnp.inf).any(-1, keepdims=True), processed, logits)


# ------------------------------------------------------- grammars, allowed tokens, ends and biases


def _keep_grammar(logits: Array, automaton: Automaton, branches: Branches) -> Array:
    state = token_fsm.branch_states(automaton, branches)
    return jnp.where(token_fsm.allowed(automaton, state, logits.shape[-1]), logits, -jnp.inf)


def masked(settings: LogitsProcessors | None, masks: NodeMasks) -> LogitsProcessors:
    """Return the settings with the masks of a round."""
    values = {} if settings is None else settings.values
    return LogitsProcessors({**values, FOLLOWED: masks})


def _allowed(sequences: Sequence[Any], vocab_size: int, _: tuple) -> np.ndarray:
    """Return the tokens that each sequence allows: bool [B, V]."""
    allowed = np.ones((len(sequences), vocab_size), bool)
    for index, sequence in enumerate(sequences):
        if sequence.allowed_token_ids:
            allowed[index] = False
            allowed[index, list(sequence.allowed_token_ids)] = True
    return allowed


def _keep_allowed(logits: Array, allowed: Array, *_: Branches) -> Array:
    return jnp.where(allowed[:, None], logits, -jnp.inf)


@struct.dataclass
class MinTokens:
    """Tokens that would end a text, and the length up to which they are forbidden."""

    ids: Array  # [B, E] int32, padded with -1
    length: Array  # [B] int32, prompt included


def _min_tokens(sequences: Sequence[Any], _: int, form: tuple[int]) -> MinTokens:
    lengths = (len(sequence.prompt) + sequence.min_tokens for sequence in sequences)
    ids = padded((sequence.too_soon for sequence in sequences), *form)
    return MinTokens(ids, column(lengths, np.int32))


def _forbid_early_ends(logits: Array, ends: MinTokens, branches: Branches) -> Array:
    early = branches.length < ends.length[:, None]
    return _forbid(logits, ends.ids[:, None], early[..., None])


@struct.dataclass
class LogitBias:
    """Biases of token ids."""

    ids: Array  # [B, E] int32, padded with -1
    bias: Array  # [B, E] float32


def _logit_bias(sequences: Sequence[Any], _: int, form: tuple[int]) -> LogitBias:
    ids = padded(([token for token, _ in each.logit_bias] for each in sequences), *form)
    biases = ([bias for _, bias in each.logit_bias] for each in sequences)
    return LogitBias(ids, padded(biases, *form, np.float32))


def _add_bias(logits: Array, biases: LogitBias, *_: Branches) -> Array:
    return _add(logits, biases.ids[:, None], biases.bias[:, None])


def _add(logits: Array, ids: Array, values: Array) -> Array:
    """Add ``values`` to the logits [B, F, V] of ``ids``, both broadcast to [B, F, E]; skip -1."""
    ids = jnp.where(ids < 0, logits.shape[-1], ids)
    ids = jnp.broadcast_to(ids, (*logits.shape[:2], ids.shape[-1]))
    rows, nodes = jnp.indices(ids.shape[:2], sparse=True)
    values = jnp.broadcast_to(values, ids.shape).astype(logits.dtype)
    return logits.at[rows[..., None], nodes[..., None], ids].add(values, mode="drop")


def _forbid(logits: Array, ids: Array, where: Array) -> Array:
    return _add(logits, ids, jnp.where(where, -jnp.inf, 0))


# --------------------------------------------------------------------------------------- bad words


@struct.dataclass
class BadWords:
    """Phrases that an answer may not contain."""

    words: Array  # [B, W, L] int32, right-aligned, padded with -1
    prompt_length: Array  # [B] int32


def _bad_words(sequences: Sequence[Any], _: int, form: tuple[int, int]) -> BadWords:
    count, length = form
    words = np.full((len(sequences), count, length), -1, np.int32)
    for index, sequence in enumerate(sequences):
        for rank, word in enumerate(sequence.bad_words):
            words[index, rank, length - len(word) :] = word
    return BadWords(words, _prompt_length(sequences))


def _form_of_words(sequence: Any) -> tuple[int, int]:
    return len(sequence.bad_words), max(map(len, sequence.bad_words))


def _prompt_length(sequences: Sequence[Any]) -> np.ndarray:
    return column((len(sequence.prompt) for sequence in sequences), np.int32)


def _forbid_bad_words(logits: Array, phrases: BadWords, branches: Branches) -> Array:
    """Forbid the last token of each phrase whose other tokens end the answer."""
    words, (batch, nodes, _) = phrases.words, branches.drafted.shape
    width = words.shape[-1] - 1
    history = branches.history
    # The last L - 1 tokens before each node: the end of the history, then the branch.
    positions = history.length[:, None] - width + jnp.arange(width)
    tokens = jnp.take_along_axis(history.tokens, jnp.maximum(positions, 0), 1)
    in_prompt = positions < phrases.prompt_length[:, None]
    tokens = jnp.where(in_prompt, -2, tokens)  # matches no phrase
    tokens = jnp.broadcast_to(tokens[:, None], (batch, nodes, width))
    depth = (branches.drafted >= 0).sum(-1, keepdims=True)
    text = jnp.concatenate([tokens, branches.drafted], -1)
    end = jnp.take_along_axis(text, depth + jnp.arange(width), -1)
    before, last = words[:, None, :, :-1], words[:, None, :, -1]
    matches = ((before < 0) | (before == end[:, :, None])).all(-1)
    return _forbid(logits, last, matches)


# --------------------------------------------------------------------------------------- penalties

_PENALTIES = (
    Parameter("presence_penalty", 0.0, between(-2, 2), "in [-2, 2]; 0 turns it off"),
    Parameter("frequency_penalty", 0.0, between(-2, 2), "in [-2, 2]; 0 turns it off"),
    # Past its limits, float32 logits overflow.
    Parameter("repetition_penalty", 1.0, between(1e-6, 1e6), "1e-06 to 1e+06; 1 turns it off"),
)


@struct.dataclass
class Penalties:
    """Penalties of tokens in the text, all [B]."""

    presence: Array  # float32, subtracted from the logits of generated tokens
    frequency: Array  # float32, subtracted for each occurrence
    repetition: Array  # float32, divides (below 0: multiplies) logits of tokens of prompt or answer
    prompt_length: Array  # int32


def _has_penalty(sequence: Any) -> bool:
    return any(entry.value(sequence) != entry.neutral for entry in _PENALTIES)


def _penalties(sequences: Sequence[Any], *_: Any) -> Penalties:
    arrays = (parameter.array(sequences) for parameter in _PENALTIES)
    return Penalties(*arrays, _prompt_length(sequences))


def _any_penalty(penalties: Penalties, _: Branches) -> Array:
    repeats = penalties.repetition != 1
    return (repeats | (penalties.presence != 0) | (penalties.frequency != 0)).any()


def _penalise(logits: Array, penalties: Penalties, branches: Branches) -> Array:
    """Penalise tokens by their occurrences in the text before each node."""
    history, vocab = branches.history, logits.shape[-1]
    per_row = (penalties.presence, penalties.frequency, penalties.repetition)
    presence, frequency, repetition = (x.astype(logits.dtype)[:, None, None] for x in per_row)

    def penalise(logits: Array, seen: Array, times: Array) -> Array:
        divided = jnp.where(logits > 0, logits / repetition, logits * repetition)
        subtracted = frequency * times.astype(logits.dtype) + jnp.where(times > 0, presence, 0)
        return jnp.where(seen, divided, logits) - subtracted

    position = jnp.arange(history.tokens.shape[1])
    committed = position < history.length[:, None]
    answer = committed & (position >= penalties.prompt_length[:, None])
    rows = jnp.arange(len(history.tokens))[:, None]
    zeros = jnp.zeros((len(history.tokens), vocab), jnp.int32)
    count = lambda mask: zeros.at[rows, history.tokens].add(mask, mode="drop")
    seen, times = count(committed) > 0, count(answer)
    penalised = penalise(logits, seen[:, None], times[:, None])

    # A node also counts the tokens of its own branch: [B, F, M].
    drafted = branches.drafted
    again = (drafted[..., None] == drafted[..., None, :]).sum(-1)
    ids = jnp.where(drafted < 0, vocab, drafted)
    take = lambda x: jnp.take_along_axis(jnp.broadcast_to(x, logits.shape), ids, -1, mode="clip")
    on_branch = penalise(take(logits), jnp.bool_(True), take(times[:, None]) + again)
    rows, nodes = jnp.indices(drafted.shape[:2], sparse=True)
    return penalised.at[rows[..., None], nodes[..., None], ids].set(on_branch, mode="drop")


# --------------------------------------------------------------------------- functions of the user


@struct.dataclass
class Functions:
    """Functions of the user, in the order in which they apply."""

    used: Array  # [B, P] bool
    functions: tuple[LogitsProcessor, ...] = struct.field(pytree_node=False)


Ranked = tuple[tuple[int, LogitsProcessor], ...]  # (rank in a sequence's order, function) pairs


def _ranked(sequence: Any) -> Ranked:
    return tuple(enumerate(sequence.logits_processors))


def _both(one: Ranked, other: Ranked) -> Ranked:
    return tuple(sorted(dict.fromkeys((*one, *other)), key=lambda pair: pair[0]))


def _functions(sequences: Sequence[Any], _: int, form: Ranked) -> Functions:
    used = [[pair in _ranked(sequence) for pair in form] for sequence in sequences]
    return Functions(np.array(used), tuple(function for _, function in form))


def _call_functions(logits: Array, settings: Functions, branches: Branches) -> Array:
    history, drafted = branches.history, branches.drafted
    for index, function in enumerate(settings.functions):

        def of_node(logits, tokens, length, drafted, function=function):
            positions = jnp.where(drafted >= 0, length + jnp.arange(drafted.size), tokens.size)
            text = tokens.at[positions].set(drafted, mode="drop")
            return function(logits, text, length + (drafted >= 0).sum())

        of_batch = jax.vmap(jax.vmap(of_node, (0, None, None, 0)))
        processed = of_batch(logits, history.tokens, history.length, drafted).astype(logits.dtype)
        logits = jnp.where(settings.used[:, index, None, None], processed, logits)
    return logits


# Every logits processor, in the order in which they apply. To add one, add its entry here and its
# fields to ``SamplingParams``.
PROCESSORS: dict[str, Processor] = {
    processor.name: processor
    for processor in (
        Processor(
            "structured_outputs",
            lambda s: s.grammar,
            None,
            _keep_grammar,
            lambda _, branches: (branches.history.state != token_fsm.FREE).any(),
            reads_branch=True,
            join=lambda one, other: tuple(map(max, one, other)),
        ),
        # No profile has it: the engine adds its arrays to a round after the draft.
        Processor(
            FOLLOWED,
            lambda _: False,
            None,
            keep_masked,
            lambda masks, _: masks.used.any(),
            reads_branch=True,
        ),
        Processor(
            "allowed_token_ids",
            lambda s: s.allowed_token_ids,
            _allowed,
            _keep_allowed,
            lambda allowed, _: ~allowed.all(),
        ),
        Processor(
            "bad_words",
            lambda s: s.bad_words,
            _bad_words,
            _forbid_bad_words,
            lambda phrases, _: (phrases.words[..., -1] >= 0).any(),
            reads_branch=True,
            form=_form_of_words,
            short=(16, 4),
        ),
        Processor(
            "min_tokens",
            lambda s: s.too_soon,
            _min_tokens,
            _forbid_early_ends,
            lambda ends, branches: (branches.length < ends.length[:, None]).any(),
            form=lambda s: (len(s.too_soon),),
            short=(16,),
        ),
        Processor(
            "logit_bias",
            lambda s: s.logit_bias,
            _logit_bias,
            _add_bias,
            lambda biases, _: (biases.ids >= 0).any(),
            form=lambda s: (len(s.logit_bias),),
            short=(16,),
        ),
        Processor(
            "penalties",
            _has_penalty,
            _penalties,
            _penalise,
            _any_penalty,
            _PENALTIES,
            short=(),
        ),
        Processor(
            "logits_processors",
            lambda s: s.logits_processors,
            _functions,
            _call_functions,
            lambda settings, _: settings.used.any(),
            reads_branch=True,
            form=_ranked,
            join=_both,
        ),
    )
}

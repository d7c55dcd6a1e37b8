"""The pytrees of a speculative round, and the base classes of everything that can be swapped.

In a round the drafter proposes a tree of tokens, and the target scores all nodes in one pass. A
rule accepts a path and draws one more token. Then target and drafter commit the result.

Shape letters, used everywhere in jspec::

    B  rows of the batch                      N  nodes of a draft, root included
    K  deepest drafted node (max_depth)       T  length of a token buffer
    S  slots of a KV cache                    V  vocabulary of the target (Vd: of the draft)
    L  layers                                 H  heads (Hkv for keys and values)
    D  features of a head or of the model     W  uint32 words of an ancestor set
    E  stop tokens of a row                   C  prompt tokens of a prefill chunk

Token ids, lengths and positions are int32. Lifetimes are arguments: ``params`` are the weights,
``request`` changes when a row joins or leaves, ``state`` and ``memory`` change every round,
``shared`` outlives requests. The data classes are pytrees, so they pass through ``jax.jit``.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from flax import struct

Array = jax.Array
Memory = Any  # the drafter's state of a batch: a pytree, every leaf with the batch on axis 0
Shared = Any  # the drafter's state that outlives calls: a pytree without a batch axis

# The way a drafter chose the children of a node, given the node's row of ``Draft.logits``:
#
# * "deterministic": without chance, as the likeliest tokens or by lookup; no rows;
# * "chain": one child, drawn from the row;
# * "without_replacement": successive draws, each from the row without the tokens drawn before;
# * "top_plus_one": the likeliest tokens, then one child drawn from the row without them;
# * "mixed": any of these, by ``Draft.sampled``: children drawn without replacement from the row
#   without the tokens of their deterministic siblings;
# * "deterministic_last": drawn without replacement from the entire row, then deterministic children
#   with other tokens (a token that was drawn needs no second node).
#
# Children that find no token of positive weight left are not valid. Otherwise a node's validity
# never depends on its own token or a later one.
Proposal = Literal[
    "deterministic", "chain", "without_replacement", "top_plus_one", "mixed", "deterministic_last"
]


@struct.dataclass
class Sampling:
    """Sampling parameters of every row.

    ``names`` lists the sampling filters that some row uses. It is static, so unused filters cost
    nothing. Without ``"temperature"`` in ``names`` the whole batch is greedy.
    """

    values: dict[str, Array]  # [B] each, by the names of filters.FILTERS
    processors: Any = None  # logits_processors.LogitsProcessors, which run before the filters
    names: tuple[str, ...] = struct.field(pytree_node=False, default=())

    @property
    def temperature(self) -> Array:
        """Temperatures, float32 [B]; 0 is greedy."""
        return self.values["temperature"]

    @property
    def automaton(self) -> Any:
        """Grammars of the batch, a ``token_fsm.Automaton``; None without any."""
        return None if self.processors is None else self.processors.automaton

    @property
    def greedy(self) -> bool:
        """True if no row of the batch samples; static."""
        return "temperature" not in self.names


@struct.dataclass
class Request:
    """The settings of every row; constant for a launch."""

    keys: Array  # [B] typed PRNG keys, one per row
    sampling: Sampling
    stop_tokens: Array  # [B, E] int32, padded with -1
    max_length: Array  # [B] int32, history length at which the row finishes


@struct.dataclass
class History:
    """The committed tokens of every row: prompt and generated text in one buffer."""

    tokens: Array  # [B, T] int32, undefined from ``length`` on
    length: Array  # [B] int32
    state: Array | None = None  # [B] int32, grammar states (``token_fsm``); None without grammars


@struct.dataclass
class Draft:
    """A tree of N proposed tokens per row. Node 0 is the root, and parents precede children.

    Children of a node are numbered in drawing order. Siblings hold distinct tokens.
    """

    tokens: Array  # [B, N] int32 target ids; the loop writes the root token to node 0
    parents: Array  # [B, N] int32, or a static NumPy array [N]; -1 for the root
    valid: Array  # [B, N] bool; the parent of a valid node is valid
    # [B, N, Vd] processed draft logits. Row i is the unnormalised log-distribution from which the
    # children of node i were drawn, rounded before the draw as it is stored here. Trailing rows may
    # be missing if their nodes have no drawn children. None if nothing was drawn.
    logits: Array | None = None
    # [B, N] bool: True if the node was drawn from its parent's row of ``logits``, False if it was
    # chosen deterministically. None: every node was drawn, or none if ``logits`` is None.
    sampled: Array | None = None
    # [Vd] int32, ascending: target ids of a reduced draft vocabulary. None if Vd is V.
    draft_to_target: Array | None = None
    # [B] float32: number of nodes that the drafter expects to be accepted. None if unknown.
    score: Array | None = None
    max_depth: int = struct.field(pytree_node=False, default=0)  # K

    @property
    def drawn(self) -> Array:
        """Bool [B, N]: nodes drawn from a recorded distribution; the others are deterministic.

        Raises:
          ValueError: ``sampled`` is set without ``logits``.
        """
        if self.sampled is None:
            return jax.numpy.full(self.tokens.shape, self.logits is not None)
        if self.logits is None:
            raise ValueError("a draft with `sampled` must record its distributions; give `logits`.")
        return self.sampled


@struct.dataclass
class Tree:
    """The structure of a draft, derived from its parents by ``trees.from_parents``."""

    parents: Array  # [B, N] int32, the root is its own parent
    depth: Array  # [B, N] int32, edges to the root
    ancestors: Array  # [B, N, W] uint32: bit j of row i is set if j is i or an ancestor of i
    max_depth: int = struct.field(pytree_node=False, default=0)  # K


@struct.dataclass
class TargetOutput:
    """The output of one pass over N nodes. The pass itself writes no cache."""

    logits: Array  # [B, N, V]
    features: tuple[Array, ...]  # hidden states [B, N, D], one for each of ``capture_layers``
    # Values of the nodes that each layer's cache entry may append, nodes on axis 2 (``entries``).
    tree_kv: tuple[Any, ...]


@struct.dataclass
class Verdict:
    """The accepted path of every row, and the token that follows it.

    A row commits the KV of nodes ``path[:num_emitted]`` (the root and the accepted nodes). It emits
    the tokens of ``path[1:num_emitted]``, then ``next_token``.
    """

    path: Array  # [B, K+1] int32 node ids from the root down, undefined from ``num_emitted`` on
    num_emitted: Array  # [B] int32, accepted nodes + 1; 0 for a finished row
    next_token: Array  # [B] int32
    # [B] int32: number of emitted tokens before the first distribution in which every token has
    # probability 0 (NaN or fully masked logits). The row finishes there. None: all are valid.
    num_valid: Array | None = None


class Params(NamedTuple):
    """Weights. Drafters receive both, because many share the target's embedding and head."""

    target: Any
    drafter: Any = None


@struct.dataclass
class Round:
    """A round after its verdict: the argument of ``Drafter.update``."""

    params: Params
    request: Request
    shared: Shared
    memory: Memory  # as ``propose`` returned it
    history: History  # already with the tokens of this round
    draft: Draft  # as it was verified
    verdict: Verdict
    out: TargetOutput


class Target(abc.ABC):
    """A language model that scores N nodes in one pass and never writes its own cache.

    A target is hashable, as a frozen dataclass of settings, and holds no weights.
    """

    vocab_size: int  # V
    max_positions: int  # longest supported sequence
    reads_pages: bool = False  # whether ``forward`` reads caches with a table of pages
    packs_nodes: bool = False  # whether ``forward`` takes a ``packing`` (``core.packing``)

    @abc.abstractmethod
    def init_cache(self, batch: int, capacity: int) -> Any:
        """Return an empty cache of ``capacity`` slots per row."""

    @abc.abstractmethod
    def forward(
        self, params: Any, tokens: Array, tree: Tree, cache: Any, capture_layers: tuple[int, ...]
    ) -> TargetOutput:
        """Score the nodes ``tokens`` [B, N] of ``tree``, which follow the cache's prefix."""

    def embed(self, params: Any, tokens: Array) -> Array:
        """Return input vectors [..., D] of token ids [...]; heads may share them."""
        raise ValueError(f"the drafter reads embeddings; give {type(self).__name__} an embed.")

    def unembed(self, params: Any, hidden: Array, *, norm: bool = True) -> Array:
        """Return logits [..., V] of the last residual stream [..., D]; heads may share them.

        ``norm=False`` skips the final norm, for a stream that it has already been applied to.
        """
        raise ValueError(f"the drafter reads output logits; give {type(self).__name__} an unembed.")

    def check_params(self, params: Any) -> None:
        """Raise ValueError if ``params`` are not its weights; by default all are accepted."""
        del params


class Drafter(abc.ABC):
    """A drafting method: a frozen dataclass of hashable settings, whose fields are config keys.

    A method defines ``max_depth``, ``tree_size``, ``proposal`` and ``propose``. The other members
    have defaults: a drafter without memory that reads the history alone.
    """

    max_depth: int  # K
    tree_size: int  # N, root included
    proposal: Proposal  # how children are drawn; decides which rules are exact
    capture_layers: tuple[int, ...] = ()  # indices of the target's hidden_states that it reads
    noise: Literal["own", "target"] = "own"  # "target": draws with the target's noise (``coupled``)
    # Whether its caches may have pages: it has none, or reads them by ``models.blocks.attend``.
    reads_pages: bool = False
    # Tokens after a position that an entry of its caches depends on. None: the memory cannot start
    # behind a cached prefix.
    lookahead: int | None = None
    # Whether it can miss rounds: ``prefill`` makes up for ``update``, for the ``missing`` tokens.
    catches_up: bool = False

    @property
    def node_buckets(self) -> tuple[int, ...]:
        """Node counts that get a program of their own (``Plan.node_buckets``), ascending to N."""
        return tuple(sorted({1, self.tree_size}))

    def check_params(self, params: Any) -> None:
        """Raise ValueError if ``params`` are not its weights; by default all are accepted."""
        del params

    def load_params(self, target_params: Any) -> Any:
        """Return the weights of a class that a config names, a pytree of arrays; None for none."""
        return None

    def init(self, params: Params, request: Request, capacity: int) -> Memory:
        """Allocate the memory for histories of up to ``capacity`` tokens."""
        return ()

    def prefill(
        self,
        params: Params,
        memory: Memory,
        tokens: Array,
        features: tuple[Array, ...],
        start: Array,
        valid: Array,
    ) -> Memory:
        """Process a chunk of C tokens: of the prompt, or of text drafted by another method.

        ``tokens`` [B, C+1] hold one look-ahead token more. ``features`` are the target's hidden
        states [B, C, D], one for each of ``capture_layers``. ``start``, [] or [B], is the position
        of the first token, and ``valid`` [B] the number of tokens of the chunk that exist.
        """
        return memory

    @abc.abstractmethod
    def propose(
        self, params: Params, request: Request, shared: Shared, memory: Memory, history: History
    ) -> tuple[Draft, Memory]:
        """Draft up to ``tree_size`` nodes per row, rooted at the last committed token."""

    def update(self, round: Round) -> tuple[Memory, Shared]:
        """Commit the verdict of a round; the only place that may write a cache of its own."""
        return round.memory, round.shared

    def missing(self, memory: Memory, history: History) -> Array:
        """Return the number of tokens that ``prefill`` must process before a row drafts, [B]."""
        return jax.numpy.zeros_like(history.length)

    def at_length(self, length: int) -> "Drafter":
        """Return the drafter with K = ``length``, at least 1, on the memory of this one."""
        fields = {field.name for field in dataclasses.fields(self)}
        unset = dict.fromkeys(fields & {"tree_size", "tree_depth"})  # derived from the longest K
        return dataclasses.replace(self, num_speculative_tokens=length, **unset)

    def with_backlog(self, count: int) -> "Drafter":
        """Return the drafter that makes up for ``count`` missed tokens in one round, if it can."""
        return self

    def init_shared(self) -> Shared:
        """Allocate the state that all rows and calls share, such as past responses."""
        return ()

    def on_finished(
        self, shared: Shared, memory: Memory, history: History, rows: Array
    ) -> tuple[Memory, Shared]:
        """Learn the texts of ``rows``, bool [B], which the host ended.

        Rows that end by themselves are not among them: ``update`` sees those.
        """
        return memory, shared


# A rule's walk maps (processed logits [B, N, V], draft, tree, randomness [B, N], proposal) to (path
# [B, K+1], num_accepted [B], next_logits [B, V]). ``jspec.verify.Rule`` describes the randomness.
Walk = Callable[[Array, Draft, Tree, Array, Proposal], tuple[Array, Array, Array]]

"""The pytrees that travel through a round, and the protocols of what can be swapped.

Shape letters, used everywhere in jspec::

    B  rows of the batch                      N  nodes of a draft, root included
    K  deepest drafted node (max_depth)       T  length of a token buffer
    S  slots of a KV cache                    V  vocabulary of the target
    L  layers                                 H  heads (Hkv for keys and values)
    D  features of a head or of the model     W  uint32 words of an ancestor set

Token ids, lengths and positions are int32. Lifetimes are arguments: ``params`` are the weights,
``request`` is constant for a call, ``state`` changes every round, ``shared`` outlives calls.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
from flax import struct

Array = jax.Array
Memory = Any  # what a drafter carries from round to round: a pytree of its own
Shared = Any  # what survives calls and has no batch axis: a pytree of the drafter's own

# The law of a node's children, given its row of ``Draft.logits``:
#
# * "point": chosen without chance, as the likeliest or by looking up; no rows;
# * "chain": one child, drawn from the row;
# * "iid": drawn with replacement;
# * "without_replacement": successive draws, each from what those before it left of the row;
# * "top_plus_one": point masses, then one child drawn from the row without their tokens;
# * "mixed": any of those above but "iid", by ``Draft.sampled``: children drawn without replacement
#   from the row without the tokens of their point-mass siblings;
# * "points_last": drawn without replacement from the whole row, then point masses that are none of
#   those drawn (a token that was drawn needs no second node);
# * "pruned": drawn, but some were dropped for their own value: no law of the rest is known.
#
# Where fewer tokens have weight than there are children, the rest of the children are not valid.
# Otherwise, but for "pruned", whether a node is valid never depends on its own or a later value.
Proposal = Literal[
    "point", "chain", "iid", "without_replacement", "top_plus_one", "mixed", "points_last", "pruned"
]


@struct.dataclass
class Sampling:
    """How each row warps its logits. ``names`` is static: a warp that no row uses costs nothing.

    Without ``"temperature"`` in ``names`` the whole batch is greedy.
    """

    temperature: Array  # [B] float32, 0 is greedy
    min_p: Array  # [B] float32, 0 is off
    top_k: Array  # [B] int32, 0 is off
    top_p: Array  # [B] float32, 1 is off
    processors: Any = (
        None  # ``shaping.LogitsProcessors``: what changes the logits before; None: nothing does
    )
    names: tuple[str, ...] = struct.field(pytree_node=False, default=())

    @property
    def greedy(self) -> bool:
        """Whether no row of the batch draws at random (known when tracing)."""
        return "temperature" not in self.names


@struct.dataclass
class Request:
    """What the caller asked of each row; constant for a call."""

    keys: Array  # [B] typed PRNG keys, one a row
    sampling: Sampling
    stop_tokens: Array  # [B, E] int32, padded with -1
    max_length: Array  # [B] int32, history length at which the row ends


@struct.dataclass
class History:
    """Committed tokens of every row: prompt and answer in one buffer."""

    tokens: Array  # [B, T] int32, undefined past ``length``
    length: Array  # [B] int32
    state: Array | None = None  # [B] int32, of ``jspec.core.token_fsm``, where there are grammars


@struct.dataclass
class Draft:
    """A proposal of N nodes a row. Node 0 is the root, parents precede their children.

    Children of a node are in drawing order by node index. Siblings are distinct, except where the
    drafter's ``proposal`` is "iid".
    """

    tokens: Array  # [B, N] int32 ids of the target; node 0 is given the root token
    parents: Array  # [B, N] or static [N] int32, -1 for the root
    valid: Array  # [B, N] bool; a valid node's parent is valid
    # [B, N, Vd], row i: unnormalised log-weights of the law that the children of i were drawn
    # from, warped, and rounded before the draw as they are stored here; rows at the end may be
    # missing where they belong to nodes without drawn children. None: nothing was drawn.
    logits: Array | None = None
    # [B, N] bool: drawn from the parent's row; False: a point mass, chosen without looking at
    # chance. None: every node was drawn, if there are logits; else none was.
    sampled: Array | None = None
    # [Vd] int32, ascending: target ids of a reduced draft vocabulary. None: Vd is V, ids agree.
    draft_to_target: Array | None = None
    # [B] float32: how many nodes the drafter expects to be accepted. None: it does not say.
    score: Array | None = None
    max_depth: int = struct.field(pytree_node=False, default=0)

    @property
    def drawn(self) -> Array:
        """Which nodes were drawn from a recorded law, bool [B, N]; all others are point masses.

        Raises:
          ValueError: nodes are said to be drawn, but no law is recorded.
        """
        if self.sampled is None:
            return jax.numpy.full(self.tokens.shape, self.logits is not None)
        if self.logits is None:
            raise ValueError("a draft with `sampled` must record the laws: give `logits` as well.")
        return self.sampled


@struct.dataclass
class Tree:
    """The shape of a draft, derived from its parents."""

    parents: Array  # [B, N] int32, the root is its own parent
    depth: Array  # [B, N] int32
    ancestors: Array  # [B, N, W] uint32: bit j of row i says that j is i or above it
    max_depth: int = struct.field(pytree_node=False, default=0)


@struct.dataclass
class TargetOutput:
    """What one pass over N nodes gives; it writes nothing: ``tree_kv`` waits for a verdict."""

    logits: Array  # [B, N, V]
    features: tuple[Array, ...]  # one [B, N, D] for each of ``capture_layers``
    tree_kv: tuple[Any, ...]  # one entry a layer, shaped like the cache's with N slots


@struct.dataclass
class Verdict:
    """Which nodes survive, and the token that follows them.

    A row commits the keys and values of ``path[:num_emitted]`` (the root and the accepted nodes)
    and emits the tokens of ``path[1:num_emitted]`` and then ``next_token``.

    Where the target gives no token any weight there is nothing to say: the row says what it can
    and ends there.
    """

    path: Array  # [B, K+1] int32 node ids from the root down, undefined past ``num_emitted``
    num_emitted: Array  # [B] int32, accepted nodes + 1; 0 for a row that is done
    next_token: Array  # [B] int32
    # [B] int32, how many of these tokens come of a law that is one; None for all of them.
    num_valid: Array | None = None

    def hold(self, done: Array) -> "Verdict":
        """Rows that are done emit nothing."""
        return self.replace(num_emitted=jax.numpy.where(done, 0, self.num_emitted))


class Params(NamedTuple):
    """Weights. Drafters get both, since many share the target's embedding and head."""

    target: Any
    drafter: Any = None


class Target(Protocol):
    """A language model that scores N nodes in one pass and never writes its own cache."""

    vocab_size: int
    max_positions: int  # longest sequence that the positions allow

    def init_cache(self, batch: int, capacity: int) -> Any:
        """Allocates an empty cache of ``capacity`` slots a row."""

    def forward(
        self, params: Any, tokens: Array, tree: Tree, cache: Any, capture_layers: tuple[int, ...]
    ) -> TargetOutput:
        """Scores ``tokens`` [B, N] placed as ``tree`` after the cache's committed prefix."""

    def embed(self, params: Any, tokens: Array) -> Array:
        """Token ids to the model's input vectors [..., D]."""

    def unembed(self, params: Any, hidden: Array, *, norm: bool = True) -> Array:
        """Last residual stream [..., D] to logits [..., V].

        ``norm=False`` is for a stream that the final norm has passed already: the head alone.
        """


class Rounds(Protocol):
    """The part of a drafter that runs in every round."""

    max_depth: int  # K
    tree_size: int  # N, root included
    capture_layers: tuple[int, ...]  # hidden_states indices wanted from the target
    proposal: Proposal  # the law of a node's children: decides which rules are exact

    def propose(
        self, params: Params, request: Request, shared: Shared, memory: Memory, history: History
    ) -> tuple[Draft, Memory]:
        """Drafts up to ``tree_size`` nodes a row, rooted at the last committed token."""

    def update(
        self,
        params: Params,
        request: Request,
        shared: Shared,
        memory: Memory,
        history: History,
        draft: Draft,
        verdict: Verdict,
        out: TargetOutput,
    ) -> tuple[Memory, Shared]:
        """Learns the verdict; ``history`` already holds the tokens of this round."""


class Drafter(Rounds, Protocol):
    """A drafting method: a frozen dataclass of hashable settings, whose fields are config keys.

    Some have more: ``Sharing``, ``jspec.drafters.adaptive.backlog.Following``; ``node_buckets``, node counts worth
    a program of their own in ``Plan.node_buckets``; ``backlog``, a setting of how many committed tokens a
    round takes in at most, which a drafter that combines others raises; ``check_params(weights)``,
    which raises ValueError where ``params.drafter`` are another's (a ``Target`` may have it, too).
    One whose rounds differ in kind is ``MultiMode``: it has gears in place of ``propose`` and
    ``update``.
    """

    noise: Literal["own", "target"]  # "target": draws with the target's noise (rule ``coupled``)

    def init(self, params: Params, request: Request, capacity: int) -> Memory:
        """Allocates the memory for histories of up to ``capacity`` tokens."""

    def prefill(
        self,
        params: Params,
        memory: Memory,
        tokens: Array,
        features: tuple[Array, ...],
        start: Array,
        valid: Array,
    ) -> Memory:
        """Takes in a chunk of the prompt, or of text that it missed (``jspec.drafters.adaptive.backlog``).

        ``tokens`` [B, C+1] are the chunk and one token of look-ahead, ``features`` hold C rows,
        ``start`` ([] or [B]) is the position of the first one and ``valid`` [B] counts the rows
        that exist.
        """


@runtime_checkable
class Sharing(Protocol):
    """What a drafter has besides if its state outlives calls; others are handed ``()``."""

    def init_shared(self) -> Shared:
        """Allocates what is shared by all rows and all calls."""

    def on_finished(self, shared: Shared, memory: Memory, history: History) -> Shared:
        """Takes in what it would still learn of rows that go on no more."""


class Mode(Rounds, Protocol):
    """What drafts in rounds of one kind, on the memory that all gears share."""

    def keeps_mode(
        self, request: Request, shared: Shared, memory: Memory, history: History
    ) -> Array:
        """bool []: whether the next round is of this kind, too, should all rows go on."""


@runtime_checkable
class MultiMode(Protocol):
    """What drafts in rounds of several kinds. Each has a loop of its own: no branches, no padding.

    A round that returned caches from a branch would copy them. What goes round a loop stays where
    it is, so the rounds of a gear run in a loop until it no longer ``stays`` or a row has ended.
    """

    modes: tuple[Mode, ...]

    def select_mode(
        self, params: Params, request: Request, shared: Shared, memory: Memory, history: History
    ) -> tuple[Memory, Array]:
        """The memory as the next round needs it, and the index [] int32 of that round's gear."""


# A rule's walk maps (warped logits [B, N, V], draft, tree, coins) to (path, num_accepted,
# next_logits); see jspec.verify for the two kinds of coins.
Walk = Callable[[Array, Draft, Tree, Array], tuple[Array, Array, Array]]

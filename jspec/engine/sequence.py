"""A sequence of an engine: its settings, its text so far, its pages, and where it stands."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jspec.core.logprobs import Logprobs, Scoring
from jspec.engine import answers, faults
from jspec.engine.answers import Answer
from jspec.engine.block_table import BlockTable
from jspec.engine.launches import Launch
from jspec.engine.sequences import SequenceParams
from jspec.grammar.followed import Follower

Listener = Callable[[Answer], bool]


@dataclasses.dataclass(eq=False)
class EngineSequence:
    """A sequence that was given to an engine, and its answer so far."""

    params: SequenceParams
    answer: Answer
    table: BlockTable
    rank: tuple[int, int]  # priority and arrival; the lowest runs first
    listener: Listener | None = None
    rounds: int | None = None  # most rounds between two readings
    scoring: Scoring | None = None
    slot: int | None = None  # None while it waits, and after its end
    begin: float | None = None  # seconds of time.perf_counter, when it first left the queue
    has_launched: bool = False  # True once a launch with it was dispatched
    num_preemptions: int = 0
    num_prefilled: int = 0  # tokens of the text that the caches hold, before the first round
    num_to_prefill: int = 0  # the same, when rounds begin
    # Scores of those, by chunk.
    prompt_scores: list[Logprobs] = dataclasses.field(default_factory=list)
    is_suspect: bool = False  # True if it may have made a launch fail: it must run alone
    error: Exception | None = None  # Exception that ended the sequence.

    def __post_init__(self):
        self._tokens = np.array(self.params.prompt, np.int32)  # the buffer has room behind the text
        self._length = len(self._tokens)
        grammar = self.params.followed_grammar  # on the host
        self.follower = None if grammar is None else Follower(grammar)

    def __lt__(self, other: "EngineSequence") -> bool:
        return self.rank < other.rank

    @property
    def finished(self) -> bool:
        """True if the answer is complete."""
        return self.answer.finish_reason is not None

    @property
    def scored_prompt(self) -> Scoring | None:
        """The scoring of the prompt, if its scores are asked for and not computed yet."""
        is_wanted = self.scoring and self.scoring.prompt and self.answer.prompt_logprobs is None
        return self.scoring if is_wanted else None

    @property
    def length(self) -> int:
        """The tokens of the prompt and of the answer so far."""
        return len(self.params.prompt) + len(self.answer.tokens)

    @property
    def text(self) -> np.ndarray:
        """The prompt, and the answer so far, int32 [n]."""
        length = self.length
        if length > len(self._tokens):
            self._tokens = np.pad(self._tokens[: self._length], (0, length))
        new = self.answer.tokens[self._length - len(self.params.prompt) :]
        self._tokens[self._length : length], self._length = new, length
        return self._tokens[:length]

    @property
    def num_left(self) -> int:
        """Tokens that are to be prefilled before the first round."""
        return self.num_to_prefill - self.num_prefilled

    @property
    def prefill_end(self) -> int:
        """The token where prefill ends, or stops before for a snapshot."""
        pool = self.table.pool
        if pool is None:
            return self.num_to_prefill
        return pool.next_end(self.num_prefilled, self.num_to_prefill + 1)

    @property
    def most_tokens(self) -> int:
        """The length of the longest text."""
        return len(self.params.prompt) + self.params.max_tokens

    def end(self, reason: str) -> None:
        """End the text by a decision of the host."""
        self.answer = dataclasses.replace(self.answer, finish_reason=reason)

    def fail(self, error: Exception) -> None:
        """End the text by an error."""
        self.error = error
        self.end("error")

    def extend(self, launch: Launch, slot: int) -> None:
        """Add what a launch did, which was brought to the host."""
        self.is_suspect = False
        self.answer = answers.extended(
            self.answer,
            launch.scored_as(self.scoring),
            slot,
            self.params.stop_token_ids,
            self.params.max_tokens,
        )
        self.table.advance(self.text, int(launch.num_cached[slot]))

    def add_prompt_scores(self, scores: Logprobs) -> None:
        """Add the scores of a chunk [1, C]; the prompt has them once it is complete."""
        self.prompt_scores.append(scores)
        if not self.num_left:
            joined = answers.prompt_scores(self.scoring, self.prompt_scores)
            joined = joined[: len(self.params.prompt) - 1]
            self.answer = dataclasses.replace(self.answer, prompt_logprobs=joined)
            self.prompt_scores.clear()

    def hear(self) -> bool:
        """Call the listener; return whether it ended the text. An error of its own ends it too."""
        try:
            return self.listener is not None and self.listener(self.answer)
        except faults.INTERRUPTIONS:
            raise
        except BaseException as error:  # panics of Rust are no Exception
            self.fail(error if isinstance(error, Exception) else faults.of_sequence(error))
            return False

    def free(self) -> None:
        """Free all pages. They hold no NaN if logits after the prompt were finite."""
        has_failed = self.answer.finish_reason == "error"
        if has_failed:
            self.table.evict()
        self.table.free(is_clean=len(self.answer.tokens) > 0 and not has_failed)

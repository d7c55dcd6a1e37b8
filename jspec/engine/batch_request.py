"""The request of a running batch: the profile and the grammars of who runs, and their arrays."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec import sharding
from jspec.core.token_fsm import FREE
from jspec.core.types import Request
from jspec.engine import program_memory
from jspec.engine.loop import DecodeState
from jspec.engine.profile import Profile, request_of
from jspec.engine.profiles import Profiles
from jspec.engine.sequence import EngineSequence
from jspec.grammar import automata
from jspec.grammar.automata import Grammar

Members = list[EngineSequence | None]  # sequences by slot


class NewRequest(NamedTuple):
    """The request of launches, as arrays of the host."""

    request: Request  # before its keys are derived
    streams: np.ndarray  # uint32 [B]
    offsets: np.ndarray  # int32 [B], by which the states of grammars have moved

    def fitted(self, state: DecodeState) -> DecodeState:
        """Return ``state`` with states of grammars if the request has any, and else without.

        Rows without a grammar are in state ``FREE``.
        """
        history = state.history
        if self.request.sampling.automaton is None:
            history = history.replace(state=None)
        elif history.state is None:
            states = sharding.whole(np.full(history.length.shape, FREE, np.int32))
            history = history.replace(state=states)
        elif self.offsets.any():
            moved = jnp.where(history.state == FREE, FREE, history.state + self.offsets)
            history = history.replace(state=moved)
        return state.replace(history=history)


class BatchRequest:
    """Chooses the profile of launches, and makes the request of the sequences in slots.

    Args:
      profile: settings that all launches have.
      vocab_size: that of the target.
      release: of ``program_memory.bound``.
    """

    def __init__(self, profile: Profile, vocab_size: int, release: Callable[[str], None]):
        self.profile, self.profiles = profile, Profiles(profile)
        self.is_stale = True  # True if launches need other arrays
        self._vocab_size, self._release = vocab_size, release
        self._grammars: tuple[Grammar, ...] = ()  # the grammars on the device
        self._fitted: Members = []  # sequences that ``profile`` was chosen for

    def reset(self) -> None:
        """Have no sequence in a slot."""
        self.is_stale, self._fitted = True, []

    def make(self, seated: Members, newcomer: EngineSequence | None = None) -> NewRequest:
        """Return the request of launches; set ``is_stale`` to False once the worker has it.

        The ``newcomer`` may have generated tokens before it was preempted.
        """
        self.choose_profile(seated)
        rows = [None if sequence is None else sequence.params for sequence in seated]
        used = {row.grammar: None for row in rows if row is not None and row.grammar is not None}
        remaining = [each for each in self._grammars if each in used]
        grammars = tuple(dict.fromkeys((*remaining, *used)))
        old, new = map(automata.first_states, (self._grammars, grammars))
        offsets = np.zeros(len(rows), np.int32)
        for slot, row in enumerate(rows):
            if row is not None and row.grammar in old:
                offsets[slot] = new[row.grammar] - old[row.grammar]
        generated = _generated(seated, newcomer)
        request, streams = request_of(rows, self.profile, self._vocab_size, grammars, generated)
        self._grammars, self.is_stale = grammars, True
        return NewRequest(request, streams, offsets)

    def choose_profile(self, seated: Members) -> None:
        """Choose the profile of the next launch; the request may be stale from then on."""
        if seated == self._fitted:
            return
        sequences = [sequence for sequence in seated if sequence is not None]
        scorings = [sequence.scoring for sequence in sequences]
        needed = self.profiles.needed([each.params for each in sequences], scorings)
        before, self.profile = self.profile, self.profiles.choose(needed, self.profile)
        self._fitted = [*seated]
        if before != self.profile:
            program_memory.bound(self._release)
        self.is_stale |= before.without_scores() != self.profile.without_scores()


def _generated(seated: Members, newcomer: EngineSequence | None) -> Sequence[Any]:
    return [each.answer.tokens if each and each is newcomer else () for each in seated]

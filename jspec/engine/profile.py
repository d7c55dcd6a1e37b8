"""The profile: the settings that programs are compiled for, beside the plan."""

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from jspec.core.filters import FILTERS, used_filters
from jspec.core.logits_processors import PROCESSORS, LogitsProcessors
from jspec.core.logprobs import Scoring
from jspec.core.parameters import column, padded
from jspec.core.types import Request, Sampling
from jspec.engine.sequences import SequenceParams
from jspec.grammar import automata
from jspec.grammar.automata import Grammar
from jspec.util.messages import shown
from jspec.util.values import are_whole, bucket, is_whole, listed


@dataclasses.dataclass(frozen=True)
class Profile:
    """The static settings of launches; invalid values raise ValueError.

    A functional call has the filters and processors that its sequences use, and no others. An
    engine has few programs, so its profiles are ``rounded``. They are greedy or numeric: the latter
    take every numeric setting and short lists. Scores, long lists, grammars, allowed tokens and
    functions of the user are wide: a profile has them while a sequence that needs them runs.
    """

    rounds: int = 32  # R, most rounds of a launch: the host reads its buffers in one transfer
    nodes: bool = False  # whether to bring the drafted trees
    scoring: Scoring | None = None  # scores of tokens; None for none
    filters: tuple[str, ...] = ()  # sampling filters in use, in order
    forms: tuple[tuple[str, Hashable], ...] = ()  # logits processors in use, and widths of lists
    num_stop_tokens: int = 1  # E
    follows: bool = False  # whether the host follows the grammar of a row
    # Layers of the target, as of ``hidden_states``, whose output at accepted nodes to bring.
    capture_layers: tuple[int, ...] = ()

    def __post_init__(self):
        if not is_whole(self.rounds, 1):
            raise ValueError(f"rounds={shown(self.rounds)} must be a whole number of at least 1.")
        object.__setattr__(self, "capture_layers", listed("capture_layers", self.capture_layers))
        layers = self.capture_layers
        if not are_whole(layers, 0) or len(set(layers)) < len(layers):
            raise ValueError(
                f"capture_layers={shown(layers)} must be distinct whole numbers of at least 0: "
                "indices of the target's hidden states."
            )

    def grown(self, sequences: Iterable[SequenceParams]) -> "Profile":
        """Return the least profile that serves the sequences too."""
        filters, forms, stops = set(self.filters), dict(self.forms), self.num_stop_tokens
        grammars, follows = {}, self.follows
        for sequence in sequences:
            follows |= sequence.followed_grammar is not None
            filters |= set(used_filters(sequence))
            stops = max(stops, _stop_tokens(len(sequence.stop_token_ids)))
            for name, processor in PROCESSORS.items():
                if not processor.used(sequence):
                    continue
                if name == _GRAMMARS:
                    grammars[sequence.grammar] = None
                    form = automata.sizes_of(grammars)
                else:
                    form = processor.form(sequence)
                forms[name] = processor.join(forms.get(name, form), form)
        return dataclasses.replace(self._with(filters, forms, stops), follows=follows)

    def _with(self, filters: Collection[str], forms: dict[str, Any], stops: int) -> "Profile":
        return dataclasses.replace(
            self,
            filters=tuple(name for name in FILTERS if name in filters),
            forms=tuple((name, forms[name]) for name in PROCESSORS if name in forms),
            num_stop_tokens=stops,
        )

    def scored(self, scoring: Scoring | None) -> "Profile":
        """Return the least profile that computes such scores too."""
        if scoring is None:
            return self
        old = self.scoring
        count = scoring.count if old is None else max(old.count, scoring.count)
        return dataclasses.replace(self, scoring=Scoring(count, mode=scoring.mode))

    def without_scores(self) -> "Profile":
        """Return the profile for launches in which no row is scored."""
        return dataclasses.replace(self, scoring=None)

    def rounded(self) -> "Profile":
        """Return the profile of an engine that serves this one: greedy or numeric."""
        is_numeric = self.filters or any(name in _SHORT for name, _ in self.forms)
        if is_numeric:
            return self.numeric()
        return self._with((), dict(self.forms), max(self.num_stop_tokens, _SHORT_STOPS))

    def numeric(self) -> "Profile":
        """Return the profile of an engine that serves this one and all numeric settings."""
        forms = dict(self.forms)
        for name, short in _SHORT.items():
            forms[name] = PROCESSORS[name].join(forms.get(name, short), short)
        return self._with(FILTERS, forms, max(self.num_stop_tokens, _SHORT_STOPS))

    @property
    def wide(self) -> dict[str, Any]:
        """The forms of scores, grammars, long lists and functions; {} in most profiles."""
        wide = {name: form for name, form in self.forms if form != _SHORT.get(name)}
        if self.scoring is not None:
            wide["scoring"] = (max(self.scoring.count, 1),)
        if self.num_stop_tokens > _SHORT_STOPS:
            wide["stop_token_ids"] = (self.num_stop_tokens,)
        if self.follows:
            wide["followed_grammar"] = (1,)
        return wide

    def covers(self, other: "Profile") -> bool:
        """Return whether programs of this profile serve whom the other one serves."""
        forms, scoring = dict(self.forms), self.scored(other.scoring).scoring
        return (
            (self.rounds, self.nodes, self.follows) == (other.rounds, other.nodes, other.follows)
            and self.capture_layers == other.capture_layers
            and self.scoring == scoring
            and set(self.filters) >= set(other.filters)
            and self.num_stop_tokens >= other.num_stop_tokens
            and all(
                name in forms and PROCESSORS[name].join(forms[name], form) == forms[name]
                for name, form in other.forms
            )
        )


_GRAMMARS = "structured_outputs"
_SHORT = {name: entry.short for name, entry in PROCESSORS.items() if entry.short is not None}
_SHORT_STOPS = 16  # stop tokens; a row compares its few new tokens with them


def _stop_tokens(count: int) -> int:
    return bucket(count, smallest=1, factor=4)


_IDLE = SequenceParams((0,), max_tokens=1)


def request_of(
    rows: Sequence[SequenceParams | None],
    profile: Profile,
    vocab_size: int,
    grammars: Sequence[Grammar] = (),
    generated: Sequence[Sequence[int]] = (),
) -> tuple[Request, np.ndarray]:
    """Return the arrays of a batch in the widths of ``profile``, and the streams [B].

    A row of None is idle. ``Request.keys`` holds the words of the seeds, uint32 [B, 2], not yet
    folded with the streams. ``grammars`` keep their states from one batch to the next, in which
    they come first again. ``generated`` are tokens that rows had generated when they were
    preempted.
    """
    size, sequences = len(rows), [_IDLE if row is None else row for row in rows]
    seeds = np.zeros((size, 2), np.uint32)
    for index, sequence in enumerate(sequences):
        seeds[index] = (sequence.seed >> 32) & 0xFFFFFFFF, sequence.seed & 0xFFFFFFFF
    arrays = {}
    for name, form in profile.forms:
        make = PROCESSORS[name].arrays
        if make is None:
            of_rows = [each.grammar for each in sequences]
            arrays[name] = automata.joined(of_rows, grammars, generated, least=form)
        else:
            arrays[name] = make(sequences, vocab_size, form)
    settings = Sampling(
        values={name: entry.array(sequences) for name, entry in FILTERS.items()},
        processors=LogitsProcessors(arrays) if arrays else None,
        names=profile.filters,
    )
    limits = (0 if row is None else len(row.prompt) + row.max_tokens for row in rows)
    streams = column((sequence.stream for sequence in sequences), np.uint32)
    stop_ids = (sequence.stop_token_ids for sequence in sequences)
    stops = padded(stop_ids, profile.num_stop_tokens)
    return Request(seeds, settings, stops, column(limits, np.int32)), streams

"""The profile: the settings that programs are compiled for, beside the plan."""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from jspec.core import sampling
from jspec.core.logits_processors import PROCESSORS, LogitsProcessors
from jspec.core.logprobs import Scoring
from jspec.core.parameters import column, padded
from jspec.core.sampling import FILTERS
from jspec.core.types import Request, Sampling
from jspec.engine.sequences import SequenceParams
from jspec.grammar import automata
from jspec.grammar.automata import Grammar
from jspec.util.buckets import bucket
from jspec.util.messages import shown
from jspec.util.values import is_whole


@dataclasses.dataclass(frozen=True)
class Profile:
    """The static settings of launches; invalid values raise ValueError.

    Profiles only grow, and lists have powers of two as widths. So there are few programs, whatever
    requests ask for.
    """

    rounds: int = 32  # R, most rounds of a launch: the host reads its buffers in one transfer
    nodes: bool = False  # whether to bring the drafted trees
    scoring: Scoring | None = None  # scores of tokens; None for none
    filters: tuple[str, ...] = ()  # sampling filters in use, in order
    forms: tuple[tuple[str, Hashable], ...] = ()  # logits processors in use, and widths of lists
    num_stop_tokens: int = 1  # E

    def __post_init__(self):
        if not is_whole(self.rounds, 1):
            raise ValueError(f"rounds={shown(self.rounds)} must be a whole number of at least 1.")

    def grown(self, sequences: Iterable[SequenceParams]) -> "Profile":
        """Return the least profile that serves the sequences too."""
        filters, forms, stops = set(self.filters), dict(self.forms), self.num_stop_tokens
        for sequence in sequences:
            filters |= set(sampling.used_filters(sequence))
            stops = max(stops, bucket(len(sequence.stop_token_ids), smallest=1))
            for name, processor in PROCESSORS.items():
                if processor.used(sequence):
                    form = processor.form(sequence)
                    forms[name] = processor.join(forms.get(name, form), form)
        return dataclasses.replace(
            self,
            filters=tuple(name for name in FILTERS if name in filters),
            forms=tuple((name, forms[name]) for name in PROCESSORS if name in forms),
            num_stop_tokens=stops,
        )

    def without_functions(self) -> "Profile":
        """Return the profile for sequences without functions of the user, which are compiled in."""
        forms = tuple(form for form in self.forms if form[0] != "logits_processors")
        return dataclasses.replace(self, forms=forms)

    def without_scores(self) -> "Profile":
        """Return the profile for launches in which no row is scored."""
        return dataclasses.replace(self, scoring=None)

    def scored(self, scoring: Scoring | None) -> "Profile":
        """Return the least profile that computes such scores too."""
        if scoring is None:
            return self
        old = self.scoring
        count = scoring.count if old is None else max(old.count, scoring.count)
        return dataclasses.replace(self, scoring=Scoring(count, mode=scoring.mode))


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

"""The profiles whose programs exist, and the one of the next launch."""

from collections.abc import Sequence

from jspec.core.logprobs import Scoring
from jspec.engine.profile import Profile
from jspec.engine.program_memory import RELEASES
from jspec.engine.sequences import SequenceParams

_WIDER = 4  # times, that a list may be wider than needed
_WIDER_TABLES = 64  # the same of the tables of grammars, in which a search takes steps of 64


class Profiles:
    """The profiles that an engine has programs of, and its choice among them.

    A launch has the least profile that suits who runs: it has the same wide settings, and its lists
    are at most four times as wide. So no request slows others for longer than it runs, and what
    follows it finds the programs that were there before.

    Where no such profile has programs, an engine that compiles at its first launches takes the
    needed one, rounded. One whose programs are compiled ahead never compiles while others run: it
    keeps a wider profile until a program that suits exists, the last one if that serves all.

    Args:
      least: settings that every profile of the engine has.
    """

    def __init__(self, least: Profile):
        self.are_compiled_ahead = False  # set by ``Programs``
        self._least = least
        self._compiled: dict[Profile, None] = {}
        self._releases = RELEASES.total()  # after which no profile has programs any more

    def needed(
        self, sequences: Sequence[SequenceParams], scorings: Sequence[Scoring | None] = ()
    ) -> Profile:
        """Return the least profile of an engine that serves the sequences."""
        profile = self._least.grown(sequences)
        for scoring in scorings:
            profile = profile.scored(scoring)
        return profile.rounded()

    def add(self, profile: Profile) -> None:
        """Keep in mind that a profile has programs."""
        self._forget_released()
        self._compiled[profile] = None

    def suit(self, needed: Profile) -> bool:
        """Return whether a profile that suits has programs."""
        return bool(self._suiting(needed))

    def cover(self, needed: Profile) -> bool:
        """Return whether a profile that serves as much has programs, however wide."""
        self._forget_released()
        return any(profile.covers(needed) for profile in [*self._compiled])

    def choose(self, needed: Profile, last: Profile) -> Profile:
        """Return the profile of the next launch; ``last`` is that of the one before."""
        suiting = self._suiting(needed)
        if suiting:
            return min(suiting, key=_volume)
        if self.are_compiled_ahead:
            for profile in (last, *reversed([*self._compiled])):
                if profile in self._compiled and profile.covers(needed):
                    return profile
        return needed

    def _suiting(self, needed: Profile) -> list[Profile]:
        self._forget_released()
        suiting = [profile for profile in [*self._compiled] if _suits(profile, needed)]
        if self.are_compiled_ahead:
            return suiting
        return [profile for profile in suiting if profile.filters == needed.filters]

    def _forget_released(self) -> None:
        if self._releases != RELEASES.total():
            self._releases = RELEASES.total()
            self._compiled.clear()


def _suits(profile: Profile, needed: Profile) -> bool:
    one, other = profile.wide, needed.wide
    if not profile.covers(needed) or one.keys() != other.keys():
        return False
    for name, form in one.items():
        if name == "logits_processors":
            if form != other[name]:
                return False
        else:
            most = _WIDER_TABLES if name == "structured_outputs" else _WIDER
            if any(width > most * least for width, least in zip(form, other[name], strict=True)):
                return False
    return True


def _volume(profile: Profile) -> int:
    """Return a measure of what a launch computes beside the models."""
    widths = [sum(form) for name, form in profile.forms if name != "logits_processors"]
    count = 0 if profile.scoring is None else profile.scoring.count
    return len(profile.filters) + sum(widths) + profile.num_stop_tokens + count

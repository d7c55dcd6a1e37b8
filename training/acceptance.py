"""Acceptance length while training, by the loop that serves."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jspec.core.types import Drafter, Params, Target
from jspec.engine.batch import SequenceParams, generate_sequences
from jspec.engine.plan import Plan
from training.data.loader import Rows
from training.trainer import bad_option, gather


@dataclasses.dataclass(frozen=True)
class AcceptanceSettings:
    """How acceptance is measured on held-out text, at every evaluation.

    Attributes:
      num_speculative_tokens: K, drafted in a chain
      acceptance_prompts: prompts, from the held-out data (0: do not measure)
      prompt_tokens: tokens of a prompt at most
      max_new_tokens: tokens generated for each at most; a text ends where the target ends it
      temperatures: one acceptance length each; that of the first decides which weights are best

    Raises:
      ValueError: a value is out of range.
    """

    num_speculative_tokens: int = 4
    acceptance_prompts: int = 16
    prompt_tokens: int = 128
    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (1.0, 0.0)

    def __post_init__(self):
        for name in ("num_speculative_tokens", "prompt_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise bad_option(name, getattr(self, name), "it must be at least 1")
        if self.acceptance_prompts < 0:
            raise bad_option("acceptance_prompts", self.acceptance_prompts, "take 0 or more")
        wrong = [t for t in self.temperatures if not 0 <= t < float("inf")]
        if wrong or not self.temperatures:
            raise bad_option("temperatures", self.temperatures, "take one or more, 0 or higher")


def acceptance_meter(
    settings: AcceptanceSettings,
    target: Target,
    drafter: Drafter,
    rows: Rows,
    stop_token_ids: Sequence[int],
) -> Callable[[Any, Any], dict[str, float]]:
    """A function from weights of target and drafter to acceptance lengths, rule ``rejection``.

    ``acceptance_length`` is that of the first temperature, ``acceptance_length_t0`` that of
    temperature 0, and so on: tokens over rounds of all its texts, so that each counts the token
    that the target adds, and what would stand behind a text's end counts for nothing.
    ``distinct_tokens`` is the mean number of different ids in a text of the last temperature, of
    ``text_tokens`` that it is long in the mean: a target that loops flatters every drafter.

    Args:
      settings: prompts and temperatures.
      target: what verifies.
      drafter: what drafts; its ``num_speculative_tokens`` should be the settings'.
      rows: held-out windows, of which the prompts are taken.
      stop_token_ids: that end a text, as they do when it is served.

    Raises:
      ValueError: the target has no positions left for a prompt.
    """
    plan = Plan(target, drafter)
    room = target.max_positions - settings.max_new_tokens
    if room < 1:
        remedy = f"the target has {target.max_positions} positions, prompt included"
        raise bad_option("max_new_tokens", settings.max_new_tokens, remedy)
    prompts = held_out_prompts(rows, settings.acceptance_prompts, min(settings.prompt_tokens, room))
    stops = tuple(stop_token_ids)

    def measure(target_params: Any, drafter_params: Any) -> dict[str, float]:
        # All temperatures in one batch: one program to compile, one loop to run.
        asked = [
            SequenceParams(
                prompt, settings.max_new_tokens, temperature, stream=index, stop_token_ids=stops
            )
            for temperature in settings.temperatures
            for index, prompt in enumerate(prompts)
        ]
        answers = generate_sequences(plan, Params(target_params, gather(drafter_params)), asked)
        found = {}
        for place, temperature in enumerate(settings.temperatures):
            here = answers[place * len(prompts) :][: len(prompts)]
            tokens = sum(len(answer.tokens) for answer in here)
            length = tokens / sum(answer.rounds for answer in here)
            name = "acceptance_length" + (f"_t{temperature:g}" if place else "")
            found[name] = round(length, 4)
        distinct = np.mean([len(set(answer.tokens.tolist())) for answer in here])
        return found | {
            "distinct_tokens": round(float(distinct), 1),
            "text_tokens": round(tokens / len(here), 1),
        }

    return measure


def held_out_prompts(rows: Rows, count: int, length: int) -> list[tuple[int, ...]]:
    """At most ``count`` prompts of ``length`` tokens or less, from windows spread evenly.

    Of each window its longest document: what leads to the first token that was learned from, where
    that comes later than its second (an assistant's answer), else its first ``length`` tokens. Of a
    longer question the first token stays, since models lean on it, and the end, where the answer is
    opened.
    """
    picked = np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int))
    prompts = []
    for index in picked:
        row = rows[int(index)]
        used = row.segments[row.segments > 0]
        inside = row.segments == np.bincount(used).argmax()
        tokens, learned = row.tokens[inside], np.flatnonzero(row.weights[inside])
        asked = tokens[: learned[0]] if len(learned) and learned[0] > 1 else tokens[:length]
        if len(asked) > length:
            asked = np.concatenate([asked[: length > 1], asked[len(asked) - max(length - 1, 1) :]])
        prompts.append(tuple(asked.tolist()))
    return prompts

"""Acceptance length during training, measured by the loop that serves."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.core.types import Drafter, Params, Target
from jspec.engine.functional import SequenceParams, generate_sequences
from jspec.engine.plan import Plan
from jspec.sharding import mesh as mesh_lib
from training.data.loader import Rows
from training.trainer import gather
from training.util.errors import bad_option, check_least


@dataclasses.dataclass(frozen=True)
class AcceptanceSettings:
    """Measurement of acceptance on held-out text, at every evaluation."""

    num_speculative_tokens: int = 4  # K, drafted in a chain
    acceptance_prompts: int = 16  # number of prompts, from the held-out data (0: do not measure)
    prompt_tokens: int = 128  # maximum tokens of a prompt
    # maximum tokens generated for each prompt; the target may end a text earlier
    max_new_tokens: int = 128
    # one acceptance length each; that of the first decides which weights are best
    temperatures: tuple[float, ...] = (1.0, 0.0)

    def __post_init__(self):
        check_least(self, 1, "num_speculative_tokens", "prompt_tokens", "max_new_tokens")
        check_least(self, 0, "acceptance_prompts")
        wrong = [t for t in self.temperatures if not 0 <= t < float("inf")]
        if wrong or not self.temperatures:
            raise bad_option("temperatures", self.temperatures, "take one or more, 0 or higher")


def acceptance_meter(
    settings: AcceptanceSettings,
    target: Target,
    drafter: Drafter,
    rows: Rows,
    stop_token_ids: Sequence[int],
    mesh: Mesh | None = None,
) -> Callable[[Any, Any], dict[str, float]]:
    """Return a function from weights of target and drafter to acceptance lengths.

    The rule is ``rejection``. ``acceptance_length`` is that of the first temperature,
    ``acceptance_length_t0`` that of temperature 0, and so on: tokens over rounds of all texts,
    including the target's own token of each round, without tokens behind the end of a text.
    ``distinct_tokens`` and ``text_tokens`` are the mean numbers of different ids and of tokens in a
    text of the last temperature: a target that loops flatters every drafter.

    The held-out windows ``rows`` provide the prompts. ``stop_token_ids`` end a text, as when it is
    served. ``drafter`` drafts ``settings.num_speculative_tokens`` tokens. ``mesh`` has the devices
    of the target's weights; each of them gets the drafter. None for one device.
    """
    plan = Plan(target, drafter)
    room = target.max_positions - settings.max_new_tokens
    if room < 1:
        remedy = f"the target has {target.max_positions} positions, prompt included"
        raise bad_option("max_new_tokens", settings.max_new_tokens, remedy)
    prompts = held_out_prompts(rows, settings.acceptance_prompts, min(settings.prompt_tokens, room))
    # All temperatures in one batch: one program to compile, one loop to run.
    requests = [
        SequenceParams(
            prompt,
            max_tokens=settings.max_new_tokens,
            temperature=temperature,
            stream=index,
            stop_token_ids=tuple(stop_token_ids),
        )
        for temperature in settings.temperatures
        for index, prompt in enumerate(prompts)
    ]

    def measure(target_params: Any, drafter_params: Any) -> dict[str, float]:
        drafter_params = gather(drafter_params)
        if mesh is not None:
            drafter_params = jax.device_put(drafter_params, NamedSharding(mesh, PartitionSpec()))
        with mesh_lib.on(mesh):
            answers = generate_sequences(plan, Params(target_params, drafter_params), requests)
        lengths = {}
        for index, temperature in enumerate(settings.temperatures):
            group = answers[index * len(prompts) :][: len(prompts)]
            tokens = sum(len(answer.tokens) for answer in group)
            name = "acceptance_length" + (f"_t{temperature:g}" if index else "")
            lengths[name] = round(tokens / sum(answer.rounds for answer in group), 4)
        distinct = np.mean([len(set(answer.tokens.tolist())) for answer in group])
        return lengths | {
            "distinct_tokens": round(float(distinct), 1),
            "text_tokens": round(tokens / len(group), 1),
        }

    return measure


def held_out_prompts(rows: Rows, count: int, length: int) -> list[tuple[int, ...]]:
    """Return at most ``count`` prompts of at most ``length`` tokens, from windows spread evenly.

    Each prompt is from the longest document of its window: the tokens before its first label, if
    that comes after the second token (a conversation), else its first ``length`` tokens. A longer
    question keeps its first token, on which models rely, and its end, which opens the answer.
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

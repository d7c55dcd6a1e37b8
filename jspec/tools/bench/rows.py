"""The figures of one contender, as a row of the results."""

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

from jspec.tools.bench.contenders import Case, Ours, sum_of
from jspec.tools.bench.timing import Contender, ratios, spread


def row(
    case: Case, each: Contender, plain: Contender, questions: Mapping[str, int]
) -> dict[str, Any]:
    """Return the speeds of a contender; ``questions`` counts them by category."""
    categories = {}
    for name, count in questions.items():
        part, plain_part = (_part(contender, name) for contender in (each, plain))
        categories[name] = {
            "questions": count,
            "requests": len(part.samples[0].tokens),
            "tokens_per_second": part.median,
            "speedup": statistics.median(ratios(part, plain_part)),
        }
    return {
        "batch_size": case.batch_size,
        "temperature": case.temperature,
        "name": each.name,
        "tokens_per_second": spread(each.speeds),
        "speedup": spread(ratios(each, plain)),
        "categories": categories,
        "distinct_tokens": statistics.mean(len(set(text)) for text in each.samples[0].tokens),
        "seconds": [sample.seconds for sample in each.samples],
        "quiet_samples": each.num_quiet,
    }


def acceptance(run: Ours, categories: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the acceptance of a contender's last run; add that of each category."""
    for name, counts in run.counts.items():
        categories[name]["acceptance_length"] = counts.tokens_per_pass
    counts = sum_of(list(run.counts.values()))
    return {
        "acceptance_length": counts.tokens_per_pass,
        "mean_acceptance_length": counts.mean_acceptance_length,
        "acceptance_per_position": list(counts.acceptance_per_pos),
    }


def _part(each: Contender, category: str) -> Contender:
    return dataclasses.replace(each, samples=[sample.parts[category] for sample in each.samples])

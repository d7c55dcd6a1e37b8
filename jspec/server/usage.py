"""``usage``: the tokens of a request, and the counts of its drafts."""

from collections.abc import Iterable, Sequence
from typing import Any

from jspec.api.outputs import RequestOutput
from jspec.server.fields import StreamOptions

_SUMS = ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens")


def of(outputs: Iterable[RequestOutput], *, has_stats: bool) -> dict[str, Any]:
    """Return ``usage`` for the last outputs of the prompts; with ``has_stats`` drafts too."""
    outputs = list(outputs)
    prompt = sum(len(each.prompt_token_ids) for each in outputs)
    texts = [text for each in outputs for text in each.outputs]
    completion = sum(len(text.token_ids) for text in texts)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.num_cached_tokens for each in outputs)},
    }
    if has_stats:
        known = (text.speculative_decoding_stats for text in texts)
        usage["speculative_decoding_stats"] = joined([stats for stats in known if stats])
    return usage


def in_events(options: StreamOptions | None, *, is_forced: bool) -> tuple[bool, bool]:
    """Return whether a stream ends with its usage, and whether each event has it."""
    if is_forced or options is None:
        return is_forced, is_forced
    is_last = bool(options.include_usage)
    return is_last, is_last and bool(options.continuous_usage_stats)


def joined(all_stats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up the statistics of texts, of the form of ``metrics.request_stats``.

    >>> one = dict(num_spec_steps=2, num_accepted_draft_tokens=3, num_draft_tokens=4,
    ...            acceptance_histogram={"1": 1, "2": 1})
    >>> joined([one, one])["mean_acceptance_length"], joined([one])["acceptance_histogram"]
    (2.5, {'1': 1, '2': 1})
    """
    sums = {name: sum(stats[name] for stats in all_stats) for name in _SUMS}
    histogram: dict[str, int] = {}
    for stats in all_stats:
        for length, count in stats["acceptance_histogram"].items():
            histogram[length] = histogram.get(length, 0) + count
    accepted, drafts = sums["num_accepted_draft_tokens"], sums["num_spec_steps"]
    return {
        "mean_acceptance_length": 1 + accepted / drafts if drafts else 1.0,
        "draft_acceptance_rate": accepted / (sums["num_draft_tokens"] or 1),
        "acceptance_histogram": dict(sorted(histogram.items(), key=lambda item: int(item[0]))),
        **sums,
    }

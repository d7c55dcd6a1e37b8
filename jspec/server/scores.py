"""Log-probabilities in OpenAI's two forms."""

from collections.abc import Mapping, Sequence
from typing import Any

from jspec.api.outputs import Logprob

Scores = Sequence[Mapping[int, Logprob] | None]


class TokenNames:
    """Texts of tokens in answers: their own, or ``token_id:N`` where a request asks for ids."""

    def __init__(self, tokenizer: Any, as_ids: bool):
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def of(self, token: int, score: Logprob | None = None) -> str:
        """Return the text of a token."""
        if self._as_ids:
            return f"token_id:{token}"
        known = None if score is None else score.decoded_token
        return self._tokenizer.decode([token]) if known is None else known


def of_completion(
    tokens: Sequence[int], scores: Scores, names: TokenNames, offset: int
) -> dict[str, Any]:
    """Return ``logprobs`` of /v1/completions.

    Args:
      tokens: of the text.
      scores: of each token; None for the first token of a prompt.
      names: of tokens.
      offset: characters of the text before.
    """
    listed: dict[str, list] = {
        name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    for token, at_token in zip(tokens, scores, strict=True):
        score = None if at_token is None else at_token[token]
        name = names.of(token, score)
        listed["tokens"].append(name)
        listed["token_logprobs"].append(None if score is None else _finite(score.logprob))
        listed["top_logprobs"].append(None if at_token is None else _by_name(at_token, names))
        listed["text_offset"].append(offset)
        offset += len(name)
    return listed


def of_chat(
    tokens: Sequence[int], scores: Scores, names: TokenNames, count: int
) -> list[dict[str, Any]]:
    """Return ``logprobs.content`` of /v1/chat/completions.

    ``count`` is the number of likeliest tokens; others are as of ``of_completion``.
    """
    listed = []
    for token, at_token in zip(tokens, scores, strict=True):
        ranked = sorted(at_token.items(), key=lambda item: item[1].rank or 0)
        top = [_entry(other, score, names) for other, score in ranked[:count]]
        listed.append({**_entry(token, at_token[token], names), "top_logprobs": top})
    return listed


def of_prompt(scores: Scores) -> list[dict[str, Any] | None]:
    """Return ``prompt_logprobs``, as vLLM has it: by token id."""
    return [
        each
        and {
            str(token): {
                "logprob": _finite(score.logprob),
                "rank": score.rank,
                "decoded_token": score.decoded_token,
            }
            for token, score in each.items()
        }
        for each in scores
    ]


def _by_name(at_token: Mapping[int, Logprob], names: TokenNames) -> dict[str, float]:
    """Return scores by the texts of tokens. Of tokens with the same text, the first one counts."""
    listed: dict[str, float] = {}
    for token, score in at_token.items():
        listed.setdefault(names.of(token, score), _finite(score.logprob))
    return listed


def _entry(token: int, score: Logprob, names: TokenNames) -> dict[str, Any]:
    name = names.of(token, score)
    raw = list(name.encode("utf-8", "replace"))
    return {"token": name, "logprob": _finite(score.logprob), "bytes": raw}


def _finite(value: float) -> float:
    """Return a number that JSON has; vLLM's smallest one is -9999."""
    return max(value, -9999.0)

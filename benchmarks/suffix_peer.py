"""Suffix decoding here and in ArcticInference, which vLLM runs: what both draft of the same text.

    pip install arctic-inference==0.1.1
    python -m benchmarks.suffix_peer [--out benchmarks/results/suffix_peer.json]

Texts are given, as if a model had said them: in every round both propose, what agrees with the text
is accepted, and one token more is emitted. Both have the same settings and see the same requests,
one after the other. What differs: here, of more occurrences than 32 the latest count, and ties go
to what was seen last. ``ngram`` is measured beside them.
"""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from benchmarks import workload
from jspec.checkpoints import checkpoint
from jspec.core.types import History, Request
from jspec.drafters import NGram, Suffix
from jspec.drafters.suffix import corpus
from jspec.tools.bench import environment

_RESULTS = Path(__file__).with_name("results")
_DEMO = Path(__file__).parents[1] / "jspec" / "assets" / "demo" / "target"
_PROMPT, _RESPONSE, _REQUESTS, _CAPACITY = 256, 240, 24, 512


def requests(tokenizer) -> dict[str, list[tuple[list[int], list[int]]]]:
    """(prompt, response) token ids by workload, of source files of the standard library.

    "editing": the prompt once more with an identifier renamed, a line dropped and a line doubled.
    "similar": one piece of source, with other names and constants in every request; no prompt.
    "code": what comes next in the file.
    """
    rng = np.random.default_rng(0)
    pieces = workload.source_prompts(tokenizer, _REQUESTS, _PROMPT + _RESPONSE)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    texts = [tokenizer.decode(piece[:_PROMPT]) for piece in pieces]
    found = {"editing": [], "similar": [], "code": []}
    for index, (piece, text) in enumerate(zip(pieces, texts, strict=True)):
        similar = workload.edited(texts[index % 3], rng, index)
        found["editing"].append(
            (piece[:_PROMPT], encode(workload.edited(text, rng, index))[:_RESPONSE])
        )
        found["similar"].append((encode(f"# {index}\n"), encode(similar)[:_RESPONSE]))
        found["code"].append((piece[:_PROMPT], piece[_PROMPT:]))
    return found


@functools.partial(jax.jit, static_argnums=0)
def _propose(drafter, shared, memory, history: History):
    draft, memory = drafter.propose(None, None, shared, memory, history)
    return (
        draft.tokens[0],
        jnp.broadcast_to(draft.parents, draft.tokens.shape)[0],
        draft.valid[0],
        memory,
    )


class Ours:
    """A drafter of jspec's, one request at a time."""

    def __init__(self, drafter):
        self._drafter = drafter
        self._shared = drafter.init_shared() if isinstance(drafter, Suffix) else ()

    def start(self, prompt: list[int]) -> None:
        """A new request."""
        one = jnp.zeros((1,), jnp.int32)
        request = Request(keys=None, sampling=None, stop_tokens=None, max_length=one)
        self._memory = self._drafter.init(None, request, _CAPACITY)
        if isinstance(self._drafter, Suffix):
            self._memory = self._memory.replace(start=one + len(prompt))

    def propose(self, text: list[int]) -> tuple[list[int], list[int]]:
        """Drafted tokens and their parents; 0 is the root."""
        row = np.zeros((1, _CAPACITY), np.int32)
        row[0, : len(text)] = text
        history = History(row, np.array([len(text)], np.int32))
        *draft, self._memory = _propose(self._drafter, self._shared, self._memory, history)
        tokens, parents, valid = map(np.asarray, draft)
        count = int(valid.sum())  # those that exist come first
        return tokens[1:count].tolist(), parents[1:count].tolist()

    def emitted(self, tokens: list[int]) -> None:
        """What a round has added."""

    def stop(self, response: list[int]) -> None:
        """The request has ended."""
        if self._shared != ():
            self._shared = corpus.extend(self._shared, [response])


class Arctic:
    """ArcticInference's cache."""

    def __init__(self, drafter: Suffix):
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._settings = dict(
            max_spec_tokens=drafter.rule.max_tokens,
            max_spec_factor=drafter.suffix_decoding_max_spec_factor,
            min_token_prob=drafter.suffix_decoding_min_token_prob,
            use_tree_spec=drafter.rule.branching,
        )
        self._cache = SuffixDecodingCache(
            drafter.suffix_decoding_max_tree_depth, drafter.suffix_decoding_max_cached_requests
        )
        self._request = -1

    def start(self, prompt: list[int]) -> None:
        """A new request."""
        self._request += 1
        self._cache.start_request(self._request, prompt)

    def propose(self, text: list[int]) -> tuple[list[int], list[int]]:
        """Drafted tokens and their parents; 0 is the root."""
        draft = self._cache.speculate(self._request, text, **self._settings)
        return list(draft.token_ids), [parent + 1 for parent in draft.parents]

    def emitted(self, tokens: list[int]) -> None:
        """What a round has added."""
        self._cache.add_active_response(self._request, tokens)

    def stop(self, response: list[int]) -> None:
        """The request has ended."""
        self._cache.stop_request(self._request)


def replay(proposer: Ours | Arctic, asked: list[tuple[list[int], list[int]]]) -> dict:
    """Rounds, drafted tokens and acceptance length over all requests."""
    emitted = rounds = drafted = 0
    for prompt, response in asked:
        proposer.start(prompt)
        done = 0
        while done < len(response):
            tokens, parents = proposer.propose(prompt + response[:done])
            node, count = 0, 0
            for token in response[done:-1]:
                family = [i for i, parent in enumerate(parents) if parent == node]
                node = next((i + 1 for i in family if tokens[i] == token), None)
                if node is None:
                    break
                count += 1
            proposer.emitted(response[done : done + count + 1])
            done, rounds, drafted = done + count + 1, rounds + 1, drafted + len(tokens)
        proposer.stop(response)
        emitted += len(response)
    return {
        "acceptance_length": round(emitted / rounds, 3),
        "rounds": rounds,
        "drafted_per_round": round(drafted / rounds, 3),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="acceptance beside ArcticInference")
    parser.add_argument("--out", type=Path, default=_RESULTS / "suffix_peer.json")
    arguments = parser.parse_args()
    settings = {
        "chain": {},
        "tree": dict(tree="best_first", tree_size=16),
        "eager chain": dict(
            num_speculative_tokens=16,
            suffix_decoding_max_spec_factor=4.0,
            suffix_decoding_max_tree_depth=64,
        ),
    }
    rows = []
    for name, asked in requests(checkpoint.load_tokenizer(_DEMO)).items():
        contenders = {"ngram 2-5, K=12": Ours(NGram(12, 2, 5)), "ngram 5-5, K=12": Ours(NGram(12))}
        for kind, given in settings.items():
            contenders[f"suffix {kind}"] = Ours(Suffix(**given))
            contenders[f"arctic {kind}"] = Arctic(Suffix(**given))
        for contender, proposer in contenders.items():
            rows.append({"workload": name, "method": contender} | replay(proposer, asked))
            Console().print(rows[-1])
    arguments.out.write_text(json.dumps(environment.describe() | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

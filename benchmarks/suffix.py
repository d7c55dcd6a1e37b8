"""What a proposal of suffix decoding costs, by the size of the corpus of past responses.

    python -m benchmarks.suffix [--out benchmarks/results/suffix.json]

Rows of 512 tokens, made of phrases as the responses are, so that matches abound. Measured inside
one program, in turns, on every size of corpus: ::

    own         a proposal from the row's own text alone
    proposal    the same, with past responses looked up in the index that is shipped
    compared    the match length at every place of the corpus, by comparing all of it: the first
                part of a look-up without an index, which would still have to choose places
    indexed     the whole look-up by the index
    store       storing one response of 256 tokens
"""

import argparse
import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jspec.core.types import History
from jspec.drafters.suffix import corpus as suffix_corpus
from jspec.drafters.suffix.drafter import Suffix, SuffixMemory
from jspec.tools.bench import environment

_RESULTS = Path(__file__).with_name("results")
_VOCAB, _ROW, _RESPONSE, _TURNS, _NEW = 32000, 512, 256, 16, 4


def texts(count: int, size: int, seed: int) -> np.ndarray:
    """Token ids [count, size]: phrases of 4 to 32 tokens, few of them frequent."""
    words = np.random.default_rng(0)  # the phrases are the same for every seed
    phrases = [words.integers(0, _VOCAB, words.integers(4, 33)) for _ in range(4000)]
    rng = np.random.default_rng(seed)
    ranks = np.minimum(rng.zipf(1.2, count * size // 12 + 64), len(phrases)) - 1
    flat = np.concatenate([phrases[rank] for rank in ranks])
    return np.resize(flat, (count, size)).astype(np.int32)


def filled(drafter: Suffix, size: int) -> suffix_corpus.Corpus:
    """A corpus of ``size`` tokens."""
    corpus, part = drafter.init_shared(), min(size // 4, 1 << 16)
    return suffix_corpus.extend(corpus, list(texts(size // part, part - 1, 1)))


def matched(tokens: jax.Array, last: jax.Array) -> jax.Array:
    """How many of ``last`` [n] stand before each place of ``tokens`` [C], all being compared."""
    size, count = tokens.shape[0], last.shape[0]
    padded = jnp.pad(tokens, (count, 0), constant_values=suffix_corpus.END)
    found, unbroken = jnp.zeros(size, jnp.int32), jnp.ones(size, bool)
    for back in range(1, count + 1):
        unbroken &= jax.lax.dynamic_slice(padded, (count - back,), (size,)) == last[back - 1]
        found += unbroken
    return found


def looped(work):
    """A program that does ``work`` on one round after the other and adds up what it finds."""

    @jax.jit
    def run(rounds: tuple[History, SuffixMemory], given) -> jax.Array:
        def turn(total: jax.Array, one):
            leaves = jax.tree.leaves(work(*one, given))
            return total + sum(leaf.sum(dtype=jnp.float32) for leaf in leaves), ()

        return jax.lax.scan(turn, jnp.float32(0), rounds)[0]

    return run


def rounds_of(drafter: Suffix, batch: int) -> tuple[History, SuffixMemory]:
    """Histories of which all but the last tokens are in the index, one a turn."""
    rows = jnp.array(texts(_TURNS * batch, _ROW, 2).reshape(_TURNS, batch, _ROW))
    lengths = jnp.full((_TURNS, batch), _ROW - 32)
    one = suffix_corpus.no_texts(batch, _ROW, drafter.rule.groups)
    own = jax.tree.map(lambda x: jnp.broadcast_to(x, (_TURNS, *x.shape)), one)
    own = jax.jit(jax.vmap(suffix_corpus.index_history))(own, History(rows, lengths - _NEW))
    return History(rows, lengths), SuffixMemory(own, lengths, lengths > 0)


def contenders(drafter: Suffix, corpus: suffix_corpus.Corpus) -> dict:
    """Functions of the rounds, each of which does one of the things measured."""
    rule, wanted = drafter.rule, drafter.suffix_decoding_max_occurrences
    last = functools.partial(suffix_corpus.last_tokens, count=rule.longest_match)

    def propose(history, memory, shared):
        draft, memory = drafter.propose(None, None, shared, memory, history)
        return draft.tokens, draft.valid, memory

    compare = lambda history, _, text: jax.vmap(matched, (None, 0))(text, last(history)).max(1)
    look_up = lambda history, _, shared: suffix_corpus.in_corpus(
        shared, last(history), wanted, rule.depth
    )
    bind = lambda run, given: lambda rounds: run(rounds, given)
    return {
        "own": bind(looped(propose), ()),
        "proposal": bind(looped(propose), corpus),
        "compared": bind(looped(compare), corpus.tokens),
        "indexed": bind(looped(look_up), corpus),
    }


@functools.partial(jax.jit, donate_argnums=0)
def _store(corpus: suffix_corpus.Corpus, rows: jax.Array) -> suffix_corpus.Corpus:
    def turn(corpus, tokens):
        history = History(tokens, jnp.full(tokens.shape[:1], _RESPONSE))
        zero = jnp.zeros_like(history.length)
        return suffix_corpus.store(corpus, history, zero, zero == 0), ()

    return jax.lax.scan(turn, corpus, rows)[0]


def measure(size: int, batch: int, repeats: int) -> dict:
    """Milliseconds of everything, best of ``repeats``."""
    drafter = Suffix(suffix_decoding_max_cached_tokens=size)
    corpus = filled(drafter, size)
    rounds = rounds_of(drafter, batch)
    runs = contenders(drafter, corpus)
    best = dict.fromkeys((*runs, "store"), float("inf"))
    spare = jax.tree.map(jnp.copy, corpus)
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(rounds))
            seconds = (time.perf_counter() - begin) / _TURNS
            best[name] = min(best[name], seconds) if repeat else best[name]  # the first compiles
        begin = time.perf_counter()
        spare = jax.block_until_ready(_store(spare, rounds[0].tokens[:, :1]))
        seconds = (time.perf_counter() - begin) / _TURNS
        best["store"] = min(best["store"], seconds) if repeat else best["store"]
    milliseconds = {name: round(1e3 * seconds, 4) for name, seconds in best.items()}
    size_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(corpus))
    return {
        "corpus_tokens": size,
        "batch": batch,
        "corpus_bytes": size_bytes,
        "milliseconds": milliseconds,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="cost of a proposal of suffix decoding")
    parser.add_argument("--out", type=Path, default=_RESULTS / "suffix.json")
    parser.add_argument("--sizes", type=int, nargs="+", default=(10**4, 10**5, 10**6, 10**7))
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--note", default="", help="kept with the results")
    arguments = parser.parse_args()
    rows = []
    for size in arguments.sizes:
        for batch in arguments.batches:
            rows.append(measure(size, batch, arguments.repeats))
            Console().print(rows[-1])
    found = environment.describe() | {"note": arguments.note, "rows": rows}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

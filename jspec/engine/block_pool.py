"""The pages of KV caches, on the host: those of all kinds of layers, and the prefix cache.

A page holds the keys and values of ``size`` consecutive tokens, in the layers of one kind of the
caches of target and drafter. A full page is cached by a digest of all text that its entries depend
on: up to its end, and for some drafters the token after it. A sequence that begins with cached
pages shares them. A free page stays cached until it is allocated again; the page freed first goes
first.

A sequence begins behind a prefix if every kind has the pages that its first query sees there.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from jspec.engine.block_kind import BlockKind


class BlockPool:
    """The pages of all kinds of layers.

    Args:
      kinds: pages by kind, of one size; layers without a window come first.
      lookahead: tokens after a page that its entries depend on; None if no prefix can be shared.
      shares_prefixes: whether sequences that begin alike share pages.
    """

    def __init__(
        self,
        kinds: Sequence[BlockKind],
        *,
        lookahead: int | None = 0,
        shares_prefixes: bool = True,
    ):
        self.kinds, self.size = tuple(kinds), kinds[0].size
        self.shares_prefixes = shares_prefixes and lookahead is not None
        self.queries = self.hits = 0  # tokens of prompts, and those of them that pages held
        self._lookahead = lookahead or 0

    @property
    def num_free(self) -> int:
        """Pages that may be allocated."""
        return sum(kind.num_free for kind in self.kinds)

    @property
    def num_used(self) -> int:
        """Pages of sequences."""
        return sum(kind.num_used for kind in self.kinds)

    @property
    def usage(self) -> float:
        """The share of the pages of a kind that there may be that sequences have, at most."""
        return max(kind.num_used / max(kind.most - 1, 1) for kind in self.kinds)

    @property
    def most_tokens(self) -> int:
        """The tokens that all pages suffice for."""
        return (self.kinds[0].most - 1) * self.size

    def pages_of(self, num_tokens: int) -> int:
        """Return the number of pages for ``num_tokens`` tokens."""
        return self.kinds[0].pages_of(num_tokens)

    def check_fit(self, num_tokens: int) -> None:
        """Refuse a text that would need more pages than there can be."""
        for kind in self.kinds:
            needed, most = kind.most_held(num_tokens), kind.most - 1
            if needed > most:
                raise ValueError(
                    f"prompt and max_tokens are {num_tokens} tokens together, which need {needed} "
                    f"pages of {self.size}, but the KV cache has at most {most}; shorten one of "
                    "them, or give the cache more memory."
                )

    # --------------------------------------------------------------------------- the prefix cache

    def num_cached(self, digests: Sequence[bytes]) -> int:
        """Return the pages of the longest prefix of ``digests`` that a sequence begins behind."""
        first, *others = (kind.prefixes(digests) for kind in self.kinds)
        return max(set(first).intersection(*others), default=0)

    def clear_cache(self) -> None:
        """Cache no page any more; sequences keep theirs."""
        for kind in self.kinds:
            kind.clear_cache()

    def most_shared(self, num_tokens: int) -> int:
        """Return the number of pages that a text may share.

        At least one token is left for the prefill, since some drafters start from its features.
        """
        return max(num_tokens - 2, 0) // self.size

    def add_digests(self, digests: list[bytes], text: np.ndarray, salt: str) -> None:
        """Add those of the new full pages of a text [n] to the ``digests`` of a prefix.

        A digest stands for the salt, all tokens up to the end of the page, and ``lookahead`` tokens
        after it, on which the entries of its last tokens depend.
        """
        last = digests[-1] if digests else hashlib.blake2b(salt.encode(), digest_size=16).digest()
        for page in range(len(digests), max(len(text) - self._lookahead, 0) // self.size):
            tokens = text[page * self.size : (page + 1) * self.size + self._lookahead]
            tokens = np.asarray(tokens, "<i4").tobytes()
            last = hashlib.blake2b(last + tokens, digest_size=16).digest()
            digests.append(last)

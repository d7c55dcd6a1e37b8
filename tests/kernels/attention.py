"""Random cases of tree attention, contiguous and in pages."""

import jax.numpy as jnp
import numpy as np

from jspec.core import trees
from jspec.core.narrow import LANES, Narrow


def random_case(
    heads,
    kv_heads,
    dim,
    nodes,
    keys,
    slots,
    lengths,
    *,
    dtype=np.float32,
    window=None,
    has_sinks=False,
    seed=0,
):
    """Return the arguments of ``ops.attention`` in order, as NumPy arrays, and its options.

    Every node sees at least one key. Slots past a length hold values that would spoil any result.
    """
    rng = np.random.default_rng(seed)
    batch = len(lengths)
    array = lambda *shape: rng.standard_normal(shape).astype(dtype)
    mask = rng.random((batch, nodes, keys)) < 0.4
    mask[:, np.arange(nodes), np.arange(nodes) % keys] = True
    length = np.array(lengths, np.int32)
    case = dict(
        q=array(batch, heads, nodes, dim),
        tree_k=array(batch, kv_heads, keys, dim),
        tree_v=array(batch, kv_heads, keys, dim),
        ancestors=trees.pack_bits(mask),
        cache_k=array(batch, kv_heads, slots, dim),
        cache_v=array(batch, kv_heads, slots, dim),
        length=length,
    )
    for row, stored in enumerate(length):
        case["cache_k"][row, :, stored:] = case["cache_v"][row, :, stored:] = 50.0
    options = {}
    if has_sinks:  # some heads attend to the sink alone, some hardly
        options["sinks"] = np.linspace(-9, 9, heads, dtype=np.float32)
    if window is not None:
        depth = np.arange(nodes, dtype=np.int32) // 2  # several nodes at one position, as in a tree
        options |= dict(window=window, positions=length[:, None] + depth)
    return case, options


def in_pages(case, page, *, seed=0):
    """Return a case whose cache is in pages, scattered over a pool, and the table of pages.

    Page 0 and the ends of last pages hold values that would spoil any result.
    """
    batch, heads, slots, dim = case["cache_k"].shape
    most = -(-slots // page)
    table = 1 + np.random.default_rng(seed).permutation(batch * most + 3)[: batch * most]
    table = table.reshape(batch, most).astype(np.int32)
    paged = dict(case)
    for name in ("cache_k", "cache_v"):
        pool = np.full((batch * most + 4, heads, page, dim), 50.0, case[name].dtype)
        padding = ((0, 0), (0, 0), (0, most * page - slots), (0, 0))
        padded = np.pad(case[name], padding, constant_values=50.0)
        split = padded.reshape(batch, heads, most, page, dim)
        pool[table] = split.swapaxes(1, 2)
        paged[name] = pool
    for row, length in enumerate(case["length"]):
        table[row, -(-int(length) // page) :] = 0  # as the engine leaves it
    return paged, table


def in_8_bits(case, name, dtype):
    """Return a case whose cache has a format of ``core.narrow``, for numbers of ``dtype``."""
    has_pages = len(case["cache_k"]) != len(case["q"])

    def stored(x):
        nodes = Narrow.of(jnp.asarray(x), name, jnp.dtype(dtype))
        if nodes.scales is None:
            return nodes
        unused = -x.shape[2] % LANES if has_pages else 0
        rows = jnp.pad(nodes.scales.swapaxes(2, 3), [*[(0, 0)] * 3, (0, unused)])
        return nodes.replace(scales=rows)

    return case | {x: stored(case[x]) for x in ("cache_k", "cache_v")}

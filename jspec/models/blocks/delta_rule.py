"""The gated delta rule as a mixer (Gated DeltaNet, arXiv 2412.06464), of Qwen3-Next and Qwen3.5.

Queries, keys and values go through a short causal convolution; ``delta_state`` has the recurrence.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jspec.core.types import Array, Tree
from jspec.models.blocks import delta_state
from jspec.models.blocks.arithmetic import Linear, normal, over_listed, rows_at
from jspec.models.blocks.block import Mixer, Pass
from jspec.models.blocks.delta_state import DeltaNodes, DeltaState
from jspec.models.blocks.norms import RmsNorm
from jspec.models.blocks.tensors import Tensor, matrix, vector

_EPS = 1e-6  # It keeps the lengths of queries and keys above 0.


@dataclasses.dataclass(frozen=True)
class DeltaRule(Mixer):
    """A gated delta rule; static and hashable."""

    num_heads: int  # H, of values
    num_kv_heads: int  # Hk, of keys and queries; each serves H / Hk heads of values
    key_dim: int  # Dk
    head_dim: int  # Dv, of a value
    kernel_size: int = 4  # W, inputs that the convolution sees
    by_key_heads: bool = False  # Columns are ordered by key head, as in files of Qwen3-Next.
    norm: RmsNorm = RmsNorm()  # noqa: RUF009 (frozen); of the outputs of a head
    column_parts: int = 1  # Each part of the columns has heads of queries, keys and values.

    title = "the gated delta rule"
    window = None

    @property
    def sections(self) -> tuple[int, int, int, int]:
        """Columns of queries, keys, values and output gates."""
        keys, values = self.num_kv_heads * self.key_dim, self.num_heads * self.head_dim
        return keys, keys, values, values

    def init(
        self,
        keys: Array,
        hidden: int,
        dtype: jnp.dtype,
        shrink: float = 1.0,
        inputs: int | None = None,
    ) -> "DeltaRuleParams":
        """See ``Mixer``."""
        heads, channels = self.num_heads, sum(self.sections[:3])
        parts = jax.random.split(keys[0], 3)
        return DeltaRuleParams(
            qkvz=normal(parts[0], (inputs or hidden, sum(self.sections)), dtype),
            rates=normal(parts[1], (inputs or hidden, 2 * heads), dtype),
            kernel=normal(parts[2], (channels, 1, self.kernel_size), dtype),
            decay=jnp.zeros((heads,), jnp.float32),
            decay_bias=jnp.ones((heads,), jnp.float32),
            norm=jnp.ones((self.head_dim,), dtype),
            output=normal(keys[1], (heads * self.head_dim, hidden), dtype, shrink),
        )

    def tensors(self, hidden: int, inputs: int | None = None) -> tuple[Tensor, ...]:
        """See ``Mixer``."""
        inputs, sections, heads = inputs or hidden, self.sections, self.num_heads
        names, rates, each = ("qkv", "z"), ("b", "a"), (heads, heads)
        sizes, split = (sum(sections[:3]), sections[3]), {"sections": sections}
        if self.by_key_heads:
            names, rates, each = ("qkvz",), ("ba",), (2 * heads,)
            sizes, split = (sum(sections),), {}
        names, rates = ([f"linear_attn.in_proj_{x}" for x in part] for part in (names, rates))
        divided = {"divided": "outputs"}
        wide = heads * self.head_dim
        return (
            vector("decay_bias", ("linear_attn",), (heads,), "dt_bias", float32=True, **divided),
            vector("decay", ("linear_attn",), (heads,), "A_log", float32=True, **divided),
            Tensor(
                ("kernel",),
                ("linear_attn.conv1d.weight",),
                ((sum(sections[:3]), 1, self.kernel_size),),
                sections=sections[:3],
                **divided,
            ),
            matrix("qkvz", names, sizes, inputs, by_linear=True, **divided, **split),
            matrix("rates", rates, each, inputs, **divided),
            vector("norm", ("linear_attn.norm",), (self.head_dim,)),
            matrix(
                "output",
                ("linear_attn.out_proj",),
                (hidden,),
                wide,
                by_linear=True,
                divided="inputs",
            ),
        )

    def divides(self, ways: int) -> bool:
        """See ``Mixer``."""
        return self.num_kv_heads % ways == 0

    def split(self, ways: int) -> "DeltaRule":
        """See ``Mixer``."""
        return dataclasses.replace(self, column_parts=ways)

    def entry(self, batch: int, capacity: int, dtype: jnp.dtype) -> DeltaState:
        """See ``Mixer``; the state has no slots, and is float32."""
        return DeltaState.empty(
            batch,
            self.num_heads,
            self.num_kv_heads,
            self.key_dim,
            self.head_dim,
            self.kernel_size,
            is_divided=self.column_parts > 1,
        )

    def mix(
        self,
        params: "DeltaRuleParams",
        x: Array,
        run: Pass,
        index: int,
        rows: Array | None = None,
    ) -> Array:
        """See ``Mixer``."""

        def project(x: Array) -> tuple[Array, Array]:
            return run.linear(x, params.qkvz), run.linear(x, params.rates)

        columns, rates = over_listed(run.packing, params.qkvz, project, x)
        inputs, gates = self._apart(columns.astype(jnp.float32))
        rates, decays = self._rates(params, rates.astype(jnp.float32))

        def visit(entry: DeltaState, tree: Tree) -> tuple[Array, DeltaNodes]:
            """Return the outputs [B, N, H, Dv] of the nodes, and their values."""
            mine = (inputs, rates, decays)
            if run.packing is not None:
                mine = (run.packing.by_nodes(part) for part in mine)
            return self._visit(params, entry, tree, *(part.swapaxes(1, 2) for part in mine))

        mixed = run.recur(index, visit)
        if run.packing is not None:
            mixed = run.packing.pack(mixed)
        mixed, gates = rows_at(mixed, rows), rows_at(gates, rows)
        mixed = self.norm(mixed, params.norm).astype(jnp.float32) * jax.nn.silu(gates)
        return mixed.reshape(*mixed.shape[:2], -1)

    def output(self, params: "DeltaRuleParams", mixed: Array, linear: Linear) -> Array:
        """See ``Mixer``."""
        return linear(mixed, params.output)

    def _visit(
        self,
        params: "DeltaRuleParams",
        entry: DeltaState,
        tree: Tree,
        inputs: Array,
        rates: Array,
        decays: Array,
    ) -> tuple[Array, DeltaNodes]:
        """Return the outputs [B, N, H, Dv] of inputs [B, Hk, N, F] of the nodes, and their values.

        ``rates`` and ``decays`` are [B, H, N].
        """
        batch, groups, count, _ = inputs.shape
        seen = jax.nn.silu(delta_state.convolved(inputs, entry.inputs, self._kernel(params), tree))
        queries, keys, values = jnp.split(seen, [self.key_dim, 2 * self.key_dim], -1)
        values = values.reshape(batch, groups, count, -1, self.head_dim).swapaxes(2, 3)
        values = values.reshape(batch, self.num_heads, count, self.head_dim)
        keys = _unit(keys)
        mixed, updates = delta_state.outputs(
            entry,
            queries=_unit(queries) * self.key_dim**-0.5,
            keys=keys,
            values=values,
            decays=decays,
            rates=rates,
            tree=tree,
        )
        return mixed.swapaxes(1, 2), DeltaNodes(inputs, keys, updates, decays)

    def _apart(self, columns: Array) -> tuple[Array, Array]:
        """Return inputs of the convolution [B, T, Hk, F] and gates [B, T, H, Dv] of columns."""
        lead, groups = columns.shape[:2], self.num_kv_heads
        if self.by_key_heads:
            width = sum(self.sections[:3]) // groups
            inputs, gates = jnp.split(columns.reshape(*lead, groups, -1), [width], -1)
        else:
            *apart, gates = self._by_sections(columns, self.sections)
            inputs = jnp.concatenate(apart, -1)
        return inputs, gates.reshape(*lead, self.num_heads, self.head_dim)

    def _by_sections(self, columns: Array, sections: tuple[int, ...]) -> list[Array]:
        """Return arrays [..., Hk, size] of columns [..., C] that are in ``column_parts``."""
        lead, parts, groups = columns.shape[:-1], self.column_parts, self.num_kv_heads
        columns = columns.reshape(*lead, parts, -1)
        ends = [sum(sections[: index + 1]) // parts for index in range(len(sections) - 1)]
        return [part.reshape(*lead, groups, -1) for part in jnp.split(columns, ends, -1)]

    def _rates(self, params: "DeltaRuleParams", columns: Array) -> tuple[Array, Array]:
        """Return b and g [B, T, H] of columns [B, T, 2 H]."""
        lead, parts = columns.shape[:2], self.column_parts
        if self.by_key_heads:
            parts = self.num_kv_heads
        rates, decays = jnp.split(columns.reshape(*lead, parts, -1), 2, -1)
        rates, decays = (x.reshape(*lead, self.num_heads) for x in (rates, decays))
        decays = -jnp.exp(params.decay) * jax.nn.softplus(decays + params.decay_bias)
        return jax.nn.sigmoid(rates), decays

    def _kernel(self, params: "DeltaRuleParams") -> Array:
        """Return the kernel [Hk, W, F] of the convolution."""
        rows = params.kernel.astype(jnp.float32)[:, 0].T
        return jnp.concatenate(self._by_sections(rows, self.sections[:3]), -1).swapaxes(0, 1)


@struct.dataclass
class DeltaRuleParams:
    """Weights of a gated delta rule; F features are those of a key head and of its values."""

    qkvz: Array  # [D, 2 Hk Dk + 2 H Dv]; z are the gates of the outputs
    rates: Array  # [D, 2 H], of rates and decays
    kernel: Array  # [2 Hk Dk + H Dv, 1, W]
    decay: Array  # [H] float32, logarithm of the slope of a decay
    decay_bias: Array  # [H] float32
    norm: Array  # [Dv]
    output: Array  # [H * Dv, D]


def _unit(x: Array) -> Array:
    """Return x divided by its length over the last axis."""
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + _EPS)

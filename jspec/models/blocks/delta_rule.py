"""The gated delta rule as a mixer (Gated DeltaNet, arXiv 2412.06464), of Qwen3-Next and Qwen3.5.

Queries, keys and values go through a short causal convolution; ``delta_state`` has the recurrence.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec.core.types import Array, Tree
from jspec.models.blocks import delta_state
from jspec.models.blocks.arithmetic import Linear, normal, over_listed, rows_at
from jspec.models.blocks.block import Mixer, Pass
from jspec.models.blocks.delta_state import DeltaNodes, DeltaState
from jspec.models.blocks.norms import RmsNorm
from jspec.models.blocks.recur import Earlier
from jspec.models.blocks.tensors import Tensor, matrix, vector

_FORGOTTEN = -1e4  # logarithm of a decay that leaves nothing of a state; its exponential is 0
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
    rope = None

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
        parts, size = self.column_parts, (self.head_dim, self.key_dim)
        channels = sum(self.sections[:3]) // parts
        return DeltaState(
            state=jnp.zeros((batch, self.num_heads, *size), jnp.float32),
            inputs=jnp.zeros((batch, parts, self.kernel_size - 1, channels), jnp.float32),
            num_keys=self.num_kv_heads,
            is_divided=parts > 1,
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

        def visit(
            entry: DeltaState,
            tree: Tree,
            earlier: Earlier | None = None,
            starts: Array | None = None,
        ) -> tuple[Array, DeltaNodes]:
            """Return the outputs [B, N, H, Dv] of the nodes, and their values."""
            mine = (inputs, rates, decays)
            if run.packing is not None:
                mine = (run.packing.by_nodes(part) for part in mine)
            columns = (part.swapaxes(1, 2) for part in mine)
            return self._visit(params, entry, tree, earlier, starts, *columns)

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
        earlier: Earlier | None,
        starts: Array | None,
        inputs: Array,
        rates: Array,
        decays: Array,
    ) -> tuple[Array, DeltaNodes]:
        """Return the outputs [B, N, H, Dv] of inputs [B, P, N, C] of the nodes, and their values.

        ``rates`` and ``decays`` are [B, H, N].
        """
        kernel = self._kernel(params)
        seen = delta_state.convolved(
            inputs, entry.inputs, kernel=kernel, tree=tree, earlier=earlier, starts=starts
        )
        seen = jax.nn.silu(seen)
        if starts is not None:
            decays = jnp.where(starts[:, None], _FORGOTTEN, decays)
        pairs, values = self._heads(seen)
        pairs = pairs * jax.lax.rsqrt((pairs * pairs).sum(-1, keepdims=True) + _EPS)
        keys = pairs[..., 1, :]
        mixed, updates = delta_state.outputs(
            entry,
            pairs=pairs * np.array([[self.key_dim**-0.5], [1]], np.float32),
            values=values,
            decays=decays,
            rates=rates,
            tree=tree,
            earlier=earlier,
        )
        return mixed.swapaxes(1, 2), DeltaNodes(inputs, keys, updates, decays)

    def _apart(self, columns: Array) -> tuple[Array, Array]:
        """Return inputs of the convolution [B, T, P, C] and gates [B, T, H, Dv] of columns.

        No head is copied: XLA for GPU fails to compile a join of slices that a product reads.
        """
        lead, parts = columns.shape[:2], self.column_parts
        units = self.num_kv_heads if self.by_key_heads else parts
        columns = columns.reshape(*lead, units, -1)
        width = sum(self.sections[:3]) // units
        inputs, gates = columns[..., :width], columns[..., width:]
        return inputs.reshape(*lead, parts, -1), gates.reshape(*lead, self.num_heads, self.head_dim)

    def _heads(self, seen: Array) -> tuple[Array, Array]:
        """Return pairs [B, Hk, N, 2, Dk] and values [B, H, N, Dv] of channels [B, P, N, C]."""
        batch, parts, count, _ = seen.shape
        groups, width = self.num_kv_heads // parts, 2 * self.key_dim
        if self.by_key_heads:
            seen = seen.reshape(batch, parts, count, groups, -1)
            pairs, values = seen[..., :width], seen[..., width:]
            pairs = pairs.reshape(batch, parts, count, groups, 2, -1)
        else:
            pairs, values = seen[..., : groups * width], seen[..., groups * width :]
            pairs = pairs.reshape(batch, parts, count, 2, groups, -1).swapaxes(3, 4)
        pairs = pairs.swapaxes(2, 3).reshape(batch, -1, count, 2, self.key_dim)
        values = values.reshape(batch, parts, count, -1, self.head_dim).swapaxes(2, 3)
        return pairs, values.reshape(batch, self.num_heads, count, -1)

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
        """Return the kernel [P, W, C] of the convolution, in the order of the columns."""
        parts, kernel = self.column_parts, params.kernel.astype(jnp.float32)[:, 0]
        kernel = kernel.reshape(parts, -1, self.kernel_size)
        if self.by_key_heads:
            ends = np.cumsum(self.sections[:2]) // parts
            sections = jnp.split(kernel, ends, 1)
            heads = (parts, self.num_kv_heads // parts, -1, self.kernel_size)
            kernel = jnp.concatenate([part.reshape(heads) for part in sections], 2)
        return kernel.reshape(parts, -1, self.kernel_size).swapaxes(1, 2)


@struct.dataclass
class DeltaRuleParams:
    """Weights of a gated delta rule."""

    qkvz: Array  # [D, 2 Hk Dk + 2 H Dv]; z are the gates of the outputs
    rates: Array  # [D, 2 H], of rates and decays
    kernel: Array  # [2 Hk Dk + H Dv, 1, W]
    decay: Array  # [H] float32, logarithm of the slope of a decay
    decay_bias: Array  # [H] float32
    norm: Array  # [Dv]
    output: Array  # [H * Dv, D]

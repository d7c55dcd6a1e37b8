"""Train a small Flax NNX model on a nursery rhyme, then decode it speculatively."""

import jax
import jax.numpy as jnp
from flax import nnx

import jspec

PARTS = "the malt that lay in ", "the rat that ate ", "the cat that killed ", "the dog that bit "
RHYME = "".join(f"This is {''.join(PARTS[:n][::-1])}the house that Jack built.\n" for n in range(5))
TEXT = jnp.array([list(RHYME.encode())])
POSITIONS, WIDTH, HEADS, LAYERS = 512, 64, 4, 2


def causal(_, q, k, v):
    """Attend causally, for training. For decoding, jspec passes attention over cache and tree."""
    scores = jnp.where(jnp.tri(q.shape[2], dtype=bool), q @ k.mT * q.shape[3] ** -0.5, -jnp.inf)
    return jax.nn.softmax(scores) @ v


class Model(nnx.Module):
    """A transformer that takes its attention as an argument."""

    def __init__(self, rngs):
        linear = lambda *sizes: nnx.Linear(*sizes, rngs=rngs)
        layers = lambda *sizes: nnx.List([linear(*sizes) for _ in range(LAYERS)])
        self.tokens, self.positions = (nnx.Embed(n, WIDTH, rngs=rngs) for n in (128, POSITIONS))
        self.mixes, self.ups = layers(WIDTH, 3 * WIDTH), layers(WIDTH, 4 * WIDTH)
        self.downs, self.head = layers(4 * WIDTH, WIDTH), linear(WIDTH, 128)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens, positions, attend):
        """Map token ids and positions [B, N] to logits [B, N, 128]."""
        x = self.tokens(tokens) + self.positions(positions)
        for layer in range(LAYERS):
            heads = self.mixes[layer](self.norm(x)).reshape(*x.shape[:2], 3, HEADS, -1)
            mixed = attend(layer, *heads.transpose(2, 0, 3, 1, 4))  # q, k, v [B, H, N, D]
            x = x + mixed.swapaxes(1, 2).reshape(x.shape)
            x = x + self.downs[layer](nnx.gelu(self.ups[layer](self.norm(x))))
        return self.head(self.norm(x))


graph, weights = nnx.split(Model(nnx.Rngs(0)))


def loss(weights):
    """Return the mean cross-entropy of the next letter."""
    logits = nnx.merge(graph, weights)(TEXT[:, :-1], jnp.arange(TEXT.size - 1)[None], causal)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), TEXT[:, 1:, None], 2).mean()


gradient = jax.jit(jax.grad(loss))
for _ in range(60):
    weights = jax.tree.map(lambda w, g: w - 0.003 * jnp.sign(g), weights, gradient(weights))
target, params = jspec.adapters.from_nnx(nnx.merge(graph, weights), max_positions=POSITIONS)
prompt, rest = RHYME[:20].encode(), len(RHYME) - 20
for drafter in (jspec.NoDrafter(), jspec.NGram(6, 2, 4)):
    [answer] = jspec.generate(target, params, [prompt], drafter=drafter, max_new_tokens=rest)
    print(f"{type(drafter).__name__}: {len(answer.tokens)} tokens in {answer.rounds} passes")
print(prompt.decode() + bytes(answer.tokens.tolist()).decode())

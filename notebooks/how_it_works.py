# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How it works: one round by hand
#
# A round of speculative decoding drafts a tree of tokens, runs the target once over all of them, and accepts a path.
# This notebook runs one round with the functions of `jspec.decode`. Then it proves the rule lossless.

# %%
# Installs jspec if it is missing: the clone that holds this notebook, or the published package.
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

# A folder named jspec beside this notebook is a clone, not the installed package.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path.cwd()]
if importlib.util.find_spec("jspec") is None:
    extras = ["bench"] + ["tpu"] * bool(importlib.util.find_spec("libtpu"))
    if shutil.which("nvidia-smi"):  # CUDA 13 needs driver 580 or newer
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.partition(".")[0]
        extras += ["cuda" if driver.isdigit() and int(driver) >= 580 else "cuda12"]
    files = [Path(folder, "pyproject.toml") for folder in ("..", ".", "jspec")]
    is_clone = lambda file: file.exists() and 'name = "jspec-decoding"' in file.read_text()
    source = next((file.resolve().parent for file in files if is_clone(file)), "jspec-decoding")
    package = f"{source}[{','.join(extras)}]"
    if subprocess.run([sys.executable, "-m", "pip", "install", "-q", package]).returncode:
        remedy = "clone or upload the repository beside this notebook, then run this cell again"
        raise SystemExit(f"pip could not install {package}: {remedy}.")

# %%
import jax
import jax.numpy as jnp
import jspec
import matplotlib.pyplot as plt
import numpy as np
from jspec.core import sampling, trees
from jspec.api.build import build_plan
from jspec.api.config import read as read_config
from jspec.engine.functional import SequenceParams, start

DEMO = Path(jspec.__file__).parent / "assets" / "demo"

# %% [markdown]
# ## 1. Before the round
#
# The caches hold every committed token except the last one. The last one is the **root**, node 0 of the draft.

# %%
TREE = {"tree": "sampled", "tree_size": 8, "tree_depth": 3, "tree_top_k": 2}
config = {"method": "eagle3", "model": str(DEMO / "eagle3"), **TREE}
built = build_plan(DEMO / "target", read_config(config), dtype="float32")
plan, params, tokenizer = built.plan, built.params, built.model.tokenizer
prompt = "def fibonacci(n):\n    if n < 2:\n        return n\n    return"
sequence = SequenceParams(tuple(tokenizer.encode(prompt)), max_tokens=32, temperature=0.8, seed=5)
batch = start(plan, params, [sequence])
request, state = batch.request, batch.state
print(
    "committed:", int(state.history.length[0]), "tokens; in the cache:", int(state.cache.length[0])
)

# %% [markdown]
# ## 2. Draft
#
# The head proposes a tree. It draws children without replacement from its own distribution, and records that
# distribution.

# %%
draft, memory = jax.jit(plan.drafter.propose)(
    params, request, batch.shared, state.memory, state.history
)
tree = trees.broadcast(trees.from_parents(draft.parents, draft.max_depth), 1)
tokens, parents = np.asarray(draft.tokens[0]), np.asarray(tree.parents[0])
depth, valid = np.asarray(tree.depth[0]), np.asarray(draft.valid[0])
words = [tokenizer.decode([token]).replace(" ", "␣").replace("\n", "↵") for token in tokens]


def positions():
    """Return where to draw each node: leaves in a column, parents beside their children."""
    height, rows = {}, iter(range(len(tokens)))

    def visit(node):
        children = [child for child in range(1, len(tokens)) if parents[child] == node]
        children = [child for child in children if valid[child]]
        for child in children:
            visit(child)
        height[node] = np.mean([height[child] for child in children]) if children else -next(rows)

    visit(0)
    return {node: (depth[node], height[node]) for node in height}


def draw(title, accepted=()):
    """Draw the tree, with the accepted path in green."""
    spots = positions()
    _, axes = plt.subplots(figsize=(9, 3.6))
    for node in spots.keys() - {0}:
        ends = np.array([spots[parents[node]], spots[node]]).T
        axes.plot(*ends, color="#59a14f" if node in accepted else "#bbbbbb", zorder=0)
    for node, spot in spots.items():
        color = "#d4edda" if node in accepted or node == 0 else "#eeeeee"
        box = {"boxstyle": "round", "facecolor": color, "edgecolor": "#888888"}
        axes.text(*spot, words[node], ha="center", va="center", family="monospace", bbox=box)
    axes.set_title(title)
    axes.set_xlim(-0.5, depth.max() + 0.5)
    axes.axis("off")
    plt.show()


draw("the draft of the head")

# %% [markdown]
# ## 3. One pass of the target
#
# All nodes go through the target at once. A node attends to the committed text and to its own ancestors: that is the
# mask.

# %%
mask = trees.unpack_bits(np.asarray(tree.ancestors[0]), len(tokens))
_, axes = plt.subplots(figsize=(4, 4))
axes.imshow(mask, cmap="Greens", vmax=1.6)
axes.set_xticks(range(len(words)), words, rotation=90, family="monospace")
axes.set_yticks(range(len(words)), words, family="monospace")
axes.set_title("a node (row) attends to (column)")
plt.show()

out = jax.jit(plan.target.forward, static_argnums=4)(
    params.target, draft.tokens, tree, state.cache, plan.drafter.capture_layers
)
print("logits of all nodes in one pass:", out.logits.shape)

# %% [markdown]
# ## 4. Accept
#
# Let p be the target's probability of a drafted token and q the drafter's. The rule accepts the token with
# probability min(1, p/q). After a rejection, p becomes the residual. So the accepted tokens have the target's
# distribution.

# %%
verdict = jax.jit(plan.verify)(request, draft, tree, out.logits, state.history)
count = int(verdict.num_emitted[0])
path = np.asarray(verdict.path[0])[:count]
draw("accepted: " + " ".join(words[node] for node in path[1:]), accepted=set(path.tolist()))
bonus = tokenizer.decode([int(verdict.next_token[0])])
print(
    f"{count - 1} drafted tokens accepted, then the target's {bonus!r}: {count} tokens for one pass"
)

# %%
p = np.asarray(jax.nn.softmax(sampling.process_logits(out.logits, request.sampling), -1))[0]
for node in range(1, len(tokens)):
    if valid[node]:
        q = float(jax.nn.softmax(draft.logits[0, parents[node]])[tokens[node]])
        chances = f"q = {q:.3f}   p = {p[parents[node], tokens[node]]:.3f}"
        fate = "accepted" if node in path else ""
        print(f"{'  ' * depth[node]}{words[node]:12} {chances}   {fate}")

# %% [markdown]
# `jspec trace` draws whole generations like this, with every uniform. It also shows p and q after earlier siblings
# were rejected; the values above are those before any rejection.
#
# ## 5. Is it the target's distribution?
#
# `jspec.certify` enumerates every draft and every outcome of the uniforms on a small vocabulary, with the function
# that ran above. It compares the output distribution with the target's. The distance is rounding of float64.

# %%
from jspec.tools.certify import distribution

finding = distribution("rejection", "without_replacement")
print(
    finding.subject, "- total variation", finding.measured, "passed" if finding.passed else "FAILED"
)
assert finding.passed

# %% [markdown]
# A wrong rule fails: this one always accepts the first drafted token.

# %%
from jspec.verify import Rule


def gullible(logits, draft, tree, uniforms, proposal):
    """Accept the first child of the root, without looking at the target."""
    accepted = draft.valid[:, 1]
    path = jnp.zeros((len(accepted), tree.max_depth + 1), jnp.int32).at[:, 1].set(accepted)
    after = jnp.where(accepted[:, None], logits[:, 1], logits[:, 0])
    return path, accepted.astype(jnp.int32), after


wrong = distribution(Rule("gullible", gullible, "round", frozenset({"chain"})), "chain")
print(wrong.subject, "- total variation", wrong.measured, "FAILED:", wrong.note)
assert not wrong.passed

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
# A round of speculative decoding drafts a tree of tokens, runs the target once over all of them, and keeps a path. Here it is done
# step by step with the functions that `jspec.decode` is made of, and then proved to be lossless.

# %%
# The one install cell; nothing happens where jspec is there already.
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

# A clone in this very folder must not pass for jspec as it is installed.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path.cwd()]
if importlib.util.find_spec("jspec") is None:
    extras = ["bench"] + ["tpu"] * bool(importlib.util.find_spec("libtpu"))
    if shutil.which("nvidia-smi"):  # CUDA 13 needs a driver of 580 or newer
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True).stdout.partition(".")[0]
        extras += ["cuda" if driver.isdigit() and int(driver) >= 580 else "cuda12"]
    files = [Path(folder, "pyproject.toml") for folder in ("..", ".", "jspec")]
    ours = lambda file: file.exists() and 'name = "jspec-decoding"' in file.read_text()
    clones = [file.resolve().parent for file in files if ours(file)]
    source = [*clones, "jspec-decoding"][0]
    wanted = f"{source}[{','.join(extras)}]"
    if subprocess.run([sys.executable, "-m", "pip", "install", "-q", wanted]).returncode:
        remedy = "clone or upload the repository beside this notebook, then run this cell again"
        raise SystemExit(f"pip could not install {wanted}: {remedy}.")

# %%
import jax
import jax.numpy as jnp
import jspec
import matplotlib.pyplot as plt
import numpy as np
from jspec.core import sampling, trees
from jspec.api.build import build_plan
from jspec.api.config import read as read_config
from jspec.engine.batch import SequenceParams, start

DEMO = Path(jspec.__file__).parent / "assets" / "demo"

# %% [markdown]
# ## 1. Before the round
#
# The caches hold every committed token but the last one. That one is the **root**, node 0 of the draft.

# %%
TREE = {"tree": "sampled", "tree_size": 8, "tree_depth": 3, "tree_top_k": 2}
config = {"method": "eagle3", "model": str(DEMO / "eagle3"), **TREE}
made = build_plan(DEMO / "target", read_config(config), dtype="float32")
plan, params, tokenizer = made.plan, made.params, made.model.tokenizer
prompt = "def fibonacci(n):\n    if n < 2:\n        return n\n    return"
row = SequenceParams(tuple(tokenizer.encode(prompt)), max_tokens=32, temperature=0.8, seed=5)
batch = start(plan, params, [row])
request, state = batch.request, batch.state
print(
    "committed:", int(state.history.length[0]), "tokens; in the cache:", int(state.cache.length[0])
)

# %% [markdown]
# ## 2. Draft
#
# The head proposes a tree: children are drawn without replacement from its own distribution, which is kept with them.

# %%
draft, memory = jax.jit(plan.drafter.propose)(
    params, request, batch.shared, state.memory, state.history
)
tree = trees.broadcast(trees.from_parents(draft.parents, draft.max_depth), 1)
tokens, parents = np.asarray(draft.tokens[0]), np.asarray(tree.parents[0])
depth, valid = np.asarray(tree.depth[0]), np.asarray(draft.valid[0])
words = [tokenizer.decode([token]).replace(" ", "␣").replace("\n", "↵") for token in tokens]


def place():
    """Where to draw each node: leaves one below the other, parents beside their children."""
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
    """The tree; nodes of the accepted path are green."""
    spots = place()
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


draw("what the head drafts")

# %% [markdown]
# ## 3. One pass of the target
#
# All nodes go through the target at once. A node sees the committed text and its own ancestors, no more: that is the mask.

# %%
mask = trees.unpack_bits(np.asarray(tree.ancestors[0]), len(tokens))
_, axes = plt.subplots(figsize=(4, 4))
axes.imshow(mask, cmap="Greens", vmax=1.6)
axes.set_xticks(range(len(words)), words, rotation=90, family="monospace")
axes.set_yticks(range(len(words)), words, family="monospace")
axes.set_title("which nodes (rows) see which")
plt.show()

out = jax.jit(plan.target.forward, static_argnums=4)(
    params.target, draft.tokens, tree, state.cache, plan.drafter.capture_layers
)
print("logits of all nodes in one pass:", out.logits.shape)

# %% [markdown]
# ## 4. Accept
#
# A child that was drawn with probability q is accepted with probability min(1, p/q), p being the target's; after a refusal p becomes
# what is left of it. So what is kept is distributed as the target would have drawn it.

# %%
verdict = jax.jit(plan.verify)(request, draft, tree, out.logits, state.history)
count = int(verdict.num_emitted[0])
path = np.asarray(verdict.path[0])[:count]
draw("accepted: " + " ".join(words[node] for node in path[1:]), accepted=set(path.tolist()))
own = tokenizer.decode([int(verdict.next_token[0])])
print(
    f"{count - 1} drafted tokens accepted, and {own!r} of the target's own: {count} tokens for one pass"
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
# `jspec trace` draws whole generations like this, with every coin, and with p and q as siblings judged before leave them: here they
# are those of the whole law.
#
# ## 5. Is the law really the target's?
#
# `jspec.certify` enumerates every draft and every outcome of every coin on a small vocabulary, through the very function that ran
# above, and compares what comes out with the target's law. The distance is rounding of float64.

# %%
from jspec.tools.certify import distribution

finding = distribution("rejection", "without_replacement")
print(
    finding.subject, "- total variation", finding.measured, "passed" if finding.passed else "FAILED"
)
assert finding.passed

# %% [markdown]
# And a rule that is wrong: it accepts the first drafted token always.

# %%
from jspec.verify import Rule


def gullible(logits, draft, tree, uniforms):
    """Takes the first child, whatever the target says."""
    taken = draft.valid[:, 1]
    path = jnp.zeros((len(taken), tree.max_depth + 1), jnp.int32).at[:, 1].set(taken)
    after = jnp.where(taken[:, None], logits[:, 1], logits[:, 0])
    return path, taken.astype(jnp.int32), after


wrong = distribution(Rule("gullible", gullible, "round", frozenset({"chain"})), "chain")
print(wrong.subject, "- total variation", wrong.measured, "FAILED:", wrong.note)
assert not wrong.passed

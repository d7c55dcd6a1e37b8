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
# # Compare methods
#
# The fastest method depends on the text, the device and K. This notebook measures several methods on the embedded
# model, relative to plain decoding in the same run, and explains the results. Set your own model, methods and
# questions in the cell of parameters.

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
import inspect
import textwrap

import jax
import jspec
import matplotlib.pyplot as plt
import numpy as np
from jspec.tools.bench.questions import Question
from jspec.tools.bench.run import bench
from jspec.tools.bench.settings import Settings
from tqdm import tqdm

DEMO = Path(jspec.__file__).parent / "assets" / "demo"
print("on", jax.devices()[0].device_kind)

# %% tags=["parameters"]
TARGET = DEMO / "target"
METHODS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix"},
    "draft_model": {
        "method": "draft_model",
        "model": str(DEMO / "draft"),
        "num_speculative_tokens": 4,
    },
    "eagle3": {"method": "eagle3", "model": str(DEMO / "eagle3"), "num_speculative_tokens": 4},
}
SWEPT = "draft_model"  # measured at every K below
DEPTHS = (1, 2, 4)
# Larger values make the figures steadier and take longer.
QUESTIONS = 2  # of each kind
MAX_TOKENS = 48
REPEATS = 3
DTYPE = "bfloat16"

# %% [markdown]
# ## 1. Questions
#
# A lookup method needs repetition; a network needs text that is easy to predict. So there are three kinds of
# questions, with figures for each: *code* to continue, *prose* (docstrings), and *editing*, which writes a function
# again under another name. The embedded model was not trained on these modules. `jspec.tools.bench.questions.read`
# reads the files of Spec-Bench, HumanEval, GSM8K and ShareGPT.

# %%
functions = (
    textwrap.fill,
    textwrap.dedent,
    textwrap.indent,
    textwrap.shorten,
    textwrap.TextWrapper.wrap,
    textwrap.TextWrapper._split,
)
questions = []
for function in functions[:QUESTIONS]:
    source = textwrap.dedent(inspect.getsource(function))
    name = function.__name__
    renamed = source.replace(name, f"{name}_text", 1)
    prompts = {
        "code": source[: len(source) // 2],
        "prose": f'"""{inspect.getdoc(function)}\n\n',
        "editing": f"{source}\n\n{renamed[: len(renamed) // 3]}",
    }
    questions += [Question(kind, (text,), is_chat=False) for kind, text in prompts.items()]
print(*(f"{q.category:8} {q.turns[0][:60]!r}" for q in questions[:3]), sep="\n")

# %% [markdown]
# ## 2. Measure
#
# Every method runs through `LLM.generate` after a warm-up. The methods take turns, and each turn starts with another
# one, so a slow minute of the machine affects all. Samples that other processes disturbed are repeated, within
# limits.


# %%
def measure(methods, temperature=0.0):
    """Return the figures of every method by its name, plain decoding first."""
    settings = Settings(
        tuple(methods.values()),
        temperatures=(temperature,),
        max_tokens=MAX_TOKENS,
        prompt_tokens=256,
        repeats=REPEATS,
        dtype=DTYPE,
        peers=False,
    )
    count = len(methods) + 1  # each is compiled, and its parts are timed
    with tqdm(total=2 * count + 2, bar_format="{bar:20} {elapsed} {desc}") as bar:

        def on_step(words):
            """Show the step that begins."""
            bar.update()
            bar.set_description_str(words)

        rows = bench(TARGET, questions, settings, on_step=on_step)["rows"]
    return dict(zip(["plain", *methods], rows, strict=True))


rows = measure(METHODS)
plain = rows["plain"]
COLORS = dict(
    zip(rows, ["#999999", "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756"], strict=False)
)
for name, row in rows.items():
    print(
        f"{name:12} {row['tokens_per_second']['median']:6.0f} tokens/s   "
        f"speed-up {row['speedup']['median']:.2f}   "
        f"acceptance length {row['acceptance_length']:.2f}   "
        f"same text as plain: {row['texts_equal_to_plain']} of {row['texts']}"
    )

# %% [markdown]
# ## 3. Speed-up and its spread
#
# The speed-up is the ratio of tokens/s to plain decoding in the same turn, prompts and host included. The bar is the
# median of the turns, the line reaches from the least to the most. If two lines overlap, take more `REPEATS` or a
# quieter machine.

# %%
_, axes = plt.subplots(figsize=(8, 0.8 + 0.45 * len(rows)))
middle = np.array([row["speedup"]["median"] for row in rows.values()])
ends = np.array([[row["speedup"][end] for row in rows.values()] for end in ("least", "most")])
axes.barh(
    list(rows),
    middle,
    xerr=abs(ends - middle),
    color=COLORS.values(),
    error_kw={"ecolor": "#333333"},
)
axes.axvline(1, color="#333333", linewidth=0.8)
axes.invert_yaxis()
axes.set_xlabel("speed-up over plain decoding (median, least to most)")
axes.set_title(f"{DTYPE}, batch 1, greedy", loc="left")
plt.show()

# %% [markdown]
# ## 4. Acceptance length by kind of text
#
# The acceptance length is the number of tokens that a pass of the target emits. It includes the target's own token
# and passes without a draft. It is 1 without a gain, at most K + 1, and it bounds the speed-up. It is a property of
# method and text, the same on every device. Look here first if a method disappoints.

# %%
kinds = list(plain["categories"])
drafting = [name for name in rows if name != "plain"]
_, axes = plt.subplots(figsize=(9, 3.4))
width = 0.8 / len(drafting)
for index, name in enumerate(drafting):
    lengths = [rows[name]["categories"][kind]["acceptance_length"] for kind in kinds]
    x = np.arange(len(kinds)) + (index - (len(drafting) - 1) / 2) * width
    bars = axes.bar(x, lengths, 0.92 * width, color=COLORS[name], label=name)
    axes.bar_label(bars, fmt="%.2f", fontsize="small")
axes.axhline(1, color="#333333", linewidth=0.8)
axes.set_xticks(range(len(kinds)), kinds)
axes.set_ylabel("acceptance length, tokens a pass")
axes.margins(y=0.12)
axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.tight_layout()
plt.show()

# %% [markdown]
# ## 5. Acceptance by position
#
# The line shows the share of drafts whose i-th token was accepted. A token needs all tokens before it, so lines fall.
# The share at i divided by the share at i - 1 is the conditional acceptance of the i-th token. If a line is near 0,
# longer drafts are wasted. If it is still high at the end, K is too small. The sum of the shares is the mean number
# of accepted tokens of a draft.

# %%
_, axes = plt.subplots(figsize=(7, 3.4))
for name in drafting:
    shares = rows[name]["acceptance_per_position"][:8]
    axes.plot(range(1, len(shares) + 1), shares, marker="o", color=COLORS[name], label=name)
axes.set_ylim(0, 1)
axes.xaxis.get_major_locator().set_params(integer=True)
axes.set_xlabel("position in the draft")
axes.set_ylabel("accepted, of all drafts")
axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.tight_layout()
plt.show()

# %% [markdown]
# ## 6. The time of a round
#
# A round consists of drafting, the target's pass over the draft, and accepting (verify, commit, count). Each part is
# timed in a program of its own on states of the real loop. The dashed line is a round of plain decoding. A round that
# costs c plain rounds pays if it emits more than c tokens: **speed-up ≈ acceptance length / c**. So the figure shows
# the cause: a slow drafter, a target's pass that grows with K, or low acceptance. For `suffix` and `ngram`, the mean
# includes rounds without a match, which cost a plain pass.

# %%
_, axes = plt.subplots(figsize=(8, 0.8 + 0.45 * len(rows)))
left = np.zeros(len(rows))
for part, color in (("drafting", "#4c78a8"), ("target", "#9ecae9"), ("accepting", "#d9d9d9")):
    width = np.array([row["split_ms"][part] for row in rows.values()])
    axes.barh(list(rows), width, left=left, color=color, label=part)
    left += width
axes.axvline(plain["split_ms"]["round"], color="#333333", linewidth=0.8, linestyle="--")
axes.invert_yaxis()
axes.set_xlabel("a round, ms")
axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.tight_layout()
plt.show()

for name in drafting:
    cost = rows[name]["split_ms"]["round"] / plain["split_ms"]["round"]
    length, speed = rows[name]["acceptance_length"], rows[name]["speedup"]["median"]
    print(
        f"{name:12} {length:.2f} tokens a round / {cost:.2f} plain rounds = {length / cost:.2f}"
        f"   (measured, prompts and host included: {speed:.2f})"
    )

# %% [markdown]
# ## 7. The effect of K
#
# With K the acceptance length rises, by less and less, and the cost of a round rises evenly. So the speed-up has a
# maximum. On a device that is bound by memory, a pass over 8 tokens costs about as much as one over one, and the
# maximum is at a large K.

# %%
swept = measure(
    {k: METHODS[SWEPT] | {"num_speculative_tokens": k} for k in DEPTHS}, temperature=0.0
)
plain_swept = swept.pop("plain")
lengths = [row["acceptance_length"] for row in swept.values()]
costs = [row["split_ms"]["round"] / plain_swept["split_ms"]["round"] for row in swept.values()]
speeds = np.array(
    [[row["speedup"][end] for row in swept.values()] for end in ("least", "median", "most")]
)
_, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
left.plot(DEPTHS, lengths, marker="o", color="#54a24b", label="acceptance length, tokens a round")
left.plot(DEPTHS, costs, marker="o", color="#4c78a8", label="cost, plain rounds a round")
left.set_ylim(0)
left.legend(fontsize="small")
right.errorbar(
    DEPTHS, speeds[1], yerr=abs(speeds[[0, 2]] - speeds[1]), marker="o", capsize=3, color="#e45756"
)
right.axhline(1, color="#333333", linewidth=0.8)
right.set_ylabel("speed-up over plain decoding")
for axes in (left, right):
    axes.set_xticks(DEPTHS)
    axes.set_xlabel("K, drafted tokens a round")
left.set_title(SWEPT, loc="left")
plt.tight_layout()
plt.show()
best = DEPTHS[int(np.argmax(speeds[1]))]
print(f"fastest here: K = {best}")

# %% [markdown]
# These figures also depend on the batch (`Settings(batch_sizes=(1, 8))`), the temperature and the dtype. A larger
# batch leaves less arithmetic for drafts, and sampled text is accepted less often. `jspec bench` writes the same as
# tables, a picture and one page (`docs/bench.md`). `jspec trace` shows why a round was short. Next:
# `write_a_drafter`.

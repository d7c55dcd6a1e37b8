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
# Which method is fastest depends on the text, the device and K. This notebook measures several on the embedded model, beside plain
# decoding in the same run, and shows how to read what comes out. Put your own model, methods and questions into the next but one cell.

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
import inspect
import textwrap

import jax
import jspec
import matplotlib.pyplot as plt
import numpy as np
from jspec.tools.bench.questions import Question
from jspec.tools.bench.run import bench
from jspec.tools.bench.settings import Settings

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
SWEPT = "draft_model"  # the method that is measured at every K below
DEPTHS = (1, 2, 3, 4, 6, 8)
QUESTIONS = 4  # of each kind
MAX_TOKENS = 96
REPEATS = 5
DTYPE = "bfloat16"

# %% [markdown]
# ## 1. Questions
#
# A method that looks up what was said before lives on repetition, one with a network on text that is easy to guess. So questions come in
# kinds, and every figure is known by kind: *code* to go on with, *prose* (docstrings), and *editing*, where a function is to be written
# again under another name. All are from modules that the embedded model was not trained on. `jspec.tools.bench.questions.read` reads the
# field's files (Spec-Bench, HumanEval, GSM8K, ShareGPT).

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
print(*(f"{each.category:8} {each.turns[0][:60]!r}" for each in questions[:3]), sep="\n")

# %% [markdown]
# ## 2. Measure
#
# Everyone runs through `LLM.generate`, warmed up, in turns, each turn begun by another: a slow minute of the machine is everybody's.
# Samples during which other processes were busy are repeated, within limits.


# %%
def measure(methods, temperature=0.0):
    """Rows of figures, plain decoding first; each with the name that `methods` gives it."""
    settings = Settings(
        tuple(methods.values()),
        temperatures=(temperature,),
        max_tokens=MAX_TOKENS,
        prompt_tokens=256,
        repeats=REPEATS,
        dtype=DTYPE,
        peers=False,
    )
    rows = bench(TARGET, questions, settings)["rows"]
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
# ## 3. Speed-up, with its spread
#
# tokens/s beside plain decoding in the same turn, prompts and host included: the bar is the median of the turns, the line reaches from
# the least to the most. Two methods whose lines overlap have not been told apart: take more `REPEATS` or a quieter machine.

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
# ## 4. Acceptance length, by kind of text
#
# Tokens that a pass of the target emits, its own token and passes without a draft included: 1 is no gain, K + 1 the most, and the
# speed-up cannot exceed it. This is a property of method and text, the same on every device; look here first when a method disappoints.

# %%
kinds = list(plain["categories"])
drafting = [name for name in rows if name != "plain"]
_, axes = plt.subplots(figsize=(9, 3.4))
width = 0.8 / len(drafting)
for place, name in enumerate(drafting):
    lengths = [rows[name]["categories"][kind]["acceptance_length"] for kind in kinds]
    spots = np.arange(len(kinds)) + (place - (len(drafting) - 1) / 2) * width
    bars = axes.bar(spots, lengths, 0.92 * width, color=COLORS[name], label=name)
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
# Of all drafts, the share whose i-th token was accepted; a token can only be if all before it were, so lines fall. The share at i divided
# by that at i - 1 is the chance of the i-th token once it is reached. Where a line is near 0, longer drafts are wasted; where it is still
# high at the end, K is too small. The sum of the shares is the mean number of accepted tokens of a draft.

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
# ## 6. Where a round's time goes
#
# Drafting, the target's pass over the draft, and accepting (judging, committing, counting), each timed in a program of its own on states
# of the real loop. The dashed line is a round of plain decoding. A round that costs c plain rounds pays if it emits more than c tokens:
# **speed-up ≈ acceptance length / c**. That tells what to mend: a drafter that is too slow, a target's pass that grows too much with K,
# or too few tokens accepted. (What `suffix` and `ngram` do not find costs a plain pass, and is in the mean.)

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
# ## 7. How K changes it
#
# With K the acceptance length rises, by less and less; a round's cost rises evenly. So the speed-up has a peak. Where it lies depends on
# the device: on one that waits for memory a pass over 8 tokens costs about as much as over one, and the peak is far to the right.

# %%
swept = measure(
    {k: METHODS[SWEPT] | {"num_speculative_tokens": k} for k in DEPTHS}, temperature=0.0
)
alone = swept.pop("plain")
lengths = [row["acceptance_length"] for row in swept.values()]
costs = [row["split_ms"]["round"] / alone["split_ms"]["round"] for row in swept.values()]
speeds = np.array(
    [[row["speedup"][each] for row in swept.values()] for each in ("least", "median", "most")]
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
# Things that change these figures: the batch (a larger one leaves less arithmetic for drafts: `Settings(batch_sizes=(1, 8))`), the
# temperature (drawn text is accepted less often), and the dtype. The same as tables, a picture and one page: `jspec bench`
# (`docs/bench.md`). Why a round of yours was short: `jspec trace`. Next: `write_a_drafter`.

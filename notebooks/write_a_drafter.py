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
# # Write a drafter
#
# Anything may propose tokens: the rule sees to it that the text stays the target's. Here a table of which token follows which becomes a
# drafting method of its own, first one that is certain of what it proposes, then one that draws. Both are certified lossless, a wrong
# one is caught, and all are measured beside plain decoding.

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
import dataclasses
import sysconfig
import tempfile

import jax.numpy as jnp
import jspec
import matplotlib.pyplot as plt
import numpy as np
from jspec.core import sampling, trees
from jspec.core.history import root_token

DEMO = Path(jspec.__file__).parent / "assets" / "demo"

# %% tags=["parameters"]
TARGET = DEMO / "target"
FILES = 150  # of the standard library, to learn the table from
MAX_TOKENS = 96
NUM_DRAFTS = 4096  # rounds that a certificate looks at
DEPTHS = (1, 2)  # K, of what is measured
REPEATS = 5

# %% [markdown]
# ## 1. A table learned from text
#
# `counts[a, b]` says how often token b followed token a in the sources of Python's standard library. Most tokens were seen with few
# others, so a little of the law of all tokens is mixed in. Modules that the prompts below are from stay out.

# %%
model = jspec.load(TARGET, dtype="float32")
tokenizer, vocab_size = model.tokenizer, model.target.vocab_size
PROMPTS = [
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def median(values):\n    ordered = sorted(values)\n",
    'def read_config(path):\n    """Read a JSON file and',
    "import os\nimport sys\n\n\ndef main():\n    for name in os.listdir(sys.argv[1]):\n",
]
library = Path(sysconfig.get_paths()["stdlib"])
sources = [
    path for path in sorted(library.glob("*.py")) if path.stem not in ("statistics", "heapq")
]
counts = np.zeros((vocab_size, vocab_size), np.float32)
for path in sources[:FILES]:
    ids = np.array(tokenizer.encode(path.read_text(encoding="utf-8"), verbose=False))
    np.add.at(counts, (ids[:-1], ids[1:]), 1)
distribution = counts + 2 * (counts.sum(0) + 0.1) / counts.sum()
distribution /= distribution.sum(1, keepdims=True)
TABLE = str(Path(tempfile.mkdtemp()) / "bigrams.npy")
np.save(TABLE, np.log(distribution))
print(f"{int(counts.sum()):,} pairs of tokens, {np.count_nonzero(counts):,} of them different")

# %% [markdown]
# How sure can such a table be? If its likeliest token has probability 0.3 on average, three drafted tokens in ten are right at best.

# %%
seen = counts.sum(1) > 0
weight = counts.sum(1)[seen] / counts.sum()
_, axes = plt.subplots(figsize=(7, 3))
axes.hist(distribution.max(1)[seen], bins=40, range=(0, 1), weights=weight, color="#4c78a8")
axes.set_xlabel("probability of the likeliest next token")
axes.set_ylabel("share of the text")
axes.set_title(
    f"the table: {(distribution.max(1)[seen] * weight).sum():.2f} on average", loc="left"
)
plt.show()

# %% [markdown]
# ## 2. The first drafter
#
# A drafter is a frozen dataclass that follows `jspec.Drafter`; a subclass of `jspec.NoDrafter` writes only what it changes. Its fields
# are the keys of `speculative_config`, and since they are hashable, equal settings share one compiled program.
#
# `propose` gives a `Draft`: node 0 is the root (the last committed token), here followed by a chain of K tokens. It is traced by JAX, so
# that the whole generation stays one program. `proposal = "point"` says that nothing was drawn: what it drafts is certain.


# %%
@dataclasses.dataclass(frozen=True)
class Bigram(jspec.NoDrafter):
    """The token that most often follows the last one, K times over."""

    num_speculative_tokens: int
    table: str  # a file; weights are no settings, so the array itself is loaded below

    proposal = "point"
    max_depth = property(lambda self: self.num_speculative_tokens)
    tree_size = property(lambda self: self.num_speculative_tokens + 1)  # with the root

    def load_params(self, target_params):
        """Called once; `propose` gets it back as `params.drafter`."""
        return jnp.asarray(np.load(self.table))

    def propose(self, params, request, shared, memory, history):
        """A chain in every row of the batch [B, K + 1]."""
        drafted = [root_token(history)]
        for _ in range(self.max_depth):
            drafted.append(sampling.argmax(params.drafter[drafted[-1]]))
        drafted = jnp.stack(drafted, 1)
        valid = jnp.ones(drafted.shape, bool)
        chain = trees.chain(self.max_depth)
        return jspec.Draft(drafted, chain, valid, max_depth=self.max_depth), memory


# %% [markdown]
# In the functional layer a `Plan` holds what is static (target, drafter, rule) and `jspec.decode` runs it; `generate_sequences` is `decode`
# with prompts made ready before and read back after. At temperature 0 the text must be that of plain decoding.

# %%
from jspec.engine.batch import SequenceParams, generate_sequences

ids = [tuple(tokenizer.encode(prompt)) for prompt in PROMPTS]
rows = [SequenceParams(prompt, MAX_TOKENS, temperature=0) for prompt in ids]
bigram = Bigram(num_speculative_tokens=2, table=TABLE)
drafted = generate_sequences(
    jspec.Plan(model.target, bigram), jspec.Params(model.params, bigram.load_params(None)), rows
)
plain = generate_sequences(
    jspec.Plan(model.target, jspec.NoDrafter()), jspec.Params(model.params), rows
)
same = [np.array_equal(a.tokens, b.tokens) for a, b in zip(plain, drafted, strict=True)]
for answer in drafted:
    print(f"{len(answer.tokens)} tokens in {answer.rounds} passes of the target")
print("same texts as plain decoding:", same)

# %% [markdown]
# ## 3. Through the front door
#
# `LLM` takes a class by its dotted path. In a package of yours that is `"my_package.drafters.Bigram"`; of a class in this notebook it
# is where Python says that it lies.


# %%
def config(drafter, num_speculative_tokens=2):
    """What `LLM` is given."""
    return {
        "method": "custom_class",
        "model": f"{drafter.__module__}.{drafter.__name__}",
        "num_speculative_tokens": num_speculative_tokens,
        "table": TABLE,
    }


llm = jspec.LLM(model, speculative_config=config(Bigram))
outputs = llm.generate(PROMPTS, jspec.SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
for output in outputs:
    length = output.speculative_decoding_stats["mean_acceptance_length"]
    print(f"{length:.2f} tokens a pass: {output.outputs[0].text[:70]!r}")

# %% [markdown]
# ## 4. A drafter that draws
#
# At temperature 0.8 the target says the likeliest token only some of the time, and a drafter that always bets on it wins no more often
# than that. A token that is *drawn* from a law q is accepted with probability Σ min(p, q). Then the rule must know q: row i of `Draft.logits`
# holds the log-weights that the child of node i was drawn from, **as they were when it was drawn**, so after temperature and the rest
# (`sampling.process_logits`). The coins come from `sampling.round_noise`: new in every round, and nobody else's.


# %%
@dataclasses.dataclass(frozen=True)
class Drawn(Bigram):
    """Each token drawn from the row of the one before it."""

    proposal = "chain"

    def distribution(self, row, request):
        """Log-weights [B, V] to draw from, and to record."""
        return sampling.process_logits(row, request.sampling)

    def propose(self, params, request, shared, memory, history):
        """A chain, and the laws that it was drawn from."""
        depth = self.max_depth
        uniforms = sampling.round_noise(request.keys, history.length - 1, sampling.DRAFT, depth)
        drafted, distributions = [root_token(history)], []
        for i in range(depth):
            row = params.drafter[drafted[-1]]
            distributions.append(self.distribution(row, request))
            drafted.append(
                sampling.draw(sampling.process_logits(row, request.sampling), uniforms[:, i])
            )
        distributions.append(jnp.zeros_like(distributions[0]))  # the last node has no child
        valid = jnp.ones((len(drafted[0]), depth + 1), bool)
        return jspec.Draft(
            jnp.stack(drafted, 1),
            trees.chain(depth),
            valid,
            jnp.stack(distributions, 1),
            max_depth=depth,
        ), memory


# %% [markdown]
# ## 5. Is it lossless?
#
# `jspec.certify` looks at a whole configuration: the rule, by enumeration of every draft and every coin; thousands of drafts beside the
# laws that were recorded of them; and texts beside those of plain decoding. Each finding has a measurement that must stay below its
# limit. (`Bigram` draws nothing, so of it there is less to look at.)


# %%
def show(findings):
    """A line a finding."""
    for each in findings:
        mark = "ok  " if each.passed else "FAIL"
        print(f"{mark} {each.check:10} {each.measured:9.2g} < {each.limit:g}  {each.subject[:90]}")


report = jspec.certify(
    model=model,
    speculative_config=config(Drawn),
    prompts=PROMPTS,
    max_tokens=32,
    num_drafts=NUM_DRAFTS,
    temperature=0.8,
)
show(report.findings)
print("passed" if report.passed else "FAILED")
assert report.passed

# %% [markdown]
# And one with the mistake that is easiest to make: it draws at the request's temperature, but records the law of temperature 1. Its
# texts look as good as any, and their law is not the target's. `drafts` is the part of the certificate that looks at the drafter alone.


# %%
class Wrong(Drawn):
    """Records another law than it draws from."""

    def distribution(self, row, request):
        return row


from jspec.tools.certify import drafts

wrong = Wrong(num_speculative_tokens=2, table=TABLE)
found = list(
    drafts(
        jspec.Plan(model.target, wrong),
        jspec.Params(model.params, wrong.load_params(None)),
        [SequenceParams(prompt, 32, temperature=0.8) for prompt in ids],
        num_drafts=NUM_DRAFTS,
    )
)
show(found)
assert not all(each.passed for each in found)

# %% [markdown]
# ## 6. Is it fast?
#
# `jspec bench` is a function, too. The speed-up is the acceptance length divided by what a round costs in plain passes. To ask a table
# costs next to nothing, so what a round costs beyond a plain pass is that the target looks at K + 1 tokens instead of one: little where
# the device waits for weights anyway (an accelerator, or bfloat16 weights on a CPU), more where it is short of arithmetic.

# %%
from jspec.tools.bench.questions import Question
from jspec.tools.bench.run import bench
from jspec.tools.bench.settings import Settings

asked = [Question("code", (prompt,), is_chat=False) for prompt in PROMPTS]
wanted = Settings(
    tuple(config(drafter, k) for drafter in (Bigram, Drawn) for k in DEPTHS),
    temperatures=(0.8,),
    max_tokens=MAX_TOKENS,
    repeats=REPEATS,
    dtype="bfloat16",
    peers=False,
)
rows = bench(TARGET, asked, wanted)["rows"]
for row in rows:
    given = row["config"]
    row["label"] = (
        f"{given['model'].rsplit('.')[-1]}, K = {given['num_speculative_tokens']}"
        if given
        else "plain decoding"
    )
    print(
        f"{row['label']:16} acceptance length {row['acceptance_length']:.2f}"
        f"   a round {row['split_ms']['round']:.2f} ms   speed-up {row['speedup']['median']:.2f}"
    )

# %%
_, (left, right) = plt.subplots(1, 2, figsize=(10, 0.7 + 0.5 * len(rows)), sharey=True)
labels = [row["label"] for row in rows]
left.barh(labels, [row["acceptance_length"] for row in rows], color="#59a14f")
left.set_xlabel("acceptance length, tokens a pass")
left.axvline(1, color="#333333", linewidth=0.8)
left.invert_yaxis()
middle = np.array([row["speedup"]["median"] for row in rows])
ends = np.array([[row["speedup"][end] for row in rows] for end in ("least", "most")])
right.barh(labels, middle, xerr=abs(ends - middle), color="#4c78a8", error_kw={"ecolor": "#333333"})
right.axvline(1, color="#333333", linewidth=0.8)
right.set_xlabel("speed-up over plain decoding (median, least to most)")
plt.tight_layout()
plt.show()

# %% [markdown]
# A table of pairs is a weak drafter: real ones see more than one token. What a drafter keeps from round to round (a cache, hidden
# states) is its `memory`: `init` allocates it, `prefill` takes in the prompt, `update` what was accepted; `jspec/drafters/ngram.py` and
# `examples/write_a_drafter.py` are short ones to start from, `docs/extending.md` has the rest, and `compare_methods` shows how to read
# the measurements.

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
# Any code may propose tokens; the rule keeps the text the target's. This notebook makes a drafting method from a
# table of which token follows which. The first version drafts deterministically, the second one samples. Both are
# certified lossless, a wrong one is caught, and both are measured.

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
import dataclasses
import sysconfig
import tempfile

import jax.numpy as jnp
import jspec
import matplotlib.pyplot as plt
import numpy as np
from jspec.core import sampling, trees
from jspec.core.history import root_token
from tqdm import tqdm

DEMO = Path(jspec.__file__).parent / "assets" / "demo"

# %% tags=["parameters"]
TARGET = DEMO / "target"
FILES = 150  # of the standard library, for the table
# Larger values make the figures steadier and take longer.
MAX_TOKENS = 64
NUM_DRAFTS = 1024  # rounds that a certificate samples
DEPTHS = (2,)  # K, measured
REPEATS = 3

# %% [markdown]
# ## 1. A table from text
#
# `counts[a, b]` is how often token b followed token a in Python's standard library. Most tokens have few successors,
# so the table mixes in a little of the distribution of all tokens. The modules of the prompts below are left out.

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
# If the likeliest successor has probability 0.3 on average, at best three of ten drafted tokens are correct.

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
# A drafter is a frozen dataclass that inherits from `jspec.Drafter`. A subclass of `jspec.NoDrafter` defines only
# what it changes. Its fields are the keys of `speculative_config`. They are hashable, so equal settings share one
# compiled program.
#
# `propose` returns a `Draft`: node 0 is the root (the last committed token), here followed by a chain of K tokens.
# JAX traces it, so the whole generation stays one program. `proposal = "deterministic"` declares that nothing is
# sampled.


# %%
@dataclasses.dataclass(frozen=True)
class Bigram(jspec.NoDrafter):
    """Draft the likeliest successor, K times in a row."""

    num_speculative_tokens: int
    table: str  # a file: settings must be hashable, so `load_params` reads the array

    proposal = "deterministic"
    max_depth = property(lambda self: self.num_speculative_tokens)
    tree_size = property(lambda self: self.num_speculative_tokens + 1)  # with the root

    def load_params(self, target_params):
        """Return the weights; `propose` gets them as `params.drafter`."""
        return jnp.asarray(np.load(self.table))

    def propose(self, params, request, shared, memory, history):
        """Return a chain in every row of the batch [B, K + 1]."""
        drafted = [root_token(history)]
        for _ in range(self.max_depth):
            drafted.append(sampling.argmax(params.drafter[drafted[-1]]))
        drafted = jnp.stack(drafted, 1)
        valid = jnp.ones(drafted.shape, bool)
        chain = trees.chain(self.max_depth)
        return jspec.Draft(drafted, chain, valid, max_depth=self.max_depth), memory


# %% [markdown]
# In the functional layer, a `Plan` holds the static parts (target, drafter, rule). `generate_sequences` prepares
# prompts, runs `jspec.decode` and reads the answers. At temperature 0 the text must be that of plain decoding.

# %%
from jspec.engine.functional import SequenceParams, generate_sequences

ids = [tuple(tokenizer.encode(prompt)) for prompt in PROMPTS]
sequences = [SequenceParams(prompt, MAX_TOKENS, temperature=0) for prompt in ids]
bigram = Bigram(num_speculative_tokens=2, table=TABLE)
drafted = generate_sequences(
    jspec.Plan(model.target, bigram),
    jspec.Params(model.params, bigram.load_params(None)),
    sequences,
)
plain = generate_sequences(
    jspec.Plan(model.target, jspec.NoDrafter()), jspec.Params(model.params), sequences
)
same = [np.array_equal(a.tokens, b.tokens) for a, b in zip(plain, drafted, strict=True)]
for answer in drafted:
    print(f"{len(answer.tokens)} tokens in {answer.rounds} passes of the target")
print("same texts as plain decoding:", same)

# %% [markdown]
# ## 3. Use it in `LLM`
#
# `LLM` takes a class by its dotted path, such as `"my_package.drafters.Bigram"`. For a class of this notebook, that
# is its module's name.


# %%
def config(drafter, num_speculative_tokens=2):
    """Return a `speculative_config`."""
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
# ## 4. A drafter that samples
#
# At temperature 0.8 the target draws the likeliest token only some of the time, and a deterministic draft is accepted
# no more often. A token *sampled* from a distribution q is accepted with probability Σ min(p, q). The rule then needs
# q. Row i of `Draft.logits` holds the log-weights from which the child of node i was drawn, **as they were when it
# was drawn**: after temperature and filters (`sampling.process_logits`). The uniforms come from
# `sampling.round_noise`; they are new in every round and independent of all others.


# %%
@dataclasses.dataclass(frozen=True)
class Drawn(Bigram):
    """Draw each token from the table's row of the token before it."""

    proposal = "chain"

    def distribution(self, row, request):
        """Return the log-weights [B, V] to record."""
        return sampling.process_logits(row, request.sampling)

    def propose(self, params, request, shared, memory, history):
        """Return a chain, with the distributions that it was drawn from."""
        depth = self.max_depth
        uniforms = sampling.round_noise(request.keys, history.length - 1, sampling.DRAFT, depth)
        drafted, distributions = [root_token(history)], []
        for i in range(depth):
            row = params.drafter[drafted[-1]]
            distributions.append(self.distribution(row, request))
            processed = sampling.process_logits(row, request.sampling)
            drafted.append(sampling.draw(processed, uniforms[:, i]))
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
# `jspec.certify` tests a whole configuration: the rule by enumeration, thousands of drafts against their recorded
# distributions, and texts against plain decoding. Each finding has a measurement and a limit. `Bigram` samples
# nothing, so fewer tests apply to it.


# %%
def show(findings):
    """Print one line a finding."""
    for finding in findings:
        mark = "ok  " if finding.passed else "FAIL"
        limit = f"{finding.measured:9.2g} < {finding.limit:g}"
        print(f"{mark} {finding.check:10} {limit}  {finding.subject[:90]}")


with tqdm(bar_format="{n} steps {elapsed} {desc}") as bar:

    def progress(words):
        """Show the step that begins."""
        bar.update()
        bar.set_description_str(words)

    report = jspec.certify(
        model=model,
        speculative_config=config(Drawn),
        prompts=PROMPTS,
        max_tokens=32,
        num_drafts=NUM_DRAFTS,
        temperature=0.8,
        progress=progress,
    )
show(report.findings)
print("passed" if report.passed else "FAILED")
assert report.passed

# %% [markdown]
# The easiest mistake is to draw at the request's temperature and to record the distribution of temperature 1. The
# texts look normal, but their distribution is wrong. `drafts` is the part of the certificate that tests only the
# drafter.


# %%
class Wrong(Drawn):
    """Record another distribution than the one drawn from."""

    def distribution(self, row, request):
        return row


from jspec.tools.certify import drafts

wrong = Wrong(num_speculative_tokens=2, table=TABLE)
findings = list(
    drafts(
        jspec.Plan(model.target, wrong),
        jspec.Params(model.params, wrong.load_params(None)),
        [SequenceParams(prompt, 32, temperature=0.8) for prompt in ids],
        num_drafts=NUM_DRAFTS,
    )
)
show(findings)
assert not all(finding.passed for finding in findings)

# %% [markdown]
# ## 6. Is it fast?
#
# `jspec bench` is a function, too. The speed-up is the acceptance length divided by the cost of a round in plain
# passes. A table lookup costs almost nothing, so the extra cost is the target's pass over K + 1 tokens instead of
# one. That is little on a device that is bound by memory (an accelerator, or bfloat16 on a CPU), and more if
# arithmetic is short.

# %%
from jspec.tools.bench.questions import Question
from jspec.tools.bench.run import bench
from jspec.tools.bench.settings import Settings

questions = [Question("code", (prompt,), is_chat=False) for prompt in PROMPTS]
settings = Settings(
    tuple(config(drafter, k) for drafter in (Bigram, Drawn) for k in DEPTHS),
    temperatures=(0.8,),
    max_tokens=MAX_TOKENS,
    repeats=REPEATS,
    dtype="bfloat16",
    peers=False,
)
with tqdm(total=4 * len(DEPTHS) + 4, bar_format="{bar:20} {elapsed} {desc}") as bar:
    rows = bench(TARGET, questions, settings, on_step=progress)["rows"]
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
# A table of pairs is a weak drafter: real ones see more than one token. What a drafter keeps between rounds (a cache,
# hidden states) is its `memory`. `init` allocates it, `prefill` processes the prompt, `update` commits accepted
# tokens. `jspec/drafters/ngram.py` and `examples/write_a_drafter.py` are short examples, and `docs/extending.md` has
# the rest. `compare_methods` explains the measurements.

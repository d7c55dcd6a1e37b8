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
# # Train an EAGLE-3 head
#
# A head of one block learns to predict the target's next tokens from three of the target's hidden states. This notebook
# trains one from scratch for the embedded model, on the sources of Python's standard library: minutes on a CPU, seconds
# on an accelerator. It serves the head before and after training, and exports it for other servers.

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
    extras = ["bench", "train"] + ["tpu"] * bool(importlib.util.find_spec("libtpu"))
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

# %% tags=["parameters"]
DATA = ["stdlib"]  # files, folders, package:NAME, hf:NAME, JSON lines of chats
HELD_OUT = ["argparse", "heapq", "json", "statistics", "tarfile", "textwrap"]  # modules of it
FIRST_STEPS, STEPS, DECAY = 10, 300, 120
BATCH, LENGTH, UNROLL = 4, 256, 3
EVAL_EVERY = 25
PROMPTS, MAX_TOKENS = 16, 64  # that acceptance is measured on while training
SERVED_TOKENS = 96

# %%
import importlib
import inspect
import json
import tempfile

import jax
import jspec
import matplotlib.pyplot as plt
from training import distill_eagle, export

TARGET = Path(jspec.__file__).parent / "assets" / "demo" / "target"
RUN = Path(tempfile.mkdtemp()) / "run"
print("on", jax.devices()[0].device_kind)

# %% [markdown]
# ## 1. The command
#
# `python -m training.distill_eagle` takes these words; `--help` explains each.
#
# - The target stays frozen; one compiled program computes its hidden states and the head's step.
# - `--capture-layers 2 5 7`: the head reads three hidden states of the target's 8 blocks.
# - `--fc-norm` and `--norm-before-residual`: the states grow from block to block, so each is normed before they are
#   mixed.
# - `--unroll 3`: the head is trained on three steps of its own guesses, as it drafts.
# - `--loss overlap` trains Σ min(p, q), the probability that a sampled token is accepted.
# - `--schedule wsd`: the learning rate warms up, stays constant, and falls over the last `--decay` steps.
#
# The first run has only a few steps, for a *before*.


# %%
def distil(steps, decay):
    """Train up to `steps`; resume the run in the folder if there is one."""
    words = ["--target", str(TARGET), "--output", str(RUN), "--data", *DATA]
    words += ["--held-out-modules", *HELD_OUT]
    words += f"--length {LENGTH} --batch {BATCH} --accumulate 1".split()
    words += f"--capture-layers 2 5 7 --fc-norm --norm-before-residual --unroll {UNROLL}".split()
    words += f"--loss overlap --optimizer muon --clip-at 1.0 --warmup {FIRST_STEPS}".split()
    words += f"--learning-rate 1e-2 --schedule wsd --steps {steps} --decay {decay}".split()
    words += f"--eval-every {EVAL_EVERY} --eval-windows {2 * BATCH}".split()
    words += f"--num-speculative-tokens 4 --acceptance-prompts {PROMPTS}".split()
    words += f"--prompt-tokens 64 --max-new-tokens {MAX_TOKENS}".split()
    assert distill_eagle.main(words) == 0


distil(FIRST_STEPS, 0)

# %% [markdown]
# ## 2. Before: served by `LLM`
#
# `RUN/export` holds the head in the authors' layout. Acceptance length is the number of tokens that a pass of the
# target emits: 1 is no gain, and with four drafted tokens 5 is the maximum. The prompts are from modules that neither
# target nor head was trained on.

# %%
sources = [inspect.getsource(importlib.import_module(name)) for name in HELD_OUT]
questions = [source[2000:2240] for source in sources]


def serve(head):
    """Return the acceptance length of a head on the prompts, and the texts."""
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 4}
    llm = jspec.LLM(TARGET, speculative_config=config, dtype="float32")
    params = jspec.SamplingParams(temperature=0.7, max_tokens=SERVED_TOKENS, seed=1)
    answers = [output.outputs[0] for output in llm.generate(questions, params)]
    stats = [answer.speculative_decoding_stats for answer in answers]
    accepted = sum(stat["num_accepted_draft_tokens"] for stat in stats)
    total = sum(len(answer.token_ids) for answer in answers)
    return total / (total - accepted), [answer.text for answer in answers]


before, _ = serve(RUN / "export")
print(f"after {FIRST_STEPS} steps: {before:.2f} tokens a pass")

# %% [markdown]
# ## 3. Train on
#
# The same command with more steps resumes the run; it also does so after Ctrl-C, a crash or a lost machine.

# %%
distil(STEPS, DECAY)

# %% [markdown]
# ## 4. Watch acceptance rise
#
# `RUN/metrics.jsonl` has a line for every few steps. The left plot shows the acceptance length of the serving loop on
# held-out prompts, at temperature 1 and greedy. The right plot shows, on held-out text, the probability that the head's
# guess of the next token is accepted, and of later tokens if those before were.

# %%
log = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]


def curve(name):
    """Return steps and measured values."""
    return zip(*((line["step"], line[name]) for line in log if name in line), strict=True)


_, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
left.plot(*curve("acceptance_length"), marker=".", color="#4c78a8", label="T = 1")
left.plot(*curve("acceptance_length_t0"), marker=".", color="#f58518", label="greedy")
left.axhline(1, color="#333333", linewidth=0.8)
left.set_ylabel("acceptance length, tokens a pass")
for guess, color in zip(range(UNROLL), ("#4c78a8", "#54a24b", "#b279a2", "#9d755d"), strict=False):
    label = f"token {guess + 1} of the draft"
    right.plot(*curve(f"heldout_accepted_{guess}"), marker=".", color=color, label=label)
right.set_ylabel("probability of acceptance")
right.set_ylim(0)
for axes in (left, right):
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(f"step of {BATCH * LENGTH} tokens")
    axes.legend()
plt.tight_layout()
plt.show()

# %% [markdown]
# ## 5. After
#
# The package's head for comparison was trained by the same command in two runs, 63 minutes on two CPU cores, also on
# answers of the target (`training/README.md`).

# %%
after, texts = serve(RUN / "export")
shipped, _ = serve(TARGET.parent / "eagle3")
for name, length in (("before", before), ("after", after), ("shipped head", shipped)):
    print(f"{name:14} {length:.2f} tokens a pass")

# %% [markdown]
# ## 6. Export
#
# jspec reads a head by the content of its files. `training.export` writes it for other servers: `eagle` (the authors'
# layout, which vLLM reads), `sglang`, or `speculators`. jspec loads all of them, and they draft the same.

# %%
other = RUN / "speculators"
words = ["--head", RUN / "export", "--target", TARGET, "--format", "speculators", "--output", other]
assert export.main([str(word) for word in words]) == 0
print(*sorted(path.name for path in other.iterdir()))
again, same = serve(other)
print("same texts from either file:", same == texts)
assert same == texts

# %% [markdown]
# To go further: more steps and text (`--steps 20000 --batch 16`), `--unroll 4` and more, answers of the target as data
# (`python -m training.generate_data`), several devices (`--fsdp`). `training/README.md` explains them, and lists the
# data of the shipped head. Next: `compare_methods`.

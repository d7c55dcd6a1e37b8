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
# # jspec in five minutes
#
# Speculative decoding: a cheap drafter proposes tokens, the target verifies them in one pass, and the output has
# **exactly the target's distribution**. This notebook runs on a CPU, a GPU or a TPU, with a small model that comes
# with the package.

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
import jspec

print(jspec.__name__, "on", jax.devices()[0].device_kind)

# %% [markdown]
# ## A target and a drafter
#
# `LLM`, `SamplingParams` and `speculative_config` have vLLM's names and meanings. The target was trained on Python
# code. An EAGLE-3 head reads its hidden states and drafts four tokens a round.

# %% tags=["parameters"]
DEMO = Path(jspec.__file__).parent / "assets" / "demo"

# %%
EAGLE3 = {"method": "eagle3", "model": str(DEMO / "eagle3"), "num_speculative_tokens": 4}
model = jspec.load(DEMO / "target", dtype="float32")  # a directory, or an id on the hub
llm = jspec.LLM(model, EAGLE3, per_request_stats="detailed")
prompt = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
)
[output] = llm.generate(prompt, jspec.SamplingParams(temperature=0.7, seed=1, max_tokens=64))
answer = output.outputs[0]
print(prompt + answer.text)

# %% [markdown]
# ## The drafts
#
# Every round drafts up to four tokens. The target accepts some of them and adds one of its own.

# %%
stats = answer.speculative_decoding_stats
print(f"{stats['mean_acceptance_length']:.2f} tokens a round")
print("accepted, round by round:", stats["per_step_accepted"])

# %% [markdown]
# ## The output is unchanged
#
# Under the rule `coupled`, draft and target share their noise. The text is that of plain decoding, token for token,
# at any temperature. The default rule keeps the *distribution* and accepts more.

# %%
plain = jspec.LLM(model)
coupled = jspec.LLM(model, EAGLE3 | {"rejection_sample_method": "coupled"})
settings = jspec.SamplingParams(temperature=0.7, seed=1, max_tokens=64)
texts = [each.generate(prompt, settings)[0].outputs[0].text for each in (plain, coupled)]
assert texts[0] == texts[1]
print("identical:", texts[0] == texts[1])

# %% [markdown]
# ## Methods without training
#
# `ngram` and `suffix` propose the tokens that followed the same words before. They pay on repetitive text.
# `jspec methods` lists all methods.

# %%
edit = (
    "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n"
)
for config in (
    {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1},
    {"method": "suffix"},
):
    each = jspec.LLM(model, config)
    [output] = each.generate(edit, jspec.SamplingParams(temperature=0, max_tokens=48))
    length = output.speculative_decoding_stats["mean_acceptance_length"]
    print(f"{config['method']:8} {length:.2f} tokens a round that had a draft")

# %% [markdown]
# Next: `how_it_works` shows one round in detail, `compare_methods` measures several methods, `train_eagle` trains a
# head, and `write_a_drafter` builds a new method.

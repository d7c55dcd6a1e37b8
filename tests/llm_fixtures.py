"""Checkpoints of a tiny target and draft model with a tokenizer, for tests of ``LLM`` and the CLI.

Each is opened once per session. To share programs too, tests run four prompts of at most 17 tokens
for 17 to 32 tokens, some rows sampled and some greedy.
"""

import functools
import json
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import jspec
from jspec.checkpoints import checkpoint
from jspec.checkpoints.heads import head_files
from jspec.models import decoder
from jspec.models.heads import eagle
from tests import networks

SENTENCES = (
    "the quick brown fox jumps over the lazy dog. ",
    "def add(x, y):\n    return x + y\n",
    "grüße aus köln, ça va? 你好 🙂 ",
)
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
VOCAB = 320  # the embeddings are padded past the tokenizer's 300 tokens
_SIZES = dict(num_kv_heads=1, head_dim=8, max_positions=256)
TARGET = networks.build(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, **_SIZES
)
DRAFT = networks.build(
    vocab_size=VOCAB - 8,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    tie_embeddings=True,
    **_SIZES,
)


def write_tokenizer(directory: Path, *, size: int = 300, chat_template: str | None = None) -> None:
    """Write a byte-level BPE tokenizer with one special token, id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([text * 8 for text in SENTENCES], trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    settings |= {"chat_template": chat_template} if chat_template else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(directory: Path, config: decoder.DecoderConfig, seed: int) -> None:
    """Write random weights, large enough for peaked and varied distributions."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(
        functools.partial(decoder.init_params, config=config), jax.random.key(0)
    )
    draw = lambda x: rng.normal(0, 0.15, x.shape) if x.ndim > 1 else np.ones(x.shape)
    params = jax.tree.map(lambda x: draw(x).astype(np.float32), shapes)
    checkpoint.save_pretrained(directory, config, params)


def write_eagle3_head(directory: Path) -> None:
    """Write a random EAGLE-3 head for ``TARGET``."""
    config = eagle.EagleConfig(
        TARGET, 3, (0,), TARGET.hidden_size, TARGET.vocab_size, separate_head=True
    )
    params = eagle.init_params(jax.random.key(3), config)
    head_files.save_head(directory, config, params, TARGET, target_name="target")


@functools.cache
def checkpoints(root: Path) -> dict[str, Path]:
    """Return the directories of target and draft model under ``root``, written on first use."""
    paths = {"target": root / "target", "draft": root / "draft"}
    write_model(paths["target"], TARGET, 0)
    write_model(paths["draft"], DRAFT, 1)
    write_tokenizer(paths["target"], chat_template=CHAT_TEMPLATE)
    write_tokenizer(paths["draft"])
    return paths


@functools.cache
def loaded(root: Path) -> dict[str, jspec.LoadedModel]:
    """Return the two loaded models."""
    return {name: jspec.load(path) for name, path in checkpoints(root).items()}


@functools.cache
def llm(root: Path, method: str) -> jspec.LLM:
    """Return the ``LLM`` of a method; "coupled" is draft_model with that rule."""
    both = loaded(root)
    draft = {"model": both["draft"], "num_speculative_tokens": 3}
    settings = {
        "none": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1},
        "draft_model": draft,
        "coupled": draft | {"rejection_sample_method": "coupled"},
    }
    return jspec.LLM(both["target"], settings[method], per_request_stats="detailed")

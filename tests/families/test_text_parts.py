"""Checkpoints that read images or sound too load as their text part, with a note."""

import logging

import jax
import numpy as np
import pytest

from jspec.checkpoints import checkpoint
from jspec.core import trees
from jspec.models import decoder
from tests.families import models
from tests.families.prompts import PROMPTS

_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "head_dim": 8,
}
# A ``model_type``, the case of its text part, and the config of the other part.
_PIXTRAL = {"vision_config": {"model_type": "pixtral", **_VISION}}
WHOLES = [("mistral3", case, _PIXTRAL) for case in ("mistral", "ministral3")]


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize(("kind", "case", "others"), WHOLES)
def test_the_text_part_loads_alone(kind, case, others, published, tmp_path, caplog):
    text = models.model(case)
    config = models.transformers.AutoConfig.for_model(
        kind, text_config=text.config.to_dict(), tie_word_embeddings=False, **others
    )
    whole = models.transformers.AutoModelForImageTextToText.from_config(config).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path, save_original_format=published)
    with caplog.at_level(logging.WARNING, logger="jspec"):
        config, params, _ = checkpoint.load_pretrained(tmp_path)
    assert "vision_tower" in caplog.text
    tree = trees.chain_tree(1, len(PROMPTS[0]))
    cache = decoder.init_cache(config, 1, 0)
    run = jax.jit(decoder.forward, static_argnames="config")
    logits = run(params, config, np.array(PROMPTS[:1], np.int32), tree, cache).logits
    np.testing.assert_allclose(logits[0], models.states(case)[0][0], atol=2e-4)

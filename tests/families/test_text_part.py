"""The text part of a model that reads images, and its module for later tokens, in one folder."""

import copy
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jspec
from jspec.checkpoints import checkpoint
from jspec.checkpoints.heads.head_files import load_head
from jspec.models import decoder
from jspec.models.heads import mtp
from tests.families import models, table
from tests.families.prompts import PROMPTS

torch, transformers = models.torch, models.transformers
qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")

_, KEYS = table.CASES["qwen3_5_text"]
_SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "image_size": 28,
    "patch_size": 14,
}
# A ``model_type``, the case of its text part, and more of the config of its other part.
WHOLES = [
    ("gemma3", "gemma3_text", {}),
    ("gemma4", "gemma4_text-shared", {"num_key_value_heads": 2, "head_dim": 8}),
    ("mistral3", "mistral", {"model_type": "pixtral", "head_dim": 8}),
    ("mistral3", "ministral3", {"model_type": "pixtral", "head_dim": 8}),
]
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}


class Module(torch.nn.Module):
    """The module of Qwen3.5, from transformers' block and what servers do around it."""

    def __init__(self, config):
        super().__init__()
        config = copy.deepcopy(config)
        config.layer_types = ["full_attention"]
        size, norm = config.hidden_size, qwen.Qwen3_5RMSNorm
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(size), norm(size)
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.layers = torch.nn.ModuleList([qwen.Qwen3_5DecoderLayer(config, 0)])
        self.norm = norm(size)
        self.rotary = qwen.Qwen3_5TextRotaryEmbedding(config)

    def forward(self, embedded, hidden):
        count = embedded.shape[1]
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(pair, -1))
        angles = self.rotary(x, torch.arange(count).expand(3, 1, count))
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        return self.norm(self.layers[0](x, position_embeddings=angles, attention_mask=mask))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a model of text and images, whose text part is that of the table."""
    directory = tmp_path_factory.mktemp("images")
    text = models.model("qwen3_5_text")
    config = transformers.Qwen3_5Config(
        text_config=text.config.to_dict(),
        vision_config=_VISION | {"out_hidden_size": text.config.hidden_size},
    )
    whole = transformers.Qwen3_5ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    modules = {f"mtp.{name}": x.detach().numpy() for name, x in module().named_parameters()}
    save_file(tensors | modules, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("row", WHOLES, ids=lambda row: row[1])
def test_the_text_part_is_that_of_a_model_of_images(row, published, tmp_path, caplog):
    kind, case, others = row
    text = models.model(case)
    config = transformers.AutoConfig.for_model(
        kind,
        text_config=text.config.to_dict(),
        vision_config=_SMALL | others,
        tie_word_embeddings=text.config.tie_word_embeddings,
    )
    whole = transformers.AutoModelForImageTextToText.from_config(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path / "whole", save_original_format=published)
    with caplog.at_level(logging.WARNING):
        config, params, raw = checkpoint.load_pretrained(tmp_path / "whole")
    assert "left out: " in caplog.text and raw["model_type"] == text.config.model_type
    alone, expected, _ = checkpoint.load_pretrained(models.saved(case, tmp_path))
    assert config == alone
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def module():
    """Return a random module."""
    torch.manual_seed(0)
    made = Module(models.model("qwen3_5_text").config)
    with torch.no_grad():
        for parameter in made.parameters():
            is_matrix = parameter.ndim > 1
            scale = 1.5 * parameter.shape[-1] ** -0.5 if is_matrix else 0.2
            parameter.copy_(torch.randn(parameter.shape) * scale)
    return made.eval()


def test_the_text_part_is_loaded_with_a_note_of_what_is_left_out(folder, caplog):
    with caplog.at_level(logging.WARNING):
        config, params, raw = checkpoint.load_pretrained(folder)
    assert "left out: model.visual" in caplog.text
    alone, expected, _ = checkpoint.load_pretrained(models.saved("qwen3_5_text", folder.parent))
    assert (config, raw["model_type"]) == (alone, "qwen3_5_text")
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_the_module_in_its_files_has_the_logits_of_its_formula(folder):
    target = jspec.load(folder)
    head = load_head(folder, target.config)
    text, [prompt] = models.model("qwen3_5_text"), PROMPTS[:1]
    _, states = models.states("qwen3_5_text")[0]
    with torch.no_grad():
        embedded = text.model.embed_tokens(torch.tensor([prompt[1:]]))
        theirs = module()(embedded, torch.tensor(states[-1][None, :-1]))
        logits = text.lm_head(theirs)[0].numpy()
    cache = mtp.init_cache(head.config, 1, 0)
    embedded = jnp.asarray(embedded.numpy())
    ours, _ = mtp.prefill(head.params, head.config, 0, embedded, states[-1][None, :-1], cache)
    actual = decoder.unembed(target.params, target.config, ours, norm=False)[0]
    np.testing.assert_allclose(actual, logits, atol=2e-4)


def test_texts_with_the_module_are_those_of_the_target_alone(folder):
    target = jspec.load(folder)
    settings = jspec.SamplingParams(temperature=0, max_tokens=24, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    expected = [tokens[:24] for tokens, _ in models.generated("qwen3_5_text")]
    llm = jspec.LLM(
        target,
        {"method": "mtp", "num_speculative_tokens": 2},
        max_num_seqs=2,
        max_model_len=64,
    )
    outputs = llm.generate(prompts, settings)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected

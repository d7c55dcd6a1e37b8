"""Tests that heads read and written by the ``speculators`` library give its logits.

The library is optional; without it the tests are skipped.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("speculators")

from safetensors.torch import load_file  # noqa: E402
from speculators.models.eagle3 import Eagle3DraftModel  # noqa: E402

from jspec.checkpoints import checkpoint  # noqa: E402
from jspec.checkpoints.heads import head_files  # noqa: E402
from tests.models import head_cases  # noqa: E402
from tests.models.head_cases import TARGET, VOCAB, WIDTH, target_params  # noqa: E402
from tests.models.test_heads import ROWS, STEPS, TOLERANCE, draft_logits  # noqa: E402

CASES = [name for name in head_cases.EAGLE_CASES if name.startswith("speculators")]


def read_by_speculators(directory):
    """Return the library's model of a checkpoint, with attention that runs on a CPU."""
    config = Eagle3DraftModel.config_class.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    return Eagle3DraftModel.from_pretrained(directory, config=config).eval()


def their_logits(model, states, tokens):
    """Return logits of all rows, the last STEPS self-fed, by the library's training forward.

    In step k, row i reads its output of step k - 1 and token i + k. So the steps of the last true
    row are the self-fed rows.
    """
    logits = []
    hook = model.lm_head.register_forward_hook(lambda *args: logits.append(args[-1][0]))
    flat = torch.cat([states.flatten(1), torch.zeros(STEPS, states[0].numel())])[None]
    with torch.no_grad():
        model(
            flat, tokens[None], torch.zeros(1, len(tokens), dtype=torch.long), ttt_steps=STEPS + 1
        )
    hook.remove()
    true, *fed = logits
    return torch.cat([true[:ROWS], *(step[ROWS - 1 : ROWS] for step in fed)]).numpy()


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    """Return the directory of the target, which the library reads."""
    directory = tmp_path_factory.mktemp("target")
    checkpoint.save_pretrained(directory, TARGET, target_params())
    return str(directory)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("written_by", ["them", "us"])
def test_logits_equal_those_of_the_library(tmp_path, verifier, name, written_by):
    tensors, raw = head_cases.eagle_case(name)
    inner = raw["transformer_layer_config"]
    # The library's windows do not move with the steps of a draft; ours and those of servers do.
    inner |= {"layer_types": ["full_attention"] * inner["num_hidden_layers"]}
    raw["speculators_config"] = {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
    }
    model = read_by_speculators(head_cases.write(tmp_path / "first", tensors, raw))
    if written_by == "them":
        model.save_pretrained(tmp_path / "head")
        head = head_files.load_head(tmp_path / "head", TARGET)
    else:
        head = head_files.load_head(tmp_path / "first", TARGET)
        head_files.save_head(
            tmp_path / "head",
            head.config,
            head.params,
            TARGET,
            layout="speculators",
            target_name=verifier,
        )
        written = load_file(tmp_path / "head" / "model.safetensors")
        assert set(written) == set(tensors)
        model = read_by_speculators(tmp_path / "head")
    assert head.layout == "speculators"
    states = torch.randn(ROWS, len(head.config.capture_layers), WIDTH)
    tokens = torch.randint(0, VOCAB, (ROWS + STEPS,))
    expected = their_logits(model, states, tokens)
    actual = draft_logits(head, states.numpy(), tokens.numpy())
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=0)

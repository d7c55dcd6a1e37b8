"""Heads of the ``speculators`` library itself, read and written: the same logits on both sides.

Skipped where the library is not installed; it is no dependency of the tests.
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
from tests.models.head_cases import TARGET, VOCAB, WIDTH  # noqa: E402
from tests.models.test_heads import (  # noqa: E402
    ROWS,
    STEPS,
    TOLERANCE,
    draft_logits,
    target_params,
)

CASES = [name for name in head_cases.EAGLE_CASES if name.startswith("speculators")]


def read_by_speculators(directory):
    """Their model of a checkpoint, with attention that a CPU can do."""
    config = Eagle3DraftModel.config_class.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    return Eagle3DraftModel.from_pretrained(directory, config=config).eval()


def their_logits(model, states, tokens):
    """Logits of every row, the last STEPS of them self-fed, through their training forward.

    In step k of it row i takes its own output of step k - 1 and token i + k: the last true row's
    steps are the rows that feed themselves.
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
    """The library wants to see the target: a directory."""
    directory = tmp_path_factory.mktemp("target")
    checkpoint.save_pretrained(directory, TARGET, target_params())
    return str(directory)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("written_by", ["them", "us"])
def test_logits_equal_those_of_the_library(tmp_path, verifier, name, written_by):
    tensors, raw = head_cases.eagle_case(name)
    inner = raw["transformer_layer_config"]
    # Their windows do not move on with the steps of a draft, ours do, as those of servers.
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
        found = load_file(tmp_path / "head" / "model.safetensors")
        assert set(found) == set(tensors)
        model = read_by_speculators(tmp_path / "head")
    assert head.layout == "speculators"
    states = torch.randn(ROWS, len(head.config.capture_layers), WIDTH)
    tokens = torch.randint(0, VOCAB, (ROWS + STEPS,))
    expected = their_logits(model, states, tokens)
    found = draft_logits(head, states.numpy(), tokens.numpy())
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)

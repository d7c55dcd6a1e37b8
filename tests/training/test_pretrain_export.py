import json

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.checkpoints import checkpoint
from training import pretrain
from training.networks.forward import head_of, hidden_states
from training.util.provenance import without_folders


@pytest.fixture
def exported(sources, tmp_path):
    """A finished run of the command, in float32."""
    run = tmp_path / "run"
    argv = f"""--out {run} --data {sources} --holdout secret --vocab-size 300 --hidden-size 32
        --intermediate-size 64 --layers 2 --heads 2 --kv-heads 1 --head-dim 16 --length 32 --batch 4
        --accumulate 2 --steps 6 --warmup 2 --learning-rate 1e-2 --export-dtype float32""".split()
    assert pretrain.main(argv) == 0
    return run / "export"


def test_transformers_reads_the_export_and_gives_our_logits(exported):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    ids = transformers.AutoTokenizer.from_pretrained(exported)("def alpha_red").input_ids
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits.numpy()
    config, params, _ = checkpoint.load_pretrained(exported)
    x = hidden_states(params, config, jnp.array([ids]), "float32")
    np.testing.assert_allclose(x @ head_of(params), expected, atol=2e-5)


def test_the_provenance_is_complete_but_names_no_path_of_the_machine(exported, sources):
    facts = json.loads((exported / "provenance.json").read_text())
    assert facts["data"]["heldout_modules"] == ["secret"]
    assert facts["steps"] == 6 and facts["tokens_seen"] == 6 * 4 * 32
    assert facts["heldout"]["loss"] == pytest.approx(
        facts["evaluations"][-1]["heldout_loss"], rel=0.1
    )
    assert len(facts["data"]["train"]["sha256"]) == 64 and facts["versions"]["jax"]
    assert str(sources.parent) not in json.dumps(facts)
    beside_the_run = json.loads((exported.parent / "provenance.json").read_text())
    assert beside_the_run["command"] == facts["command"] and beside_the_run["steps"] == 6


def test_the_exported_config_names_the_separator_as_first_and_last_token(exported):
    for name in ("config.json", "generation_config.json"):
        config = json.loads((exported / name).read_text())
        assert config["bos_token_id"] == config["eos_token_id"] == 0


def test_words_of_the_command_lose_their_folders():
    assert without_folders("/home/someone/data") == "data"
    assert without_folders("--data=/home/someone/data") == "--data=data"
    assert without_folders("--data") == "--data" and without_folders("package:jax") == "package:jax"

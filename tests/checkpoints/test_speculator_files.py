"""MLP and LSTM speculators in files: equal to torch, exact round trips, and named errors."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.checkpoints.heads import head_files
from jspec.models.heads import arctic, mlp_speculator
from tests import tiny
from tests.checkpoints import directories
from tests.drafters import speculators

TARGET, VOCAB = tiny.TARGET.config, tiny.VOCAB
LAYOUTS = {
    "untied": "mlp_speculator",
    "untied scaled": "arctic-rnn",
    "tied": "arctic-rnn",
    "tied scaled": "mlp_speculator",
    "lstm": "arctic-lstm",
    "lstm untied": "arctic-lstm",
}


def save(directory, name, layout=None, **options):
    head = speculators.CONFIGS[name], speculators.random_params(name)
    return directories.save(directory, head, TARGET, layout or LAYOUTS[name], **options)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_saved_speculator_is_loaded_again_as_it_was(tmp_path, name):
    config, params = save(tmp_path, name)
    head = head_files.load_head(tmp_path, TARGET)
    assert (head.kind, head.layout, head.config) == ("mlp_speculator", LAYOUTS[name], config)
    directories.assert_same(head.params, params)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_loaded_speculator_is_saved_tensor_for_tensor(tmp_path, name, dtype):
    save(tmp_path, name, dtype=dtype)
    directories.assert_saved_again(tmp_path, TARGET)
    tensors, _ = directories.read(tmp_path)
    assert {tensor.dtype for tensor in tensors.values()} == {jnp.dtype(dtype)}


def stages_by_torch(torch, between, tied, stages=3, inner=20):
    """Return tensors as in ``state_dict``, which repeats tied weights."""
    normal = lambda *shape: torch.randn(shape) * 0.5
    tensors = {}
    for stage in range(stages):
        width = inner if stage else TARGET.hidden_size
        tensors |= {
            f"emb.{stage}{between}.weight": normal(VOCAB, inner),
            f"proj.{stage}{between}.weight": normal(inner, width),
            f"ln.{stage}{between}.weight": 1 + normal(inner),
            f"ln.{stage}{between}.bias": normal(inner),
            f"head.{stage}.weight": normal(VOCAB, inner),
        }
    for name in tensors if tied else ():
        part, stage, *rest = name.split(".")
        first = 1 if part == "proj" else 0
        if int(stage) > first:
            tensors[name] = tensors[".".join([part, str(first), *rest])].clone()
    return tensors


def lstm_by_torch(torch, tied, stages=3, inner=20):
    """Return the tensors of an LSTM speculator; ``tied`` applies to its embeddings."""
    normal = lambda *shape: torch.randn(shape) * 0.5
    gates, ends = ("forget", "input", "cell", "output"), ("weight", "bias")
    tensors = {f"{gate}_emb.0.weight": normal(VOCAB, inner) for gate in gates}
    if tied:
        tensors = {name: tensors["forget_emb.0.weight"].clone() for name in tensors}
    for stage, width in enumerate((TARGET.hidden_size, inner)):
        tensors |= {f"{gate}_proj.{stage}.weight": normal(inner, width) for gate in gates}
    norms = ("cell_ln", "state_ln")
    tensors |= {f"{norm}.0.{end}": normal(inner) for norm in norms for end in ends}
    head = normal(VOCAB, inner)
    return tensors | {f"head.{stage}.weight": head.clone() for stage in range(stages)}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["mlp_speculator", "arctic-rnn", "arctic-lstm"])
def test_logits_of_files_that_torch_wrote_are_those_of_torch(tmp_path, layout, tied, scaled):
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    lstm, width = layout == "arctic-lstm", TARGET.hidden_size
    raw = {
        "model_type": "mlp_speculator",
        "vocab_size": VOCAB,
        "n_predict": 3,
        "tie_weights": tied or lstm,
        "scale_input": scaled,
        "inner_dim": 20,
    }
    if layout == "mlp_speculator":
        raw |= {"emb_dim": width}
    else:
        raw |= {"emb_dim": [20], "proj_dim": "20", "input_hidden_dim": width}
    raw |= {"method": "sum_lstm", "tie_lstm_embs": tied} if lstm else {}
    between = ".0" * (layout == "arctic-rnn")
    tensors = lstm_by_torch(torch, tied) if lstm else stages_by_torch(torch, between, tied)
    prefix = "speculator." * (layout == "mlp_speculator")
    safetensors.save_file(
        {f"{prefix}{name}": tensor for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(raw))

    head = head_files.load_head(tmp_path, TARGET)
    assert head.layout == layout
    reference = speculators.references()[layout](tensors, raw)
    hidden, fed = torch.randn(width) * 2, [5, 9, 2]
    expected = reference.draft_logits(hidden, fed).numpy()
    network = arctic if lstm else mlp_speculator
    state, rows = network.start(head.config, jnp.asarray(hidden.numpy())), []
    for stage, token in enumerate(fed):
        state, x = network.step(head.params, head.config, state, jnp.int32(token), stage)
        rows.append(network.unembed(head.params, x, stage))
    assert np.ptp(expected, -1).min() > 0.5
    np.testing.assert_allclose(rows, expected, atol=1e-4, rtol=0)


def test_names_and_keys_are_those_of_their_authors(tmp_path):
    save(tmp_path / "a", "tied scaled", dtype="bfloat16")
    tensors, raw = directories.read(tmp_path / "a")
    parts = (
        "emb.0.weight",
        "proj.0.weight",
        "proj.1.weight",
        "ln.0.weight",
        "ln.0.bias",
        "head.0.weight",
    )
    assert set(tensors) == {f"speculator.{part}" for part in parts}
    wanted = {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "n_predict": 4,
        "num_lookahead_tokens": 4,
        "emb_dim": 32,
        "inner_dim": 24,
        "vocab_size": 64,
        "tie_weights": True,
        "scale_input": True,
        "top_k_tokens_per_head": [1, 1, 1, 1],
        "n_candidates": 1,
        "torch_dtype": "bfloat16",
    }
    assert raw | wanted == raw
    save(tmp_path / "b", "lstm")
    tensors, raw = directories.read(tmp_path / "b")
    gates = ("forget", "input", "output", "cell")
    parts = {f"{gate}_{part}.weight" for gate in gates for part in ("emb.0", "proj.0", "proj.1")}
    parts |= {f"{ln}.0.{kind}" for ln in ("cell_ln", "state_ln") for kind in ("weight", "bias")}
    assert set(tensors) == parts | {"head.0.weight"}
    wanted = {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
        "method": "sum_lstm",
        "model_type": "mlp_speculator",
        "input_hidden_dim": 32,
        "inner_dim": "24",
        "emb_dim": "24",
        "proj_dim": "24",
        "tie_weights": True,
        "tie_lstm_embs": True,
        "base_model_archs": ["LlamaForCausalLM"],
        "base_model_name_or_path": "someone/model",
    }
    assert raw | wanted == raw
    save(tmp_path / "c", "untied scaled")
    tensors, raw = directories.read(tmp_path / "c")
    assert {"emb.2.0.weight", "proj.2.0.weight", "ln.2.0.bias", "head.2.weight"} < set(tensors)
    assert (raw["method"], raw["tie_weights"]) == ("sum_rnn", False)


def test_tied_weights_are_recognised_without_the_key(tmp_path):
    for name in ("tied scaled", "untied"):
        config, _ = save(tmp_path, name)
        directories.edit(tmp_path, tie_weights=None)
        assert head_files.load_head(tmp_path, TARGET).config == config
    save(tmp_path, "tied scaled")
    directories.edit(tmp_path, tie_weights=None, tie_wts=True)  # the name in fms
    assert head_files.load_head(tmp_path, TARGET).config.tie_weights


def test_an_inner_dim_of_zero_is_the_targets(tmp_path):
    config, params = save(tmp_path, "untied scaled", layout="mlp_speculator")
    directories.edit(tmp_path, inner_dim=0)
    head = head_files.load_head(tmp_path, TARGET)
    assert head.config == config and config.inner_dim == TARGET.hidden_size
    directories.assert_same(head.params, params)


@pytest.mark.parametrize(
    ("name", "change", "keys", "message"),
    [
        ("untied", None, {"emb_dim": 40}, "expects a hidden size (emb_dim) of 40 where the target"),
        ("untied", None, {"vocab_size": 99}, "expects a vocabulary (vocab_size) of 99 where"),
        ("untied", None, {"n_predict": 3}, "unexpected: emb.3.weight, proj.3.weight, ln.3.weight"),
        ("untied", None, {"n_predict": None}, "n_predict must be a positive integer, got None"),
        ("untied", None, {"inner_dim": 20}, "misshapen: emb.0.weight is float32[64, 24], not"),
        ("untied", None, {"scale_input": "yes"}, "scale_input must be true or false"),
        ("untied", None, {"quantization_config": {"bits": 8}}, "quantization_config is not"),
        ("tied scaled", None, {"tie_weights": False}, "missing: emb.1.weight, emb.2.weight"),
        (
            "tied scaled",
            lambda t: t.update({"speculator.emb.1.weight": t["speculator.emb.0.weight"] + 1}),
            {},
            "emb.1.weight differs from emb.0.weight",
        ),
        (
            "tied scaled",
            lambda t: t.update({"speculator.head.1.bias": t["speculator.ln.0.bias"]}),
            {},
            "1 unexpected: head.1.bias",
        ),
        (
            "tied scaled",
            lambda t: t.update({"speculator.emb.1.0.weight": t["speculator.emb.0.weight"]}),
            {},
            "1 unexpected: emb.1.0.weight",
        ),
        (
            "tied scaled",
            lambda t: t.update({"speculator.emb.1.weight": t.pop("speculator.emb.0.weight")}),
            {},
            "1 missing: emb.0.weight; 1 unexpected: emb.1.weight",
        ),
        ("tied", None, {"n_predict": 1}, "tie_weights needs two stages at least, but n_predict"),
        ("tied", None, {"inner_dim": "24.24"}, "inner_dim='24.24' asks for a stack of layers"),
        ("tied", None, {"proj_dim": "20"}, "must be equal, got inner_dim=24, emb_dim=24, proj_dim"),
        ("tied", None, {"emb_dim": "wide"}, "emb_dim must be a positive integer or its digits"),
        ("tied", None, {"method": "sum_lstm"}, "method is 'sum_lstm', but the tensors are"),
        (
            "tied",
            None,
            {"input_hidden_dim": 16},
            "(input_hidden_dim) of 16 where the target has 32",
        ),
        ("lstm", None, {"method": "sum_rnn"}, "method is 'sum_rnn', but the tensors are of"),
        ("lstm", None, {"tie_weights": False}, "'sum_lstm' has only tied weights"),
        (
            "lstm",
            lambda t: t.update({"cell_emb.0.weight": t["cell_emb.0.weight"] + 1}),
            {},
            "cell_emb.0.weight differs from forget_emb.0.weight",
        ),
        ("lstm untied", lambda t: t.pop("input_proj.1.weight"), {}, "1 missing: input_proj.1.weig"),
    ],
)
def test_files_that_contradict_themselves_or_the_target_are_refused(
    tmp_path, name, change, keys, message
):
    save(tmp_path, name)
    directories.edit(tmp_path, change, **keys)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        head_files.load_head(tmp_path, TARGET)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_a_layout_that_cannot_hold_a_speculator_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is none of arctic-rnn, mlp_speculator, the layouts of"):
        save(tmp_path, "untied", "arctic-lstm")
    with pytest.raises(ValueError, match="names the target; pass its hub id as target_name"):
        head_files.save_head(
            tmp_path, speculators.CONFIGS["lstm"], speculators.random_params("lstm"), TARGET
        )
    assert not list(tmp_path.iterdir())


def test_a_speculator_is_refused_as_another_method(tmp_path):
    save(tmp_path, "untied")
    with pytest.raises(ValueError, match="holds a head of method 'mlp_speculator', not 'medusa'"):
        head_files.load_head(tmp_path, TARGET, kind="medusa")

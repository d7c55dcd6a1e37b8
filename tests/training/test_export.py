"""Conversion of heads between layouts of files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.checkpoints import checkpoint
from jspec.checkpoints.heads import head_files
from jspec.checkpoints.heads import mtp as mtp_format
from jspec.models import decoder
from jspec.models.heads import dflash, dspark, eagle, medusa, mlp_speculator, mtp
from jspec.models.heads.eagle import EagleConfig
from jspec.models.heads.medusa import MedusaConfig
from jspec.models.heads.mlp_speculator import MlpSpeculatorConfig
from tests import networks
from training import export

SIZES = networks.small(
    vocab_size=60, num_layers=6, num_heads=2, num_kv_heads=1, head_dim=16, max_positions=128
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    checkpoint.save_pretrained(directory, SIZES, decoder.init_params(jax.random.key(0), SIZES))
    return directory


def eagle_head(generation):
    third = generation == 3
    network = networks.changed(SIZES, num_layers=1, vocab_size=40 if third else 60)
    config = EagleConfig(
        network=network,
        generation=generation,
        capture_layers=(1, 2, 5) if third else (6,),
        target_hidden_size=32,
        target_vocab_size=60,
        separate_head=third,
    )
    params = eagle.init_params(jax.random.key(1), config)
    vocabulary = jnp.arange(3, 43, dtype=jnp.int32) if third else None
    return config, params.replace(draft_to_target=vocabulary)


def medusa_heads():
    config = MedusaConfig(
        num_heads=2,
        num_layers=1,
        hidden_size=32,
        vocab_size=60,
        target_vocab_size=60,
        capture_layers=(6,),
        num_outputs=2,
    )
    return config, medusa.init_params(jax.random.key(1), config)


def speculator():
    config = MlpSpeculatorConfig(3, 32, 24, 60, (6,), tie_weights=True)
    return config, mlp_speculator.init_params(jax.random.key(1), config)


HEADS = {
    "eagle": lambda: eagle_head(1),
    "eagle3": lambda: eagle_head(3),
    "medusa": medusa_heads,
    "mlp_speculator": speculator,
}


def dflash_head():
    network = networks.changed(SIZES, num_layers=2, qk_norm=True)
    spark = dspark.SparkConfig(6, "gated", confidence=True)
    config = dflash.DFlashConfig(network, (1, 3), 32, SIZES.vocab_size, 5, 9, spark=spark)
    return config, dflash.init_params(jax.random.key(1), config)


HEADS["dspark"] = dflash_head


def convert(head, target, output, name, *more):
    words = ["--head", head, "--target", target, "--output", output, "--format", name, *more]
    return export.main([str(word) for word in words])


def leaves(params):
    without = getattr(params, "embedding", None) is None
    params = params if without else params.replace(embedding=None)
    if isinstance(params, dflash.DFlashParams):
        params = params.replace(head=None)
    return jax.tree.leaves(params)


@pytest.mark.parametrize(
    ("kind", "formats"),
    [
        ("eagle", ["eagle", "sglang"]),
        ("eagle3", ["eagle", "speculators", "sglang"]),
        ("medusa", ["medusa", "medusa-vllm"]),
        ("mlp_speculator", ["arctic-rnn", "mlp_speculator"]),
        ("dspark", ["dflash", "dflash-speculators"]),
    ],
)
def test_a_head_keeps_its_weights_through_every_format(kind, formats, target, tmp_path):
    config, params = HEADS[kind]()
    head_files.save_head(tmp_path / "start", config, params, SIZES, target_name="org/name")
    source = tmp_path / "start"
    for name in [*formats, formats[0]]:
        output = tmp_path / f"{source.name}-{name}"
        assert convert(source, target, output, name) == 0
        loaded = head_files.load_head(output, SIZES, kind=kind)
        for before, after in zip(leaves(params), leaves(loaded.params), strict=True):
            np.testing.assert_array_equal(before, after)
        source = output


@pytest.mark.parametrize("name", ["sglang", "speculators"])
def test_files_for_some_servers_hold_the_targets_embedding(name, target, tmp_path):
    head_files.save_head(tmp_path / "start", *eagle_head(3), SIZES)
    assert convert(tmp_path / "start", target, tmp_path / "end", name) == 0
    loaded = head_files.load_head(tmp_path / "end", SIZES)
    _, params, _ = checkpoint.load_pretrained(target)
    np.testing.assert_array_equal(loaded.params.embedding, params.embedding)


def test_the_name_of_the_target_and_the_dtype_can_be_chosen(target, tmp_path):
    head_files.save_head(tmp_path / "start", *eagle_head(3), SIZES)
    more = ("--target-name", "org/name", "--dtype", "bfloat16")
    assert convert(tmp_path / "start", target, tmp_path / "end", "speculators", *more) == 0
    raw = json.loads((tmp_path / "end" / "config.json").read_text())
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "org/name"
    assert raw["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("eagle", "speculators", "layout='speculators' cannot express EAGLE-1"),
        ("eagle3", "medusa", "EAGLE-3 heads have eagle, sglang, speculators"),
        ("medusa", "eagle", "Medusa heads have medusa, medusa-vllm"),
        ("mlp_speculator", "hydra", "MLP speculator heads have arctic-rnn, mlp_speculator"),
        ("dspark", "speculators", "DSpark heads have dflash, dflash-speculators"),
    ],
)
def test_a_format_that_cannot_hold_a_head_is_refused_in_one_line(
    kind, name, message, target, tmp_path, capfd
):
    head_files.save_head(tmp_path / "start", *HEADS[kind](), SIZES)
    assert convert(tmp_path / "start", target, tmp_path / "end", name) == 2
    printed = capfd.readouterr().err
    assert message in printed and len(printed.strip().splitlines()) == 1
    assert not (tmp_path / "end").exists()


def test_modules_go_into_their_target_and_out_of_it(target, tmp_path):
    config = mtp_format.config_for(SIZES, "mimo")
    params = mtp.init_params(jax.random.key(2), config)
    head_files.save_head(tmp_path / "own", config, params, SIZES)
    run = lambda head, output, form: export.main(
        [
            "--head",
            str(tmp_path / head),
            "--target",
            str(target),
            "--output",
            str(tmp_path / output),
            "--format",
            form,
        ]
    )
    assert run("own", "stitched", "stitched") == 0
    assert run("stitched", "again", "mimo") == 0
    before, after = (head_files.load_head(tmp_path / name, SIZES) for name in ("own", "again"))
    assert before.config == after.config
    assert jax.tree.all(jax.tree.map(np.array_equal, before.params, after.params))
    assert run("own", "other", "eagle") == 2

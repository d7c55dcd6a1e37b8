"""Distillation with the target split among devices, and among the devices of two processes."""

import json
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models import decoder
from tests import house, networks
from tests.training import distil_on_meshes
from tests.training.distil_on_meshes import SIZES
from training.data.batch import Batch
from training.networks.forward import Frozen
from training.networks.target import split
from training.tasks import eagle
from training.tasks.eagle_task import PUBLISHED, EagleTask
from training.util.errors import OptionError


@pytest.fixture(scope="module")
def start(sources, corpus, tmp_path_factory):
    """A function that starts a module on virtual devices, with the paths of the runs."""
    folder = tmp_path_factory.mktemp("runs")
    distil_on_meshes.write_target(corpus.directory / "tokenizer", folder / "target")

    def start(*options, devices: int) -> subprocess.Popen:
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        paths = str(sources), str(folder / "target"), str(folder)
        return subprocess.Popen(
            [sys.executable, "-m", "tests.training.distil_on_meshes", *paths, *options],
            cwd=house.ROOT,
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    start.folder = folder
    return start


def pair(start, *options: tuple[str, ...]) -> list[tuple[int, str]]:
    """Run two processes of four devices each; return exit codes and errors."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    common = "--coordinator", address, "--num-processes", "2", "--process-id"
    both = [start(*common, str(i), *more, devices=4) for i, more in enumerate(options)]
    errors = [process.communicate(timeout=900)[1] for process in both]
    return [(process.returncode, text) for process, text in zip(both, errors, strict=True)]


@pytest.fixture(scope="module")
def runs(start):
    """The runs by name, on one mesh or several."""
    for code, errors in pair(start, (), ()):
        assert code == 0, errors
    process = start(devices=8)
    output, errors = process.communicate(timeout=3000)
    assert process.returncode == 0, errors
    return {tuple(line["run"]): line for line in map(json.loads, output.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "name"), [("eagle", "moves"), ("eagle", "pair"), ("draft", "wide")]
)
def test_losses_are_those_of_one_device(method, name, runs):
    one, several = runs[method, "one"], runs[method, name]
    assert len(several["loss"]) == 6
    for key in ("loss", "heldout_loss", "acceptance_length"):
        np.testing.assert_allclose(several[key], one[key], rtol=1e-5)


@pytest.mark.slow
def test_each_process_writes_its_own_part_of_a_checkpoint(runs, start):
    folder = start.folder / "eagle_pair" / "checkpoints" / "3" / "state"
    assert {path.name for path in folder.glob("ocdbt.process_*")} == {
        "ocdbt.process_0",
        "ocdbt.process_1",
    }


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("--seed 1", "--seed 1 does not work; process 1 has it, process 0 has 0;"),
        ("--length 20", "--length '20' does not work; process 1 has it, process 0 has '24';"),
        ("--target missing", "missing"),
    ],
)
def test_processes_that_disagree_end_alike_before_the_target_is_read(options, error, start):
    first, other = pair(start, (), tuple(options.split()))
    assert first[0] == other[0] == 2
    assert error in first[1] and error in other[1]
    assert "process 1" in first[1]


def test_a_mesh_that_divides_no_heads_is_refused_with_the_sizes_that_work():
    with pytest.raises(OptionError, match=r"--tensor 3 .*the 4 heads, 2 key heads.*with 2, 4"):
        split(SIZES, 3)


def test_a_step_has_no_float32_copy_of_the_weights_of_the_target():
    sizes = networks.changed(SIZES, intermediate_size=52)
    weights = decoder.init_params(jax.random.key(0), sizes, jnp.bfloat16)
    narrow = eagle.HeadSettings(
        capture_layers=(0, 1, 2), draft_vocab_size=80, intermediate_size=64, start="random"
    )
    head = eagle.head_config(narrow, "eagle3", sizes)
    task = EagleTask(head, sizes, PUBLISHED["eagle3"], start="random")
    frozen = Frozen(weights, None, jnp.arange(80))
    params = task.init(jax.random.key(1), frozen)
    batch = Batch(*(jnp.ones((2, 9), dtype) for dtype in (jnp.int32, jnp.int32, jnp.float32)))
    step = jax.make_jaxpr(jax.value_and_grad(task.loss, has_aux=True))
    text = str(step(params, frozen, batch, jax.random.key(2)))
    mlp, output = ("32,104", "52,32"), "32,300"
    for shape in (*mlp, output):
        assert f"bf16[{shape}]" in text and f"f32[{shape}]" not in text

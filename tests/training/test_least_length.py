"""A window that is too short for a method is refused, and the least length trains every guess."""

import jax
import numpy as np
import pytest

from jspec.checkpoints.loading import LoadedModel
from jspec.models import decoder
from tests import networks
from training import distill
from training.data.batch import Batch
from training.data.packing import pack
from training.data.settings import Data
from training.data.token_file import TokenFile
from training.trainer.task import Ratio
from training.util.command import parse

SIZES = networks.small(
    hidden_size=16, intermediate_size=24, num_layers=3, num_heads=2, num_kv_heads=1
)
ALL_ROWS = ["--retention", "1", "--retention-least", "1"]  # else rows are drawn
# Method and options, the option that decides, and the least length with it.
CASES = [
    ("medusa", [], "--num-heads 5", 6),
    ("medusa", ["--num-heads", "2"], "--num-heads 2", 3),
    ("hydra", [], "--num-heads 4", 5),
    ("mlp_speculator", [], "--n-predict 3", 4),
    ("eagle", ["--capture-layers", "0", "1", "2"], "--unroll 7", 8),
    ("eagle", ["--variant", "eagle1"], "--unroll 1", 2),
    ("eagle", ["--parallel", *ALL_ROWS, "--capture-layers", "0", "1", "2"], "--depths 8", 9),
    ("mtp", [], "--unroll 3", 4),
    ("dflash", ["--block-size", "5", "--head-layers", "1"], "--block-size 5", 5),
    (
        "dflash",
        ["--variant", "dspark", "--block-size", "5", "--head-layers", "1"],
        "--block-size 5",
        6,
    ),
    ("draft", ["--draft-layers", "0", "--parallel", "--depths", "3", *ALL_ROWS], "--depths 3", 3),
]
NAMES = [" ".join([method, *options[:2]]) for method, options, *_ in CASES]


def words(options, length):
    given = ["--target=none", "--output=none", "--data=none", "--acceptance-prompts=0"]
    return [*given, "--compute=float32", f"--length={length}", *options]


@pytest.mark.parametrize(("method", "options", "option", "least"), CASES, ids=NAMES)
def test_a_shorter_window_is_refused_with_the_least_length(method, options, option, least, capsys):
    for length in (1, least - 1):
        assert distill.main([method, *words(options, length)]) == 2
        assert capsys.readouterr().err == (
            f"error: --length {length} does not work; with {option} it must be at least {least}, "
            "to hold a label for every guess\n"
        )


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options", "option", "least"), CASES, ids=NAMES)
def test_every_guess_has_a_label_at_the_least_length_and_not_below(method, options, option, least):
    argv, kind = words(options, least), distill.METHODS[method]
    settings = parse(kind.options(argv), argv, module="", description="")
    params = decoder.init_params(jax.random.key(0), SIZES)
    tokens = np.arange(1, 31, dtype=np.uint16)
    file = TokenFile(tokens, np.ones(30, bool), np.array([30]), np.zeros((1, 2), np.uint64), {})
    target = LoadedModel("", SIZES, params, {})
    build = kind.build(settings, target, Data(pack(file, np.arange(1), least), None, {}))
    trained = build.task.init(jax.random.key(1), build.frozen)

    def guesses(length):
        """Return the number of labels of each guess in a window of one document."""
        window = np.arange(1, length + 2, dtype=np.int32)[None]
        batch = Batch(window, np.ones_like(window), np.ones(window.shape, np.float32))
        _, metrics = jax.jit(build.task.loss)(trained, build.frozen, batch, jax.random.key(2))
        return [float(m.count) for m in metrics.values() if isinstance(m, Ratio)]

    counts = guesses(least)
    assert counts and all(counts)
    try:
        assert not all(guesses(least - 1))
    except (TypeError, ValueError) as error:  # shapes that do not fit
        assert "shape" in str(error) or "negative" in str(error)

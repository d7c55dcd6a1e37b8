"""The trainer, in one process on one device."""

import dataclasses
import json
import os
import re
import signal

import grain
import jax
import numpy as np
import pytest

from tests.training import toy
from training import data, trainer
from training.trainer import loop
from training.trainer.checkpointing import Checkpoints
from training.trainer.metrics import Means, read_log
from training.trainer.task import Ratio
from training.util.command import run_command
from training.util.errors import TrainingError
from training.util.locks import alone


def same(left, right) -> bool:
    """Compare bit for bit."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def saved(out) -> tuple[int, ...]:
    with Checkpoints(out / "checkpoints") as checkpoints:
        return checkpoints.steps


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run and its folder."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return toy.run(out), out


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, whole):
    for steps in (4, 3, None, None):  # the last call has nothing left to do
        result = toy.run(tmp_path, stop_after=steps)
    assert result.step == 10 and result.finished and same(result.params, whole[0].params)
    assert [part["from_step"] for part in result.record["segments"]] == [0, 4, 7]
    losses = lambda out: [(e["step"], e["loss"]) for e in read_log(out / "metrics.jsonl")]
    assert losses(tmp_path) == losses(whole[1])


def test_a_signal_ends_the_run_after_its_step_with_everything_saved(tmp_path, whole):
    stop = lambda step, _: os.kill(os.getpid(), signal.SIGTERM) if step == 4 else None
    result = toy.run(tmp_path, bar=stop)
    assert 4 <= result.step <= 5 and not result.finished and saved(tmp_path)[-1] == result.step
    assert result.signal == signal.SIGTERM
    assert same(toy.run(tmp_path).params, whole[0].params)


def test_a_second_signal_is_not_held_back(tmp_path):
    stop = lambda *_: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            toy.run(tmp_path, bar=stop)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupted_save_leaves_the_old_checkpoint_whole(tmp_path, whole, monkeypatch):
    before = toy.run(tmp_path, stop_after=3)

    def power_cut(*_, **__):
        raise OSError("no space left on device")

    def cut(step, _):
        broken.setattr(os, "rename", power_cut)
        broken.setattr(os, "replace", power_cut)

    with monkeypatch.context() as broken, pytest.raises(TrainingError, match="no space"):
        toy.run(tmp_path, stop_after=2, bar=cut)
    assert saved(tmp_path) == (before.step,)
    assert same(toy.run(tmp_path).params, whole[0].params)


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path):
    scores, weights = iter([1.0, 7.0, 3.0, 2.0, 7.0, 5.0]), []

    def measure(params):
        weights.append(jax.device_get(params))
        return {"acceptance_length": next(scores)}

    result = toy.run(
        tmp_path,
        measure=measure,
        best=("acceptance_length", "max"),
        steps=6,
        eval_every=1,
        save_every=1,
        keep=1,
    )
    assert saved(tmp_path) == (5, 6) and result.record["best"] == [5, 7.0]  # the later of equals
    assert same(result.best_params(), weights[4]) and same(result.params, weights[5])


def test_parts_and_length_of_a_run_may_change_when_it_resumes(tmp_path):
    toy.run(tmp_path, stop_after=2)
    result = toy.run(tmp_path, accumulate=4, steps=6, eval_every=3, keep=5, save_minutes=1.0)
    assert result.finished and result.record["segments"][1]["accumulate"] == 4


def test_options_that_change_nothing_do_not_identify_a_run(tmp_path):
    toy.run(tmp_path, stop_after=1, learning_rate_floor=0.5, clip="none", clip_at=3.0)
    assert toy.run(tmp_path, stop_after=1, clip="none").step == 2
    with pytest.raises(ValueError, match=r"--clip 'norm' \(was 'none'\)"):
        toy.run(tmp_path)


def test_another_run_is_not_resumed_by_mistake(tmp_path):
    toy.run(tmp_path, stop_after=1, schedule="cosine", identity={"head_layers": 1})
    with pytest.raises(ValueError) as refused:
        toy.run(tmp_path, seed=4, steps=11, schedule="cosine", identity={"head_layers": 2})
    for named in ("--seed 4 (was 0)", "--steps 11 (was 10)", "--head-layers 2 (was 1)"):
        assert named in str(refused.value)
    with pytest.raises(ValueError, match=r"--learning-rate 0.1 \(was 0.03\); give a new folder"):
        toy.run(tmp_path, learning_rate=0.1, schedule="cosine", identity={"head_layers": 1})


def test_parts_of_a_step_add_up_to_the_whole(tmp_path, whole):
    curves = []
    for accumulate in (1, 4):
        out = tmp_path / str(accumulate)
        toy.run(out, toy.Bigrams(noise=0.0), accumulate=accumulate, steps=4, held_out=())
        log = read_log(out / "metrics.jsonl")
        curves.append([[entry[name] for entry in log] for name in ("loss", "likely")])
    np.testing.assert_allclose(*curves, rtol=2e-5)


def test_held_out_metrics_weigh_every_row_alike(whole):
    rows = toy.Rows(count=11, seed=3)
    batch = lambda *indices: jax.tree.map(lambda *x: np.stack(x), *(rows[i] for i in indices))
    metrics = whole[0].evaluate([batch(*range(8)), batch(8, 9, 10)])
    # Without noise the metric is the mean over single rows.
    params = jax.device_get(whole[0].params)
    one = lambda i: toy.Bigrams(noise=0.0).loss(params, toy.FROZEN, batch(i), jax.random.key(0))[1]
    alone = [one(i) for i in range(11)]
    np.testing.assert_allclose(metrics["loss"], np.mean([x["loss"] for x in alone]), rtol=1e-5)
    likely = sum(x["likely"].total for x in alone) / sum(x["likely"].count for x in alone)
    np.testing.assert_allclose(metrics["likely"], likely, rtol=1e-5)
    first, rest = (whole[0].evaluate([batch(*part)])["loss"] for part in (range(8), (8, 9, 10)))
    np.testing.assert_allclose(metrics["loss"], (8 * first + 3 * rest) / 11, rtol=1e-6)


def test_a_loss_that_overflows_stops_the_run_and_is_never_saved(tmp_path):
    with pytest.raises(TrainingError, match=r"became (nan|inf) at step \d.*lower --learning-rate"):
        toy.run(tmp_path, learning_rate=1e38, warmup=0, save_every=1, held_out=())
    assert saved(tmp_path) == (1,)


def test_weights_that_overflow_under_a_finite_loss_are_never_saved(tmp_path):
    with pytest.raises(TrainingError, match="weights or the optimiser's state overflowed by step"):
        toy.run(tmp_path, weight_decay=3e38, learning_rate=1e6, save_every=1, warmup=0, held_out=())
    assert saved(tmp_path) == ()


def test_exhausted_memory_ends_in_one_line_with_its_remedy(tmp_path, monkeypatch):
    made = loop.make_programs

    def failing(*arguments):
        programs = made(*arguments)

        def step(state, *rest):
            if int(state.step) == 3:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9G")
            return programs.step(state, *rest)

        return programs._replace(step=step)

    monkeypatch.setattr(loop, "make_programs", failing)
    with pytest.raises(TrainingError) as stopped:
        toy.run(tmp_path, save_every=2)
    assert str(stopped.value) == (
        "out of memory at step 3 (checkpoint 2 is whole); give more --accumulate (was 2), a "
        "smaller --batch (was 8), or spread the weights over more devices (--fsdp, was 1; "
        "--tensor splits a target too, was 1)"
    )
    assert saved(tmp_path) == (2,)


def test_other_errors_of_the_device_are_not_changed(tmp_path, monkeypatch):
    def failing(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(loop, "make_programs", failing)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        toy.run(tmp_path)


def test_data_that_end_stop_the_run_with_a_checkpoint_left(tmp_path):
    once = grain.MapDataset.source(toy.Rows(count=24)).batch(8).to_iter_dataset()
    with pytest.raises(
        TrainingError, match=r"data ended at step 3 \(checkpoint 2 is whole\); give"
    ):
        toy.run(tmp_path, batches=iter(once), save_every=2)
    empty = grain.MapDataset.source(toy.Rows(count=7)).batch(8, drop_remainder=True)
    with pytest.raises(TrainingError, match=r"data ended at step 0 \(there is no checkpoint yet\)"):
        toy.run(tmp_path / "empty", batches=iter(empty.to_iter_dataset()))


def test_batches_of_another_size_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--batch 8 does not work; the data comes 4 at a time"):
        toy.run(tmp_path, batches=data.batches(toy.Rows(), batch=4, seed=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp": 2}, "a mesh of 1 x 2 x 1 .* does not fit 1 devices"),
        ({"data_parallel": 2}, "a mesh of 2 x 1 x 1 .* does not fit 1 devices"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        toy.run(tmp_path, **options)


def test_the_log_holds_means_and_tensorboard_the_same(tmp_path, whole):
    toy.run(tmp_path, log_every=4, eval_every=10, stop_after=9)
    fine = [entry["loss"] for entry in read_log(whole[1] / "metrics.jsonl")]
    coarse = read_log(tmp_path / "metrics.jsonl")
    assert [entry["step"] for entry in coarse] == [4, 8]
    np.testing.assert_allclose(
        [entry["loss"] for entry in coarse], [np.mean(fine[:4]), np.mean(fine[4:8])], rtol=1e-4
    )
    assert coarse[1]["tokens_per_second"] > 0 and {"grad_norm", "learning_rate"} <= set(coarse[0])
    board = {(e.step, v.tag): v.simple_value for e in events(tmp_path) for v in e.summary.value}
    assert board[8, "loss"] == pytest.approx(coarse[1]["loss"])


def events(out):
    """Return the events of TensorBoard's file: records of length, checksum, message, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = (out / "tensorboard").iterdir()
    content, offset, entries = path.read_bytes(), 0, []
    while offset < len(content):
        size = int.from_bytes(content[offset : offset + 8], "little")
        entries.append(Event.FromString(content[offset + 12 : offset + 12 + size]))
        offset += 16 + size
    return entries


def test_the_curves_are_drawn(whole):
    from matplotlib.image import imread

    picture = imread(whole[1] / "curves.png")
    assert picture.shape[1] > 400 and 0.5 < picture.mean() < 0.999


def test_provenance_of_the_run_lies_beside_it(whole):
    facts = json.loads((whole[1] / "provenance.json").read_text())
    assert facts["steps"] == 10 and facts["parameters"] == 8 * 16 + 8 + 16 * 16
    assert [e["step"] for e in facts["evaluations"]] == [5, 10] and facts["best"][0] in (5, 10)
    assert facts["mesh"] == {"data": 1, "fsdp": 1, "tensor": 1}


def test_metrics_are_read_one_step_late():
    means = Means()
    assert means.add({"loss": jax.numpy.float32(2.0)}) is None
    assert means.add({"loss": jax.numpy.float32(4.0)}, weight=3.0) == {"loss": 2.0}
    assert means.flush() == {"loss": 4.0} and means.flush() is None
    assert means.take() == {"loss": 3.5}


def test_ratios_are_divided_once_all_is_added_up():
    means, ratio = Means(), lambda total, count: Ratio(np.float32(total), np.float32(count))
    means.add({"loss": np.float32(2.0), "likely": ratio(0.25, 0.5)})
    means.add({"loss": np.float32(4.0), "likely": ratio(0.125, 0.125)}, weight=2.0)
    assert means.flush() == {"loss": 4.0, "likely": 1.0}
    assert means.take() == {"loss": 10 / 3, "likely": 0.5 / 0.75}


def test_a_ratio_of_no_rows_is_left_out():
    means, none = Means(), Ratio(np.float32(0.0), np.float32(0.0))
    means.add({"loss": np.float32(2.0), "likely": none})
    assert means.flush() == means.take() == {"loss": 2.0}


def test_a_run_that_stops_for_a_reason_says_so_in_one_line(capsys):
    def stops(*_):
        raise TrainingError("loss became nan")

    code = run_command(
        trainer.TrainerSettings, stops, ["--batch", "32"], module="x", description="x"
    )
    assert code == 1 and capsys.readouterr().err == "stopped: loss became nan\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_a_signal_stops_ends_with_the_code_of_the_signal(
    number, code, tmp_path, capsys
):
    stop = lambda step, _: os.kill(os.getpid(), number) if step == 4 else None
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    handlers = signal.getsignal(signal.SIGTERM)

    def command(bar):
        run = lambda *_: trainer.check_stopped(toy.run(tmp_path, bar=bar))
        return run_command(trainer.TrainerSettings, run, [], module="x", description="x")

    try:
        assert command(stop) == code
    finally:
        signal.signal(signal.SIGINT, usual)
    printed = capsys.readouterr().err
    assert re.fullmatch(r"stopped and saved at step [45]; run the same command .*\n", printed)
    assert signal.getsignal(signal.SIGTERM) == handlers
    assert command(None) == 0 and saved(tmp_path)[-1] == 10


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a command with two paths."""

    output: str
    cache: str = "/"


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("file", "File exists"),
        ("file/run", "Not a directory"),
        ("/proc/nothing/run", "No such file or directory"),
    ],
)
def test_a_run_that_cannot_be_written_names_its_option_in_one_line(name, cause, tmp_path, capfd):
    (tmp_path / "file").write_text("text")
    out = tmp_path / name
    train = lambda *_: toy.run(out)
    assert run_command(Options, train, ["--output", str(out)], module="x", description="x") == 2
    printed = capfd.readouterr().err
    assert printed.startswith(f"error: --output '{out}' does not work; {cause}: ")
    assert printed.endswith("; name another place\n") and printed.count("\n") == 1


def test_the_lock_of_a_run_lies_in_its_folder(tmp_path):
    seen = []
    toy.run(tmp_path / "run", steps=2, bar=lambda *_: seen.extend(tmp_path.rglob("*lock")))
    assert set(seen) == {tmp_path / "run" / ".lock"}
    assert not list(tmp_path.rglob("*lock"))


def test_two_processes_do_not_train_one_run(tmp_path):
    refused = pytest.raises(ValueError, match="'run' is being written by another process")
    with alone(tmp_path / "run", folder=True), refused:
        toy.run(tmp_path / "run", steps=2)
    assert toy.run(tmp_path / "run", steps=2).finished
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

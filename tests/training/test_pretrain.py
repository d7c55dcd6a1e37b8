import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest

from training import data, loop, optim, pretrain, settings
from training.checkpointing import Checkpoints


def same(left, right) -> bool:
    """Bit for bit."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(with_options, corpus):
    trainer = loop.make_trainer(with_options(optimizer="muon", compute="bfloat16"))
    windows = data.Windows(corpus.train, 32)
    whole = trainer.init()
    for step in range(12):
        whole, _ = trainer.step(whole, windows.batch(step, 4), ())
    for steps in (5, 3, None, None):  # the last finds the run finished, and leaves it as it is
        state, record = loop.train(trainer, corpus, stop_after=steps)
    assert int(state.step) == 12 and same(state, whole)
    assert [entry["step"] for entry in record["losses"]] == [5, 10, 12]
    assert [part["from_step"] for part in record["segments"]] == [0, 5, 8]


def test_an_interrupted_save_leaves_the_old_checkpoint_whole(with_options, corpus, monkeypatch):
    trainer = loop.make_trainer(with_options())
    before, _ = loop.train(trainer, corpus, stop_after=3)

    def power_cut(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as broken, pytest.raises(OSError, match="no space"):
        broken.setattr(os, "rename", power_cut)
        broken.setattr(os, "replace", power_cut)
        loop.train(trainer, corpus, stop_after=2)
    checkpoints = Checkpoints(trainer.settings.out_dir / "checkpoints")
    assert checkpoints.latest == 3 and same(checkpoints.restore(trainer.init())[0], before)


def test_a_signal_ends_the_run_after_its_step_with_everything_saved(with_options, corpus):
    stop = lambda step, _: os.kill(os.getpid(), signal.SIGTERM) if step == 4 else None
    trainer = loop.make_trainer(with_options())
    state, _ = loop.train(trainer, corpus, bar=stop)
    assert int(state.step) == 4
    assert Checkpoints(trainer.settings.out_dir / "checkpoints").latest == 4


@pytest.mark.parametrize("optimizer", optim.OPTIMIZERS)
def test_the_loss_falls_on_a_tiny_text(with_options, corpus, optimizer):
    trainer = loop.make_trainer(with_options(steps=60, optimizer=optimizer, schedule="cosine"))
    _, record = loop.train(trainer, corpus)
    losses = [entry["loss"] for entry in record["losses"]]
    assert losses[-1] < 0.6 * losses[0]
    assert record["losses"][-1]["heldout_loss"] < record["losses"][0]["heldout_loss"]


def test_parts_of_a_step_add_up_to_the_whole(with_options, corpus):
    batch = data.Windows(corpus.train, 32).batch(0, 4)
    stepped = []
    for accumulate in (1, 2):
        trainer = loop.make_trainer(with_options(accumulate=accumulate))
        stepped.append(trainer.step(trainer.init(), batch, ()))
    (one, metrics), (two, same_metrics) = stepped
    np.testing.assert_allclose(metrics["loss"], same_metrics["loss"], rtol=1e-6)
    np.testing.assert_allclose(one.params.embedding, two.params.embedding, atol=1e-5)


def test_wsd_before_its_decay_does_not_depend_on_the_length_of_the_run():
    short, long = (
        optim.make_schedule("wsd", 1.0, steps=steps, warmup=10, decay=20) for steps in (100, 200)
    )
    assert [short(s) for s in range(80)] == [long(s) for s in range(80)]
    assert short(5) == 0.5 and short(90) == pytest.approx(0.5) and short(100) == 0


def test_cosine_falls_to_a_tenth_of_its_peak():
    schedule = optim.make_schedule("cosine", 1.0, steps=100, warmup=10, decay=0)
    assert schedule(0) == 0 and schedule(10) == 1 and schedule(100) == pytest.approx(0.1)


def test_a_student_learns_its_teachers_distribution(with_options, corpus, tmp_path):
    wide = with_options(seed=5)
    teacher = (wide.model_config(), loop.make_trainer(wide).init().params)
    student = with_options(out=str(tmp_path / "student"), steps=40, teacher_weight=1.0)
    _, record = loop.train(loop.make_trainer(student, teacher), corpus)
    assert record["losses"][-1]["heldout_kl"] < 0.8 * record["losses"][0]["heldout_kl"]
    assert record["losses"][-1]["heldout_overlap"] > record["losses"][0]["heldout_overlap"]


def test_a_run_is_not_resumed_on_other_data(with_options, corpus, sources, tmp_path):
    trainer = loop.make_trainer(with_options())
    loop.train(trainer, corpus, stop_after=1)
    other = data.prepare(tmp_path / "other", [str(sources)], ["alpha"], vocab_size=300)
    with pytest.raises(ValueError, match="was trained on other data; give a new --out"):
        loop.train(trainer, other)


def test_another_run_is_not_resumed_by_mistake(with_options):
    before = dataclasses.asdict(with_options())
    with pytest.raises(ValueError, match=r"--batch 8 \(was 4\); give a new --out"):
        settings.check_resumable(with_options(batch=8), before)
    settings.check_resumable(with_options(steps=20), before)  # wsd: a longer run is the same run
    cosine = dataclasses.asdict(with_options(schedule="cosine"))
    with pytest.raises(ValueError, match=r"--steps 20 \(was 12\)"):
        settings.check_resumable(with_options(schedule="cosine", steps=20), cosine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps 0 does not work; it must be at least 1"),
        (["--kv-heads", "3"], "--kv-heads 3 does not work; it must divide --heads 4"),
        (["--accumulate", "5"], "--accumulate 5 does not work; it must divide --batch 16"),
        (["--length", "2048"], "--length 2048 does not work; at most --max-positions 1024"),
        (["--context", "100"], "--context 100 does not work; it must divide --length 512"),
        (["--learning-rate", "0"], "--learning-rate 0.0 does not work; it must be above 0"),
        (["--vocab-size", "10"], "--vocab-size 10 does not work; take 257 to 65536"),
        (["--head-dim", "7"], "--head-dim 7 does not work; it must be even"),
        (["--warmup", "5000"], "--steps 2000 does not work; warm-up and decay do not fit"),
        (["--teacher-weight", "2"], "--teacher-weight 2.0 does not work; take 0 to 1"),
    ],
)
def test_bad_options_give_one_line_and_exit_code_2(capsys, options, message):
    assert pretrain.main(["--out", "run", "--data", "stdlib", *options]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_run_needs_a_folder_and_data(capsys):
    assert pretrain.main([]) == 2 and "--out" in capsys.readouterr().err
    assert pretrain.main(["--out", "run"]) == 2 and "--data" in capsys.readouterr().err


def test_settings_are_the_command_line():
    parsed = settings.parse(["--out", "run", "--data", "stdlib", "a.py", "--heads", "2"])
    assert parsed.data == ("stdlib", "a.py") and parsed.heads == 2
    json.dumps(dataclasses.asdict(parsed))

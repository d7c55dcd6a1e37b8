import jax
import numpy as np
import pytest

from training import data, pretrain


def test_the_loss_falls_on_a_tiny_text(with_options):
    for optimizer in ("adamw", "muon"):
        settings = with_options(
            steps=60, eval_every=20, optimizer=optimizer, out=f"{with_options().out}-{optimizer}"
        )
        losses = pretrain.run(settings).record["evaluations"]
        assert losses[-1]["heldout_loss"] < 0.75 * np.log(300)
        assert losses[-1]["heldout_loss"] < losses[0]["heldout_loss"]


def test_a_run_is_not_resumed_on_other_data_or_sizes(with_options, sources, tmp_path):
    pretrain.run(with_options(), stop_after=1)
    other = tmp_path / "other"
    data.prepare(other, [str(sources)], ["alpha"], vocab_size=300)
    with pytest.raises(ValueError, match=r"--data 'sha256 \w+' \(was 'sha256 \w+'\); give a new"):
        pretrain.run(with_options(corpus=str(other)))
    with pytest.raises(ValueError, match=r"--batch 2 \(was 4\), --intermediate-size 32 \(was 64\)"):
        pretrain.run(with_options(batch=2, intermediate_size=32))


def test_a_corpus_that_is_none_or_of_more_tokens_is_refused_before_the_work(with_options, tmp_path):
    nothing = with_options(corpus=str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"--corpus '.*nothing' does not work; it holds no corpus"):
        pretrain.run(nothing)
    with pytest.raises(ValueError, match=r"--vocab-size 299 does not work; .* has 300 tokens"):
        pretrain.run(with_options(vocab_size=299))
    assert not (tmp_path / "run").exists()


def test_cut_windows_keep_every_input_and_its_target():
    windows = jax.numpy.arange(66).reshape(2, 33)
    parts = pretrain.cut(windows, 8)
    assert parts.shape == (8, 9)
    pairs = lambda rows: set(
        zip(*np.array((rows[:, :-1].ravel(), rows[:, 1:].ravel())), strict=True)
    )
    assert pairs(parts) == pairs(windows)
    assert np.array_equal(pretrain.cut(windows, 32), windows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps 0 does not work; it must be at least 1"),
        (["--layers", "0"], "--layers 0 does not work; it must be at least 1"),
        (["--kv-heads", "3"], "--kv-heads 3 does not work; it must divide --heads 4"),
        (["--accumulate", "5"], "--accumulate 5 does not work; it must divide --batch 16"),
        (["--length", "2048"], "--length 2048 does not work; at most --max-positions 1024"),
        (["--context", "100"], "--context 100 does not work; it must divide --length 512"),
        (["--learning-rate", "0"], "--learning-rate 0.0 does not work; it must be above 0"),
        (
            ["--learning-rate", "inf"],
            "--learning-rate inf does not work; it must be above 0 and finite",
        ),
        (["--weight-decay", "nan"], "--weight-decay nan does not work; it must be at least 0"),
        (["--decay", "9"], "--decay 9 does not work; only --schedule wsd has it; leave it out"),
        (["--learning-rate-floor", "2"], "--learning-rate-floor 2.0 does not work; take 0 to 1"),
        (["--beta2", "1"], "--beta2 1.0 does not work; it must be at least 0 and below 1"),
        (["--vocab-size", "10"], "--vocab-size 10 does not work; take 257 to 65536"),
        (["--head-dim", "7"], "--head-dim 7 does not work; it must be even"),
        (["--warmup", "5000"], "--steps 2000 does not work; warm-up and decay do not fit"),
        (["--process-id", "1"], "--process-id 1 does not work; give --coordinator host:port too"),
        (
            ["--coordinator", "a:1", "--process-id", "1"],
            "--process-id 1 does not work; count from 0 to --num-processes 1 less one",
        ),
    ],
)
def test_bad_options_give_one_line_and_exit_code_2(capsys, options, message):
    assert pretrain.main(["--out", "run", "--data", "stdlib", *options]) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1


def test_a_run_needs_a_folder_and_data(capsys):
    assert pretrain.main(["--data", "stdlib"]) == 2 and "--out" in capsys.readouterr().err
    assert pretrain.main(["--out", "run"]) == 2 and "--data" in capsys.readouterr().err
    assert pretrain.main(["--out", "run", "--data", "x"]) == 2
    assert "--holdout () does not work; name a module" in capsys.readouterr().err
    assert pretrain.main(["--out", "run", "--data", "x", "--batch", "y"]) == 2
    assert "--batch" in capsys.readouterr().err


def test_ctrl_c_before_the_first_step_ends_in_one_line(capsys, monkeypatch, tmp_path):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain, "open_corpus", interrupted)
    words = ["--out", str(tmp_path / "run"), "--data", "stdlib", "--holdout", "json"]
    assert pretrain.main(words) == 130
    assert capsys.readouterr().err == "stopped; run the same command to resume\n"


def test_every_setting_is_an_option_and_explained(capsys):
    assert pretrain.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("--data", "--hidden-size", "--fsdp"))
    assert "tokens of a training window" in printed

"""``training.distill``, from files to files that generate."""

import functools
import json
import re
import resource
import shutil

import jax
import numpy as np
import pytest

from jspec import LLM, SamplingParams
from jspec.checkpoints import checkpoint
from jspec.checkpoints.heads import head_files
from jspec.checkpoints.heads.dflash import default_capture_layers
from jspec.models import decoder
from tests import networks
from training import distill, distill_draft, distill_eagle
from training.export import check
from training.tasks import dflash, eagle

SIZES = networks.small(
    vocab_size=300, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=16, max_positions=128
)
ENTRY_POINTS = {"eagle": distill_eagle.main, "draft": distill_draft.main}


def distil(method, argv, options=""):
    """Run the command of a method; ``options`` are more of them, as typed."""
    argv = [*argv, *options.split()]
    if method in ENTRY_POINTS:
        return ENTRY_POINTS[method](argv)
    return distill.main([method, *argv])


@pytest.fixture(scope="module")
def target(corpus, tmp_path_factory):
    """A random target with a tokenizer, in Hugging Face layout."""
    directory = tmp_path_factory.mktemp("target")
    params = networks.loud(decoder.init_params(jax.random.key(0), SIZES), 4)
    checkpoint.save_pretrained(directory, SIZES, params)
    shutil.copytree(corpus.directory / "tokenizer", directory, dirs_exist_ok=True)
    return directory


@pytest.fixture(scope="module")
def words(target, sources, tmp_path_factory):
    """Options of a run of six short steps."""
    cache = tmp_path_factory.mktemp("cache")
    options = """--length 24 --batch 2 --accumulate 1 --steps 6 --warmup 1 --eval-every 3
    --eval-windows 2 --acceptance-prompts 2 --prompt-tokens 8 --max-new-tokens 8
    --num-speculative-tokens 2 --compute float32 --learning-rate 1e-2 --held-out-modules secret"""
    files = ["--target", str(target), "--data", str(sources), "--cache", str(cache)]
    return [*files, *options.split()]


def generate(target, config):
    llm = LLM(str(target), speculative_config=config, dtype="float32")
    asked = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    [output] = llm.generate([{"prompt_token_ids": [5, 7, 9, 30]}], asked)
    return output.outputs[0].token_ids


@functools.cache
def plain(target):
    return list(generate(target, None))


def check_run(folder, target, method, model=None, **keys):
    """Check the files of a run, and that its network drafts for the target."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["step"] == 6
    assert 1 <= last["acceptance_length"] <= 3
    assert np.isfinite(last["heldout_loss"])
    assert (folder / "curves.png").stat().st_size > 1000
    provenance = json.loads((folder / "export" / "provenance.json").read_text())
    assert provenance["steps"] == 6
    assert provenance["data"]["train"]["account"]["learned_tokens"] > 0
    assert str(folder) not in json.dumps(provenance)
    config = {"method": method, "model": str(model or folder / "export"), **keys}
    drafted = generate(target, config | {"num_speculative_tokens": 2})
    assert list(drafted) == plain(target)


@pytest.mark.parametrize(
    ("variant", "more", "method"),
    [
        ("hass", "--loss overlap", "eagle"),
        pytest.param(
            "eagle3",
            "--unroll 2 --format speculators --capture-layers 1 2",
            "eagle3",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["hass", "eagle3 speculators"],
)
def test_a_head_is_distilled_from_one_command(variant, more, method, words, target, tmp_path):
    argv = [*words, "--output", str(tmp_path), "--variant", variant]
    assert distil("eagle", argv, more) == 0
    check_run(tmp_path, target, method)


@pytest.mark.parametrize("method", ["eagle", "medusa", "draft"])
def test_a_target_in_bfloat16_is_distilled(method, words, target, tmp_path):
    few = "--steps 2 --eval-every 2 --acceptance-prompts 0 --target-dtype bfloat16 "
    more = {"draft": "--draft-layers 0 2", "eagle": "--variant hass"}.get(method, "")
    output = tmp_path / "run"
    assert distil(method, [*words, "--output", str(output)], few + more) == 0
    metrics = json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])
    assert np.isfinite(metrics["heldout_loss"])
    assert (output / "export" / "model.safetensors").exists()


def test_a_head_trains_further_from_its_files(words, target, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    small = ["--unroll", "1", "--draft-vocab-size", "80"]  # and default hidden states
    small += ["--fc-norm", "--norm-before-residual", "--norm-output"]
    assert distil("eagle", [*words, "--output", str(first), *small]) == 0
    raw = json.loads((first / "export" / "config.json").read_text())
    named = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
    assert [raw[name] for name in named] == [True, False, True, True]
    more = ["--unroll", "1", "--head", str(first / "export")]
    assert distil("eagle", [*words, "--output", str(second), *more]) == 0
    losses = [
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["heldout_loss"]
        for folder in (first, second)
    ]
    assert losses[1] < losses[0]
    check_run(second, target, "eagle3")
    assert distil("eagle", [*words, "--output", str(second), *more, "--head-layers", "2"]) == 2
    more[-1] = str(second / "export")  # the sizes are equal
    assert distil("eagle", [*words, "--output", str(second), *more]) == 2
    assert "holds another run: --head " in capsys.readouterr().err


def test_a_run_without_held_out_data_exports_its_last_weights(words, target, tmp_path, capsys):
    index = words.index("--held-out-modules")
    apart = [*words[:index], *words[index + 2 :], "--acceptance-prompts", "0"]
    assert distil("medusa", [*apart, "--output", str(tmp_path / "run")]) == 0
    assert re.search(r"data: train: \d+ documents of .* are learned\n", capsys.readouterr().err)
    config = {"method": "medusa", "model": str(tmp_path / "run/export")}
    assert generate(target, config | {"num_speculative_tokens": 2}) == plain(target)


@pytest.fixture(scope="module")
def short_run(words, tmp_path_factory):
    """The folder of a run of two steps."""
    output = tmp_path_factory.mktemp("short") / "run"
    assert distil("medusa", [*words, "--steps", "2", "--output", str(output)]) == 0
    return output


@pytest.fixture
def resumed(short_run, words, tmp_path):
    """The options that resume a copy of the short run in ``tmp_path / "run"``."""
    output = shutil.copytree(short_run, tmp_path / "run")
    return [*words, "--steps", "2", "--output", str(output)]


def test_a_run_resumes_only_with_the_same_target_and_measurement(resumed, target, tmp_path, capsys):
    other = shutil.copytree(target, tmp_path / "other")
    params = decoder.init_params(jax.random.key(1), SIZES)
    checkpoint.save_pretrained(other, SIZES, params)
    for option, value in (("target", str(other)), ("acceptance-prompts", "0")):
        assert distil("medusa", [*resumed, f"--{option}", value]) == 2
        assert f"holds another run: --{option} " in capsys.readouterr().err


def all_but_first_rows(params):
    """Return the weights with all rows of every matrix turned round, except the first."""
    last_of = lambda x: (*(0,) * (x.ndim - 2), slice(1, None))
    return jax.tree.map(
        lambda x: x.at[last_of(x)].set(x[last_of(x)][::-1]) if x.ndim > 1 else x, params
    )


def test_a_target_that_differs_in_all_rows_but_the_first_is_another_one(
    resumed, target, tmp_path, capsys
):
    other = shutil.copytree(target, tmp_path / "other")
    params = all_but_first_rows(checkpoint.load_pretrained(target)[1])
    checkpoint.save_pretrained(other, SIZES, params)
    assert distil("medusa", [*resumed, "--target", str(other)]) == 2
    assert "holds another run: --target " in capsys.readouterr().err


def test_a_run_of_an_earlier_version_resumes_with_its_target_alone(resumed, tmp_path, capsys):
    run = tmp_path / "run"
    record = early_record(run)
    whole = record["identity"]["target"]
    record["identity"]["target"] = "sha256 0123"
    recorded(run).write_text(json.dumps(record))
    assert distil("medusa", resumed) == 2
    assert "holds another run: --target " in capsys.readouterr().err
    record["identity"]["target"] = whole.partition(",")[0]
    recorded(run).write_text(json.dumps(record))
    assert distil("medusa", resumed) == 0


def recorded(run):
    """Return the file with the identity of a run in its newest checkpoint."""
    step = max((run / "checkpoints").glob("[0-9]*"), key=lambda folder: int(folder.name))
    return step / "record" / "metadata"


def early_record(run):
    """Return the newest record of a run as an earlier version wrote it, without digests."""
    record = json.loads(recorded(run).read_text())
    del record["digests"]
    return record


def test_options_that_decide_the_best_weights_must_not_change(words, resumed, tmp_path, capsys):
    plain = [*words, "--steps", "2", "--output", str(tmp_path / "plain")]
    plain += ["--acceptance-prompts", "0"]
    assert distil("medusa", plain) == 0
    others = "--acceptance-prompts 1 --num-speculative-tokens 1 --prompt-tokens 4"
    others += " --max-new-tokens 4 --temperatures 0.5"
    assert distil("medusa", resumed, others) == 2
    printed = capsys.readouterr().err
    assert "holds another run: " in printed and "--temperatures (0.5,) (was [1.0, 0.0])" in printed
    assert all(f"{option} " in printed for option in others.split()[::2])
    assert distil("medusa", [*plain, "--eval-windows", "1"]) == 2
    assert "holds another run: --eval-windows 1 (was 2)" in capsys.readouterr().err
    assert distil("medusa", [*resumed, "--eval-windows", "1"]) == 0  # a number beside others


@pytest.mark.parametrize(
    ("method", "few"),
    [
        ("medusa", ["--num-heads", "1"]),
        ("hydra", ["--num-heads", "1"]),
        ("mlp_speculator", ["--n-predict", "1", "--no-tie-weights"]),
        ("eagle", ["--parallel", "--depths", "1"]),
    ],
    ids=["medusa", "hydra", "mlp", "p-eagle"],
)
def test_without_a_measurement_any_depth_will_do(method, few, words, tmp_path, capsys):
    argv = [*words, "--output", str(tmp_path), *few, "--acceptance-prompts", "0"]
    assert distil(method, [*argv, "--target", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err  # it reached the loading of the target


def test_an_option_without_effect_may_change(resumed, tmp_path, capsys):
    run = tmp_path / "run"
    record = early_record(run)
    record["identity"] |= {"heads_weight": 3.0, "learning_rate_floor": 0.7}
    # As 0.2.0 wrote it: with a field that is gone, and in another order.
    name, _, fields = record["identity"]["heads"].partition("(")
    fields = ["one_stem=False", *reversed(fields.removesuffix(")").split(", "))]
    record["identity"]["heads"] = f"{name}({', '.join(fields)})"
    recorded(run).write_text(json.dumps(record))
    assert distil("medusa", resumed) == 2  # the floor has an effect
    printed = capsys.readouterr().err
    assert "another run: --learning-rate-floor 0.0 (was 0.7); give" in printed


def test_a_draft_model_starts_from_layers_of_the_target(words, target, tmp_path, capsys):
    layers, more = ["--draft-layers", "0", "2"], ["--on-policy", "0.5", "--on-policy-prompt", "8"]
    run = [*words, "--output", str(tmp_path), *more]
    assert distil("draft", [*run, *layers]) == 0
    check_run(tmp_path, target, "draft_model")
    assert checkpoint.load_config(tmp_path / "export")[0].num_layers == 2
    assert distil("draft", [*run, "--draft-layers", "0", "1"]) == 2
    assert "holds another run: --draft " in capsys.readouterr().err


@pytest.mark.slow
def test_a_draft_model_learns_to_guess_in_one_pass(words, target, tmp_path):
    more = "--parallel --draft-layers 0 2 --depths 3"
    assert distil("draft", [*words, "--output", str(tmp_path)], more) == 0
    raw = checkpoint.load_config(tmp_path / "export")[1]
    assert raw["spd_type"] == "pard" and 0 <= raw["pard_token"] < 300
    check_run(tmp_path, target, "draft_model", parallel_drafting=True)


@pytest.mark.slow
def test_a_head_learns_to_guess_in_one_pass(words, target, tmp_path):
    more = "--parallel --capture-layers 1 2 --head-layers 2 --depths 3 --draft-vocab-size 80"
    more += " --format speculators --mask-token 7"
    assert distil("eagle", [*words, "--output", str(tmp_path)], more) == 0
    raw = json.loads((tmp_path / "export" / "config.json").read_text())
    assert raw["speculators_model_type"] == "peagle" and raw["mask_token_id"] == 7
    check_run(tmp_path, target, "eagle3", tree="best_first", tree_size=5)


@pytest.mark.slow
def test_a_head_that_guesses_in_one_pass_trains_further_from_its_files(words, target, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    parallel = ["--parallel", "--depths", "2"]
    small = ["--capture-layers", "1", "2", "--remat"]
    assert distil("eagle", [*words, "--output", str(first), *parallel, *small]) == 0
    again = [*words, "--output", str(second), "--head", str(first / "export")]
    assert distil("eagle", [*again, *parallel]) == 0
    check_run(second, target, "eagle3")
    assert distil("eagle", again) == 2


def test_medusa_heads_and_then_their_target_with_them(words, target, tmp_path, capsys):
    first, both = tmp_path / "first", tmp_path / "both"
    heads = ["--num-heads", "2"]
    assert distil("medusa", [*words, "--output", str(first), *heads]) == 0
    check_run(first, target, "medusa")
    more = ["--joint", "--heads", str(first / "export"), "--format", "medusa"]
    assert distil("medusa", [*words, "--output", str(both), *more]) == 0
    folder = both / "export"
    assert f"exported: LLM('{folder}/target', speculative_config=" in capsys.readouterr().out
    check_run(both, folder / "target", "medusa", folder / "heads")
    with pytest.raises(ValueError, match=f"give {folder}/heads or {folder}/target$"):
        generate(target, {"method": "medusa", "model": str(folder), "num_speculative_tokens": 2})


def test_modules_for_later_tokens_are_trained_and_stitched_into_their_target(
    words, target, tmp_path
):
    argv = [*words, "--output", str(tmp_path), "--unroll", "2", "--stitch"]
    assert distil("mtp", argv) == 0
    check_run(tmp_path, target, "mtp")
    stitched = tmp_path / "export" / "target"
    assert (stitched / "tokenizer.json").is_file()
    assert checkpoint.load_config(stitched)[1]["num_nextn_predict_layers"] == 1


@pytest.mark.slow
def test_modules_in_the_targets_files_train_further(words, target, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert distil("mtp", [*words, "--output", str(first), "--stitch"]) == 0
    more = ["--target", str(first / "export" / "target"), "--mtp-loss", "tvd", "--stitch"]
    assert distil("mtp", [*words, "--output", str(second), *more]) == 0
    config = checkpoint.load_config(second / "export" / "target")[1]
    assert config["num_nextn_predict_layers"] == 1
    check_run(second, second / "export" / "target", "mtp")


SMALL_BLOCKS = "--block-size 4 --head-layers 1 --anchors 6 "


@pytest.mark.parametrize(
    ("variant", "more"),
    [
        ("dflash", "--weighing dpace"),
        pytest.param(
            "dspark",
            "--markov gated --markov-rank 8 --format dflash-speculators --draft-vocab-size 90"
            " --capture-layers 1 2 --remat",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dflash", "dspark speculators"],
)
def test_a_block_drafter_is_distilled_from_one_command(variant, more, words, target, tmp_path):
    argv = [*words, "--output", str(tmp_path / "a"), "--variant", variant]
    assert distil("dflash", argv, SMALL_BLOCKS + more) == 0
    check_run(tmp_path / "a", target, variant)
    if variant == "dspark":  # it trains further from its files
        again = [*words, "--output", str(tmp_path / "b"), "--head", str(tmp_path / "a" / "export")]
        assert distil("dflash", again, "--variant dspark --format dflash-speculators") == 0


def held_out_losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["heldout_loss"] for line in lines if "heldout_loss" in line]


@pytest.mark.parametrize(
    ("method", "more", "layout"),
    [
        ("mlp_speculator", "--variant arctic-lstm --inner-dim 16", "arctic-lstm"),
        pytest.param(
            "hydra",
            "--variant hydra++ --num-heads 2 --head-layers 3 --loss overlap",
            "hydra",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mlp_speculator",
            "--variant arctic --no-scale-input",
            "arctic-rnn",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["arctic-lstm", "hydra++", "arctic"],
)
def test_heads_that_guess_one_after_another_are_trained(
    method, more, layout, words, target, tmp_path
):
    assert distil(method, [*words, "--output", str(tmp_path)], more) == 0
    losses = held_out_losses(tmp_path)
    assert losses[-1] < losses[0]
    check_run(tmp_path, target, method)
    assert head_files.load_head(tmp_path / "export", SIZES).layout == layout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "option", "first", "other"),
    [
        ("hydra", "--heads", ["--num-heads", "2"], ["--variant", "hydra++"]),
        ("mlp_speculator", "--head", ["--no-tie-weights"], ["--variant", "arctic-lstm"]),
    ],
    ids=["hydra", "ibm"],
)
def test_they_train_further_from_their_files(method, option, first, other, words, target, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert distil(method, [*words, "--output", str(one), *first]) == 0
    again = [*words, "--output", str(two), option, str(one / "export")]
    assert distil(method, [*again, *other]) == 2
    assert distil(method, again) == 0
    assert held_out_losses(two)[-1] < held_out_losses(one)[-1]
    check_run(two, target, method)


@pytest.mark.parametrize("depth", range(1, 9))
@pytest.mark.parametrize("method", ["eagle3", "p_eagle", "dflash"])
def test_targets_of_every_depth_have_hidden_states_to_read_by_default(method, depth):
    target, mask = networks.changed(SIZES, num_layers=depth), 1 if method == "p_eagle" else None
    if method == "dflash":
        make = lambda: dflash.head_config(dflash.HeadSettings(), method, target, 1, False)
    else:
        make = lambda: eagle.head_config(eagle.HeadSettings(), "eagle3", target, mask)
    if (method, depth) == ("dflash", 1):
        with pytest.raises(ValueError, match=r"--capture-layers .* take a deeper one"):
            make()
        return
    config = make()
    published = {"dflash": default_capture_layers(depth, 5)}.get(method, (2, depth // 2, depth - 3))
    read = config.capture_layers
    exist = 0 < published[-1] < depth and len(set(published)) == len(published)
    assert read == published if exist else len(read) >= min(3, depth - 1)
    assert exist == (depth > (7 if method == "dflash" else 6))
    check(config, target, None, "x")  # files name them


@pytest.mark.parametrize(
    ("method", "more", "message"),
    [
        (
            "eagle",
            "--capture-layers 2 1",
            r"--capture-layers \(2, 1\) .* must ascend from 0 or more, below the target's 3 layers",
        ),
        ("dflash", "--capture-layers 0 2", "must ascend from 1 or more, below"),
        ("eagle", "--draft-vocab-size 301", "the target has 300 tokens"),
        ("eagle", "--variant eagle1 --draft-vocab-size 50", "only eagle3 heads have it"),
        ("eagle", "--variant hass --fc-norm", "only eagle3 heads have it"),
        ("eagle", "--fc-norm --norm-before-fc", "norms them already; leave one out"),
        (
            "eagle",
            "--format sglang --norm-output",
            "heads with norms of their own have eagle, speculators",
        ),
        ("eagle", "--variant hass --format speculators", "hass heads have eagle and sglang"),
        ("eagle", "--unroll 0", "--unroll 0 does not work; it must be at least 1"),
        ("eagle", "--feature-weight 1.0", "no feature of the target"),
        ("eagle", "--held-out-modules", "no data is held out: give --held-out-share"),
        ("eagle", "--length 128", "--length 128 does not work; the target has 128 pos"),
        (
            "eagle",
            "--variant eagle1 --max-new-tokens 128",
            "--max-new-tokens 128 does not work; the target has 128 positions",
        ),
        (
            "draft",
            "--draft-layers 0 --on-policy 0.1",
            "--on-policy 0.1 does not work; that is none of the 2 windows",
        ),
        ("draft", "", "give either --draft DIR or --draft-layers"),
        (
            "draft",
            "--draft-layers 0 --depths 4",
            "--depths 4 does not work; only drafters trained with --parallel have it",
        ),
        (
            "draft",
            "--draft-layers 0 --parallel --mask-token 300",
            "--mask-token 300 does not work; the target has 300 tokens",
        ),
        (
            "eagle",
            "--parallel --depths 1",
            "--num-speculative-tokens 2 does not work; no more than --depths 1 tokens are guessed",
        ),
        ("eagle", "--parallel --variant hass", "only eagle3 heads have --parallel"),
        ("eagle", "--parallel --format sglang", "parallel heads have eagle and spec"),
        ("eagle", "--parallel --unroll 2", "one pass has no steps on its own"),
        ("draft", "--draft-layers 2 3", "name ascending ones of the target's 3"),
        ("mtp", "--fresh none", "has no modules for later tokens"),
        ("mtp", "--num-modules 4", "--unroll 3 does not work; there are 4 modules"),
        ("mtp", "--modules x --fresh random", "leave out one"),
        ("dflash", "--block-size 2", "a block of --block-size 2 drafts 1 tokens"),
        ("dflash", "--markov rnn", "only dspark heads have it; leave it out"),
        ("dflash", "--confidence-weight 1.0", "only dspark heads guess the prob"),
        ("dflash", "--loss kl", "it weighs nothing: give --loss-weight too"),
        ("dflash", "--weighing dpace --gamma 3", "--weighing dpace does not use"),
        ("dflash", "--head x --block-size 8", "--head decides it"),
        ("dflash", "--draft-vocab-size 20", "take --format dflash-speculators"),
        ("dflash", "--mask-token 300", "the target has 300 tokens"),
        ("medusa", "--num-heads 1", "there are --num-heads 1, one for each token"),
        ("hydra", "--num-heads 1", "there are --num-heads 1, one for each token"),
        ("hydra", "--heads x --head-layers 2", "--heads decides it"),
        (
            "mlp_speculator",
            "--n-predict 1 --no-tie-weights",
            "there are --n-predict 1 stages; take as many tokens or fewer",
        ),
        ("mlp_speculator", "--n-predict 1", "one stage shares no weights"),
        ("mlp_speculator", "--no-tie-embeddings", "only an LSTM"),
        (
            "mlp_speculator",
            "--variant arctic-lstm --no-tie-weights",
            "--tie-weights False does not work; the stages of an LSTM are always one",
        ),
        ("mlp_speculator", "--head x --inner-dim 8", "--head decides it"),
        ("medusa", "--format medusa --draft-vocab-size 20", "no reduced vocabulary"),
        ("medusa", "--heads x --num-heads 3", "--heads decides it"),
        ("medusa", "--heads-weight 3", "only --joint has another loss beside theirs"),
        (
            "draft",
            "--draft x --parallel --loss tvd",
            "--loss 'tvd' does not work; --text-weight 1 trains on the text alone",
        ),
        ("draft", "--draft x --on-policy-prompt 3", "nothing without --on-policy"),
        (
            "eagle",
            "--variant eagle1 --loss-weight 0 --loss tvd",
            "it weighs nothing: give --loss-weight too",
        ),
        (
            "eagle",
            "--variant eagle1 --no-through-steps",
            "--through-steps False does not work; --unroll 1 has no step after the first",
        ),
        (
            "eagle",
            "--variant eagle1 --loss-weight 0 --feature-weight 0",
            "--loss-weight 0.0 does not work; nothing is left to learn",
        ),
        ("eagle", "--feature-cache-gigabytes 3", "only --feature-cache DIR takes them"),
        ("eagle", "--head x --head-layers 2", "--head decides it"),
        ("mtp", "--unroll 1 --step-decay 0.2", "--unroll 1 has no step after"),
        (
            "medusa",
            "--schedule wsd --decay 2 --learning-rate-floor 0.5",
            "--learning-rate-floor 0.5 does not work; --schedule wsd has none",
        ),
        ("dflash", "--decay 3", "--decay 3 does not work; only --schedule wsd has it"),
        ("hydra", "--clip none --clip-at 5", "--clip none cuts nothing"),
    ],
)
def test_an_impossible_run_ends_in_one_line(method, more, message, words, tmp_path, capfd):
    assert distil(method, [*words, "--output", str(tmp_path / "run")], more) == 2
    printed = capfd.readouterr().err
    assert re.search(message, printed)
    assert printed.startswith("error: ")
    assert len(printed.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_full_cache_is_named_in_one_line(words, tmp_path, capfd):
    argv = [*words, "--output", str(tmp_path / "run"), "--cache", str(tmp_path / "cache")]
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, usual[1]))
    try:
        assert distil("medusa", argv) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    printed = capfd.readouterr().err
    assert printed.startswith(f"error: --cache '{tmp_path}/cache' does not work; File too large: ")
    assert printed.endswith("make room there, or name another place\n")
    assert printed.count("\n") == 1 and list((tmp_path / "cache").iterdir()) == []


def test_a_format_is_checked_before_features_are_computed(words, tmp_path, capsys):
    cache = tmp_path / "features"
    more = ["--format", "sglang", "--norm-output", "--feature-cache", str(cache)]
    assert distil("eagle", [*words, "--output", str(tmp_path / "run"), *more]) == 2
    assert "have eagle, speculators" in capsys.readouterr().err
    assert not cache.exists()


@pytest.mark.parametrize("method", distill.METHODS)
def test_a_command_without_options_names_the_required_ones(method, capsys):
    assert distil(method, []) == 2
    printed = capsys.readouterr().err
    assert "required" in printed.lower()
    assert "--target" in printed and "--output" in printed


def test_an_unknown_method_lists_the_known_ones(capsys):
    assert distill.main(["medussa", "--target", "x"]) == 2
    assert capsys.readouterr().err == (
        "error: method 'medussa' is unknown; name one of " + ", ".join(distill.METHODS) + "\n"
    )
    assert distill.main([]) == 2
    assert distill.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(method.description in listed for method in distill.METHODS.values())

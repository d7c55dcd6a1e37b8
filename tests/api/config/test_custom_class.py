"""Custom drafters by config, LLM and command line; the conformance test runs them too."""

import json
import sys

import numpy as np
import pytest

import jspec
from jspec.api import config
from jspec.cli import main
from jspec.drafters.methods import METHODS
from jspec.engine.plan import Plan
from tests import llm_fixtures, tiny
from tests.drafters import custom

HERE = "tests.drafters.custom"
REPEAT = {"method": "custom_class", "model": f"{HERE}.Repeat"}
SUCCESSOR = {"model": f"{HERE}.Successor", "num_speculative_tokens": 3, "table": "t.npy"}


@pytest.fixture(scope="module")
def target(root):
    return llm_fixtures.loaded(root)["target"]


def error_of(given):
    with pytest.raises(ValueError) as error:
        config.read(given).drafter(None, tiny.TARGET)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_class_is_built_with_the_keys_that_it_takes():
    drafter = config.read(REPEAT | {"phrase": [3, 4]}).drafter(None, tiny.TARGET)
    assert drafter == custom.Repeat(tiny.VOCAB, (3, 4))
    assert hash(Plan(tiny.TARGET, drafter))
    given = REPEAT | {"vocab_size": 9, "num_speculative_tokens": None, "enforce_eager": False}
    assert config.read(given).drafter(None, tiny.TARGET) == custom.Repeat(9)
    assert config.read(SUCCESSOR | {"scale": 2.0}).drafter(None, tiny.TARGET).scale == 2.0


def test_a_dotted_path_implies_the_method_unless_it_is_a_directory(tmp_path, monkeypatch):
    assert config.read({"model": f"{HERE}.Repeat"}) == config.read(REPEAT)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.model").mkdir()
    assert config.read({"model": "my.model", "num_speculative_tokens": 2}).method == "draft_model"
    assert config.read({"model": "a/v1.b", "num_speculative_tokens": 2}).method == "draft_model"


def test_keys_of_the_rule_work_with_a_class_too():
    given = SUCCESSOR | {"rejection_sample_method": "coupled", "draft_tensor_parallel_size": 1}
    read = config.read(given)
    assert Plan(tiny.TARGET, read.drafter(None, tiny.TARGET), read.rule).drafter.noise == "target"
    lossy = {"rejection_sample_method": "typical", "posterior_alpha": 0.5}
    assert config.read(REPEAT | lossy).rule == jspec.verify.typical(0.09, 0.5)
    sharded = REPEAT | {"draft_tensor_parallel_size": 2}
    assert "draft_tensor_parallel_size=2 is for networks of jspec" in error_of(sharded)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (REPEAT | {"phrse": [1]}, "Repeat takes no 'phrse'; it takes 'phrase'; did you mean"),
        (REPEAT | {"noise": "own"}, "Repeat takes no 'noise'; it takes 'phrase'"),
        (REPEAT | {"num_speculative_tokens": 4}, "Repeat takes no 'num_speculative_tokens'; it"),
        (REPEAT | {"revision": "main"}, "Repeat takes no 'revision'; it takes 'phrase'"),
        (
            {"model": f"{HERE}.Successor"},
            "Successor needs 'num_speculative_tokens', 'table'; give them as keys",
        ),
        ({"method": "custom_class"}, "needs as 'model' the dotted path of a class"),
        ({"method": "custom_class", "model": "Repeat"}, "got 'Repeat'"),
        ({"model": "no_such_package.Drafter"}, "cannot be imported: No module named 'no_such_"),
        (
            {"model": f"{HERE}.Repeet"},
            "cannot be imported: module 'tests.drafters.custom' has no "
            "attribute 'Repeet'. Check the name; install the package, or put its folder on "
            "PYTHONPATH.",
        ),
        ({"model": f"{HERE}.np"}, "is 'module', not a class"),
        ({"model": f"{HERE}.Mutable"}, "must be a frozen dataclass"),
        (
            {"model": f"{HERE}.Duck"},
            "Duck is no jspec.Drafter; inherit from jspec.Drafter, or from jspec.NoDrafter",
        ),
        ({"method": f"{HERE}.Repeat"}, "is method='custom_class' with model='tests.drafters."),
        (
            REPEAT | {"phrase": {"a": 1}},
            "drafter=Repeat must be hashable, because it keys compiled programs: unhashable type: "
            "'dict'",
        ),
        (REPEAT | {"adaptive_length": True}, "num_speculative_tokens must be given"),
        (SUCCESSOR | {"adaptive_length": [5]}, "K=5 is not among 0 to num_speculative_tokens=3"),
        (
            {"model": f"{HERE}.Drawn", "rejection_sample_method": "coupled"},
            "Drawn has no field noise: Literal['own', 'target'] = 'own'",
        ),
        ({"model": f"{HERE}.Odd", "max_depth": "3"}, "Odd.max_depth='3' must be a whole number of"),
        (
            {"model": f"{HERE}.Odd", "max_depth": 2, "tree_size": 2},
            "tree_size=2 must be a whole number of at least 3",
        ),
        ({"model": f"{HERE}.Odd", "capture_layers": 3}, "capture_layers=3 must be a tuple of"),
        ({"model": f"{HERE}.Odd", "capture_layers": [0, 3]}, "at most 2, the layers of the target"),
        (
            {"model": f"{HERE}.Odd", "proposal": "drawn"},
            "proposal='drawn' must be one of 'deterministic'",
        ),
    ],
)
def test_faults_of_a_class_or_its_keys_are_named(given, message):
    assert message in error_of(given)


def test_all_faults_of_a_class_are_named_at_once():
    message = error_of({"model": f"{HERE}.Half"})
    for wrong in (
        "no 'tree_size'",
        "no 'proposal'",
        "no method 'propose'",
        "the field 'model' has the name of a key",
        "'update' does not take the arguments of update(self, round)",
        "'load_params' is no plain method load_params(self, target_params)",
    ):
        assert wrong in message
    assert "'init'" not in message


def test_a_line_in_the_table_of_methods_makes_a_class_a_method(target, monkeypatch):
    monkeypatch.setitem(METHODS, "echo", custom.Echo)
    prompt = {"prompt_token_ids": [5]}
    params = jspec.SamplingParams(max_tokens=16, temperature=0, detokenize=False, ignore_eos=True)
    plain, drafted = (
        jspec.LLM(target, given).generate(prompt, params)[0].outputs[0]
        for given in (None, {"method": "echo", "num_speculative_tokens": 2})
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.speculative_decoding_stats["num_draft_tokens"] > 0


def test_a_class_is_checked_before_any_model_is_opened():
    with pytest.raises(ValueError, match="Half cannot draft"):
        jspec.LLM("no/such/model", {"model": f"{HERE}.Half"})


def test_llm_loads_its_weights_and_drafts_with_it(target, tmp_path):
    size = target.config.vocab_size
    prompt, file = {"prompt_token_ids": [5]}, tmp_path / "table.npy"
    params = jspec.SamplingParams(max_tokens=24, temperature=0, detokenize=False, ignore_eos=True)
    plain = jspec.LLM(target).generate(prompt, params)[0].outputs[0].token_ids
    # The table holds the last successor of each token in the target's text.
    table = np.zeros((size, size), np.float32)
    for before, after in zip([5, *plain[:-1]], plain, strict=True):
        table[before] = 0
        table[before, after] = 9
    np.save(file, table)
    llm = jspec.LLM(target, SUCCESSOR | {"table": str(file)})
    assert llm.generate(prompt, params)[0].outputs[0].token_ids == plain
    counts = {each.name: each for each in llm.get_metrics()}
    accepted = counts["vllm:spec_decode_num_accepted_tokens"].value
    assert accepted == _accepted_by_hand([5, *plain], table, depth=3) > 0
    # Adaptive lengths work too.
    ranges = {"num_speculative_tokens_per_batch_size": [(1, 1, 2)]}
    llm = jspec.LLM(target, SUCCESSOR | {"table": str(file)} | ranges)
    output = llm.generate(prompt, params)[0].outputs[0]
    assert output.token_ids == plain
    accepted = output.speculative_decoding_stats["num_accepted_draft_tokens"]
    assert accepted == _accepted_by_hand([5, *plain], table, depth=2)


def _accepted_by_hand(text, table, depth):
    """Count the accepted tokens of drafts that follow the table from every root."""
    position, accepted = 0, 0
    while position < len(text) - 1:
        token, run = text[position], 0
        while run < depth and position + run + 1 < len(text) - 1:
            token = int(table[token].argmax())
            if token != text[position + run + 1]:
                break
            run += 1
        accepted, position = accepted + run, position + run + 1
    return accepted


def test_the_command_line_takes_a_class_too(target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "jspec",
            "generate",
            str(target.path),
            "--token-ids",
            "5",
            "--max-tokens",
            "8",
            "--speculative-config",
            json.dumps(REPEAT | {"phrase": [1, 2]}),
        ],
    )
    with pytest.raises(SystemExit) as stopped:
        main.main()
    drafted = capsys.readouterr().out
    assert stopped.value.code == 0
    monkeypatch.setattr(sys, "argv", sys.argv[:-2])
    with pytest.raises(SystemExit):
        main.main()
    assert capsys.readouterr().out == drafted

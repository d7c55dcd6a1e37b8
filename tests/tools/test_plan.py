"""``jspec plan`` against sums by hand, loaded models and bad input."""

import json
import sys

import jax
import pytest

import jspec
from jspec.checkpoints import families
from jspec.cli import main
from jspec.models import decoder
from jspec.tools import plan as tool
from tests import llm_fixtures

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    (directory / "config.json").write_text(json.dumps(LLAMA_8B))
    return directory


@pytest.fixture(scope="module")
def target(root):
    return llm_fixtures.checkpoints(root)["target"]


def test_a_round_reads_the_weights_and_the_live_cache_once(llama):
    report = tool.plan(llama, "v6e", speculative_config=NGRAM, acceptance_length=3, max_num_seqs=1)
    hidden, wide, vocab = 4096, 14336, 128256
    layer = hidden * (6144 + 4096) + 3 * hidden * wide + 2 * hidden
    read = 2 * (32 * layer + vocab * hidden + hidden)
    assert report.memory.weights == read + 2 * vocab * hidden
    assert report.memory.token == 128 * 2**10
    plain, drafted = report.limits
    assert plain.round_bytes == pytest.approx(read + 2048 * 128 * 2**10)
    assert plain.seconds == pytest.approx(plain.round_bytes / 1638e9)
    assert plain.tokens_per_second == pytest.approx(107, abs=1)  # 106 by compiled bytes
    assert drafted.tokens_per_second == pytest.approx(3 * plain.tokens_per_second)
    lines = str(report)
    assert "Limits, no measurements" in lines and "3.00 tokens: at most" in lines


def test_eight_chips_share_the_weights_and_read_at_once(llama):
    one, eight = (tool.plan(llama, name, max_num_seqs=1) for name in ("v6e", "v6e-8"))
    assert eight.memory.weights == pytest.approx(one.memory.weights / 8, rel=1e-3)
    assert eight.limits[0].seconds == pytest.approx(one.limits[0].seconds / 8, rel=1e-3)
    whole = tool.plan(llama, "7x", max_num_seqs=1)  # two devices a chip
    assert whole.memory.tensor_parallel_size == 2
    assert whole.limits[0].seconds == pytest.approx(one.limits[0].seconds * 1638 / 7380, rel=1e-3)


def test_two_engines_on_four_chips_each_are_twice_as_fast_as_one_on_four(llama):
    one, two = tool.plan(llama, "v5e-4"), tool.plan(llama, "v5e-8", data_parallel_size=2)
    assert two.memory == one.memory
    speeds = [report.limits[0].tokens_per_second for report in (one, two)]
    assert speeds[1] == 2 * speeds[0]
    assert "(tensor_parallel_size=4, data_parallel_size=2)" in str(two)


def test_products_limit_large_batches_of_large_trees(llama):
    config = {"method": "ngram", "num_speculative_tokens": 15}
    report = tool.plan(
        llama, "L4-8", speculative_config=config, max_num_seqs=64, context=64, memory_share=0.9
    )
    limit = report.limits[1]
    assert limit.seconds > 1.5 * limit.round_bytes / 300e9


def test_a_directory_and_its_config_json_have_the_plan_of_the_loaded_model(target):
    sizes = dict(max_num_seqs=4, max_model_len=128)
    memory = jspec.LLM(target, **sizes).build.memory_plan
    reports = [tool.plan(path, "L4", **sizes) for path in (target, target / "config.json")]
    for report in reports:
        same = ("weights", "drafter", "workspace", "sequence", "token", "dtype")
        assert {getattr(report.memory, name) == getattr(memory, name) for name in same} == {True}


def test_of_experts_a_round_reads_those_of_a_token():
    raw = dict(LLAMA_8B, model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"])
    raw |= dict(hidden_size=64, num_hidden_layers=2, vocab_size=128, num_attention_heads=4)
    raw |= dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8)
    raw |= dict(v_head_dim=8, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1)
    raw |= dict(moe_intermediate_size=32, first_k_dense_replace=1, n_group=1, topk_group=1)
    raw |= dict(intermediate_size=96, num_key_value_heads=4)
    config = families.find(raw).read(raw)
    shapes = jax.eval_shape(lambda: decoder.init_params(jax.random.key(0), config))
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    unread = 4 * (128 * 64 + 6 * 3 * 64 * 32)
    assert tool.read_bytes(config, shapes) == total - unread


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "v9"}, "device='v9' must be one of v4, v5e,"),
        ({"device": "v5e-0"}, "must be one of"),
        ({"device": "v5e-3"}, "3 devices do not divide the 32 heads.*works with 1, 2, 4, 8, 16"),
        (
            {"data_parallel_size": 3},
            "data_parallel_size=3 does not divide the 8 devices;",
        ),
        ({"context": 0}, "context=0 must be a whole number from 1 to 131072"),
        ({"acceptance_length": 2.0}, "needs speculative_config"),
        ({"acceptance_length": 6, "speculative_config": NGRAM}, "must be a number from 1 to 5"),
        ({"max_model_len": 10**6}, "max_model_len=1000000 must be"),
    ],
)
def test_what_cannot_be_planned_is_refused(llama, given, message):
    with pytest.raises(ValueError, match=message):
        tool.plan(llama, **{"device": "v5e-8", **given})


@pytest.mark.parametrize(("device", "code"), [("v5e-8", 0), ("v5e", 1)])
def test_the_command_says_whether_it_fits(llama, device, code, monkeypatch, capsys):
    words = ["jspec", "plan", str(llama), "--device", device, "--max-num-seqs", "2"]
    monkeypatch.setattr(sys, "argv", [*words, "--speculative-config", json.dumps(NGRAM)])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    assert stopped.value.code == code
    text = capsys.readouterr().out
    words = "It fits, with tokens" if code == 0 else "It does not fit. The model needs"
    assert words in text and ("(assumed)" in text) == (code == 0)

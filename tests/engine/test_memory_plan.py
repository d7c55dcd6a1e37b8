"""The memory plan of a model against its loaded weights, its pool, and sums by hand."""

import dataclasses
import functools
import logging
import re

import jax
import pytest

import jspec
from jspec.checkpoints import loading
from jspec.core.types import Params
from jspec.engine import memory, slots
from jspec.engine.memory import Device
from jspec.engine.memory_plan import plan_memory
from jspec.engine.plan import Plan
from jspec.models import decoder
from jspec.models.blocks.delta_rule import DeltaRule
from tests import llm_fixtures, networks, recurrent, tiny

GIB = 2**30
GRAPHICS = Device(24 * GIB, 24 * GIB)
SIZES = networks.build(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    max_positions=512,
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.getbasetemp() / "llm"
    head = tmp_path_factory.mktemp("head")
    llm_fixtures.write_eagle3_head(head)
    return {**llm_fixtures.checkpoints(root), "eagle3": head}


def planned(config, device=GRAPHICS, settings=None, **changes):
    shapes = jax.eval_shape(lambda: decoder.init_params(jax.random.key(0), config, "bfloat16"))
    sizes = dict(max_num_seqs=4, max_model_len=512) | changes
    plan = Plan(decoder.Decoder(config), tiny.NONE)
    return plan_memory(plan, Params(shapes, None), settings or {}, device, **sizes)


@pytest.mark.parametrize("method", [None, "ngram", "draft_model", "eagle3"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"num_gpu_blocks_override": 9, "block_size": 16},
        {"kv_cache_memory_bytes": 2**20, "dtype": "bfloat16"},
        {"gpu_memory_utilization": 0.01},
    ],
)
def test_shapes_say_what_the_loaded_model_and_its_pool_have(paths, method, given, monkeypatch):
    monkeypatch.setattr(memory, "this_device", lambda *_: Device(64 * GIB, 32 * GIB, True))
    speculative = method and {"method": method, "num_speculative_tokens": 3}
    if method in ("draft_model", "eagle3"):
        speculative["model"] = str(paths[method.removesuffix("_model")])
    llm = jspec.LLM(paths["target"], speculative, **given)
    planned, params = llm.build.memory_plan, llm.build.params
    assert planned.weights == sum(leaf.nbytes for leaf in jax.tree.leaves(params.target))
    assert planned.drafter == sum(leaf.nbytes for leaf in jax.tree.leaves(params.drafter))
    blocks, buffers = llm.runtime.pools[0].blocks, llm.runtime.pools[0].buffers
    assert planned.num_tokens == blocks.most_tokens
    assert planned.token == sum(leaf[0].nbytes for leaf in jax.tree.leaves(buffers)) / blocks.size


@pytest.mark.parametrize("share", [1, 2, 4, 8])
def test_devices_split_matrices_and_repeat_key_heads_that_are_too_few(share):
    hidden, queries, keys, wide, vocab = 64, 128, 32, 96, 1000
    own_keys = max(16, keys // share)  # columns of one head at least
    layer = hidden * (queries // share + 2 * own_keys) + queries * hidden // share
    layer += 3 * hidden * wide // share + 2 * hidden
    result = planned(SIZES, tensor_parallel_size=share)
    assert result.weights == 2 * (3 * layer + 2 * vocab * hidden // share + hidden)
    assert result.token == 2 * 3 * 2 * own_keys


def test_tokens_fit_into_what_weights_and_programs_leave_of_a_device():
    result = planned(SIZES)
    page = 64 * result.token
    assert result.num_tokens == 64 * (int((0.9 * 24 * GIB - result.weights) / page) - 1)
    short = Device(result.weights + result.workspace + 2**20, GIB)
    result = planned(SIZES, short, {"gpu_memory_utilization": 1.0})
    assert result.num_tokens == 64 * (2**20 // page - 1)


def test_layers_with_a_window_have_pages_for_twice_the_sequences_that_run():
    sizes = dict(max_model_len=8192, longest=8192)
    mixed = planned(networks.changed(SIZES, windows=(None, 64, 64)), **sizes)
    each, page = 64 * mixed.token / 3, 64 * mixed.token  # bytes of a page of a layer, and of all
    held = (64 + 512) // 64 + 1  # the window, a pass of a prompt, and a page that both begin in
    assert mixed.windowed == mixed.token * 2 / 3 and mixed.in_windows == (held + 1) * 2 * each
    assert mixed.sequence == (8192 / 64 + 1) * each + mixed.in_windows
    left = int(0.9 * 24 * GIB) - mixed.weights - (2 * 4 * held + 1) * 2 * each
    assert mixed.num_tokens == 64 * (left // each - 1)
    assert mixed.num_tokens > 2.9 * planned(SIZES, **sizes).num_tokens
    assert "within windows" in str(mixed)
    free = mixed.weights + mixed.workspace + int(20 * page)
    few = planned(networks.changed(SIZES, windows=(None, 64, 64)), Device(free, free), **sizes)
    with pytest.raises(ValueError, match=r"max_model_len of at most (\d+)") as error:
        few.check()
    fitting = int(re.search(r"at most (\d+)", str(error.value))[1])
    left = 20 * page - mixed.in_windows
    assert fitting == 64 * int(left // each - 1)


def test_a_cache_without_pages_has_the_whole_length_in_every_row(paths):
    llm = jspec.LLM(paths["target"], deterministic=True, max_num_seqs=5, max_model_len=100)
    planned, plan = llm.build.memory_plan, llm.build.plan
    size = slots.buffer_size(plan, 100)
    assert planned.num_tokens == 500
    assert planned.sequence == memory.bytes_of(plan.target.init_cache(1, size).layers)


@pytest.mark.parametrize("attends", [True, False])
def test_a_state_of_rows_takes_no_pages(attends):
    plan = Plan(recurrent.RecurrentTarget(attends), tiny.NONE)
    params = Params(recurrent.init_params(), None)
    planned = functools.partial(plan_memory, plan, params, max_model_len=64)
    result = planned({}, GRAPHICS, max_num_seqs=2)
    assert result.token == (2 * 4 * recurrent.SIZE if attends else 0) and result.fits
    assert (result.state, result.snapshots) == (4 * recurrent.SIZE, 1024)
    assert "states 32 bytes a sequence, 1,024 snapshots" in str(result)
    few = planned({"kv_cache_memory_bytes": 8 * result.state * 5}, GRAPHICS, max_num_seqs=2)
    assert few.snapshots == 5  # They take an eighth of the bytes.
    rows = slots.allocate.eval_shape(plan, params, 1, 80, True)
    more = planned({}, GRAPHICS, max_num_seqs=3).workspace - result.workspace
    assert more >= memory.bytes_of(rows) > result.state


def test_rows_have_copies_of_their_states_for_a_prefix_cache_only():
    mixer = DeltaRule(8, 4, key_dim=16, head_dim=16)
    layer = dataclasses.replace(SIZES.layers[0], mixer=mixer)
    config = dataclasses.replace(SIZES, layers=(layer, *SIZES.layers[1:]))
    keeps, plain = planned(config), planned(config, shares_prefixes=False)
    assert keeps.state == plain.state >= 4 * 8 * 16 * 16
    assert keeps.workspace - plain.workspace == 4 * plain.state
    assert keeps.snapshots == 1024 and plain.snapshots == 0


def test_of_the_pages_that_a_cpu_may_have_only_free_memory_counts():
    host = planned(SIZES, Device(64 * GIB, GIB, is_host=True))
    free = GIB - host.weights - host.workspace
    assert host.num_tokens == 64 * (free // (64 * host.token) - 1)


@pytest.fixture
def small(monkeypatch):
    device = Device(2**17, 2**17)
    monkeypatch.setattr(memory, "this_device", lambda *_: device)
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("weights were read"))
    return device


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(paths, small):
    with pytest.raises(ValueError) as error:
        jspec.LLM(paths["target"], max_model_len=200, max_num_seqs=7)
    message = str(error.value)
    assert "on a device, which has 128.0 KiB: weights" in message
    assert "a smaller max_model_len" in message and "a smaller max_num_seqs" in message
    assert "dtype='bfloat16' or tensor_parallel_size=" in message


def test_remedies_name_values_that_fit():
    whole = planned(SIZES, longest=512)
    assert whole.fits
    tight = Device(whole.least - 100, whole.least - 100)
    refused = planned(SIZES, tight, {"gpu_memory_utilization": 1.0}, longest=512)
    with pytest.raises(ValueError, match="max_num_seqs of at most 3, or") as error:
        refused.check()
    length = int(str(error.value).partition("max_model_len of at most ")[2].partition(",")[0])
    assert planned(SIZES, tight, {}, max_model_len=length, longest=length).fits
    assert planned(SIZES, tight, {}, max_num_seqs=3, longest=512).fits


def test_the_plan_is_logged_and_nothing_is_printed(paths, caplog, capsys):
    with caplog.at_level(logging.INFO, logger="jspec"):
        jspec.LLM(paths["target"], max_num_seqs=3, max_model_len=128)
    (line,) = [record.getMessage() for record in caplog.records if "memory" in record.getMessage()]
    assert "weights" in line and line.endswith("tokens fit (max_num_seqs=3, max_model_len=128)")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("share", "larger"), [(1, 4), (4, 8)])
def test_remedies_name_a_number_of_devices_that_splits_the_model(share, larger):
    sizes = dict(longest=512, tensor_parallel_size=share)  # works with 2, 4 and 8 devices
    third = planned(SIZES, **sizes).least // 3
    words = r"or a narrower dtype or tensor_parallel_size={}\."
    with pytest.raises(ValueError, match=words.format(larger)):
        planned(SIZES, Device(third, third), **sizes).check()
    with pytest.raises(ValueError, match=r"or a narrower dtype\.$"):  # They share the memory.
        planned(SIZES, Device(third, third, is_host=True), **sizes).check()


def test_virtual_devices_share_the_memory_of_the_machine(monkeypatch):
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    whole, half = memory.this_device(), memory.this_device((), 4)  # two are on another machine
    assert half.total == whole.total // 2 and half.is_host
    assert 2 * half.bytes_for_pages(0, 0, None) == whole.bytes_for_pages(0, 0, None)

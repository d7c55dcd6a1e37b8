"""The kernels of rejection sampling over the vocabularies of real models, on any machine.

Interpreted, they must judge as the reference does for the same uniforms, and so must the shipped
rules. The TPU interpreter simulates memory and catches races and accesses out of bounds; the GPU
interpreter runs where JAX has one. Lowered, they must pass every check that needs no device.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from jspec import ops
from jspec.core import sampling
from jspec.core.types import History, Request
from jspec.kernels.rejection_sampling import pallas_gpu, pallas_tpu
from jspec.kernels.rejection_sampling.shapes import CASES
from jspec.verify import RULES, verify
from tests.kernels.drafts import random_draft, settings, trace

# Tokens: several chunks and segments, the last ones almost empty.
SCALED_DOWN = 2 * sampling.DRAW_BLOCK + 4
SIMULATED = dict(
    interpret=pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
    )
)
SHORT = pallas_tpu.BLOCKS._replace(chunk=512)  # several chunks per vocabulary

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
each_judged_case = pytest.mark.parametrize(
    "name",
    [
        "a chain of 4 over an odd vocabulary",
        "a chain of 3 under block, all filters",
        "a chain of drawn and deterministic nodes",
        "a tree of 8",
        "a tree of 21, top_plus_one",
        "a tree of 8 under block",
        "a tree of 9 under block, top_plus_one",
    ],
)
needs_gpu_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="this JAX cannot interpret Mosaic GPU kernels"
)


def races_on_tpu():
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return interpret_pallas_call.races.races_found


def use(monkeypatch, module, **options):
    """Make ``ops`` run the kernels of a module with ``options``."""
    kernel = functools.partial(module.rejection_sampling, **options)
    monkeypatch.setattr(module, "rejection_sampling", kernel)


# ------------------------------------------------------------------------------------ drafts


@functools.cache
def judged(name, backend):
    """Return (path, num_accepted, token) of a case; "xla" is the walk of the shipped rule."""
    case = CASES[name]
    rows = (0, 3) if case.proposal == "without_replacement" else (0, 1, 2, 3)
    logits, draft, tree, uniforms, uniform = random_draft(case, rows, SCALED_DOWN)
    filters, parents = settings(list(rows), case.filters), draft.parents

    def run(logits, filters, draft, uniforms, uniform):
        draft = draft.replace(parents=parents)  # static
        if backend == "xla":
            processed, walk = sampling.process_logits(logits, filters), RULES[case.rule].walk
            path, num_accepted, log_p = walk(processed, draft, tree, uniforms, case.proposal)
            return path, num_accepted, sampling.draw(log_p, uniform)
        return ops.rejection_sampling(
            logits,
            filters,
            draft,
            tree,
            uniforms,
            uniform,
            rule=case.rule,
            implementation=backend,
        )

    run = run if backend == "reference" else jax.jit(run)
    return run(logits, filters, draft.replace(parents=None), uniforms, uniform)


def assert_same(result, expected):
    (path, num_accepted, token), (expected_path, *expected_rest) = result, expected
    np.testing.assert_array_equal(num_accepted, expected_rest[0])
    np.testing.assert_array_equal(token, expected_rest[1])
    on_path = np.arange(path.shape[1]) <= num_accepted[:, None]
    np.testing.assert_array_equal(path * on_path, expected_path * on_path)


@each_judged_case
def test_the_shipped_rule_judges_as_the_reference(name):
    assert_same(judged(name, "xla"), judged(name, "reference"))


@each_judged_case
def test_the_tpu_kernel_judges_as_the_reference(monkeypatch, name):
    use(monkeypatch, pallas_tpu, blocks=SHORT, **SIMULATED)
    assert_same(judged(name, "pallas_tpu"), judged(name, "reference"))
    assert not races_on_tpu()


@needs_gpu_interpreter
@each_judged_case
def test_the_gpu_kernel_judges_as_the_reference(monkeypatch, name):
    use(monkeypatch, pallas_gpu, interpret=plgpu.InterpretGPUParams())
    assert_same(judged(name, "pallas_gpu"), judged(name, "reference"))


def test_a_kernel_gives_the_verdict_of_the_walk(monkeypatch):
    use(monkeypatch, pallas_tpu, interpret=True)
    logits, draft, tree, *_ = random_draft(CASES["a chain of 4 over an odd vocabulary"], vocab=300)
    count = len(logits)
    request = Request(
        keys=jax.random.split(jax.random.key(0), count),
        sampling=settings(list(range(count)), ("temperature", "top_k")),
        stop_tokens=jnp.full((count, 1), -1),
        max_length=jnp.full((count,), 100),
    )
    history = History(jnp.zeros((count, 100), int), jnp.arange(7, 7 + count))

    @functools.partial(jax.jit, static_argnums=0)
    def judge(backend):
        rule = RULES["rejection"]
        return verify(rule, "chain", request, draft, tree, logits, history, backend)

    result, expected = (
        (verdict.path, verdict.num_emitted - 1, verdict.next_token)
        for verdict in (judge("pallas_tpu"), judge("xla"))
    )
    assert_same(result, expected)


@pytest.mark.filterwarnings("error")
def test_logits_of_float16_reach_a_kernel_without_a_warning():
    logits, draft, tree, *_ = random_draft(CASES["a chain of 1"], vocab=300)
    request = Request(
        keys=jax.random.split(jax.random.key(0), len(logits)),
        sampling=settings(list(range(len(logits))), ("temperature",)),
        stop_tokens=jnp.full((len(logits), 1), -1),
        max_length=jnp.full((len(logits),), 100),
    )
    history = History(jnp.zeros((len(logits), 100), int), jnp.full((len(logits),), 7))
    rule = RULES["rejection"]
    assert jax.eval_shape(
        lambda logits: verify(rule, "chain", request, draft, tree, logits, history, "pallas_tpu"),
        logits.astype(jnp.float16),
    ).path.shape == (len(logits), 2)


def judge_small(vocab=64, **options):
    case = CASES["a chain of 3 under block, all filters"]
    logits, draft, tree, uniforms, uniform = random_draft(case, vocab=vocab)
    draft = draft.replace(**options.pop("draft", {}))
    logits = logits.astype(options.pop("dtype", logits.dtype))
    filters = settings([0, 1, 2, 3], ("temperature",))
    options = {"implementation": "reference"} | options
    return ops.rejection_sampling(logits, filters, draft, tree, uniforms, uniform, **options)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("implementation='triton' is not known", dict(implementation="triton")),
        ("rule='typical' is not known; use 'rejection' or 'block'", dict(rule="typical")),
        ("max_children=None needs static draft.parents", dict(draft=dict(parents=None))),
        ("has 2 rows for 4 nodes", dict(draft=dict(logits=jnp.zeros((4, 2, 64))))),
        (
            "'pallas_gpu' takes vocabularies of 2048 tokens or more",
            dict(implementation="pallas_gpu"),
        ),
        (
            "'pallas_tpu' takes bfloat16, float16 or float32 logits, not int32",
            dict(implementation="pallas_tpu", dtype=jnp.int32),
        ),
        (
            "'pallas_tpu' holds entire rows in vector memory, too small for 900000 tokens",
            dict(implementation="pallas_tpu", vocab=900000),
        ),
    ],
)
def test_what_a_kernel_does_not_take_is_refused(message, options):
    with pytest.raises(ValueError, match=message):
        judge_small(**options)


@pytest.mark.parametrize(("capability", "runs"), [("8.9", False), ("9.0", True), ("10.0", True)])
def test_a_gpu_older_than_hopper_is_refused_by_name(capability, runs):
    device = types.SimpleNamespace(compute_capability=capability, device_kind="NVIDIA L4")
    wrong = pallas_gpu.wrong_device(device)
    assert (wrong is None) if runs else "not 8.9 (NVIDIA L4)" in wrong


def test_a_root_alone_draws_from_the_target(monkeypatch):
    use(monkeypatch, pallas_tpu, interpret=True)
    case = CASES["a chain of 1"]._replace(parents=(0,))
    logits, draft, tree, uniforms, uniform = random_draft(case, vocab=300)
    filters = settings([0, 1, 2, 3], ("temperature",))
    judge = functools.partial(ops.rejection_sampling, rule="block", implementation="pallas_tpu")
    run = jax.jit(lambda logits: judge(logits, filters, draft, tree, uniforms, uniform))
    path, num_accepted, token = run(logits)
    assert path.shape == (4, 1) and not num_accepted.any()
    expected = sampling.draw(sampling.process_logits(logits, filters)[:, 0], uniform)
    np.testing.assert_array_equal(token, expected)


def by_rejection(logits, filters, draft, tree, uniforms, uniform, proposal):
    """Return (path, num_accepted, token) of the shipped rule."""

    @jax.jit
    def run(logits):
        processed, walk = sampling.process_logits(logits, filters), RULES["rejection"].walk
        path, num_accepted, log_p = walk(processed, draft, tree, uniforms, proposal)
        return path, num_accepted, sampling.draw(log_p, uniform)

    return run(logits)


def test_deterministic_drafts_without_logits_are_judged(monkeypatch):
    use(monkeypatch, pallas_tpu, interpret=True)
    case = CASES["a tree of 8"]
    logits, draft, tree, uniforms, uniform = random_draft(case, (0, 3), vocab=300)
    draft, filters = draft.replace(logits=None), settings([0, 3], ("temperature",))
    judge = functools.partial(ops.rejection_sampling, implementation="pallas_tpu")
    uniforms = uniforms * 0.1  # deterministic tokens are rarely accepted
    result = jax.jit(lambda logits: judge(logits, filters, draft, tree, uniforms, uniform))(logits)
    expected = by_rejection(logits, filters, draft, tree, uniforms, uniform, "deterministic")
    assert expected[1].any()
    assert_same(result, expected)


def test_a_reduced_vocabulary_is_judged_over_target_ids(monkeypatch):
    use(monkeypatch, pallas_tpu, interpret=True)
    case = CASES["a chain of 4 over an odd vocabulary"]
    _, small, tree, uniforms, uniform = random_draft(case, (0, 3), vocab=100)
    logits, *_ = random_draft(case, (0, 3), vocab=300)
    ids = jnp.arange(100, dtype=jnp.int32) * 3 + 1
    draft = small.replace(tokens=ids[small.tokens], draft_to_target=ids)
    filters = settings([0, 3], ("temperature", "top_k"))
    judge = functools.partial(ops.rejection_sampling, implementation="pallas_tpu")
    result = jax.jit(lambda logits: judge(logits, filters, draft, tree, uniforms, uniform))(logits)
    arguments = logits, filters, draft, tree, uniforms, uniform
    assert_same(result, by_rejection(*arguments, case.proposal))


@pytest.mark.parametrize("implementation", ["reference", "pallas_tpu"])
def test_a_filter_that_the_kernels_lack_is_refused(implementation):
    logits, draft, tree, uniforms, uniform = random_draft(CASES["a chain of 1"], vocab=300)
    filters = settings([0, 1, 2, 3], ("temperature", "typical_p"))
    with pytest.raises(ValueError, match=r"lacks the filters \['typical_p'\]; leave sampling_bac"):
        ops.rejection_sampling(
            logits, filters, draft, tree, uniforms, uniform, implementation=implementation
        )


# ---------------------------------------------------------------------------------------- lowering


@each_case
@pytest.mark.parametrize(
    ("name", "platform", "call"),
    [
        ("pallas_tpu", "tpu", "tpu_custom_call"),
        ("pallas_gpu", "cuda", "mosaic_gpu"),
    ],
)
def test_the_kernels_lower_at_the_real_size(case, name, platform, call):
    lowered = trace(case, 8, name).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count(call) >= 3

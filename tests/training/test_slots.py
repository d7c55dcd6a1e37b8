"""Guesses of a parallel drafter in training, and their losses against its drafts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import trees
from jspec.core.types import Params
from jspec.drafters import ParallelEagle
from jspec.engine import functional as host
from jspec.models import decoder
from jspec.models.decoder import Decoder
from jspec.models.heads import eagle
from jspec.models.heads.network import embed
from tests import networks, tiny
from tests.drafters import heads, peagle, rounds
from tests.training.texts import log_softmax, packed, places
from training.data.batch import Batch
from training.losses import slots
from training.losses.slots import SlotRecipe
from training.networks.attention import causal
from training.networks.forward import Frozen
from training.tasks.draft import DraftRecipe, ParallelDraftTask
from training.tasks.eagle_task import PARALLEL, ParallelEagleTask

SIZES = networks.small(num_layers=4)
DRAFT = networks.changed(SIZES, num_layers=2, tie_embeddings=True)
MASK, DEPTHS = 39, 3
VOCABULARY = np.sort(np.random.default_rng(3).permutation(SIZES.vocab_size)[:25]).astype(np.int32)
HEAD = eagle.EagleConfig(
    networks.changed(SIZES, num_layers=2, vocab_size=len(VOCABULARY)),
    3,
    (1, 2, 3),
    SIZES.hidden_size,
    SIZES.vocab_size,
    separate_embedding=True,
    separate_head=True,
    mask_token_id=MASK,
)
RECIPE = SlotRecipe(depths=DEPTHS, retention=0.6, retention_least=0.3)


@pytest.fixture(scope="module")
def target():
    return networks.loud(decoder.init_params(jax.random.key(0), SIZES))


@pytest.fixture(scope="module")
def batch():
    return packed(MASK, first=8, second=6)


# ------------------------------------------------------------------------------------------ slots


def test_each_depth_keeps_its_share_of_rows_and_only_those_that_the_depth_before_kept(batch):
    length = batch.tokens.shape[1] - 1
    recipe = SlotRecipe(depths=6, retention=0.7, retention_least=0.3)
    assert recipe.counts(length) == (15, 10, 7, 5, 4, 4)
    pick = lambda key: slots.choose(recipe, batch.segments, batch.weights, length, 1, key)
    chosen, other = pick(jax.random.key(0)), pick(jax.random.key(1))
    assert (np.asarray(chosen.anchors) != np.asarray(other.anchors)).any()
    for row in range(2):
        anchors_of = [
            np.asarray(chosen.anchors)[row, chosen.depths == k].tolist() for k in range(6)
        ]
        assert anchors_of[0] == list(range(length))
        for k in range(1, 6):
            assert len(set(anchors_of[k])) == recipe.counts(length)[k]
            assert k == 1 or anchors_of[k] == anchors_of[k - 1][: len(anchors_of[k])]
        segments, weights = batch.segments[row], batch.weights[row]
        counts = [
            a
            for a in range(length)
            if a + 2 < 16 and segments[a] == segments[a + 2] > 0 and weights[a + 2] > 0
        ]
        # Rows whose second guess is judged come before all others.
        assert set(anchors_of[1][: len(counts)]) == set(counts) or set(anchors_of[1]) <= set(counts)
        for a, k, judge, weight in zip(
            *(x[row] for x in (chosen.anchors, [chosen.depths] * 2, chosen.judges, chosen.weights)),
            strict=True,
        ):
            j = a + 1 + k
            there = j < 16 and segments[a] == segments[j] > 0
            assert judge == min(j, 15) and weight == (weights[j] if there else 0)


def test_guesses_attend_to_the_true_rows_up_to_their_anchor_and_to_their_own_masks():
    rng = np.random.default_rng(0)
    segments = np.repeat([[1, 2]], [5, 4], axis=1).astype(np.int32)
    recipe = SlotRecipe(depths=3, retention=0.6, retention_least=0.2)
    ones = np.ones((1, 9), np.float32)
    chosen = slots.choose(recipe, segments, ones, 9, 0, jax.random.key(4))
    count = chosen.depths.size
    q, k, v = (rng.normal(size=(1, h, count, 4)).astype(np.float32) for h in (4, 2, 2))
    anchors, depths = np.asarray(chosen.anchors)[0], chosen.depths
    for window in (None, 3):
        attend = slots.attend_to(chosen, jnp.asarray(segments))
        got = jax.jit(functools.partial(attend, 0, window=window))(q, k, v)
        true = depths == 0
        age = (anchors + depths)[:, None] - (anchors + depths)
        seen = true & (anchors <= anchors[:, None])
        seen &= segments[0, anchors] == segments[0, anchors][:, None]
        seen |= (anchors == anchors[:, None]) & (depths <= depths[:, None])
        seen &= age < (window or 99)
        keys, values = (np.repeat(x, 2, axis=1) for x in (k, v))
        scores = np.where(seen, np.einsum("bhqd,bhkd->bhqk", q, keys) / 2, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(got, weights @ values, atol=1e-5)


def test_queries_in_order_see_the_same_without_anchors():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, h, 150, 4)), jnp.float32) for h in (4, 2, 2))
    segments = jnp.asarray(np.repeat([[1, 2], [1, 1]], 75, axis=1))
    every = jnp.broadcast_to(jnp.arange(150), (2, 150))
    attend = jax.jit(functools.partial(causal, window=9))
    got = attend(q, k, v, anchors=every, segments=segments)
    np.testing.assert_allclose(got, attend(q, k, v, segments=segments), atol=1e-5)


# ----------------------------------------------------------------------------------------- losses


@functools.partial(jax.jit, static_argnums=1)
def _forward(params, config, tokens):
    last = tokens.shape[1] - 1
    tree = trees.from_parents(trees.chain(last), last)
    cache = decoder.init_cache(config, tokens.shape[0], 0)
    layers = (1, 2, 3, 4) if config == SIZES else ()
    return decoder.forward(params, config, tokens, tree, cache, layers)


def counted_guesses(chosen, batch, offset):
    """Yield (row, document start and end, anchor, depth, weight) of each guess that counts."""
    for row, start, end in places(batch):
        for a, k, weight in zip(
            np.asarray(chosen.anchors)[row],
            chosen.depths,
            np.asarray(chosen.weights)[row],
            strict=True,
        ):
            if weight > 0 and start <= a < end:
                assert a + k + offset < end
                yield row, start, end, int(a), int(k), float(weight)


def test_a_draft_models_loss_is_that_of_texts_with_masks_behind_them(target, batch):
    params = networks.loud(decoder.init_params(jax.random.key(1), DRAFT))
    recipe = DraftRecipe(loss="kl", text_weight=0.25)
    task = ParallelDraftTask(DRAFT, SIZES, recipe, "float32", slots=RECIPE, mask_token_id=MASK)
    key = jax.random.key(5)
    value = jax.jit(jax.value_and_grad(task.loss, has_aux=True))
    (got, metrics), grads = value(params, Frozen(target, params), batch, key)
    length = batch.tokens.shape[1] - 1
    chosen = slots.choose(
        RECIPE, batch.segments[:, :-1], jnp.asarray(batch.label_weights), length, 0, key
    )
    counted = list(counted_guesses(chosen, batch, 1))
    assert {k for *_, k, _ in counted} == {0, 1, 2}
    # Each guess has its own text; no row sees the padding behind it.
    size, texts = 8 + DEPTHS, []
    for row, start, _, a, k, _ in counted:
        text = [*batch.tokens[row, start : a + 1], *[MASK] * k]
        texts.append(text + [0] * (size - len(text)))
    logits = np.asarray(_forward(params, DRAFT, np.array(texts, np.int32)).logits)
    truths = {
        (row, start): np.asarray(
            _forward(target, SIZES, batch.tokens[row : row + 1, start:end]).logits[0]
        )
        for row, start, end in places(batch)
    }
    total, accepted = 0.0, [[] for _ in range(DEPTHS)]
    for mine, (row, start, _, a, k, weight) in zip(logits, counted, strict=True):
        log_q = log_softmax(mine[a - start + k])
        log_p = log_softmax(truths[row, start][a - start + k])
        far = (np.exp(log_p) * (log_p - log_q)).sum()
        total += weight * (0.75 * far - 0.25 * log_q[batch.tokens[row, a + k + 1]])
        accepted[k].append(np.minimum(np.exp(log_p), np.exp(log_q)).sum())
    np.testing.assert_allclose(got, total / chosen.anchors.size, rtol=3e-5)
    for k in range(DEPTHS):
        np.testing.assert_allclose(metrics[f"accepted_{k}"].mean, np.mean(accepted[k]), rtol=3e-5)
    assert np.abs(grads.embedding[MASK]).max() > 0


def test_a_heads_loss_is_that_of_rows_with_masks_behind_them(target, batch):
    params = networks.loud(eagle.init_params(jax.random.key(2), HEAD)).replace(draft_to_target=None)
    frozen = Frozen(target, None, jnp.asarray(VOCABULARY))
    recipe = dataclasses.replace(PARALLEL, step_decay=0.5)
    task = ParallelEagleTask(HEAD, SIZES, recipe, "float32", slots=RECIPE)
    key = jax.random.key(5)
    value = jax.jit(jax.value_and_grad(task.loss, has_aux=True))
    (got, _), grads = value(params, frozen, batch, key)
    length = batch.tokens.shape[1] - 1
    learned = np.pad(batch.label_weights, ((0, 0), (0, 1)))  # weight of the token behind each row
    chosen = slots.choose(RECIPE, batch.segments, jnp.asarray(learned), length, 1, key)
    total = 0.0
    for row, start, end in places(batch):
        tokens = batch.tokens[row : row + 1, start:end]
        out = _forward(target, SIZES, tokens)
        guessed = _guess(params, target, tokens, tuple(x[:, :-1] for x in out.features[:3]))
        for r, s, _, a, k, weight in counted_guesses(chosen, batch, 1):
            if (r, s) == (row, start):
                truth = np.asarray(out.logits[0, a - s + 1 + k])
                if truth.argmax() in VOCABULARY:
                    log_p, log_q = log_softmax(truth[VOCABULARY]), log_softmax(guessed[a - s, k])
                    far = (np.exp(log_p) * (log_p - log_q)).sum()
                    total += weight * 0.5**k * far
    np.testing.assert_allclose(got, total / chosen.anchors.size, rtol=3e-5)
    assert np.abs(grads.mask_hidden).max() > 0 and np.abs(grads.embedding[MASK]).max() > 0


@jax.jit
def _guess(params, target, tokens, features):
    """Return logits [n, K, Vd] as drafting computes them: masks behind the rows up to each."""
    model, count = Decoder(SIZES), features[0].shape[1]
    rows = jnp.arange(count + DEPTHS - 1) <= jnp.arange(count)[:, None]
    behind = [(0, 0), (0, DEPTHS - 1)]
    fed = jnp.where(rows, jnp.pad(tokens[:, 1:], behind), MASK)
    fused = jnp.pad(eagle.fuse(params, HEAD, features), [*behind, (0, 0)])
    fused = jnp.where(rows[..., None], fused, eagle.mask_feature(params, HEAD))
    embedded = embed(params, HEAD, fed, model, target)
    cache = decoder.init_cache(HEAD.network, count, 0)
    out, _ = eagle.prefill(params, HEAD, embedded, fused, cache)
    index = jnp.arange(count)[:, None] + jnp.arange(DEPTHS)
    hidden = jnp.take_along_axis(out, index[..., None], 1)
    return eagle.unembed(params, HEAD, hidden, model, target)


@pytest.mark.slow
def test_a_trained_head_guesses_several_tokens_that_the_serving_loop_accepts():
    network = dataclasses.replace(peagle.NETWORK, vocab_size=tiny.VOCAB)
    config = dataclasses.replace(peagle.CONFIG, network=network, norm_before_residual=False)
    texts, _, _ = heads.lessons(config.capture_layers)
    frozen = Frozen(tiny.params().target)
    task = ParallelEagleTask(
        config, tiny.TARGET.config, PARALLEL, "float32", slots=SlotRecipe(depths=DEPTHS)
    )

    def loss(params, picked):
        ones = jnp.ones((picked.size, texts.shape[1]))
        batch = Batch(texts[picked], ones.astype(jnp.int32), ones)
        return task.loss(params, frozen, batch, jax.random.fold_in(jax.random.key(0), picked[0]))[0]

    def accepted(params):
        drafter = ParallelEagle(config, tiny.TARGET, DEPTHS)
        params = Params(frozen.target, params)
        answers = host.generate_sequences(rounds.plan_of(drafter), params, rounds.ROWS)
        drafts = sum(answer.accepted for answer in answers)
        return drafts @ np.arange(DEPTHS + 1) / drafts.sum()

    start = task.init(jax.random.key(1), frozen)
    trained = heads.fit(start, loss, 5e-3, len(texts), 250)
    assert accepted(trained) > accepted(start) + 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlotRecipe(depths=0), "--depths 0 does not work; it must be at least 1"),
        (lambda: SlotRecipe(retention=0.0), "--retention 0.0 does not work; take more than 0"),
        (
            lambda: ParallelEagleTask(
                dataclasses.replace(HEAD, mask_token_id=None), SIZES, PARALLEL
            ),
            "the head has no mask token",
        ),
        (
            lambda: ParallelEagleTask(HEAD, SIZES, dataclasses.replace(PARALLEL, unroll=2)),
            "--unroll 2 does not work; one pass has no steps",
        ),
        (
            lambda: ParallelDraftTask(
                networks.changed(DRAFT, windows=(None, 5)), SIZES, DraftRecipe()
            ),
            "--depths 8 does not work; the network has a sliding window of 5",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

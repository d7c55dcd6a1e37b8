"""The probabilities and outcomes in a trace equal those that NumPy computes."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import jspec
from jspec import verify
from jspec.api.sampling_params import SamplingParams
from jspec.core.types import Params
from jspec.engine.functional import generate_sequences
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools import trace as tracing
from jspec.tools.trace import html, names
from tests import fakes, llm_fixtures, tiny

PROMPT = "def add(x, y):"
VOCAB, TEMPERATURE, TOP_P = 12, 0.7, 0.9
BUSH = (-1, 0, 0, 0, 1, 1, 2, 4)
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 8}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    llm_fixtures.write_eagle3_head(root / "eagle3")
    return {**llm_fixtures.loaded(root), "eagle3": str(root / "eagle3")}


def config(models, method, **settings):
    draws = {"draft_model": models["draft"], "eagle3": models["eagle3"]}
    named = {"model": draws[method]} if method in draws else {}
    return {"method": method, "num_speculative_tokens": 3, **named, **settings}


CASES = [
    ("ngram", {"prompt_lookup_max": 1}, {"temperature": 0}),
    ("draft_model", {}, SAMPLED),
    ("eagle3", {"tree": "sampled", "tree_size": 8}, SAMPLED),
]
MORE = [
    ("draft_model", {}, {"temperature": 0}),
    ("draft_model", {"rejection_sample_method": "block"}, SAMPLED),
    ("draft_model", {"rejection_sample_method": "coupled"}, SAMPLED),
    ("ngram", {"prompt_lookup_max": 1}, SAMPLED),
    (
        "ngram",
        {"prompt_lookup_max": 1, "num_speculative_tokens_per_batch_size": [(1, 1, 2)]},
        {"temperature": 0},
    ),
    ("eagle3", {"num_speculative_tokens_per_batch_size": [(1, 1, 2)]}, SAMPLED),
    ("eagle3", {}, {"temperature": 0}),
    ("eagle3", {}, SAMPLED),
    ("eagle3", {"tree": "eagle2", "tree_size": 9}, SAMPLED),
    ("eagle3", {"tree": "sampled", "rejection_sample_method": "block"}, SAMPLED),
    ("suffix", {}, {"temperature": 0}),
]


def traced_and_generated(models, method, settings, sampling):
    """Return the trace of a prompt, and the output of ``generate`` with the same settings.

    They use two ``LLM``s, because some drafters learn from earlier texts.
    """
    asked = config(models, method, **settings)
    params = SamplingParams(max_tokens=24, ignore_eos=True, **sampling)
    [output] = jspec.LLM(models["target"], asked, per_request_stats="detailed").generate(
        PROMPT, params
    )
    return jspec.trace(jspec.LLM(models["target"], asked), PROMPT, params), output.outputs[0]


def assert_same(trace, output, by_the_clock=False):
    """Tokens are equal; so are rounds, unless the engine chooses the draft lengths."""
    assert trace.token_ids == output.token_ids and trace.text == output.text
    stats = output.speculative_decoding_stats
    accepted = [each.num_accepted for each in trace.rounds]
    drafted = [[node.token for node in each.nodes[1:]] for each in trace.rounds]
    if not by_the_clock:
        assert accepted == stats["per_step_accepted"]
        assert drafted == stats["per_step_drafted_token_ids"]
    assert trace.finish_reason == output.finish_reason
    assert_paths_are_the_text(trace)


def assert_paths_are_the_text(trace):
    """Accepted nodes form a path from the root whose tokens are the text."""
    for each in trace.rounds:
        at = 0
        for piece in each.pieces:
            if piece.node is not None:
                node = each.nodes[piece.node]
                assert (node.parent, node.token, node.fate) == (at, piece.token, "accepted")
                at = node.index
        assert at == each.end


@pytest.mark.parametrize(
    ("method", "settings", "sampling"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_a_trace_has_the_text_of_generate_and_the_probabilities_of_the_models(
    models, method, settings, sampling
):
    trace, output = traced_and_generated(models, method, settings, sampling)
    assert_same(trace, output)
    assert_p_is_the_targets(trace, models["target"], sampling)
    if method == "draft_model" and sampling is SAMPLED and "coupled" not in settings.values():
        assert_q_is_the_drafters(trace, models["draft"], sampling)


def test_a_trace_with_chosen_draft_lengths_has_the_text_of_generate(models):
    settings = {"prompt_lookup_max": 1, "adaptive_length": [0, 3]}
    trace, output = traced_and_generated(models, "ngram", settings, {"temperature": 0})
    assert_same(trace, output, by_the_clock=True)


def distribution(logits, temperature, top_p=1.0):
    """Return the processed distribution of logits [V], in NumPy."""
    logits = logits.astype(np.float64) / (temperature or 1.0)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    mask = np.zeros(len(p), bool)
    mask[order[before < top_p]] = True
    return np.where(mask, p, 0) / p[mask].sum()


def branches(trace):
    """Yield every round and node with the text before it on its branch."""
    text = list(trace.prompt_token_ids)
    for each in trace.rounds:
        assert each.nodes[0].token == text[-1] and each.position == len(text) - 1
        paths = [[]]
        for node in each.nodes[1:]:
            paths.append([*paths[node.parent], node.token])
            yield each, node, text + paths[node.parent]
        text += [piece.token for piece in each.pieces]


def distributions_after(model, texts, sampling):
    """Return the distribution after each text by a full pass, padded to share a program."""
    width = -(-max(map(len, texts)) // 32) * 32
    block = np.zeros((len(texts), width), np.int32)
    for row, text in enumerate(texts):
        block[row, : len(text)] = text
    logits = np.concatenate(
        [np.asarray(model.logits(part)) for part in np.array_split(block, len(block))]
    )
    temperature, top_p = sampling["temperature"], sampling.get("top_p", 1.0)
    return [
        distribution(logits[row, len(text) - 1], temperature, top_p if temperature else 1.0)
        for row, text in enumerate(texts)
    ]


def assert_p_is_the_targets(trace, target, sampling):
    nodes = list(branches(trace))
    distributions = distributions_after(target, [text for _, _, text in nodes], sampling)
    assert nodes
    for (each, node, _), p in zip(nodes, distributions, strict=True):
        assert node.p == pytest.approx(p[node.token], abs=1e-4)
        first, _, value = each.nodes[node.parent].likeliest[0]
        assert value == pytest.approx(p.max(), abs=1e-4) and p[first] > p.max() - 1e-4


def assert_q_is_the_drafters(trace, draft, sampling):
    nodes = list(branches(trace))
    distributions = distributions_after(draft, [text for *_, text in nodes], sampling)
    for (_, node, _), q in zip(nodes, distributions, strict=True):
        assert node.q == pytest.approx(q[node.token], abs=1e-4)


def toy_trace(num_valid=VOCAB, **settings):
    """Return the trace of a model whose distributions depend on the last token, and its tables.

    After tokens from ``num_valid`` on, the target's logits are NaN.
    """
    drafter = fakes.TreeTableDrafter(3, parents=BUSH)
    target = fakes.table(1, VOCAB, VOCAB).at[num_valid:].set(np.nan)
    tables = Params(target, fakes.table(2, VOCAB, VOCAB))
    row = SequenceParams((3, 1), 40, temperature=TEMPERATURE, **settings)
    return tracing.of_row(fakes.whole(fakes.ToyTarget(VOCAB), drafter), tables, row), tables


def test_chances_and_q_of_a_tree_are_those_of_recursive_rejection_in_numpy():
    trace, tables = toy_trace()
    target, drafter = (np.asarray(table) for table in tables)
    judged = 0
    for each in trace.rounds:
        at, going = 0, True
        while going:
            p, q = (
                distribution(table[each.nodes[at].token], TEMPERATURE)
                for table in (target, drafter)
            )
            going = False
            for node in [node for node in each.nodes[1:] if node.parent == at]:
                assert node.p == pytest.approx(
                    distribution(target[each.nodes[at].token], TEMPERATURE)[node.token], abs=1e-5
                )
                assert node.q == pytest.approx(q[node.token], abs=1e-5)
                if going:  # a sibling was taken
                    assert node.chance is None and node.fate == "not reached"
                else:
                    chance = min(1, p[node.token] / q[node.token])
                    assert node.chance == pytest.approx(chance, abs=1e-4)
                    assert (node.uniform < node.chance) == (
                        node.fate in ("accepted", "not emitted")
                    )
                    judged += 1
                    going = node.fate in ("accepted", "not emitted")
                    taken = node.index
                    p = np.maximum(p - q, 0)
                    p /= p.sum() or 1
                q[node.token] = 0
                q /= q.sum()
            at = taken if going else at
    assert judged > 20
    fates = {node.fate for each in trace.rounds for node in each.nodes}
    assert fates >= {"accepted", "refused", "not reached"}


def test_sources_and_reasons_follow_from_the_path_and_its_end():
    trace, *_ = toy_trace()
    seen = set()
    for each in trace.rounds:
        *drafted, last = each.pieces
        assert [piece.source for piece in drafted] == ["drafted"] * each.num_accepted
        children = [node for node in each.nodes if node.parent == each.end]
        expected = ("refused", "corrected") if children else ("leaf", "bonus")
        if len(each.nodes) == 1:
            expected = ("no draft", "plain")
        assert (each.why, last.source) == expected
        assert last.label in each.words
        seen.add(each.why)
    assert {"refused", "leaf"} <= seen
    assert trace.finish_reason == "length" and trace.rounds[-1].words.endswith(
        "limit of tokens is reached"
    )
    assert trace.counts.num_tokens == len(trace.token_ids) == 40


def test_a_text_that_ends_inside_a_draft_does_not_emit_the_rest():
    whole, *_ = toy_trace()
    stop, index = next(
        (piece.token, each.index)
        for each in whole.rounds
        for piece in each.pieces[:-2]
        if piece.token not in {p.token for r in whole.rounds[: each.index] for p in r.pieces}
        and each.pieces.index(piece) == [p.token for p in each.pieces].index(piece.token)
    )
    trace, *_ = toy_trace(stop_token_ids=(stop,))
    last = trace.rounds[-1]
    assert trace.rounds[:-1] == whole.rounds[:index]
    assert (trace.finish_reason, last.why) == ("stop", "ended")
    assert last.pieces[-1].token == stop and last.pieces[-1].source == "drafted"
    assert [node.fate for node in last.nodes if node.fate == "not emitted"]
    assert "stop token" in last.words


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["block", "match", "typical", verify.synthetic(length=2.5)])
def test_every_rule_can_be_traced(rule):
    drafter = fakes.TreeTableDrafter(3, parents=BUSH)
    plan, tables = fakes.whole(fakes.ToyTarget(VOCAB), drafter, rule), toy_trace()[1]
    row = SequenceParams((3, 1), 40, temperature=TEMPERATURE)
    trace = tracing.of_row(plan, tables, row)
    assert trace.token_ids == generate_sequences(plan, tables, [row])[0].tokens.tolist()
    assert_paths_are_the_text(trace)


@pytest.mark.parametrize("parents", [(-1, 0, 1, 2), BUSH])
def test_under_block_nodes_that_are_not_reached_do_not_matter(parents):
    """Their uniforms do not change the round."""
    given = {"node": 0, "uniform": 0.5}

    def walk(processed, draft, tree, uniforms, proposal):
        instead = jax.pure_callback(
            lambda: (np.int32(given["node"]), np.float32(given["uniform"])),
            (jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((), np.float32)),
        )
        uniforms = uniforms.at[:, instead[0]].set(instead[1])
        return block(processed, draft, tree, uniforms, proposal)

    block = verify.RULES["block"].walk
    rule = dataclasses.replace(verify.RULES["block"], walk=walk)
    proposal = "chain" if len(parents) == 4 else "without_replacement"
    drafter = fakes.TreeTableDrafter(3, parents=parents, proposal=proposal)
    plan, tables = fakes.whole(fakes.ToyTarget(VOCAB), drafter, rule), toy_trace()[1]

    def first_round(seed, node=0, uniform=0.5):
        given.update(node=node, uniform=uniform)
        trace = tracing.of_row(
            plan, tables, SequenceParams((3, 1), 4, temperature=TEMPERATURE, seed=seed)
        )
        return trace.rounds[0]

    idle = decisive = 0
    for seed in range(6):
        as_is = first_round(seed)
        for node in as_is.nodes[1:]:
            if node.fate == "not reached":
                idle += 1
                for uniform in (0.0, 0.9999):
                    other = first_round(seed, node.index, uniform)
                    assert [n.fate for n in other.nodes] == [n.fate for n in as_is.nodes]
            elif node.fate == "refused":
                other = first_round(seed, node.index, 0.0)
                decisive += other.nodes[node.index].fate == "accepted"
    assert decisive > 3 and (idle > 3) == (proposal != "chain")


def test_typical_acceptance_has_no_uniforms_and_chooses_among_paths():
    drafter = fakes.TreeTableDrafter(3, parents=BUSH)
    plan, tables = fakes.whole(fakes.ToyTarget(VOCAB), drafter, "typical"), toy_trace()[1]
    trace = tracing.of_row(plan, tables, SequenceParams((3, 1), 40, temperature=TEMPERATURE))
    fates = {}
    for each in trace.rounds:
        for node in each.nodes[1:]:
            assert node.uniform is None and node.chance is None
            fates.setdefault(node.fate, []).append(node)
            assert node.fate != "refused" or node.p <= 0.09
    assert fates.keys() >= {"accepted", "refused", "not taken"}
    assert max(node.p for node in fates["not taken"]) > 0.09
    assert "off the chosen path" in html(trace) and "Uniform" not in html(trace)


def test_a_target_with_nan_logits_ends_the_trace_with_a_reason():
    trace, _ = toy_trace(num_valid=4)
    last = trace.rounds[-1]
    assert (trace.finish_reason, last.why) == ("error", "no token")
    assert trace.token_ids[-1] >= 4 and "probability 0" in last.words
    assert all(node.p is None for node in last.nodes[1:] if last.nodes[node.parent].token >= 4)
    assert "nan" not in html(trace).lower()
    assert_paths_are_the_text(trace)


def test_a_stop_string_cuts_the_trace_as_it_cuts_the_text(models):
    llm = jspec.LLM(models["target"], config(models, "ngram", prompt_lookup_max=1))
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    whole = llm.generate(PROMPT, params)[0].outputs[0].text
    params = dataclasses.replace(params, stop=(whole[9:11],))
    output, trace = llm.generate(PROMPT, params)[0].outputs[0], jspec.trace(llm, PROMPT, params)
    assert (trace.text, trace.token_ids) == (output.text, output.token_ids)
    assert trace.stop_reason == whole[9:11] and "the text ends before" in trace.rounds[-1].words


def test_rounds_without_a_draft_are_named():
    row = SequenceParams(tiny.prompts()[1], max_tokens=4)
    trace = tracing.of_row(Plan(tiny.TARGET, tiny.NONE), tiny.params(), row)
    assert [each.why for each in trace.rounds] == ["no draft"] * 4
    assert {piece.source for piece in trace.pieces} == {"plain"}


def test_every_token_has_a_printable_label(models):
    tokenizer = models["target"].tokenizer
    labels = [names.label(tokenizer, token) for token in range(llm_fixtures.VOCAB)]
    assert all(label and label.isprintable() and "\ufffd" not in label for label in labels)
    part = tokenizer.convert_tokens_to_ids("Ã")  # the first byte of é, no character by itself
    assert tokenizer.decode([part]) == "\ufffd" and names.label(tokenizer, part) == "Ã"
    assert names.label(None, 7) == "7"


def test_a_trace_is_of_one_text(models):
    llm = jspec.LLM(models["target"])
    for prompts, params, words in [
        ([PROMPT, PROMPT], SamplingParams(), "2 were given"),
        (PROMPT, SamplingParams(n=2, temperature=1), "n=2"),
        (PROMPT, SamplingParams(logprobs=1), "logprobs=1"),
        ("", SamplingParams(), "empty"),
    ]:
        with pytest.raises(ValueError, match=words):
            jspec.trace(llm, prompts, params)


def test_a_trace_is_plain_data():
    trace, *_ = toy_trace()
    assert (
        json.loads(json.dumps(dataclasses.asdict(trace)))["rounds"][0]["nodes"][0]["parent"] == -1
    )

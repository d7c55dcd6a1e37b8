"""``LLM``: prompts in, texts out, with vLLM's names and fields."""

import concurrent.futures
import dataclasses
import itertools
import json
import subprocess
import sys
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import SamplingParams
from jspec.api import config, metrics
from jspec.api import llm as llm_module
from jspec.api.build import build_plan
from jspec.drafters.ngram import NGram
from jspec.engine import programs
from jspec.engine.loop import launch
from tests import llm_fixtures

PROMPTS = ["the quick brown", "def add(x, y):", "grüße", "the the the the"]
TEMPERATURES = (0.0, 0.7, 1.0, 0.0)
MIXED = [
    SamplingParams(temperature=t, max_tokens=24, seed=5, ignore_eos=True) for t in TEMPERATURES
]
METHODS = ("none", "ngram", "draft_model", "coupled")


@pytest.fixture(scope="module")
def open_llm(root):
    return lambda method: llm_fixtures.llm(root, method)


@pytest.fixture(scope="module")
def whole(open_llm):
    """The results of each method for the mixed batch, computed once."""
    return {method: open_llm(method).generate(PROMPTS, MIXED) for method in METHODS}


def with_all(**changes):
    return [dataclasses.replace(params, **changes) for params in MIXED]


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def test_results_have_the_fields_of_request_outputs(open_llm, whole):
    tokenizer = open_llm("draft_model").get_tokenizer()
    for prompt, output in zip(PROMPTS, whole["draft_model"], strict=True):
        assert isinstance(output, jspec.RequestOutput)
        assert output.prompt == prompt
        assert output.prompt_token_ids == tokenizer.encode(prompt)
        assert output.finished and len(output.outputs) == 1
        completion = output.outputs[0]
        assert (completion.index, completion.finish_reason, completion.stop_reason) == (
            0,
            "length",
            None,
        )
        assert completion.finished() and len(completion.token_ids) == 24
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert completion.cumulative_logprob is None and completion.logprobs is None
    assert len({output.request_id for output in whole["draft_model"]}) == len(PROMPTS)


@pytest.mark.parametrize("method", ["ngram", "coupled"])
def test_the_text_is_that_of_plain_sampling(whole, method):
    assert ids(whole[method]) == ids(whole["none"])
    assert texts(whole[method]) == texts(whole["none"])


def test_greedy_texts_are_plain_beside_sampled_ones(whole):
    for index, temperature in enumerate(TEMPERATURES):
        if temperature == 0:
            assert ids(whole["draft_model"])[index] == ids(whole["none"])[index]


def test_text_does_not_depend_on_the_grouping(root, whole):
    both = llm_fixtures.loaded(root)
    config = {"model": both["draft"], "num_speculative_tokens": 3}
    small = jspec.LLM(both["target"], config, max_num_seqs=2, per_request_stats="detailed")
    assert texts(small.generate(PROMPTS, MIXED)) == texts(whole["draft_model"])


def test_the_order_of_prompts_is_the_order_of_results(open_llm, whole):
    backwards = open_llm("draft_model").generate(PROMPTS[::-1], MIXED[::-1])
    assert texts(backwards) == texts(whole["draft_model"])[::-1]


def test_text_ids_and_dicts_are_the_same_prompt(open_llm, whole):
    llm = open_llm("none")
    encoded = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]
    mixture = [
        PROMPTS[0],
        {"prompt": PROMPTS[1]},
        {"prompt_token_ids": np.array(encoded[2])},
        {"prompt_token_ids": jnp.array(encoded[3])},
    ]
    outputs = llm.generate(mixture, MIXED)
    assert texts(outputs) == texts(whole["none"])
    assert [output.prompt for output in outputs] == [PROMPTS[0], PROMPTS[1], None, None]


def stops_inside(texts):
    """Two whole characters of the second half of each text, among decoys."""
    pairs = (
        next(pair for pair in map("".join, itertools.pairwise(text[8:])) if "\ufffd" not in pair)
        for text in texts
    )
    return [["never met", pair, "nor this"] for pair in pairs]


@pytest.mark.parametrize("rounds", [1, 3, 16])
@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_a_stop_string_equals_a_cut_of_the_full_run(open_llm, whole, method, rounds, monkeypatch):
    monkeypatch.setattr(llm_module, "STOP_ROUNDS", rounds)
    full, stops = texts(whole[method]), stops_inside(texts(whole[method]))
    params = [dataclasses.replace(p, stop=s) for p, s in zip(MIXED, stops, strict=True)]
    for index, output in enumerate(open_llm(method).generate(PROMPTS, params)):
        completion, entire = output.outputs[0], whole[method][index].outputs[0]
        begin = full[index].index(stops[index][1])
        assert completion.text == full[index][:begin]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stops[index][1])
        count = len(completion.token_ids)
        assert completion.token_ids == entire.token_ids[:count]
        # One token less would not have held the stop string.
        decode = open_llm(method).get_tokenizer().decode
        assert stops[index][1] in decode(entire.token_ids[:count])
        assert stops[index][1] not in decode(entire.token_ids[: count - 1])
        assert_ends_after(completion, entire, count)


def assert_ends_after(completion, entire, count):
    """The statistics are those of the full run's rounds up to token ``count``."""
    short, long = completion.speculative_decoding_stats, entire.speculative_decoding_stats
    accepted = short["per_step_accepted"]
    steps = len(accepted)
    assert sum(accepted) + steps == count
    assert accepted[:-1] == long["per_step_accepted"][: steps - 1]
    assert short["per_step_drafted"] == long["per_step_drafted"][:steps]
    assert short["num_draft_tokens"] == sum(long["per_step_drafted"][:steps])


def test_another_max_tokens_with_stop_strings_or_a_trace_compiles_nothing(open_llm, monkeypatch):
    llm, traced = open_llm("ngram"), []
    asked = SamplingParams(temperature=0.0, max_tokens=24, stop="*", ignore_eos=True)
    llm.generate(PROMPTS[1], asked)
    jspec.trace(llm, PROMPTS[1], asked)
    for name in ("init", "prefill", "propose"):
        known = getattr(NGram, name)
        monkeypatch.setattr(
            NGram, name, lambda *given, known=known: traced.append(1) or known(*given)
        )
    for max_tokens in (4, 8, 16, 20, 40):
        other = dataclasses.replace(asked, max_tokens=max_tokens)
        text = llm.generate(PROMPTS[1], other)[0].outputs[0].text
        assert jspec.trace(llm, PROMPTS[1], other).text == text
    assert not traced


def test_the_stop_string_is_shown_on_request(open_llm, whole):
    full, stops = texts(whole["none"]), stops_inside(texts(whole["none"]))
    params = [
        dataclasses.replace(p, stop=s, include_stop_str_in_output=True)
        for p, s in zip(MIXED, stops, strict=True)
    ]
    for index, text in enumerate(texts(open_llm("none").generate(PROMPTS, params))):
        assert text == full[index][: full[index].index(stops[index][1]) + 2]


@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_a_stop_token_ends_the_text_and_is_not_shown(open_llm, whole, method):
    tokens = ids(whole[method])
    params = [
        dataclasses.replace(p, stop_token_ids=[row[9]])
        for p, row in zip(MIXED, tokens, strict=True)
    ]
    decode = open_llm(method).get_tokenizer().decode
    for row, output in zip(tokens, open_llm(method).generate(PROMPTS, params), strict=True):
        completion, end = output.outputs[0], row.index(row[9])
        assert completion.token_ids == row[: end + 1]
        assert completion.text == decode(row[:end])
        assert (completion.finish_reason, completion.stop_reason) == ("stop", row[9])


@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_the_least_top_p_keeps_the_likeliest_token(open_llm, method):
    greedy, least = with_all(temperature=0), with_all(temperature=1, top_p=1e-320)
    results = [ids(open_llm(method).generate(PROMPTS, params)) for params in (greedy, least)]
    assert results[0] == results[1]


@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_nothing_ends_a_text_before_its_least_length(open_llm, method):
    held = open_llm(method).generate(PROMPTS, with_all(min_tokens=24))
    tokens, stops = ids(held), stops_inside(texts(held))
    # Stop strings do not change the draws, so texts are the same until they may end.
    params = [
        dataclasses.replace(p, stop=s, min_tokens=24) for p, s in zip(MIXED, stops, strict=True)
    ]
    assert ids(open_llm(method).generate(PROMPTS, params)) == tokens
    # Stop tokens are not drawn at all.
    params = [
        dataclasses.replace(p, stop_token_ids=row[:10], min_tokens=12)
        for p, row in zip(MIXED, tokens, strict=True)
    ]
    for row, output in zip(tokens, open_llm(method).generate(PROMPTS, params), strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) >= 12 and not set(tokens[:12]) & set(row[:10])


def test_bad_words_are_absent_in_every_spelling(open_llm, whole):
    llm = open_llm("draft_model")
    encode, decode = llm.get_tokenizer().encode, llm.get_tokenizer().decode
    before = ids(whole["draft_model"])
    tokens = {decode([token]).strip() for row in before for token in row}
    words = sorted(word for word in tokens if word.isalnum() and word.isascii())[:8]
    params = with_all(bad_words=words)
    spelled = [encode(f"{space}{word}") for word in words for space in ("", " ")]
    after = ids(llm.generate(PROMPTS, params))
    says = lambda row, word: any(
        row[at : at + len(word)] == word for at in range(len(row) - len(word) + 1)
    )
    assert any(says(row, word) for row in before for word in spelled)
    assert not any(says(row, word) for row in after for word in spelled)


def test_an_unknown_token_id_is_refused_before_anything_runs(open_llm):
    with pytest.raises(ValueError, match="logit_bias of prompt 1 holds token id 9999"):
        open_llm("none").generate(
            PROMPTS[:2], [SamplingParams(), SamplingParams(logit_bias={9999: 1})]
        )


def test_the_tokenizers_end_of_text_ends_it_unless_ignored(root, whole, tmp_path):
    both = llm_fixtures.loaded(root)
    row = ids(whole["none"])[0]
    end = next(token for token in row[4:] if token < len(both["target"].tokenizer))
    llm_fixtures.write_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["eos_token"] = both["target"].tokenizer.convert_ids_to_tokens(end)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    llm = jspec.LLM(both["target"], tokenizer=tmp_path, per_request_stats="detailed")
    ended = llm.generate(PROMPTS, with_all(ignore_eos=False))[0].outputs[0]
    assert ended.token_ids == row[: row.index(end) + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert ids(llm.generate(PROMPTS, MIXED))[0] == row
    # Ignored, it does not end a text; before ``min_tokens`` it is never drawn.
    held = ids(llm.generate(PROMPTS, with_all(min_tokens=row.index(end) + 1)))[0]
    assert held[: row.index(end)] == row[: row.index(end)] and held[row.index(end)] != end


def test_end_of_text_ids_come_from_every_config_file(root, tmp_path):
    target = llm_fixtures.loaded(root)["target"]
    raw = target.raw_config | {"eos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9]}))
    assert dataclasses.replace(target, path=tmp_path).eos_token_ids == (3, 7, 9)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_a_stream_grows_to_what_generate_returns(open_llm, whole, method):
    seen = {prompt: [] for prompt in PROMPTS}
    for output in open_llm(method).stream(PROMPTS, MIXED, rounds=2):
        seen[output.prompt].append(output)
    for prompt, final in zip(PROMPTS, whole[method], strict=True):
        parts = seen[prompt]
        assert len(parts) > 2
        assert parts[-1].outputs == final.outputs
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        for before, after in itertools.pairwise(parts):
            assert after.outputs[0].text.startswith(before.outputs[0].text)
            assert len(after.outputs[0].token_ids) > len(before.outputs[0].token_ids)


def test_a_stream_never_shows_a_part_of_a_stop_string(open_llm, whole):
    stops = stops_inside(texts(whole["none"]))
    params = [dataclasses.replace(p, stop=s) for p, s in zip(MIXED, stops, strict=True)]
    final = dict(zip(PROMPTS, texts(open_llm("none").generate(PROMPTS, params)), strict=True))
    for output in open_llm("none").stream(PROMPTS, params, rounds=1):
        assert final[output.prompt].startswith(output.outputs[0].text)


def test_a_seed_gives_the_same_text_at_any_index(open_llm, whole):
    again = open_llm("none").generate([PROMPTS[2]] * 4, [MIXED[2]] * 4)
    assert ids(again) == [ids(whole["none"])[2]] * 4


def test_without_a_seed_requests_differ_and_models_of_one_seed_agree(root):
    target = llm_fixtures.loaded(root)["target"]
    run = lambda llm: ids(llm.generate([PROMPTS[2]] * 4, with_all(seed=None, temperature=1.0)))
    make = lambda seed: jspec.LLM(target, seed=seed, per_request_stats="detailed")
    one = make(3)
    first, second = run(one), run(one)
    assert len({tuple(row) for row in first + second}) == 8
    assert run(make(3)) == first
    assert run(make(4)) != first


def test_each_of_n_texts_has_its_own_noise_and_the_first_is_that_of_n_1(open_llm, whole):
    params = [dataclasses.replace(MIXED[2], n=3), MIXED[2]]
    first, second = open_llm("none").generate([PROMPTS[2]] * 2, params)
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in first.outputs}) == 3
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == ids(whole["none"])[2]


def test_max_tokens_stops_at_max_model_len(root, whole):
    target = llm_fixtures.loaded(root)["target"]
    llm = jspec.LLM(target, max_model_len=np.int64(34), per_request_stats="detailed")
    for wanted in (None, 1000):
        for output in llm.generate(PROMPTS, with_all(max_tokens=wanted)):
            room = 34 - len(output.prompt_token_ids)
            assert len(output.outputs[0].token_ids) == room
            assert output.outputs[0].finish_reason == "length"


def test_detailed_statistics_account_for_every_token(whole):
    for method in METHODS:
        for output in whole[method]:
            tokens, stats = output.outputs[0].token_ids, output.speculative_decoding_stats
            assert stats == output.outputs[0].speculative_decoding_stats
            accepted, drafted = stats["per_step_accepted"], stats["per_step_drafted_token_ids"]
            assert sum(accepted) + len(accepted) == len(tokens)
            assert [len(step) for step in drafted] == stats["per_step_drafted"]
            at = 0
            for count, step in zip(accepted, drafted, strict=True):
                assert tokens[at : at + count] == step[:count]
                at += count + 1


def test_statistics_are_there_by_default(root, whole):
    target = llm_fixtures.loaded(root)["target"]
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}
    outputs = jspec.LLM(target, config).generate(PROMPTS, MIXED)
    for output, detailed in zip(outputs, whole["ngram"], strict=True):
        expected = {
            name: value
            for name, value in detailed.speculative_decoding_stats.items()
            if not name.startswith("per_step")
        }
        assert output.speculative_decoding_stats == expected


def test_metrics_are_the_sums_over_all_requests(root):
    both = llm_fixtures.loaded(root)
    config = {"model": both["draft"], "num_speculative_tokens": 3}
    llm = jspec.LLM(both["target"], config, per_request_stats="detailed")
    assert {metric.name: metric for metric in llm.get_metrics()}[
        "vllm:spec_decode_num_drafts"
    ].value == 0
    outputs = llm.generate(PROMPTS, MIXED) + llm.generate(PROMPTS, with_all(stop="e"))
    stats = [output.speculative_decoding_stats for output in outputs]
    entries = {metric.name: metric for metric in llm.get_metrics()}
    value = lambda name: entries[f"vllm:{name}"].value
    total = lambda name: sum(each[name] for each in stats)
    assert value("spec_decode_num_drafts") == total("num_spec_steps")
    assert value("spec_decode_num_draft_tokens") == total("num_draft_tokens")
    assert value("spec_decode_num_accepted_tokens") == total("num_accepted_draft_tokens")
    per_pos = entries["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(per_pos, metrics.Vector) and len(per_pos.values) == 3
    assert sum(per_pos.values) == total("num_accepted_draft_tokens")
    assert value("generation_tokens") == sum(map(len, ids(outputs)))
    assert value("avg_generation_throughput_toks_per_s") > 0
    assert value("prompt_tokens") == sum(len(output.prompt_token_ids) for output in outputs)


def test_chat_answers_the_rendered_conversation(open_llm):
    llm = open_llm("none")
    conversations = [[{"role": "user", "content": word}] for word in ("hi", "fox", "dog", "ça")]
    outputs = llm.chat(conversations, MIXED)
    assert [output.prompt for output in outputs] == [
        "[u]hi[a]",
        "[u]fox[a]",
        "[u]dog[a]",
        "[u]ça[a]",
    ]
    assert texts(outputs) == texts(
        llm.generate(["[u]hi[a]", "[u]fox[a]", "[u]dog[a]", "[u]ça[a]"], MIXED)
    )


def test_a_chat_template_sees_its_variables(open_llm):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    template = llm_fixtures.CHAT_TEMPLATE + "{{ tokenizer }}{{ tools | length }}"
    variables = {"tokenizer": "of mine", "tools": [{"name": "f"}, {"name": "g"}]}
    [prompt] = open_llm("none").chat_prompts(
        chat, chat_template=template, chat_template_kwargs=variables
    )
    assert prompt["prompt"] == "[u]hi[a]ho[a]of mine2"
    [prompt] = open_llm("none").chat_prompts(
        chat, add_generation_prompt=False, chat_template_kwargs={"continue_final_message": True}
    )
    assert prompt["prompt"] == "[u]hi[a]ho"


def test_a_chat_can_be_streamed_and_traced(open_llm):
    llm = open_llm("ngram")
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [prompt] = llm.chat_prompts([{"role": "user", "content": "fox"}])
    [answer] = llm.chat([{"role": "user", "content": "fox"}], greedy)
    [*_, last] = llm.stream(prompt, greedy)
    assert (last.prompt, last.outputs[0].text) == ("[u]fox[a]", answer.outputs[0].text)
    assert jspec.trace(llm, prompt, greedy).text == answer.outputs[0].text


def test_without_detokenizing_there_are_ids_and_no_text(open_llm, whole):
    outputs = open_llm("none").generate(PROMPTS, with_all(detokenize=False))
    assert texts(outputs) == [""] * 4
    assert ids(outputs) == ids(whole["none"])


def test_no_prompts_give_no_results(open_llm):
    assert open_llm("none").generate([]) == []


def test_models_load_from_their_directories_in_the_requested_dtype(root, whole, open_llm):
    paths = llm_fixtures.checkpoints(root)
    config = {"model": str(paths["draft"]), "num_speculative_tokens": 3}
    llm = jspec.LLM(str(paths["target"]), config, dtype="float32", per_request_stats="detailed")
    open_llm("draft_model").generate(PROMPTS, MIXED)  # its program may be evicted by now
    before = launch._cache_size()
    assert texts(llm.generate(PROMPTS, MIXED)) == texts(whole["draft_model"])
    assert launch._cache_size() == before  # an equal plan is an equal program


def test_logits_are_those_of_generation(root, whole):
    target = llm_fixtures.loaded(root)["target"]
    greedy = whole["none"][0]
    text = greedy.prompt_token_ids + greedy.outputs[0].token_ids
    logits = target.logits([text, text[::-1]])
    assert logits.shape == (2, len(text), llm_fixtures.VOCAB)
    start = len(greedy.prompt_token_ids) - 1
    assert logits[0].argmax(-1)[start:-1].tolist() == greedy.outputs[0].token_ids


def test_a_loaded_model_runs_in_the_functional_layer(root, whole):
    target = llm_fixtures.loaded(root)["target"]
    answers = jspec.generate(
        target.target, target.params, [whole["none"][0].prompt_token_ids], max_new_tokens=24
    )
    assert answers[0].tokens.tolist() == ids(whole["none"])[0]


def test_compiled_programs_go_to_the_users_cache_unless_a_directory_is_set():
    chosen = jax.config.jax_compilation_cache_dir
    assert chosen is not None
    programs.keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir == chosen
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        programs.keep_compiled_programs()
        assert "jspec" in jax.config.jax_compilation_cache_dir
        assert jax.config.jax_persistent_cache_min_compile_time_secs < 1
    finally:
        jax.config.update("jax_compilation_cache_dir", chosen)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


def test_a_progress_bar_goes_to_stderr_on_request(open_llm, whole, capsys):
    open_llm("none").generate(PROMPTS, MIXED)
    assert capsys.readouterr() == ("", "")
    open_llm("none").generate(PROMPTS, MIXED, use_tqdm=True)
    printed = capsys.readouterr()
    assert "Generating" in printed.err and printed.out == ""


def test_the_public_names_are_there():
    for name in jspec.__all__:
        assert getattr(jspec, name) is not None
    assert len(jspec.__all__) <= 26
    assert jspec.__version__ == metadata.version("jspec-decoding")


def test_packages_are_imported_at_their_first_use():
    code = (
        "import jspec; print(jspec.verify.synthetic(length=2.0).name, jspec.ops.__name__, "
        "[hasattr(jspec, name) for name in ('verfy', '__main__', 'verify.rules', '')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "synthetic jspec.ops [False, False, False, False]"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_drafter_takes_the_dtype_of_a_loaded_target(root, dtype):
    paths = llm_fixtures.checkpoints(root)
    settings = config.read({"model": str(paths["draft"]), "num_speculative_tokens": 2})
    target = jspec.load(paths["target"], dtype)
    assert build_plan(target, settings).params.drafter.embedding.dtype == dtype
    other = build_plan(target, settings, dtype="float16")
    assert other.params.drafter.embedding.dtype == "float16"


@pytest.mark.parametrize("method", ["suffix", "token_recycling"])
def test_threads_that_share_a_model_get_their_texts(root, method):
    llm = jspec.LLM(llm_fixtures.loaded(root)["target"], {"method": method})
    greedy = SamplingParams(temperature=0, max_tokens=12)
    prompts = ["def add(", "the quick brown fox jumps over the lazy dog " * 3]
    expected = [llm.generate(prompt, greedy)[0].outputs[0].text for prompt in prompts]

    def repeat(prompt):
        return {llm.generate(prompt, greedy)[0].outputs[0].text for _ in range(6)}

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(repeat, prompts * 2))
    assert texts == [{text} for text in expected * 2]

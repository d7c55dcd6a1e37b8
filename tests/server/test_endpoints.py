"""Requests that the endpoints refuse, and answers for probes and monitors."""

import json
import socket

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server import live
from tests.server.live import NAME

COMPLETION = {"model": NAME, "prompt": "the quick", "max_tokens": 8, "temperature": 0}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == status and error["type"].endswith("Error")
    return error["message"], error["param"]


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "temperature=-1"),
        ({"temperature": "warm"}, "temperature", "valid number"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"max_tokens": 6.5}, "max_tokens", "valid integer"),
        ({"max_tokens": "six"}, "max_tokens", "valid integer"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"n": 1e30}, "n", "valid integer"),
        ({"stop_token_ids": [6.5]}, "stop_token_ids", "valid integer"),
        ({"stop_token_ids": [True]}, "stop_token_ids", "valid integer"),
        ({"prompt": [[1.5]]}, "prompt", "valid"),
        ({"prompt": 6}, "prompt", "valid"),
        ({"stream": "perhaps"}, "stream", "valid boolean"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0 must be"),
        ({"max_tokens": 1000}, "max_tokens", "max_tokens=1000 is too large"),
        ({"prompt": []}, "prompt", "1 to 2048 prompts"),
        ({"prompt": ""}, "prompt", "prompt 0 is empty"),
        ({"prompt": [10**9]}, "prompt", "vocabulary"),
        ({"prompt": ["a" * 5000]}, "prompt", "prompt has 5000 characters, but at most 1344"),
        ({"prompt": ["a " * 300]}, "prompt", "shorten the prompt"),
        ({"prompt": [5] * 192}, "prompt", "the prompt has 192 tokens"),
        ({"prompt": [[5], [5] * 192]}, "prompt", "the prompt has 192 tokens"),
        ({"prompt": [[5]] * 2049}, "prompt", "prompt has 2049 texts, which are prompts times n"),
        ({"prompt": ["x"] * 3, "n": 700}, "prompt", "prompt has 2100 texts"),
        ({"n": 2049, "temperature": 1}, "prompt", "larger --max-texts-per-request"),
        ({"stop": ["x"] * 65}, "stop", "stop has 65 strings, but at most 64"),
        ({"stop": "x" * 1001}, "stop", "stop has 1001 characters in a string"),
        ({"stop_token_ids": [*range(257)]}, "stop_token_ids", "stop_token_ids has 257 ids"),
        ({"bad_words": ["x"] * 1025}, "bad_words", "bad_words has 1025 words"),
        ({"bad_words": ["x" * 201]}, "bad_words", "bad_words has 201 characters in a word"),
        ({"bad_words": ["é" * 100]}, "bad_words", "bad_words has 201 tokens in a word"),
        ({"logit_bias": {str(i): 1 for i in range(400)}}, "logit_bias", "logit_bias has 400"),
        ({"logit_bias": {"1": "x"}}, "logit_bias", "every value must be a number"),
        ({"allowed_token_ids": [5] * 400}, "allowed_token_ids", "has 400 ids, but at most"),
        (
            {"prompt": [[5] * 190] * 1100, "echo": True, "logprobs": 20, "max_tokens": 0},
            "prompt_logprobs",
            "prompt_logprobs has 4389000 scores, of all prompts together",
        ),
        (
            {"prompt": [[5]] * 2000, "allowed_token_ids": [*range(300)], "bad_words": ["x"] * 1000},
            "prompt",
            "prompt has 2600000 entries of lists such as logit_bias, times its prompts",
        ),
        ({"request_id": "x" * 257}, "request_id", "request_id has 257 characters"),
        ({"cache_salt": "x" * 257}, "cache_salt", "cache_salt has 257 characters"),
        ({f"x{i}": 1 for i in range(256)}, None, "body has 260 fields"),
        ({"n": 0}, "n", "n=0 must be"),
        ({"n": 2}, "n", "n must be 1 when using greedy"),
        ({"best_of": 2, "n": 3, "temperature": 1}, "best_of", "best_of=2 must be"),
        ({"logprobs": 21}, "logprobs", "max allowed: 20"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias="),
        ({"response_format": {"type": "xml"}}, "response_format", "must have the type"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "cannot be compiled"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "response_format",
            "send one of them",
        ),
        ({"stream_options": {}}, "stream_options", "set stream"),
        ({"suffix": "x"}, "suffix", "suffix='x' is not supported"),
        ({"use_beam_search": True}, "use_beam_search", "best_of"),
        ({"top_a": 0.1}, "top_a", "top_a=0.1 is not supported: the filters are top_k, top_p and"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1 or from 1"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "not streamed"),
        ({"cache_salt": ""}, "prompt", "cache_salt"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_bad_field_is_named(http, changes, param, words):
    message, named = error_of(http.post("/v1/completions", json=COMPLETION | changes), 400)
    assert words in message and named == param


def test_an_operator_may_allow_another_number_of_texts(llm):
    with live.running(llm, max_texts=3) as server, httpx.Client(base_url=server.url) as http:
        message, _ = error_of(
            http.post("/v1/completions", json=COMPLETION | {"prompt": ["x"] * 4}), 400
        )
        assert "prompt has 4 texts, which are prompts times n, but at most 3 are taken" in message
        assert http.post("/v1/chat/completions", json=CHAT | {"n": 4}).status_code == 400
        body = COMPLETION | {"prompt": ["x"] * 3}
        assert http.post("/v1/completions", json=body, timeout=60).status_code == 200


def test_prompts_of_different_lengths_have_all_the_room_that_each_leaves(http):
    changes = {"prompt": [[5, 6], [5] * 180], "max_tokens": None, "ignore_eos": True}
    answer = http.post("/v1/completions", json=COMPLETION | changes | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    sizes = [len(c["prompt_token_ids"]) + len(c["token_ids"]) for c in answer.json()["choices"]]
    assert sizes == [192, 192]
    message, _ = error_of(
        http.post("/v1/completions", json=COMPLETION | changes | {"min_tokens": 20}), 400
    )
    assert "min_tokens must be less than or equal to max_tokens=12" in message


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"messages": []}, 422, "messages must be a list"),
        ({"messages": [{"role": 1, "content": "x"}]}, 400, "role=1 must be text"),
        ({"messages": [{"role": "user"}]}, 400, "content=None must be text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "only parts of text",
        ),
        ({"top_logprobs": 2}, 400, "logprobs: true"),
        ({"tool_choice": "required"}, 400, "needs tools"),
        ({"tools": [{"type": "function"}]}, 400, "tools[0]="),
        ({"chat_template": "{{ 1 }}"}, 400, "not taken from requests"),
        ({"chat_template_kwargs": {"messages": 1}}, 422, "argument of chat"),
        ({"audio": {"voice": "x"}}, 400, "answers are text"),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, 400, "prompt has 6"),
        ({"messages": CHAT["messages"] * 10_001}, 400, "messages has 10001 items"),
        ({"tools": [{}] * 1025}, 400, "tools has 1025 items, but at most 1024"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_bad_conversation_is_refused(http, changes, status, words):
    message, _ = error_of(http.post("/v1/chat/completions", json=CHAT | changes), status)
    assert words in message


def test_limits_that_leave_no_token_are_named_and_harm_no_other_request(http):
    limits = {"structured_outputs": {"choice": ["a", "b"]}, "bad_words": ["a", "b"]}
    message, _ = error_of(http.post("/v1/completions", json=COMPLETION | limits), 500)
    assert "structured_outputs and bad_words forbid them all" in message
    assert http.post("/v1/completions", json=COMPLETION).status_code == 200


def test_a_chat_without_a_template_has_a_remedy_and_no_path(llm, http, monkeypatch):
    tokenizer = llm.get_tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", None)
    message, param = error_of(http.post("/v1/chat/completions", json=CHAT), 400)
    assert "has no chat template; send a prompt to /v1/completions" in message
    assert param == "messages" and str(tokenizer.name_or_path) not in message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "prompt"),
        (b"{", "EOF"),
        (b"[]", "JSON object"),
        (b'{"prompt": NaN}', "expected value"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "recursion"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
        (b"\xff\xfe", "JSON"),
    ],
    ids=["empty", "cut", "list", "nan", "surrogate", "deep", "huge", "bytes"],
)
def test_a_body_that_is_no_json_is_an_error(http, body, words):
    headers = {"Content-Type": "application/json"}
    error_of(http.post("/v1/completions", content=body, headers=headers), 400)
    assert http.post("/v1/completions", json=COMPLETION).status_code == 200


def test_another_model_is_not_there(http):
    message, param = error_of(http.post("/v1/completions", json=COMPLETION | {"model": "x"}), 404)
    assert "'x' does not exist" in message and param == "model"


def test_another_path_is_not_there(http):
    error_of(http.get("/v1/nothing"), 404)
    error_of(http.get("/v1/completions"), 405)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 8.0, "n": 1.0, "top_k": 0.0, "seed": 5.0, "priority": 0.0},
        {"max_tokens": "8", "n": "1", "temperature": "0", "stream": "false", "echo": 0},
        {"stop_token_ids": [300.0], "truncate_prompt_tokens": 190.0, "logprobs": None},
        {"stream_options": None, "ignore_eos": 0, "min_tokens": "0", "top_p": 1},
    ],
    ids=["floats", "texts", "lists", "more"],
)
def test_numbers_may_have_the_forms_that_vllm_takes(llm, http, changes):
    plain = http.post("/v1/completions", json=COMPLETION).json()
    given = http.post("/v1/completions", json=COMPLETION | changes).json()
    assert given["choices"] == plain["choices"] and given["usage"] == plain["usage"]


def test_token_ids_may_be_written_as_whole_floats(llm, http):
    ids = llm.get_tokenizer().encode(COMPLETION["prompt"])
    floats = [float(token) for token in ids]
    answers = [
        http.post("/v1/completions", json=COMPLETION | {"prompt": prompt}).json()["choices"]
        for prompt in (ids, floats, [floats], [ids[0], *floats[1:]])
    ]
    assert all(answer == answers[0] for answer in answers)
    text = http.post("/detokenize", json={"tokens": floats}).json()["prompt"]
    assert text == COMPLETION["prompt"]


def test_a_response_has_the_parameters_of_sampling(http):
    body = {"model": NAME, "input": "x", "max_output_tokens": 8, "seed": 3, "top_k": 2}
    chat = CHAT | {"seed": 3, "top_k": 2}
    answer = http.post("/v1/responses", json=body).json()["output"][0]["content"][0]["text"]
    choice = http.post("/v1/chat/completions", json=chat).json()["choices"][0]
    assert answer == choice["message"]["content"]
    for name, remedy in (("n", "one text"), ("max_tokens", "set max_output_tokens")):
        message, param = error_of(http.post("/v1/responses", json=body | {name: 2}), 400)
        assert remedy in message and param == name


def test_a_request_has_the_id_that_it_brought(http):
    assert (
        http.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    )
    made = http.get("/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"]
    assert made != "a b" and len(made) == 32


def test_tokens_come_from_text_and_go_back(llm, http):
    ids = http.post("/tokenize", json={"prompt": "the quick", "return_token_strs": True}).json()
    assert ids["tokens"] == llm.get_tokenizer().encode("the quick") and ids["count"] == len(
        ids["tokens"]
    )
    assert len(ids["token_strs"]) == ids["count"] and ids["max_model_len"] == llm.max_model_len
    assert http.post("/detokenize", json={"tokens": ids["tokens"]}).json() == {
        "prompt": "the quick"
    }
    chat = http.post("/tokenize", json={"messages": CHAT["messages"]}).json()
    (prompt,) = llm.chat_prompts(CHAT["messages"])
    assert chat["tokens"] == prompt["prompt_token_ids"]
    error_of(http.post("/detokenize", json={"tokens": [-1]}), 400)
    error_of(http.post("/tokenize", json={}), 400)


def test_token_ids_are_returned_when_asked_for(llm, http):
    body = COMPLETION | {
        "return_token_ids": True,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
    }
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["prompt_token_ids"] == llm.get_tokenizer().encode("the quick")
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


def test_a_prompt_is_cut_to_its_last_tokens(http):
    cut = http.post(
        "/v1/completions",
        json=COMPLETION | {"prompt": "abc the quick", "truncate_prompt_tokens": 2},
    )
    assert cut.json()["usage"]["prompt_tokens"] == 2


def test_probes_and_versions_answer(http):
    for path in ("/health", "/ping"):
        assert http.get(path).status_code == 200
    assert http.post("/ping").status_code == 200
    assert http.get("/version").json()["version"]
    assert http.get("/load").json() == {"server_load": 0}
    assert http.get("/openapi.json").json()["info"]["title"] == "jspec"


def test_the_prefix_cache_is_reset_and_requests_are_aborted(server, http):
    assert http.post("/reset_prefix_cache").status_code == 200
    assert http.post("/abort_requests").json() == {"aborted": 0}
    assert http.get("/server_info").json()["drafter"] == "NGram"


def samples_of(http):
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        (
            sample.name,
            sample.labels.get("position") or sample.labels.get("finished_reason"),
        ): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_metrics_count_requests_under_the_names_of_vllm(http):
    before = samples_of(http)
    body = COMPLETION | {"prompt": "the the the the the the", "max_tokens": 30}
    stats = http.post("/v1/completions", json=body).json()["choices"][0][
        "speculative_decoding_stats"
    ]
    after = samples_of(http)
    grown = {key: after[key] - before.get(key, 0) for key in after}
    assert grown["vllm:generation_tokens_total", None] == 30
    assert grown["vllm:request_success_total", "length"] == 1
    assert grown["vllm:spec_decode_num_drafts_total", None] == stats["num_spec_steps"]
    assert grown["vllm:spec_decode_num_draft_tokens_total", None] == stats["num_draft_tokens"]
    accepted = stats["num_accepted_draft_tokens"]
    assert grown["vllm:spec_decode_num_accepted_tokens_total", None] == accepted > 0
    by_position = [
        grown["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(3)
    ]
    assert sum(by_position) == accepted
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert grown[f"vllm:{name}_seconds_count", None] == 1
        assert grown[f"vllm:{name}_seconds_sum", None] >= 0
    assert grown["jspec:rounds_per_launch_count", None] > 0
    assert grown["jspec:passed_nodes_total", None] > 0
    assert after["vllm:num_requests_running", None] == 0 and after["jspec:pages_used", None] == 0


def test_no_metric_has_the_path_of_the_model(llm, http):
    text = http.get("/metrics").text
    assert f'model_name="{NAME}"' in text and str(llm.build.model.path) not in text


def test_a_key_is_needed_where_texts_are_made(llm):
    limits = dict(api_keys=("one", "two"))
    with live.running(llm, limits=limits) as server, httpx.Client(base_url=server.url) as client:
        for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Basic one"}):
            message, _ = error_of(client.get("/v1/models", headers=headers), 401)
            assert "Bearer KEY" in message
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.get("/health").status_code == 200


def test_limits_have_their_statuses(llm):
    limits = dict(max_body_bytes=2000, body_seconds=0.5)
    options = dict(limits=limits, request_seconds=0.05)
    with live.running(llm, **options) as server, httpx.Client(base_url=server.url) as client:
        error_of(client.post("/v1/completions", json={"prompt": "x" * 3000}), 413)
        chunks = iter([b'{"prompt": "', b"x" * 3000, b'"}'])
        error_of(client.post("/v1/completions", content=chunks), 413)
        body = COMPLETION | {"max_tokens": 180, "n": 60, "temperature": 1, "ignore_eos": True}
        error_of(client.post("/v1/completions", json=body), 504)


def test_a_body_that_comes_slowly_is_refused(llm):
    with live.running(llm, limits=dict(body_seconds=0.3)) as server:
        address = server.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1])), timeout=10) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
            )
            assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_a_full_queue_is_429(llm):
    with live.running(llm, max_num_queued=1) as server, httpx.Client(base_url=server.url) as client:
        body = COMPLETION | {"prompt": ["x"] * 30}
        response = client.post("/v1/completions", json=body)
        assert "max_num_queued=1" in error_of(response, 429)[0]
        assert response.headers["retry-after"] == "1"
        assert client.post("/v1/completions", json=COMPLETION).status_code == 200


def test_a_draining_server_is_503_and_its_requests_finish(llm):
    with live.running(llm) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        body = COMPLETION | {"max_tokens": 150, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.server.is_draining = True
            for path in ("/health", "/v1/models"):
                error_of(httpx.get(f"{server.url}{path}"), 503)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert (
            json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        )
        server.server.is_draining = False


def test_an_engine_that_ended_is_not_healthy(llm):
    with live.running(llm) as server, httpx.Client(base_url=server.url) as client:
        server.server.served.close()
        assert client.get("/health").status_code == 503
        error_of(client.post("/v1/completions", json=COMPLETION), 500)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TRUSTED = [
    ("{% for m in messages %}<{{ m['content'] }}>{% endfor %}", None),
    pytest.param(ENDLESS, "10 seconds", marks=pytest.mark.slow),
    ("{% include '/etc/passwd' %}", "chat_template fails"),
    ("{{ ''.__class__.__mro__ }}", "chat_template fails"),
    ("{{ 'x' * 9999999999 }}", "memory"),
    ("{% for %}", "chat_template fails"),
]


@pytest.mark.parametrize(("template", "words"), TRUSTED, ids=lambda each: str(each)[:30])
def test_a_template_of_a_request_is_rendered_within_bounds(llm, template, words):
    with live.running(llm, trusts_chat_templates=True) as server:
        body = CHAT | {"chat_template": template, "return_token_ids": True}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        if words is None:
            assert response.json()["prompt_token_ids"] == llm.get_tokenizer().encode("<x>")
        else:
            assert words in error_of(response, 422)[0]

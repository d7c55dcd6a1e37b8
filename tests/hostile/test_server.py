"""Hostile requests to a live server get an answer or an error, and harm no other request."""

import concurrent.futures
import contextlib
import gc
import json
import socket
import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.server.fields import ChatFields, CompletionFields, ResponseFields
from jspec.server.run import Protocol
from tests.hostile.junk import anything, few
from tests.server import live

STATUSES = {200, 400, 404, 413, 422, 429, 503}
JSON = {"Content-Type": "application/json"}
KNOWN = {"prompt": "the quick", "max_tokens": 8, "temperature": 0}
TEXT = st.sampled_from(["the quick", "def add(", "é🙂", "x" * 400]) | st.text(max_size=20)
PLAUSIBLE = {
    "prompt": TEXT | st.lists(TEXT, max_size=3) | st.lists(st.integers(0, 330), max_size=5),
    "input": TEXT,
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "tool"]), "content": TEXT}
        ),
        max_size=3,
    ),
    "max_tokens": st.integers(0, 9),
    "max_completion_tokens": st.integers(1, 9),
    "max_output_tokens": st.integers(1, 9),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 400),
    "n": st.integers(1, 3),
    "stop": TEXT,
    "stream": st.booleans(),
    "echo": st.booleans(),
    "logprobs": st.integers(0, 2) | st.booleans(),
    "response_format": st.just({"type": "json_object"}),
    "structured_outputs": st.sampled_from(
        [{"regex": "[ab]{1,3}"}, {"choice": ["a", "b"]}, {"regex": "(a+)+" * 50}, {"json": {}}]
    ),
    "tools": st.just([{"type": "function", "function": {"name": "f"}}]),
    "tool_choice": st.sampled_from(["none", "auto", "required"]),
    "stream_options": st.just({"include_usage": True}),
    "truncate_prompt_tokens": st.integers(-1, 3),
}
REQUIRED = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
}
FIELDS = {
    "/v1/completions": CompletionFields,
    "/v1/chat/completions": ChatFields,
    "/v1/responses": ResponseFields,
}


def bodies(path):
    names = [*FIELDS[path].model_fields, "unknown"]
    value = lambda name: PLAUSIBLE.get(name, anything()) | anything()
    pair = st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), value(name)))
    needed = REQUIRED[path]
    sensible = {
        needed: PLAUSIBLE[needed],
        "max_tokens": st.just(3),
        "max_output_tokens": st.just(3),
    }
    return st.builds(
        lambda base, more: base | dict(more),
        st.fixed_dictionaries(sensible),
        st.lists(pair, max_size=3),
    )


@pytest.fixture(scope="module")
def server(root):
    llm = live.llm(root)
    limits = dict(max_body_bytes=1 << 20, body_seconds=2)
    options = dict(limits=limits, tool_parser="hermes", max_num_queued=200, request_seconds=60)
    with live.running(llm, **options) as server:
        yield server


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.fixture(autouse=True)
def others_are_unaffected(server, http):
    """A known request has its text after every test, and nothing runs or holds a page."""
    before = http.post("/v1/completions", json=KNOWN).json()["choices"]
    yield
    assert http.post("/v1/completions", json=KNOWN).json()["choices"] == before
    server.wait_until_idle()


def as_json(body):
    try:
        return json.dumps(body, default=lambda _: None).encode()
    except (TypeError, ValueError, RecursionError):
        return b"[" * 100_000


def check(response):
    assert response.status_code in STATUSES, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"] and error["code"] == response.status_code
        assert len(error["message"]) < 2000


@pytest.mark.parametrize("path", FIELDS)
def test_random_fields_get_an_answer_or_an_error(http, path):
    @few(60)
    @given(bodies(path))
    def send(body):
        headers = {"Content-Type": "application/json"}
        check(http.post(path, content=as_json(body), headers=headers))

    send()


def test_random_bytes_get_an_error(http):
    @few(100)
    @given(st.binary(max_size=200) | st.text(max_size=80).map(str.encode))
    def send(body):
        for path in ("/v1/completions", "/tokenize", "/detokenize"):
            response = http.post(path, content=body, headers={"Content-Type": "application/json"})
            check(response)

    send()


@pytest.mark.parametrize(
    "path",
    ["/../etc/passwd", "/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2fx", "/%00", "//health"],
)
def test_paths_that_lead_outside_are_not_there(http, path):
    response = http.get(path)
    assert response.status_code in (400, 404) and "root:" not in response.text


def raw(server, data, seconds=1):
    """Send bytes, and return what comes until the server closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        try:
            connection.sendall(data)
            while chunk := connection.recv(65536):
                answer += chunk
        except (TimeoutError, ConnectionError, BrokenPipeError):
            pass
    return answer


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x00\xa5\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n"
        + b"".join(b"X-%d: %s\r\n" % (i, b"y" * 90) for i in range(10_000))
        + b"\r\n",
    ],
    ids=["tls", "version", "negative", "huge", "chunks", "headers"],
)
def test_malformed_http_gets_an_error(server, data):
    answer = raw(server, data)
    assert not answer or answer.split()[1][:1] == b"4"


def test_connections_that_send_nothing_block_nobody(server, http):
    host, port = server.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(50)]
    for connection in idle[:25]:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"
        )
    try:
        assert http.post("/v1/completions", json=KNOWN).status_code == 200
    finally:
        for connection in idle:
            connection.close()


def test_a_connection_whose_request_does_not_come_is_closed(server, http, monkeypatch):
    monkeypatch.setattr(Protocol, "seconds", 0.3)
    host, port = server.url.removeprefix("http://").split(":")
    silent, slow, whole = (socket.create_connection((host, int(port))) for _ in range(3))
    whole.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")  # and nothing after it
    begin = time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() - begin < 10:  # a byte at a time
            slow.sendall(b"G")
            time.sleep(0.05)
    assert time.monotonic() - begin < 5
    for connection in (silent, whole):
        connection.settimeout(5)
        received = b"".join(iter(lambda each=connection: each.recv(4096), b""))
        assert received == b"" or (connection is whole and b" 200 " in received)
        connection.close()
    slow.close()
    assert http.post("/v1/completions", json=KNOWN | {"max_tokens": 60}).status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": [[5]] * 150_000}, "prompt has 150000 texts"),
        ({"prompt": [5] * 300_000}, "the prompt has 300000 tokens"),
        ({"prompt": "a " * 400_000}, "prompt has 800000 characters"),
        ({"prompt": [{}] * 200_000}, "prompt has 200000 texts"),
        ({"prompt": "x", "stop": "q" * 900_000}, "stop has 900000 characters"),
        ({"prompt": "x", "stop": [f"q{n}" for n in range(90_000)]}, "stop has 90000 strings"),
        ({"prompt": "x", "stop": [1] * 300_000}, "stop: "),
        ({"prompt": "x", "stop_token_ids": [*range(100_000)]}, "stop_token_ids has 100000"),
        ({"prompt": "x", "allowed_token_ids": [0.5] * 200}, "allowed_token_ids: "),
        ({"prompt": "x", "bad_words": ["ab"] * 100_000}, "bad_words has 100000 words"),
        ({"prompt": "x", "logit_bias": {str(n): 1 for n in range(50_000)}}, "logit_bias has 50000"),
        ({"prompt": "x", "request_id": "x" * 900_000}, "request_id has 900000"),
        ({"prompt": "x", **{f"x{n}": 0 for n in range(60_000)}}, "body has 60001 fields"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_size_that_is_too_large_is_refused_before_any_work(http, body, words):
    begin = time.process_time()  # the server is a thread of this process
    response = http.post("/v1/completions", content=json.dumps(body), headers=JSON)
    assert time.process_time() - begin < 1
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert words in message and len(message) < 300


def test_a_long_body_does_not_set_off_the_garbage_collector(http):
    body = json.dumps({"prompt": [[]] * 200_000}).encode()
    before = gc.get_stats()[0]["collections"]
    assert http.post("/v1/completions", content=body, headers=JSON).status_code == 400
    assert gc.get_stats()[0]["collections"] - before < 100
    assert gc.isenabled()


def test_long_bodies_do_not_hold_up_short_ones(http):
    text = {"prompt": "the quick brown fox " * 3500}  # 70 kB
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        long = [threads.submit(http.post, "/tokenize", json=text) for _ in range(12)]
        while not any(each.done() for each in long):
            time.sleep(0.01)
        assert http.post("/v1/completions", json=KNOWN).status_code == 200
        assert sum(each.done() for each in long) < 8
        assert {each.result().status_code for each in long} == {200}


WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}}


@pytest.mark.parametrize(
    "grammar",
    [
        pytest.param({"regex": "((a{1,50}){1,50}){1,50}"}, marks=pytest.mark.slow),
        {"regex": "(" * 2000 + ")" * 2000},
        {"json": {"$ref": "#"}},
        pytest.param({"json": WIDE}, marks=pytest.mark.slow),
    ],
    ids=["product", "nested", "endless", "wide"],
)
def test_a_grammar_that_explodes_is_bounded(http, grammar):
    begin = time.monotonic()
    check(http.post("/v1/completions", json=KNOWN | {"structured_outputs": grammar}))
    assert time.monotonic() - begin < 100


@pytest.mark.slow
def test_grammars_that_take_long_hold_up_nobody(http):
    # Within all limits, but their automata have more than a trillion states.
    patterns = [f"(a|b)*a(a|b){{4{index}}}" for index in range(9)]
    bodies = [KNOWN | {"structured_outputs": {"regex": pattern}} for pattern in patterns]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        slow = [
            threads.submit(http.post, "/v1/completions", json=body, timeout=2) for body in bodies
        ]
        for _ in range(5):
            begin = time.monotonic()
            assert http.post("/v1/completions", json=KNOWN).status_code == 200
            assert time.monotonic() - begin < 2
        for each in slow:
            with pytest.raises(httpx.ReadTimeout):
                each.result()

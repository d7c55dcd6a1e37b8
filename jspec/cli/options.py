"""Options that several commands share."""

import contextlib
import functools
from typing import Annotated, Any

import typer
from rich.console import Console

from jspec.cli import arguments
from jspec.util.messages import shown


def option(kind: Any, help: str, *names: str, **settings: Any) -> Any:
    """Return the annotation of a command's option; ``names`` and ``settings`` are typer's."""
    return Annotated[kind, typer.Option(*names, help=help, **settings)]


sampling = functools.partial(option, rich_help_panel="Sampling")
DTYPE_HELP = "auto, float32, bfloat16 or float16."
CONFIG_HELP = "JSON object with vLLM's keys."

Model = option(str | None, "The model, as vLLM's commands take it, instead of MODEL.", "--model")
PromptText = Annotated[str | None, typer.Argument(help="Text to continue.")]
PromptFile = option(str | None, "File with the prompt; - for standard input.")
Chat = option(bool, "The prompt is a message for the model's chat template.", "--chat")
TokenIds = option(str | None, 'The prompt as token ids: "1,2,3".')
Config = option(str | None, CONFIG_HELP)
Dtype = option(str, DTYPE_HELP)
MaxTokens = sampling(int, "Most tokens of a text.")
Temperature = sampling(float, "0 is greedy.")
TopP = sampling(float, "1 keeps all tokens.")
TopK = sampling(int, "0 keeps all tokens.")
MinP = sampling(float, "0 keeps all tokens.")
Seed = sampling(int | None, "Default: the same in every run.")

# Options of bench and tune.
DemoModel = Annotated[
    str | None,
    typer.Argument(
        help="A local directory, a GGUF file, or a model id on the hub. Default: the demo model."
    ),
]
AnswerTokens = option(int, "Most tokens of an answer.")
PromptTokens = option(
    int, "Cut first turns to this length, leave longer later turns out; 0: no limit."
)
NumQuestions = option(int, "Questions of each category; 0 for all.", min=0)
NoiseSeed = option(int, "Seed of all noise.")


def model_of(argument: str | None, flag: str | None) -> str | None:
    """Return the model that a command was given, as an argument or by --model.

    Raises:
      ValueError: it was given twice.
    """
    if flag is not None and argument is not None:
        raise ValueError(f"--model {shown(flag)} and MODEL {shown(argument)}: give one of them.")
    return argument if flag is None else flag


def model_and_prompt(
    model: str | None, prompt: str | None, flag: str | None
) -> tuple[str | None, str | None]:
    """Return the model and the prompt of a command: with --model the one argument is the prompt.

    Raises:
      ValueError: there are two arguments beside --model.
    """
    if flag is None:
        return model, prompt
    if prompt is not None:
        raise ValueError(f"--model {shown(flag)} and MODEL {shown(model)}: give one of them.")
    return flag, model


def speculative_config(text: str | None) -> dict[str, Any] | None:
    """Return the value of ``--speculative-config``."""
    example = '{"method": "ngram", "num_speculative_tokens": 4}'
    return arguments.json("--speculative-config", text, example)


def busy(words: str) -> contextlib.AbstractContextManager:
    """Return a spinner on stderr, so that stdout holds only the text."""
    return Console(stderr=True).status(words)

"""Options that several commands share."""

import contextlib
from typing import Annotated, Any

import typer
from rich.console import Console

from jspec.cli import arguments

SAMPLING = {"rich_help_panel": "Sampling"}
DTYPE_HELP = "auto, float32, bfloat16 or float16."
CONFIG_HELP = "JSON object with vLLM's keys."

PromptText = Annotated[str | None, typer.Argument(help="Text to continue.")]
PromptFile = Annotated[str | None, typer.Option(help="File with the prompt; - for standard input.")]
Chat = Annotated[
    bool, typer.Option("--chat", help="The prompt is a message for the model's chat template.")
]
TokenIds = Annotated[str | None, typer.Option(help='The prompt as token ids: "1,2,3".')]
Config = Annotated[str | None, typer.Option(help=CONFIG_HELP)]
Dtype = Annotated[str, typer.Option(help=DTYPE_HELP)]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of a text.", **SAMPLING)]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", **SAMPLING)]
TopP = Annotated[float, typer.Option(help="1 keeps all tokens.", **SAMPLING)]
TopK = Annotated[int, typer.Option(help="0 keeps all tokens.", **SAMPLING)]
MinP = Annotated[float, typer.Option(help="0 keeps all tokens.", **SAMPLING)]
Seed = Annotated[int | None, typer.Option(help="Default: the same in every run.", **SAMPLING)]

# Options of bench and tune.
DemoModel = Annotated[
    str | None,
    typer.Argument(help="A local directory, or a model id on the hub. Default: the demo model."),
]
AnswerTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
PromptTokens = Annotated[
    int,
    typer.Option(help="Cut first turns to this length, leave longer later turns out; 0: no limit."),
]
NumQuestions = Annotated[int, typer.Option(min=0, help="Questions of each category; 0 for all.")]
NoiseSeed = Annotated[int, typer.Option(help="Seed of all noise.")]


def speculative_config(text: str | None) -> dict[str, Any] | None:
    """Return the value of ``--speculative-config``."""
    example = '{"method": "ngram", "num_speculative_tokens": 4}'
    return arguments.json("--speculative-config", text, example)


def busy(words: str) -> contextlib.AbstractContextManager:
    """Return a spinner on stderr, so that stdout holds only the text."""
    return Console(stderr=True).status(words)

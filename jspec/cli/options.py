"""Options that several commands share, and groups of options that reach a command as one value."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from jspec.api.engine_args import EngineArgs
from jspec.cli import arguments
from jspec.util.messages import shown


def option(kind: Any, help: str, *names: str, **settings: Any) -> Any:
    """Return the annotation of a command's option; ``names`` and ``settings`` are typer's."""
    return Annotated[kind, typer.Option(*names, help=help, **settings)]


def flag(field: dataclasses.Field, **changes: Any) -> inspect.Parameter:
    """Return the option of a field of ``util.arguments``; ``changes`` are those of its flag."""
    settings = {"kind": field.type, "default": field.default, "names": ()}
    settings |= {**field.metadata["flag"], "help": field.metadata["help"], **changes}
    kind, help, names = settings.pop("kind"), settings.pop("help"), settings.pop("names")
    default = settings.pop("default")
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=option(kind, help, *names, **settings),
    )


@dataclasses.dataclass(frozen=True)
class Group:
    """Options that reach a command as one argument, whose annotation this is."""

    options: tuple[inspect.Parameter, ...]
    make: Callable[..., Any]  # of the argument, from the values of the options by name


def group(
    kind: type,
    *names: str,
    make: Callable[..., Any] | None = None,
    has_others: bool = False,
    helps: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Group:
    """Return the options of a dataclass whose fields are those of ``util.arguments``.

    Args:
      kind: the dataclass.
      names: fields, in the order of ``--help``; none for all.
      make: of the argument, from the values of the options; ``kind`` itself by default.
      has_others: whether all other fields with a flag follow ``names``.
      helps: texts of flags, where they are not those of the fields.
      defaults: values of flags, where they are not those of the fields.
      settings: of typer, for all options.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    chosen = {name: fields[name] for name in names}
    if has_others or not names:
        chosen |= {name: field for name, field in fields.items() if field.metadata["help"]}
    flags = []
    for name, field in chosen.items():
        changes = dict(settings)
        for key, given in (("help", helps or {}), ("default", defaults or {})):
            changes |= {key: given[name]} if name in given else {}
        flags.append(flag(field, **changes))
    return Group(tuple(flags), make or kind)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer that has the options of its groups as options of its own."""
    parameters, groups = [], {}
    for parameter in inspect.signature(command).parameters.values():
        if isinstance(parameter.annotation, Group):
            groups[parameter.name] = parameter.annotation
            parameters += parameter.annotation.options
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**given: Any) -> None:
        for name, group in groups.items():
            values = {each.name: given.pop(each.name) for each in group.options}
            given[name] = group.make(**values)
        command(**given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)
    return run


def _engine(**given: Any) -> EngineArgs:
    """Return the arguments of ``LLM`` that the flags have."""
    if "speculative_config" in given:
        given["speculative_config"] = speculative_config(given["speculative_config"])
    return EngineArgs(**given)


engine = functools.partial(group, EngineArgs, make=_engine)


def engine_option(name: str, **changes: Any) -> Any:
    """Return the annotation of one argument of ``LLM``; ``changes`` are those of ``flag``."""
    (field,) = (each for each in dataclasses.fields(EngineArgs) if each.name == name)
    return flag(field, **changes).annotation


sampling = functools.partial(option, rich_help_panel="Sampling")

Model = option(str | None, "The model, as vLLM's commands take it, instead of MODEL.", "--model")
PromptText = Annotated[str | None, typer.Argument(help="Text to continue.")]
PromptFile = option(str | None, "File with the prompt; - for standard input.")
Chat = option(bool, "The prompt is a message for the model's chat template.", "--chat")
TokenIds = option(str | None, 'The prompt as token ids: "1,2,3".')
Config = engine_option("speculative_config")
Dtype = engine_option("dtype")
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

"""Options that several commands share, and groups of options that reach a command as one value."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from jspec.api import engine_args
from jspec.api.engine_args import EngineArgs
from jspec.api.sampling_fields import SamplingFields
from jspec.cli import arguments
from jspec.util.messages import shown


def option(kind: Any, help: str, *names: str, **settings: Any) -> Any:
    """Return the annotation of a command's option; ``names`` and ``settings`` are typer's."""
    return Annotated[kind, typer.Option(*names, help=help, **settings)]


def flag(field: dataclasses.Field, **changes: Any) -> inspect.Parameter:
    """Return the option of a field of ``util.arguments``; ``changes`` are those of its flag."""
    settings = {"kind": field.type, "default": field.default, "names": ()}
    if field.type is bool and not field.default:
        settings["names"] = (f"--{field.name.replace('_', '-')}",)
    settings |= {**field.metadata["flag"], "help": field.metadata["help"], **changes}
    kind, help, names, default = map(settings.pop, ("kind", "help", "names", "default"))
    if kind == tuple[str, ...]:
        kind, default = list[str] | None, None
    annotation = option(kind, help, *names, **settings)
    only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, only, default=default, annotation=annotation)


@dataclasses.dataclass(frozen=True)
class Group:
    """Options that reach a command as one argument, whose annotation this is."""

    options: tuple[inspect.Parameter, ...]
    make: Callable[..., Any]  # maps the values of the options, by name, to the argument


def group(
    kind: type,
    *names: str,
    make: Callable[..., Any] | None = None,
    has_others: bool = False,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> Group:
    """Return the options of a dataclass whose fields are those of ``util.arguments``.

    Args:
      kind: the dataclass.
      names: fields, in the order of ``--help``; none for all.
      make: of the argument, from the values of the options; ``kind`` itself by default.
      has_others: whether all other fields with a flag follow ``names``.
      changes: settings of flags that differ from those of their fields, by name.
      settings: of typer, for all options.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    others = (name for name, field in fields.items() if field.metadata["help"])
    chosen = dict.fromkeys([*names, *others] if has_others or not names else names)
    flags = [flag(fields[name], **settings, **(changes or {}).get(name, {})) for name in chosen]
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


def engine_option(name: str, **changes: Any) -> Any:
    """Return the annotation of one argument of ``LLM``; ``changes`` are those of ``flag``."""
    return flag(engine_args.FIELDS[name], **changes).annotation


def _sampling(**given: Any) -> dict[str, Any]:
    """Return the arguments of ``SamplingParams`` that the flags have."""
    if "logit_bias" in given:
        given["logit_bias"] = arguments.json("--logit-bias", given["logit_bias"], '{"5": -1.5}')
    return given


engine = functools.partial(group, EngineArgs, make=_engine)
sampling = functools.partial(group, SamplingFields, make=_sampling, rich_help_panel="Sampling")
common_sampling = functools.partial(
    sampling, *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
)


def model(default: str = "") -> Any:
    """Return the annotation of MODEL; ``default`` is the sentence about its default."""
    help = f"A local directory, a GGUF file, or a model id on the hub. {default}".strip()
    return Annotated[str | None, typer.Argument(help=help)]


Model = option(str | None, "The model, as vLLM's commands take it, instead of MODEL.", "--model")
PromptText = Annotated[str | None, typer.Argument(help="Text to continue.")]
PromptFile = option(str | None, "File with the prompt; - for standard input.")
Chat = option(bool, "The prompt is a message for the model's chat template.", "--chat")
TokenIds = option(str | None, 'The prompt as token ids: "1,2,3".')
Config = engine_option("speculative_config")
Dtype = engine_option("dtype")

# Options of bench and tune.
DemoModel = model("Default: the demo model.")
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

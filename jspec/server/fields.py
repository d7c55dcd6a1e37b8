"""The fields of requests. Those of vLLM beside OpenAI's have vLLM's names and meanings."""

import difflib
import functools
import logging
import typing
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
)

from jspec.api.sampling_fields import FIELDS
from jspec.server.errors import RequestError
from jspec.util import neutral
from jspec.util.messages import printable
from jspec.util.values import is_real

_log = logging.getLogger(__name__)
_warned: set[str] = set()  # unknown fields; a client sends them with each request
_MOST_WARNED = 100
# Fields that do not change a text.
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"}
_WITHOUT_EFFECT |= {"prompt_cache_key", "prompt_cache_retention"}

# Parameters that requests have in another form, or not at all; all others are fields of their own.
_APART = ("max_tokens", "logprobs", "detokenize", "logits_processors", "structured_outputs")
SAMPLING = [name for name in FIELDS if name not in _APART]
_NEAR = 0.885  # least similarity of two long names: about one wrong letter in nine
_LONG, _LONGEST = 8, 64  # names that are compared letter by letter
_LAX = {kind: TypeAdapter(kind) for kind in (int, float, bool)}
_MOST_LISTS = 2048  # in a list; longer ones are refused


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """Check that all values are numbers; pydantic alone makes an error for each that is none."""
    if not all(map(is_real, values.values())):
        raise ValueError("every value must be a number")
    return values


class _First(FailFast):
    """Have a long list with many wrong items be one error; ``FailFast`` has no hash for unions."""

    __hash__ = object.__hash__


_Texts = Annotated[list[str], _First()]
_Ids = Annotated[list[int], _First()]
_Prompts = Annotated[list[_Ids], _First()]
_Objects = Annotated[list[dict[str, Any]], _First()]
_Numbers = Annotated[dict[str, Any], AfterValidator(_numbers)]
# Types of fields by those of parameters, where they differ.
_JSON = {
    tuple[str, ...]: _Texts,
    tuple[int, ...]: _Ids,
    tuple[int, ...] | None: _Ids,
    tuple[tuple[int, float], ...]: _Numbers,
}


class _Fields(BaseModel):
    model_config: ClassVar = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    _unsupported: ClassVar[neutral.Table] = neutral.REQUESTS
    _parameters: ClassVar[tuple[str, ...]] = ()  # fields whose names must not be misspelled

    @field_validator("*", mode="before")
    @classmethod
    def _take_other_forms(cls, value: Any, info: ValidationInfo) -> Any:
        """Take numbers in the forms that vLLM takes."""
        if isinstance(value, list):
            return _with_whole_numbers(value)
        kind = _kind_of(cls, info.field_name)
        return value if kind is None else taken(kind, value)

    def check(self) -> None:
        """Warn of unknown fields once, and refuse those that would change the text.

        Raises:
          RequestError: such a field has an effect.
        """
        for name, value in (self.model_extra or {}).items():
            if name in self._unsupported:
                if words := neutral.refusal(name, value, self._unsupported):
                    raise RequestError(words, param=name)
                continue
            is_looked_at = value is not None and len(name) <= _LONGEST
            if is_looked_at and (meant := _meant(type(self), name)):
                message = f"there is no field {name!r}; did you mean {meant!r}?"
                raise RequestError(message, param=name)
            if name not in (_WITHOUT_EFFECT | _warned) and len(_warned) < _MOST_WARNED:
                _warned.add(name)
                _log.warning("field %s is unknown, and has no effect", printable(name, 60))


def taken(kind: type, value: Any) -> Any:
    """Return the number or truth value that a field takes for a value; others stay.

    Booleans are no numbers here, other than in vLLM.

    >>> taken(int, 6.0), taken(int, "6"), taken(int, 6.5), taken(int, True), taken(bool, 1)
    (6, 6, 6.5, True, True)
    """
    is_given = isinstance(value, str | int | float) and not isinstance(value, bool)
    if type(value) is kind or not is_given:
        return value
    try:
        return _LAX[kind].validate_python(value)
    except ValidationError:
        return value  # the field itself refuses it


@functools.cache
def _kind_of(model: type[BaseModel], name: str) -> type | None:
    """Return the type of a field for one number or truth value; None for other fields."""
    kinds = typing.get_args(model.model_fields[name].annotation)
    return next((kind for kind in kinds if kind in _LAX), None)


def _with_whole_numbers(values: list) -> list:
    """Return a list, or a list of lists, with 6.0 as 6; what is no number stays."""
    kinds = set(map(type, values))
    if list in kinds and len(values) <= _MOST_LISTS:
        return [_with_whole_numbers(each) if type(each) is list else each for each in values]
    if float not in kinds:
        return values
    return [int(each) if type(each) is float and each.is_integer() else each for each in values]


class StreamOptions(_Fields):
    """``stream_options``: whether a last chunk, and whether every chunk has the usage."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Generation(_Fields):
    """The base of requests for texts: no parameter of sampling is ignored."""

    _unsupported: ClassVar[neutral.Table] = neutral.REQUESTS | neutral.GENERATION
    _parameters: ClassVar = ("max_completion_tokens", "max_output_tokens", *FIELDS)


@functools.lru_cache(256)
def _meant(model: type[_Fields], name: str) -> str | None:
    """Return the parameter of sampling whose name a client may have misspelled; None for none.

    Case, ``_`` and ``-`` do not count. Names of less than eight letters must be the same then, as
    "speed" is not "seed".
    """
    spelled = {_letters(each): each for each in model._parameters if each in model.model_fields}
    given = _letters(name)
    close = difflib.get_close_matches(given, spelled, n=1, cutoff=_NEAR)
    is_near = close == [given] or (close and len(close[0]) >= _LONG)
    return spelled[close[0]] if is_near else None


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _sampling(*left_out: str) -> type[_Generation]:
    """Return the model of the parameters of ``SamplingFields`` that are fields of requests."""
    kinds = {name: _JSON.get(FIELDS[name].type, FIELDS[name].type) for name in SAMPLING}
    kinds["stop"] = str | _Texts
    fields = {name: (kinds[name] | None, None) for name in SAMPLING if name not in left_out}
    return create_model("SamplingFields", __base__=_Generation, **fields)


class GenerationFields(_sampling()):
    """The fields that all ways to generate have; ``SamplingParams`` describes most of them."""

    model: str | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: int | None = None  # keep the last ones; -1 for those that fit
    priority: int | None = 0
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    # Whether ``usage`` has the counts of drafts and their acceptance.
    speculative_decoding_stats: bool | None = False

    def check(self) -> None:
        """Refuse ``stream_options`` without a stream too."""
        super().check()
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options has no meaning without a stream; set stream.",
                param="stream_options",
            )

    @property
    def has_grammar(self) -> bool:
        """True if a grammar forms the text."""
        return bool(self.structured_outputs or self.response_format)


class CompletionFields(GenerationFields):
    """The body of /v1/completions."""

    prompt: str | _Texts | _Ids | _Prompts
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False
    add_special_tokens: bool | None = True


class ChatFields(GenerationFields):
    """The body of /v1/chat/completions."""

    messages: _Objects
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: _Objects | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    documents: _Objects | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = True


class ResponseFields(_sampling("n", "best_of", "prompt_logprobs")):
    """The body of /v1/responses, of which text is supported."""

    input: str | _Objects
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = False
    text: dict[str, Any] | None = None
    tools: _Objects | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None


class TokenizeFields(_Fields):
    """The body of /tokenize: ``prompt``, or ``messages`` for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: _Objects | None = None
    tools: _Objects | None = None
    add_special_tokens: bool | None = True
    add_generation_prompt: bool | None = True
    return_token_strs: bool | None = False


class DetokenizeFields(_Fields):
    """The body of /detokenize."""

    model: str | None = None
    tokens: _Ids


class AbortFields(_Fields):
    """The body of /abort_requests; without ids all requests end."""

    request_ids: _Texts | None = None

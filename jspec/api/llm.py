"""``LLM``: continues prompts, with vLLM's names and meanings."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress

from jspec.api import config, engine_arguments, metrics, prompts, requests
from jspec.api.build import build_plan
from jspec.api.outputs import RequestOutput
from jspec.api.requests import GenerationRequest
from jspec.api.runtime import Runtime
from jspec.api.sampling_params import SamplingParams
from jspec.checkpoints import loading, shared_file
from jspec.checkpoints.loading import LoadedModel
from jspec.core import logprobs
from jspec.engine import memory, programs
from jspec.engine.functional import MAX_NUM_SEQS
from jspec.engine.loop import init_shared
from jspec.engine.pages import Pool, reads_pages
from jspec.engine.profile import Profile
from jspec.engine.sequences import check_fit, check_prompt
from jspec.util.buckets import bucket
from jspec.util.messages import shown
from jspec.util.values import is_whole

STREAM_ROUNDS = 4  # between two outputs of a stream
STOP_ROUNDS = 16  # between two searches for stop strings: more overruns, fewer round trips
_STATS = (None, "summary", "detailed")
_STATS_WORDS = "None, 'summary' or 'detailed'"
_COUNT = "a whole number of at least 1"
_SEED = "a whole number from 0 to 2**64 - 1; for other texts draw one by secrets.randbits(64)"

Settings = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A target and its drafter, loaded to continue prompts.

    Several threads may use it; their requests run together.

    Args:
      model: the target: a local directory, a hub id, or a model that ``jspec.load`` returned.
      speculative_config: vLLM's keys, as a dict or as JSON; see docs/speculative_config.md. None
        decodes plainly.
      dtype: of both models: "float32", "bfloat16" or "float16"; None or "auto" for the dtype of
        each checkpoint. Loaded models keep theirs, and None then gives the drafter the target's.
      max_model_len: longest sequence, prompt included; None for the target's limit.
      seed: 0 or more; with the request's number, the noise of requests without a seed. The same
        seed gives the same texts in every ``LLM``, as in vLLM.
      max_num_seqs: sequences that run together; None for 32. Texts do not depend on it.
      per_request_stats: None, "summary" (the same) or "detailed", which adds every round's drafted
        and accepted tokens to ``speculative_decoding_stats``.
      tokenizer: a path, or a tokenizer of ``transformers``; None for the model's own.
      logprobs_mode: "raw_logprobs" or "raw_logits" of the model itself, or "processed_logprobs" or
        "processed_logits" of the distribution that is sampled. Prompts have raw scores.
      deterministic: whether a token's logits are equal to the bit however tokens share passes.
        Greedy texts then equal plain decoding in bfloat16 too, and in batches of any size. Chains
        only; slower (docs/reproducibility.md).
      max_logprobs: largest ``logprobs`` and ``prompt_logprobs`` of a request; -1 for no limit.
      enable_prefix_caching: whether prompts that begin alike share the KV cache of what they begin
        with; None wherever target and drafter support it. A prompt's ``"cache_salt"`` separates it
        from others.
      block_size: tokens of a page of the KV cache; None for 64.
      num_gpu_blocks_override: pages of the KV cache, allocated at once.
      kv_cache_memory_bytes: memory of the KV cache, allocated at once.
      gpu_memory_utilization: share of the device's memory for weights and KV cache, up to which the
        cache grows. None for 0.9 on an accelerator, or 4 GiB of cache on a CPU.
      unknown: other arguments of vLLM's ``LLM``, with values that have no effect here.

    Raises:
      ValueError: a setting is out of range or not supported, the models do not fit each other, or
        a checkpoint cannot be read. Settings are checked before weights are loaded.
    """

    def __init__(
        self,
        model: str | os.PathLike | LoadedModel,
        speculative_config: Mapping[str, Any] | str | None = None,
        *,
        dtype: str | None = None,
        max_model_len: int | None = None,
        seed: int = 0,
        max_num_seqs: int | None = None,
        per_request_stats: str | None = None,
        tokenizer: Any = None,
        logprobs_mode: str = "raw_logprobs",
        max_logprobs: int = 20,
        deterministic: bool = False,
        enable_prefix_caching: bool | None = None,
        block_size: int | None = None,
        num_gpu_blocks_override: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float | None = None,
        **unknown: Any,
    ):
        engine_arguments.check("LLM", unknown, LLM)
        max_num_seqs = MAX_NUM_SEQS if max_num_seqs is None else max_num_seqs
        speculative = config.read(speculative_config)
        logprobs.check_mode(logprobs_mode)
        for name, value, holds, words in (
            ("per_request_stats", per_request_stats, per_request_stats in _STATS, _STATS_WORDS),
            ("max_logprobs", max_logprobs, is_whole(max_logprobs, -1), "whole, or -1 for no limit"),
            ("seed", seed, is_whole(seed, 0, 2**64 - 1), _SEED),
            ("max_num_seqs", max_num_seqs, is_whole(max_num_seqs, 1), _COUNT),
            ("deterministic", deterministic, isinstance(deterministic, bool), "True or False"),
            ("enable_prefix_caching", enable_prefix_caching, *_bool_or_none(enable_prefix_caching)),
        ):
            if not holds:
                raise ValueError(f"{name}={shown(value)} must be {words}.")
        memory_settings = dict(
            block_size=block_size,
            num_gpu_blocks_override=num_gpu_blocks_override,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
        )
        memory.check(memory_settings)
        programs.keep_compiled_programs()
        options = dict(dtype=dtype, max_model_len=max_model_len, tokenizer=tokenizer)
        self.build = build = build_plan(model, speculative, deterministic=deterministic, **options)
        self._logprobs_mode = logprobs_mode
        self.detailed = per_request_stats == "detailed"
        self._seed = int(seed)
        self.max_num_seqs = max_num_seqs
        self.max_model_len = build.max_model_len
        self._tokenizer = build.tokenizer
        self._model, self._plan, self._params = build.model, build.plan, build.params
        size = self._plan.target.vocab_size
        self._max_logprobs = size if max_logprobs == -1 else max_logprobs
        self.runtime = Runtime(
            self._plan,
            self._params,
            pool=self._pool_of(memory_settings, enable_prefix_caching),
            profile=Profile(nodes=self.detailed),
            mode=logprobs_mode,
            max_logprobs=self._max_logprobs,
        )
        self.encode_text = prompts.Encoder(self.get_tokenizer, self.max_model_len)
        self._lock = threading.Lock()  # of the number of requests
        self._num_requests = 0

    def generate(
        self,
        prompts: Any,
        sampling_params: Settings = None,
        use_tqdm: bool = False,
        **unknown: Any,
    ) -> list[RequestOutput]:
        """Continue every prompt; results are in the order of the prompts.

        Args:
          prompts: text, ``{"prompt": text}``, ``{"prompt_token_ids": [...]}``, or a list of these
            or of lists of token ids.
          sampling_params: one for all or a list of one each; None for ``SamplingParams()``.
          use_tqdm: show a progress bar.
          unknown: other arguments of vLLM's ``generate``, with values that have no effect here.

        Raises:
          ValueError: a prompt is empty, does not fit the model, or needs a missing tokenizer.
            Nothing has run then.
        """
        engine_arguments.check_call("generate", unknown, LLM.generate)
        batch = self.resolve(prompts, sampling_params)
        rounds = STOP_ROUNDS if any(request.params.stop for request in batch) else None
        for _ in self._run(batch, rounds, use_tqdm):
            pass
        return [request.output(self.detailed) for request in batch]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Settings = None,
        use_tqdm: bool = False,
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of conversations.

        ``sampling_params``, ``use_tqdm`` and ``unknown`` are those of ``generate``, the others of
        ``chat_prompts``.
        """
        engine_arguments.check_call("chat", unknown, LLM.chat)
        rendered = self.chat_prompts(
            messages,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(rendered, sampling_params, use_tqdm)

    def chat_prompts(
        self,
        messages: Sequence[Any],
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Render conversations to the prompts of ``chat``, for ``stream`` or ``jspec.trace``.

        Args:
          messages: ``[{"role": "user", "content": "..."}, ...]``, or a list of such lists. A
            content may be a list of parts, ``{"type": "text", "text": "..."}``.
          chat_template: Jinja, or the path of a file with it; None for the tokenizer's own.
          chat_template_content_format: "string" joins parts, "openai" gives lists of parts to the
            template, "auto" finds out which of them it reads.
          add_generation_prompt: whether to open the assistant's turn at the end.
          continue_final_message: whether to leave the last message open, so that the text goes on
            with it. It excludes ``add_generation_prompt``.
          tools: descriptions of functions, for the template.
          chat_template_kwargs: more variables of the template, such as ``documents``.

        Raises:
          ValueError: there is no tokenizer or no chat template, the template refuses the messages,
            or ``chat_template_kwargs`` names no variable of a template.
        """
        variables = prompts.variables_of(chat_template_kwargs)
        variables["add_generation_prompt"] = add_generation_prompt
        if continue_final_message:
            variables["continue_final_message"] = True
        if tools is not None:
            variables["tools"] = prompts.tools_of(tools, variables)
        return prompts.of_chat(
            messages,
            self.get_tokenizer(),
            chat_template,
            variables,
            self.encode_text,
            content_format=chat_template_content_format,
        )

    def stream(
        self, prompts: Any, sampling_params: Settings = None, *, rounds: int = STREAM_ROUNDS
    ) -> Iterator[RequestOutput]:
        """Continue the prompts; yield a request with its texts so far each time they grow.

        The last output of a request is that of ``generate``. Arguments are those of ``generate``;
        ``rounds`` of the loop run between two outputs. Bad input raises at once.
        """
        if not is_whole(rounds, 1):
            raise ValueError(f"rounds={shown(rounds)} must be {_COUNT}.")
        batch = self.resolve(prompts, sampling_params)
        for request in batch:
            request.check_streams()
        return self._stream(batch, rounds)

    def run_one(
        self, prompt: Any, sampling_params: SamplingParams | None, run: Callable[..., Any]
    ) -> Any:
        """Run one request through ``run``, a decoding loop that also observes its rounds.

        ``run`` maps (requests, plan, params, shared, tokenizer=, model=) to (result,
        metrics.Counts, shared). Other arguments and errors are those of ``generate``.
        """
        batch = self.resolve(prompt, sampling_params)
        tokenizer = self._tokenizer or loading.tokenizer_if_any(self._model)
        return self.runtime.run_alone(batch, run, tokenizer=tokenizer, model=self._name)

    def get_metrics(self) -> list[metrics.Metric]:
        """Return the counts of all finished requests, under vLLM's names.

        Tokens per second divide by the time spent generating, compilation included.
        """
        return self.runtime.get_metrics(self._name)

    def reset_prefix_cache(self) -> bool:
        """Forget the KV cache of past prompts; return True, as vLLM does."""
        self.runtime.reset_prefix_cache()
        return True

    def save_shared(self, path: str | os.PathLike) -> None:
        """Write the state that the drafter gathered from requests, such as past responses."""
        self.runtime.use_shared(lambda shared: shared_file.save(path, shared))

    def load_shared(self, path: str | os.PathLike | None) -> None:
        """Replace the drafter's state by that of a file of ``save_shared``; None empties it."""
        fresh = init_shared(self._plan)
        loaded = fresh if path is None else shared_file.load(path, fresh)
        self.runtime.use_shared(lambda _: loaded)

    @property
    def _name(self) -> str:
        return str(self._model.path)

    def get_tokenizer(self) -> Any:
        """Return the tokenizer; raise ValueError if there is none."""
        return self._model.tokenizer if self._tokenizer is None else self._tokenizer

    def _pool_of(self, settings: dict[str, Any], shares_prefixes: bool | None) -> Pool | None:
        """Return the pages of the KV cache; None for a model whose caches have none."""
        given = {name: value for name, value in settings.items() if value is not None}
        if not reads_pages(self._plan):
            given |= {"enable_prefix_caching": True} if shares_prefixes else {}
            for name, value in given.items():
                raise ValueError(
                    f"{name}={shown(value)} needs a KV cache with pages, which "
                    f"{type(self._plan.target).__name__} with {type(self._plan.drafter).__name__} "
                    "does not have; leave it out."
                )
            return None
        if shares_prefixes and self._plan.drafter.lookahead is None:
            raise ValueError(
                f"enable_prefix_caching=True: {type(self._plan.drafter).__name__} cannot start "
                "behind a cached prefix; leave it out."
            )
        options = dict(
            enable_prefix_caching=shares_prefixes is not False,
            num_tokens=self.max_num_seqs * self.max_model_len,
        )
        return memory.pool_of(self._plan, self._params, **given, **options)

    def resolve(
        self, inputs: Any, sampling_params: Settings, *, will_run: bool = True
    ) -> list[GenerationRequest]:
        """Check and resolve all requests before any of them runs, for ``runtime``.

        Other arguments, and errors, are those of ``generate``. Requests that ``will_run`` take
        numbers.
        """
        items = prompts.read(inputs, self.encode_text)
        settings = requests.params_per_prompt(sampling_params, len(items))
        vocab_size = self._plan.target.vocab_size
        for index, (item, params) in enumerate(zip(items, settings, strict=True)):
            if len(item.token_ids) >= self.max_model_len:
                raise ValueError(
                    f"prompt {index} has {len(item.token_ids)} tokens, but max_model_len="
                    f"{self.max_model_len} must hold it and at least one more; shorten it or "
                    "raise max_model_len."
                )
            check_prompt(index, item.token_ids, vocab_size)  # before the tokenizer reads it
            requests.check_logprobs(params, self._logprobs_mode, self._max_logprobs, vocab_size)
        tokenizer = self._tokenizer_of_text() if any(each.has_text for each in settings) else None
        given = [
            (item, params, tokenizer if params.has_text else None)
            for item, params in zip(items, settings, strict=True)
        ]
        # Grammars compile without the lock, so that other requests take their numbers meanwhile.
        sequences = [
            requests.settings_of(
                item,
                params,
                room=self.max_model_len - len(item.token_ids),
                eos=self.eos_token_ids,
                tokenizer=speller,
                vocab_size=vocab_size,
            )
            for item, params, speller in given
        ]
        check_fit(sequences, self._plan.target)
        pool = self.runtime.pool
        for sequence in sequences if pool is not None else ():
            pool.check_fit(len(sequence.prompt) + sequence.max_tokens)
        with self._lock:  # a bad request took no number, on which the noise of others depends
            first = self._num_requests
            self._num_requests += len(items) * will_run
        return [
            requests.numbered(
                number,
                item,
                params,
                sequence,
                seed=self._seed,
                eos=self.eos_token_ids,
                tokenizer=speller,
            )
            for number, (sequence, (item, params, speller)) in enumerate(
                zip(sequences, given, strict=True), first
            )
        ]

    def _tokenizer_of_text(self) -> Any:
        try:
            return self.get_tokenizer()
        except ValueError as error:
            raise ValueError(
                f"{error}; without a tokenizer ask for SamplingParams(detokenize=False)"
            ) from None

    @functools.cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The token ids that end a text."""
        return frozenset(loading.text_ends(self._model, self._tokenizer))

    def _stream(self, batch: list[GenerationRequest], rounds: int) -> Iterator[RequestOutput]:
        last: dict[GenerationRequest, RequestOutput] = {}
        for running in self._run(batch, rounds):
            for request in running:
                output = request.output(self.detailed)
                if output != last.get(request):
                    last[request] = output
                    yield output

    def _run(
        self, batch: list[GenerationRequest], rounds: int | None, show_progress: bool = False
    ) -> Iterator[Iterable[GenerationRequest]]:
        """Generate; yield the requests after every launch, of up to ``rounds`` rounds."""
        sequences = [sequence for request in batch for sequence in request.sequences]
        if not sequences:
            return
        longest = max(len(sequence.prompt) + sequence.max_tokens for sequence in sequences)
        num_slots = min(bucket(len(sequences), smallest=1), self.max_num_seqs)
        size = dict(num_slots=num_slots, capacity=bucket(longest))
        engine, tickets = self.runtime.submit(batch, **size, rounds=rounds)
        is_running = lambda request: not all(text.finish_reason for text in request.transcripts)
        was_read = lambda request: all(text.answer is not None for text in request.transcripts)
        try:
            with _progress(len(tickets), show_progress) as show:
                left = batch
                while left:
                    if any(map(is_running, left)):  # other calls may have run them to the end
                        self.runtime.step(engine)
                    for ticket in tickets:
                        if ticket.error is not None:
                            raise ticket.error
                    show(sum(ticket.finished for ticket in tickets))
                    grown = [request for request in left if was_read(request)]
                    left = [request for request in left if is_running(request)]
                    yield grown
        finally:
            self.runtime.leave(engine, batch, tickets)


def _bool_or_none(value: Any) -> tuple[bool, str]:
    return value is None or isinstance(value, bool), "True, False or None"


@contextlib.contextmanager
def _progress(total: int, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, since texts may go to stdout."""
    with Progress(console=Console(stderr=True), disable=not is_shown) as bar:
        task = bar.add_task("Generating", total=total)
        yield lambda done: bar.update(task, completed=done)

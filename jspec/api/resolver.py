"""The way from what a caller asks for to requests that the engine can run."""

import functools
import threading
from collections.abc import Sequence
from typing import Any

from jspec.api import prompts, requests
from jspec.api.build import Build
from jspec.api.requests import GenerationRequest
from jspec.api.sampling_params import SamplingParams
from jspec.checkpoints import loading
from jspec.core.logprobs import Mode
from jspec.engine.pages import Pool
from jspec.engine.sequences import check_fit, check_prompt

Settings = SamplingParams | Sequence[SamplingParams] | None


class Resolver:
    """Checks prompts and settings, and resolves them into requests with numbers.

    Several threads may use it.

    Args:
      build: the target with its tokenizer; an attribute, which new weights replace.
      seed: with the request's number, the noise of requests without a seed.
      mode: of the scores that requests ask for.
      max_logprobs: most scored tokens of a position.
      pool: pages of the KV cache, if it has any.
    """

    def __init__(
        self, build: Build, *, seed: int, mode: Mode, max_logprobs: int, pool: Pool | None
    ):
        self.build, self._pool, self._seed = build, pool, seed
        self._mode, self._max_logprobs = mode, max_logprobs
        self.encode_text = prompts.Encoder(self.get_tokenizer, build.max_model_len)
        self._lock = threading.Lock()  # guards the number of requests
        self._num_requests = 0

    def get_tokenizer(self) -> Any:
        """Return the tokenizer; raise ValueError if there is none."""
        build = self.build
        return build.model.tokenizer if build.tokenizer is None else build.tokenizer

    @functools.cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The token ids that end a text."""
        return frozenset(loading.text_ends(self.build.model, self.build.tokenizer))

    def resolve(
        self, inputs: Any, sampling_params: Settings, *, will_run: bool = True
    ) -> list[GenerationRequest]:
        """Check and resolve all requests before any of them runs.

        Other arguments, and errors, are those of ``LLM.generate``. Requests that ``will_run`` take
        numbers.
        """
        items = prompts.read(inputs, self.encode_text)
        settings = requests.params_per_prompt(sampling_params, len(items))
        max_model_len = self.build.max_model_len
        target = self.build.plan.target
        for index, (item, params) in enumerate(zip(items, settings, strict=True)):
            if len(item.token_ids) >= max_model_len:
                raise ValueError(
                    f"prompt {index} has {len(item.token_ids)} tokens, but max_model_len="
                    f"{max_model_len} must hold it and at least one more; shorten it or raise "
                    "max_model_len."
                )
            # Before the tokenizer reads it.
            check_prompt(index, item.token_ids, target.vocab_size)
            requests.check_logprobs(params, self._mode, self._max_logprobs, target.vocab_size)
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
                room=max_model_len - len(item.token_ids),
                eos=self.eos_token_ids,
                tokenizer=speller,
                vocab_size=target.vocab_size,
            )
            for item, params, speller in given
        ]
        check_fit(sequences, target)
        for sequence in sequences if self._pool is not None else ():
            self._pool.blocks.check_fit(len(sequence.prompt) + sequence.max_tokens)
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

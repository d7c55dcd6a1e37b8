"""``LLM``: continues prompts, with vLLM's names and meanings."""

import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress

from jspec.api import config, engine_args, engines, metrics, prompts
from jspec.api.outputs import RequestOutput
from jspec.api.requests import GenerationRequest
from jspec.api.resolver import Resolver, Settings
from jspec.api.runtime import Runtime, running_of
from jspec.api.sampling_params import SamplingParams
from jspec.checkpoints import loading, shared_file
from jspec.checkpoints.loading import LoadedModel
from jspec.core import logprobs
from jspec.core.types import Params
from jspec.engine import programs
from jspec.engine.functional import MAX_NUM_SEQS
from jspec.engine.loop import init_shared
from jspec.util import neutral
from jspec.util.messages import shown
from jspec.util.values import is_whole

_log = logging.getLogger(__name__)
STREAM_ROUNDS = 4  # between two outputs of a stream
STOP_ROUNDS = 16  # between two searches for stop strings: more overruns, fewer round trips


class LLM:
    """A target and its drafter, loaded to continue prompts.

    Several threads may use it; their requests run together.

    Args:
      model: the target: a local directory, a hub id, or a model that ``jspec.load`` returned.
      speculative_config: vLLM's keys, as a dict or as JSON; see docs/speculative_config.md. None
        decodes plainly.
      dtype: of both models: "float32", "bfloat16" or "float16"; None or "auto" for the dtype of
        each checkpoint. Loaded models keep theirs, and None then gives the drafter the target's.
      quantization: "int8", "fp8" or "int4": matrices of the target's layers are quantised as they
        are read. "gguf" keeps the blocks of a GGUF file; "w8a8" quantises activations too, where
        the files ask for it. None for weights as the files have them.
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
      kv_cache_dtype: numbers of the target's KV cache: "bfloat16", "float32", "fp8" (e4m3),
        "fp8_e5m2", or "int8" with a scale for each token and key head (docs/engine.md); None or
        "auto" for the dtype of the activations, or bfloat16 on a CPU if most weights are. Texts do
        not depend on the drafter in any of them. That of the drafter is a key of
        ``speculative_config``.
      gpu_memory_utilization: share of the device's memory for weights and KV cache, up to which the
        cache grows. None for 0.9 on an accelerator, or 4 GiB of cache on a CPU.
      attention_backend: form of the target's attention: "xla", "pallas_gpu" (Hopper),
        "pallas_tpu" or "reference"; None for the device's default (docs/tpu_and_gpu.md). With
        "xla" experts run without a kernel too. That of the drafter is a key of
        ``speculative_config``.
      sampling_backend: form of the rules "standard" and "block" on drawn drafts: "xla",
        "pallas_gpu" or "pallas_tpu"; None for "xla".
      tensor_parallel_size: devices that the target is split among: its heads, the widths of its
        MLPs and its vocabulary. ``draft_tensor_parallel_size`` in ``speculative_config`` splits
        the drafter too; else each of them has all of it. Texts do not depend on either.
      data_parallel_size: engines side by side that share the requests, each with the model on
        ``tensor_parallel_size`` devices of its own. ``max_num_seqs`` and the settings of the KV
        cache are those of each engine. Texts do not depend on it.
      enable_expert_parallel: whether these devices have some experts each, not a part of every
        expert.
      coordinator: "HOST:PORT" of process 0, if the devices belong to several processes; "auto" on a
        TPU pod or under Slurm. Every process makes the same ``LLM``. Process 0 uses it as ever. In
        the others this call runs what process 0 runs, and raises SystemExit when that ends. If a
        process is lost, all of them end.
      num_processes: of the coordinator.
      process_id: number of this process, from 0 on.
      unknown: other arguments of vLLM's ``LLM``, with values that have no effect here.

    Raises:
      ValueError: a setting is out of range or not supported, the models do not fit each other or
        the device's memory, or a checkpoint cannot be read. Settings and memory are checked before
        weights are loaded.
    """

    @engine_args.in_signature
    def __init__(
        self,
        model: str | os.PathLike | LoadedModel,
        speculative_config: Mapping[str, Any] | str | None = None,
        **unknown: Any,
    ):
        args = engine_args.of("LLM", {**unknown, "speculative_config": speculative_config})
        speculative = config.read(args.speculative_config)
        speculative.check_tensor_parallel(args.tensor_parallel_size)
        logprobs.check_mode(args.logprobs_mode)
        programs.keep_compiled_programs()
        self.max_num_seqs = MAX_NUM_SEQS if args.max_num_seqs is None else args.max_num_seqs
        build, replicas = engines.load(model, args, speculative, self.max_num_seqs)
        self.build = build
        self.detailed = args.per_request_stats == "detailed"
        self.max_model_len = build.max_model_len
        vocab_size = build.plan.target.vocab_size
        max_logprobs = vocab_size if args.max_logprobs == -1 else args.max_logprobs
        self.runtime = Runtime(replicas, mode=args.logprobs_mode, max_logprobs=max_logprobs)
        self.resolver = Resolver(
            build,
            seed=int(args.seed),
            pool=next(iter(replicas.pools), None),
            mode=args.logprobs_mode,
            max_logprobs=max_logprobs,
        )
        self.encode_text = self.resolver.encode_text

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
        neutral.check(
            "generate", unknown, neutral.CALLS, inspect.signature(LLM.generate).parameters
        )
        batch = self.resolver.resolve(prompts, sampling_params)
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
        neutral.check("chat", unknown, neutral.CALLS, inspect.signature(LLM.chat).parameters)
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
            raise ValueError(f"rounds={shown(rounds)} must be a whole number of at least 1.")
        batch = self.resolver.resolve(prompts, sampling_params)
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
        batch = self.resolver.resolve(prompt, sampling_params)
        tokenizer = self.build.tokenizer or loading.tokenizer_if_any(self.build.model)
        return self.runtime.run_alone(batch, run, tokenizer=tokenizer, model=self._name)

    def get_metrics(self) -> list[metrics.Metric]:
        """Return the counts of all finished requests, under vLLM's names.

        Tokens per second divide by the time spent generating, compilation included.
        """
        return self.runtime.get_metrics(self._name)

    def reset_prefix_cache(self) -> bool:
        """Drop the KV cache of past prompts; return True, as vLLM does."""
        self.runtime.reset_prefix_cache()
        return True

    def update_params(self, target: Any, drafter: Any = None) -> None:
        """Replace the weights between two steps, as for rollouts of a training run.

        Nothing is compiled again, and the prefix cache is emptied. Requests that run go on: their
        texts so far are prefilled again with the new weights. No reference to the old ones stays.

        Args:
          target: pytree of the structure, shapes and dtypes of ``llm.build.params.target``.
          drafter: the same for the drafter; None keeps its weights.

        Raises:
          ValueError: the weights are of another structure, shape or dtype; nothing has changed.
        """
        drafter = self.build.params.drafter if drafter is None else drafter
        params = self.runtime.update_params(Params(target, drafter))
        self.build = self.resolver.build = self.build.with_params(params)

    def save_shared(self, path: str | os.PathLike) -> None:
        """Write the state that the drafter gathered from requests, such as past responses.

        Raises:
          ValueError: there are several engines, each with a state of its own.
        """
        if self.runtime.num_engines > 1:
            raise ValueError(
                f"save_shared writes the state of one engine, but data_parallel_size="
                f"{self.runtime.num_engines}; save it from an LLM with data_parallel_size=1."
            )
        self.runtime.use_shared(lambda shared: shared_file.save(path, shared))

    def load_shared(self, path: str | os.PathLike | None) -> None:
        """Replace the drafter's state, in all engines, by that of a file; None empties it."""

        def fresh(_: Any) -> Any:
            empty = init_shared(self.build.plan)
            return empty if path is None else shared_file.load(path, empty)

        self.runtime.use_shared(fresh)

    @property
    def _name(self) -> str:
        return str(self.build.model.path)

    def get_tokenizer(self) -> Any:
        """Return the tokenizer; raise ValueError if there is none."""
        return self.resolver.get_tokenizer()

    def _stream(self, batch: list[GenerationRequest], rounds: int) -> Iterator[RequestOutput]:
        for grown in self._run(batch, rounds):
            for request in grown:
                yield request.output(self.detailed)

    def _run(
        self, batch: list[GenerationRequest], rounds: int | None, show_progress: bool = False
    ) -> Iterator[list[GenerationRequest]]:
        """Generate; yield the requests whose texts have grown after every step of the engine.

        Texts are decoded here, while another thread may run the next step.
        """
        if not batch:
            return
        try:
            self.runtime.submit(batch, rounds=rounds)
            tickets = [ticket for request in batch for ticket in request.tickets]
            with _progress(len(tickets), show_progress) as show:
                left = batch
                while left:
                    if running_of(left):  # another thread's steps may have run them to the end
                        self.runtime.step()
                    grown = [request for request in left if request.read()]
                    self.runtime.abort([each for request in left for each in request.overrunning])
                    show(sum(ticket.finished for ticket in tickets))
                    left = [request for request in left if not request.finished]
                    yield grown
        finally:
            self.runtime.leave(batch)


@contextlib.contextmanager
def _progress(total: int, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, since texts may go to stdout."""
    with Progress(console=Console(stderr=True), disable=not is_shown) as bar:
        task = bar.add_task("Generating", total=total)
        yield lambda done: bar.update(task, completed=done)

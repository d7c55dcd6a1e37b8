"""The peers of ``benchmarks.real_model`` as contenders: their processes, threads and weights."""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jspec.checkpoints import checkpoint, gguf_files, loading
from jspec.checkpoints.loading import LoadedModel
from jspec.checkpoints.quantised.format import GGUF
from jspec.tools.bench import peer, peer_transformers
from jspec.tools.bench.contenders import PLAIN, Case
from jspec.tools.bench.names import names_of, portable, with_weights
from jspec.tools.bench.peer import PeerError, Theirs, Worker
from jspec.tools.bench.questions import Request
from jspec.tools.bench.settings import Settings

_HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Start:
    """The mode, files and sizes that a worker starts with."""

    mode: str
    target: Path  # a Hugging Face folder
    draft: Path | None  # folder of the draft model, if one is measured
    original: str  # the model as it was given, if that is a GGUF file; else ``target``
    config: dict[str, Any] | None  # speculative_config, with ``draft`` as a draft model
    dtype: str
    threads: int
    batch_size: int


@dataclasses.dataclass(frozen=True)
class Kind:
    """A program that can be a peer.

    Attributes:
      script: its worker.
      modes: its ways of decoding, each with the method of jspec that does the same; None is plain.
      options: makes the worker's options.
      makes_batches: whether the worker takes all requests, and batches them itself.
      drafts_in_batches: whether it drafts for more than one request at once.
    """

    script: Path
    modes: Mapping[str, str | None]
    options: Callable[[Start], list[str]]
    makes_batches: bool = True
    drafts_in_batches: bool = True


def _of_transformers(start: Start) -> list[str]:
    options = ["--model", str(start.target), "--dtype", start.dtype]
    return options + (["--draft", str(start.draft)] if start.mode == "assisted" else [])


def _of_vllm(start: Start) -> list[str]:
    options = ["--model", str(start.target), "--dtype", start.dtype, *_sizes(start)]
    config = start.config
    if start.mode == "suffix":
        # Its answers of earlier turns would be its drafts; jspec drops them before each turn.
        config = {"suffix_decoding_max_cached_requests": 0} | config
    return options + (["--config", json.dumps(config)] if config else [])


def _of_mistralrs(start: Start) -> list[str]:
    return ["--model", start.original, *_sizes(start)]


def _of_llamacpp(start: Start) -> list[str]:
    return ["--model", start.original, "--mode", start.mode, *_sizes(start)]


def _sizes(start: Start) -> list[str]:
    return ["--threads", str(start.threads), "--batch-size", str(start.batch_size)]


KINDS = {
    "transformers": Kind(
        Path(peer_transformers.__file__),
        {"eager": None, "compiled": None, "assisted": "draft_model", "prompt_lookup": "ngram"},
        _of_transformers,
        makes_batches=False,
        drafts_in_batches=False,
    ),
    "vllm": Kind(
        _HERE / "vllm_worker.py",
        {"plain": None, "ngram": "ngram", "suffix": "suffix", "draft_model": "draft_model"},
        _of_vllm,
    ),
    "mistralrs": Kind(_HERE / "mistralrs_worker.py", {"plain": None}, _of_mistralrs),
    "llamacpp": Kind(
        _HERE / "llamacpp_worker.py", {"plain": None, "prompt_lookup": "ngram"}, _of_llamacpp
    ),
}


@dataclasses.dataclass(eq=False)
class Counted(Theirs):
    """A peer whose first call, which is not timed, counts the target's passes if it drafts."""

    counted: bool = False  # whether the first call is over

    def __call__(self, **more: Any):
        """Answer all requests."""
        if self.counted or self.counterpart.endswith(PLAIN):
            return super().__call__(**more)
        self.counted = True
        sample = super().__call__(**more, count_passes=True)
        counted = ((name, part) for name, part in sample.parts.items() if part.passes)
        self.counts = {name: part for name, part in counted if part.passes > 0}
        return sample


@dataclasses.dataclass(frozen=True)
class Refused:
    """A peer that cannot run: its call raises PeerError."""

    reason: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self):
        """Raise the error."""
        raise PeerError(self.reason)


class Peers:
    """The peers of a run, as ``jspec.tools.bench.run.bench`` takes them; a context manager.

    All get the weights of jspec in the measured dtype, in one temporary folder (but for mistralrs
    and llamacpp, which read a GGUF file themselves). Called with a case, an instance starts its
    workers and yields its contenders, each at its better number of threads: that of the faster
    trial on the first requests of every category, after a warm-up.
    """

    def __init__(
        self,
        pythons: Mapping[str, str],
        threads: Sequence[int],
        settings: Settings,
        target: LoadedModel,
        results: dict[str, Any],
    ):
        self._pythons, self._threads, self._settings = pythons, threads, settings
        self._target, self._results = target, results
        self._dtype = target.params.embedding.dtype.name
        self._workers = contextlib.ExitStack()
        results["peer"] = ", ".join(pythons) or "none"
        results["peers"] = {name: {} for name in pythons}  # versions, once a worker runs

    def __enter__(self) -> "Peers":
        self._folder = tempfile.TemporaryDirectory(prefix="jspec-peers-")
        root = Path(self._folder.name)
        self._files, self._draft = root / "target", None
        if self._pythons:
            export(self._target, self._files)
        given = self._config_of("draft_model")
        if self._pythons and given is not None:
            self._draft = root / "draft"
            export(loading.load(given["model"], self._dtype), self._draft)
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()
        self._folder.cleanup()

    def __call__(
        self, case: Case, requests: dict[str, list[Request]]
    ) -> Iterator[tuple[str, Theirs | Refused]]:
        """Yield name and contender of every mode; end the workers of the last case before."""
        self._workers.close()
        for name in self._pythons:
            for mode, method in KINDS[name].modes.items():
                alone = case.batch_size == 1 or KINDS[name].drafts_in_batches
                if method is None or (self._config_of(method) is not None and alone):
                    is_plain = mode in ("eager", "plain")
                    words = name if is_plain else f"{name}, {mode.replace('_', ' ')}"
                    yield words, self._fastest(name, mode, case, requests)

    def _fastest(
        self, name: str, mode: str, case: Case, requests: dict[str, list[Request]]
    ) -> Theirs | Refused:
        first = {category: some[: case.batch_size] for category, some in requests.items()}
        speeds, best, reason = {}, None, ""
        for threads in self._threads:
            with contextlib.ExitStack() as worker:
                try:
                    run = self._started(worker, name, mode, case, threads)
                    trial = dataclasses.replace(run, requests=first)
                    trial()
                    speeds[threads] = trial().speed
                except PeerError as error:
                    reason = str(error)
                    continue
                if speeds[threads] == max(speeds.values()):
                    self._end(best)
                    best = run
                    self._workers.enter_context(worker.pop_all())
        if best is None:
            return Refused(reason)
        best.requests = requests
        best.settings["tokens_per_second_by_threads"] = speeds
        return best

    def _started(
        self, stack: contextlib.ExitStack, name: str, mode: str, case: Case, threads: int
    ) -> Counted:
        kind, config = KINDS[name], self._config_of(KINDS[name].modes[mode])
        model = self._target.path
        file = gguf_files.find(model)
        drafting = None if config is None else dict(config)
        if drafting and drafting["method"] == "draft_model":
            drafting["model"] = str(self._draft)
        start = Start(
            mode,
            self._files,
            self._draft,
            str(file or self._files),
            drafting,
            self._dtype,
            threads,
            case.batch_size,
        )
        worker = Worker(self._pythons[name], kind.script, *kind.options(start))
        stack.enter_context(worker)
        self._results["peers"][name] |= worker.info
        self._results["peers"][name].pop("threads", None)
        settings: dict[str, Any] = {"threads": threads}
        if name == "transformers":
            settings |= peer.settings_of(mode, self._settings.configs) or {}
        elif config is not None:
            settings["speculative_config"] = portable(config, self._settings.configs)
        return Counted(
            worker,
            mode,
            case,
            {},
            settings,
            self._target.eos_token_ids,
            makes_batches=kind.makes_batches,
            counterpart=self._counterpart(name, config),
        )

    def _end(self, run: Theirs | None) -> None:
        if run is not None:
            run.peer.close()

    def _config_of(self, method: str | None) -> Mapping[str, Any] | None:
        configs = self._settings.configs
        return next((each for each in configs if method and each.get("method") == method), None)

    def _counterpart(self, name: str, config: Mapping[str, Any] | None) -> str:
        configs, forms = self._settings.configs, self._settings.quantizations
        method = PLAIN if config is None else names_of(configs)[configs.index(config)]
        reads_blocks = name == "llamacpp" and GGUF in forms
        return with_weights(method, GGUF if reads_blocks else None)


def export(model: LoadedModel, folder: Path) -> None:
    """Write a model as a Hugging Face folder, which GGUF files are not for all peers."""
    described = checkpoint.hf_config(model.config)
    known = {key: described[key] for key in ("architectures", "hidden_act") if key in described}
    dtype = model.params.embedding.dtype.name
    checkpoint.save_pretrained(folder, model.config, model.params, known | model.raw_config, dtype)
    model.tokenizer.save_pretrained(folder)

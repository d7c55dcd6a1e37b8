"""Training of drafters for a frozen target: ``python -m training.distill METHOD``.

    python -m training.distill eagle --target DIR --data TEXT... --held-out-share 0.02 --output RUN

Target forward, drafter and loss are one compiled program. Every evaluation measures the acceptance
length on held-out prompts with the ``decode`` that serves. Run the same command again to resume. At
the end ``RUN/export`` holds the best weights in a layout that jspec and other servers read, with a
provenance file.
"""

import dataclasses
import importlib
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jspec.checkpoints import checkpoint, loading
from jspec.checkpoints.loading import LoadedModel
from jspec.models.decoder import Decoder
from training import trainer
from training.data import report
from training.data.loader import batches, held_out
from training.data.settings import Data, open_data
from training.networks.target import in_order, load, split
from training.tasks.acceptance import acceptance_meter
from training.tasks.method import DistillSettings, Method
from training.util.command import end, run_command
from training.util.digests import same_weights, weights_digest
from training.util.errors import bad_option
from training.util.provenance import provenance, write_provenance

# Files of ``training/tasks``, in the order of the list that the command prints.
_NAMES = (
    "eagle",
    "medusa",
    "hydra",
    "mlp_speculator",
    "dflash",
    "mtp",
    "draft",
)
METHODS: dict[str, Method] = {
    name: importlib.import_module(f"training.tasks.{name}").METHOD for name in _NAMES
}

# Records hold configs as text. Those of 0.2.0 have fields that are gone, with the only values that
# runs had, and fields that have another name now.
_REMOVED_FIELDS = {
    "attention_gate=False",
    "zero_centred_norms=False",
    "zero_first=True",
    "one_stem=False",
    "scoring='sigmoid'",
    "shared_gate=False",
}
_RENAMED_FIELDS = {"own_head": "separate_head", "own_embedding": "separate_embedding"}


# Options that each process of a run may have for itself: folders of its host, and ``trainer``,
# which is compared before.
_OF_A_PROCESS = {"target", "data", "held_out_data", "output", "cache", "feature_cache", "trainer"}


def run(
    method: Method,
    settings: DistillSettings,
    argv: Sequence[str] = (),
    *,
    module: str = "training.distill",
    stop_after: int | None = None,
) -> trainer.Result:
    """Train to the end or to a signal, and export the drafter of a finished run.

    The exported weights are the best ones, or the last ones if no data is held out. ``argv`` and
    ``module`` go into the provenance; this call does at most ``stop_after`` steps.

    Raises:
      Stopped: a signal ended the run, which is saved.
    """
    mesh = trainer.start(settings.trainer)
    target, data = _open(settings, mesh)
    build = trainer.together(lambda: method.build(settings, target, data))
    data, measure, ways = build.data or data, None, settings.trainer.tensor
    if settings.measures:
        meter = acceptance_meter(
            settings.acceptance,
            Decoder(split(target.config, ways)),
            build.drafter,
            data.held_out,
            loading.text_ends(target),
            mesh,
        )
        measure = lambda params: meter(*build.weights_of(params))
    criterion, idle = _criterion(settings, data), settings.idle().get("recipe", ())
    sources = {
        "data": f"sha256 {data.description['sha256'][:16]}",
        "target": weights_digest(in_order(target.params, target.config, ways)),
    }
    optimiser, apart = settings.trainer, ()
    if data.held_out is not None:
        part = optimiser.batch // optimiser.accumulate
        apart = held_out(data.held_out, batch=part, limit=settings.eval_windows)
    if jax.process_index() == 0:
        report.print_summary(data, settings.data)
    with trainer.progress("training", optimiser.steps) as bar:
        result = trainer.train(
            build.task,
            build.frozen,
            batches(data.train, batch=optimiser.batch, seed=optimiser.seed),
            optimiser,
            out=Path(settings.output),
            held_out=apart,
            measure=measure,
            bar=bar,
            stop_after=stop_after,
            identity=dict(build.identity) | criterion | sources,
            passed_over=lambda before: {
                *idle,
                *_same_networks(build.identity, before),
                *(["target"] if same_weights(before.get("target"), sources["target"]) else []),
            },
            facts=provenance(module, argv) | {"data": data.description},
            best=("acceptance_length", "max") if measure else ("heldout_loss", "min"),
        )
    trainer.check_stopped(result)
    if not result.finished:
        return result
    evaluated = result.record["best"] is not None
    params = trainer.gather(result.best_params() if evaluated else result.params)
    if jax.process_index() == 0:
        directory = Path(settings.output) / "export"
        build.export(params, directory)
        write_provenance(directory, result.provenance)
    return result


def _open(settings: DistillSettings, mesh: Mesh) -> tuple[LoadedModel, Data]:
    """Load the target onto a mesh of this process, and the data."""

    def check() -> dict[str, Any]:
        sizes = settings.check_models()
        _check_length(settings, sizes.max_positions)
        split(sizes, settings.trainer.tensor)
        target = f"{sizes.num_layers} layers of {sizes.hidden_size}, {settings.weights_dtype}"
        parts = [vars(part) for part in vars(settings).values() if dataclasses.is_dataclass(part)]
        options = {name: x for part in (vars(settings), *parts) for name, x in part.items()}
        shared = options.keys() - _OF_A_PROCESS - vars(settings.trainer).keys()
        return {"target": target} | {name: str(options[name]) for name in sorted(shared)}

    trainer.check_agreed(trainer.together(check))
    target = trainer.together(lambda: load(settings.target, settings.weights_dtype, mesh))
    return target, trainer.first_process_first(
        lambda: open_data(settings.data, target.tokenizer, target.config.vocab_size)
    )


def show_data(settings: DistillSettings) -> None:
    """Print what a run would learn from its data; the target's weights are not read."""
    sizes = settings.check_models()
    _check_length(settings, sizes.max_positions)
    tokenizer = checkpoint.load_tokenizer(settings.target)
    with tempfile.TemporaryDirectory() as cache:
        asked = dataclasses.replace(settings.data, cache=cache)
        report.print_all(open_data(asked, tokenizer, sizes.vocab_size), asked, tokenizer)


def _check_length(settings: DistillSettings, most: int) -> None:
    """Raise OptionError if windows are longer than the target's ``most`` positions."""
    length = settings.data.length
    if length >= most:
        remedy = f"the target has {most} positions, and a window has one token more; take fewer"
        raise bad_option("length", length, remedy)


def _criterion(settings: DistillSettings, data: Data) -> dict[str, Any]:
    """Return the options that decide which weights are best; a resumed run must share them."""
    if settings.measures:
        return dataclasses.asdict(settings.acceptance)
    apart = {} if data.held_out is None else {"eval_windows": settings.eval_windows}
    return {"acceptance_prompts": 0} | apart


def _same_networks(identity: Mapping[str, Any], before: Mapping[str, Any]) -> set[str]:
    """Return the networks whose record differs only in the form of its text."""
    return {
        name
        for name, network in identity.items()
        if isinstance(network, str) and _is_same_network(str(before.get(name)), network)
    }


def _is_same_network(before: str, now: str) -> bool:
    """Return whether two records are of the same config, and initial weights if there are any.

    >>> _is_same_network("Head(own_head=True) from sha256 ab", "Head(separate_head=True)")
    False
    >>> now = "Head(separate_head=True) from sha256 ab, all cd"
    >>> _is_same_network("Head(own_head=True) from sha256 ab", now)
    True
    """
    (config, _, digest), (now_config, _, now_digest) = (
        text.partition(" from sha256 ") for text in (before, now)
    )
    return _fields(config) == _fields(now_config) and same_weights(digest, now_digest)


def _fields(config: str) -> list[str]:
    """Return the fields of a config's text, sorted, under their names of today.

    >>> _fields("Head(own_head=True, one_stem=False, layers=(1, 2))")
    ['Head(', 'layers=(1, 2', 'separate_head=True']
    """
    for name, new_name in _RENAMED_FIELDS.items():
        config = re.sub(rf"\b{name}=", f"{new_name}=", config)
    parts = (part.strip(" ,)") for part in re.split(r"\b(?=\w+=)", config))
    return sorted(part for part in parts if part not in _REMOVED_FIELDS)


def run_method(name: str, argv: Sequence[str] | None = None, *, module: str) -> int:
    """Run one method as a command; see ``run_command`` for the exit code."""
    method, argv = METHODS[name], list(sys.argv[1:] if argv is None else argv)

    def run_or_show(settings: DistillSettings, argv: Sequence[str]) -> None:
        if settings.dry_run:
            show_data(settings)
        else:
            run(method, settings, argv, module=module)

    return run_command(
        method.options(argv),
        run_or_show,
        argv,
        module=module,
        description=f"{method.description} Run it again with the same options to resume.",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``METHOD OPTIONS``; see ``run_command`` for the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in METHODS:
        return run_method(argv[0], argv[1:], module=f"training.distill {argv[0]}")
    width = max(map(len, METHODS))
    table = "\n".join(f"  {name:{width}}  {m.description}" for name, m in METHODS.items())
    if argv[:1] in (["-h"], ["--help"]):
        print(f"usage: python -m training.distill METHOD [OPTIONS]\n\nmethods:\n{table}\n")
        print("python -m training.distill METHOD --help lists the options of a method.")
        return 0
    unknown = f"method {argv[0]!r} is unknown; " if argv else ""
    print(f"error: {unknown}name one of {', '.join(METHODS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    end(main())

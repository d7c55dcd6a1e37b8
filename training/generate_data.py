"""Answers of the target to learn from: ``python -m training.generate_data``.

A drafter is judged by what the target itself would say, so that is what it should learn from
(EAGLE-3, arXiv 2503.01840, section 4; DistillSpec, arXiv 2310.08461). Speculation may make the
answers: their law is the target's all the same.

Run the same command again to resume: answers are appended a whole group at a time, and every answer
has noise of its own, so that it depends neither on the others nor on when the run was stopped.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jspec import verify
from jspec.api import config
from jspec.api.llm import LLM
from jspec.api.outputs import RequestOutput
from jspec.api.sampling_params import SamplingParams
from jspec.checkpoints import checkpoint
from jspec.engine import loading
from jspec.util import values
from jspec.util.messages import shown
from training.data import readers
from training.data.chat import template_source
from training.data.encode import Encoder, vocabulary_digest
from training.data.prompts import Prompt, read_prompts
from training.data.records import hash_64
from training.digests import weights_digest
from training.locks import alone
from training.trainer.command import run_command
from training.trainer.provenance import provenance, without_folders
from training.trainer.settings import bad_option

_SORTED = 32  # groups among which prompts are sorted by length: rows of a group end together
_SAFE_BITS = 53  # of a seed: whatever reads JSON keeps them


@dataclasses.dataclass(frozen=True)
class GenerateSettings:
    """One run. Every field is an option of the command line: ``--batch 32``.

    Attributes:
      target: the model that answers: a folder in Hugging Face layout, or a hub id
      prompts: files or globs of text or JSON lines, folders of them, stdlib, package:NAME,
        hf:NAME[:SPLIT], or folders saved by datasets
      output: file of JSON lines, appended to
      max_new_tokens: most tokens of an answer
      temperature: one for all, or several, of which each prompt gets one by chance
      top_p: keep the likeliest tokens that hold this much probability
      batch: prompts answered together
      speculative_config: JSON, with the keys of vLLM; the law of the answers does not depend on it
      dtype: of the weights
      seed: of all noise, and of which prompt gets which temperature
      every_turn: answer every message of the user, not the last alone
      prompt_tokens: cut texts into prompts of so many tokens, one for every prompt_tokens +
        max_new_tokens of the text (0: a text is one prompt)
      data_format: what lines of JSON hold; auto goes by their keys
      package_paths: more folders in which package:NAME is searched
      held_out_modules: top-level modules of folders and packages of which nothing is asked
      chat_template: file with the Jinja template of conversations (default: the tokenizer's own)
      max_bad_lines: lines to skip before giving up

    Raises:
      ValueError: a value is out of range; the message names option, value and remedy.
    """

    target: str = ""
    prompts: tuple[str, ...] = ()
    output: str = ""
    max_new_tokens: int = 512
    temperature: tuple[float, ...] = (1.0,)
    top_p: float = 1.0
    batch: int = 32
    speculative_config: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    seed: int = 0
    every_turn: bool = False
    prompt_tokens: int = 0
    data_format: Literal["auto", "text", "chat", "tokens"] = "auto"
    package_paths: tuple[str, ...] = ()
    held_out_modules: tuple[str, ...] = ()
    chat_template: str = ""
    max_bad_lines: int = 0

    def __post_init__(self):
        for name in ("target", "prompts", "output"):
            if not getattr(self, name):
                raise bad_option(name, getattr(self, name), "give one")
        for least, names in ((1, ("max_new_tokens", "batch")), (0, ("prompt_tokens", "seed"))):
            for name in names:
                if getattr(self, name) < least:
                    raise bad_option(name, getattr(self, name), f"it must be at least {least}")
        if self.max_bad_lines < 0:
            raise bad_option("max_bad_lines", self.max_bad_lines, "it must be at least 0")
        if not self.temperature:
            raise bad_option("temperature", self.temperature, "give one or several")
        for value in self.temperature:
            self.sampling(value, 0)
        self._check_speculation()

    def _check_speculation(self):
        try:
            rule = config.read(self.speculation).rule
        except json.JSONDecodeError as error:
            reason = f"it is not JSON ({error})"
            raise bad_option("speculative_config", self.speculative_config, reason) from None
        except ValueError as error:
            raise bad_option("speculative_config", self.speculative_config, str(error)) from None
        rule = verify.RULES[rule] if isinstance(rule, str) else rule
        if not rule.lossless:
            raise bad_option(
                "speculative_config",
                self.speculative_config,
                f"rule {rule.name} changes the law of the answers; take a lossless one",
            )

    @property
    def speculation(self) -> dict | None:
        """``speculative_config`` as jspec takes it."""
        return values.json_of(self.speculative_config) if self.speculative_config else None

    def sampling(self, temperature: float, seed: int) -> SamplingParams:
        """How one answer is drawn."""
        try:
            return SamplingParams(
                max_tokens=self.max_new_tokens, temperature=temperature, top_p=self.top_p, seed=seed
            )
        except ValueError as error:
            raise bad_option("temperature", temperature, str(error)) from None

    def identity(self) -> dict[str, Any]:
        """What must stay as it is for a resumed run to be the same run."""
        names = (
            "target",
            "max_new_tokens",
            "temperature",
            "top_p",
            "dtype",
            "seed",
            "every_turn",
            "prompt_tokens",
            "chat_template",
        )
        given = {name: getattr(self, name) for name in names}
        given |= {name: without_folders(given[name]) for name in ("target", "chat_template")}
        return given | {"temperature": list(self.temperature)}


def run(settings: GenerateSettings, argv: Sequence[str]) -> int:
    """Answers all prompts that have no answer yet. Returns how many those were.

    Raises:
      ValueError: prompts cannot be read or do not fit the target, or ``output`` is of another run
        or being written by another process.
    """
    with alone(Path(settings.output)):
        return _run(settings, argv)


def _run(settings: GenerateSettings, argv: Sequence[str]) -> int:
    sizes = loading.sizes(settings.target)
    tokenizer = checkpoint.load_tokenizer(settings.target)
    encoder = Encoder(tokenizer, sizes.vocab_size, settings.chat_template)
    sources, _ = readers.find(
        settings.prompts,
        data_format=settings.data_format,
        package_paths=settings.package_paths,
        held_out_modules=settings.held_out_modules,
    )
    bad = readers.BadLines(settings.max_bad_lines)
    stride = settings.prompt_tokens + settings.max_new_tokens
    prompts = read_prompts(
        sources,
        encoder,
        bad,
        max_positions=sizes.max_positions,
        every_turn=settings.every_turn,
        prompt_tokens=settings.prompt_tokens,
        stride=stride,
    )
    facts = _facts(settings, encoder)
    _refuse_another_run(Path(settings.output), facts)  # before the weights are read
    target = loading.load(settings.target, settings.dtype)
    facts |= {"weights": f"sha256 {weights_digest(target.params)}"}
    done = _resume(Path(settings.output), facts, argv)
    todo = [
        group
        for group in _groups(prompts, settings.batch)
        if any(prompt.key not in done for prompt in group)
    ]
    count = sum(prompt.key not in done for group in todo for prompt in group)
    if not count:
        print(f"all {len(prompts)} prompts are answered", file=sys.stderr)
        return 0
    llm = LLM(target, settings.speculation, dtype=settings.dtype, max_num_seqs=settings.batch)
    with Path(settings.output).open("ab") as file, _progress(len(prompts)) as shown:
        shown(len(prompts) - count, 0)
        for group in todo:
            lines = answers(llm, encoder, settings, group)
            new = [line for line in lines if line["key"] not in done]
            file.write(b"".join(json.dumps(line).encode() + b"\n" for line in new))
            file.flush()
            os.fsync(file.fileno())
            shown(len({line["key"] for line in new}), sum(len(line["token_ids"]) for line in new))
    return count


def answers(
    llm: LLM, encoder: Encoder, settings: GenerateSettings, group: Sequence[Prompt]
) -> list[dict]:
    """The lines of a group's prompts, made turn by turn; those of one prompt stand together.

    A conversation that has grown too long for the target ends early.
    """
    lines: dict[str, list[dict]] = {prompt.key: [] for prompt in group}
    for turn in range(max(len(prompt.turns) for prompt in group)):
        asked = []
        for prompt in group:
            said = [line["text"] for line in lines[prompt.key]]
            if len(said) == turn < len(prompt.turns):
                ids = prompt.encoded(said, encoder)
                if len(ids) < llm.max_model_len:
                    asked.append((prompt, said, ids))
        params = [_sampling(settings, prompt.key, turn) for prompt, _, _ in asked]
        given = [{"prompt_token_ids": list(ids)} for _, _, ids in asked]
        outputs = llm.generate(given, params)
        for (prompt, said, _), output, param in zip(asked, outputs, params, strict=True):
            lines[prompt.key].append(_line(prompt, said, output, param))
    return [line | {"turns": len(made)} for made in lines.values() for line in made]


def _line(prompt: Prompt, said: list[str], output: RequestOutput, params: SamplingParams) -> dict:
    """What is written of one answer; ``said`` are the answers before it."""
    answer = output.outputs[0]
    line = {
        "key": prompt.key,
        "turn": len(said),
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": answer.token_ids,
        "text": answer.text,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed,
        "finish_reason": answer.finish_reason,
    }
    if not prompt.token_ids:
        answered = {"role": "assistant", "content": answer.text}
        line["messages"] = [*prompt.messages(said), answered]
    return line


def _sampling(settings: GenerateSettings, key: str, turn: int) -> SamplingParams:
    """Temperature and noise of one answer, by what is asked alone."""
    drawn = hash_64(f"temperature/{settings.seed}/{key}")
    temperature = settings.temperature[drawn % len(settings.temperature)]
    seed = hash_64(f"{settings.seed}/{key}/{turn}") >> (64 - _SAFE_BITS)
    return settings.sampling(temperature, seed)


def _groups(prompts: list[Prompt], size: int) -> Iterator[list[Prompt]]:
    """Groups of like length; the same for every run, whatever is done already."""
    for begin in range(0, len(prompts), size * _SORTED):
        block = prompts[begin : begin + size * _SORTED]
        block.sort(key=lambda prompt: prompt.length)
        for first in range(0, len(block), size):
            yield block[first : first + size]


def _facts(settings: GenerateSettings, encoder: Encoder) -> dict[str, Any]:
    """What all answers of a file share, but for the target's weights."""
    template = template_source(encoder.tokenizer, settings.chat_template)
    return {
        "settings": settings.identity(),
        "vocabulary": vocabulary_digest(encoder.tokenizer),
        "template": f"sha256 {hashlib.sha256(template.encode()).hexdigest()[:16]}",
    }


def _resume(path: Path, facts: dict[str, Any], argv: Sequence[str]) -> set[str]:
    """Keys of the prompts that ``path`` answers whole; what stands behind them is cut off.

    Raises:
      ValueError: it is of another run than ``facts`` say, or damaged before its last line.
    """
    if not path.exists() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = facts | provenance("training.generate_data", argv)
        readers.provenance_of(path).write_text(json.dumps(facts, indent=2) + "\n")
        return set()
    _refuse_another_run(path, facts)
    done, whole = _whole_answers(path)
    with path.open("r+b") as file:
        file.truncate(whole)
    return done


def _refuse_another_run(path: Path, facts: dict[str, Any]) -> None:
    """Refuses to go on with a file whose provenance is not ``facts``."""
    if not path.exists() or not path.stat().st_size:
        return
    beside = readers.provenance_of(path)
    before = readers.written_beside(beside) if beside.exists() else {}
    settings_then = before.get("settings")
    was = {**before, **(settings_then if isinstance(settings_then, dict) else {})}
    now = {**facts, **facts["settings"]}
    del now["settings"]
    # Earlier versions wrote down neither: only who ran them knows.
    untold = {key: now[key] for key in ("weights", "template") if key in now and key not in was}
    changed = [
        f"{name} {now[name]!r} (was {shown(was.get(name))})"
        for name in now
        if name not in untold and now[name] != was.get(name)
    ]
    if changed:
        remedy = f"it holds the answers of another run: {', '.join(changed)}; give a new one"
        raise bad_option("output", path.name, remedy)
    if "weights" in untold:
        raise bad_option(
            "output",
            path.name,
            f"{beside.name} does not say whose answers it holds; give a new one, or, if target "
            f"and template are those of then, add {json.dumps(untold)[1:-1]} to that file",
        )


def _answer_of(text: bytes) -> dict:
    """A line that this script wrote; ValueError where it did not."""
    line = values.json_of(text)
    if not isinstance(line, dict) or not isinstance(line.get("key"), str):
        raise ValueError("no answer")
    if not values.are_whole([line.get("turn"), line.get("turns")], 0):
        raise ValueError("no answer")
    return line


def _whole_answers(path: Path) -> tuple[set[str], int]:
    """Keys whose lines are all there, and the number of bytes that those lines take."""
    done: set[str] = set()
    end = whole = 0
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            end += len(text)
            try:
                line = _answer_of(text) if text.endswith(b"\n") else None
            except ValueError:
                line = None
            if line is None:
                if file.read(1):
                    raise ValueError(
                        f"{path.name}:{number} is damaged, and is not the last line; mend it or "
                        "give a new --output"
                    )
                break
            if line["turn"] == line["turns"] - 1:
                done.add(line["key"])
                whole = end
    return done, whole


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, moved by (prompts, tokens); lines where that is no terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    done = tokens = 0
    begun = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, rate="")

        def move(more: int, new_tokens: int) -> None:
            nonlocal done, tokens
            done, tokens = done + more, tokens + new_tokens
            rate = f"{tokens / (time.monotonic() - begun):,.0f} tokens/s"
            bar.update(task, completed=done, rate=rate)
            if not console.is_terminal and new_tokens:
                print(f"{done} of {total} prompts  {rate}", file=sys.stderr, flush=True)

        yield move


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see ``trainer.run_command`` for its exit code."""
    return run_command(
        GenerateSettings,
        run,
        argv,
        module="training.generate_data",
        description="Has the target answer prompts, for a drafter to learn from; run it again "
        "with the same options to resume.",
    )


if __name__ == "__main__":
    sys.exit(main())

"""Answers of the target to train on: ``python -m training.generate_data``.

A drafter is accepted where it agrees with the target's own text, so it should be trained on that
(EAGLE-3, arXiv 2503.01840, section 4; DistillSpec, arXiv 2310.08461). Speculation may generate the
answers: it leaves their distribution unchanged.

Run the same command again to resume. Answers are appended a whole group at a time, and every answer
has its own seed, so it does not depend on other answers or on interruptions.
"""

import dataclasses
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from jspec import verify
from jspec.api import config
from jspec.api.llm import LLM
from jspec.api.outputs import RequestOutput
from jspec.api.sampling_params import SamplingParams
from jspec.checkpoints import checkpoint, loading
from jspec.util import atomic_files, values
from jspec.util.messages import shown
from training.data import files, readers
from training.data.chat import template_source
from training.data.encode import Encoder, vocabulary_digest
from training.data.ledger import Ledger
from training.data.prompts import Prompt, read_prompts
from training.data.records import hash_64
from training.util.command import end, run_command
from training.util.digests import same_weights, weights_digest
from training.util.errors import adding_filename, bad_option, check_each, check_least
from training.util.locks import alone
from training.util.progress import progress
from training.util.provenance import provenance, without_folders

_SORTED = 32  # groups among which prompts are sorted by length, so a group ends together
_SAFE_BITS = 53  # bits of a seed that every reader of JSON keeps


@dataclasses.dataclass(frozen=True)
class GenerateSettings(readers.SourceSettings):
    """One run. Every field is an option of the command line: ``--batch 32``."""

    target: str = ""  # the model that answers: a folder in Hugging Face layout, or a hub id
    # files or globs of text or JSON lines, folders of them, stdlib, package:NAME, hf:NAME[:SPLIT],
    # or folders saved by datasets
    prompts: tuple[str, ...] = ()
    output: str = ""  # file of JSON lines, appended to
    max_new_tokens: int = 512  # maximum tokens of an answer
    # one for all, or several, of which each prompt gets one at random
    temperature: tuple[float, ...] = (1.0,)
    top_p: float = 1.0  # keep the likeliest tokens that hold this much probability
    batch: int = 32  # prompts answered together
    # JSON, with the keys of vLLM; it leaves the distribution of the answers unchanged
    speculative_config: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # dtype of the weights
    seed: int = 0  # seed of all noise, and of each prompt's temperature
    every_turn: bool = False  # answer every message of the user, not only the last
    # cut texts into prompts of this many tokens, one for every prompt_tokens + max_new_tokens of
    # the text (0: a text is one prompt)
    prompt_tokens: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_each(self, ["target", "prompts", "output", "temperature"], bool, "give one")
        check_least(self, 1, "max_new_tokens", "batch")
        check_least(self, 0, "prompt_tokens", "seed")
        for value in self.temperature:
            self.sampling(value, 0)
        refuse = lambda reason: bad_option("speculative_config", self.speculative_config, reason)
        try:
            rule = config.read(self.speculation).rule
        except json.JSONDecodeError as error:
            raise refuse(f"it is not JSON ({error})") from None
        except ValueError as error:
            raise refuse(str(error)) from None
        rule = verify.RULES[rule] if isinstance(rule, str) else rule
        if not rule.lossless:
            raise refuse(f"rule {rule.name} changes the answers' distribution; take a lossless one")

    @property
    def speculation(self) -> dict | None:
        """``speculative_config`` as a dict."""
        return values.json_of(self.speculative_config) if self.speculative_config else None

    def sampling(self, temperature: float, seed: int) -> SamplingParams:
        """Return the sampling parameters of one answer."""
        try:
            return SamplingParams(
                max_tokens=self.max_new_tokens, temperature=temperature, top_p=self.top_p, seed=seed
            )
        except ValueError as error:
            raise bad_option("temperature", temperature, str(error)) from None

    def identity(self) -> dict[str, Any]:
        """Return the options that a resumed run must share."""
        names = ("max_new_tokens", "top_p", "dtype", "seed", "every_turn", "prompt_tokens")
        return {name: vars(self)[name] for name in names} | {
            "target": without_folders(self.target),
            "temperature": list(self.temperature),
            "chat_template": without_folders(self.chat_template),
        }


def run(settings: GenerateSettings, argv: Sequence[str]) -> int:
    """Answer all prompts that have no answer yet, and return their number.

    Raises:
      ValueError: prompts cannot be read or do not fit the target, or ``output`` is of another run
        or locked by another process.
    """
    output = Path(settings.output)
    with alone(output):
        sizes = loading.sizes(settings.target)
        tokenizer = checkpoint.load_tokenizer(settings.target)
        encoder = Encoder(tokenizer, sizes.vocab_size, settings.chat_template)
        sources, _ = readers.find(settings.prompts, settings)
        prompts = read_prompts(
            sources,
            encoder,
            Ledger(settings.max_bad_lines),
            max_positions=sizes.max_positions,
            every_turn=settings.every_turn,
            prompt_tokens=settings.prompt_tokens,
            stride=settings.prompt_tokens + settings.max_new_tokens,
        )
        facts = _facts(settings, encoder)
        _check_same_run(output, facts)  # before the weights are loaded
        target = loading.load(settings.target, settings.dtype)
        facts |= {"weights": weights_digest(target.params)}
        done = _resume(output, facts, argv)
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
        answered, tokens, begun, num_ended = len(prompts) - count, 0, time.monotonic(), 0
        with (
            adding_filename(output),
            output.open("ab") as file,
            progress("prompts", len(prompts)) as update,
        ):
            update(answered)
            for group in todo:
                lines = answers(llm, encoder, settings, group)
                lines = [line for line in lines if line["key"] not in done]
                file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
                answered += len({line["key"] for line in lines})
                num_turns = {prompt.key: len(prompt.turns) for prompt in group}
                num_ended += sum(
                    line["turn"] == 0 and line["turns"] < num_turns[line["key"]] for line in lines
                )
                tokens += sum(len(line["token_ids"]) for line in lines)
                rate = tokens / max(time.monotonic() - begun, 1e-9)
                update(answered, f"{rate:,.0f} tokens/s", True)
        if num_ended:
            print(
                f"{num_ended:,} conversations ended before their last turn: they had grown to the "
                f"target's {llm.max_model_len} positions",
                file=sys.stderr,
            )
        return count


def answers(
    llm: LLM, encoder: Encoder, settings: GenerateSettings, group: Sequence[Prompt]
) -> list[dict]:
    """Generate the lines of a group's prompts turn by turn; return them prompt by prompt.

    A conversation that has grown too long for the target ends early.
    """
    lines: dict[str, list[dict]] = {prompt.key: [] for prompt in group}
    for turn in range(max(len(prompt.turns) for prompt in group)):
        asked = []
        for prompt in group:
            texts = [line["text"] for line in lines[prompt.key]]
            if len(texts) == turn < len(prompt.turns):
                ids = prompt.encoded(texts, encoder)
                if len(ids) < llm.max_model_len:
                    asked.append((prompt, texts, ids))
        params = [_sampling(settings, prompt.key, turn) for prompt, _, _ in asked]
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for _, _, ids in asked], params)
        for (prompt, texts, _), output, param in zip(asked, outputs, params, strict=True):
            lines[prompt.key].append(_line(prompt, texts, output, param))
    return [line | {"turns": len(made)} for made in lines.values() for line in made]


def _line(prompt: Prompt, texts: list[str], output: RequestOutput, params: SamplingParams) -> dict:
    """Return the record of one answer; ``texts`` are the answers before it."""
    answer = output.outputs[0]
    line = {
        "key": prompt.key,
        "turn": len(texts),
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
        line["messages"] = [*prompt.messages(texts), answered]
        line |= {"tools": list(prompt.tools)} if prompt.tools else {}
    return line


def _sampling(settings: GenerateSettings, key: str, turn: int) -> SamplingParams:
    """Return temperature and seed of one answer, which only depend on the prompt."""
    drawn = hash_64(f"temperature/{settings.seed}/{key}")
    temperature = settings.temperature[drawn % len(settings.temperature)]
    seed = hash_64(f"{settings.seed}/{key}/{turn}") >> (64 - _SAFE_BITS)
    return settings.sampling(temperature, seed)


def _groups(prompts: list[Prompt], size: int) -> Iterator[list[Prompt]]:
    """Yield groups of similar length, the same in every run."""
    for begin in range(0, len(prompts), size * _SORTED):
        block = prompts[begin : begin + size * _SORTED]
        block.sort(key=lambda prompt: prompt.length)
        for first in range(0, len(block), size):
            yield block[first : first + size]


def _facts(settings: GenerateSettings, encoder: Encoder) -> dict[str, Any]:
    """Return what all answers of a file share, except the target's weights."""
    template = template_source(encoder.tokenizer, settings.chat_template)
    return {
        "settings": settings.identity(),
        "vocabulary": vocabulary_digest(encoder.tokenizer),
        "template": f"sha256 {hashlib.sha256(template.encode()).hexdigest()[:16]}",
    }


def _resume(path: Path, facts: dict[str, Any], argv: Sequence[str]) -> set[str]:
    """Return the keys of the complete answers in ``path``, and cut off what follows them."""
    if not path.exists() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = facts | provenance("training.generate_data", argv)
        files.provenance_of(path).write_text(json.dumps(facts, indent=2) + "\n")
        return set()
    _check_same_run(path, facts)
    beside = files.provenance_of(path)
    before = files.read_provenance(beside)
    if before["weights"] != facts["weights"]:  # an earlier version recorded one row of each
        recorded = json.dumps(before | {"weights": facts["weights"]}, indent=2) + "\n"
        atomic_files.write(beside, recorded.encode())
    done, size = _complete_answers(path)
    with path.open("r+b") as file:
        file.truncate(size)
    return done


def _check_same_run(path: Path, facts: dict[str, Any]) -> None:
    """Raise ValueError if the file's provenance differs from ``facts``."""
    if not path.exists() or not path.stat().st_size:
        return
    beside = files.provenance_of(path)
    before = files.read_provenance(beside) if beside.exists() else {}
    was = before | (before["settings"] if isinstance(before.get("settings"), dict) else {})
    now = {key: facts[key] for key in facts if key != "settings"} | facts["settings"]
    # Earlier versions recorded neither.
    missing = {key: now[key] for key in ("weights", "template") if key in now and key not in was}
    changed = [
        f"{name} {now[name]!r} (was {shown(was.get(name))})"
        for name in now
        if name not in missing
        and now[name] != was.get(name)
        and not (name == "weights" and same_weights(was[name], now[name]))
    ]
    if changed:
        remedy = f"it holds answers of another run: {', '.join(changed)}; give a new one"
        raise bad_option("output", path.name, remedy)
    if "weights" in missing:
        raise bad_option(
            "output",
            path.name,
            f"{beside.name} does not record the target's weights; give a new one, or, if target "
            f"and template are unchanged, add {json.dumps(missing)[1:-1]} to that file",
        )


def _answer_of(text: bytes) -> dict | None:
    """Return the answer in a line of the file; None if it is damaged or cut off."""
    try:
        line = values.json_of(text) if text.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("key"), str):
        return None
    return line if values.are_whole([line.get("turn"), line.get("turns")], 0) else None


def _complete_answers(path: Path) -> tuple[set[str], int]:
    """Return the keys of which all lines are there, and the size of those lines in bytes."""
    done: set[str] = set()
    end = complete = 0
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            end += len(text)
            line = _answer_of(text)
            if line is None and file.read(1):
                raise ValueError(
                    f"{path.name}:{number} is damaged, and is not the last line; mend it or "
                    "give a new --output"
                )
            if line and line["turn"] == line["turns"] - 1:
                done.add(line["key"])
                complete = end
    return done, complete


main = functools.partial(
    run_command,
    GenerateSettings,
    run,
    module="training.generate_data",
    description="Generate answers of the target, to train a drafter on. Run it again with the "
    "same options to resume.",
)

if __name__ == "__main__":
    end(main())

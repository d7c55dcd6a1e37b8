"""``jspec demo``: a prompt continued with and without speculation, compared.

The embedded model continues a program. SmolLM2 answers a question too, if it is installed.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.status import Status
from rich.table import Table
from rich.text import Text

from jspec.api.llm import LLM
from jspec.api.outputs import RequestOutput
from jspec.api.prompts import rendered
from jspec.api.sampling_params import SamplingParams
from jspec.checkpoints import installed, loading
from jspec.checkpoints.loading import LoadedModel
from jspec.cli import show
from jspec.engine import programs
from jspec.tools.bench.contenders import counts_of

ASSETS = Path(__file__).parents[1] / "assets" / "demo"
PROMPT = ASSETS / "prompt.txt"
DTYPES = ("float32", "bfloat16")
# The folder of each method's drafter.
DRAFTERS = {"draft_model": "draft", "eagle": "eagle1", "eagle3": "eagle3"}
EAGLE3 = {"method": "eagle3", "model": str(ASSETS / "eagle3"), "num_speculative_tokens": 4}
# dtype, token ids -> difference of the target's two best logits after them
Gap = Callable[[str, Sequence[int]], float]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table; rows of equal dtype and temperature are compared."""

    method: str
    dtype: str
    temperature: float
    config: dict | None

    @property
    def title(self) -> str:
        """The row in one line."""
        return f"{self.method}, {self.group}"

    @property
    def group(self) -> str:
        """The dtype and temperature, which a row shares with its baseline."""
        mode = f"T = {self.temperature:g}" if self.temperature else "greedy"
        return f"{self.dtype}, {mode}"


@dataclasses.dataclass
class Run:
    """The output of a setting, a function that repeats it, and the least seconds."""

    setting: Setting
    output: RequestOutput
    again: Callable[[], object]
    seconds: float = float("inf")

    @property
    def tokens(self) -> list[int]:
        """The generated ids."""
        return self.output.outputs[0].token_ids

    def time(self) -> None:
        """Generate again and keep the least time."""
        begin = perf_counter()
        self.again()
        self.seconds = min(self.seconds, perf_counter() - begin)


def _settings() -> Iterator[Setting]:
    """Yield each method, greedy and sampled, in both dtypes."""
    lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    for temperature, dtype in itertools.product((0.0, 0.8), DTYPES):
        yield Setting("autoregressive", dtype, temperature, None)
        ngram = {"method": "ngram", "num_speculative_tokens": 5} | lookup
        yield Setting("ngram", dtype, temperature, ngram)
        # float32 rows compare sampled texts, bfloat16 rows show speed.
        rule = "coupled" if dtype == "float32" else "block"
        for method in DRAFTERS:
            chain = {"method": method, "num_speculative_tokens": 4, "rejection_sample_method": rule}
            yield Setting(method, dtype, temperature, chain)


SETTINGS = tuple(_settings())
# The instruct model is shown if it is installed: a bfloat16 chat, greedy and sampled.
QUESTION = "Write a story about a lighthouse keeper who finds a letter in a bottle."
INSTRUCT_SETTINGS = tuple(
    Setting(method, "bfloat16", temperature, config and config | {"rejection_sample_method": rule})
    for temperature, rule in ((0.0, "standard"), (0.8, "block"))
    for method, config in (
        ("autoregressive", None),
        ("ngram", {"method": "ngram", "num_speculative_tokens": 4}),
        ("eagle3", installed.CHAT_CONFIG),
    )
)
# Greedy text of a small model repeats itself and is easy to look up; sampled text is not.
_SHOWN = ("ngram, float32, greedy", "draft_model, float32, T = 0.8")
_INSTRUCT_SHOWN = ("eagle3, bfloat16, greedy",)
_EMBEDDED_NOTE = (
    "Sampled rows except ngram\nuse the rule `coupled` in float32 (same text) and `block` in "
    "bfloat16 (same\ndistribution)."
)
_INSTRUCT_NOTE = "Sampled rows use\nthe rule `block` (same distribution)."


def run(assets: Path, max_tokens: int, repeats: int, console: Console) -> None:
    """Generate with every setting, time them in turns, and print texts and tables.

    Raises:
      ValueError: the assets are missing, or a number is out of range.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1.")
    SamplingParams(max_tokens=max_tokens)  # raises before weights are read
    programs.keep_compiled_programs()
    prompt = PROMPT.read_text(encoding="utf-8")
    with console.status("loading") as status:
        load = lambda name: {dtype: loading.load(assets / name, dtype) for dtype in DTYPES}
        targets, drafts = load("target"), load(DRAFTERS["draft_model"])
        settings = [_with_model(setting, assets, drafts) for setting in SETTINGS]
        compare = functools.partial(_compare, console, status, max_tokens, repeats)
        console.print(Text.assemble("The prompt and its continuation: ", show.legend(), "."))
        console.print(Padding(Text(prompt, style="dim"), (1, 0, 1, 2)))
        compare(targets, settings, prompt, _SHOWN, _EMBEDDED_NOTE)
        if (model := _instruct_model()) is None:
            return
        status.update("loading the instruct model")
        target = loading.load(model, "bfloat16")
        console.print(Padding(Text(f"{model.name} is installed. {QUESTION}"), (1, 0, 1, 0)))
        asked = [{"role": "user", "content": QUESTION}]
        prompt = rendered(target.tokenizer, asked, add_generation_prompt=True)
        compare({"bfloat16": target}, INSTRUCT_SETTINGS, prompt, _INSTRUCT_SHOWN, _INSTRUCT_NOTE)


def configs() -> list[dict[str, str]]:
    """Return a speculative_config of each drafter that jspec has the weights of."""
    return [{"method": name, "model": str(ASSETS / folder)} for name, folder in DRAFTERS.items()]


def _with_model(setting: Setting, assets: Path, drafts: dict[str, LoadedModel]) -> Setting:
    """Return the setting with the drafter of its method."""
    if setting.method not in DRAFTERS:
        return setting
    model = str(assets / DRAFTERS[setting.method])
    model = drafts[setting.dtype] if setting.method == "draft_model" else model
    return dataclasses.replace(setting, config=setting.config | {"model": model})


def _instruct_model() -> Path | None:
    """Return the instruct model; None unless it and the reader of its file are installed."""
    with contextlib.suppress(ValueError):
        return installed.chat_model() if importlib.util.find_spec("gguf") else None
    return None


def _compare(
    console: Console,
    status: Status,
    max_tokens: int,
    repeats: int,
    targets: dict[str, LoadedModel],
    settings: Sequence[Setting],
    prompt: str,
    shown: Collection[str],
    note: str,
) -> None:
    """Generate with every setting, time them in turns, and print texts and a table.

    Texts go on behind an end token, so that all have one length.
    """
    runs = []
    for setting in settings:
        status.update(f"compiling and generating: {setting.title}")
        runs.append(_first_run(setting, targets[setting.dtype], prompt, max_tokens))
        if setting.title in shown:
            _print_text(console, targets[setting.dtype].tokenizer, runs[-1])
    for turn in range(repeats):  # in turns, so that a busy moment affects every row
        for each in runs:
            status.update(f"timing, {turn + 1} of {repeats}: {each.setting.title}")
            each.time()
    console.print(table(runs, lambda dtype, ids: _gap(targets[dtype], ids)))
    console.print(_footnote(runs, repeats, note))


def _first_run(setting: Setting, target: LoadedModel, prompt: str, max_tokens: int) -> Run:
    llm = LLM(target, setting.config, per_request_stats="detailed")
    params = SamplingParams(
        temperature=setting.temperature, max_tokens=max_tokens, seed=1, ignore_eos=True
    )
    again = lambda: llm.generate(prompt, params)
    return Run(setting, again()[0], again)


def _print_text(console: Console, tokenizer: Any, done: Run) -> None:
    text = show.colored(tokenizer, done.output.prompt_token_ids, done.output.outputs[0])
    drafted = sum(show.drafted_tokens(done.tokens, done.output.speculative_decoding_stats))
    count = f"{drafted} of {len(done.tokens)} tokens were drafted and accepted"
    console.print(Text(f"{done.setting.title}: {count}", style="bold"))
    console.print(Padding(text, (1, 0, 1, 2)))


def table(runs: Sequence[Run], gap: Gap) -> Table:
    """Return a table with a row for each run and its speed-up over the baseline."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    result.add_column("method", no_wrap=True)
    for heading in ("acceptance\nlength", "accepted by\nposition, %", "tokens/s", "speed-up"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("text")
    for group, members in itertools.groupby(runs, key=lambda done: done.setting.group):
        base, *rest = members
        result.add_row(Text(group, style="bold"))
        for done in (base, *rest):
            result.add_row(
                f"  {done.setting.method}",
                *_acceptance(done),
                f"{len(done.tokens) / done.seconds:.0f}",
                f"{base.seconds / done.seconds:.2f}",
                Text("") if done is base else verdict(done, base, gap),
            )
        result.add_section()
    return result


def _acceptance(done: Run) -> tuple[str, str]:
    """Return tokens per target pass, and the acceptance rates by position."""
    counts = counts_of(done.output.speculative_decoding_stats, len(done.tokens))
    by_position = " ".join(f"{100 * rate:.0f}" for rate in counts.acceptance_per_pos)
    return f"{counts.tokens_per_pass:.2f}", by_position


def verdict(done: Run, base: Run, gap: Gap) -> Text:
    """Return the comparison with the baseline's text, token for token."""
    rule = (done.setting.config or {}).get("rejection_sample_method")
    if done.setting.temperature > 0 and rule == "block":  # it promises the distribution alone
        return Text("same probs")
    if done.tokens == base.tokens:
        return Text("identical", style="bold green")
    same = (a == b for a, b in zip(done.tokens, base.tokens, strict=True))
    index = sum(1 for _ in itertools.takewhile(bool, same))
    words = f"differs at token {index}"
    if done.setting.temperature == 0:
        ids = base.output.prompt_token_ids + base.tokens[:index]
        words += f", gap {gap(done.setting.dtype, ids):.2g}"
    return Text(words, style="bold red" if done.setting.dtype == "float32" else "yellow")


def _gap(target: LoadedModel, token_ids: Sequence[int]) -> float:
    """Return the difference of the target's two best logits after ``token_ids``."""
    second, first = np.sort(np.asarray(target.logits([token_ids])[0, -1]))[-2:]
    return float(first - second)


def _footnote(runs: Sequence[Run], repeats: int, note: str) -> Text:
    """Return the setup and the meaning of the columns; ``note`` says how rows sample."""
    first, sampled = runs[0], runs[-1]
    return Text(
        f"{len(first.tokens)} tokens after a prompt of {len(first.output.prompt_token_ids)}; "
        f"distinct: {len(set(first.tokens))} greedy, {len(set(sampled.tokens))} sampled.\n"
        f"Best of {repeats} runs, prefill included, on {jax.devices()[0].device_kind}. "
        "T: temperature.\n"
        "acceptance length: tokens per pass of the target, bonus included; 1 is no gain.\n"
        "text: compared with autoregression of the same dtype and T; gap: between the\n"
        f"target's two best logits where the texts differ. {note}",
        style="dim",
    )

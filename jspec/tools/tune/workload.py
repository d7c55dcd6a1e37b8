"""The prompts of one batch size."""

import dataclasses
from collections.abc import Sequence

from jspec.checkpoints import loading
from jspec.checkpoints.loading import LoadedModel
from jspec.core.types import Params, Shared
from jspec.engine.functional import Answer, Batch, generate_sharing, start
from jspec.engine.loop import init_shared
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.engine.sequences import SequenceParams
from jspec.tools.bench.contenders import Case, filled
from jspec.tools.bench.questions import Request

_PLAIN = Profile()
_SAMPLED_ANSWERS = 16  # at least: a single random answer must not decide


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts for at least one full group of a batch size."""

    case: Case  # the settings of the run
    # token ids; if there are too few, they repeat with other seeds
    prompts: tuple[tuple[int, ...], ...]
    stop_token_ids: tuple[int, ...]  # ids that end a text

    @property
    def requests(self) -> list[Request]:
        """The prompts for ``jspec.tools.bench.contenders.Ours``."""
        return [Request("all", prompt) for prompt in self.prompts]

    def rows(self, texts: Sequence[Sequence[int]] | None = None) -> list[SequenceParams]:
        """Return the sequences as ``LLM`` builds them, with ``texts`` appended to the prompts."""
        texts = texts or [()] * len(self.prompts)
        return [
            SequenceParams(
                (*prompt, *map(int, text)),
                self.case.max_tokens - len(text),
                temperature=self.case.temperature,
                stop_token_ids=self.stop_token_ids,
                seed=self.case.seed + index,
            )
            for index, (prompt, text) in enumerate(zip(self.prompts, texts, strict=True))
        ]

    @property
    def groups(self) -> list[list[int]]:
        """Indices of the prompts that may run together, in order; the last group may be smaller."""
        size, indices = self.case.batch_size, list(range(len(self.prompts)))
        return [indices[first : first + size] for first in range(0, len(indices), size)]

    @property
    def middle(self) -> list[int]:
        """The full group whose prompts are nearest to the mean length."""
        mean = sum(map(len, self.prompts)) / len(self.prompts)
        length = lambda group: sum(len(self.prompts[index]) for index in group) / len(group)
        full = [group for group in self.groups if len(group) == self.case.batch_size]
        return min(full, key=lambda group: abs(length(group) - mean))

    def batch(self, plan: Plan, params: Params, texts: Sequence, shared: Shared) -> Batch:
        """Prefill the middle group with the first half of its ``texts``."""
        rows = self.rows([text[: len(text) // 2] for text in texts])
        group, profile = [rows[index] for index in self.middle], Profile().grown(rows)
        return start(plan, params, group, profile=profile).replace(shared=shared)

    def generate(
        self, plan: Plan, params: Params, profile: Profile = _PLAIN
    ) -> tuple[list[Answer], Shared]:
        """Return the answer to every prompt, and the drafter's shared state after all of them."""
        options = {"max_num_seqs": self.case.batch_size, "profile": profile}
        return generate_sharing(plan, params, self.rows(), init_shared(plan), **options)


def workload(
    case: Case, requests: Sequence[Request], target: LoadedModel, least: int = 0
) -> Workload:
    """Repeat prompts until there are ``least``, and a full group."""
    least = max(least, _SAMPLED_ANSWERS if case.temperature else 0)
    prompts = (request.token_ids for request in filled(requests, case.batch_size, least))
    return Workload(case, tuple(prompts), loading.text_ends(target))

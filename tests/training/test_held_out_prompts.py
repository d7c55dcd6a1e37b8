"""Prompts on which acceptance is measured during training."""

import numpy as np
import pytest

from training.data.batch import Batch
from training.tasks.acceptance import held_out_prompts


def window(question, answer, padding=2):
    """Return a row of ids from 1 on; the answer's are labels."""
    length = question + answer
    row = np.repeat([1, 0], [length, padding]).astype(np.int32)
    weights = np.concatenate([np.zeros(question), np.ones(answer), np.zeros(padding)])
    return Batch(np.arange(1, length + padding + 1), row, weights.astype(np.float32))


@pytest.mark.parametrize(
    ("question", "length", "prompt"),
    [(6, 8, (1, 2, 3, 4, 5, 6)), (6, 6, (1, 2, 3, 4, 5, 6)), (6, 3, (1, 5, 6)), (6, 1, (6,))],
)
def test_a_prompt_ends_where_the_answer_begins_however_long_the_question(question, length, prompt):
    assert held_out_prompts([window(question, 5)], 1, length) == [prompt]


def test_a_text_is_continued_from_its_beginning():
    assert held_out_prompts([window(0, 9)], 1, 4) == [(1, 2, 3, 4)]
    assert held_out_prompts([window(1, 2)], 1, 4) == [(1, 2, 3)]

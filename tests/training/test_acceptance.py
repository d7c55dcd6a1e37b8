"""Acceptance during training, measured on texts as they are served."""

import numpy as np

import jspec
from tests import tiny
from training.data.batch import Batch
from training.tasks.acceptance import AcceptanceSettings, acceptance_meter, held_out_prompts

SETTINGS = AcceptanceSettings(acceptance_prompts=4, max_new_tokens=24, temperatures=(0.0,))


def windows():
    rng = np.random.default_rng(0)
    ones = np.ones(9, np.int32)
    return [
        Batch(rng.integers(0, tiny.VOCAB, 9).astype(np.int32), ones, ones * 1.0) for _ in range(4)
    ]


def test_texts_end_where_the_target_ends_them():
    rows, params = windows(), tiny.params()
    prompts = held_out_prompts(rows, 4, SETTINGS.prompt_tokens)
    served = lambda **stops: jspec.generate(
        tiny.TARGET,
        params.target,
        prompts,
        drafter=tiny.DRAFT,
        drafter_params=params.drafter,
        max_new_tokens=24,
        **stops,
    )
    whole = served()
    stop = int(whole[0].tokens[5])  # other texts may continue without it
    ended = served(stop_token_ids=(stop,))
    assert len(ended[0].tokens) <= 6 < max(len(answer.tokens) for answer in ended)
    for stops, answers in (((), whole), ((stop,), ended)):
        measure = acceptance_meter(SETTINGS, tiny.TARGET, tiny.DRAFT, rows, stops)
        lengths = [len(answer.tokens) for answer in answers]
        rounds = sum(answer.rounds for answer in answers)
        assert measure(params.target, params.drafter) == {
            "acceptance_length": round(sum(lengths) / rounds, 4),
            "distinct_tokens": round(np.mean([len({*a.tokens.tolist()}) for a in answers]), 1),
            "text_tokens": round(sum(lengths) / len(lengths), 1),
        }

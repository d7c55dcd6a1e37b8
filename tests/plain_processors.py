"""Logits processors in plain NumPy, and a small tokenizer."""

import dataclasses
import types

import numpy as np


@dataclasses.dataclass(frozen=True)
class Spelling:
    """The part of a tokenizer that grammars need: token i is ``texts[i]``, token 0 is special."""

    texts: tuple[str, ...]
    all_special_ids = (0,)
    added_tokens_decoder = types.MappingProxyType({})

    def get_vocab(self):
        return {text: id for id, text in enumerate(self.texts)}


def plainly(sequence, logits, text, processors=None):
    """Return a sequence's processed logits [V] after ``text``, prompt included, in float64.

    ``processors`` maps each function of the sequence to (text, token) -> number to add.
    """
    logits, answer = np.array(logits, np.float64), list(text[len(sequence.prompt) :])
    for token in range(len(logits)):
        if sequence.allowed_token_ids and token not in sequence.allowed_token_ids:
            logits[token] = -np.inf
    for *before, last in sequence.bad_words:
        if answer[max(len(answer) - len(before), 0) :] == before:
            logits[last] = -np.inf
    if len(answer) < sequence.min_tokens:
        logits[[*sequence.stop_token_ids, *sequence.late_token_ids]] = -np.inf
    for token, bias in sequence.logit_bias:
        logits[token] += bias
    for token in set(text):
        logits[token] *= (
            1 / sequence.repetition_penalty if logits[token] > 0 else sequence.repetition_penalty
        )
    for token in set(answer):
        logits[token] -= (
            sequence.frequency_penalty * answer.count(token) + sequence.presence_penalty
        )
    for function in sequence.logits_processors:
        logits += [processors[function](text, token) for token in range(len(logits))]
    return logits

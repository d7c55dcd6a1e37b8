"""What settings of a ``Row`` say of its logits, one after the other, in numpy; and small words."""

import dataclasses
import types

import numpy as np


@dataclasses.dataclass(frozen=True)
class Spelling:
    """As much of a tokenizer as grammars need: token i writes ``texts[i]``, token 0 nothing."""

    texts: tuple[str, ...]
    all_special_ids = (0,)
    added_tokens_decoder = types.MappingProxyType({})

    def get_vocab(self):
        return {text: id for id, text in enumerate(self.texts)}


def plainly(row, logits, text, processors=None):
    """One row's logits [V] after ``text``, prompt included, in float64.

    ``processors`` gives for each of the row's functions what it adds: (text, token) -> number.
    """
    logits, said = np.array(logits, np.float64), list(text[len(row.prompt) :])
    for token in range(len(logits)):
        if row.allowed_token_ids and token not in row.allowed_token_ids:
            logits[token] = -np.inf
    for *before, last in row.bad_words:
        if said[max(len(said) - len(before), 0) :] == before:
            logits[last] = -np.inf
    if len(said) < row.min_tokens:
        logits[[*row.stop_token_ids, *row.late_token_ids]] = -np.inf
    for token, bias in row.logit_bias:
        logits[token] += bias
    for token in set(text):
        logits[token] *= 1 / row.repetition_penalty if logits[token] > 0 else row.repetition_penalty
    for token in set(said):
        logits[token] -= row.frequency_penalty * said.count(token) + row.presence_penalty
    for function in row.logits_processors:
        logits += [processors[function](text, token) for token in range(len(logits))]
    return logits

"""Texts of quantised checkpoints on one device and on two; prints JSON. Four refuse the last one.

test_quantised_formats.py runs it where one CPU simulates eight devices.
"""

import json
import sys

import jax

import jspec
from jspec.core.weights import size_of

PARAMS = jspec.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5, 6, 7]]


def llm(directory, size, quantization=None):
    return jspec.LLM(
        directory,
        {"method": "ngram", "num_speculative_tokens": 3},
        tensor_parallel_size=size,
        quantization=quantization,
        max_num_seqs=2,
        max_model_len=64,
        block_size=16,
        num_gpu_blocks_override=8,
    )


def texts_and_bytes(directory, size, quantization):
    model = llm(directory, size, quantization)
    answers = model.generate(PROMPTS, PARAMS)
    parts = [
        jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)
        for x in jax.tree.leaves(model.build.params.target.layers)
    ]
    return [each.outputs[0].token_ids for each in answers], sum(map(size_of, parts))


def main():
    *directories, refused, floats = sys.argv[1:]
    result = []
    for directory, quantization in [*((each, None) for each in directories), (floats, "int4")]:
        one, two = (texts_and_bytes(directory, size, quantization) for size in (1, 2))
        result.append([one[0] == two[0], two[1] / one[1]])
    try:
        llm(refused, 4)
    except ValueError as error:
        result.append(str(error))
    print(json.dumps(result))


if __name__ == "__main__":
    main()

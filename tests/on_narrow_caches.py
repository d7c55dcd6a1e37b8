"""Texts over caches in fp8 and int8 of one device and of two; prints one JSON a case.

tests/engine/test_narrow_caches.py runs this in a process where one CPU simulates eight devices.
"""

import json

import jspec
from tests import on_a_mesh

CASES = [("fp8", "eagle3", "int8"), ("int8", "eagle3 split", "fp8")]


def texts(size: int, dtype: str, method: str, draft_dtype: str) -> list[list[int]]:
    """Return the tokens of greedy and of drawn texts of ``size`` devices; "none" has no drafter."""
    config = on_a_mesh.config(method, size)
    llm = jspec.LLM(
        on_a_mesh.target("standard"),
        config and config | {"kv_cache_dtype": draft_dtype, "rejection_sample_method": "coupled"},
        max_num_seqs=2,
        max_model_len=64,
        block_size=8,
        kv_cache_dtype=dtype,
        tensor_parallel_size=size,
    )
    common = {"max_tokens": 20, "detokenize": False, "ignore_eos": True}
    settings = [
        jspec.SamplingParams(temperature=0, **common),
        jspec.SamplingParams(temperature=0.8, top_p=0.95, seed=3, **common),
    ]
    outputs = llm.generate([{"prompt_token_ids": list(range(3, 14))}] * 2, settings)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main():
    for dtype, method, draft_dtype in CASES:
        plain = texts(1, dtype, "none", draft_dtype)
        several = texts(2, dtype, method, draft_dtype)
        print(json.dumps({"case": [dtype, method], "plain": plain, "several": several}))


if __name__ == "__main__":
    main()

"""Compare greedy tokens of tiny GGUF files with llama.cpp, which another environment has.

    python -m tests.families.with_llamacpp PYTHON FOLDER [CASE ...]

PYTHON has the package xllamacpp. Files and tokens go into FOLDER. By default all cases run.
llama.cpp has other tokens for six of them. For four a case without the feature agrees: the windows
of Phi-3 and EXAONE 4, YaRN in gpt-oss, and the groups of experts of DeepSeek-V2. No such pair
explains Phi-3's LongRoPE and PhiMoE.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

PROMPT_LENGTHS = (5, 17)
NEW_TOKENS = 16


def ours(name: str, folder: Path) -> None:
    """Write the file of a case, and prompts with greedy tokens and their log probs."""
    import numpy as np

    import jspec
    from tests.families import gguf_writing, test_gguf

    gguf_writing.write(folder / "model.gguf", *test_gguf.checkpoint_of(name, folder / "saved"))
    model, rows = jspec.load(folder / "model.gguf"), []
    for length in PROMPT_LENGTHS:
        tokens = np.random.default_rng(1).integers(5, 128, length).tolist()
        best = []
        for position in range(length, length + NEW_TOKENS):
            padded = np.pad(tokens, (0, max(PROMPT_LENGTHS) + NEW_TOKENS - position))
            logits = np.asarray(model.logits(padded[None]))[0, position - 1].astype(float)
            tokens.append(int(logits.argmax()))
            best.append(float(-np.log(np.exp(logits - logits.max()).sum())))
        rows.append({"prompt": tokens[:length], "tokens": tokens[length:], "log_probs": best})
    (folder / "tokens.json").write_text(json.dumps(rows))


def theirs(folder: Path) -> None:
    """Print whether llama.cpp has the same tokens, and the largest difference of log probs."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx = str(folder / "model.gguf"), 1, 64
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_gpu_layers = params.port = params.cache_ram_mib = 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    disabled = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.flash_attn_type, params.warmup = disabled, False
    server = xllamacpp.Server(params)
    asked = {"max_tokens": NEW_TOKENS, "temperature": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    asked |= {"repeat_penalty": 1.0, "return_tokens": True, "verbose": True, "logprobs": 1}
    for row in json.loads((folder / "tokens.json").read_text()):
        answer = server.handle_completions(asked | {"prompt": row["prompt"]})
        tokens = answer["__verbose"]["tokens"]  # It ends at its end-of-text token.
        log_probs = [each["logprob"] for each in answer["choices"][0]["logprobs"]["content"]]
        worst = max(abs(x - y) for x, y in zip(log_probs, row["log_probs"], strict=False))
        is_equal = tokens == row["tokens"][: len(tokens)]
        print(f"{folder.name}: {len(tokens)} tokens, equal {is_equal}, {worst:.1e}", flush=True)
    os._exit(0)  # Its server would wait for requests.


def main() -> None:
    """Run both sides, the other one in an environment of its own."""
    if sys.argv[1] == "--theirs":
        return theirs(Path(sys.argv[2]))
    from tests.families import gguf_cases

    for name in sys.argv[3:] or gguf_cases.CASES:
        folder = Path(sys.argv[2]) / name.replace(", ", "-").replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        ours(name, folder)
        result = subprocess.run(
            [sys.argv[1], __file__, "--theirs", str(folder)], stdout=-1, stderr=-1, text=True
        )
        failed = [line for line in result.stderr.splitlines() if "error loading model:" in line]
        print(
            result.stdout or f"{name}: {failed[:1]}", end="" if result.stdout else "\n", flush=True
        )
    return None


if __name__ == "__main__":
    main()

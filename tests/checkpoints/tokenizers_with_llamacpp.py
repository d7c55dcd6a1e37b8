"""Compare tokenizers of GGUF files with llama.cpp, which another environment has.

    python -m tests.checkpoints.tokenizers_with_llamacpp PYTHON [FILE ...]

PYTHON has the package xllamacpp. Without a FILE, tiny models get a small vocabulary and every kind
of split. A line counts the texts that have llama.cpp's tokens, and shows a difference.

llama.cpp does not compose characters (``qwen35``), does not split numbers into digits
(``deepseek-llm``, whose vocabulary has no numbers), and takes upper and lower case for one class of
letters in ``tiny_aya``. The patterns here are those of the models' own tokenizer.json.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRAINING = [path.read_text() for path in sorted(Path(__file__).parents[2].glob("docs/*.md"))[:8]]
TEXTS = [
    *(
        "Hello world",
        "  two  spaces and\ttabs\n\nlines\r\n",
        "def f(x):\n    return x[0] + 12345\n",
    ),
    *(
        "naïve café “quotes” …",
        "日本語のテキスト",
        "Привет, мир!",
        "🙂👍🏽 a\u0301",
        "I'm WE'VE don't",
    ),
    *("", " ", "3.14159 and 1e-5", "<|im_start|>user\nHi<|im_end|>", "a" * 60, "x\u200bz"),
]
WIDTH = 32
_ENDS = ["<s>", "</s>", "<|end|>"]


def theirs(path: str) -> None:
    """Read texts as JSON from stdin, and print llama.cpp's tokens of each."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx, params.warmup = path, 1, 64, False
    params.n_gpu_layers = params.port = params.cache_ram_mib = 0
    server = xllamacpp.Server(params)
    for text in json.load(sys.stdin):
        asked = json.dumps({"content": text, "add_special": False, "parse_special": True})
        request = urllib.request.Request(f"{server.listening_address}/tokenize", asked.encode())
        with urllib.request.urlopen(request) as answer:
            print(json.dumps(json.load(answer)["tokens"]), flush=True)
    os._exit(0)  # Its server would wait for requests.


def texts() -> list[str]:
    """Return short texts of many scripts, and the paragraphs of some pages and modules."""
    code = Path(__file__).read_text()
    return [*filter(None, TEXTS), *"\n\n".join([*TRAINING[:3], code]).split("\n\n")]


def byte_level() -> dict[str, Any]:
    """Return a vocabulary of bytes and their merges."""
    import tokenizers

    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(texts(), 2000, show_progress=False, special_tokens=_ENDS)
    return _vocabulary(trained) | {"model": "gpt2"}


def spaced() -> dict[str, Any]:
    """Return a vocabulary of characters and bytes, and merges of whole texts, as Gemma 4 has."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    # Like Gemma's, no token has a newline beside other characters.
    splits = [pre_tokenizers.Split("▁", "merged_with_next"), pre_tokenizers.Split("\n", "isolated")]
    trained.pre_tokenizer = pre_tokenizers.Sequence(splits)
    named = [*_ENDS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(texts()[14:], trainers.BpeTrainer(special_tokens=named))
    kinds = [3] * len(_ENDS) + [2] + [6] * 256
    vocabulary = _vocabulary(trained)
    kinds += [1] * (len(vocabulary["tokens"]) - len(kinds))
    return vocabulary | {"model": "gemma4", "token_type": kinds, "unknown_token_id": 3}


def _vocabulary(trained: Any) -> dict[str, Any]:
    table = trained.get_vocab()
    merges = json.loads(trained.to_str())["model"]["merges"]
    return {
        "tokens": sorted(table, key=table.get),
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in merges],
        "token_type": [3] * len(_ENDS) + [1] * (len(table) - len(_ENDS)),
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def write(path: Path, metadata: dict[str, Any]) -> None:
    """Write a model of one narrow layer with a tokenizer."""
    import gguf
    import numpy as np

    writer, count = gguf.GGUFWriter(path, "llama"), len(metadata["tokens"])
    for key, value in (
        *(("block_count", 1), ("embedding_length", WIDTH), ("feed_forward_length", WIDTH)),
        *(("head_count", 1), ("context_length", 4096), ("layer_norm_rms_eps", 1e-5)),
    ):
        getattr(writer, f"add_{key}")(value)
    for key, value in metadata.items():
        add = writer.add_array if isinstance(value, list) else writer.add_key_value
        kinds = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32}
        add(
            f"tokenizer.ggml.{key}",
            value,
            *([] if isinstance(value, list) else [kinds[type(value)]]),
        )
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    square = np.zeros((WIDTH, WIDTH), np.float32)
    for name in names:
        writer.add_tensor(f"blk.0.{name}.weight", square)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", square[0])
    writer.add_tensor("token_embd.weight", np.zeros((count, WIDTH), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def files(folder: Path) -> Iterator[Path]:
    """Write and yield tiny models with every kind of split."""

    from jspec.checkpoints.gguf_tokenizer import SPLITS

    shared = byte_level()
    for pre in SPLITS:
        write(folder / f"{pre}.gguf", shared | {"pre": pre})
        yield folder / f"{pre}.gguf"
    write(folder / "gemma4.gguf", spaced())
    yield folder / "gemma4.gguf"


def compare(python: str, path: Path) -> str:
    """Return a line on a file's tokens of all texts."""
    from jspec.checkpoints import gguf_files, gguf_tokenizer

    tokenizer, asked = gguf_tokenizer.read(gguf_files.open_file(path)), texts()
    result = subprocess.run(
        [python, __file__, "--theirs", str(path)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
    )
    answered = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    if len(answered) < len(asked):
        return f"{path.stem}: failed ({result.stderr.splitlines()[-1:]})"
    differ = []
    for text, ids in zip(asked, answered, strict=True):
        own = tokenizer(text, add_special_tokens=False).input_ids
        begin = next((i for i, (a, b) in enumerate(zip(own, ids, strict=False)) if a != b), 0)
        differ += [] if own == ids else [tokenizer.decode(own[begin:])[:20]]
    shown = f", first at {differ[0]!r}" if differ else ""
    return f"{path.stem}: {len(asked) - len(differ)} of {len(asked)} equal{shown}"


def main() -> None:
    """Compare the files given, or tiny ones."""
    if sys.argv[1] == "--theirs":
        return theirs(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        for path in map(Path, sys.argv[2:]) if sys.argv[2:] else files(Path(folder)):
            print(compare(sys.argv[1], path), flush=True)
    return None


if __name__ == "__main__":
    main()

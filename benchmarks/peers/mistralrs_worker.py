"""mistral.rs on a CPU as a peer: plain decoding alone.

    python benchmarks/peers/mistralrs_worker.py --model GGUF_OR_DIR [--threads 2]

Its Python package (0.9.5) drafts with MTP assistants only, which SmolLM2 lacks. The protocol is
that of ``jspec.tools.bench.peer_transformers``, with these limits: prompts and answers go through
the tokenizer, because requests are texts. A prompt that does not survive it is refused. Of an
answer, -1 stands for a token that the text does not show, such as the stop token. It takes its own
dtype: in bfloat16 a token of a GGUF model takes twenty times as long on a CPU. Sampled texts differ
from call to call.
"""

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

_ROOT = str(Path(__file__).resolve().parents[2])
_HIDDEN = -1


class Worker:
    """A ``Runner`` of mistral.rs."""

    def __init__(self, model: Path, threads: int, batch_size: int):
        os.environ |= {"RAYON_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        import mistralrs

        self.mistralrs, self.threads, self.batch_size = mistralrs, threads, batch_size
        if model.is_file():
            which = mistralrs.Which.GGUF(str(model.parent), model.name)
        else:
            which = mistralrs.Which.Plain(str(model))
        self.runner = mistralrs.Runner(which, max_seqs=batch_size, prefix_cache_n=0)

    def info(self) -> dict[str, Any]:
        """Return versions and threads."""
        return {"mistralrs": metadata.version("mistralrs"), "threads": self.threads}

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Time the completion of all prompts, as many at once as were asked for."""
        prompts = [self._text(ids) for ids in request["prompts"]]
        asked = [
            self.mistralrs.CompletionRequest(
                prompt=prompt,
                model="default",
                max_tokens=request["max_new_tokens"],
                temperature=request["temperature"],
            )
            for prompt in prompts
        ]
        with ThreadPoolExecutor(self.batch_size) as pool:
            begin, cpu = time.perf_counter(), time.process_time()
            answers = list(pool.map(self.runner.send_completion_request, asked))
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        tokens = [self._tokens(answer) for answer in answers]
        return {"tokens": tokens, "seconds": seconds, "cpu_seconds": cpu, "passes": None}

    def _text(self, ids: list[int]) -> str:
        text = self.runner.detokenize_text(ids, False)
        if self.runner.tokenize_text(text, False, None) != ids:
            raise ValueError(f"the prompt {text[:40]!r} has other tokens as a text")
        return text

    def _tokens(self, answer: Any) -> list[int]:
        """Return the ids of an answer's text, as many as were generated."""
        count = answer.usage.completion_tokens
        ids = self.runner.tokenize_text(answer.choices[0].text, False, None)[:count]
        return ids + [_HIDDEN] * (count - len(ids))


def main() -> None:
    """Load the model and serve requests until stdin ends."""
    parser = argparse.ArgumentParser(description="mistral.rs behind a pipe")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=1)
    arguments = parser.parse_args()
    sys.path.insert(0, _ROOT)  # this environment has no jspec; ``serve`` removes it again
    from jspec.tools.bench import peer_transformers

    peer_transformers.serve(
        lambda: Worker(arguments.model, arguments.threads, arguments.batch_size)
    )


if __name__ == "__main__":
    main()

"""A peer that needs no packages: it answers every prompt with one token, or fails as its mode says.

Its modes: ``plain``, ``ngram`` (counts a pass for two tokens), ``absent`` (cannot start),
``mortal`` (ends during the race). A token takes 2 ms with one thread and 1 ms with two.
"""

import json
import sys

TOKEN = 7
_CALLS_BEFORE_THE_RACE = 6  # two trials and counting, for two tasks each


def main() -> None:
    """Speak the protocol of ``jspec.tools.bench.peer_transformers``."""
    mode, threads = sys.argv[1], int(sys.argv[2])
    if mode == "absent":
        print(json.dumps({"ok": False, "error": "ImportError: no such package"}), flush=True)
        return
    print(json.dumps({"ok": True, "fake": "1", "threads": threads}), flush=True)
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        if mode == "mortal" and number >= _CALLS_BEFORE_THE_RACE:
            sys.exit(3)
        tokens = [[TOKEN] * request["max_new_tokens"] for _ in request["prompts"]]
        count = sum(map(len, tokens))
        seconds = count * 2e-3 / threads
        passes = count // 2 if request.get("count_passes") else None
        reply = {"tokens": tokens, "seconds": seconds, "cpu_seconds": 0.0, "passes": passes}
        print(json.dumps({"ok": True, **reply}), flush=True)


if __name__ == "__main__":
    main()

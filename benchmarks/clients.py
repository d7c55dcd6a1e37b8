"""Programs of others against a server of ours: each must do its work, and see what we see.

    make clients
    python -m benchmarks.clients CLIENT=PYTHON ...

PYTHON is the interpreter of an environment that has the client. ``jspec serve`` runs on loopback
over the embedded model in float32, with drafts of ``ngram`` and a plain chat template. Expected
texts and scores come from ``jspec.LLM``, before the server starts.
"""

import argparse
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

import jspec
from benchmarks import serve_load, vllm_answers
from jspec.checkpoints import installed

_TARGET = installed.EMBEDDED / "demo" / "target"
_VLLM = Path(__file__).with_name("peers") / "vllm_command.py"
_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
_QUESTIONS = ("def add", "import os", "class Tree", "for i in range", "x", "def main", "return")
_CHOICES = ("():", " = 1", ".py", " import")
_SECONDS = 600  # time limit of a client


class Model:
    """The answers that the server must give, by ``LLM``."""

    def __init__(self):
        self._llm = jspec.LLM(str(_TARGET), dtype="float32", max_num_seqs=4, max_model_len=512)
        self._greedy = jspec.SamplingParams(temperature=0, max_tokens=16, stop=["\n"])

    def texts(self, prompts: Sequence[str]) -> list[str]:
        """Return greedy lines of up to 16 tokens."""
        return [each.outputs[0].text for each in self._llm.generate(prompts, self._greedy)]

    def likeliest(self, prompt: str) -> int:
        """Return the index of the choice that is likeliest after ``prompt``."""
        count = len(self._llm.get_tokenizer().encode(prompt))
        params = jspec.SamplingParams(max_tokens=1, prompt_logprobs=0)
        outputs = self._llm.generate([prompt + choice for choice in _CHOICES], params)
        scores = []
        for output in outputs:
            pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            scores.append(sum(known[token].logprob for token, known in list(pairs)[count:]))
        return scores.index(max(scores))


class Run:
    """A client's environment, and the server that it talks to."""

    def __init__(self, python: str, url: str, model: Model, folder: Path):
        self.python, self.url, self.model, self.folder = python, url, model, folder

    def call(self, program: str, *words: str) -> str:
        """Run a program of the environment, in the folder; return what it printed."""
        ran = subprocess.run(
            [str(Path(self.python).parent / program), *words],
            cwd=self.folder,
            env=os.environ | {"OPENAI_API_KEY": "-"},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        if ran.returncode:
            message = (ran.stderr.strip() or ran.stdout.strip())[-800:]
            raise RuntimeError(f"{program} ended with {ran.returncode}: ...{message}")
        return ran.stdout

    def metrics(self) -> dict[str, float]:
        """Return the server's counters."""
        text = httpx.get(f"{self.url}/metrics").text
        families = text_string_to_metric_families(text)
        return {s.name: s.value for family in families for s in family.samples}


def langchain(run: Run) -> str:
    """Compare texts of completions, chats and streams; parse a structured answer."""
    code = f"""
import json
from langchain_openai import ChatOpenAI, OpenAI
at = dict(base_url="{run.url}/v1", model="demo", temperature=0, max_tokens=16, stop=["\\n"])
prompt, schema = "def add", dict(title="answer", type="object", required=["kind"],
    properties=dict(kind=dict(enum=["sum", "product"])))
whole = ChatOpenAI(**at | dict(max_tokens=200, stop=None))
print(json.dumps([
    OpenAI(**at).invoke(prompt),
    "".join(OpenAI(**at).stream(prompt)),
    ChatOpenAI(**at).invoke(prompt).content,
    "".join(piece.content for piece in ChatOpenAI(**at).stream(prompt)),
    whole.with_structured_output(schema, method="json_schema").invoke(prompt),
]))
"""
    plain, streamed, chat, streamed_chat, structured = json.loads(run.call("python", "-c", code))
    expected = run.model.texts(["def add", "def add\n"])
    _check([plain, streamed] == [expected[0]] * 2, f"{plain!r}, {streamed!r}, not {expected[0]!r}")
    _check([chat, streamed_chat] == [expected[1]] * 2, f"{chat!r}, not {expected[1]!r}")
    is_valid = structured.get("kind") in ("sum", "product")
    _check(is_valid, f"the answer {structured} has another schema")
    return "texts and streams of completions and chats equal LLM's; a structured answer parses"


def lm_eval(run: Run) -> str:
    """Compare the scores of three small tasks with those of ``LLM``."""
    columns = {
        "q": _QUESTIONS,
        "text": run.model.texts(_QUESTIONS),
        "chat": run.model.texts([f"{each}\n" for each in _QUESTIONS]),
        "best": [run.model.likeliest(each) for each in _QUESTIONS],
    }
    docs = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    lines = "".join(json.dumps(doc) + "\n" for doc in docs)
    (run.folder / "docs.jsonl").write_text(lines)
    generation = {
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    choice = {"output_type": "multiple_choice", "metric_list": [{"metric": "acc"}]}
    choice |= {"doc_to_choice": list(_CHOICES)}
    tasks = {
        "choices": ("local-completions", "best", choice),
        "lines": ("local-completions", "text", generation),
        "answers": ("local-chat-completions", "chat", generation),
    }
    for name, (api, column, form) in tasks.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(run.folder / "docs.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{q}}",
            "target_delimiter": "",
            "doc_to_target": f"{{{{{column}}}}}",
        }
        (run.folder / f"{name}.yaml").write_text(json.dumps(task | form))  # JSON is YAML
        score = _lm_eval_score(run, name, api)
        _check(score == 1, f"the task {name} has the score {score}, not 1")
    return f"{len(tasks)} tasks (likelihoods, completions, chats) have LLM's answers, score 1.0"


def _lm_eval_score(run: Run, task: str, api: str) -> float:
    is_chat = "chat" in api
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    options = f"model=demo,base_url={run.url}{path},num_concurrent=2"
    if not is_chat:
        options += f",tokenizer={_TARGET.resolve()},tokenized_requests=True"
    words = ["run", "--model", api, "--model_args", options, "--tasks", task]
    words += ["--include_path", ".", "--output_path", f"out_{task}"]
    run.call("lm_eval", *words, *(["--apply_chat_template"] if is_chat else []))
    (results,) = (run.folder / f"out_{task}").rglob("results_*.json")
    scores = json.loads(results.read_text())["results"][task]
    return next(value for key, value in scores.items() if re.match("(acc|exact_match),", key))


def aiperf(run: Run) -> str:
    """Run its load; there must be no error."""
    words = ["profile", "--model", "demo", "--url", run.url, "--endpoint-type", "completions"]
    words += ["--streaming", "--concurrency", "4", "--tokenizer", str(_TARGET.resolve())]
    words += ["--request-count", "24", "--synthetic-input-tokens-mean", "40"]
    words += ["--output-tokens-mean", "24", "--ui", "none", "--output-artifact-dir", "aiperf"]
    run.call("aiperf", *words)
    (report,) = (run.folder / "aiperf").rglob("profile_export_aiperf.json")
    result = json.loads(report.read_text())
    count = result["request_count"]["avg"]
    _check(count == 24, f"{count} of 24 requests succeeded")
    return f"24 of 24 requests, {result['output_token_throughput']['avg']:.0f} tokens/s"


def guidellm(run: Run) -> str:
    """Run its load of completions; there must be no error."""
    backend = f"kind=openai_http,target={run.url},model=demo,request_format=/v1/completions"
    words = ["run", "--backend", backend, "--profile", "kind=concurrent,streams=4"]
    words += ["--constraint", "kind=max_requests,count=16", "--disable-console"]
    words += ["--tokenizer", f"kind=hf_auto,model={_TARGET.resolve()}"]
    words += ["--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=24"]
    words += ["--output", "kind=json,path=guidellm.json"]
    run.call("guidellm", *words)
    (benchmark,) = json.loads((run.folder / "guidellm.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    counts = totals["successful"], totals["errored"]
    _check(counts == (16, 0), f"{counts[0]} requests succeeded and {counts[1]} failed")
    return "16 of 16 requests"


def vllm(run: Run) -> str:
    """Run ``vllm bench serve``; its report of drafts must be that of our counters."""
    words = [str(_VLLM), "bench", "serve", "--backend", "openai", "--base-url", run.url]
    words += ["--model", "demo", "--tokenizer", str(_TARGET.resolve()), "--temperature", "0"]
    words += ["--dataset-name", "random", "--num-prompts", "16", "--max-concurrency", "4"]
    words += ["--random-input-len", "40", "--random-output-len", "96"]
    before = run.metrics()
    printed = run.call("python", *words)
    grown = {name: value - before.get(name, 0) for name, value in run.metrics().items()}
    drafts = grown["vllm:spec_decode_num_drafts_total"]
    accepted = grown["vllm:spec_decode_num_accepted_tokens_total"]
    pairs = re.findall(r"(Acceptance length|Failed requests|Successful requests):\s+(\S+)", printed)
    report = {name: float(value) for name, value in pairs}
    _check(report["Successful requests"] == 16, f"it reports {report}")
    length = 1 + accepted / drafts
    is_ours = math.isclose(report["Acceptance length"], length, abs_tol=0.02)
    _check(is_ours, f"it reports {report}, and our counters the acceptance length {length:.3f}")
    return f"16 of 16 requests, acceptance length {report['Acceptance length']} as in /metrics"


def answers(run: Run) -> str:
    """Compare the answers of our server and of vLLM's, field by field."""
    return vllm_answers.compare(run.python, run.folder)


CLIENTS: dict[str, Callable[[Run], str]] = {
    "langchain": langchain,
    "lm_eval": lm_eval,
    "aiperf": aiperf,
    "guidellm": guidellm,
    "vllm": vllm,
    "answers": answers,
}


def _check(holds: bool, reason: str) -> None:
    if not holds:
        raise RuntimeError(reason)


def main() -> None:
    """Run the clients; exit with 1 if one of them failed."""
    parser = argparse.ArgumentParser(description="programs of others against a server of ours")
    parser.add_argument("clients", nargs="+", metavar="CLIENT=PYTHON", help=", ".join(CLIENTS))
    given = dict(each.partition("=")[::2] for each in parser.parse_args().clients)
    if unknown := given.keys() - CLIENTS.keys():
        parser.error(f"unknown clients {sorted(unknown)}; choose from {', '.join(CLIENTS)}.")
    model, failed = Model(), []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        template = Path(folder, "template.jinja")
        template.write_text(_TEMPLATE)
        served = serve_load.server(
            str(_TARGET), 4, "--served-model-name", "demo", "--chat-template", str(template)
        )
        url, _ = stack.enter_context(served)
        for name, python in given.items():
            directory = Path(folder, name)
            directory.mkdir()
            try:
                run = Run(os.path.abspath(python), url, model, directory)
                print(f"{name}: {CLIENTS[name](run)}")
            except Exception as error:
                failed.append(name)
                print(f"{name} FAILED: {error}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

"""Two replicas of a model behind one address, by Ray Serve.

    pip install 'ray[serve]'
    python examples/ray_serve.py [target]

Every replica has its own LLM and engine, on the devices that Ray gives it. Ray routes requests,
restarts replicas that fail, and adds some under load (``autoscaling_config``).
"""

import sys
from pathlib import Path

from openai import OpenAI
from ray import serve

import jspec
from jspec.server import run
from jspec.server.serving import Settings

DEMO = Path(jspec.__file__).parent / "assets" / "demo" / "target"
TARGET = str(sys.argv[1] if len(sys.argv) > 1 else DEMO)
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}


def build():
    """Load the model of a replica, compile, and return OpenAI's API as an ASGI application."""
    llm = jspec.LLM(TARGET, DRAFTS, max_num_seqs=4, max_model_len=256)
    return run.application(llm, Settings(model_names=("demo",)), max_num_queued=64)


replicas = serve.deployment(serve.ingress(build)()).options(
    num_replicas=2,
    ray_actor_options={"num_cpus": 1},  # {"num_gpus": 1} on a GPU
    health_check_timeout_s=600,  # loading and compiling
)
serve.run(replicas.bind(), name="jspec", route_prefix="/")

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="-")
for prompt in ("def add(", "import os", "class Tree:", "for i in"):
    answer = client.completions.create(model="demo", prompt=prompt, max_tokens=16, temperature=0)
    print(repr(prompt + answer.choices[0].text))
(deployment,) = serve.status().applications["jspec"].deployments.values()
print("running replicas:", sum(deployment.replica_states.values()))
serve.shutdown()

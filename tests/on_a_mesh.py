"""Texts of one device and of several, and the collectives of a round; prints one JSON per case.

Its argument is "few" or "others": the cases.

tests/test_several_devices.py runs this in a process where one CPU simulates eight devices.
"""

import collections
import functools
import json
import logging
import pathlib
import re
import sys
import tempfile

import jax

import jspec
from jspec.api.build import build_plan
from jspec.api.compiler import Compiler
from jspec.api.config import read
from jspec.checkpoints.heads.head_files import LoadedHead
from jspec.checkpoints.loading import LoadedModel
from jspec.engine.profile import Profile
from jspec.models import decoder
from jspec.models.blocks.experts import Experts
from jspec.models.blocks.latent_attention import LatentAttention
from jspec.models.heads import eagle
from jspec.sharding import mesh
from tests import networks, program_size, tiny

# Two key heads: with four and with eight devices they repeat.
STANDARD = networks.build(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    max_positions=256,
    qk_norm=True,
    qkv_bias=True,
)
EXPERTS = Experts(num_experts=4, experts_per_token=2, intermediate_size=16, shared_size=32)
LATENT = LatentAttention(num_heads=8, kv_rank=16, q_rank=12, nope_dim=8, rope_dim=8, value_dim=8)
KINDS = {
    "standard": STANDARD,
    "windowed": networks.changed(STANDARD, windows=(8, None), tie_embeddings=True),
    "experts": networks.changed(STANDARD, feed_forward=EXPERTS),
    "experts apart": networks.changed(STANDARD, feed_forward=EXPERTS),
    "latent": networks.changed(STANDARD, mixer=LATENT, num_layers=2),
}
HEAD = eagle.EagleConfig(
    networks.changed(STANDARD, num_layers=1, vocab_size=40),
    3,
    (0, 1),
    STANDARD.hidden_size,
    STANDARD.vocab_size,
    separate_head=True,
)
CHAIN = {"method": "eagle3", "num_speculative_tokens": 4}
METHODS = {
    "none": None,
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    },
    "eagle3": CHAIN,
    "drawn tree": CHAIN | {"tree": "sampled", "tree_size": 8},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
    "token_recycling": {"method": "token_recycling", "num_speculative_tokens": 3, "tree_size": 8},
    "coupled": CHAIN | {"rejection_sample_method": "coupled"},
}
SPLIT = " split"  # end of the name of a method whose drafter is split as the target is
FEW = [
    (2, "ngram", "experts"),
    (4, "eagle3 split", "standard"),
    (4, "none", "experts apart"),
]
OTHERS = [
    (2, "coupled", "windowed"),
    (2, "draft_model split", "latent"),
    (8, "drawn tree", "standard"),
]

COMPILING = re.compile(r"Compiling jit\((\w+)\)")

GREEDY, NUMERIC = Profile(), Profile().numeric()
COUNTED = [(size, method) for size in (4, 8) for method in ("none", "eagle3", "eagle3 split")]


def loud(key: int, init, *of):
    """Return random weights, scaled up for peaked and varied distributions."""
    return jax.tree.map(lambda x: x * 6 if x.ndim > 1 else x, init(jax.random.key(key), *of))


@functools.cache
def directory() -> str:
    """Return a directory whose config.json names no end of a text."""
    path = pathlib.Path(tempfile.mkdtemp())
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": None}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def target(kind: str) -> LoadedModel:
    return LoadedModel(directory(), KINDS[kind], loud(0, decoder.init_params, KINDS[kind]), {})


def config(method: str, size: int):
    """Return the ``speculative_config`` of a method, with its network, for so many devices."""
    given = METHODS[method.removesuffix(SPLIT)]
    if method.endswith(SPLIT):
        given = given | {"draft_tensor_parallel_size": size}
    if given is None or given["method"] in ("ngram", "token_recycling"):
        return given
    if given["method"] == "draft_model":
        weights = loud(1, decoder.init_params, tiny.DRAFT_CONFIG)
        return given | {"model": LoadedModel(directory(), tiny.DRAFT_CONFIG, weights, {})}
    weights = loud(2, eagle.init_params, HEAD)
    return given | {"model": LoadedHead("eagle3", "eagle3", HEAD, weights, {})}


def texts(size: int, method: str, kind: str) -> list:
    """Return the tokens of greedy and of drawn texts, which share pages and are preempted."""
    llm = jspec.LLM(
        target(kind),
        config(method, size),
        max_num_seqs=4,
        max_model_len=96,
        block_size=8,
        num_gpu_blocks_override=20,
        tensor_parallel_size=size,
        enable_expert_parallel=kind == "experts apart",
    )
    common = {"max_tokens": 40, "detokenize": False, "ignore_eos": True}
    settings = [
        jspec.SamplingParams(temperature=0, **common),
        jspec.SamplingParams(temperature=0.8, top_p=0.95, seed=3, n=2, **common),
        jspec.SamplingParams(temperature=1, top_k=9, presence_penalty=0.5, seed=5, **common),
    ]
    prompts = [list(range(3, 3 + length)) for length in (20, 20, 9)]
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], settings)
    assert any(metric.value for metric in llm.get_metrics() if "preemptions" in metric.name)
    return [list(text.token_ids) for output in outputs for text in output.outputs]


def compiled(size: int, method: str) -> dict[str, list[str]]:
    """Return the programs that requests compile in an engine whose programs were compiled ahead.

    And those that the second call compiles in one whose programs were not.
    """
    names: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda each: names.extend(COMPILING.findall(each.getMessage()))
    logging.getLogger("jax").addHandler(handler)
    common = {"max_tokens": 24, "detokenize": False, "ignore_eos": True}
    settings = [jspec.SamplingParams(temperature=each, **common) for each in (0, 0.8, 0)]
    prompts = [{"prompt_token_ids": [*range(3, 3 + length)]} for length in (20, 9, 1)]
    counted = {}
    for case in ("ahead", "again"):
        llm = jspec.LLM(
            target("standard"),
            config(method, size),
            max_num_seqs=4,
            max_model_len=96,
            block_size=8,
            tensor_parallel_size=size,
        )
        llm.runtime.pin(None)
        if case == "ahead":
            Compiler(llm).warm_up(lambda *_: None)
        else:
            llm.generate(prompts, settings)
        names.clear()
        with jax.log_compiles():
            llm.generate(prompts, settings)
        counted[case] = [*names]
    return counted


def collectives(size: int, method: str, profile: Profile) -> dict[str, int]:
    """Return how often each collective stands in a launch, of which a round runs all."""
    devices = mesh.make(size)
    with mesh.on(devices):
        build = build_plan(target("standard"), read(config(method, size)), mesh=devices)
        compiled = program_size.lowered(build.plan, build.params, profile).compile()
    names = "all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter"
    found = re.findall(rf" ({names})(?:-start)?\(", compiled.as_text())
    return dict(collections.Counter(found))


def main():
    given = sys.argv[1]
    for case in {"few": FEW, "others": OTHERS}[given]:
        print(json.dumps({"case": case, "one": texts(1, *case[1:]), "several": texts(*case)}))
    for size, method in COUNTED if given == "few" else ():
        counts = collectives(size, method, GREEDY)
        print(json.dumps({"counted": [size, method], "collectives": counts}))
    if given == "few":
        print(json.dumps({"counted": "sampled", "collectives": collectives(4, "eagle3", NUMERIC)}))
    for method in ("token_recycling",) if given == "few" else ("draft_model", "eagle3"):
        print(json.dumps({"warm": method, "compiled": compiled(2, method)}))


if __name__ == "__main__":
    main()

"""The back-ends that a user names: what is refused before weights load, and what runs."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jspec
from jspec import LLM, SamplingParams, ops
from jspec.api.backends import DRAFT_KEY, Backends
from jspec.models.blocks.experts import Experts
from jspec.models.heads.medusa import MedusaConfig
from tests import networks, tiny

DEMO = Path(jspec.__file__).parent / "assets" / "demo"
EAGLE = {"method": "eagle3", "model": str(DEMO / "eagle3"), "num_speculative_tokens": 3}
BFLOAT16 = dataclasses.replace(tiny.TARGET.config.with_mixers(head_dim=64), cache_dtype="bfloat16")


@pytest.fixture
def hopper(monkeypatch):
    """Let JAX's device be a Hopper GPU, for checks that run nothing there."""
    gpu = SimpleNamespace(compute_capability="9.0", device_kind="NVIDIA H200")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_backend": "FLASH_ATTN"}, "'FLASH_ATTN' must be one of 'pallas_gpu', 'pallas_"),
        ({"attention_backend": "pallas_gpu"}, "'pallas_gpu' runs on an NVIDIA GPU alone, and JAX'"),
        ({"attention_backend": "pallas_tpu"}, "='pallas_tpu' runs on a TPU alone, and JAX's devic"),
        ({"sampling_backend": "pallas_tpu"}, "sampling_backend='pallas_tpu' runs on a TPU alone, "),
        ({"sampling_backend": "triton"}, "sampling_backend='triton' is not known; use None or one"),
        ({"attention_backend": "xla", "deterministic": True}, "does not support attention='xla'"),
        ({"kv_cache_dtype": "fp8_inc"}, "kv_cache_dtype='fp8_inc' must be one of 'auto', 'bfloat1"),
        ({"kv_cache_dtype": "fp8", "deterministic": True}, "not support a KV cache in float8_e4m3"),
        (
            {"speculative_config": EAGLE | {"kv_cache_dtype": "int4"}},
            "kv_cache_dtype='int4' must be one of 'auto', 'bfloat16', 'float32', 'fp8', 'fp8_e4m3'",
        ),
        (
            {"speculative_config": EAGLE | {"attention_backend": "FLASHINFER"}},
            "speculative_config: attention_backend='FLASHINFER' must be one of",
        ),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 3,
                    "attention_backend": "xla",
                }
            },
            "attention_backend='xla' is not used by method='ngram'; leave it out",
        ),
    ],
)
def test_a_backend_that_does_not_run_here_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError) as error:
        LLM(str(DEMO / "target"), **arguments)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "page", "message"),
    [
        (
            dataclasses.replace(BFLOAT16, cache_dtype="float32"),
            64,
            "keys and values in bfloat16.*or leave attention_backend",
        ),
        (
            BFLOAT16.with_mixers(head_dim=72),
            64,
            "heads of a multiple of 16 features up to 128, not 72; pad them",
        ),
        (
            dataclasses.replace(BFLOAT16.with_mixers(head_dim=48), kv_cache_dtype="int8"),
            64,
            "heads of a multiple of 32 features up to 128, not 48; pad them",
        ),
        (BFLOAT16, 48, "takes pages of a multiple of 64 slots, not 48; choose others, or leave"),
    ],
)
def test_a_model_that_a_kernel_does_not_take_is_refused(config, page, message, hopper):
    backends = Backends("pallas_gpu", page_size=page)
    with pytest.raises(ValueError, match=f"^attention_backend='pallas_gpu' .*{message}"):
        backends.running(config, "pallas_gpu", None)


def test_experts_run_by_a_kernel_on_hopper_unless_xla_is_named(hopper):
    config = networks.changed(BFLOAT16, feed_forward=Experts(4, 2, 64))
    shape = jax.ShapeDtypeStruct
    x, sizes = shape((5, 64), jnp.bfloat16), shape((4,), jnp.int32)

    def has_kernel(name, dtype="bfloat16"):
        mixture = Backends(name).running(config, name, None).layers[0].feed_forward
        weights = shape((4, 64, 128), dtype)
        return ops.has_kernel("grouped_matmul", mixture.matmul, x, weights, sizes)

    assert has_kernel(None) and has_kernel("pallas_gpu")
    assert not has_kernel("xla") and not has_kernel(None, "float32")


def test_a_vocabulary_that_the_sampling_kernel_does_not_take_is_refused(hopper):
    Backends(sampling="pallas_gpu").check_vocabulary(32000)
    with pytest.raises(ValueError, match=r"takes vocabularies of 2048 tokens or more.*not 64, or"):
        Backends(sampling="pallas_gpu").check_vocabulary(64)


@pytest.mark.parametrize(
    ("attention", "dtype", "named"),
    [("xla", None, "attention_backend='xla'"), (None, "fp8", "kv_cache_dtype='fp8'")],
)
def test_a_drafter_without_attention_takes_no_backend_and_no_dtype(attention, dtype, named):
    head = MedusaConfig(2, 1, 32, 64, 64, (2,), 2)
    message = f"speculative_config: {named} is for drafters with attention; leave it out"
    with pytest.raises(ValueError, match=message):
        Backends().running(head, attention, dtype, DRAFT_KEY)


@pytest.mark.parametrize("name", [None, "auto", "xla", "reference"])
def test_target_and_drafter_run_the_named_form_and_texts_stay(name):
    llm = LLM(
        str(DEMO / "target"),
        EAGLE | {"attention_backend": name},
        dtype="float32",
        attention_backend=name,
        sampling_backend="xla",
    )
    chosen = None if name == "auto" else name
    plan = llm.build.plan
    assert plan.target.config.attention == plan.drafter.config.network.attention == chosen
    assert plan.sampling_backend == "xla"
    params = SamplingParams(max_tokens=17, temperature=0.8, seed=3)
    text = llm.generate("The cat sat on", params)[0].outputs[0].text
    plain = LLM(str(DEMO / "target"), EAGLE, dtype="float32")
    assert text == plain.generate("The cat sat on", params)[0].outputs[0].text

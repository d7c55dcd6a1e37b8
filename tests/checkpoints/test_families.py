"""config.json to DecoderConfig and back: keys, defaults and errors."""

import dataclasses
import json

import pytest

from jspec.checkpoints import families
from jspec.checkpoints.families.names import llama_table
from jspec.models.blocks.rope import RopeConfig
from jspec.models.decoder import DecoderConfig
from tests import networks
from tests.checkpoints import published

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 12, "v_head_dim": 10}
HYBRID = {"partial_rotary_factor": 1.0, "full_attention_interval": 3}
MORE = {
    "glm4": {"partial_rotary_factor": 1.0},
    "deepseek_v3": EXPERTS | LATENT | {"n_group": 2, "topk_group": 1},
    "deepseek_v2": EXPERTS | LATENT,
    "glm4_moe": EXPERTS | {"partial_rotary_factor": 1.0},  # equal lengths in all scalings
    "minimax_m2": {"head_dim": 16},
    "llama4_text": {"head_dim": 16},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), HYBRID),
}


def read(model_type: str, **settings) -> DecoderConfig:
    raw = {"model_type": model_type, **SIZES, **MORE.get(model_type, {}), **settings}
    return families.find(raw).read(raw)


@pytest.mark.parametrize("model_type", sorted(set(families.FAMILIES) - {"mimo"}))  # unknown to it
def test_defaults_are_those_of_transformers(model_type):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(model_type)
    ours = families.FAMILIES[model_type].defaults
    fields = {field.name: field.default for field in dataclasses.fields(type(theirs))}
    same_default = {key: fields[key] for key in ours if key in fields}
    assert same_default == {key: ours[key] for key in same_default}
    # Read anyway, or an attribute of the class.
    undeclared = {
        "head_dim",
        "sliding_window_pattern",
        "partial_rotary_factor",
        "rotary_dim",
        "default_theta",
    }
    undeclared |= {"full_attention_interval", "intermediate_size"}
    undeclared |= {"decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"}
    undeclared |= {"sliding_window_pattern", "rope_local_base_freq"}
    assert set(ours) - set(fields) <= undeclared
    least = ours | {"max_position_embeddings": 8}
    least = families.FAMILIES[model_type].respelled(least)
    rope = theirs.rope_parameters
    rope = rope.get("full_attention", rope)
    assert rope["rope_theta"] == families.scaling.read(least, 2)[0].theta


def test_a_config_without_optional_keys_takes_the_defaults_of_its_family():
    raw = {"model_type": "llama", **SIZES}
    del raw["num_key_value_heads"]
    config = families.find(raw).read(raw)
    mixer = config.layers[0].mixer
    assert (mixer.num_kv_heads, mixer.head_dim, config.max_positions) == (4, 16, 2048)
    assert (config.tie_embeddings, mixer.qkv_bias, config.windows) == (False, False, (None,) * 3)
    assert read("qwen3").layers[0].mixer.head_dim == 128
    assert read("mistral").windows == (4096,) * 3


def test_biases_follow_the_family():
    def fields(config):
        mixer, mlp = config.layers[0].mixer, config.layers[0].feed_forward
        return mixer.qkv_bias, mixer.output_bias, mlp.bias

    assert fields(read("llama", attention_bias=True)) == (True, True, False)
    assert fields(read("llama", mlp_bias=True)) == (False, False, True)
    assert fields(read("qwen2")) == (True, False, False)
    assert fields(read("qwen3", attention_bias=True)) == (True, True, False)


def test_windows_follow_the_four_keys_of_qwen():
    windows = lambda **keys: read("qwen2", sliding_window=8, **keys).windows
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert windows() == (None,) * 3
    assert windows(max_window_layers=0) == (None,) * 3  # the switch is off
    assert windows(use_sliding_window=True, max_window_layers=1) == (None, 8, 8)
    assert windows(use_sliding_window=True, max_window_layers=28) == (None,) * 3
    assert windows(use_sliding_window=True, layer_types=kinds) == (None, 8, None)
    with pytest.raises(ValueError, match="use_sliding_window is False"):
        windows(layer_types=kinds)
    with pytest.raises(ValueError, match="each of 3 layers"):
        windows(use_sliding_window=True, layer_types=kinds[:2])
    with pytest.raises(ValueError, match="chunked_attention"):
        windows(use_sliding_window=True, layer_types=["chunked_attention"] * 3)


ROPES = {
    "default": ({}, RopeConfig(5e5), 256),
    "linear": ({"factor": 2.0}, RopeConfig(5e5, "linear", 2.0), 512),
    "dynamic": ({"factor": 2.0}, RopeConfig(5e5, "dynamic", 2.0, 256), 512),
    "llama3": (
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        RopeConfig(5e5, "llama3", 8.0, 64),
        256,
    ),
    "yarn": (
        {"factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
        RopeConfig(5e5, "yarn", 8.0, 64, amplitude=1.5),
        512,
    ),
    "longrope": (
        {
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "attention_factor": 1.5,
            "original_max_position_embeddings": 64,
        },
        RopeConfig(
            5e5,
            "longrope",
            4.0,
            64,
            amplitude=1.5,
            short_factors=(1.0,) * 8,
            long_factors=(2.0,) * 8,
        ),
        256,
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_old_and_new_spelling_of_a_rotary_scaling_mean_the_same(kind):
    keys, rope, length = ROPES[kind]
    new = {"rope_type": kind, "rope_theta": 5e5, **keys}
    old = {"type": kind, **keys} if keys else None
    spellings = (
        {"rope_parameters": new},
        {"rope_scaling": old, "rope_theta": 5e5},
        {"rope_scaling": old, "rope_theta": 5e5, "rope_parameters": new},
    )
    for spelling in spellings:
        config = read("llama", max_position_embeddings=256, **spelling)
        assert (config.layers[0].mixer.rope, config.max_positions) == (rope, length)


# Settings without which a decoder is a Llama, and families that always are another one.
_PARTICULAR = {
    "mistral": {"sliding_window": 7},
    "smollm3": {"no_rope_layer_interval": 2},
    "exaone4": {"sliding_window": 7, "sliding_window_pattern": 2},
    "seed_oss": {"attention_bias": True},
    "granite": {"residual_multiplier": 0.22, "logits_scaling": 49.0},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "rope_scaling": None},
}
_DESCRIBED_AS = {"mimo": "qwen2", "seed_oss": "qwen2", "phi3": "llama", "ministral3": "llama"}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("model_type", families.FAMILIES)
def test_a_described_decoder_reads_back_the_same(kind, model_type):
    keys, _, _ = ROPES[kind]
    settings = {
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 5e5,
        "max_position_embeddings": 256,
        "rope_scaling": {"rope_type": kind, **keys},
    }
    config = read(model_type, **settings | _PARTICULAR.get(model_type, {}))
    raw = json.loads(json.dumps(families.describe(config)))
    assert raw["model_type"] == _DESCRIBED_AS.get(model_type, model_type)
    assert families.find(raw).read(raw) == config


def test_a_decoder_that_no_family_can_express_is_refused():
    config = networks.changed(read("llama"), qk_norm=True, mlp_bias=True)
    with pytest.raises(ValueError, match=r"llama loses qk_norm.*qwen3 loses bias"):
        families.describe(config)


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, r"hidden_act='gelu' \(only 'silu' or 'swish'\)"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            "gemma4_text",
            {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 3},
            "num_kv_shared_layers=3 leaves no layer",
        ),
        ("gemma4_text", {}, "vocab_size_per_layer_input=262144 must be vocab_size, "),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "by layer type"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"sliding_window": 128}, "sliding_window=128"),
        ("llama", {"attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
        ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier=12.0"),
        ("llama", {"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ("llama", {"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple"),
        ("llama", {"head_dim": 15}, r"head_dim \(15\) even"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps must be a positive number, got None"),
        ("mistral", {"attention_bias": True}, "attention_bias=True"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types="),
        ("mistral", {"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
        ("qwen2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("qwen3", {"num_experts": 8, "mlp_bias": True}, "num_experts=8.*mlp_bias=True"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "'fp8'.*in bfloat16"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias=True"),
        ("deepseek_v3", {"n_group": 3}, "8 experts do not make 3 groups"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "5 experts a token do not fit into 1 of 2"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, got 7"),
        ("glm4_moe", {"partial_rotary_factor": 0.1}, "partial_rotary_factor=0.1 .* rotates 1"),
        ("mimo", {"attention_bias": False}, "attention_bias=False"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 3}, "linear_attention and full"),
        ("qwen3_5_text", {"linear_num_key_heads": 3}, "multiple of linear_num_key_heads .3."),
    ],
)
def test_settings_that_are_not_implemented_are_refused_by_name(model_type, settings, message):
    with pytest.raises(ValueError, match=message):
        read(model_type, **settings)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "mrope"}, "'mrope' is not supported; known: default, linear"),
        ({"rope_type": "linear"}, "missing: factor"),
        ({"rope_type": "default", "factor": 2.0}, "not understood: 'factor'"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 9.0}, "not understood: 'alpha'"),
        ({"rope_type": "linear", "factor": -1.0}, "factor must be a positive number"),
        ({"rope_type": "llama3", "factor": 8.0}, "missing: low_freq_factor, high_freq_factor"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
            "short_factor must be a list of 8 numbers",
        ),
        ({"rope_type": "default", "rope_theta": 7.0}, "rope_theta is given as 10000.0 and as 7.0"),
    ],
)
def test_incomplete_rotary_scalings_are_refused(rope, message):
    with pytest.raises(ValueError, match=message):
        read("llama", rope_theta=10000.0, rope_scaling=rope)


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "llama", "architectures": ["MistralForCausalLM"]},
        {"architectures": ["FalconForCausalLM"]},
        {},
    ],
)
def test_unsupported_architectures_are_refused_and_the_known_ones_listed(raw):
    known = "LlamaForCausalLM, MistralForCausalLM, Qwen3ForCausalLM, Qwen2ForCausalLM"
    with pytest.raises(ValueError, match=f"is not supported; known, for text generation: {known}"):
        families.find(raw)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "qwen4", "gates": 3}, "the nearest is model_type 'qwen3', which lacks 'ga"),
        ({"model_type": "qwen4", "rms_norm_eps": 1e-5}, "'qwen3', which has the same keys; if the"),
        (
            {"model_type": "granit", "head_dim": 15},
            "the nearest is model_type 'granite', but as such it fails: .*head_dim",
        ),
    ],
)
def test_an_unknown_family_names_the_nearest_and_what_differs(raw, message):
    with pytest.raises(ValueError, match=message) as raised:
        families.find({**SIZES, "architectures": ["Qwen4ForCausalLM"], **raw})
    assert "\n" not in str(raised.value)


def test_experts_and_latent_attention_read_back_the_same():
    for model_type, settings in (
        ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False, "n_shared_experts": 2}),
        (
            "deepseek_v3",
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 40,
                    "mscale": 1.0,
                    "mscale_all_dim": 0.7,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        ("deepseek_v2", {"q_lora_rank": None, "n_group": 2, "topk_group": 1}),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}),
        ("glm4_moe", {"partial_rotary_factor": 0.25, "attention_bias": True}),
        ("glm4_moe", {"partial_rotary_factor": 1.0, "use_qk_norm": True}),
        ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True, "num_experts": 16}),
        ("qwen3_moe", {"use_sliding_window": True, "attention_bias": True}),
        ("qwen2_moe", {"use_sliding_window": True, "decoder_sparse_step": 2}),
        ("mixtral", {"sliding_window": 8, "num_local_experts": 4}),
        ("olmoe", {"attention_bias": True, "norm_topk_prob": True}),
        ("phimoe", {"lm_head_bias": True, "sliding_window": 8}),
        ("minimax_m2", {"rotary_dim": 8}),
        ("llama4_text", {"moe_layers": [1], "attention_chunk_size": 8}),
        ("llama4_text", {"attn_temperature_tuning": False, "use_qk_norm": False}),
    ):
        config = read(model_type, **settings)
        raw = families.describe(config)
        assert raw["model_type"] == model_type
        assert families.find(raw).read(raw) == config


def test_numbers_of_experts_have_two_names_that_must_agree():
    assert read("mixtral", num_experts=4) == read("mixtral", num_local_experts=4)
    assert read("qwen3_moe").layers[0].feed_forward.num_experts == 128
    with pytest.raises(ValueError, match="num_experts and num_local_experts must be equal"):
        read("qwen3_moe", num_experts=4, num_local_experts=8)
    with pytest.raises(ValueError, match="attn_type_list must name full attention"):
        read("minimax_m2", attn_type_list=[1, 0, 1])
    with pytest.raises(ValueError, match="experts: sparsemixer selects 2 experts"):
        read("phimoe", num_experts_per_tok=3)


def test_mimo_reads_as_qwen2_does():
    assert read("mimo", head_dim=16, rope_theta=64e4) == read("qwen2", head_dim=16, rope_theta=64e4)


_NOT_KEPT = {"rope_scaling", "sliding_window", "max_window_layers", "num_nextn_predict_layers"}


@pytest.mark.parametrize("text", published.CONFIGS.split("\n\n"))
def test_published_configs_are_read_and_described_again(text):
    raw = json.loads(text)
    config = families.find(raw).read(raw)
    assert config.hidden_size == raw["hidden_size"]
    described = families.describe(config)
    assert described["model_type"] == raw["model_type"]
    for key in set(raw) & set(described) - _NOT_KEPT:
        if not key.endswith("token_id"):
            assert described[key] == raw[key], key


def test_the_architecture_alone_selects_the_family():
    assert families.find({"architectures": ["Qwen2ForCausalLM"]}).model_type == "qwen2"


def test_every_tensor_has_one_entry():
    config = read("qwen3", attention_bias=True)
    names = [name for entry in llama_table(config) for name in entry.names]
    assert len(names) == len(set(names)) == 3 + 3 * (11 + 4)


JUNK = ([], {}, "x", None, -1, 0, 0.5, True, [None], {"a": 1}, ["x"] * 3, float("nan"))


@pytest.mark.parametrize("model_type", families.FAMILIES)
def test_damaged_values_raise_only_value_errors(model_type):
    whole = {
        **families.FAMILIES[model_type].defaults,
        **SIZES,
        **MORE.get(model_type, {}),
        "model_type": model_type,
        "architectures": None,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        "rope_scaling": None,
        "rope_parameters": None,
    }
    cases = [{key: junk} for key in whole for junk in JUNK]
    for keys, _, _ in ROPES.values():
        for key in ("rope_type", "rope_theta", *keys):
            cases += [{"rope_scaling": {**keys, key: junk}} for junk in JUNK]
    for kind, (keys, _, _) in ROPES.items():
        for key in keys:
            cases += [{"rope_scaling": {"rope_type": kind, **keys, key: junk}} for junk in JUNK]
    refused = 0
    for case in cases:
        raw = whole | {"head_dim": 16, "use_sliding_window": True} | case
        try:
            families.find(raw).read(raw)
        except ValueError:
            refused += 1
    assert refused > len(cases) / 2

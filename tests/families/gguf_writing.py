"""GGUF files of the tiny models, written as llama.cpp's converters write them.

Each rule is that of a class of llama.cpp's conversion/; the names are those of ``gguf``.
"""

import re

import gguf
import numpy as np

from tests.checkpoints.gguf_writing import add, llama3_divisors, neighbours, writer_arch

PERMUTED = ("llama", "granite", "smollm3", "mistral3")
RECURRENT = ("qwen3next", "qwen35", "qwen35moe")
CENTRED = ("gemma2", "gemma3", *RECURRENT)
WINDOWS = ("phi3", "exaone4", "cohere2", "gpt-oss", "olmo2", "gemma2", "gemma3", "gemma4")
SIZES = {  # config.json -> method of the writer
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "head_count",
    "num_key_value_heads": "head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "layer_norm_rms_eps",
    "layer_norm_eps": "layer_norm_eps",
    "vocab_size": "vocab_size",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "top_k_experts": "expert_used_count",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "num_kv_shared_layers": "shared_kv_layers",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count",
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "linear_conv_kernel_dim": "ssm_conv_kernel",
    "linear_key_head_dim": "ssm_state_size",
    "linear_num_key_heads": "ssm_group_count",
    "linear_num_value_heads": "ssm_time_step_rank",
}
TOKENS = ["<unk>", "<s>", "</s>", "<0x0A>"]


def write(path, arch, raw, tensors, kind="F32"):
    """Write a model: its config.json, and its tensors as float32 arrays."""
    writer = gguf.GGUFWriter(path, arch)
    given = dict(raw)
    if arch == "deepseek2":
        given["num_key_value_heads"] = 1
    if arch == "llama4":
        given |= {"intermediate_size": raw["intermediate_size_mlp"]}
        given |= {"moe_intermediate_size": raw["intermediate_size"]}
    if arch in ("gpt-oss", "minimax-m2"):
        given["moe_intermediate_size"] = raw["intermediate_size"]
    if arch == "gemma4":
        (full, *_) = raw["per_layer_config"].values()
        sizes = full.get("num_key_value_heads"), raw["num_key_value_heads"]
        sliding = [each == "sliding_attention" for each in raw["layer_types"]]
        if None not in sizes:
            given["num_key_value_heads"] = [sizes[each] for each in sliding]
        writer.add_sliding_window_pattern(sliding)
        unshared = len(sliding) - raw["num_kv_shared_layers"]
        if raw["use_double_wide_mlp"]:
            width = raw["intermediate_size"]
            given["intermediate_size"] = [
                width * (1 + (i >= unshared)) for i in range(len(sliding))
            ]
        given |= {} if raw["enable_moe_block"] else {"num_experts": None, "top_k_experts": None}
    if arch == "olmoe":
        given.pop("moe_intermediate_size")
    for key, method in SIZES.items():
        if given.get(key) is not None:
            getattr(writer, f"add_{method}")(given[key])
    _write_rope(writer, arch, raw)
    _write_others(writer, arch, raw)
    for key in ("alpha_n", "alpha_p", "beta", "eps") if arch == "apertus" else ():
        layers = range(raw["num_hidden_layers"])
        numbers = [tensors[f"model.layers.{index}.mlp.act_fn.{key}"].item() for index in layers]
        getattr(writer, f"add_xielu_{key}")(numbers)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS + [f"t{i}" for i in range(len(TOKENS), raw["vocab_size"])])
    writer.add_token_scores([0.0] * raw["vocab_size"])
    writer.add_token_types([2, 3, 3, 6] + [1] * (raw["vocab_size"] - len(TOKENS)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    table = gguf.get_tensor_name_map(writer_arch(arch), raw["num_hidden_layers"])
    for name, tensor in _stacked(tensors, joins=arch == "qwen35moe"):
        for new, part in _modified(arch, raw, name, tensor):
            stored = table.get_name(new, try_suffixes=(".weight", ".bias"))
            if new.endswith("scale") and "router" in new:
                layer, is_expert = new.split(".")[2], "expert" in new
                stored = f"blk.{layer}.ffn_{'down_exps' if is_expert else 'gate_inp'}.scale"
            assert stored is not None, new
            if not stored.endswith((".weight", ".bias", ".ssm_a", ".scale")):
                stored += ".weight"
            part = np.ascontiguousarray(part)
            is_float = part.ndim == 1 or "ffn_gate_inp" in stored or "conv1d" in stored
            is_float = is_float or stored.endswith("bias") or part.shape[-1] % 32
            add(writer, stored, part, "F32" if is_float else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_rope(writer, arch, raw):
    rope = raw["rope_parameters"]
    if local := rope.get("sliding_attention"):
        rope = rope["full_attention"]
        if arch != "olmo2":
            writer.add_rope_freq_base_swa(local["rope_theta"])
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    share = raw.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1
    theta = rope["rope_theta"]
    if arch == "hunyuan-dense":
        theta *= rope["alpha"] ** (head_dim / (head_dim - 2))
    writer.add_rope_freq_base(theta)
    if arch == "gemma4":
        for each in ("key_length", "value_length", "rope_dimension_count"):
            getattr(writer, f"add_{each}_swa")(head_dim)
        (full, *_), part = raw["per_layer_config"].values(), rope["partial_rotary_factor"]
        head_dim = full["head_dim"]
        turned, share = int(head_dim * part / 2), 1
        divisors = [1.0] * turned + [1e30] * (head_dim // 2 - turned)
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    if arch == "deepseek2":
        head_dim = raw["qk_rope_head_dim"]
    elif arch not in ("phi3", "phimoe", "granite"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(raw.get("rotary_dim") or int(head_dim * share))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if arch == "deepseek2":
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        if arch == "mistral3":
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))
    if rope["rope_type"] == "longrope":
        original = raw["original_max_position_embeddings"]
        factor = raw["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors((1 + np.log(factor) / np.log(original)) ** 0.5)
        for each in ("long", "short"):
            factors = np.array(rope[f"{each}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{each}.weight", factors)


def _write_others(writer, arch, raw):
    if raw.get("sliding_window") and arch in WINDOWS:
        writer.add_sliding_window(raw["sliding_window"])
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if arch.startswith("gemma") and raw.get(key):
            getattr(writer, f"add_{key}")(raw[key])
    if raw.get("layer_types") and arch in ("exaone4", "olmo2"):
        writer.add_sliding_window_pattern([x == "sliding_attention" for x in raw["layer_types"]])
    if arch == "deepseek2":
        rope, rank = raw["qk_rope_head_dim"], raw["kv_lora_rank"]
        writer.add_key_length(rank + rope)
        writer.add_value_length(rank)
        writer.add_key_length_mla(raw["qk_nope_head_dim"] + rope)
        writer.add_value_length_mla(raw["v_head_dim"])
    if arch in ("deepseek2", "glm4moe"):
        is_v2 = raw["model_type"] == "deepseek_v2"
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SOFTMAX if is_v2 else kinds.SIGMOID)
        writer.add_expert_weights_norm(bool(raw["norm_topk_prob"]) and not is_v2)
    if arch == "minimax-m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch in RECURRENT:
        writer.add_ssm_inner_size(raw["linear_value_head_dim"] * raw["linear_num_value_heads"])
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_sections([2, 1, 1, 0])


def _stacked(tensors, joins):
    """Yield tensors, with all experts of a matrix as one under the name without a number."""
    stacks = {}
    for name, tensor in tensors.items():
        plain = re.sub(r"\.experts\.(\d+)\.", ".experts.", name)
        if plain == name:
            yield name, tensor
        else:
            stacks.setdefault(plain, {})[int(re.search(r"\.experts\.(\d+)\.", name)[1])] = tensor
    made = {name: np.stack([each for _, each in sorted(x.items())]) for name, x in stacks.items()}
    for name in [name for name in made if joins and ".gate_proj." in name]:
        pair = made.pop(name), made.pop(name.replace("gate_proj", "up_proj"))
        made[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(pair, 1)
    yield from made.items()


def _modified(arch, raw, name, tensor):
    """Yield the tensors of a file for one of the checkpoint, by names that the table has."""
    if name == "lm_head.weight" and raw["tie_word_embeddings"]:
        return
    part = name.split(".")[-2]
    if arch in PERMUTED and part in ("q_proj", "k_proj"):
        tensor = neighbours(tensor, raw.get("head_dim") or 16)
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if arch in CENTRED and name.endswith("norm.weight") and "linear_attn" not in name:
        tensor = tensor + 1
    if arch in RECURRENT:
        yield from _recurrent(arch, raw, name, tensor)
    elif "mlp.act_fn." in name:
        return  # They are metadata.
    elif arch == "gemma4":
        yield name, tensor
    elif ".experts.gate_up_proj" in name:
        if not name.endswith("bias"):
            tensor = tensor.swapaxes(1, 2)
        halves = np.split(tensor, 2, 1)
        if arch == "gpt-oss":
            halves = tensor[:, ::2], tensor[:, 1::2]
        kind = "bias" if name.endswith("bias") else "weight"
        for each, half in zip(("gate", "up"), halves, strict=True):
            yield name.removesuffix("_bias").replace("gate_up", each) + "." + kind, half
    elif name.endswith((".experts.down_proj", ".experts.down_proj_bias")):
        is_bias = name.endswith("bias")
        plain = name.removesuffix("_bias")
        yield (
            plain + (".bias" if is_bias else ".weight"),
            tensor if is_bias else tensor.swapaxes(1, 2),
        )
    elif name.endswith("kv_b_proj.weight"):
        sizes = raw["qk_nope_head_dim"], raw["v_head_dim"]
        heads = tensor.reshape(raw["num_attention_heads"], sum(sizes), -1)
        yield name.replace("kv_b", "k_b"), heads[:, : sizes[0]].swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), heads[:, sizes[0] :]
    else:
        yield name, tensor


def _recurrent(arch, raw, name, tensor):
    """Yield the tensors of Qwen3-Next and Qwen3.5."""
    keys, values = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    key_dim, value_dim = raw["linear_key_head_dim"], raw["linear_value_head_dim"]

    def tiled(x, width, axis=0):
        """Return heads of values in an order in which those of keys alternate."""
        x = np.moveaxis(x, axis, 0)
        heads = x.reshape(keys, values // keys, width, *x.shape[1:])
        return np.moveaxis(heads.swapaxes(0, 1).reshape(x.shape), 0, axis)

    if "conv1d" in name:
        tensor = tensor[:, 0]
    if arch != "qwen3next" and "linear_attn." in name:
        if "in_proj_qkv" in name or "conv1d" in name:
            ends = 2 * keys * key_dim
            tensor = np.concatenate([tensor[:ends], tiled(tensor[ends:], value_dim)])
        elif "in_proj_z" in name:
            tensor = tiled(tensor, value_dim)
        elif "out_proj" in name:
            tensor = tiled(tensor, value_dim, 1)
        elif "norm" not in name:
            tensor = tiled(tensor, 1)
    if name.endswith("A_log"):
        tensor = -np.exp(tensor)
    name = name.replace("linear_attn.dt_bias", "linear_attn.dt_proj.bias")
    if "in_proj_qkvz" in name:
        each = values // keys * value_dim
        heads = tensor.reshape(keys, -1, tensor.shape[-1])
        parts = np.split(heads, np.cumsum([key_dim, key_dim, each]), 1)
        q, k, v, z = (part.reshape(-1, tensor.shape[-1]) for part in parts)
        yield name.replace("qkvz", "qkv"), np.concatenate([q, k, v])
        yield name.replace("qkvz", "z"), z
    else:
        yield name, tensor

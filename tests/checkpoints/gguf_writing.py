"""GGUF files written as llama.cpp's converter writes them, by the ``gguf`` package."""

import gguf
import numpy as np

KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "head_count",
    "num_key_value_heads": "head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "layer_norm_rms_eps",
    "vocab_size": "vocab_size",
}


def write(path, config, state, kind="F32", tokenizer=(), **options):
    """Write a model: a config of transformers, and its tensors as float32 arrays."""
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch, **options)
    for theirs, key in KEYS.items():
        getattr(writer, f"add_{key}")(getattr(config, theirs))
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))
    for call, *values in tokenizer:
        getattr(writer, f"add_{call}")(*values)
    table = gguf.get_tensor_name_map(writer_arch(arch), config.num_hidden_layers)
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.split(".")[-2] in ("q_proj", "k_proj"):
            tensor = neighbours(tensor, head_dim)
        stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
        add(writer, stored, np.ascontiguousarray(tensor), kind if tensor.ndim > 1 else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer, name, tensor, kind):
    kind = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)


def writer_arch(arch):
    return next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)


def neighbours(tensor, head_dim):
    """Return q or k of Llama with the rotated pairs of a head as neighbours."""
    halves = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def llama3_divisors(rope, head_dim):
    """Return the numbers by which llama.cpp divides the frequencies."""
    base = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    length = 2 * np.pi / base
    original, low, high = (
        rope[key]
        for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    smooth = (original / length - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    divisors = np.where(length > original / low, rope["factor"], between)
    return np.where(length < original / high, 1.0, divisors).astype(np.float32)

"""A target and a draft model with random weights, in Hugging Face layout, to develop against.

    python -m benchmarks.random_models --out DIR

They have the demo models' shape. Speed figures taken on them are real; acceptance figures are not.
Weights as small as a fresh model's repeat one token for ever, so these are wider; and the target's
later layers are made weak, so that its first layer alone (the draft model) often agrees with it.
"""

import argparse
from pathlib import Path

VOCAB = 4096
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def build(out: Path, weak: float, seed: int) -> None:
    """Writes ``out/target`` and ``out/draft``; ``weak`` scales the target's later layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    target = LlamaForCausalLM(LlamaConfig(**SHAPE, initializer_range=0.08))
    draft = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_hidden_layers": 1}))
    with torch.no_grad():
        # The token that was just read must not win the next draw through the tied head.
        target.model.embed_tokens.weight.mul_(0.3)
        for layer in target.model.layers[1:]:
            layer.self_attn.o_proj.weight.mul_(weak)
            layer.mlp.down_proj.weight.mul_(weak)
    draft.load_state_dict(target.state_dict(), strict=False)
    target.save_pretrained(out / "target")
    draft.save_pretrained(out / "draft")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="random target and draft model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weak", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build(arguments.out, arguments.weak, arguments.seed)


if __name__ == "__main__":
    main()

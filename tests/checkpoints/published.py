"""Config.json files as published, with every key."""

CONFIGS = """
{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
 "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64,
 "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
 "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
 "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
 "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0,
 "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
 "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
 "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256}

{"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
 "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
 "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
 "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
 "sliding_window": 4096, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
 "transformers_version": "4.34.0.dev0", "use_cache": true, "vocab_size": 32000}

{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
 "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
 "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
 "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
 "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
 "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
 "transformers_version": "4.43.1", "use_cache": true, "use_mrope": false,
 "use_sliding_window": false, "vocab_size": 151936}

{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
 "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
 "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
 "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
 "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
 "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
 "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
 "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}

{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
 "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
 "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
 "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
 "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
 "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
 "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
 "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
 "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1,
 "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
 "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
 "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc",
 "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": true,
 "v_head_dim": 128, "vocab_size": 129280}

{"architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
 "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128,
 "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944,
 "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408,
 "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": true,
 "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
 "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329,
 "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": null,
 "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": false,
 "topk_group": 1, "torch_dtype": "bfloat16", "transformers_version": "4.54.0",
 "use_cache": true, "use_qk_norm": false, "vocab_size": 151552}

{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
 "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
 "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
 "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
 "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true,
 "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
 "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06,
 "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
 "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
 "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}

{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
 "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
 "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
 "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
 "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
 "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
 "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
 "use_cache": true, "vocab_size": 32000}
"""

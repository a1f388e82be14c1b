"""Small models of the transformers package with random weights: one for every model that
`lagraph.integrations.transformers` knows, its first layer linear, its second attention where the
model mixes the two."""

from __future__ import annotations

import dataclasses

__all__ = ["SMALL", "is_there", "make"]

MIXED = {"layer_types": ["linear_attention", "full_attention"]}
DENSE = {"mlp_layer_types": ["dense", "dense"]}
# The configuration's name, the model's, and what is not `sizes`. Nothing is routed among experts,
# since routing jumps at a rounding: layers are dense, or have one expert.
SMALL = {
    "qwen3_next": ("Qwen3Next", "Qwen3NextForCausalLM", MIXED | {"mlp_only_layers": [0, 1]}),
    "qwen3_5": ("Qwen3_5Text", "Qwen3_5ForCausalLM", MIXED),
    "qwen3_5_moe": ("Qwen3_5MoeText", "Qwen3_5MoeForCausalLM", MIXED),
    "qwen4_exp": (
        "Qwen4ExpText", "Qwen4ExpForCausalLM",
        MIXED | {
            "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
            "indexer_head_dim": 16, "indexer_budget": 128, "indexer_compress_ratio": 4,
        },
    ),
    "olmo_hybrid": ("OlmoHybrid", "OlmoHybridForCausalLM", MIXED),
    "lara_mini": ("LaraMini", "LaraMiniForCausalLM", MIXED),
    "kimi_linear": ("KimiLinear", "KimiLinearForCausalLM", MIXED | DENSE | {"q_lora_rank": None}),
    "glm5_next": (
        "Glm5NextText", "Glm5NextForConditionalGeneration",
        MIXED | DENSE | {
            "qk_rope_head_dim": 0, "hc_mult": 2, "index_topk": 128, "index_head_dim": 16,
            "index_n_heads": 2,
        },
    ),
    "bailing_hybrid": (
        "BailingHybrid", "BailingHybridForCausalLM", MIXED | DENSE | {"q_lora_rank": None},
    ),
    "mamba2": ("Mamba2", "Mamba2ForCausalLM", {}),
    "bamba": ("Bamba", "BambaForCausalLM", {"attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", "FalconH1ForCausalLM", {}),
    "granitemoehybrid": ("GraniteMoeHybrid", "GraniteMoeHybridForCausalLM", MIXED),
    "nemotron_h": (
        "NemotronH", "NemotronHForCausalLM",
        {"layers_block_type": ["linear_attention", "full_attention"]},
    ),
    "zamba2": (
        "Zamba2", "Zamba2ForCausalLM", {"layers_block_type": ["linear_attention", "hybrid"]},
    ),
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32,
    "projection_intermediate_size": 16,
}  # fmt: skip


def sizes(size):
    """Options under all the names that they have; a configuration takes those that it knows."""
    return {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        # attention
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "v_head_dim": 16,
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "adapter_rank": 8,
        # experts
        "num_experts": 1, "num_local_experts": 1, "n_routed_experts": 1, "num_experts_per_tok": 1,
        "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "shared_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        # delta rules
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": size,
        "linear_value_head_dim": size, "linear_num_heads": 2, "linear_head_dim": size,
        # Mamba-2
        "num_heads": 4, "state_size": size, "ssm_state_size": size, "mamba_d_state": size,
        "mamba_n_heads": 4, "mamba_num_heads": 4, "n_mamba_heads": 4, "mamba_d_head": size,
        "mamba_head_dim": size, "n_groups": 2, "mamba_n_groups": 2, "mamba_ngroups": 2,
        "expand": size // 8, "mamba_expand": size // 8, "mamba_d_ssm": 4 * size, "chunk_size": 16,
        "mamba_chunk_size": 16,
    }  # fmt: skip


def is_there(transformers, name):
    """Whether this version of the package has the model."""
    config, model, _ = SMALL[name]
    return hasattr(transformers, f"{config}Config") and hasattr(transformers, model)


def make(transformers, name, size=16):
    """The model, with heads of this size."""
    config, model, more = SMALL[name]
    config = getattr(transformers, f"{config}Config")
    known = {field.name for field in dataclasses.fields(config)}
    options = {n: x for n, x in sizes(size).items() if n in known} | more
    if name == "mamba2":
        options["head_dim"] = size
    made = config(**options)
    if model.endswith("ForConditionalGeneration"):
        made = getattr(transformers, config.__name__.replace("Text", ""))(
            text_config=made.to_dict(), vision_config=VISION
        )
    return getattr(transformers, model)(made)

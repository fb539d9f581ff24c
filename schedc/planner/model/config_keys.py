"""The keys of a ``config.json`` that do not change what a step computes, and values that only one compute has."""

from __future__ import annotations

_WORDS = """
_name_or_path architectures auto_map model_type transformers_version torch_dtype dtype name_or_path id2label
label2id bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id
num_labels problem_type task_specific_params prefix bad_words_ids finetuning_task tokenizer_class
chunk_size_feed_forward use_cache return_dict output_attentions output_hidden_states output_router_logits
torchscript use_bfloat16 max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
encoder_no_repeat_ngram_size num_return_sequences exponential_decay_length_penalty suppress_tokens
begin_suppress_tokens forced_bos_token_id forced_eos_token_id remove_invalid_values return_dict_in_generate
output_scores gradient_checkpointing initializer_range initializer_factor embd_pdrop resid_pdrop attn_pdrop
attention_dropout hidden_dropout summary_activation summary_first_dropout summary_proj_to_labels summary_type
summary_use_proj layer_norm_epsilon layer_norm_eps rms_norm_eps norm_eps rope_theta rope_scaling rope_parameters
rope_interleave partial_rotary_factor initial_context_length original_max_position_embeddings max_window_layers
pretraining_tp ep_size tp_plan quantization_config expert_dtype swiglu_limit swiglu_alpha max_position_embeddings
n_ctx use_mtp router_aux_loss_coef aux_loss_alpha seq_aux router_jitter_noise scoring_func topk_method
norm_topk_prob routed_scaling_factor scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn
attn_implementation _attn_implementation _attn_implementation_internal attn_impl loss_type special_tokens_map
rotary_dim rope_interleaved max_sequence_length n_special predict_special_tokens is_llama_config
residual_dropout embedding_dropout classifier_dropout norm_epsilon logit_scale
embedding_multiplier logits_scaling residual_multiplier attention_multiplier final_logit_softcapping
attn_logit_softcapping query_pre_attn_scalar rope_local_base_freq cache_implementation no_rope_layers
no_rope_layer_interval for_llm_compressor attn_scale floor_scale attn_temperature_tuning moe_norm_min
input_jitter_noise clip_qkv attention_softmax_in_fp32 scale_attention_softmax_in_fp32 validate_runner_input
runner_max_sequence_length inference_runner eod_token_id
rotary_pct rotary_emb_base
"""
IRRELEVANT = frozenset(_WORDS.split())
"""What they set: names, token ids, generation, initial values, dropout, scales, rotation of positions, the
router's scores and auxiliary loss, storage of weights, choice of kernels."""

ONLY: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "tie_encoder_decoder": (False,),
    "cross_attention_hidden_size": (),
    "use_sliding_window": (False,),
    "pruned_heads": ({},),
    "qkv_bias": (False,),
    "qk_layernorm": (False,),
    "use_bidirectional_attention": (False,),
    "alibi": (False, True),
    "shared_expert_intermediate_size": (0,),
}
"""By its key, the values that leave a decoder as it is counted here. null does, too."""

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2")
"""Activations that map number by number; they differ in nothing that is counted."""

SIZES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "ffn": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "mtp": ("num_nextn_predict_layers", "num_mtp_layers"),
    "q_lora": ("q_lora_rank", "attention_q_lora_dim"),
    "kv_lora": ("kv_lora_rank", "attention_kv_lora_dim"),
    "qk_nope": ("qk_nope_head_dim", "attention_qk_dim"),
    "qk_rope": ("qk_rope_head_dim", "attention_qk_rope_dim"),
    "v": ("v_head_dim", "attention_v_dim"),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts", "num_routed_experts", "moe_num_experts"),
    "top": ("num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk"),
    "shared": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "groups": ("n_group",),
    "limit": ("topk_group",),
    "first_dense": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "dense": ("mlp_only_layers",),
    "window": ("sliding_window",),
    "windowed": ("layer_types", "sliding_window"),
}
"""By the size, the keys that say it, in the order in which they are looked for."""

"""Hugging Face models for `benchmarks/models.py`: tiny configurations, made here; nothing is downloaded."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from models_data import CLASSES, TOKENS, VOCAB

LAYERS, HIDDEN, HEADS = 2, 32, 4
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2, "head_dim": 8}
_GPT = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER_DECODER = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_T5 = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
_IMAGES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": CLASSES,
}
_SMALL_ROPE = {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}

_SOUND = {
    **{k: v for k, v in _COMMON.items() if k != "max_position_embeddings"},
    "num_labels": CLASSES,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 4, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}

CAUSAL: dict[str, dict[str, Any]] = {  # model_type: configuration
    "llama": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 8},
    "ministral": {**_GROUPED, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma": _GROUPED,
    "gemma2": {**_GROUPED, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {
        **_GROUPED,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2": _GROUPED,
    "qwen3": _GROUPED,
    "phi": _COMMON,
    "phi3": {**_GROUPED, "original_max_position_embeddings": 64},
    "gpt2": _GPT,
    "gpt_neo": {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "max_position_embeddings": 64,
    },
    "gptj": {**_GPT, "rotary_dim": 4},
    "gpt_neox": _COMMON,
    "gpt_bigcode": _GPT,
    "codegen": {**_GPT, "rotary_dim": 4},
    "opt": {**_COMMON, "ffn_dim": 64, "word_embed_proj_dim": HIDDEN},
    "bloom": {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS},
    "falcon": {**_COMMON, "new_decoder_architecture": False, "multi_query": False, "alibi": False},
    "mpt": {
        "vocab_size": VOCAB,
        "d_model": HIDDEN,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "max_seq_len": 64,
        "expansion_ratio": 2,
    },
    "olmo": _COMMON,
    "olmo2": _COMMON,
    "stablelm": {**_COMMON, "num_key_value_heads": 2},
    "starcoder2": {**_COMMON, "num_key_value_heads": 2},
    "granite": {**_COMMON, "num_key_value_heads": 2},
    "cohere": {**_COMMON, "num_key_value_heads": 2},
    "persimmon": _COMMON,
    "nemotron": {**_COMMON, "num_key_value_heads": 2},
    "smollm3": {**_COMMON, "num_key_value_heads": 2},
    "biogpt": _COMMON,
    "xglm": {"vocab_size": VOCAB, "d_model": HIDDEN, "ffn_dim": 64, "num_layers": LAYERS, "attention_heads": HEADS},
    "mamba": {**_COMMON, "state_size": 4},
    "rwkv": {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "attention_hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "context_length": 64,
    },
    "xlnet": {"vocab_size": VOCAB, "d_model": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "d_inner": 64},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **_GROUPED,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {**_GROUPED, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {**_COMMON, "num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {**_COMMON, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **_COMMON,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": HEADS,
    },
    "gpt_oss": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, **_SMALL_ROPE},
    "llama4_text": {
        **_GROUPED,
        "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 8,
    },
}
MASKED: dict[str, dict[str, Any]] = {
    "bert": _COMMON,
    "roberta": {**_COMMON, "pad_token_id": 1, "bos_token_id": 0},
    "electra": {**_COMMON, "embedding_size": 16},
    "albert": {**_COMMON, "embedding_size": 16, "num_hidden_groups": 1},
    "deberta": {**_COMMON, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16},
    "deberta-v2": {
        **_COMMON,
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_buckets": 8,
        "share_att_key": True,
    },
    "distilbert": {
        "vocab_size": VOCAB,
        "dim": HIDDEN,
        "hidden_dim": 64,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "max_position_embeddings": 64,
    },
    "mpnet": {**_COMMON, "pad_token_id": 1},
    "modernbert": {
        **_COMMON,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "cls_token_id": 3,
        "sep_token_id": 4,
    },
    "fnet": _COMMON,
    "roformer": {**_COMMON, "embedding_size": HIDDEN},
    "squeezebert": {
        **_COMMON,
        "embedding_size": HIDDEN,
        "q_groups": 2,
        "k_groups": 2,
        "v_groups": 2,
        "intermediate_groups": 2,
        "output_groups": 2,
    },
    "longformer": {**_COMMON, "attention_window": [4, 4], "pad_token_id": 1},
    "nystromformer": {**_COMMON, "num_landmarks": 4, "segment_means_seq_len": TOKENS},
}
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "mt5": {**_T5, "feed_forward_proj": "gated-gelu"},
    "bart": _ENCODER_DECODER,
    "pegasus": _ENCODER_DECODER,
    "marian": {**_ENCODER_DECODER, "decoder_vocab_size": VOCAB},
    "mbart": _ENCODER_DECODER,
    "blenderbot": _ENCODER_DECODER,
}
VISION: dict[str, dict[str, Any]] = {
    "vit": _IMAGES,
    "deit": _IMAGES,
    "beit": {**_IMAGES, "use_relative_position_bias": True},
    "dinov2": {**_IMAGES, "mlp_ratio": 2},
    "swin": {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "num_labels": CLASSES,
    },
    "swinv2": {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "num_labels": CLASSES,
    },
    "convnext": {
        "image_size": 16,
        "patch_size": 2,
        "num_stages": 2,
        "hidden_sizes": [16, 32],
        "depths": [2, 2],
        "num_labels": CLASSES,
    },
    "resnet": {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [2, 2],
        "layer_type": "basic",
        "num_labels": CLASSES,
        "image_size": 16,
    },
    "regnet": {
        "embedding_size": 8,
        "hidden_sizes": [8, 16, 16, 16],
        "depths": [1, 1, 1, 1],
        "groups_width": 4,
        "num_labels": CLASSES,
        "image_size": 32,
    },
    "segformer": {
        "image_size": 32,
        "hidden_sizes": [16, 16, 32, 32],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [2, 2, 4, 4],
        "num_labels": CLASSES,
        "decoder_hidden_size": 16,
    },
    "mobilenet_v2": {"image_size": 32, "depth_multiplier": 0.25, "num_labels": CLASSES},
    "poolformer": {"image_size": 32, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": CLASSES},
}


def whisper() -> nn.Module:
    """Speech to text: frames of a spectrogram to tokens."""
    config = {**_ENCODER_DECODER, "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32}
    return _made("WhisperForConditionalGeneration", "WhisperConfig", config)


def wav2vec2() -> nn.Module:
    """Sound to a class, from the wave itself."""
    return _made("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _SOUND)


def hubert() -> nn.Module:
    """As Wav2Vec2, with other weights."""
    return _made("HubertForSequenceClassification", "HubertConfig", _SOUND)


def audio_spectrogram_transformer() -> nn.Module:
    """A vision transformer over a spectrogram."""
    config = {k: v for k, v in _IMAGES.items() if k != "image_size"}
    config |= {"num_mel_bins": 16, "max_length": 32, "frequency_stride": 4, "time_stride": 4}
    return _made("ASTForAudioClassification", "ASTConfig", config)


def clip() -> nn.Module:
    """Images and texts in one space, trained by its own loss over the pairs of a batch."""
    config = {"text_config": _COMMON, "vision_config": _IMAGES, "projection_dim": 16}
    return _WithLoss(_made("CLIPModel", "CLIPConfig", config))


def siglip() -> nn.Module:
    """As CLIP, with a sigmoid for each pair."""
    return _WithLoss(_made("SiglipModel", "SiglipConfig", {"text_config": _COMMON, "vision_config": _IMAGES}))


def bert_classifier() -> nn.Module:
    """A text to a class."""
    return _made("BertForSequenceClassification", "BertConfig", {**_COMMON, "num_labels": CLASSES})


def _made(model: str, config: str, values: dict[str, Any]) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**values))
    return made


class _WithLoss(nn.Module):
    """A model of two towers, whose own loss is asked for whenever it is called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, pixel_values: Any, labels: Any = None) -> Any:
        return self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)

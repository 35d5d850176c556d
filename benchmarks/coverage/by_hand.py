"""Types of transformers for which neither the small settings nor the inputs that are tried fit: both, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rewire.copies import Inputs
from rewire.patterns.tiny import tiny_model

_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_IMAGE_TOKEN = 90
IDS = ("ids", 2, 12)
_SAM: dict[str, Any] = {
    "vision_config": {
        **{"image_size": 64, "patch_size": 8, "hidden_size": 32, "output_channels": 32, "num_hidden_layers": 3},
        **{"num_attention_heads": 2, "window_size": 4, "global_attn_indexes": [1], "num_pos_feats": 16},
    },
    "prompt_encoder_config": {"hidden_size": 32, "image_size": 64, "patch_size": 8},
    "mask_decoder_config": {"hidden_size": 32, "num_attention_heads": 2, "mlp_dim": 64, "iou_head_hidden_dim": 32},
}
_TEXT = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 97}

#: What tensors of whole numbers, and of some others, hold.
KINDS: dict[str, Callable[[list[int]], Tensor]] = {
    "ids": lambda sizes: torch.randint(_IMAGE_TOKEN, sizes),
    "ids behind an image": lambda sizes: torch.randint(_IMAGE_TOKEN, sizes).index_fill(
        1, torch.arange(4), _IMAGE_TOKEN
    ),
    "is image": lambda sizes: (torch.arange(sizes[1]) < 4).long().expand(sizes),
    "bits": lambda sizes: torch.randint(2, sizes),
    "false": lambda sizes: torch.zeros(sizes, dtype=torch.bool),
    "ones": lambda sizes: torch.ones(sizes, dtype=torch.long),
    "fours": lambda sizes: torch.full(sizes, 4),
    "hundreds": lambda sizes: torch.full(sizes, 100),
    "times, heights, widths": lambda sizes: torch.tensor([[1, 4, 4]]).expand(sizes),
    "boxes": lambda sizes: torch.tensor([0.125, 0.125, 0.5, 0.5]).expand(sizes),
    "positive": torch.rand,
}

#: Settings; and inputs: sizes of normally distributed numbers, or one of `KINDS`, and sizes.
BY_HAND: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "siglip2_vision_model": (
        {"num_channels": 3, "patch_size": 8, "num_patches": 16},
        {"pixel_values": (2, 16, 192), "pixel_attention_mask": ("ones", 2, 16), "spatial_shapes": ("fours", 2, 2)},
    ),
    "dbrx": ({"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}}, {"input_ids": IDS}),
    "zamba": ({"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2}, {"input_ids": IDS}),
    "zamba2": ({"layers_block_type": ["linear_attention", "hybrid", "hybrid"]}, {"input_ids": IDS}),
    "cohere_compass_text": (
        {
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
            "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        },
        {"input_ids": IDS},
    ),
    "diffusion_gemma_text": ({"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}, {"input_ids": IDS}),
    "pix2struct_vision_model": ({}, {"flattened_patches": ("positive", 2, 16, 770)}),
    "mllama_vision_model": (
        {"intermediate_layers_indices": [0, 1], "num_hidden_layers": 3, "num_global_layers": 2},
        {
            "pixel_values": (2, 1, 4, 3, 32, 32),
            "aspect_ratio_ids": ("ones", 2, 1),
            "aspect_ratio_mask": ("ones", 2, 1, 4),
        },
    ),
    "gemma4_vision": ({}, {"pixel_values": (2, 16, 192), "pixel_position_ids": ("ones", 2, 16, 2)}),
    "align": (
        {
            "projection_dim": 96,
            "vision_config": {"hidden_dim": 64, "depth_coefficient": 0.3, "width_coefficient": 0.3},
            "text_config": _TEXT,
        },
        {"input_ids": IDS, "pixel_values": (2, 3, 64, 64)},
    ),
    "pp_formulanet": (
        {
            "text_config": {
                **{"d_model": 64, "encoder_layers": 3, "decoder_layers": 3, "decoder_ffn_dim": 64, "vocab_size": 97},
                **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64},
            },
            "vision_config": {
                **_SAM["vision_config"],
                **{"mlp_dim": 64, "decoder_hidden_size": 64},
                **{f"post_conv_{part}_channels": 32 for part in ("in", "out", "mid")},
            },
        },
        {"pixel_values": (2, 3, 64, 64), "decoder_input_ids": IDS},
    ),
    "sam2_hiera_det_model": (
        {
            **{"hidden_size": 32, "image_size": [64, 64], "blocks_per_stage": [1, 2, 2, 1]},
            **{"embed_dim_per_stage": [32, 64, 128, 256], "num_attention_heads_per_stage": [1, 2, 4, 8]},
            **{"window_size_per_stage": [8, 4, 4, 4], "global_attention_blocks": [4]},
            "window_positional_embedding_background_size": [4, 4],
        },
        {"pixel_values": (2, 3, 64, 64)},
    ),
    "qwen2_5_omni_bigvgan": (
        {"mel_dim": 16, "upsample_initial_channel": 128, "upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4]},
        {"mel_spectrogram": (2, 16, 12)},
    ),
    "vibevoice_acoustic_tokenizer_decoder": (
        {"hidden_size": 16, "num_filters": 16, "downsampling_ratios": [2, 2], "depths": [2, 2, 3]},
        {"hidden_states": (2, 16, 12)},
    ),
    "efficientnet": (
        {"depth_coefficient": 1.0, "width_coefficient": 0.3, "hidden_dim": 384},
        {"pixel_values": (2, 3, 64, 64)},
    ),
    "yolos": ({"image_size": [32, 32], "num_detection_tokens": 8}, {"pixel_values": (2, 3, 32, 32)}),
    "vjepa2": ({"crop_size": 32, "frames_per_clip": 4}, {"pixel_values_videos": (2, 4, 3, 32, 32)}),
    "seggpt": (
        {"image_size": [64, 32]},
        {"pixel_values": (2, 3, 32, 32), "prompt_pixel_values": (2, 3, 32, 32), "prompt_masks": (2, 3, 32, 32)},
    ),
    "vitpose": ({}, {"pixel_values": (2, 3, 256, 192)}),
    "blip-2": (
        {"image_token_index": 90},
        {"input_ids": ("ids behind an image", 2, 12), "pixel_values": (2, 3, 32, 32)},
    ),
    "instructblip": (
        {"image_token_index": 90},
        {"input_ids": ("ids behind an image", 2, 12), "qformer_input_ids": IDS, "pixel_values": (2, 3, 32, 32)},
    ),
    "video_llama_3_vision": (
        {},
        {"pixel_values": (32, 192), "grid_thw": ("times, heights, widths", 2, 3), "merge_sizes": ("ones", 2)},
    ),
    "clap": ({"narrow": False}, {"input_ids": IDS, "input_features": (2, 1, 1001, 64), "is_longer": ("bits", 2, 1)}),
    "oneformer": ({}, {"pixel_values": (2, 3, 64, 64), "task_inputs": ("ids", 2, 77)}),
    "idefics": ({}, {"input_ids": IDS, "pixel_values": (2, 1, 3, 32, 32), "image_attention_mask": ("ones", 2, 12, 1)}),
    "pix2struct": ({}, {"flattened_patches": ("positive", 2, 16, 770), "decoder_input_ids": IDS}),
    "kosmos-2": (
        {"latent_query_num": 4},
        {"input_ids": IDS, "pixel_values": (2, 3, 32, 32), "image_embeds_position_mask": ("is image", 2, 12)},
    ),
    "llama4_vision_model": (
        {"projector_input_dim": 64, "projector_output_dim": 64, "vision_output_dim": 64, "intermediate_size": 256},
        {"pixel_values": (2, 3, 32, 32)},
    ),
    "eomt": ({"hidden_size": 32, "num_blocks": 1}, {"pixel_values": (2, 3, 32, 32)}),
    "granite_speech5_encoder": ({"context_size": 64, "num_mel_bins": 80}, {"input_features": (2, 64, 320)}),
    "sam": (_SAM, {"pixel_values": (2, 3, 64, 64), "input_points": (2, 1, 2, 2)}),
    "sam_hq": (
        {**_SAM, "mask_decoder_config": {**_SAM["mask_decoder_config"], "vit_dim": 32}},
        {"pixel_values": (2, 3, 64, 64), "input_points": (2, 1, 2, 2)},
    ),
    "sam3_vision_model": (
        {
            "backbone_config": {
                "model_type": "sam3_vit_model",
                "image_size": 64,
                "pretrain_image_size": 64,
                "patch_size": 8,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "window_size": 4,
                "global_attn_indexes": [1],
            }
        },
        {"pixel_values": (2, 3, 64, 64)},
    ),
    "zoedepth": (
        {
            "backbone_config": {
                "model_type": "beit",
                "image_size": 64,
                "num_hidden_layers": 4,
                "hidden_size": 32,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
                "reshape_hidden_states": False,
            },
            "neck_hidden_sizes": [16, 16, 16, 16],
            "fusion_hidden_size": 16,
            "bottleneck_features": 16,
        },
        {"pixel_values": (2, 3, 64, 64)},
    ),
    "siglip2": (
        {
            "text_config": {
                "hidden_size": 32,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "vocab_size": 97,
                "projection_size": 32,
            },
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "patch_size": 8,
                "num_patches": 16,
            },
        },
        {
            "input_ids": IDS,
            "pixel_values": (2, 16, 192),
            "pixel_attention_mask": ("ones", 2, 16),
            "spatial_shapes": ("fours", 2, 2),
        },
    ),
    "gemma3n_audio": ({}, {"audio_mel": (2, 64, 128), "audio_mel_mask": ("false", 2, 64)}),
    "gemma4_audio": ({}, {"input_features": (2, 64, 128), "attention_mask": ("ones", 2, 64)}),
    "kimi_k25_vision": ({}, {"pixel_values": (32, 3, 8, 8), "grid_thw": ("times, heights, widths", 2, 3)}),
    "paddleocr_vl_vision": ({}, {"pixel_values": (1, 32, 3, 8, 8), "grid_thw": ("times, heights, widths", 2, 3)}),
    "qwen3_asr_encoder": ({}, {"input_features": (2, 8, 200), "input_features_mask": ("ones", 2, 200)}),
    "qwen3_omni_moe_audio_encoder": (
        {"n_window": 50, "num_mel_bins": 8},
        {"input_features": (8, 200), "feature_lens": ("hundreds", 2)},
    ),
    "qwen2_5_omni_audio_encoder": (
        {"n_window": 50, "max_source_positions": 64},
        {"input_features": (8, 200), "feature_lens": ("hundreds", 2)},
    ),
    "qwen3_omni_moe_talker_text": ({"shared_expert_intermediate_size": 32}, {"inputs_embeds": (2, 12, 64)}),
    "xclip_vision_model": ({"num_frames": 2}, {"pixel_values": (4, 3, 32, 32)}),
    "udop": (
        {},
        {"input_ids": IDS, "bbox": ("boxes", 2, 12, 4), "decoder_input_ids": IDS, "pixel_values": (2, 3, 32, 32)},
    ),
    "chameleon": ({"vocabulary_map": {"<image>": 90, "IMGIMGAA": 91}}, {"input_ids": IDS}),
    "sam_vision_model": ({"image_size": 64}, {"pixel_values": (2, 3, 64, 64)}),
}


def by_hand(model_type: str) -> tuple[nn.Module, Inputs]:
    """The model and its inputs."""
    settings, inputs = BY_HAND[model_type]
    torch.manual_seed(0)
    return tiny_model(model_type, **settings), ((), {name: _made(*spec) for name, spec in inputs.items()})


def _made(kind: str | int, *sizes: int) -> Tensor:
    return KINDS[kind](list(sizes)) if isinstance(kind, str) else torch.randn(kind, *sizes)

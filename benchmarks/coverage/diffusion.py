# mypy: ignore-errors
"""A tiny instance, with random weights, of every model class of diffusers, and inputs that its forward takes.

``DIFFUSION`` maps the name of a class to a function that builds the model and the keyword arguments of its forward;
``NOT_RUN`` says of the other classes why they are not there. Together they name every public subclass of
``diffusers.ModelMixin`` (of version 0.42). Nothing is downloaded; each model has less than five million parameters, at
least two layers or blocks wherever its configuration has such a number, and runs on a CPU in well under a second.

Weights and inputs are the same at each build. Parameters that a class sets to zero (gates, closing projections, the
convolutions around a ControlNet) or to nothing get small random values: a branch whose output is zero would hide what
is wrong with it. Two runs agree without a seed, except that ``ConsistencyDecoderVAE`` draws noise in its forward, and
that some classes have a dropout that no configuration takes away, in training mode: ``AutoencoderKLAllegro``,
``UNet3DConditionModel`` and ``I2VGenXLUNet`` in their temporal convolutions, ``DiTTransformer2DModel`` of labels.
``WanAnimate2Transformer3DModel`` keeps keys and values of its last run in its argument ``kv_cache``.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

Arguments = dict[str, Any]
Case = Callable[[], tuple[nn.Module, Arguments]]

# --- How inputs are written: a tuple of numbers is a normal random tensor of that shape, what can be called is called,
# --- lists and dicts are made item by item, everything else stands for itself.


def _make(value: Any) -> Any:
    if isinstance(value, tuple) and all(isinstance(size, int) for size in value):
        return torch.randn(value)
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list):
        return [_make(item) for item in value]
    if isinstance(value, dict):
        return {key: _make(item) for key, item in value.items()}
    return value() if callable(value) else value


def _kw(**arguments: Any) -> Arguments:
    return arguments


def _as_is(value: Any) -> Callable[[], Any]:
    return lambda: value


def _ids(high: int, *shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(high, shape)


def _steps(batch: int = 2) -> torch.Tensor:
    """Timesteps, out of 1000."""
    return torch.linspace(100.0, 500.0, batch)


def _times(*shape: int) -> torch.Tensor:
    """Timesteps in [0, 1]."""
    return torch.linspace(0.3, 0.6, torch.Size(shape).numel()).reshape(shape)


def _mask(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


def _unmasked(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bool)


def _positions(length: int, axes: int = 3) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32)[:, None].repeat(1, axes)


def _rows(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers] * 2)


# --- What models of a family have in common.

_TEXT = (2, 5, 16)  # text: batch, tokens, channels
_TEXT1 = (1, 5, 16)
_LATENT = (2, 4, 8, 8)
_VIDEO = (1, 4, 2, 8, 8)
_IMAGE = (2, 3, 16, 16)

_DOWN = ("CrossAttnDownBlock2D", "DownBlock2D")
_UP = ("UpBlock2D", "CrossAttnUpBlock2D")


def _unet(down: str, up: str = "", kind: str = "", **more: Any) -> Arguments:
    """Two levels, of which one with attention: ``down`` is the name of the block with it, less its ``kind``."""
    config = _kw(
        sample_size=8,
        block_out_channels=(16, 32),
        down_block_types=(f"{down}{kind}", f"DownBlock{kind}"),
        norm_num_groups=8,
        cross_attention_dim=16,
    )
    if up:
        config["up_block_types"] = (f"UpBlock{kind}", f"{up}{kind}")
    return config | more


def _vae(**more: Any) -> Arguments:
    return (
        _kw(
            sample_size=16,
            block_out_channels=(16, 32),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            layers_per_block=2,
            norm_num_groups=8,
        )
        | more
    )


def _controlnet(**more: Any) -> Arguments:
    config = _unet("CrossAttnDownBlock", kind="2D", conditioning_embedding_out_channels=(8, 8), **more)
    del config["sample_size"]
    return config


def _unet_inputs(**more: Any) -> Arguments:
    return _kw(sample=_LATENT, timestep=_steps(), encoder_hidden_states=_TEXT) | more


def _motion_inputs(**more: Any) -> Arguments:
    """Three frames; the text is given once per frame."""
    return _kw(sample=(1, 4, 3, 8, 8), timestep=_steps(1), encoder_hidden_states=(3, 5, 16)) | more


def _heads(layers: str = "num_layers", **more: Any) -> Arguments:
    """Two layers of two heads of 16 channels."""
    return _kw(num_attention_heads=2, attention_head_dim=16) | {layers: 2} | more


def _latent_inputs(**more: Any) -> Arguments:
    return _kw(hidden_states=_LATENT, encoder_hidden_states=_TEXT, timestep=_steps()) | more


def _video_inputs(**more: Any) -> Arguments:
    return _kw(hidden_states=_VIDEO, encoder_hidden_states=_TEXT1, timestep=_steps(1)) | more


def _flux(**more: Any) -> Arguments:
    config = _heads(in_channels=8, num_single_layers=2, joint_attention_dim=16, axes_dims_rope=(4, 6, 6))
    return config | more


def _flux_inputs(axes: int = 3, **more: Any) -> Arguments:
    config = _kw(hidden_states=(2, 16, 8), encoder_hidden_states=_TEXT, timestep=_times(2))
    return config | _kw(img_ids=_positions(16, axes), txt_ids=_positions(5, axes)) | more


def _wan(**more: Any) -> Arguments:
    config = _heads(in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, rope_max_seq_len=32)
    return config | more


def _cogvideo(**more: Any) -> Arguments:
    config = _heads(in_channels=4, out_channels=4, time_embed_dim=16, text_embed_dim=16, max_text_seq_length=5)
    return config | _kw(sample_width=8, sample_height=8, sample_frames=5) | more


def _cogview(**more: Any) -> Arguments:
    config = _heads(in_channels=4, out_channels=4, text_embed_dim=16, time_embed_dim=16, condition_dim=8)
    return config | more


def _cogview_inputs(**more: Any) -> Arguments:
    return _latent_inputs(target_size=_rows(64.0, 64.0), crop_coords=_rows(0.0, 0.0), **more)


def _qwen(**more: Any) -> Arguments:
    config = _heads(in_channels=16, out_channels=4, joint_attention_dim=16, axes_dims_rope=(4, 6, 6))
    return config | more


def _qwen_inputs(**more: Any) -> Arguments:
    config = _kw(hidden_states=(2, 16, 16), encoder_hidden_states=_TEXT, encoder_hidden_states_mask=_mask(2, 5))
    return config | _kw(timestep=_times(2), img_shapes=_as_is([[(1, 4, 4)]] * 2)) | more


def _hunyuan_video(**more: Any) -> Arguments:
    config = _heads(in_channels=4, out_channels=4, num_single_layers=2, num_refiner_layers=2, text_embed_dim=16)
    return config | _kw(pooled_projection_dim=16, rope_axes_dim=(4, 6, 6)) | more


def _hunyuan_dit(layers: str, count: int, **more: Any) -> Arguments:
    config = _heads(layers, in_channels=4, patch_size=2, sample_size=8, hidden_size=32, cross_attention_dim=16)
    config |= _kw(cross_attention_dim_t5=16, pooled_projection_dim=16, text_len=4, text_len_t5=4)
    return config | {layers: count} | more


def _hunyuan_dit_inputs(**more: Any) -> Arguments:
    text = _kw(encoder_hidden_states=(2, 4, 16), text_embedding_mask=torch.ones(2, 4))
    text_t5 = _kw(encoder_hidden_states_t5=(2, 4, 16), text_embedding_mask_t5=torch.ones(2, 4))
    sizes = _kw(image_meta_size=_rows(64.0, 64.0, 64.0, 64.0, 0.0, 0.0), style=torch.tensor([0, 0]))
    return _latent_inputs(image_rotary_emb=[(16, 16), (16, 16)]) | text | text_t5 | sizes | more


def _sana(**more: Any) -> Arguments:
    config = _heads(in_channels=4, out_channels=4, num_cross_attention_heads=2, cross_attention_head_dim=16)
    return config | _kw(cross_attention_dim=32, caption_channels=16, sample_size=8) | more


def _sd3(**more: Any) -> Arguments:
    config = _heads(in_channels=4, out_channels=4, sample_size=8, joint_attention_dim=16, caption_projection_dim=32)
    return config | _kw(pooled_projection_dim=16, pos_embed_max_size=8) | more


def _ltx2(**more: Any) -> Arguments:
    config = _heads(in_channels=8, out_channels=8, cross_attention_dim=32, caption_channels=16)
    audio = _kw(in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16)
    return config | {f"audio_{name}": value for name, value in audio.items()} | more


def _ace(**more: Any) -> Arguments:
    return _kw(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=16) | more


def _wan_animate_cache() -> Any:
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    return WanAnimate2KVCache(num_layers=2)


# --- Class name -> its configuration, the inputs of its forward.

_UNETS: dict[str, tuple[Arguments, Arguments]] = {
    "UNet2DModel": (
        _kw(
            sample_size=8,
            block_out_channels=(16, 32),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
        ),
        _kw(sample=(2, 3, 8, 8), timestep=_steps()),
    ),
    "UNet2DConditionModel": (_unet("CrossAttnDownBlock", "CrossAttnUpBlock", "2D"), _unet_inputs()),
    "UNet1DModel": (
        _kw(sample_size=32, in_channels=4, out_channels=4, extra_in_channels=32, block_out_channels=(16, 32, 32)),
        _kw(sample=(2, 4, 32), timestep=_steps()),
    ),
    "UNet3DConditionModel": (
        _unet("CrossAttnDownBlock", "CrossAttnUpBlock", "3D", attention_head_dim=8),
        _kw(sample=(1, 4, 3, 8, 8), timestep=_steps(1), encoder_hidden_states=_TEXT1),
    ),
    "UNetSpatioTemporalConditionModel": (
        _kw(
            sample_size=8,
            block_out_channels=(32, 64),
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            cross_attention_dim=16,
            num_attention_heads=(2, 4),
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=24,
            num_frames=2,
        ),
        _kw(sample=(1, 2, 8, 8, 8), timestep=_steps(1), encoder_hidden_states=(1, 1, 16), added_time_ids=(1, 3)),
    ),
    "UNetMotionModel": (
        _unet("CrossAttnDownBlock", "CrossAttnUpBlock", "Motion", num_attention_heads=2, motion_num_attention_heads=2),
        _motion_inputs(),
    ),
    "I2VGenXLUNet": (
        _unet("CrossAttnDownBlock", "CrossAttnUpBlock", "3D", block_out_channels=(32, 64), attention_head_dim=8),
        _kw(
            sample=_VIDEO,
            timestep=_steps(1),
            fps=torch.tensor([8]),
            image_latents=_VIDEO,
            image_embeddings=(1, 16),
            encoder_hidden_states=_TEXT1,
        ),
    ),
    "Kandinsky3UNet": (
        _kw(
            time_embedding_dim=32,
            groups=4,
            attention_head_dim=8,
            layers_per_block=2,
            block_out_channels=(16, 32),
            cross_attention_dim=16,
            encoder_hid_dim=16,
        ),
        _unet_inputs(encoder_attention_mask=torch.ones(2, 5)),
    ),
    "StableCascadeUNet": (
        _kw(
            in_channels=4,
            out_channels=4,
            conditioning_dim=16,
            block_out_channels=(16, 32),
            num_attention_heads=(2, 2),
            down_num_layers_per_block=(2, 2),
            up_num_layers_per_block=(2, 2),
            clip_text_in_channels=16,
            clip_text_pooled_in_channels=16,
            clip_image_in_channels=16,
            clip_seq=2,
            timestep_ratio_embedding_dim=16,
            switch_level=(False,),
            dropout=(0.0, 0.0),
        ),
        _kw(
            sample=_LATENT, timestep_ratio=_times(2), clip_text_pooled=(2, 1, 16), clip_text=_TEXT, clip_img=(2, 1, 16)
        ),
    ),
    "UVit2DModel": (
        _kw(
            hidden_size=32,
            cond_embed_dim=16,
            micro_cond_encode_dim=8,
            micro_cond_embed_dim=40,
            encoder_hidden_size=16,
            vocab_size=33,
            codebook_size=32,
            in_channels=16,
            block_out_channels=16,
            num_res_blocks=2,
            block_num_heads=2,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            sample_size=4,
        ),
        _kw(input_ids=_ids(32, 2, 4, 4), encoder_hidden_states=_TEXT, pooled_text_emb=(2, 16), micro_conds=(2, 5)),
    ),
    "DreamLiteUNetModel": (
        _kw(
            sample_size=8,
            block_out_channels=(16, 32),
            down_block_types=("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
            up_block_types=("DreamLiteCrossAttnUpBlock2D", "DreamLiteCrossAttnNoSelfAttnUpBlock2D"),
            norm_num_groups=8,
            cross_attention_dim=16,
            attention_head_dim=2,
            ff_mult=2,
        ),
        _unet_inputs(),
    ),
    "AudioLDM2UNet2DConditionModel": (
        _unet("CrossAttnDownBlock", "CrossAttnUpBlock", "2D", cross_attention_dim=(16, 16)),
        _unet_inputs(encoder_hidden_states_1=(2, 4, 16)),
    ),
    "UNetControlNetXSModel": (
        _unet(
            "CrossAttnDownBlock",
            "CrossAttnUpBlock",
            "2D",
            num_attention_heads=2,
            ctrl_conditioning_embedding_out_channels=(8, 8),
            ctrl_block_out_channels=(8, 16),
            ctrl_num_attention_heads=2,
            ctrl_max_norm_num_groups=4,
        ),
        _unet_inputs(controlnet_cond=_IMAGE),
    ),
}

_AUTOENCODERS: dict[str, tuple[Arguments, Arguments]] = {
    "AutoencoderKL": (_vae(), _kw(sample=_IMAGE)),
    "AutoencoderKLFlux2": (_vae(latent_channels=4), _kw(sample=_IMAGE)),
    "VQModel": (_vae(num_vq_embeddings=32), _kw(sample=_IMAGE)),
    "AutoencoderTiny": (
        _kw(
            encoder_block_out_channels=(16, 16),
            decoder_block_out_channels=(16, 16),
            num_encoder_blocks=(1, 2),
            num_decoder_blocks=(2, 1),
        ),
        _kw(sample=_IMAGE),
    ),
    "AsymmetricAutoencoderKL": (
        _kw(
            sample_size=16,
            down_block_types=("DownEncoderBlock2D",) * 2,
            down_block_out_channels=(16, 32),
            layers_per_down_block=2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            up_block_out_channels=(16, 32),
            layers_per_up_block=2,
            norm_num_groups=8,
        ),
        _kw(sample=_IMAGE, mask=torch.ones(2, 1, 16, 16)),
    ),
    "AutoencoderKLTemporalDecoder": (
        _kw(block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=2),
        _kw(sample=_IMAGE, num_frames=2),
    ),
    "AutoencoderDC": (
        _kw(
            latent_channels=4,
            attention_head_dim=8,
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(16, 32),
            decoder_block_out_channels=(16, 32),
            encoder_layers_per_block=(2, 2),
            decoder_layers_per_block=(2, 2),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
        ),
        _kw(sample=_IMAGE),
    ),
    "AutoencoderOobleck": (
        _kw(
            encoder_hidden_size=8,
            downsampling_ratios=[2, 4],
            channel_multiples=[1, 2],
            decoder_channels=8,
            decoder_input_channels=4,
        ),
        _kw(sample=(2, 2, 64)),
    ),
    "AutoencoderKLAllegro": (
        _kw(block_out_channels=(8, 8, 16, 16), layers_per_block=2, norm_num_groups=2),
        _kw(sample=(1, 3, 8, 16, 16)),
    ),
    "AutoencoderKLCogVideoX": (
        _kw(
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=2,
            norm_num_groups=2,
            sample_height=32,
            sample_width=32,
        ),
        _kw(sample=(1, 3, 5, 16, 16)),
    ),
    "AutoencoderKLCosmos": (
        _kw(
            latent_channels=4,
            encoder_block_out_channels=(8, 8, 16, 16),
            decode_block_out_channels=(8, 8, 16, 16),
            attention_resolutions=(8,),
            resolution=64,
        ),
        _kw(sample=(1, 3, 9, 32, 32)),
    ),
    "AutoencoderKLHunyuanImage": (
        _kw(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(32, 32, 64),
            layers_per_block=2,
            spatial_compression_ratio=4,
            sample_size=16,
        ),
        _kw(sample=_IMAGE),
    ),
    "AutoencoderKLHunyuanImageRefiner": (
        _kw(latent_channels=4, block_out_channels=(16, 16, 32, 32, 32)),
        _kw(sample=(1, 3, 5, 16, 16)),
    ),
    "AutoencoderKLHunyuanVideo": (
        _kw(latent_channels=4, block_out_channels=(8, 8, 8, 8), norm_num_groups=4),
        _kw(sample=(1, 3, 5, 16, 16)),
    ),
    "AutoencoderKLHunyuanVideo15": (
        _kw(latent_channels=4, block_out_channels=(16, 16, 32, 32, 32)),
        _kw(sample=(1, 3, 5, 16, 16)),
    ),
    "AutoencoderKLKVAE": (_kw(channels=32, z_channels=4, ch_mult=(1, 2), sample_size=16), _kw(sample=_IMAGE)),
    "AutoencoderKLKVAEAudio": (
        _kw(
            encoder_dim=8,
            encoder_rates=[2, 4],
            latent_dim=32,
            codebook_dim=8,
            decoder_dim=32,
            decoder_rates=[4, 2],
            attn_num_heads=2,
        ),
        _kw(sample=(2, 1, 64)),
    ),
    "AutoencoderKLKVAEVideo": (
        _kw(ch=32, ch_mult=(1, 2), z_channels=4, temporal_compress_times=2),
        _kw(sample=(1, 3, 5, 8, 8)),
    ),
    "AutoencoderKLLTX2Audio": (
        _kw(base_channels=16, ch_mult=(1, 2), latent_channels=4, resolution=32, mel_bins=16),
        _kw(sample=(2, 2, 16, 16)),
    ),
    "AutoencoderKLLTX2Video": (
        _kw(
            latent_channels=8,
            block_out_channels=(8, 16, 32, 64),
            decoder_block_out_channels=(16, 32, 64),
            layers_per_block=(2, 2, 2, 2, 2),
            decoder_layers_per_block=(2, 2, 2, 2),
            patch_size=2,
        ),
        _kw(sample=(1, 3, 9, 32, 32)),
    ),
    "AutoencoderKLLTXVideo": (
        _kw(
            latent_channels=8,
            block_out_channels=(8, 16, 16, 16),
            decoder_block_out_channels=(8, 16, 16, 16),
            layers_per_block=(2, 2, 2, 2, 2),
            decoder_layers_per_block=(2, 2, 2, 2, 2),
            patch_size=2,
        ),
        _kw(sample=(1, 3, 9, 32, 32)),
    ),
    "AutoencoderKLMagvit": (
        _kw(latent_channels=4, block_out_channels=[8, 8, 16, 16], norm_num_groups=4),
        _kw(sample=(1, 3, 5, 16, 16)),
    ),
    "AutoencoderKLMiniMaxH3": (
        _kw(
            latent_channels=4,
            block_out_channels=(8, 16),
            spatial_downsample_factors=(2, 1),
            temporal_downsample_factors=(2, 1),
            norm_num_groups=4,
            decoder_num_layers=2,
            decoder_num_attention_heads=2,
            decoder_attention_head_dim=16,
            decoder_num_register_tokens=2,
            decoder_ffn_mult=2,
            clip_length=5,
            token_drop=0,
            latents_mean=(0.0,) * 4,
            latents_std=(1.0,) * 4,
        ),
        _kw(sample=(1, 3, 5, 16, 16)),
    ),
    "AutoencoderKLMiniMaxH3Audio": (
        _kw(
            encoder_dim=8,
            encoder_rates=(2, 4),
            latent_dim=32,
            latent_channels=4,
            num_attention_heads=2,
            decoder_dim=32,
            decoder_rates=(4, 2),
            decoder_kernel_sizes=(8, 4),
            resblock_kernel_sizes=(3, 5),
            resblock_dilation_sizes=((1, 3), (1, 3)),
        ),
        _kw(sample=(2, 1, 64)),
    ),
    "AutoencoderKLMochi": (
        _kw(
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            latent_channels=4,
            layers_per_block=(2, 1, 1, 1, 2),
            latents_mean=(0.0,) * 4,
            latents_std=(1.0,) * 4,
        ),
        _kw(sample=(1, 3, 7, 16, 16)),
    ),
    "AutoencoderKLQwenImage": (
        _kw(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        _kw(sample=(2, 3, 1, 16, 16)),
    ),
    "AutoencoderKLQwenImage21": (
        _kw(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=4,
            dim_mult=[1, 1, 1, 1, 1],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        _kw(sample=(1, 4, 1, 16, 16)),
    ),
    "AutoencoderKLWan": (
        _kw(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        _kw(sample=(1, 3, 5, 16, 16)),
    ),
    "AutoencoderRAE": (
        _kw(
            encoder_hidden_size=128,  # the encoder has a head per 64 channels
            encoder_patch_size=4,
            encoder_num_hidden_layers=2,
            decoder_hidden_size=32,
            decoder_num_hidden_layers=2,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=64,
            patch_size=4,
            encoder_input_size=16,
            image_size=16,
        ),
        _kw(sample=_IMAGE),
    ),
    "AutoencoderSAME": (
        _kw(
            patch_size=4,
            encoder_channels=16,
            encoder_c_mults=(2,),
            encoder_strides=(2,),
            encoder_transformer_depths=(2,),
            latent_dim=8,
            dim_heads=8,
        ),
        _kw(sample=(2, 2, 64)),
    ),
    "AutoencoderVidTok": (
        _kw(ch=32, ch_mult=[1, 2], z_channels=4),
        _kw(sample=(1, 3, 5, 8, 8), sample_posterior=False),
    ),
    "ConsistencyDecoderVAE": (
        _kw(
            encoder_block_out_channels=(16, 32),
            encoder_down_block_types=("DownEncoderBlock2D",) * 2,
            encoder_norm_num_groups=8,
            decoder_block_out_channels=(16, 32),
            decoder_down_block_types=("ResnetDownsampleBlock2D",) * 2,
            decoder_up_block_types=("ResnetUpsampleBlock2D",) * 2,
            decoder_layers_per_block=2,
            decoder_norm_num_groups=8,
            sample_size=16,
        ),
        _kw(sample=_IMAGE),
    ),
    "Cosmos3AVAEAudioTokenizer": (
        _kw(
            vocoder_input_dim=8,
            dec_dim=8,
            dec_c_mults=(1, 2),
            dec_strides=(4, 4),
            enc_dim=16,
            enc_intermediate_dim=32,
            enc_num_layers=2,
            enc_n_fft=16,
            enc_hop_length=4,
            enc_latent_dim=16,
            enc_c_mults=(1, 2),
            enc_strides=(2, 2),
        ),
        _kw(sample=(2, 2, 64)),
    ),
    "Kandinsky6SRVAE": (
        _kw(
            latent_channels=8,
            encoder_block_out_channels=(8, 16, 16, 32, 32),
            decoder_block_out_channels=(8, 16, 16, 32, 32),
        ),
        _kw(sample=(1, 3, 5, 16, 16)),
    ),
    "LongCatAudioDiTVae": (
        _kw(
            channels=8,
            c_mults=[1, 2],
            strides=[2, 4],
            latent_dim=8,
            encoder_latent_dim=16,
            downsampling_ratio=8,
        ),
        _kw(sample=(2, 1, 64)),
    ),
    "MMAudioVAE": (
        _kw(mel_bins=16, latent_channels=4, hidden_channels=16, channel_multipliers=(1, 2), n_fft=64, hop_length=16),
        _kw(sample=(2, 256)),
    ),
    "MMAudioVocoder": (
        _kw(
            num_mels=8,
            upsample_initial_channel=32,
            upsample_rates=(4, 2),
            upsample_kernel_sizes=(8, 4),
            resblock_kernel_sizes=(3, 5),
            resblock_dilation_sizes=((1, 3), (1, 3)),
        ),
        _kw(mel=(2, 8, 16)),
    ),
    "MiniMaxMusic3Vocoder": (
        _kw(latent_channels=8, decoder_input_dim=16, decoder_hidden_dim=32, upsampling_ratios=(4, 2)),
        _kw(latents=(2, 8, 16)),
    ),
    "RFD4ProteinaAutoencoder": (
        _kw(
            atom37_mask=[[True] * 37] * 8,
            allowed_residue_types=[[True] * 8] * 3,
            latent_dim=8,
            n_residue_types=8,
            num_token_types=3,
            nlayers=2,
            token_dim=32,
            nheads=2,
            dim_cond=16,
            pair_repr_dim=16,
            token_type_emb_dim=8,
        ),
        _kw(
            z_latent=(2, 5, 8),
            ca_coors_nm=(2, 5, 3),
            padding_mask=_mask(2, 5),
            token_type=_ids(3, 2, 5),
            conditioning=_kw(is_in_context_conditioning=_unmasked(2, 5), supports_local_latent=_mask(2, 5)),
        ),
    ),
    "Kandinsky6SRLatentUpscalerBank": (
        _kw(in_channels=4, stage_channels=(32, 16, 8), num_pre_blocks=2, num_mid_blocks=2, num_post_blocks=2),
        _kw(latents=(1, 4, 2, 4, 4), scale=2),
    ),
}

_TRANSFORMERS: dict[str, tuple[Arguments, Arguments]] = {
    "Transformer2DModel": (
        _heads(in_channels=32, norm_num_groups=8, cross_attention_dim=16),
        _kw(hidden_states=(2, 32, 8, 8), encoder_hidden_states=_TEXT),
    ),
    "TransformerTemporalModel": (
        _heads(in_channels=32, norm_num_groups=8),
        _kw(hidden_states=(4, 32, 4, 4), num_frames=2),
    ),
    "DreamLiteTransformer2DModel": (
        _heads(in_channels=32, norm_num_groups=8, cross_attention_dim=16),
        _kw(hidden_states=(2, 32, 4, 4), encoder_hidden_states=_TEXT),
    ),
    "DiTTransformer2DModel": (
        _heads(in_channels=4, sample_size=8, num_embeds_ada_norm=8),
        _kw(hidden_states=_LATENT, timestep=torch.tensor([1, 5]), class_labels=torch.tensor([1, 3])),
    ),
    "PixArtTransformer2DModel": (
        _heads(cross_attention_dim=32, sample_size=8, caption_channels=16, use_additional_conditions=False),
        _latent_inputs(added_cond_kwargs=_kw(aspect_ratio=None, resolution=None)),
    ),
    "PriorTransformer": (
        _heads(embedding_dim=16, num_embeddings=5),
        _kw(
            hidden_states=(2, 16),
            timestep=_steps(),
            proj_embedding=(2, 16),
            encoder_hidden_states=_TEXT,
            attention_mask=_mask(2, 5),
        ),
    ),
    "T5FilmDecoder": (
        _kw(
            input_dims=8,
            targets_length=8,
            d_model=32,
            num_layers=2,
            num_heads=2,
            d_kv=16,
            d_ff=64,
            dropout_rate=0.0,
        ),
        _kw(
            encodings_and_masks=[[(2, 8, 32), torch.ones(2, 8)]],
            decoder_input_tokens=(2, 8, 8),
            decoder_noise_time=_times(2),
        ),
    ),
    "UniDiffuserModel": (
        _heads(
            text_dim=16,
            clip_img_dim=16,
            num_text_tokens=5,
            in_channels=4,
            out_channels=4,
            sample_size=8,
            patch_size=2,
            activation_fn="gelu",
            num_embeds_ada_norm=1000,
        )
        | _kw(num_layers=4),
        _kw(
            latent_image_embeds=_LATENT,
            image_embeds=(2, 1, 16),
            prompt_embeds=_TEXT,
            timestep_img=_steps(),
            timestep_text=_steps(),
        ),
    ),
    "SD3Transformer2DModel": (_sd3(), _latent_inputs(pooled_projections=(2, 16))),
    "FluxTransformer2DModel": (_flux(pooled_projection_dim=16), _flux_inputs(pooled_projections=(2, 16))),
    "Flux2Transformer2DModel": (
        _flux(axes_dims_rope=(4, 4, 4, 4), timestep_guidance_channels=16),
        _flux_inputs(4, guidance=torch.ones(2)),
    ),
    "Flux3Transformer2DModel": (
        _flux(axes_dims_rope=(4, 4, 4, 4), cond_in_channels=8, timestep_channels=16),
        _flux_inputs(4, image_cond_hidden_states=(2, 6, 8), image_cond_ids=_positions(6, 4)),
    ),
    "BriaTransformer2DModel": (_flux(), _flux_inputs()),
    "BriaFiboTransformer2DModel": (_flux(text_encoder_dim=16), _flux_inputs(text_encoder_layers=[_TEXT] * 4)),
    "BriaFibo2Transformer2DModel": (
        _kw(
            in_channels=4,
            dim=32,
            n_layers=3,
            n_heads=2,
            cap_feat_dim=16,
            injection_layer_ids=(1,),
            min_num_gist_tokens=4,
            max_num_gist_tokens=8,
            gist_step=4,
            gist_min_text_len=4,
            gist_max_text_len=16,
            axes_dims=(4, 6, 6),
            axes_lens=(32, 32, 32),
        ),
        _kw(hidden_states=_LATENT, timestep=_times(2), encoder_hidden_states=(2, 2, 5, 16)),
    ),
    "ChromaTransformer2DModel": (
        _flux(approximator_num_channels=16, approximator_hidden_dim=32, approximator_layers=2),
        _flux_inputs(),
    ),
    "LongCatImageTransformer2DModel": (_flux(pooled_projection_dim=16), _flux_inputs()),
    "OvisImageTransformer2DModel": (_flux(out_channels=8), _flux_inputs()),
    "AuraFlowTransformer2DModel": (
        _heads(
            "num_mmdit_layers",
            num_single_dit_layers=2,
            sample_size=8,
            joint_attention_dim=16,
            caption_projection_dim=32,
            pos_embed_max_size=16,
        ),
        _latent_inputs(timestep=_times(2)),
    ),
    "HunyuanDiT2DModel": (_hunyuan_dit("num_layers", 4), _hunyuan_dit_inputs()),
    "HunyuanImageTransformer2DModel": (
        _heads(
            in_channels=4,
            out_channels=4,
            num_single_layers=2,
            patch_size=(2, 2),
            text_embed_dim=16,
            rope_axes_dim=(8, 8),
        ),
        _latent_inputs(encoder_attention_mask=_mask(2, 5)),
    ),
    "HunyuanVideoTransformer3DModel": (
        _hunyuan_video(),
        _video_inputs(encoder_attention_mask=_mask(1, 5), pooled_projections=(1, 16), guidance=torch.ones(1)),
    ),
    "HunyuanVideo15Transformer3DModel": (
        _heads(
            in_channels=9,
            out_channels=4,
            text_embed_dim=16,
            text_embed_2_dim=16,
            image_embed_dim=16,
            rope_axes_dim=(4, 6, 6),
            target_size=16,
        ),
        _video_inputs(
            hidden_states=(1, 9, 2, 4, 4),
            encoder_attention_mask=_mask(1, 5),
            encoder_hidden_states_2=(1, 4, 16),
            encoder_attention_mask_2=_mask(1, 4),
            image_embeds=(1, 3, 16),
        ),
    ),
    "HunyuanVideoFramepackTransformer3DModel": (
        _hunyuan_video(has_image_proj=True, image_proj_dim=16, has_clean_x_embedder=True),
        _video_inputs(
            encoder_attention_mask=_mask(1, 5),
            pooled_projections=(1, 16),
            image_embeds=(1, 3, 16),
            guidance=torch.ones(1),
            indices_latents=torch.arange(7, 9),
            latents_clean=(1, 4, 1, 8, 8),
            indices_latents_clean=torch.arange(6, 7),
            latents_history_2x=(1, 4, 2, 8, 8),
            indices_latents_history_2x=torch.arange(4, 6),
            latents_history_4x=(1, 4, 4, 8, 8),
            indices_latents_history_4x=torch.arange(4),
        ),
    ),
    "LatteTransformer3DModel": (
        _heads(
            in_channels=4,
            out_channels=4,
            cross_attention_dim=32,
            attention_bias=True,
            sample_size=8,
            patch_size=2,
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            caption_channels=16,
            video_length=2,
            activation_fn="gelu-approximate",
        ),
        _video_inputs(),
    ),
    "LuminaNextDiT2DModel": (
        _kw(
            sample_size=8,
            hidden_size=32,
            num_layers=2,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=16,
            cross_attention_dim=32,
        ),
        _kw(
            hidden_states=_LATENT,
            timestep=_times(2),
            encoder_hidden_states=(2, 5, 32),
            encoder_mask=torch.ones(2, 5),
            image_rotary_emb=torch.polar(torch.ones(8, 8, 8), _times(8, 8, 8)),
            cross_attention_kwargs={},
        ),
    ),
    "Lumina2Transformer2DModel": (
        _kw(
            sample_size=8,
            in_channels=4,
            hidden_size=32,
            num_layers=2,
            num_refiner_layers=2,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=16,
            axes_dim_rope=(4, 6, 6),
            axes_lens=(32, 16, 16),
            cap_feat_dim=16,
        ),
        _latent_inputs(timestep=_times(2), encoder_attention_mask=_mask(2, 5)),
    ),
    "CogVideoXTransformer3DModel": (_cogvideo(), _video_inputs(hidden_states=(1, 2, 4, 8, 8))),
    "CogView3PlusTransformer2DModel": (
        _cogview(pos_embed_max_size=8, sample_size=8),
        _cogview_inputs(original_size=_rows(64.0, 64.0)),
    ),
    "CogView4Transformer2DModel": (
        _cogview(pos_embed_max_size=8, sample_size=8, rope_axes_dim=(16, 16)),
        _cogview_inputs(original_size=_rows(64.0, 64.0)),
    ),
    "GlmImageTransformer2DModel": (
        _cogview(prior_vq_quantizer_codebook_size=16),
        _cogview_inputs(prior_token_id=_ids(16, 2, 16), prior_token_drop=_unmasked(2, 16)),
    ),
    "ConsisIDTransformer3DModel": (
        _cogvideo(
            num_attention_heads=3,
            is_train_face=True,
            cross_attn_interval=1,
            cross_attn_dim_head=8,
            cross_attn_num_heads=2,
            LFE_id_dim=8,
            LFE_vit_dim=8,
            LFE_depth=5,
            LFE_dim_head=8,
            LFE_num_heads=2,
            LFE_num_id_token=2,
            LFE_num_querie=2,
            LFE_output_dim=32,  # two thirds of the model's width
            LFE_ff_mult=2,
        ),
        _video_inputs(hidden_states=(1, 2, 4, 8, 8), id_cond=(1, 8), id_vit_hidden=[(1, 2, 8)] * 5),
    ),
    "MochiTransformer3DModel": (
        _heads(pooled_projection_dim=32, in_channels=4, text_embed_dim=16, time_embed_dim=16, max_sequence_length=5),
        _video_inputs(encoder_attention_mask=_mask(1, 5)),
    ),
    "LTXVideoTransformer3DModel": (
        _heads(in_channels=8, out_channels=8, cross_attention_dim=32, caption_channels=16),
        _video_inputs(
            hidden_states=(1, 8, 8), encoder_attention_mask=torch.ones(1, 5), num_frames=2, height=2, width=2
        ),
    ),
    "LTX2VideoTransformer3DModel": (
        _ltx2(),
        _video_inputs(
            hidden_states=(1, 8, 8),
            audio_hidden_states=(1, 4, 8),
            audio_encoder_hidden_states=_TEXT1,
            num_frames=2,
            height=2,
            width=2,
            audio_num_frames=4,
        ),
    ),
    "SanaWMLTX2RefinerTransformer3DModel": (
        _ltx2(),
        _video_inputs(hidden_states=(1, 8, 8), video_rotary_emb=[_times(1, 8, 32).cos(), _times(1, 8, 32).sin()]),
    ),
    "AllegroTransformer3DModel": (
        _heads(cross_attention_dim=48, sample_height=8, sample_width=8, sample_frames=2, caption_channels=16)
        | _kw(attention_head_dim=24),
        _video_inputs(encoder_hidden_states=(1, 1, 5, 16), encoder_attention_mask=torch.ones(1, 1, 5)),
    ),
    "EasyAnimateTransformer3DModel": (
        _heads(
            in_channels=4,
            out_channels=4,
            patch_size=2,
            sample_width=8,
            sample_height=8,
            mmdit_layers=2,
            time_embed_dim=16,
            text_embed_dim=16,
        ),
        _video_inputs(),
    ),
    "SanaTransformer2DModel": (_sana(), _latent_inputs()),
    "SanaVideoTransformer3DModel": (_sana(rope_max_seq_len=32), _video_inputs()),
    "SanaWMTransformer3DModel": (
        _kw(
            in_channels=4,
            num_layers=4,
            hidden_size=32,
            num_attention_heads=2,
            linear_head_dim=16,
            caption_channels=16,
            chunk_plucker_channels=12,
        ),
        _video_inputs(
            hidden_states=(1, 4, 3, 4, 4),
            timestep=torch.full((1, 1, 3), 300.0),
            encoder_hidden_states=(1, 1, 5, 16),
            mask=torch.ones(1, 5),
            camera_conditions=torch.cat([torch.eye(4).flatten(), torch.tensor([4.0, 4.0, 2.0, 2.0])]).repeat(1, 3, 1),
            chunk_plucker=(1, 12, 3, 4, 4),
        ),
    ),
    "WanTransformer3DModel": (_wan(), _video_inputs()),
    "WanVACETransformer3DModel": (
        _wan(vace_layers=[0, 1], vace_in_channels=8),
        _video_inputs(control_hidden_states=(1, 8, 2, 8, 8), control_hidden_states_scale=torch.ones(2)),
    ),
    "WanAnimateTransformer3DModel": (
        _wan(
            in_channels=12,
            latent_channels=4,
            image_dim=16,
            motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
            motion_encoder_size=16,
            motion_style_dim=8,
            motion_dim=4,
            motion_encoder_dim=16,
            face_encoder_hidden_dim=16,
            face_encoder_num_heads=2,
            inject_face_latents_blocks=2,
        ),
        _video_inputs(
            hidden_states=(1, 12, 3, 8, 8),
            encoder_hidden_states_image=(1, 3, 16),
            pose_hidden_states=_VIDEO,
            face_pixel_values=(1, 3, 5, 16, 16),
        ),
    ),
    "WanAnimate2Transformer3DModel": (  # the reference pass; the other one has the attention named in NOT_RUN
        _kw(
            text_len=5,
            in_dim=8,
            dim=32,
            ffn_dim=64,
            freq_dim=16,
            text_dim=16,
            out_dim=4,
            num_heads=2,
            num_layers=2,
            use_img_emb=False,
        ),
        _kw(
            hidden_states=[(4, 2, 8, 8)],
            timestep=_steps(1),
            encoder_hidden_states=[(5, 16)],
            condition_latents=[(4, 2, 8, 8)],
            kv_cache=_wan_animate_cache,
            kv_cache_mode="extract",
            seq_len=32,
            offset_grid_sizes=torch.tensor([[2, 4, 4]]),
        ),
    ),
    "ChronoEditTransformer3DModel": (_wan(), _video_inputs()),
    "SkyReelsV2Transformer3DModel": (_wan(), _video_inputs()),
    "AnyFlowTransformer3DModel": (
        _wan(),
        _video_inputs(hidden_states=(1, 2, 4, 8, 8), timestep=_times(1, 2), r_timestep=_times(1, 2) / 2),
    ),
    "HeliosTransformer3DModel": (
        _heads(in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, rope_dim=(4, 6, 6)),
        _video_inputs(
            indices_hidden_states=torch.arange(7, 9)[None],
            indices_latents_history_short=torch.arange(6, 7)[None],
            indices_latents_history_mid=torch.arange(4, 6)[None],
            indices_latents_history_long=torch.arange(4)[None],
            latents_history_short=(1, 4, 1, 8, 8),
            latents_history_mid=(1, 4, 2, 8, 8),
            latents_history_long=(1, 4, 4, 8, 8),
        ),
    ),
    "StableAudioDiTModel": (
        _heads(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            num_key_value_attention_heads=2,
            cross_attention_dim=16,
            time_proj_dim=16,
            global_states_input_dim=16,
            cross_attention_input_dim=16,
        ),
        _kw(
            hidden_states=(2, 4, 8),
            timestep=_times(2),
            encoder_hidden_states=_TEXT,
            global_hidden_states=(2, 1, 16),
            rotary_embedding=[_times(9, 8).cos(), _times(9, 8).sin()],
        ),
    ),
    "StableAudio3DiTModel": (
        _kw(
            io_channels=8,
            embed_dim=32,
            depth=2,
            num_heads=2,
            cond_token_dim=16,
            global_cond_dim=16,
            local_add_cond_dim=9,
            timestep_features_dim=16,
            ff_mult=2.0,
            num_memory_tokens=4,
        ),
        _kw(
            hidden_states=(2, 8, 12),
            timestep=_times(2),
            encoder_hidden_states=_TEXT,
            global_hidden_states=(2, 16),
            local_add_cond=(2, 9, 12),
        ),
    ),
    "LongCatAudioDiTTransformer": (
        _kw(dit_dim=32, dit_depth=2, dit_heads=2, dit_text_dim=16, latent_dim=8),
        _kw(
            hidden_states=(2, 8, 8),
            encoder_hidden_states=_TEXT,
            encoder_attention_mask=_mask(2, 5),
            timestep=_times(2),
            attention_mask=_mask(2, 8),
            latent_cond=(2, 8, 8),
        ),
    ),
    "AceStepTransformer1DModel": (
        _ace(num_hidden_layers=2, in_channels=24, audio_acoustic_hidden_dim=8),
        _kw(
            hidden_states=(2, 8, 8),
            timestep=_times(2),
            timestep_r=_times(2),
            encoder_hidden_states=(2, 5, 32),
            context_latents=(2, 8, 16),
        ),
    ),
    "MiniMaxMusic3Transformer1DModel": (
        _heads(in_channels=8, condition_dim=16, ff_inner_dim=64, rotary_dim=8, fourier_embedding_dim=16),
        _kw(hidden_states=(2, 8, 12), timestep=_times(2), encoder_hidden_states=(2, 12, 16)),
    ),
    "MiniMaxMusic3RVQDepthDecoder": (
        _kw(
            hidden_size=32,
            num_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            audio_vocab_size=32,
            num_codebooks=2,
        ),
        _kw(inputs_embeds=(2, 5, 32)),
    ),
    "MiniMaxH3Transformer3DModel": (  # one sequence: 5 tokens of text, 8 of video, 4 of audio
        _heads(
            hidden_size=32,
            ffn_dim=64,
            in_channels=4,
            audio_in_channels=4,
            text_dim=16,
            freq_dim=16,
            time_embed_hidden_dim=32,
            time_embed_dim=16,
            rope_freq_dim=2,
        ),
        _kw(
            hidden_states=(1, 8, 16),
            audio_hidden_states=(1, 4, 4),
            encoder_hidden_states=_TEXT1,
            timestep=_times(2),
            timestep_indices=torch.tensor([0] * 5 + [1] * 12),
            token_tags=torch.tensor([1] * 5 + [0] * 8 + [2] * 4),
            position_ids=_positions(17),
            video_indices=torch.arange(5, 13),
            audio_indices=torch.arange(13, 17),
            text_indices=torch.arange(5),
        ),
    ),
    "QwenImageTransformer2DModel": (_qwen(), _qwen_inputs()),
    "QwenImage21Transformer2DModel": (
        _heads(in_channels=8, out_channels=8, context_in_dim=16, axes_dims_rope=(4, 6, 6)),
        _kw(
            hidden_states=(1, 16, 8),
            encoder_hidden_states=_TEXT1,
            timestep=_times(1),
            img_shapes=_as_is([[(1, 4, 4)]]),
            img_mask=torch.tensor([[False] * 5 + [True] * 4]),
            encoder_hidden_states_mask=_mask(1, 5),
        ),
    ),
    "NucleusMoEImageTransformer2DModel": (
        _qwen(num_layers=5, num_experts=4, moe_intermediate_dim=32, capacity_factors=[2.0] * 5),
        _qwen_inputs(img_shapes=_as_is([(1, 4, 4)] * 2)),
    ),
    "OmniGenTransformer2DModel": (
        _kw(
            hidden_size=32,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=64,
            num_layers=2,
            pad_token_id=0,
            vocab_size=32,
            max_position_embeddings=64,
            original_max_position_embeddings=64,
            pos_embed_max_size=16,
            time_step_dim=16,
            rope_scaling=_kw(long_factor=[1.0] * 8, short_factor=[1.0] * 8),
        ),
        _kw(
            hidden_states=_LATENT,
            timestep=_steps(),
            input_ids=_ids(32, 2, 5),
            input_img_latents=[],
            input_image_sizes={},
            attention_mask=torch.ones(2, 22, 22),
            position_ids=torch.arange(22)[None].repeat(2, 1),
        ),
    ),
    "HiDreamImageTransformer2DModel": (
        _heads(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_single_layers=2,
            caption_channels=[16, 16],
            text_emb_dim=16,
            axes_dims_rope=(4, 6, 6),
            max_resolution=(8, 8),
            llama_layers=(0, 1, 2, 3),
        ),
        _kw(
            hidden_states=_LATENT,
            timesteps=_steps(),
            encoder_hidden_states_t5=_TEXT,
            encoder_hidden_states_llama3=(4, 2, 5, 16),
            pooled_embeds=(2, 16),
        ),
    ),
    "CosmosTransformer3DModel": (
        _heads(in_channels=4, out_channels=4, text_embed_dim=16, adaln_lora_dim=8, max_size=(4, 16, 16)),
        _video_inputs(timestep=_times(1), fps=16, padding_mask=torch.zeros(1, 1, 8, 8)),
    ),
    "Cosmos3OmniTransformer": (  # one sequence: 5 tokens of text, 8 of video
        _kw(
            head_dim=16,
            hidden_size=32,
            intermediate_size=64,
            latent_channel=4,
            patch_latent_dim=16,
            num_attention_heads=2,
            num_hidden_layers=2,
            num_key_value_heads=1,
            vocab_size=32,
            rope_axes_dim=(4, 2, 2),
        ),
        _kw(
            input_ids=_ids(32, 5),
            text_indexes=torch.arange(5),
            position_ids=torch.arange(13)[None].repeat(3, 1),
            und_len=5,
            sequence_length=13,
            vision_tokens=[(1, 4, 2, 4, 4)],
            vision_token_shapes=_as_is([(2, 2, 2)]),
            vision_sequence_indexes=torch.arange(5, 13),
            vision_mse_loss_indexes=torch.arange(5, 13),
            vision_timesteps=torch.full((8,), 300.0),
            vision_noisy_frame_indexes=[torch.arange(2)],
        ),
    ),
    "ErnieImageTransformer2DModel": (
        _kw(
            hidden_size=32,
            num_attention_heads=2,
            num_layers=2,
            ffn_hidden_size=64,
            in_channels=8,
            out_channels=8,
            text_in_dim=16,
            rope_axes_dim=(4, 6, 6),
        ),
        _kw(hidden_states=(2, 8, 4, 4), timestep=_steps(), text_bth=_TEXT, text_lens=torch.tensor([5, 4])),
    ),
    "Ideogram4Transformer2DModel": (
        _heads(in_channels=8, intermediate_size=64, adaln_dim=16, llm_features_dim=16, mrope_section=(4, 2, 2)),
        _kw(
            hidden_states=(2, 12, 8),
            timestep=_times(2),
            encoder_hidden_states=(2, 12, 16),
            position_ids=_positions(12).long()[None].repeat(2, 1, 1),
            segment_ids=torch.zeros(2, 12, dtype=torch.long),
            indicator=_rows(*[3] * 4, *[2] * 8),  # text, image
        ),
    ),
    "JoyImageEditTransformer3DModel": (
        _kw(in_channels=4, hidden_size=32, num_attention_heads=2, text_dim=16, num_layers=2, rope_dim_list=[4, 6, 6]),
        _kw(hidden_states=(2, 1, 4, 2, 8, 8), timestep=_steps(), encoder_hidden_states=_TEXT),
    ),
    "JoyImageEditPlusTransformer3DModel": (
        _kw(in_channels=4, hidden_size=32, num_attention_heads=2, text_dim=16, num_layers=2, rope_dim_list=[4, 6, 6]),
        _kw(
            hidden_states=(2, 16, 4, 1, 2, 2),
            timestep=_steps(),
            encoder_hidden_states=_TEXT,
            shape_list=_as_is([[(1, 4, 4)]] * 2),
        ),
    ),
    "Kandinsky5Transformer3DModel": (
        _kw(
            in_text_dim=16,
            in_text_dim2=16,
            time_dim=16,
            model_dim=32,
            ff_dim=64,
            num_text_blocks=2,
            num_visual_blocks=2,
            axes_dims=(4, 6, 6),
        ),
        _video_inputs(
            hidden_states=(1, 2, 8, 8, 4),
            pooled_projections=(1, 16),
            visual_rope_pos=[torch.arange(2), torch.arange(4), torch.arange(4)],
            text_rope_pos=torch.arange(5),
        ),
    ),
    "Kandinsky6Transformer3DModel": (
        _kw(
            in_visual_dim=4,
            out_visual_dim=4,
            in_text_dim=16,
            in_text_dim2=16,
            time_dim=16,
            model_dim=32,
            ff_dim=64,
            num_text_blocks=2,
            num_visual_blocks=2,
            axes_dims=(4, 6, 6),
            in_audio_dim=4,
            out_audio_dim=4,
            visual_cond=False,
        ),
        _video_inputs(hidden_states=(1, 2, 8, 8, 4), pooled_projections=(1, 16), audio_hidden_states=(1, 6, 4)),
    ),
    "Krea2Transformer2DModel": (
        _heads(
            in_channels=8,
            num_key_value_heads=1,
            intermediate_size=64,
            timestep_embed_dim=16,
            text_hidden_dim=32,
            num_text_layers=2,
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=64,
            axes_dims_rope=(4, 6, 6),
        ),
        _kw(
            hidden_states=(2, 16, 8),
            encoder_hidden_states=(2, 5, 2, 32),
            timestep=_times(2),
            position_ids=_positions(21),
        ),
    ),
    "MotifVideoTransformer3DModel": (
        _heads(in_channels=4, out_channels=4, num_single_layers=2, text_embed_dim=16, rope_axes_dim=(4, 6, 6)),
        _video_inputs(encoder_attention_mask=torch.ones(1, 5)),
    ),
    "PRXTransformer2DModel": (
        _kw(in_channels=4, context_in_dim=16, hidden_size=32, num_heads=2, depth=2, axes_dim=[8, 8]),
        _latent_inputs(timestep=_times(2), attention_mask=_mask(2, 5)),
    ),
    "RFD4ProteinaTransformer": (
        _kw(
            nlayers=2,
            token_dim=32,
            nheads=2,
            dim_cond=16,
            pair_repr_dim=16,
            latent_dim=8,
            token_type_emb_dim=8,
            cath_emb_dim=8,
            t_emb_dim=16,
            seq_sep_dim=8,
            xt_pair_dist_dim=6,
            tri_mult_c=16,
            num_sequence_classes=8,
            num_token_types=3,
            feats_seq=("xt_bb_ca", "xt_local_latents", "token_type"),
            feats_pair_repr=("xt_bb_ca_pair_dists", "bond_mask", "bond_order"),
        ),
        _kw(
            bb_ca=(1, 5, 3),
            local_latents=(1, 5, 8),
            bb_ca_time=_times(1),
            local_latents_time=_times(1),
            padding_mask=_mask(1, 5),
            token_type=_ids(3, 1, 5),
            conditioning=_kw(is_in_context_conditioning=_unmasked(1, 5), supports_local_latent=_mask(1, 5)),
        ),
    ),
    "ZImageTransformer2DModel": (
        _kw(
            in_channels=4,
            dim=32,
            n_layers=2,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[4, 6, 6],
            axes_lens=[128, 16, 16],
        ),
        _kw(x=[(4, 1, 8, 8)] * 2, t=_times(2), cap_feats=[(5, 16), (7, 16)]),
    ),
}

_CONDITIONERS: dict[str, tuple[Arguments, Arguments]] = {
    "AceStepAudioTokenDetokenizer": (_ace(audio_acoustic_hidden_dim=8), _kw(hidden_states=(2, 4, 32))),
    "AceStepAudioTokenizer": (_ace(audio_acoustic_hidden_dim=8, fsq_dim=32), _kw(hidden_states=(2, 2, 5, 8))),
    "AceStepConditionEncoder": (
        _ace(
            text_hidden_dim=16,
            timbre_hidden_dim=8,
            num_lyric_encoder_hidden_layers=2,
            num_timbre_encoder_hidden_layers=2,
        ),
        _kw(
            text_hidden_states=_TEXT,
            text_attention_mask=torch.ones(2, 5),
            lyric_hidden_states=(2, 6, 16),
            lyric_attention_mask=torch.ones(2, 6),
            refer_audio_acoustic_hidden_states_packed=(2, 7, 8),
            refer_audio_order_mask=torch.arange(2),
        ),
    ),
    "AnimaTextConditioner": (
        _kw(
            source_dim=16,
            target_dim=32,
            model_dim=32,
            num_layers=2,
            num_attention_heads=2,
            target_vocab_size=32,
            min_sequence_length=8,
        ),
        _kw(source_hidden_states=_TEXT, target_input_ids=_ids(32, 2, 6)),
    ),
    "AudioLDM2ProjectionModel": (
        _kw(text_encoder_dim=16, text_encoder_1_dim=16, langauge_model_dim=32),
        _kw(
            hidden_states=_TEXT,
            hidden_states_1=(2, 4, 16),
            attention_mask=torch.ones(2, 5),
            attention_mask_1=torch.ones(2, 4),
        ),
    ),
    "CLIPImageProjection": (_kw(hidden_size=16), _kw(x=(2, 16))),
    "Ideogram4PromptEnhancerHead": (_kw(hidden_size=16, vocab_size=32), _kw(hidden_states=_TEXT)),
    "MiniMaxMusic3ConditionEncoder": (
        _kw(condition_hidden_dim=16, num_condition_layers=2, out_dim=16),
        _kw(hidden_states=(2, 5, 32)),
    ),
    "ReduxImageEncoder": (_kw(redux_dim=16, txt_in_features=16), _kw(x=_TEXT)),
    "StableAudio3DurationEmbedder": (_kw(output_dim=16, fourier_dim=8), _kw(seconds=torch.tensor([1.0, 2.0]))),
    "StableAudioProjectionModel": (
        _kw(text_encoder_dim=16, conditioning_dim=16, min_value=0.0, max_value=8.0),
        _kw(
            text_hidden_states=_TEXT,
            start_seconds=torch.tensor([1.0, 2.0]),
            end_seconds=torch.tensor([3.0, 4.0]),
        ),
    ),
    "UniDiffuserTextDecoder": (
        _kw(
            prefix_length=3,
            prefix_inner_dim=16,
            prefix_hidden_dim=16,
            vocab_size=32,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=2,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        _kw(input_ids=_ids(32, 2, 5), prefix_embeds=(2, 3, 16)),
    ),
}

_CONTROLNETS: dict[str, tuple[Arguments, Arguments]] = {
    "T2IAdapter": (_kw(channels=[16, 32], num_res_blocks=2, downscale_factor=2), _kw(x=_IMAGE)),
    "ControlNetModel": (_controlnet(), _unet_inputs(controlnet_cond=_IMAGE)),
    "ControlNetUnionModel": (
        _controlnet(
            num_control_type=2,
            num_trans_channel=16,
            num_trans_head=2,
            num_proj_channel=16,
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=16,
        ),
        _unet_inputs(controlnet_cond=[_IMAGE], control_type=_rows(1.0, 0.0), control_type_idx=[0]),
    ),
    "SparseControlNetModel": (
        _controlnet(
            down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
            num_attention_heads=2,
            motion_num_attention_heads=2,
        ),
        _motion_inputs(controlnet_cond=(1, 4, 3, 8, 8), conditioning_mask=torch.ones(1, 1, 3, 8, 8)),
    ),
    "FluxControlNetModel": (
        _flux(pooled_projection_dim=16),
        _flux_inputs(pooled_projections=(2, 16), controlnet_cond=(2, 16, 8)),
    ),
    "SD3ControlNetModel": (_sd3(), _latent_inputs(pooled_projections=(2, 16), controlnet_cond=_LATENT)),
    "HunyuanDiT2DControlNetModel": (
        _hunyuan_dit("transformer_num_layers", 6),
        _hunyuan_dit_inputs(controlnet_cond=_LATENT),
    ),
    "QwenImageControlNetModel": (_qwen(), _qwen_inputs(controlnet_cond=(2, 16, 16))),
    "SanaControlNetModel": (_sana(), _latent_inputs(controlnet_cond=_LATENT)),
    "CosmosControlNetModel": (
        _heads(
            "n_controlnet_blocks",
            in_channels=6,
            latent_channels=6,
            model_channels=32,
            text_embed_dim=16,
            adaln_lora_dim=8,
            max_size=(4, 16, 16),
            encoder_hidden_states_channels=16,
        ),
        _kw(
            controls_latents=_VIDEO,
            latents=_VIDEO,
            timestep=_times(1),
            encoder_hidden_states=_TEXT1,
            condition_mask=torch.ones(1, 1, 2, 8, 8),
            padding_mask=torch.zeros(1, 1, 8, 8),
            fps=16,
        ),
    ),
    "ZImageControlNetModel": (
        _kw(control_layers_places=[0, 1], control_in_dim=4, dim=32, n_heads=2, n_kv_heads=2),
        _TRANSFORMERS["ZImageTransformer2DModel"][1] | _kw(control_context=[(4, 1, 8, 8)] * 2),
    ),
}

_SPECS = _UNETS | _AUTOENCODERS | _TRANSFORMERS | _CONDITIONERS | _CONTROLNETS

# --- Building.


# The first is in LuminaNextDiT2DModel, the others are in NucleusMoEImageTransformer2DModel.
_UNWRITTEN = ("pad_token", "experts.gate_up_proj", "experts.down_proj")


def _class(name: str) -> type[nn.Module]:
    with contextlib.suppress(ImportError):
        import torchvision_stub  # noqa: F401
    import diffusers

    return getattr(diffusers, name)


def _fill(model: nn.Module) -> nn.Module:
    """Small random values for the parameters that are zero, or that nothing has been written to yet."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(_UNWRITTEN) or not parameter.any():
                parameter.normal_(std=0.05)
    return model


def _build(name: str) -> nn.Module:
    return _fill(_class(name)(**copy.deepcopy(_SPECS[name][0])))


def _case(name: str) -> tuple[nn.Module, Arguments]:
    torch.manual_seed(0)
    return _build(name), _make(_SPECS[name][1])


def _allegro_vae(name: str) -> tuple[nn.Module, Arguments]:
    """It runs on tiles only, of a size that is fixed in its code."""
    model, inputs = _case(name)
    model.enable_tiling()
    model.kernel, model.stride = (8, 16, 16), (4, 8, 8)
    return model, inputs


def _z_image_controlnet(name: str) -> tuple[nn.Module, Arguments]:
    """It takes some of its modules from the model that it controls."""
    model, inputs = _case(name)
    model.gradient_checkpointing = False  # which its forward reads and its constructor does not set
    return model.from_transformer(model, _build("ZImageTransformer2DModel")), inputs


def _several(name: str, part: str, nets: int = 2, **more: Any) -> tuple[nn.Module, Arguments]:
    """Two ControlNets, or one twice, each with an image and a scale of its own."""
    torch.manual_seed(0)
    inputs = _SPECS[part][1]
    model = _class(name)([_build(part) for _ in range(nets)])
    inputs = inputs | _kw(controlnet_cond=[inputs["controlnet_cond"]] * 2, conditioning_scale=[1.0, 0.5])
    return model, _make(inputs | _kw(return_dict=False) | more)


def _adapters(name: str) -> tuple[nn.Module, Arguments]:
    torch.manual_seed(0)
    return _class(name)([_build("T2IAdapter") for _ in range(2)]), _make(_kw(xs=[_IMAGE] * 2))


_MULTI = ("MultiControlNetModel", "SD3MultiControlNetModel", "HunyuanDiT2DMultiControlNetModel")

DIFFUSION: dict[str, Case] = (
    {name: partial(_case, name) for name in _SPECS}
    | {name: partial(_several, name, name.replace("Multi", "")) for name in _MULTI}
    | {
        "AutoencoderKLAllegro": partial(_allegro_vae, "AutoencoderKLAllegro"),
        "ZImageControlNetModel": partial(_z_image_controlnet, "ZImageControlNetModel"),
        "MultiAdapter": partial(_adapters, "MultiAdapter"),
        "FluxMultiControlNetModel": partial(
            _several,
            "FluxMultiControlNetModel",
            "FluxControlNetModel",
            controlnet_mode=[torch.zeros(2, dtype=torch.long)] * 2,
        ),
        "QwenImageMultiControlNetModel": partial(
            _several, "QwenImageMultiControlNetModel", "QwenImageControlNetModel", nets=1
        ),
    }
)

_FLEX = "flex attention alone: no gradients on a CPU"

NOT_RUN: dict[str, str] = {
    "AnyFlowFARTransformer3DModel": _FLEX,
    "Kandinsky6SRTransformer3DModel": _FLEX,
    "LTX2VideoDiffusionDecoderModel": _FLEX,
    "ControlNetXSAdapter": "its forward raises: only a part of UNetControlNetXSModel",
    "MotionAdapter": "its forward does nothing: only a holder of modules for UNetMotionModel",
}

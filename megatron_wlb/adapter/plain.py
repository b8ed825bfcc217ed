"""Training without `--wlb`: what upstream's own `pretrain_gpt.py`, which no wheel ships, gives to `pretrain()`."""

from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_wlb.adapter.loss import token_loss


def dataset_provider(num_samples: list[int | None], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Upstream's GPT, SFT or mock datasets for training, validation and test."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        hybrid_context_parallel=args.hybrid_context_parallel,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
    kind = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset

    def built_here() -> bool:
        reads = args.sft or is_first_or_last_pipeline_stage(vp_stage)
        return mpu.get_tensor_model_parallel_rank() == 0 and reads

    return BlendedMegatronDatasetBuilder(kind, num_samples, built_here, config).build()


dataset_provider.is_distributed = True  # type: ignore[attr-defined]


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Forward one micro-batch as upstream does."""
    batch = _batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),
        packed_seq_params=_packed(batch),
    )
    return output, partial(token_loss, get_args(), batch.get("loss_mask"))


def _batch(data_iterator: Any, vp_stage: int | None) -> dict[str, Any]:
    args = get_args()
    packed = args.sft or args.dataloader_inter_document_masking
    edge = is_first_or_last_pipeline_stage(vp_stage)
    if not edge and not packed:
        return {}
    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        read = next(data_iterator)
        batch = {k: v.cuda(non_blocking=True) for k, v in read.items() if isinstance(v, torch.Tensor)}
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if not edge:
        return {k: batch[k] for k in ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")}
    return dict(
        get_batch_on_this_cp_rank(
            batch,
            is_hybrid_cp=False,
            cp_group=mpu.get_context_parallel_group(),
            hybrid_cp_group_func=None,
            use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
        )
    )


def _packed(batch: dict[str, Any]) -> PackedSeqParams | None:
    if batch.get("cu_seqlens") is None:
        return None
    real = batch["cu_seqlens"].squeeze(0)
    update_seqlen_stats_from_cu_seqlens(real)
    padded = batch.get("cu_seqlens_padded")
    padded = padded.squeeze(0) if padded is not None else None
    bounds, longest = (padded if padded is not None else real), int(batch["max_seqlen"])
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=get_args().seq_length,
    )

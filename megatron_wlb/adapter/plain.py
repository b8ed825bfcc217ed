"""Training without `--wlb`: what upstream's own `pretrain_gpt.py`, which no wheel ships, gives to `pretrain()`."""

import json
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, training
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_wlb.adapter import compat
from megatron_wlb.adapter.loss import check_loss, token_loss


def dataset_provider(num_samples: list[int | None], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Upstream's GPT, SFT or mock datasets for training, validation and test."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config_class, fim = GPTDatasetConfig, {}
    if args.fim_data:
        fim = {
            "fim_rate": args.fim_rate,
            "fim_spm_rate": args.fim_spm_rate,
            "fim_extra_tokens": {
                name: getattr(args, f"fim_{name}_token") for name in ("prefix", "middle", "suffix", "pad", "eod")
            },
            "fim_split_sample": args.fim_split_sample,
            "fim_fragment_rate": args.fim_fragment_rate,
            "fim_no_prefix": args.fim_no_prefix,
        }
        config_class = GPTFIMDatasetConfig
    sequences = args.per_dataset_sequences_path
    config = config_class(
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
        **compat.known(config_class, inter_document_masking=args.dataloader_inter_document_masking),
        sequences_per_dataset=json.loads(Path(sequences).read_text()) if sequences is not None else None,
        **fim,
    )
    plain = GPTFIMDataset if args.fim_data else GPTDataset
    kind = SFTDataset if args.sft else MockGPTDataset if args.mock_data else plain

    def built_here() -> bool:
        reads = args.sft or is_first_or_last_pipeline_stage(vp_stage) or _has_mtp(vp_stage)
        return mpu.get_tensor_model_parallel_rank() == 0 and reads

    return BlendedMegatronDatasetBuilder(kind, num_samples, built_here, config).build()


dataset_provider.is_distributed = True  # type: ignore[attr-defined]


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Pipeline ranks that hold the word embeddings, those of multi-token prediction included."""
    args = get_args()
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1 and not args.untie_embeddings_and_output_weights:
        ranks.add(pp_ranks[-1])
    if len(pp_ranks) > 1:
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """Forward one micro-batch as upstream does, or plan it (`--overlap-moe-expert-parallel-comm`)."""
    with training.stimer(bdata=True):  # --log-straggler
        batch = _batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    loss = partial(_loss, batch.get("loss_mask"), model=model)
    inputs = [batch.get(name) for name in ("tokens", "position_ids", "attention_mask")]
    targets = {name: batch.get(name) for name in ("labels", "loss_mask")}
    with training.stimer:
        if return_schedule_plan:
            return model.build_schedule_plan(*inputs, **targets), loss
        return model(*inputs, **targets, packed_seq_params=_packed(batch)), loss


def _has_mtp(vp_stage: int | None) -> bool:
    return compat.mtp_on_this_rank(core_transformer_config_from_args(get_args()), vp_stage)


@lru_cache(maxsize=1)
def _distillation_loss() -> Any:
    """The loss against the log-probabilities of a teacher, read from `--logits-load-dir`."""
    from megatron.training.distillation import LossFuncCallable

    args = get_args()
    return LossFuncCallable(
        logprobs_dir=args.logits_load_dir,
        decode_threads=args.logits_load_decode_threads,
        prefetch_factor=args.logits_load_prefetch_factor,
        msc_prefetch_depth=args.logits_load_msc_prefetch_depth,
        kd_loss_alpha=args.logits_load_kd_loss_alpha,
        ignore_errors=args.logits_load_ignore_errors,
    )


def _loss(loss_mask: torch.Tensor | None, output: torch.Tensor, model: Any) -> tuple[torch.Tensor, Any, Any]:
    args = get_args()
    if args.logits_load_dir is not None:
        loss, tokens, report = _distillation_loss()(loss_mask, output, model=model)
        return check_loss(args, loss), tokens, report
    return token_loss(args, loss_mask, output)


def _batch(data_iterator: Any, vp_stage: int | None) -> dict[str, Any]:
    args = get_args()
    packed = args.sft or args.dataloader_inter_document_masking
    mtp = _has_mtp(vp_stage)
    edge = is_first_or_last_pipeline_stage(vp_stage) or mtp
    if not edge and not packed:
        return {}
    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        read = next(data_iterator)
        batch = {k: v.cuda(non_blocking=True) for k, v in read.items() if isinstance(v, torch.Tensor)}
    batch = compat.batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=packed,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = compat.flattened(batch)
    if not edge:
        return {k: batch[k] for k in ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")}
    return compat.batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=mpu.get_hybrid_data_context_parallel_groups,
        use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
    )


def _packed(batch: dict[str, Any]) -> PackedSeqParams | None:
    if batch.get("cu_seqlens") is None:
        return None
    real = batch["cu_seqlens"].squeeze(0)
    compat.count_sequence_lengths(real)
    padded = batch.get("cu_seqlens_padded")
    padded = padded.squeeze(0) if padded is not None else None
    bounds, longest = (padded if padded is not None else real), int(batch["max_seqlen"])
    return PackedSeqParams(
        **compat.thd_arguments(bounds, padded, longest),
        local_cp_size=int(batch["local_cp_size"]) if batch.get("local_cp_size") is not None else None,
        cp_group=batch.get("hybrid_cp_group"),
        **compat.known(PackedSeqParams, tokens_per_sample=get_args().seq_length),
    )

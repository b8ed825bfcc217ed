"""Trains a GPT as upstream's pretrain_gpt.py does, which no wheel ships: its own data, forward step and model."""

import functools
import importlib

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import argument_utils, arguments, get_args, pretrain
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_wlb.adapter.upstream import scripts
from megatron_wlb.adapter.upstream.versions import upstream
from megatron_wlb.layers.linear import has_linear_layers

DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer", "eval_interval": 1000}


def datasets(num_samples, vp_stage=None):
    args = get_args()
    kind = MockGPTDataset if args.mock_data else GPTDataset
    if args.sft:
        kind = importlib.import_module("megatron.training.datasets.sft_dataset").SFTDataset
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=not args.sft,
        context_parallel_size=args.context_parallel_size,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        full_validation=args.full_validation,
        multiple_validation_sets=args.multiple_validation_sets,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
    )
    return BlendedMegatronDatasetBuilder(kind, num_samples, lambda: True, config).build()


datasets.is_distributed = True


def forward_step(data_iterator, model, return_schedule_plan=False):
    batch = {name: tensor.cuda() for name, tensor in next(data_iterator).items()}
    inputs = (batch["tokens"], batch["position_ids"], batch.get("attention_mask", masked(batch)))
    mask = batch["loss_mask"]
    if return_schedule_plan:
        return model.build_schedule_plan(*inputs, labels=batch["labels"], loss_mask=mask), functools.partial(loss, mask)
    if not has_linear_layers(get_args()):
        return model(*inputs, labels=batch["labels"], loss_mask=mask), functools.partial(loss, mask)
    # No mask ends the states of such a model with a document, so it runs them one by one.
    begins = [*torch.nonzero(batch["position_ids"][0] == 0)[:, 0].tolist(), mask.shape[1]]
    output = [
        model(*(x[..., rows] for x in inputs[:2]), inputs[2][..., rows, rows], labels=batch["labels"][:, rows])
        for rows in map(slice, begins, begins[1:])
    ]
    return torch.cat(output, dim=1), functools.partial(loss, mask)


def masked(batch):
    """The mask of packed sequences, which upstream's local attention does not take otherwise."""
    if "cu_seqlens" not in batch:
        return None
    rows = torch.arange(batch["tokens"].shape[1])
    which = torch.stack([torch.searchsorted(bounds, rows, right=True) for bounds in batch["cu_seqlens"]])
    return ((which[:, :, None] != which[:, None]) | (rows[:, None] < rows)).unsqueeze(1)


def loss(loss_mask, output):
    total, tokens = torch.sum(output.view(-1).float() * loss_mask.view(-1)), loss_mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def model_provider(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """The model of local layers, which scripts make themselves before 0.19."""
    args, mtp = get_args(), None
    config = arguments.core_transformer_config_from_args(args)
    how = {"use_transformer_engine": False, "normalization": args.normalization, "vp_stage": vp_stage}
    if args.mtp_num_layers:
        *_, last = gpt_layer_specs.get_gpt_decoder_layer_specs(config, **how)
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, last, use_transformer_engine=False, vp_stage=vp_stage)
    return GPTModel(
        config,
        gpt_layer_specs.get_gpt_decoder_block_spec(config, **how),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process,
        post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def main():
    made = (datasets, model_provider, ModelType.encoder_or_decoder, forward_step)
    args = arguments.parse_and_validate_args(args_defaults=DEFAULTS)
    if upstream().passes_functions:
        pretrain(argument_utils.pretrain_cfg_container_from_args(args), *made)
        return
    make = argument_utils.hybrid_config_from_args if args.hybrid_layer_pattern else argument_utils.gpt_config_from_args
    config = argument_utils.pretrain_cfg_container_from_args(args, make(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    scripts.NEEDED.clear()  # its data and loss are its own, and taken for upstream's
    main()

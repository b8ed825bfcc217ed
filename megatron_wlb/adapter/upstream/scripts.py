"""Whether the functions of a script that do not run with `--wlb` are Megatron's, by their facts in this run.

Facts of a function are its parameters, and all that it calls, passes, selects, computes, sets and returns. A branch
that flags of the run switch off has none. So a newer Megatron trains while its new features are off.
"""

import ast
import importlib
import inspect
import textwrap
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megatron_wlb.adapter.upstream.versions import TESTED, upstream

NEEDED = {
    "forward_step": "get_batch() model() partial()",
    "loss_func": "losses*loss_mask sum() (loss,num_tokens,report)",
    "get_batch": "next()",
    "train_valid_test_datasets_provider": "BlendedMegatronDatasetBuilder() build() (train_ds,valid_ds,test_ds)",
    "core_gpt_dataset_config_from_args": "build_tokenizer() get_blend_and_blend_per_split()",
}
"""Work of each function that `--wlb` does instead. A function without it does something else."""
_KNOWN = set(
    """
    BlendedMegatronDatasetBuilder() GPTDatasetConfig() GPTFIMDatasetConfig() PackedSeqParams()
    _build_cached_logits_loss_func() build() build_schedule_plan() build_tokenizer() cat() clone()
    core_gpt_dataset_config_from_args() core_transformer_config_from_args() cuda() detach()
    flatten_batch_for_packed_sequences() float() get_args() get_attr_wrapped_model() get_batch()
    get_batch_on_this_cp_rank() get_batch_on_this_rank_for_sequence_packing() get_batch_on_this_tp_rank()
    get_blend_and_blend_per_split() get_context_parallel_group() get_rerun_state_machine()
    get_tensor_model_parallel_group() get_tensor_model_parallel_rank() get_tensor_model_parallel_src_rank()
    get_timers() getattr() int() is_first_or_last_pipeline_stage() is_pipeline_first_stage() is_pipeline_last_stage()
    item() len() load() loss_func_cached_logits() loss_func_modelopt() model() mtp_on_this_rank_func() next() open()
    partial() print_rank_0() squeeze() start() stimer() stop() sum() timers() to() update()
    update_seqlen_stats_from_cu_seqlens() validate_result() view()

    allow_ambiguous_pad_tokens= bdata= blend= blend_per_split= broadcast_group= broadcast_src_rank= context=
    context_parallel_size= cp_group= cp_size= create_attention_mask= create_attention_mask_in_dataloader=
    cu_seqlens_kv= cu_seqlens_kv_padded= cu_seqlens_q= cu_seqlens_q_padded= data_parallel_size= decode_threads=
    defer_npy_index_mmap= eod= eod_mask_loss= fast_cache_load= fatal= fim_extra_tokens= fim_fragment_rate=
    fim_no_prefix= fim_rate= fim_split_sample= fim_spm_rate= full_validation= has_cu_seqlens=
    hybrid_context_parallel= hybrid_cp_group_func= ignore_errors= ignore_virtual= inter_document_masking=
    is_hybrid_cp= is_packed_sequence= is_pipeline_first_stage= is_pipeline_last_stage= is_sft= kd_loss_alpha= labels=
    layout= lm_loss= local_cp_size= log_level= logprobs_dir= loss_mask= max_seqlen_kv= max_seqlen_q= message=
    micro_batch_size= mid_level_dataset_surplus= middle= mmap_bin_files= model= msc_prefetch_depth= mtp_num_layers=
    mtp_on_this_rank= multiple_validation_sets= non_blocking= num_dataset_builder_threads= object_storage_cache_path=
    packed_seq_params= pad= padding_mask= path_to_cache= pipeline_model_parallel_size= prefetch_factor= prefix=
    qkv_format= random_seed= rejection_func= reset_attention_mask= reset_position_ids= result= seq_length=
    sequence_length= sequence_parallel_size= sequences_per_dataset= sft_mock_dataset_config_json= split= suffix=
    threshold= tokenizer= tokens_per_sample= tolerance= total_tokens= tp_rank= use_per_sequence_balancing=
    varlen_mock_dataset_config_json= varlen_sbhd_validation= vp_stage= vpp_size=

    args: data_iterator: loss_mask: model: output_tensor: return_schedule_plan: train_val_test_num_samples: vp_stage:

    args.tensor_model_parallel_size*args.sequence_parallel batch[key]= len(batch)==6 len(batch)==7 losses*loss_mask
    tp_rank==0
    attention_mask,cu_seqlens,cu_seqlens_padded,hybrid_cp_group,labels,local_cp_size,loss_mask,max_seqlen,position_ids,tokens=batch
    tokens,labels,loss_mask,attention_mask,position_ids,packed_seq_params,padding_mask=batch
    tokens,labels,loss_mask,attention_mask,position_ids,packed_seq_params=batch
    batch['cu_seqlens'] batch['cu_seqlens_padded'] batch['max_seqlen'] batch[key] cp_size=args.context_parallel_size
    create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader cu_seqlens[0]
    cu_seqlens_for_params[-1] cu_seqlens_padded[0] dataset_type=GPTDataset dataset_type=GPTFIMDataset
    dataset_type=MockGPTDataset dataset_type=MockSFTDataset dataset_type=MockVarlenDataset dataset_type=SFTDataset
    dataset_type=VarlenDataset is_hybrid_cp=args.hybrid_context_parallel is_packed_sequence=False
    is_packed_sequence=True is_sft=args.sft packed_seq_params=None padding_mask=None sequences_per_dataset=None
    (None,batch['cu_seqlens'],batch['cu_seqlens_padded'],None,None,None,None,batch['max_seqlen'],None,None)
    (loss,num_tokens,report) (output_tensor,partial(loss_func,loss_mask,model=model))
    (schedule_plan,partial(loss_func,loss_mask,model=model)) (train_ds,valid_ds,test_ds)
    [Nonefor_inBATCH_KEYS] [batch[key]forkeyinBATCH_KEYS]
    """.split()
)
"""Facts of these functions in pretrain_gpt.py and pretrain_hybrid.py of the tested versions, with or without effect."""


def check_script(model: Any, model_provider: Any, forward_step: Any, args: Namespace) -> None:
    """Check the arguments of a script's `pretrain()`, whose `forward_step` will not run.

    Raises ValueError for another model than upstream's GPT and hybrid model, and for functions that do more
    in this run than upstream's tested ones. The first rank prints their other additions.
    """
    if not upstream().passes_functions:
        models = importlib.import_module("megatron.training.models")
        if type(model) not in (models.GPTModelConfig, models.HybridModelConfig) or model_provider is not None:
            raise another_model("model_provider" if model_provider is not None else type(model).__name__)
        if type(model) is models.GPTModelConfig and model.transformer.is_hybrid_model:
            raise ValueError("this script ignores --hybrid-layer-pattern; run pretrain_hybrid.py or leave it out")
    here = forward_step.__globals__ | {"forward_step": forward_step}
    trees = {name: _tree(here.get(name)) for name in NEEDED}
    newer = f"is of a newer Megatron-LM than those tested ({TESTED})"
    if differences := _differences(trees, args):
        raise ValueError(
            f"{inspect.getfile(forward_step)} {newer}, or was changed: {differences}. --wlb has its own data, forward "
            "pass and loss, and would leave that out; take a tested Megatron-LM or a newer megatron_wlb, undo the "
            "change, run the pretrain_gpt.py of megatron_wlb, or train without --wlb"
        )
    if (unused := _differences(trees, None)) and args.rank == 0:
        print(f"> wlb: this script {newer}, which makes no difference with these flags: {unused}", flush=True)


def another_model(name: str) -> ValueError:
    """Return the error that refuses a script's model of that class, or from that argument of `pretrain()`."""
    other = "a model_provider of its own" if name == "model_provider" else f"a model of {name}"
    return ValueError(f"--wlb trains Megatron's GPT and hybrid models, and this script has {other}; leave --wlb out")


def _tree(function: Any) -> ast.AST:
    """Return the definition of a function; of anything else, an empty one."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (TypeError, OSError):
        return ast.Module([], [])


def _differences(trees: dict[str, ast.AST], args: Namespace | None) -> str:
    """Name unknown and missing facts of functions, with the flags `args`; of all branches with None."""
    found = []
    for name, tree in trees.items():
        facts = set(_facts(tree, args))
        found += [f"{name} has {' '.join(new)}"] if (new := sorted(facts - _KNOWN)) else []
        found += [f"{name} lacks {' '.join(gone)}"] if (gone := sorted(set(NEEDED[name].split()) - facts)) else []
    return ", ".join(found)


def _facts(node: ast.AST, args: Namespace | None) -> Iterator[str]:
    match node:
        case ast.If(test=test, body=body, orelse=orelse) if (holds := _holds(test, args)) is not None:
            for child in body if holds else orelse:
                yield from _facts(child, args)
            return
        case ast.keyword(arg=str() as name, value=value):
            if _holds(value, args) is False:
                return
            yield f"{name}="
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant) and _holds(value, args) is not False:
                    yield str(key.value).replace(" ", "_") + "="
        case ast.arg(arg=name):
            yield f"{name}:"
        case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)):
            yield f"{name}()"
        case ast.Assign(value=ast.Name() | ast.Attribute() | ast.Constant()):
            yield _text(node)
        case ast.Assign(targets=targets):
            yield from (f"{_text(t)}=" for t in targets if not isinstance(t, ast.Name | ast.Tuple))
        case ast.Subscript(ctx=ast.Load()):
            yield _text(node)
        case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]):
            pass
        case ast.BinOp() | ast.Compare() | ast.AugAssign():
            yield _text(node)
        case ast.Return(value=ast.Tuple() | ast.ListComp() as value):
            yield _text(value)
    for name, part in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in part if isinstance(part, list) else [part]:
                if isinstance(child, ast.AST):
                    yield from _facts(child, args)


def _holds(test: ast.expr, args: Namespace | None) -> bool | None:
    """Return whether a condition on flags alone holds; None for any other, or without flags."""
    nodes = [*ast.walk(test)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    flags = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    if args is None or names != {"args"} or not flags <= vars(args).keys():
        return None
    if any(isinstance(node, ast.Call | ast.Subscript) for node in nodes):
        return None
    return bool(eval(compile(ast.Expression(test), "flags", "eval"), {"args": args}))


def _text(node: ast.AST) -> str:
    return ast.unparse(node).replace(" ", "")

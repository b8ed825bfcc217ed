"""From command line to upstream's `pretrain()`: with `--wlb` through WlbJob, without it as upstream does."""

import contextlib
from argparse import Namespace
from typing import Any

from megatron.core.enums import ModelType
from megatron.training import checkpointing, pretrain
from megatron.training.arguments import parse_args

from megatron_wlb.adapter import arguments, compat, plain
from megatron_wlb.adapter.job import WlbJob
from megatron_wlb.adapter.model import configure


def parse() -> tuple[Namespace, WlbJob | None]:
    """Parse and validate the command line; the job is None without `--wlb`.

    Raises ValueError on bad input to `--wlb`, before any process group is made.
    """
    args = parse_args(arguments.add_wlb_arguments)
    compat.check_flags(args)
    # First ours, whose messages name the remedy; upstream's validation asserts.
    if args.wlb and not args.use_checkpoint_args:
        arguments.check(args, arguments.config_from_args(args))
    with compat.replaced(
        checkpointing, "load_args_from_checkpoint", arguments.checked_with_checkpoint, ("args", "load_arg")
    ):
        args = compat.parse_and_validate(
            arguments.add_wlb_arguments,
            # Upstream 0.19 divides by the evaluation interval even if nothing is evaluated, and has no default for it.
            {"tokenizer_type": "GPT2BPETokenizer", "eval_interval": 1000},
        )
    if not args.wlb:
        return args, None
    args.dataloader_type = "external"
    return args, WlbJob(args, arguments.config_from_args(args))


def train(args: Namespace, job: WlbJob | None) -> None:
    """Run upstream's `pretrain()`."""
    model = compat.model_config(args)
    provider: Any = plain.dataset_provider
    forward_step: Any = plain.forward_step
    context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if job is not None:
        configure(model, options=job.attention_options, context_length=args.seq_length)
        provider, forward_step, context = job.dataset_provider, job.forward_step, job.installed()
    with compat.prebuilt_dataset_helpers(), compat.parsed(args), context:
        pretrain(
            **compat.pretrain_arguments(args, model),
            train_valid_test_dataset_provider=provider,
            model_type=ModelType.encoder_or_decoder,
            forward_step_func=forward_step,
            get_embedding_ranks=plain.embedding_ranks,
        )

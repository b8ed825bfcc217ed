"""From command line to upstream's `pretrain()`: with `--wlb` through WlbJob, without it as upstream does."""

import contextlib
from argparse import Namespace
from typing import Any

from megatron.core.enums import ModelType
from megatron.training import inprocess_restart, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args, parse_args

from megatron_wlb.adapter import arguments, compat, plain
from megatron_wlb.adapter.job import WlbJob
from megatron_wlb.adapter.model import configure


def parse() -> tuple[Namespace, WlbJob | None]:
    """Parse and validate the command line; the job is None without `--wlb`.

    Raises ValueError on bad input to `--wlb`, before any process group is made.
    """
    args = parse_args(arguments.add_wlb_arguments)
    config = None
    if args.wlb:
        # First ours, whose messages name the remedy; upstream's validation asserts.
        config = arguments.config_from_args(args)
        arguments.check(args, config)
    args = parse_and_validate_args(
        extra_args_provider=arguments.add_wlb_arguments,
        # Upstream 0.19 divides by the evaluation interval even if nothing is evaluated, and has no default for it.
        args_defaults={"tokenizer_type": "GPT2BPETokenizer", "eval_interval": 1000},
    )
    if config is None:
        return args, None
    args.dataloader_type = "external"
    return args, WlbJob(args, config)


def train(args: Namespace, job: WlbJob | None) -> None:
    """Run upstream's `pretrain()`."""
    model = gpt_config_from_args(args)
    provider: Any = plain.dataset_provider
    forward_step: Any = plain.forward_step
    context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if job is not None:
        configure(model, backend_name=job.attention_backend, context_length=args.seq_length)
        provider, forward_step, context = job.dataset_provider, job.forward_step, job.installed()
    run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    with compat.prebuilt_dataset_helpers(), context:
        run(
            pretrain_cfg_container_from_args(args, model),
            provider,
            ModelType.encoder_or_decoder,
            forward_step,
            store=store,
            get_embedding_ranks=plain.embedding_ranks,
        )

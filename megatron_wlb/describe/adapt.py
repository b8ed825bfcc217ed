"""Megatron's arguments that `--wlb` sets, or switches off at a price, so that it is the only flag to add."""

import math
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from megatron_wlb import layers
from megatron_wlb.describe import same, tiles
from megatron_wlb.describe.arguments import Off, Set, flag_of, rows
from megatron_wlb.describe.megatron import has_graphs
from megatron_wlb.describe.refusals import Lenient
from megatron_wlb.layers.part import Adaptation, without


def _if_set(*names: str) -> Callable[[Any, Collection[str]], Any]:
    return lambda a, given: any(getattr(a, name) for name in names)


def _by_row(name: str, row: Set | Off) -> Adaptation:
    price = row.price if isinstance(row, Off) else ""
    return Adaptation(lambda a, given: row.when(getattr(a, name)), {name: row.value}, row.reason, price)


ADAPTATIONS = (
    Adaptation(
        lambda a, given: a.micro_batch_size != 1 or a.eval_micro_batch_size not in (None, 1),
        {"micro_batch_size": 1, "eval_micro_batch_size": None},
        "a micro-batch is one packed sequence; --global-batch-size is unchanged",
    ),
    Adaptation(
        lambda a, given: a.attention_dropout != 0 and "attention_dropout" not in given,
        {"attention_dropout": 0.0},
        "packed attention has no dropout; the default was not asked for",
    ),
    *layers.adapted(),
    Adaptation(
        lambda a, given: has_graphs(a),
        {
            **{"cuda_graph_impl": "none", "cuda_graph_modules": [], "cuda_graph_scope": None},
            **{"enable_cuda_graph": False, "external_cuda_graph": False, "cuda_graph_scope_deprecated": None},
            "inference_cuda_graph_scope": None,
        },
        "a graph replays one length, and micro-batches vary in length",
        "the host launches every kernel",
    ),
    *tiles.ADAPTED,
    Adaptation(
        _if_set("use_megatron_fsdp", "use_torch_fsdp2"),
        without("use_megatron_fsdp", "use_torch_fsdp2", "init_model_with_meta_device", "fsdp_manual_registration")
        | {"use_distributed_optimizer": True},
        "its scaling of gradients knows no per-token loss; --use-distributed-optimizer takes its place",
        "weights and gradients are whole on every rank, and its checkpoints cannot be loaded",
    ),
    Adaptation(
        lambda a, given: a.defer_embedding_wgrad_compute and a.sequence_parallel,
        without("defer_embedding_wgrad_compute"),
        "it gathers all micro-batches by the length of the first",
        "weight gradients of the output layer stay in the last stage's backward passes",
    ),
    *(_by_row(*each) for each in rows(Set)),
    *(_by_row(*each) for each in rows(Off)),
)


class Changes(NamedTuple):
    """The changes of `adapt`."""

    differs: list[str]
    """See `same.differences`."""
    set: list[str]
    """Lines of changes without effect on results and speed: the flag and the reason."""
    priced: list[str]
    """Lines of features that were switched off: the flag, the reason and the price."""

    def lines(self) -> list[str]:
        """Return the lines that a run with these changes prints."""
        but = ", but for these differences" * bool(self.differs)
        lines = [*(f"differs: {line}" for line in self.differs), *(f"sets {line}" for line in self.set)]
        lines += [f"without {line[3:]}" if line.startswith("no ") else f"sets {line}" for line in self.priced]
        same = f"> wlb is on: every step trains the same as without --wlb{but}"
        return [same, *(f"> wlb: {line}" for line in lines)]


def adapt(args: Namespace, given: Collection[str]) -> Changes:
    """Set the arguments that `--wlb` needs, in place; `given` are the names of arguments that the user gave.

    Call this before `refusals.check`, which then refuses the rest. Raises ValueError with all changes for
    `--wlb-strict`.
    """
    changes = Changes(same.differences(args), [], [])
    # What the loss of a run without --wlb depends on; a second call changes nothing of it.
    windows = args.micro_batch_size or 1
    before_wlb = {
        "wlb_windows_per_micro_batch": windows,
        "wlb_eval_windows_per_micro_batch": getattr(args, "eval_micro_batch_size", None) or windows,
        "wlb_per_token_loss": bool(args.calculate_per_token_loss),
        "wlb_sft": bool(getattr(args, "sft", False)),
        "wlb_means_in_evaluation": bool(getattr(args, "sft", False)),
        "wlb_frozen": False,
    }
    first = "wlb_per_token_loss" not in vars(args)
    vars(args).update(before_wlb | vars(args))
    if first and getattr(args, "fp16", False) and not args.calculate_per_token_loss:
        changes.set.extend(_lower_loss_scale(args))
    if (size := args.micro_batch_size or 1) > 1:
        sizes = (getattr(args, f"{name}_parallel_size") for name in ("tensor_model", "context", "pipeline_model"))
        each = size * max(1, args.world_size // math.prod(sizes))
        if args.global_batch_size is None:
            args.global_batch_size = each
        elif Lenient(**vars(args)).decrease_batch_size_if_needed and args.global_batch_size % each:
            raise ValueError(
                f"--wlb: --decrease-batch-size-if-needed trains fewer windows than --global-batch-size "
                f"{args.global_batch_size}; give a multiple of --micro-batch-size x data-parallel ranks, {each}"
            )
    for adaptation in ADAPTATIONS:
        before = Lenient(**vars(args))
        if not adaptation.applies(before, given):
            continue
        changed = {name: value for name, value in adaptation.values.items() if hasattr(args, name)}
        were = {name: getattr(before, name) for name in changed}
        plain = {name: value for name, value in were.items() if value is None or isinstance(value, (int, float, str))}
        args.wlb_before = plain | vars(args).get("wlb_before", {})  # as a log can print it
        vars(args).update(changed)
        name = next(name for name, value in changed.items() if getattr(before, name) != value)
        line = f"{said(name, changed[name], getattr(before, name))}: {adaptation.reason}"
        if adaptation.price:
            changes.priced.append(f"{line}; {adaptation.price}")
        else:
            changes.set.append(line)
    if args.wlb_strict and (changes.set or changes.priced):
        lines = " | ".join([*changes.set, *changes.priced])
        raise ValueError(f"--wlb-strict: --wlb would change these flags; set them as shown, or leave it out: {lines}")
    return changes


def _lower_loss_scale(args: Namespace) -> Iterator[str]:
    """Divide the scales of fp16 by a step's tokens, a power of two; yields a line for each."""
    tokens = (args.global_batch_size or args.micro_batch_size or 1) * args.seq_length
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
        if (scale := getattr(args, name, None)) is not None:
            setattr(args, name, scale / 2 ** round(math.log2(tokens)))
            yield f"{said(name, getattr(args, name), scale)}: losses are summed over a step's tokens, not averaged"


def said(name: str, value: Any, before: Any) -> str:
    """Return the flag that sets an argument to a value."""
    flag, off = f"--{name.replace('_', '-')}", value is False or value == "none"
    if value is True or (off and flag_of(name) != flag):
        return flag_of(name)
    if off:
        return f"no {flag}" if before is True else f"no {flag} {before}"
    if value is None:
        return f"no {flag}"
    return f"{flag} {value}" + (f" instead of {before}" if before is not None else "")


def switches_off(name: str, value: Any) -> bool:
    """Whether `adapt` switches an argument off at a price, whatever the others are."""
    alone = Lenient(**{name: value})
    return any(each.price and name in each.values and each.applies(alone, ()) for each in ADAPTATIONS)

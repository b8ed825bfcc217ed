"""The flags of a run, from its log or its command: what they mean here, what doesn't matter, and what --wlb refuses."""

import argparse
import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from megatron_wlb.cli import command
from megatron_wlb.cli.command import Launched
from megatron_wlb.cli.common import printable, short
from megatron_wlb.describe.flags import check

NOT_SIMULATED = {
    "window-size": "sliding windows",
    "hybrid-layer-pattern": "layers of several kinds",
    "hybrid-override-pattern": "layers of several kinds",
    "experimental-attention-variant": "another attention",
    "heterogeneous-layers-config-path": "layers of several kinds",
    "yaml-cfg": "a YAML file of flags",
}
"""Flags that change what would be predicted, and that the simulation does not know: refused, or left out on request."""
_NEVER = frozenset(("yaml-cfg",))
"""Those without which there is nothing to estimate."""
_ALIASES = {
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_vp_stage": "microbatch_group_size_per_virtual_pipeline_stage",
    "fp8": "fp8_format",
    "fp4": "fp4_format",
    "world_size": "num_gpus",
    "padded_vocab_size": "vocab_size",
}
"""Arguments of a log that settle what several flags leave open, and the argument here that they are."""
_SETTLED = frozenset(("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"))
"""Arguments of a log that others settle."""
_ACCEPTED = {
    **{"seq_length": 1024, "micro_batch_size": 1, "save": "checkpoints"},
    **{f"{name}_parallel_size": 1 for name in ("pipeline_model", "expert_model")},
    **{"calculate_per_token_loss": True, "sequence_parallel": False, "attention_dropout": 0},
    "moe_token_dispatcher_type": "alltoall",
    **{"position_embedding_type": "rope", "untie_embeddings_and_output_weights": True},
}
"""Arguments that training with --wlb takes, to see of others which it refuses."""
_ADDED = frozenset(("attention_dropout", "calculate_per_token_loss", "micro_batch_size", "eval_micro_batch_size"))
"""Arguments that the flags to add overrule; a log has them whether they were given or not."""
_UPSTREAM_DEFAULTS = {"dataloader_type": "single", "moe_token_dispatcher_type": "allgather"}
"""Values that --wlb refuses and that nobody has to give."""
_WEIGHT_SHARDS = ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards")
"""Arguments that a log has as TP and ETP where they were not given."""
_WITHIN_DOCUMENTS = ("reset_attention_mask", "dataloader_inter_document_masking", "sft")
"""Arguments of upstream with any of which attention ends with the document."""
DYNAMIC = {name: f"--{name.replace('_', '-')}" for name in ("hybrid_context_parallel", "dynamic_context_parallel")}
"""Arguments by which Megatron chooses context-parallel ranks for every document, up to 0.20 and on its dev branch."""
WARM_UP_OVERLAP = ("overlap_p2p_comm_warmup_flush", "overlap_p2p_communication_warmup_flush")
"""An argument of upstream, as logs and commands call it."""
TRANSFER_WAITS = ("overlap_p2p_comm", False), ("no_overlap_p2p_communication", True)
"""Arguments of upstream, as logs and commands call them, by which an interleaved pipeline hides no transfer."""
_SIMULATED = (
    "tp_comm_overlap",
    "max_seqlen_per_dp_cp_rank",
    *WARM_UP_OVERLAP,
    *dict(TRANSFER_WAITS),
    *DYNAMIC,
    *_WITHIN_DOCUMENTS,
)
"""Arguments that `analyze` reads of what is stated."""
_OTHER_MODELS = {
    "is_hybrid_model": "pretrain_hybrid.py",
    "deepspeed": "DeepSpeed",
    "language_model_type": "a multimodal model",
    "decoder_seq_length": "pretrain_t5.py",
}
"""Arguments of a log that are set where something else than a GPT of Megatron-core is trained, and by what."""
_MATTER = {
    **{"moe_layer_freq": (1,), "cp_comm_type": ("p2p", "allgather"), "hierarchical_context_parallel_sizes": (None,)},
    "min_dynamic_context_parallel_size": (1,),
    **dict.fromkeys(("use_torch_fsdp2", "optimizer_cpu_offload", "attention_output_gate", "offload_optimizer_states"),
        (False,)),
    **{"num_distributed_optimizer_instances": (1,), "moe_expert_capacity_factor": (None,)},
}  # fmt: skip
"""Arguments on which the time of a step would depend, and that are simulated only with these values."""
LOW_PRECISION = ("fp8-format", "fp8-recipe", "fp4-format")
"""Flags of which only the alignment of micro-batches is known."""
_OTHER_SCRIPTS = re.compile(
    r"(?:.*/)?(?:deepspeed|(?:pretrain|train|finetune|sft|generate|run)_(?!gpt)\w*\.py|(?:nemo|train|finetune)\.py)"
)


def accept(parser: argparse.ArgumentParser, script: argparse.ArgumentParser) -> None:
    """Let a command take a run's command, and `--launch FILE` with one or with a log; its own flags come first.

    `script` knows the flags of a run. Arguments then have `refused` (flags that training with --wlb refuses, in order),
    `ignored` (others that don't matter), `remarks` (sentences on those, and on what is not simulated), `left_out` (what
    an estimate on request is without), `stated` (upstream's arguments that no flag here knows) and `num_ranks`. Exits
    with an error for what cannot be simulated.
    """

    def parse_known_args(
        arguments: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        rest: list[str] = []
        try:
            own, file = _without_launch(list(arguments))
            own, launched = command.of_words(own)
            if file is not None:
                if launched.flags or launched.launcher:
                    raise ValueError(f"--launch {file} and a command beside it; give one of them")
                launched = command.of_file(file)
            known = script._option_string_actions
            words = _flags_of(launched.arguments, script) if launched.arguments else launched.flags
            ranks = _ranks(launched.launcher)
        except ValueError as error:
            parser.error("\n".join((str(error), *getattr(error, "__notes__", ()))))
        words = _overruled([*ranks[0], *words], own, known)
        if words:
            namespace, rest = script.parse_known_args(words, namespace)
        # The command's own flags may also stand behind what was typed.
        behind = rest if file is None else []
        args, more = argparse.ArgumentParser.parse_known_args(parser, [*own, *behind], namespace)
        args.num_ranks, args.launch, args.script = ranks[1], file, launched.script
        read = {*vars(args), *_ALIASES}
        stated = {name: _value_of(text) for name, text in launched.arguments.items() if name not in read}
        stated |= _stated(more if behind else [*rest, *more])
        other = _other_trainer(stated, launched)
        if other:
            parser.error(
                f"{other} does not train a GPT of Megatron-core, and nothing else runs with --wlb; for an estimate as "
                "if it did, give the flags of its model and layout alone"
            )
        _check_words(parser, args, words, more)
        _judge(parser, args, stated, launched, frozenset(word.partition("=")[0] for word in own))
        return args, []

    script.error = parser.error  # type: ignore[method-assign]
    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def _flags_of(arguments: Mapping[str, str], script: argparse.ArgumentParser) -> list[str]:
    """The arguments of a log as the flags that `script` knows."""
    words: list[str] = []
    actions = {action.dest: action for action in script._actions}
    for name in sorted(
        arguments.keys() - _SETTLED, key=_ALIASES.__contains__
    ):  # what is settled comes last, and counts
        value = _value_of(arguments[name])
        name = _ALIASES.get(name, name)
        action = actions.get(name)
        if action is None or value is None or value is False or (not value and name.replace("_", "-") in NOT_SIMULATED):
            continue
        values = [] if value is True else value if isinstance(value, list | tuple) else [value]
        if action.nargs is None and isinstance(value, list | tuple):
            values = [",".join(map(str, value))]
        words += [max(action.option_strings, key=len), *map(str, values)]
    return words


def _judge(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    stated: dict[str, Any],
    launched: Launched,
    own: frozenset[str],
) -> None:
    """Sort what is not known here into what doesn't matter and what might: what is simulated otherwise, and `own`."""
    args.stated, args.remarks, args.left_out = stated, [], []
    for name, what in NOT_SIMULATED.items():
        if getattr(args, name.replace("-", "_")) is None:
            continue
        if name in _NEVER or not getattr(args, "approximate", False):
            way = "give flags" if name in _NEVER else "give --approximate for an estimate without"
            parser.error(f"--{name}: {what} cannot be simulated; {way}")
        args.left_out.append(what)
    args.left_out = list(dict.fromkeys(args.left_out))
    flags = {name: f"--{name.replace('_', '-')}" for name in stated}
    ours = [flag for flag in flags.values() if flag.startswith("--wlb") and not launched.arguments]
    if ours:
        parser.error(f"{ours[0]} is no flag of ours")
    has_experts = (args.num_experts or 1) > 1
    judged = {name: value for name, value in stated.items() if name not in _ADDED}
    if launched.arguments:
        shards = {args.tensor_model_parallel_size or 1, args.expert_tensor_parallel_size or 1}
        usual = _UPSTREAM_DEFAULTS | {n: stated[n] for n in _WEIGHT_SHARDS if stated.get(n) in shards}
        judged = {name: value for name, value in judged.items() if usual.get(name) != value}
    names = [name for name, value in judged.items() if _is_refused(name, value, has_experts)]
    args.refused = [flags[name] for name in names]
    args.needs_dispatcher = has_experts and "moe_token_dispatcher_type" not in set(judged) - set(names)
    unknown = {
        name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in stated.items()
    }
    strange = [flags[name] for name, usual in _MATTER.items() if name in unknown and unknown[name] not in usual]
    strange += [flag for name, flag in flags.items() if flag in own and name not in {*names, *_MATTER, *_SIMULATED}]
    low_precision = [f"--{name}" for name in ("fp8-format", "fp4-format") if getattr(args, name.replace("-", "_"))]
    read = {*names, *_MATTER, *_SIMULATED}
    ignored = [flag for name, flag in flags.items() if name not in read and flag not in strange]
    args.ignored = [] if launched.arguments else ignored
    args.remarks += _attention(args, launched)
    if args.refused:
        args.remarks.append(f"Left out, since training with --wlb refuses them: {' '.join(args.refused)}.")
    if low_precision:
        args.remarks.append(f"FP8 and FP4 ({' '.join(low_precision)}) are not modelled: all numbers are those of bf16.")
    if strange:
        args.remarks.append(f"Not simulated, and so without effect on these numbers: {' '.join(strange)}.")


def _other_trainer(stated: Mapping[str, Any], launched: Launched) -> str:
    """What trains, if that is known not to be a GPT of Megatron-core."""
    if launched.arguments:
        return next((what for name, what in _OTHER_MODELS.items() if stated.get(name) not in (None, False)), "")
    words = [*launched.launcher, launched.script or ""]
    if "deepspeed" in stated or "deepspeed_config" in stated:
        return "DeepSpeed"
    return next((os.path.basename(word) for word in words if _OTHER_SCRIPTS.fullmatch(word)), "")


def _overruled(words: Sequence[str], arguments: Sequence[str], flags: Mapping[str, argparse.Action]) -> list[str]:
    """A run's words without the flags that `arguments` give, under whichever of their names, and their values."""
    given = {n for word in arguments if (flag := flags.get(word.partition("=")[0])) for n in flag.option_strings}
    kept, values = [], 0
    for word in words:
        name, equals, _ = word.partition("=")
        if name in given:
            values = 0 if equals or flags[name].nargs == 0 else 1 if flags[name].nargs is None else len(words)
        elif values and not word.startswith("--"):
            values -= 1
        else:
            kept.append(word)
            values = 0
    return kept


def _check_words(
    parser: argparse.ArgumentParser, args: argparse.Namespace, words: Sequence[str], more: Sequence[str]
) -> None:
    """Exit with an error if a file's name stands where flags are read, or no more than words that are no flags."""
    loose = list(takewhile(lambda word: not word.startswith("-"), more))
    file = next((word for word in loose if os.path.isfile(word) or os.path.isfile(f"{word}.idx")), None)
    if file is not None:
        first = ", or put it first if it is LENGTHS" if hasattr(args, "lengths") else ""
        parser.error(
            f"{file} is a file, and flags are read here; give --launch {file} if it is a log or a command, or "
            f"--data-path if it is a dataset{first}"
        )
    if (args.model, args.num_layers, args.seq_length) == (None, None, None) and (words or loose or args.script):
        said = short(" ".join([*filter(None, [args.script]), *words, *more]))
        parser.error(f"no flags of pretrain_gpt.py such as --num-layers in {said}, and nothing else is read; {_GIVE}")


_GIVE = "give its command, or a log by --launch"


def _attention(args: argparse.Namespace, launched: Launched) -> list[str]:
    """A remark on a run whose attention would change."""
    is_run = launched.arguments or launched.script
    if not is_run or args.wlb or any(args.stated.get(name) for name in _WITHIN_DOCUMENTS):
        return []
    return [
        "The run lets attention cross documents (it has neither --reset-attention-mask nor "
        "--dataloader-inter-document-masking); Megatron here is the same run with attention inside of them."
    ]


def _stated(words: Sequence[str]) -> dict[str, Any]:
    """Arguments of flags that are not known here, by upstream's names; of a flag that is given again, the last."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            values = found[printable(flag[2:]).replace("-", "_")] = [value] if equals else []
        else:
            values.append(word)
    return {name: _number(v[0]) if len(v) == 1 else v or True for name, v in found.items()}


def _number(text: str) -> Any:
    return int(text) if text.isdecimal() else float(text) if re.fullmatch(r"\d+\.\d+", text) else text


def _value_of(text: str) -> Any:
    """What Megatron printed, as a value; text where it is no literal."""
    try:
        return ast.literal_eval(text) if re.fullmatch(r"[\[(].*[\])]|-?[\d.e+-]+|None|True|False", text) else text
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _is_refused(name: str, value: Any, has_experts: bool) -> bool:
    """Whether training with --wlb refuses an argument for its value; `adapter.arguments.check` judges."""
    try:
        check(argparse.Namespace(**_ACCEPTED | {"num_experts": 2 if has_experts else None, name: value}))
    except (ValueError, TypeError):  # a word where a number must be
        return True
    return False


def _ranks(launcher: Sequence[str]) -> tuple[list[str], int | None]:
    """What the words before a script say of the number of ranks: torchrun's two flags, or how many there are.

    Raises ValueError for what is no number.
    """
    said = dict(_options(launcher))
    torchrun = [word for name in ("--nproc-per-node", "--nnodes") if name in said for word in (name, said[name])]
    if "--nproc-per-node" in said:
        return torchrun, None
    numbers = {}
    for name, text in said.items():
        if name in ("--ntasks", "--nodes", "--ntasks-per-node", "WORLD_SIZE"):
            if not re.fullmatch("[0-9]{1,9}", text):
                raise ValueError(f"{name} {short(text)} is not a number; put it in, or give --num-gpus")
            numbers[name] = int(text)
    tasks = numbers.get("--ntasks") or numbers.get("--nodes", 1) * numbers.get("--ntasks-per-node", 0)
    return torchrun, tasks or numbers.get("WORLD_SIZE") or None


_SHORT = {"-n": "--ntasks", "-np": "--ntasks", "-N": "--nodes"}


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options and what follows them, assignments too, by the long names of srun and torchrun."""
    for word, after in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if match := re.fullmatch(r"(-[nN])(\d+)", word):
            name, equals, value = match[1], "=", match[2]
        name = _SHORT.get(name, name.replace("_", "-") if name.startswith("--") else name)
        yield name, value if equals else after


def world_size(args: argparse.Namespace) -> int | None:
    """GPUs by --num-gpus, --nproc-per-node x --nnodes, or what starts ranks, in this order; None if nothing is said.

    Raises ValueError if torchrun's are not numbers.
    """
    if args.num_gpus is not None:
        return int(args.num_gpus)
    if args.nproc_per_node is None:
        if args.nnodes is not None:
            raise ValueError("--nnodes without --nproc-per-node; give both, or --num-gpus")
        return args.num_ranks  # type: ignore[no-any-return]
    parsed = []
    for flag, text in (("--nproc-per-node", args.nproc_per_node), ("--nnodes", args.nnodes or "1")):
        if not text.isascii() or not text.isdecimal() or not int(text):
            raise ValueError(f"{flag} {short(text)} is not a number; put it in, or give --num-gpus")
        parsed.append(int(text))
    return parsed[0] * parsed[1]


def _without_launch(arguments: list[str]) -> tuple[list[str], str | None]:
    """Arguments without `--launch FILE`, and the name of the file."""
    for i, argument in enumerate(arguments):
        flag, equals, name = argument.partition("=")
        if flag == "--launch" and (equals or i + 1 < len(arguments)):
            return arguments[:i] + arguments[i + 1 + (not equals) :], name if equals else arguments[i + 1]
    return arguments, None

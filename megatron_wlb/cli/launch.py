"""How a run was launched, by Megatron's log or the words of its command."""

import ast
import difflib
import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any, NamedTuple

from megatron_wlb import files
from megatron_wlb.describe import masks
from megatron_wlb.describe.adapt import switches_off
from megatron_wlb.describe.arguments import FLAGS, SWITCHED_OFF, MegatronArguments, flag_of, short
from megatron_wlb.describe.refusals import refusals, refuses
from megatron_wlb.describe.shape import DELTA_NETS

MOST_BYTES = 1 << 28
"""Largest log that is read. `BLOCK` cuts a larger one."""
LONGEST_VALUE = 1 << 18
"""Longest argument in a log, in characters, that is parsed as more than text."""
LIKE_A_WORD = 0.7
"""Share of letters from which on a word is taken for another, misspelt; none of Megatron's own flags is."""
MOST_VALUES = 1 << 20
"""Most characters of arguments in a log that are parsed as more than text, in all."""
BLOCK = "sed -n '/- arguments -/,/- end of arguments -/p'"
"""Shell command that prints the argument blocks of a log."""
END_OF_ARGUMENTS = "- end of arguments -"
_BEGIN = re.compile(r"-{9,} arguments -{9,}")
_ARGUMENT = re.compile(r"(?:^|\s)(\w+) (?:\.+|(?<=\w{48} )) *(.*)")
_COLOURS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\(B)")
_PADDED = re.compile(r"> padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d+)\)")
_REMEDY = "give the log of a run, as Megatron wrote it"
_ATTENTION = "experimental_attention_variant"
NOT_SIMULATED = {
    _ATTENTION: "another attention",
    "heterogeneous_layers_config_path": "layers of several kinds",
    "yaml_cfg": "a YAML file of flags",
}
"""Arguments that change the prediction but are not simulated: refused, or left out on request."""
_MATTER = {
    **{"moe_layer_freq": (1,), "cp_comm_type": ("p2p", "allgather"), "hierarchical_context_parallel_sizes": (None,)},
    **dict.fromkeys(("use_torch_fsdp2", "optimizer_cpu_offload"), (False,)),
    **{"offload_optimizer_states": (False,), "num_distributed_optimizer_instances": (1,)},
    **{"moe_expert_capacity_factor": (None,), "moe_latent_size": (None,), "min_dynamic_context_parallel_size": (1,)},
    **dict.fromkeys(("hybrid_context_parallel", "dynamic_context_parallel"), (False,)),
}
"""Arguments that affect the time of a step, and are simulated only with these values."""
_READ = {"overlap_p2p_comm_warmup_flush", "step_batch_size_schedule", *masks.READ}
"""Arguments that `analyze` reads besides those of `MegatronArguments`."""
_KNOWN = {*_MATTER, *_READ, *NOT_SIMULATED, *MegatronArguments.__dataclass_fields__}
_OFF = SWITCHED_OFF | {
    name: f"no-{name.replace('_', '-')}" for name in ("masked_softmax_fusion", "create_attention_mask_in_dataloader")
}
"""Arguments that are on by default, and the flags that switch them off."""
_ADDED = {"attention_dropout", "calculate_per_token_loss", "micro_batch_size", "eval_micro_batch_size"} | {
    *("dataloader_type", "moe_token_dispatcher_type", "moe_hybridep_pad_uneven_dispatch_inputs")
}
"""Arguments that --wlb or the recommended flags set; a log has them whether they were given or not."""
WEIGHT_SHARDS = ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards")
"""Arguments that --wlb refuses, and that a log shows where nobody gave them, see `usual`."""
_OTHER_MODELS = {
    "is_hybrid_model": "pretrain_mamba.py of a former release",
    **dict.fromkeys(("model_parallel_size", "checkpoint_activations"), "a release before 2023"),
    **dict.fromkeys(("activations_checkpoint_method", "activations_checkpoint_granularity"), "a release before 2023"),
    "deepspeed": "DeepSpeed",
    "deepspeed_config": "DeepSpeed",
    "language_model_type": "a multimodal model",
    "decoder_seq_length": "pretrain_t5.py",
}
"""Arguments that are set if a run trains something other than models of today's Megatron-core, and what that is."""
_OTHER_SCRIPTS = re.compile(
    r"(?:.*/)?(?:deepspeed|(?:pretrain|train|finetune|sft|generate|run)_(?!gpt|hybrid|mamba)\w*\.py|(?:nemo|train|finetune)\.py)"
)


class Launched(NamedTuple):
    """The launch of a run."""

    stated: dict[str, Any]
    """Megatron's arguments by name, as values or as text."""
    wlb: list[str]
    """Words of its `--wlb` flags."""
    source: str
    """Name of the log; "command"; or "flags" if nothing was launched."""
    is_log: bool = False
    world_size: int | None = None
    """Number of GPUs, by the launcher's words."""


class Judged(NamedTuple):
    """The arguments of a run that are not simulated."""

    refused: list[str]
    """Flags that training with --wlb refuses."""
    ignored: list[str]
    """Flags of a command that have no effect here."""
    left_out: list[str]
    """What an approximate estimate leaves out."""
    remarks: list[str]
    """Warnings: how the run differs from what the numbers are of."""


def read_log(name: str) -> Launched:
    """Read the last complete block of arguments in a log; - is standard input.

    Raises ValueError for any other file, and for a run of anything but a GPT.
    """
    return arguments_of(text_of(name), name)


def arguments_of(text: str, name: str) -> Launched:
    """Read the arguments in the text of a log, as `read_log`."""
    end = text.rfind(END_OF_ARGUMENTS)
    begins = [match.end() for match in _BEGIN.finditer(text, 0, end)] if end >= 0 else []
    if not begins and _BEGIN.search(text):
        raise ValueError(f"{short(name)} ends within its arguments; {_REMEDY}, to the line that ends them")
    if not begins:
        raise ValueError(
            f"{short(name)} has no arguments as Megatron prints them; {_REMEDY}, or the run's command behind --"
        )
    lines = text[begins[-1] : end].splitlines()
    texts = {m[1]: files.printable(m[2]).strip() for line in lines if (m := _ARGUMENT.search(line))}
    if sum(len(text) for text in texts.values() if len(text) <= LONGEST_VALUE) > MOST_VALUES:
        raise ValueError(f"{short(name)}: its arguments have over {MOST_VALUES >> 20} MiB, the limit; {_REMEDY}")
    found = _renamed({argument: _value_of(text) for argument, text in texts.items()})
    if not all(isinstance(found.get(name), int) for name in ("num_layers", "world_size")):
        raise ValueError(f"{short(name)}: its arguments lack num_layers or world_size; {_REMEDY}")
    if windows := found.get("wlb_windows_per_micro_batch"):
        found["micro_batch_size"] = windows  # without --wlb, which sets 1
    if isinstance(before := found.get("wlb_before"), dict):
        found |= {name: value for name, value in before.items() if name in found}
    if padded := _PADDED.search(text, end):
        found["padded_vocab_size"] = int(padded[1])
    _refuse_others([], found)
    return Launched(found, list(_wlb_words(found)), name, is_log=True)


def _renamed(found: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by today's names; DeepSpeed's list of one number is that number."""
    former = found.pop("hybrid_override_pattern", None)
    experts = {"num_experts": _alone(found["num_experts"])} if "num_experts" in found else {}
    return found | experts | ({"hybrid_layer_pattern": former} if former else {})


def read_command(words: Sequence[str], world_size: int | None = None, *, any_model: bool = False) -> Launched:
    """Read the words of a run's command; `world_size` wins over the launcher's.

    Raises ValueError if there is no script, or if it trains anything but a GPT and not `any_model` will do.
    """
    if array := next((word for word in words if re.match(r"\$\{\w+\[[@*]\]", word)), None):
        raise ValueError(f"{short(array)} is not expanded; give the words that it stands for, as bash -x prints them")
    words = list(chain(*(_words_of_shell(word) if re.search(r"\.py\s", word) else [word] for word in words)))
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if script is None:
        raise ValueError(
            f"no script such as pretrain_gpt.py in {short(' '.join(words))}; give behind -- what starts the run, from "
            "torchrun or srun on"
        )
    stated = _renamed(_stated(words[script + 1 :]))
    if not any_model:
        _refuse_others(words[: script + 1], stated)
    return Launched(stated, list(_wlb_words(stated)), "command", world_size=world_size or _world_size(words[:script]))


def read_flags(words: Sequence[str]) -> Launched:
    """Read flags of a run. Raises ValueError for one that is not read."""
    given = {name: value for name, value in _renamed(_stated(words)).items() if value is not None}
    stated = {name: value for name, value in given.items() if not name.startswith("wlb")}
    strange = [name for name in stated if name not in _KNOWN]
    _refuse_misspelt(strange)
    if strange:
        raise ValueError(f"{flag_of(short(strange[0]))} is not read; leave it out, or give the run's command behind --")
    return Launched(stated, list(_wlb_words(given)), "flags")


def judge(launched: Launched, arguments: MegatronArguments, *, model: str | None, approximate: bool) -> Judged:
    """Sort a run's arguments; known models are gated. Raises ValueError for what changes the prediction."""
    stated, left_out = launched.stated, []
    for name, what in NOT_SIMULATED.items():
        if stated.get(name) in (None, False) or (name == _ATTENTION and stated[name] in DELTA_NETS):
            continue
        if name == "yaml_cfg" or not approximate:
            way = "give flags" if name == "yaml_cfg" else "give --approximate for an estimate without"
            raise ValueError(f"--{name.replace('_', '-')}: {what} cannot be simulated; {way}")
        left_out.append(what)
    has_experts = (arguments.num_experts or 1) > 1
    judged = {name: value for name, value in stated.items() if name not in _ADDED and not name.startswith("wlb")}
    if launched.is_log:
        judged = {name: value for name, value in judged.items() if name not in usual(stated)}
    refused = [name for name, value in judged.items() if refuses(name, value, has_experts=has_experts)]
    strange = [name for name, timed in _MATTER.items() if name in judged and _alone(judged[name]) not in timed]
    off = [name for name, value in judged.items() if switches_off(name, value)]
    strangers = [name for name in judged if name not in {*_KNOWN, *refused, *off}]
    _refuse_misspelt(strangers)
    ignored = [] if launched.is_log else strangers
    said = {
        "Left out, since training with --wlb refuses them: {}.": refused,
        "Switched off by --wlb: {}.": off,
        "Not simulated, and so without effect on these numbers: {}.": [n for n in strange if n not in refused],
    }
    remarks = [text.format(" ".join(map(flag_of, names))) for text, names in said.items() if names]
    given = {name: value for name, value in (judged | asdict(arguments)).items() if name not in refused}
    given |= {"attention_dropout": 0} | ({"swiglu": True} if model else {})
    if launched.source == "flags":
        given["sequence_parallel"] = True  # as is assumed
    remarks += [f"Training with --wlb refuses this run: {why}." for why in refusals(Namespace(**given))]
    return Judged(
        refused=list(map(flag_of, refused)),
        ignored=list(map(flag_of, ignored)),
        left_out=list(dict.fromkeys(left_out)),
        remarks=_attention(launched) + remarks,
    )


def usual(stated: Mapping[str, Any]) -> set[str]:
    """Return the arguments that a log shows as TP and ETP because they were not given."""
    shards = {stated.get("tensor_model_parallel_size", 1), stated.get("expert_tensor_parallel_size") or 1}
    return {name for name in WEIGHT_SHARDS if stated.get(name) in shards}


def _refuse_misspelt(names: Sequence[str]) -> None:
    """Raise ValueError for a name that is read but for letters of a word, or where words are divided."""

    def alike(name: str, known: str) -> bool:
        words, of_known = name.split("_"), known.split("_")
        wrong = [pair for pair in zip(words, of_known, strict=False) if pair[0] != pair[1]]
        is_word = len(words) == len(of_known) and len(wrong) == 1
        return "".join(words) == "".join(of_known) or (
            is_word and difflib.SequenceMatcher(None, *wrong[0]).ratio() >= LIKE_A_WORD
        )

    for name in names:
        if meant := next((known for known in sorted(_KNOWN) if alike(name, known)), None):
            raise ValueError(f"{flag_of(short(name))} is no flag of Megatron's; give {flag_of(meant)}, or leave it out")


def _attention(launched: Launched) -> list[str]:
    """Return a remark if the run's attention crosses documents."""
    if launched.source == "flags" or launched.stated.get("wlb") or masks.masks_documents(launched.stated):
        return []
    ignored = ""
    if launched.stated.get("reset_attention_mask"):
        ignored = (
            " --reset-attention-mask does not prevent it: TransformerEngine and the fused softmax of local layers "
            "ignore its mask (NVIDIA/Megatron-LM#2357)."
        )
    return [
        "The run lets attention cross documents; with --wlb it stays inside of them, on the same tokens every step."
        + ignored
    ]


def _refuse_others(words: Sequence[str], stated: Mapping[str, Any]) -> None:
    other = next((what for name, what in _OTHER_MODELS.items() if stated.get(name) not in (None, False)), "")
    other = other or next((os.path.basename(word) for word in words if _OTHER_SCRIPTS.fullmatch(word)), "")
    if other:
        raise ValueError(
            f"{other} trains no GPT or hybrid model of today's Megatron-core, and nothing else runs with --wlb; for "
            "an estimate as if it did, give the flags of its model and layout alone"
        )


def _words_of_shell(text: str) -> list[str]:
    """Return the words of the command in a text for `bash -c` that starts the script. Raises ValueError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{short(text)}: {error}; give the command without bash -c") from error
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    ends = [i for i, word in enumerate(words) if word in _SEPARATORS or word.endswith(";")]
    begin = max((i + 1 for i in ends if i < script), default=0)
    return [word.rstrip(";") for word in words[begin : min((i for i in ends if i > script), default=len(words))]]


def _stated(words: Sequence[str]) -> dict[str, Any]:
    """Parse flags to arguments by Megatron's names; the last of a flag counts."""
    given: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            values = given[files.printable(flag[2:])] = [value] if equals else []
        else:
            values.append(word)
    names = {flag: name for name, flag in FLAGS.items()}
    switched_off = {flag: name for name, flag in _OFF.items()}
    found: dict[str, Any] = {}
    for flag, values in given.items():
        name = names.get(flag, flag.replace("-", "_"))
        if flag in switched_off:
            found[switched_off[flag]] = False
        elif name in ("data_path", "train_data_path", "recompute_modules"):
            found[name] = values
        else:
            found[name] = _number(values[0]) if len(values) == 1 else values or True
    return found


def _alone(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _number(text: str) -> Any:
    return int(text) if re.fullmatch(r"\d{1,18}", text) else float(text) if re.fullmatch(r"\d+\.\d+", text) else text


def _value_of(text: str) -> Any:
    """Parse a value as Megatron printed it; returns the text if it is no literal."""
    if len(text) > LONGEST_VALUE or not re.fullmatch(r"[\[({].*[\])}]|-?[\d.e+-]+|None|True|False", text):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _wlb_words(stated: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of the `--wlb` flags."""
    for name, value in stated.items():
        if name.startswith("wlb") and value not in (None, False) and name != "wlb_before":
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else value
            yield f"--{name.replace('_', '-')}{'' if value is True else f'={text}'}"


_SEPARATORS = {"&&", "||", "|", "&"}
_SHORT = {"-n": "--ntasks", "-np": "--ntasks", "-N": "--nodes"}


def _world_size(launcher: Sequence[str]) -> int | None:
    """Return the ranks by the launcher's words; None if unknown."""
    said = {}
    for word, after in zip(launcher, [*launcher[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if match := re.fullmatch(r"(-[nN])(\d+)", word):
            name, equals, value = match[1], "=", match[2]
        name = _SHORT.get(name, name.replace("_", "-") if name.startswith("--") else name)
        said[name] = value if equals else after

    def number(name: str, default: int = 0) -> int:
        text = said.get(name, str(default))
        if not re.fullmatch("[0-9]{1,9}", text):
            raise ValueError(f"{name} {short(text)} is not a number; put it in, or give --num-gpus")
        return int(text)

    if "--nproc-per-node" in said:
        return number("--nproc-per-node") * number("--nnodes", 1)
    tasks = number("--ntasks") or number("--nodes", 1) * number("--ntasks-per-node")
    return tasks or number("WORLD_SIZE") or None


def text_of(name: str, of_long: str = f"of a long one its arguments: {BLOCK} LOG") -> str:
    """Return the text of a log, even if damaged. Raises ValueError for other files; `of_long` is the remedy."""
    if name == "-":
        data = sys.stdin.buffer.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"- has over {MOST_BYTES >> 20} MiB, the limit; give {of_long}")
    else:
        data = files.read(name, MOST_BYTES, f"{_REMEDY}, or {of_long}")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError(f"{short(name)} is UTF-16; give it as iconv -f UTF-16 -t UTF-8 writes it")
    if b"\0" in data:
        raise ValueError(f"{short(name)} is binary; {_REMEDY}")
    return _COLOURS.sub("", data.decode("utf-8-sig", errors="replace"))

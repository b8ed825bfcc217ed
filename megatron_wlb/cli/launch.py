"""How a run was launched, by Megatron's log or the words of its command."""

import ast
import difflib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import msgspec

from megatron_wlb import files
from megatron_wlb.describe.arguments import (
    FLAGS,
    LIST,
    SWITCHED_OFF,
    Read,
    Refused,
    Simulated,
    flag_of,
    marked,
    rows,
)
from megatron_wlb.settings import printable, short

MOST_BYTES = 1 << 28
"""Largest log that is read. `BLOCK` cuts a larger one."""
LONGEST_VALUE = 1 << 18
"""Longest argument in a log, in characters, that is parsed as more than a text or a list of texts."""
LIKE_A_WORD = 0.7
"""Share of letters from which on a word is taken for another, misspelt; none of Megatron's own flags is."""
MOST_VALUES = 1 << 20
"""Most characters of arguments in a log that are parsed as more than text, in all."""
BLOCK = "sed -n '/- arguments -/,/- end of arguments -/p'"
"""Shell command that prints the argument blocks of a log."""
END_OF_ARGUMENTS = "- end of arguments -"
_BEGIN = re.compile(r"-{9,} arguments -{9,}")
_ARGUMENT = re.compile(r"(?:^|\s)(\w+) (?:\.+|(?<=\w{48} )) *(.*)")
_TRAINS = re.compile(r"(?:.*/)?pretrain_\w+\.py$")
_LONG_DASH = re.compile("-?[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]")
_NO_WORD = re.compile(rf"{_LONG_DASH.pattern}|\$\{{\w+\[[@*]\]")
"""Words that no command has: with dashes of a text, and arrays that are not expanded."""
_NO_VALUE = re.compile(r"-(?![\d.]|$)|\s+$")
"""Flags with one dash, and the blank behind a backslash that ends a line."""
_TRUTH = {"true", "false"}
"""Words that only belong behind a switch, which takes none."""
_COLOURS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\(B)")
_PADDED = re.compile(r"> padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d+)\)")
_REMEDY = "give the log of a run, as Megatron wrote it"
KNOWN = {name for kind in (Read, Simulated) for name, _ in rows(kind)} | {
    name for name, row in rows(Refused) if row.unlike
}
"""Arguments that `analyze` reads, or has something to say of."""
SWITCHES = {*(resources.files("megatron_wlb.cli") / "switches.txt").read_text().split()}
"""Flags of all supported versions that take no value, without their dashes."""
LISTS = marked(LIST) | {name for name, row in rows(Read) if row.kind == tuple[str, ...] | None}
"""Arguments whose flags take several values."""
_OTHER_MODELS = {
    "is_hybrid_model": "pretrain_mamba.py of an older release",
    **dict.fromkeys(("model_parallel_size", "checkpoint_activations"), "a release before 2023"),
    **dict.fromkeys(("activations_checkpoint_method", "activations_checkpoint_granularity"), "a release before 2023"),
    "deepspeed": "DeepSpeed",
    "deepspeed_config": "DeepSpeed",
    "language_model_type": "a multimodal model",
    "decoder_seq_length": "pretrain_t5.py",
}
"""Arguments that are set if a run trains something other than models of today's Megatron-core, and its name."""
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
    """Name of the log, "command", or "flags" if nothing was launched."""
    is_log: bool = False
    world_size: int | None = None
    """Number of GPUs, by the launcher's words."""


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
    texts = {m[1]: printable(m[2]).strip() for line in lines if (m := _ARGUMENT.search(line))}
    parsed = (text for text in texts.values() if len(text) <= LONGEST_VALUE)
    if sum(map(len, parsed)) > MOST_VALUES:
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
    experts = {"num_experts": alone(found["num_experts"])} if "num_experts" in found else {}
    return found | experts | ({"hybrid_layer_pattern": former} if former else {})


def read_command(words: Sequence[str], world_size: int | None = None, *, any_model: bool = False) -> Launched:
    """Read the words of a run's command; `world_size` wins over the launcher's.

    Raises ValueError if there is no script, or if it trains anything but a GPT and not `any_model` will do.
    """
    words = _expanded(words)
    _refuse_strange(words)
    script = _script(words)
    if script is None:
        raise ValueError(
            f"no script such as pretrain_gpt.py in {short(' '.join(words))}; give the run's command behind --, "
            "from torchrun or srun on"
        )
    stated = _renamed(_stated(words[script + 1 :]))
    if not any_model:
        _refuse_others(words[: script + 1], stated)
    return Launched(stated, list(_wlb_words(stated)), "command", world_size=world_size or _world_size(words[:script]))


def divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide a command behind its script, whose flags follow. Raises ValueError where flags are no words."""
    script = _script(words)
    if script is None or any(re.search(r"\.py\b.*\s|\s.*\.py\b", word, re.DOTALL) for word in words[: script + 1]):
        raise ValueError(
            f"no flags can be added to {short(' '.join(words))}: its own are in a file, or in a text for bash -c; "
            "give the words that start the run, from torchrun or srun on. In a Slurm script, put megatron-wlb trial -- "
            "before srun"
        )
    return [*words[: script + 1]], [*words[script + 1 :]]


def read_flags(words: Sequence[str]) -> Launched:
    """Read flags of a run. Raises ValueError for one that is not read."""
    given = {name: value for name, value in _renamed(_stated(words)).items() if value is not None}
    stated = {name: value for name, value in given.items() if not name.startswith("wlb")}
    strange = [name for name in stated if name not in KNOWN]
    refuse_misspelt(strange)
    if strange:
        raise ValueError(f"{flag_of(short(strange[0]))} is not read; leave it out, or give the run's command behind --")
    return Launched(stated, list(_wlb_words(given)), "flags")


def refuse_misspelt(names: Sequence[str]) -> None:
    """Raise ValueError for a name that is read but for letters of a word, or where words are divided."""

    def alike(name: str, known: str) -> bool:
        words, of_known = name.split("_"), known.split("_")
        wrong = [pair for pair in zip(words, of_known, strict=False) if pair[0] != pair[1]]
        is_word = len(words) == len(of_known) and len(wrong) == 1
        return "".join(words) == "".join(of_known) or (
            is_word and difflib.SequenceMatcher(None, *wrong[0]).ratio() >= LIKE_A_WORD
        )

    for name in names:
        if meant := next((known for known in sorted(KNOWN) if alike(name, known)), None):
            raise ValueError(f"{flag_of(short(name))} is no flag of Megatron's; give {flag_of(meant)}, or leave it out")


def _refuse_others(words: Sequence[str], stated: Mapping[str, Any]) -> None:
    other = next((what for name, what in _OTHER_MODELS.items() if stated.get(name) not in (None, False)), "")
    other = other or next((os.path.basename(word) for word in words if _OTHER_SCRIPTS.fullmatch(word)), "")
    if other:
        raise ValueError(
            f"{other} trains no GPT or hybrid model of today's Megatron-core, and --wlb trains no other; for "
            "an estimate as if it did, give the flags of its model and layout alone"
        )


def _script(words: Sequence[str]) -> int | None:
    """Return the place of the training script among words, or of another script if none has its name."""
    scripts = [i for i, word in enumerate(words) if word.endswith(".py")]
    return next((i for i in scripts if _TRAINS.match(words[i])), scripts[0] if scripts else None)


def _expanded(words: Sequence[str]) -> list[str]:
    """Return words in which a text for `bash -c` is the words of its command. Raises ValueError."""
    text = next((i for i, word in enumerate(words) if re.search(r"\.py\b", word)), None)
    if text is None or words[text].endswith(".py") or not re.search(r"\s", words[text]):
        return [*words]
    if behind := words[text + 1 :]:
        raise ValueError(f"{short(behind[0])} stands behind the text for bash -c; put it into the text")
    return [*words[:text], *_expanded(_words_of_shell(words[text]))]


def _words_of_shell(text: str) -> list[str]:
    """Return the words of the command in a text for `bash -c` that trains, behind variables that are set before it.

    Raises ValueError if the text is no shell, or has several such commands.
    """
    import tree_sitter
    import tree_sitter_bash

    commands: list[list[str]] = []
    variables: list[str] = []

    def visit(node: Any, more: Sequence[str] = ()) -> None:
        kinds = [child.type for child in node.children]
        if node.type == "redirected_statement":
            # What follows the name of a file is the command's again.
            files_of = (each.children_by_field_name("destination") for each in node.children_by_field_name("redirect"))
            more = [word(each) for found in files_of for each in found[1:]]
        if node.type == "command":
            parts = zip(kinds, node.children, strict=True)
            commands.append([*(word(part) for kind, part in parts if not kind.endswith("_redirect")), *more])
        elif node.type == "variable_assignment":
            variables.append(word(node))
        for child in node.children:
            visit(child, more)

    def word(node: Any) -> str:
        raw = node.text.decode()
        parts = shlex.split(raw)
        return parts[0] if len(parts) == 1 else raw

    tree = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language())).parse(text.encode())
    if tree.root_node.has_error:
        raise ValueError(f"{short(text)} is not understood as shell; give the command without bash -c")
    visit(tree.root_node)
    found = [each for each in commands if any(re.search(r"\.py\b", word) for word in each)]
    for choose in (lambda each: any(map(_TRAINS.match, each)), lambda each: "--num-layers" in each):
        found = [each for each in found if choose(each)] or found
    if len(found) != 1:
        raise ValueError(f"{short(text)} has {len(found)} commands that may train; give one of them without bash -c")
    return variables + found[0]


def _stated(words: Sequence[str]) -> dict[str, Any]:
    """Parse flags to arguments by Megatron's names; the last of a flag counts.

    Raises ValueError for words that belong to no flag, as Megatron refuses them.
    """
    _refuse_strange(words)
    names = {flag: name for name, flag in FLAGS.items()}
    switched_off = {flag: name for name, flag in SWITCHED_OFF.items()}
    given: dict[str, list[str]] = {}
    values: list[str] = []
    room = 0
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            values = given[printable(flag[2:])] = [value] if equals else []
            name = names.get(flag[2:], flag[2:].replace("-", "_"))
            is_switch = flag[2:] in SWITCHES
            room = sys.maxsize if name in LISTS else int(not is_switch)
            if is_switch and equals:
                raise ValueError(f"{short(flag)} takes no value, and {short(value)} is one; leave it out")
        elif len(values) >= room or _NO_VALUE.match(word) or (word.lower() in _TRUTH and not LISTS & {name}):
            raise ValueError(_of_no_flag(word))
        else:
            values.append(word)
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


def _refuse_strange(words: Sequence[str]) -> None:
    if strange := next(filter(_NO_WORD.match, words), None):
        raise ValueError(_of_no_flag(strange))


def _of_no_flag(word: str) -> str:
    """Return why a word is refused."""
    if word.startswith("$"):
        return f"{short(word)} is not expanded; give the words that it stands for, as bash -x prints them"
    why = " (a long dash? Flags have two short ones)" if _LONG_DASH.match(word) else ""
    return f"{short(word.strip() or repr(word))} belongs to no flag{why}, and Megatron refuses it; leave it out"


def alone(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _number(text: str) -> Any:
    if re.fullmatch("[0-9]{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(r"[0-9]+\.[0-9]+", text) else text


def _value_of(text: str) -> Any:
    """Parse a value as Megatron printed it; returns the text if it is no literal."""
    if re.fullmatch(r"\['[^'\\]*'(?:, '[^'\\]*')*\]", text):
        return text[2:-2].split("', '")
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


_NODES = "--nnodes --nodes -N --num-machines".split()
_PER_NODE = "--nproc-per-node --ntasks-per-node --tasks-per-node -npernode --npernode -ppn --ppn".split()
_ALL = "--ntasks -n -np --np --num-processes".split()
_HOSTS = "-H --host -host --hosts -hosts".split()
"""Words of launchers that say how many nodes, processes of a node, and processes there are, and which hosts."""
_LAUNCHERS = re.compile(
    r"(?:.*/)?(?:torchrun|srun|mpi(?:run|exec)\S*|orterun|prun|flux|jsrun|aprun|accelerate|horovodrun)|torch\.distributed\..*"
)
_ALONE = re.compile(r"\w+=.*|-\S*|(?:.*/)?(?:python[\d.]*|env|exec|nohup|time)|megatron_wlb\.run", re.DOTALL)
"""Words before the script of a process that no launcher starts."""


def _world_size(words: Sequence[str]) -> int | None:
    """Return the processes by the words before the script; None without a launcher.

    Raises ValueError for a launcher whose words do not say how many it starts.
    """
    set_to = (re.fullmatch(r"(?:-\S+=)?([A-Z_]+)=(.*)", word) for word in words)
    variables: dict[str, str] = {found[1]: found[2] for found in set_to if found}
    begins = [i for i, word in enumerate(words) if _LAUNCHERS.fullmatch(word)]
    launcher = words[begins[-1] :] if begins else words  # that next to the script
    program = os.path.basename(launcher[0]) if launcher else ""
    said = {}
    for word, after in zip(launcher, [*launcher[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if match := re.fullmatch(r"(-[nNa])(\d+)", word):
            name, equals, value = match[1], "=", match[2]
        said[name.replace("_", "-") if name.startswith("--") else name] = value if equals else after

    def number(names: Sequence[str], variable: str = "") -> int:
        found = {name: said[name] for name in names if name in said}
        found = found or {name: variables[name] for name in (variable,) if name in variables}
        name, text = next(iter(found.items()), ("", "0"))
        if not re.fullmatch("[0-9]{1,9}", text):
            raise ValueError(f"{name} {short(text)} is not a number; put it in, or give --num-gpus")
        return int(text)

    hosts = [host for name in _HOSTS for host in said.get(name, "").split(",") if host]
    if program.startswith("torch"):
        found = number(["--nproc-per-node"], "PET_NPROC_PER_NODE") * (number(["--nnodes"], "PET_NNODES") or 1)
    elif program == "jsrun":
        found = number(["--np", "-p"]) or number(["--nrs", "-n"]) * (number(["--tasks-per-rs", "-a"]) or 1)
    elif program.startswith(("mpi", "orterun", "prun", "horovod")):  # -N is of a node
        slots = sum(int(m[1]) if (m := re.search(r":(\d{1,9})$", host)) else 1 for host in hosts)
        found = number(_ALL) or len(hosts) * number([*_PER_NODE, "-N"]) or slots
    else:
        found = number(_ALL) or number(_NODES) * number(_PER_NODE)
    found = found or number((), "WORLD_SIZE")
    if not found and not all(map(_ALONE.fullmatch, words)):
        raise ValueError(f"{short(' '.join(words))} does not say how many GPUs there are; give --num-gpus")
    return found or None


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
    text = data.replace(b"\0", b"").decode("utf-8-sig", errors="replace")  # holes, where a file was truncated
    if text.lstrip().startswith("{"):
        text = "".join(map(_of_json, text.splitlines(keepends=True)))
    return _COLOURS.sub("", text)


def _of_json(line: str) -> str:
    """Return the text in a line of Docker's, or of another collector of logs; the line itself if there is none."""
    try:
        found = msgspec.json.decode(line, type=dict[str, Any])
    except (ValueError, RecursionError):
        return line
    text = next((found[name] for name in ("log", "message") if isinstance(found.get(name), str)), None)
    return line if text is None else f"{text.rstrip()}\n"

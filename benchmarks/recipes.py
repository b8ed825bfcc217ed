"""Which recipes run with `--wlb` and nothing else: python -m benchmarks.recipes FILE [--json FILE]

FILE holds a JSON object a line (gzip or not): name, source, world_size (or null) and flags of a public recipe, and
under `set` what its launcher sets in parsed arguments. Each goes through Megatron's parser, what `--wlb` sets, every
check before a run, and upstream's validation. No GPU is needed. --output writes the result file as well.
"""

import contextlib
import copy
import gzip
import io
import json
import math
import os
import re
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from megatron_wlb.adapter import cpu

if not torch.cuda.is_available() and "megatron.core" not in sys.modules:
    cpu.install()

from megatron.training.arguments import add_megatron_arguments, validate_args

from megatron_wlb.adapter import jobs
from megatron_wlb.adapter.upstream import legacy
from megatron_wlb.adapter.upstream.versions import SUPPORTED, upstream
from megatron_wlb.describe.adapt import Changes, adapt
from megatron_wlb.describe.arguments import Refused, rows
from megatron_wlb.describe.flags import add_wlb_arguments, given_in

VERDICTS = ("as given", "with settings", "something switched off", "refused")
WRITTEN_FOR = {
    **{"mlm-": "0.20", "ms-swift": "0.18", "Primus": "0.16", "MoE ModelZoo": "dev", "slime": "dev"},
    **{"Pai-": "0.15", "llm-jp": "0.12", "swiss-ai": "0.11", "okazaki": "of 2023"},
}
"""The Megatron that projects pin, by how the names of their sources begin."""
UNKNOWN_MODEL = {"hidden_size": 4096, "num_attention_heads": 32, "num_layers": 0}
"""Of a recipe that leaves the sizes to a checkpoint of another format; layers are a multiple of its virtual stages."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The recipes of a file."""
    data = path.read_bytes()
    for line in (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).splitlines():
        yield json.loads(line)


class Judge:
    """Megatron's parser with the plugin's flags, made once for all recipes."""

    def __init__(self) -> None:
        self._parser, self._without_defaults = (
            add_wlb_arguments(add_megatron_arguments(_Parser(allow_abbrev=False))) for _ in range(2)
        )
        given_in(self._without_defaults, [])

    def __call__(self, recipe: dict[str, Any]) -> Changes:
        """What `--wlb` changes. Raises ValueError where it refuses the recipe, or makes upstream refuse it."""
        plain, given = self._parsed(recipe)
        args = copy.deepcopy(plain)
        if getattr(plain, "model_type", None) not in (None, "gpt"):
            raise ValueError(f"--model-type {plain.model_type} is no GPT or hybrid model of Megatron-core")
        if upstream().passes_functions:
            legacy.check(args)
        changes = adapt(args, given)
        jobs.check(args)
        args.dataloader_type = "external"
        problem = _problem(args)
        if problem and not _problem(plain):
            raise ValueError(f"only with --wlb, {problem}")
        return changes

    def _parsed(self, recipe: dict[str, Any]) -> tuple[Namespace, set[str]]:
        """Arguments and the names of those given, without what only a fork's parser or a shell understands."""
        words, flags = list(_words(recipe["flags"], self._parser._option_string_actions)), recipe.get("set") or {}
        while True:
            try:
                args, unknown = self._parser.parse_known_args([*words, "--wlb"])
                break
            except ValueError as error:
                flag = re.search(r"argument (--[\w-]+)", str(error))
                if flag is None or flag[1] not in words:
                    raise
                words = list(_without(words, flag[1]))
        given = {*vars(self._without_defaults.parse_known_args(words)[0]), *flags}
        refused = {name for name, _ in rows(Refused)}
        scripts = {name: True for name in (word[2:].replace("-", "_") for word in unknown) if name in refused}
        vars(args).update(scripts | flags)  # which scripts add to the parser
        args.seq_length = args.seq_length or 4096
        if not args.num_layers and not args.hidden_size:
            virtual = args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank or 1
            vars(args).update(UNKNOWN_MODEL | {"num_layers": 4 * virtual * args.pipeline_model_parallel_size})
            if args.expert_model_parallel_size > 1:
                args.num_experts = args.num_experts or 8 * args.expert_model_parallel_size
        args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
        args.rank, world, smallest = 0, recipe["world_size"], _smallest_world(args)
        args.world_size = world if world and world % smallest == 0 else smallest
        return args, given


def _words(flags: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    """Flags as Megatron spells them: ms-swift has underscores, and true and false after switches."""
    switches = {flag for flag, action in dict(known).items() if action.nargs == 0}  # type: ignore[call-overload]
    last = ""
    for word in flags:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-") if name.replace("_", "-") in known else name
            word = last = name + equals + value
        elif last in switches and word.lower() in ("true", "false"):
            continue
        yield word


def _without(words: list[str], flag: str) -> Iterator[str]:
    dropping = False
    for word in words:
        dropping = word == flag or (dropping and not word.startswith("--"))
        if not dropping:
            yield word


def _smallest_world(args: Namespace) -> int:
    layout = args.tensor_model_parallel_size * args.context_parallel_size * args.pipeline_model_parallel_size
    shards = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    experts = args.expert_model_parallel_size * shards * args.pipeline_model_parallel_size
    return math.lcm(layout, experts if args.num_experts else 1)


def _problem(args: Namespace) -> str:
    """Why upstream refuses arguments, "" if it does not."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if args.use_torch_fsdp2 or args.use_megatron_fsdp else "1"
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        try:
            validate_args(copy.deepcopy(args), {"tokenizer_type": "GPT2BPETokenizer", "eval_interval": 1000})
        except (AssertionError, ValueError, RuntimeError) as error:
            return str(error) or repr(error)
    return ""


def judged(recipes: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], Counter[str], Counter[str]]:
    """Recipes of each source by verdict; how often each flag is set or switched off; how often each reason refuses."""
    judge, verdicts, changed, reasons = Judge(), defaultdict(Counter), Counter[str](), Counter[str]()
    for recipe in recipes:
        try:
            changes = judge(recipe)
        except (ValueError, KeyError) as error:  # KeyError: upstream's parser has no such value
            verdict = "refused"
            reasons[re.sub(r"\d+", "N", str(error).removeprefix("--wlb: "))[:120]] += 1
        else:
            verdict = VERDICTS[2 if changes.priced else 1 if changes.set else 0]
            changed.update(re.split(" instead|:", line)[0] for line in (*changes.set, *changes.priced))
        verdicts[recipe["source"]][verdict] += 1
    rows = [
        {"source": source, "megatron": written_for(source), **{v: counts[v] for v in VERDICTS}}
        for source, counts in sorted(verdicts.items())
    ]
    return rows, changed, reasons


def written_for(source: str) -> str:
    """The Megatron that a source's recipes were written for, as far as it is known."""
    return next((megatron for begin, megatron in WRITTEN_FOR.items() if source.startswith(begin)), "unknown")


def main() -> None:
    options = results.parser(__doc__)
    options.add_argument("file", type=Path, metavar="FILE")
    options.add_argument("--json", type=Path, metavar="FILE", help="counts of what is accepted, and reasons")
    given = options.parse_args()
    rows, changed, reasons = judged(read(given.file))
    counts = {verdict: sum(row[verdict] for row in rows) for verdict in VERDICTS}
    total = sum(counts.values())
    theirs = [row for row in rows if row["megatron"] in SUPPORTED]
    found = {
        "accepted": total - counts["refused"],
        "accepted_where_theirs_is_supported": sum(row[v] for row in theirs for v in VERDICTS[:-1]),
        "theirs_is_supported": sum(row[v] for row in theirs for v in VERDICTS),
        "without_price": counts["as given"] + counts["with settings"],
        "total": total,
        "reasons": dict(reasons.most_common()),
    }
    results.show([*rows, {"source": "all", **counts}])
    results.show([{"refused": n, "reason": reason} for reason, n in reasons.most_common()] or [{"refused": 0}])
    if given.json:
        results.write_whole(given.json, json.dumps(found, indent=1) + "\n")
    own, supported = found["accepted_where_theirs_is_supported"], max(1, found["theirs_is_supported"])
    shares = {
        "accepted of those whose Megatron is supported": (own / supported, 0.85),
        "of all accepted by a supported Megatron of their own": (own / total, 0.85),
        "accepted with --wlb alone": (found["accepted"] / total, 0.9),
        "accepted without anything switched off": (found["without_price"] / total, 0.6),
    }
    goals = [results.at_least(f"share {name}", *numbers) for name, numbers in shares.items()]
    if given.output:
        settings = found | {"changed": dict(changed.most_common())}
        results.finish(given, "recipes", settings=settings, rows=rows, goals=goals)
    else:
        results.conclude(goals, given.check)


if __name__ == "__main__":
    main()

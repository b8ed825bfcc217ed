"""The run given to a command, and its `Job` under --wlb."""

import argparse
import json
import re
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any, Self

from megatron_wlb import files, layers
from megatron_wlb.cli.data import DATA, check_log
from megatron_wlb.cli.launch import Launched, read_command, read_flags, read_log
from megatron_wlb.cli.screen import Screened, screen
from megatron_wlb.describe.alternatives import fitting
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.describe.flags import add_wlb_arguments
from megatron_wlb.describe.megatron import Description, precision_of
from megatron_wlb.hardware.profile import DEFAULT_PROFILE, GPUS, gpu_of, load_profile
from megatron_wlb.model import MODELS
from megatron_wlb.settings import short

TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "TikTokenizer": 131072}
"""Vocabulary sizes by Megatron's --tokenizer-type, where the type determines them."""
_NAMED = {"llama-?3": "llama3-8b", "llama-?2": "llama2-7b"}
"""Models by patterns in the names of their tokenizers."""


def add_job_flags(parser: argparse.ArgumentParser) -> None:
    """Add arguments that say more of a run than its flags (which win) and its command."""
    parser.add_argument("log", nargs="?", metavar="LOG", help="output of a run; - for standard input")
    parser.add_argument(
        "--approximate", action="store_true", help="skip features that are not simulated, such as another attention"
    )
    parser.add_argument(
        "--gpu", type=_gpu, metavar="NAME", help=f"the run's device: {', '.join(GPUS)}; default: the profile's"
    )
    add_model_flag(parser)


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, help="of these sizes, but for those that flags give")


def _gpu(text: str) -> str:
    if (gpu := gpu_of(text)) is None:
        raise argparse.ArgumentTypeError(
            f"no profile of {short(text)}; give one of {', '.join(GPUS)}, or measure it by megatron-wlb profile and "
            "give --wlb-profile alone"
        )
    return gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Description):
    """A run that is given to a command, and how --wlb would train it."""

    launched: Launched
    screened: Screened
    notes: list[str]
    """Sentences on assumptions."""
    misfit: str
    """How the run's device or precision is not of the profile, or "" if it is."""
    assumes_device: bool
    """Neither --gpu nor --wlb-profile names the device."""
    trains_mock_data: bool
    """Whether the run itself trains mock data, whatever data it is analysed with."""

    def on_device(self) -> Self:
        """Return the run with the memory that training would know, by which it chooses; notes if it is not known."""
        if self.budget is not None:
            return self
        free = self.without_memory()
        job = free.job()
        if (budget := free.budget_bytes(job)) is None:
            self.notes.append(
                "Neither --wlb-max-tokens auto nor micro-batches of several windows are tried: the memory "
                "that weights and optimizer leave is not known. Give --wlb-memory-budget."
            )
            return free
        known = replace(self, budget=budget)
        try:
            known.job()
            return known
        except ValueError as error:
            if self.arguments.fine_grained_activation_offloading and (found := fitting(known, job)):
                flags, fits = found
                self.screened.remarks.append(
                    f"Without offloading of activations, training with --wlb wants {flags} to fit GPUs of "
                    f"{job.profile.memory_gib:g} GiB; these numbers have it on its side."
                )
                return fits
            self.screened.remarks.append(
                f"Training refuses this on GPUs of {job.profile.memory_gib:g} GiB, and these numbers are as if it "
                f"fitted: {error}."
            )
            return free


def run_of(args: argparse.Namespace) -> Run:
    """Return the run of `add_job_flags` and `Parser.divide`. Raises ValueError for contradictions."""
    if args.log is not None and args.launched:
        raise ValueError(f"{short(args.log)} and a command behind --; give one of them")
    launched, given = Launched({}, [], "flags"), read_flags(args.flags)
    wlb_values(given)  # those of a log need not be known
    typed = given.stated
    if args.log is not None:
        launched = read_log(args.log)
    elif args.launched:
        launched = read_command(args.launched, typed.get("world_size"))
    vars(args).update(wlb_values(launched._replace(wlb=[*launched.wlb, *given.wlb])))
    run = launched.stated
    trains_mock_data = bool((typed if launched.source == "flags" else run).get("mock_data"))
    if typed.keys() & DATA:  # in the place of the run's, which may be given otherwise
        run = {name: value for name, value in run.items() if name not in DATA}
    launched = launched._replace(stated=run | typed)
    of_model = layers.shown_by(MODELS[args.model]) if args.model else {}
    stated = {"world_size": launched.world_size} | of_model | launched.stated
    if launched.is_log:
        anew = ["num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"]
        if typed.keys() & {*anew, "pipeline_model_parallel_layout"}:
            anew.append("virtual_pipeline_model_parallel_size")  # which Megatron settles by those two
        stated |= {name: typed.get(name) for name in (*anew, "data_cache_path")}
    if stated.get("step_batch_size_schedule") and "global_batch_size" not in typed:
        raise ValueError("--step-batch-size-schedule has steps of several sizes; give the --global-batch-size of one")
    arguments = MegatronArguments.of(stated)
    if launched.is_log:
        check_log(arguments, typed)
    if arguments.seq_length is None:
        raise ValueError("no --seq-length; give the log of a run, its command behind --, or its flags")
    screened = screen(launched, arguments, model=args.model, approximate=args.approximate)
    profile = args.wlb_profile or (GPUS[args.gpu] if args.gpu else DEFAULT_PROFILE)
    notes: list[str] = []
    misfit = load_profile(profile).misfit(args.gpu, precision_of(arguments))
    screened.remarks[:0] = [misfit] if misfit else []
    return Run.of(
        args,
        _settled(
            *(arguments, args.model, notes),
            by_upstream=launched.source == "command",
            by_flags=launched.source == "flags",
        ),
        model=args.model,
        launched=launched,
        screened=screened,
        notes=notes,
        profile=profile,
        misfit=misfit,
        assumes_device=args.wlb_profile is None and args.gpu is None,
        trains_mock_data=trains_mock_data,
    )


def _wlb_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)


def wlb_values(launched: Launched) -> dict[str, Any]:
    """Return a run's --wlb settings, with defaults. Raises ValueError if unknown."""
    try:
        found, unknown = add_wlb_arguments(_wlb_parser()).parse_known_args(launched.wlb)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}; give another value, or leave the flag out") from None
    if unknown and not launched.is_log:  # which may be of another release
        raise ValueError(f"{short(unknown[0])} is no flag of --wlb; leave it out, or see docs/flags.md")
    return vars(found)


def _settled(
    a: MegatronArguments, model: str | None, notes: list[str], *, by_upstream: bool = False, by_flags: bool = False
) -> MegatronArguments:
    """Return the arguments with missing ones filled in; assumes sequence parallelism.

    `by_upstream`: with Megatron's own global batch, which may be smaller than a pipeline needs. `by_flags`: with a
    distributed optimizer and an output layer of its own, which short commands leave out.
    """
    ranks = a.model_parallel_size
    changes: dict[str, Any] = {"sequence_parallel": True}
    if by_flags:
        changes |= {"use_distributed_optimizer": True, "untie_embeddings_and_output_weights": True}
    if a.world_size is None and by_upstream and ranks > 1:  # Megatron's default is one process
        raise ValueError(
            f"the command does not say how many GPUs there are, and a model takes {ranks}; give --num-gpus"
        )
    if a.world_size is None:
        changes["world_size"] = ranks
        notes.append(
            f"Assumed: {ranks} GPUs, one data-parallel rank (no --num-gpus, nor torchrun's --nproc-per-node and "
            "--nnodes)."
        )
    if a.global_batch_size is None:
        stages = 1 if by_upstream else a.pipeline_model_parallel_size
        count = stages * max(1, (a.world_size or ranks) // ranks) * a.micro_batch_size
        changes["global_batch_size"] = count
        how = f"{'PP x ' * (not by_upstream)}DP{' x --micro-batch-size' * (a.micro_batch_size > 1)}"
        notes.append(f"Assumed: {count} context windows per step, {how} (no --global-batch-size).")
    if model is None and a.vocab_size is None and a.padded_vocab_size is None:
        changes["vocab_size"] = vocabulary(a, notes)
    if model is None and not a.group_query_attention and (a.num_query_groups or 1) > 1:
        notes.append("--num-query-groups counts with --group-query-attention only, in Megatron as well as here.")
    notes += [text for kind in layers.KINDS for text, holds in kind.assumed.items() if holds(a)]
    return replace(a, **changes)


def vocabulary(a: MegatronArguments, notes: list[str]) -> int:
    """Return the tokens of a tokenizer; adds an assumption to `notes`. Raises ValueError if it is not known."""
    if a.tokenizer_type in TOKENIZERS:
        return TOKENIZERS[a.tokenizer_type]
    name = a.tokenizer_model or ""
    file = Path(name, "tokenizer.json")
    if name and file.is_file():
        return tokens_of(file)
    known = next((model for pattern, model in _NAMED.items() if re.search(pattern, name, re.IGNORECASE)), None)
    if known is None:
        named = f"; {short(name)} has no tokenizer.json here" if name else ""
        raise ValueError(f"the vocabulary is not known{named}; give --vocab-size")
    notes.append(f"Assumed: the vocabulary of {known}, by the name of the tokenizer.")
    return MODELS[known].padded_vocab_size


def tokens_of(file: Path) -> int:
    """Return the vocabulary of a tokenizer.json. Raises ValueError if it is none."""
    text = files.read(file, 1 << 26, "give --vocab-size")
    try:
        found = json.loads(text)
        words, added = found["model"]["vocab"], [token["id"] for token in found.get("added_tokens", ())]
        return 1 + max(map(index, [*added, *(words.values() if isinstance(words, dict) else range(len(words)))]))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no tokenizer of Hugging Face ({error}); give --vocab-size") from error

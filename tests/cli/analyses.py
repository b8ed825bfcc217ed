"""Small jobs as flags, what words describe, and `megatron-wlb analyze` as tests call it."""

import argparse
import json
import re
import shlex
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from megatron_wlb.cli.analyze.report import Ratio, Report
from megatron_wlb.cli.analyze.setup import Schemes, Setup
from megatron_wlb.cli.data import Data, data_of
from megatron_wlb.cli.job import Run, add_job_flags, run_of
from megatron_wlb.cli.main import Parser, main
from megatron_wlb.job import Job
from tests.cli.commands import refusal

C, N = 4096, 4
HIDDEN, HEADS, FFN, LAYERS, VOCABULARY = 512, 4, 2048, 2, 1024
MODEL = f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --ffn-hidden-size {FFN} "
MODEL += f"--vocab-size {VOCABULARY}"
JOB = f"{MODEL} --seq-length {C} --global-batch-size {N} --split 1"
LARGE = (
    "--tensor-model-parallel-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4 "
    "--hidden-size 512 --num-attention-heads 4 --vocab-size 128 --group-query-attention "
    f"--seq-length {8 * C} --global-batch-size 8 --wlb-micro-batches 8"
)
"""For `RUN`, or with --num-gpus 16; a number of micro-batches saves a search."""
RUN = "-- torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py"
"""16 GPUs, with the flags that follow."""


def drawn():
    """Lengths of documents."""
    return np.random.default_rng(3).lognormal(5.5, 1.4, 8000).astype(np.int64).clip(1, 6000)


class Described(NamedTuple):
    """What words describe."""

    run: Run
    job: Job
    data: Data | None
    """None without flags of data."""


def run(*words):
    """The run of words as a shell would read them."""
    words = shlex.split(" ".join(map(str, words)))
    parser = Parser(prog="megatron-wlb analyze")
    add_job_flags(parser)
    own, flags, launched = parser.divide(words)
    return run_of(parser.parse_args(own, argparse.Namespace(flags=flags, launched=launched)))


def described(*words):
    found = run(*words)
    a = found.arguments
    has_data = a.data_path or a.train_data_path or a.data_args_path or a.per_split_data_args_path
    return Described(found, found.job(), data_of(a, found.notes, found.run_settings) if has_data else None)


def setup(*words):
    return Setup(run(*words))


def report(setup, speedup, *, error=0.001, waiting=0.1, **values):
    """A report of little more than a speed-up."""
    parts = {"imbalance": waiting, "ep_wait": 0.0, "dp_wait": 0.0}
    thd = SimpleNamespace(us_per_token=speedup, parts_ms=parts, step_ms=1.0)
    ours = SimpleNamespace(us_per_token=1.0)
    values = {"prices": [], "balance": speedup, "readings": [], "best_size": 1.0, "faster": []} | values
    speedups = Schemes(Ratio(1.0, 0.0), Ratio(1.0, 0.0), Ratio(speedup, error))
    return Report(
        *(setup, None, None, None, Schemes(thd, thd, ours), speedups),
        **values,
    )


def analyse(tmp_path, *words):
    """The numbers of a report; `words` may end with a command."""
    json_file = ["--json", str(tmp_path / "analysis")]
    assert main(["analyze", *json_file, *" ".join(words).split()]) == 0
    return json.loads((tmp_path / "analysis").read_text())


def refused(capsys, words, message):
    assert re.search(message, refusal(capsys, "analyze", *words.split()))


def printed(arguments):
    """The block of a log in which Megatron prints its arguments."""
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in arguments.items()]
    return "\n".join([f"{'-' * 24} arguments {'-' * 24}", *lines, f"{'-' * 20} end of arguments {'-' * 20}\n"])

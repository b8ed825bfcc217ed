"""Small jobs as flags, what flags describe, and `megatron-wlb analyze` as tests call it."""

import json
import re
from argparse import Namespace
from typing import NamedTuple

from megatron_wlb.cli.data import Data, data_of
from megatron_wlb.cli.flags import add_job_flags, job_of
from megatron_wlb.cli.main import Parser, main
from megatron_wlb.job import Job
from tests.cli.commands import refusal

C, N = 4096, 4
HIDDEN, HEADS, FFN, LAYERS, VOCABULARY = 512, 4, 2048, 2, 1024
MODEL = f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --ffn-hidden-size {FFN} "
MODEL += f"--vocab-size {VOCABULARY}"
JOB = f"{MODEL} --seq-length {C} --global-batch-size {N} --split 1"
LARGE = (
    "--tensor-model-parallel-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 2 --num-gpus 16 "
    "--num-layers 4 --hidden-size 512 --num-attention-heads 4 --vocab-size 128 --group-query-attention "
    f"--seq-length {8 * C} --global-batch-size 8"
)


class Described(NamedTuple):
    """What a command line describes."""

    args: Namespace
    job: Job
    data: Data | None
    """None without flags of data."""
    notes: list[str]


def described(*words):
    parser = Parser(prog="megatron-wlb analyze")
    add_job_flags(parser)
    args = parser.parse_known_args(" ".join(words).split())[0]
    notes = list(args.remarks)
    job = job_of(args, notes)
    has_data = args.data_path or args.train_data_path or args.data_args_path or args.per_split_data_args_path
    return Described(args, job, data_of(args, notes) if has_data else None, notes)


def analyse(tmp_path, *words):
    assert main(["analyze", *" ".join(words).split(), "--json", str(tmp_path / "analysis")]) == 0
    return json.loads((tmp_path / "analysis").read_text())


def refused(capsys, words, message):
    assert re.search(message, refusal(capsys, "analyze", *words.split()))

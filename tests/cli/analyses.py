"""`megatron-wlb analyze` as tests call it: a small job, its result, the setup it is taken for, its errors."""

import argparse
import json
import re

from megatron_wlb.cli.analyze.setup import setup_of
from megatron_wlb.cli.job import add_job_arguments
from megatron_wlb.cli.main import main
from tests.cli.refusals import refusal

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


def analyse(tmp_path, *words):
    assert main(["analyze", *" ".join(words).split(), "--json", str(tmp_path / "analysis")]) == 0
    return json.loads((tmp_path / "analysis").read_text())


def described(*words):
    """The job that a command line describes, as the report has it, and its documents."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_job_arguments(parser)
    setup = setup_of(parser.parse_known_args(" ".join(words).split())[0])
    return setup, setup.described


def refused(capsys, words, message):
    assert re.search(message, refusal(capsys, "analyze", *words.split()))

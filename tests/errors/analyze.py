"""Errors of `megatron-wlb analyze`."""

import numpy as np

from megatron_wlb.cli.launch import words_of
from tests.adapter.datasets import write_index
from tests.cli.analyses import JOB
from tests.errors.case import At, Case, command


def analyzed(flags, job=f"{JOB} --data-path {{}}/corpus", tokens=(9, 9)):
    def call(at: At):
        write_index(at.folder / "corpus.idx", np.array(tokens))
        command(f"analyze {job} {flags}")(at)

    return call


CASES: list[Case] = [
    # launch.py
    ("--nnodes without <--nproc-per-node>; give both, or --num-gpus", analyzed("--nnodes 2")),
    (
        "--nproc-per-node <gpu> is not a number; put it in, or give --num-gpus",
        analyzed("--nproc-per-node gpu"),
    ),
    (
        "the launch line is not one of a shell: no closing quotation for <'x>; check its quotes",
        lambda at: words_of("torchrun pretrain_gpt.py --data-path 'x"),
    ),
    (
        "the launch line has at least <1048577> characters with its variables put in, and may have <1048576>; give the "
        "part that starts the training",
        lambda at: words_of("x" * (1 + (1 << 20))),
    ),
    (
        "--<num-experts>: mixture of experts cannot be simulated; leave it out for an estimate without, or "
        "give the line that is run if it is in another branch of a script; see megatron-wlb analyze --help",
        analyzed("--num-experts 8"),
    ),
    (
        "<--wlb-packings> is no flag of ours; see megatron-wlb analyze --help",
        analyzed("--wlb-packings adaptive"),
    ),
    (
        "<…train.sh> is a file, and flags are read here; give --launch …train.sh if it is a launch script, or "
        "--data-path if it is a dataset; see megatron-wlb analyze --help",
        command("analyze {}/train.sh", {"train.sh": ""}),
    ),
    (
        "no flags of pretrain_gpt.py such as --num-layers in <python nemo.py devices=8>, and nothing else is read; "
        "give its launch line, or a script with it by --launch; see megatron-wlb analyze --help",
        command("analyze python nemo.py devices=8"),
    ),
    # __init__.py, setup.py
    (
        "--html - and --json - would be mixed on <standard output>; name a file for one",
        analyzed("--html - --json -"),
    ),
    ("no --<data-path>; give the prefix of a .bin/.idx dataset, or a blend", analyzed("", job=JOB)),
    (
        "--micro-batch-size is <2>; a micro-batch of --wlb is one packed sequence, give <1>",
        analyzed("--micro-batch-size 2"),
    ),
    (
        "--seq-length <4098> cannot be shared by <4> context-parallel ranks, which hold two chunks each, and 1 "
        "tensor-parallel ones; give a multiple of <8>",
        analyzed("--seq-length 4098 --context-parallel-size 4"),
    ),
    (
        "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split are simulated <together> "
        "only; give both or none",
        analyzed("--account-for-loss-in-pipeline-split"),
    ),
    (
        "<6> GPUs are no multiple of tensor x context x pipeline parallel sizes <4 x 1 x 1 = 4>, or more than 131072; "
        "change one of them",
        analyzed("--num-gpus 6 --tensor-model-parallel-size 4"),
    ),
    (
        "<4> micro-batches a step (--global-batch-size) cannot be shared by <3> data-parallel ranks; give a multiple "
        "of <3>, or another --num-gpus",
        analyzed("--num-gpus 3"),
    ),
    (
        "<…corpus> has no document of at least <2> tokens among the first 100.000% of 1 (--split 1): there is nothing "
        "to train; give another split, or leave the dataset out",
        analyzed("", tokens=[1]),
    ),
    (
        "--data-path <-1 …corpus>: weights must be over <0>",
        analyzed("", job=f"{JOB} --data-path -1 {{}}/corpus"),
    ),
    (
        "--per-split-data-args-path <…corpus.idx> holds no training blend (…); give JSON such as "
        '{"train": ["PREFIX"], "valid": ["PREFIX"], "test": ["PREFIX"]}',
        analyzed("--per-split-data-args-path {}/corpus.idx", job=JOB),
    ),
    (
        "--split <0,1>: give shares of training, validation and test, such as 969,30,1",
        analyzed("--split 0,1"),
    ),
    # of job.py, where analyze says it
    (
        "no <--hidden-size, --num-attention-heads>: give the sizes of the model, or --model",
        analyzed("", job="--num-layers 2 --seq-length 64 --data-path {}/corpus"),
    ),
]

"""The verdict of `megatron-wlb analyze`: README's "Use it if" on ten kinds of data, and the first lines."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.cli.analyze.report import Steps, analyse, sources
from megatron_wlb.cli.analyze.table import _predicted, rendered, sentences, verdict
from tests.adapter.datasets import write_index
from tests.cli.analyses import JOB, printed, run, setup

W, SEED = 32768, 0
MODEL = f"--model llama2-7b --seq-length {W} --split 1 --tensor-model-parallel-size 8"
PIPELINE = f"{MODEL} --pipeline-model-parallel-size 4 --num-gpus 64 --global-batch-size 32 --wlb-micro-batches 32"
RING = f"{MODEL} --context-parallel-size 4 --num-gpus 32 --global-batch-size 16 --wlb-micro-batches 16"


def mixed(share, short, long):
    """Documents of two lengths; `share` of them are long."""
    return np.where(np.random.default_rng(SEED).random(20000) < share, long, short)


def log_normal(mean, deviation, most, count=20000):
    return np.random.default_rng(SEED).lognormal(mean, deviation, count).astype(int).clip(2, most)


KINDS = {
    "log-normal, a long tail": (log_normal(7, 1.6, 2 * W), True),
    "log-normal, a longer tail": (log_normal(6, 2, 4 * W), True),
    "few books among pages": (mixed(0.01, 600, 40000), True),
    "few full windows among chats": (mixed(0.005, 300, W), True),
    "a book in 200 sentences": (mixed(0.005, 128, 2 * W), True),
    "short, all lengths": (np.random.default_rng(SEED).integers(1, 1024, 40000), False),
    "chats": (log_normal(5.7, 0.7, 2000, 60000), False),
    "sentences": (np.full(200000, 128), False),
    "full windows": (np.full(900, W), False),
    "books over many windows": (np.full(300, 4 * W), False),
}
"""Lengths of documents, and whether README says to use --wlb: they differ much, and are not all short, nor all long."""


def report(folder, lengths, words):
    write_index(folder / "kind.idx", lengths)
    stages = []

    def begin(text, total=None):
        stages.append(text)
        return lambda amount: None

    found = analyse(setup(f"{words} --data-path {folder / 'kind'}"), Steps(4, 4), begin)
    assert len(stages) == 3
    return found


@pytest.mark.parametrize("name", KINDS)
def test_the_verdict_is_what_readme_says(tmp_path, name):
    lengths, use = KINDS[name]
    found = report(tmp_path, lengths, PIPELINE)
    assert verdict(found) == (("Use it", "gain") if use else ("Nothing to balance", "close"))
    assert ("Add to the command" in dict(rendered(found)["flags"])) is use
    parts = sources(found.schemes)
    assert sum(parts.values()) == pytest.approx(100 * (found.speedups.ours.value - 1), abs=1e-6)
    assert not use or parts["balance"] == max(parts.values())


def test_the_gain_of_the_exchange_is_not_called_balance(tmp_path):
    """Short documents in a ring: nobody waits, and less is exchanged."""
    found = report(tmp_path, KINDS["chats"][0], RING)
    assert verdict(found) == ("Nothing to balance", "close")
    parts = sources(found.schemes)
    assert found.speedups.ours.value > 1.05 and parts["exchange"] == max(parts.values()) and parts["attention"] > 0
    _, where, doubts, _ = sentences(found)
    assert where.startswith("Where it comes from: exchange +") and "no run has confirmed it" in where
    assert "published steps of dense models on H100" in doubts and doubts.endswith("has confirmed a gain.")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "CUDA graphs, dispatcher, overlap and fusion of experts are not given: at least 80 % of"),
        ("--moe-token-dispatcher-type flex", "Predicted times of"),
        ("-- torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py", "Predicted times of"),
    ],
)
def test_flags_of_experts_that_are_not_given_widen_the_error(tmp_path, flags, said):
    experts = RING.replace("llama2-7b", "qwen3-30b-a3b").replace("size 8", "size 4")
    words = f"{experts} --num-experts 128 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 {flags}"
    _, _, doubts, _ = sentences(report(tmp_path, KINDS["full windows"][0], words))
    assert said in doubts and "published steps of mixtures of experts on H100" in doubts


def test_the_first_line_says_what_the_number_stands_on(tmp_path, data):
    def said(*words):
        return _predicted(type("Report", (), {"setup": setup(*words)}))

    job = f"{JOB} --wlb-micro-batches 4"
    for device in ("--gpu h100", "--wlb-profile h100-fa2"):
        assert said(job, device, "--data-path", data) == "Predicted"
    assert said(job, "--mock-data") == "Predicted for an assumed NVIDIA H100, on mock data"
    log = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "world_size": 2, "seq_length": 4096}
    log |= {"global_batch_size": 4, "data_path": [data], "split": 1, "vocab_size": 9, "wlb_micro_batches": 4}
    for backend, cpu in (("gloo", ", from the log of a run on CPUs (gloo)"), ("nccl", "")):
        (tmp_path / "log").write_text(printed(log | {"distributed_backend": backend, "attention_dropout": 0.1}))
        assert setup(tmp_path / "log").flags() == "--wlb --wlb-micro-batches 4"  # a log has defaults, too
        assert said(tmp_path / "log", "--gpu h100") == f"Predicted{cpu}"


def test_lengths_of_mock_data_are_advised_to_runs_on_mock_data_alone(data):
    """Training refuses them beside other data."""
    lengths, command = "--mock-data --wlb-mock-lengths F2", f"-- torchrun --nproc-per-node 1 pretrain_gpt.py {JOB}"
    advised = "--wlb --wlb-mock-lengths F2"
    assert setup(JOB, lengths).flags() == advised
    of_runs = (f"--data-path {data}", "--wlb"), ("--mock-data", advised)
    for flags, expected in of_runs:
        assert setup(lengths, command, flags).flags() == expected


def test_nothing_is_advised_to_a_run_that_training_refuses(tmp_path):
    """Whatever it would gain; flags that can be taken out are no reason."""
    command = f"{PIPELINE} -- torchrun --nproc-per-node 8 pretrain_gpt.py --fim-data"
    found = report(tmp_path, KINDS["few books among pages"][0], command)
    assert verdict(found)[1] == "gain"
    assert [title for title, _ in rendered(found)["flags"]] == ["Add to the command", "Take out"]
    refused = run(f"{command} --multi-latent-attention --position-embedding-type yarn").screened
    assert refused.stops and not found.setup.run.screened.stops
    found.setup.run = replace(found.setup.run, screened=refused)
    assert rendered(found)["flags"] == []

"""Whole runs beside parity and resume: evaluation, blends, ranks that disagree, cores, workers, memory."""

import multiprocessing

import pytest
import torch

from megatron_wlb.adapter.data import DocumentDataset
from tests.adapter.datasets import write_dataset
from tests.adapter.training import relative_error, train

PP2 = "--pipeline-model-parallel-size 2".split()
CP2 = "--context-parallel-size 2".split()


def test_evaluation_is_the_same_in_every_layout_and_does_not_disturb_training(dataset, tmp_path):
    evaluate = "--eval-iters 2 --eval-interval 1".split()
    plain = train(1, dataset, log=tmp_path / "plain.jsonl")
    one = train(1, dataset, *evaluate, log=tmp_path / "one.jsonl")
    four = train(4, dataset, *PP2, *CP2, *evaluate, log=tmp_path / "four.jsonl")
    assert len(one["evaluations"]) == 3  # after each of two steps, and at the end
    assert four["evaluations"] == pytest.approx(one["evaluations"], rel=1e-5)
    assert [e["loss"] for e in one["log"]] == [e["loss"] for e in plain["log"]]


def test_blend_of_two_datasets(dataset, tmp_path):
    other = write_dataset(tmp_path / "other", seed=5, documents=50)
    blend = f"0.7 {dataset} 0.3 {other}"
    one = train(1, blend, log=tmp_path / "one.jsonl")
    two = train(2, blend, *CP2, log=tmp_path / "two.jsonl")
    assert [e["work"] for e in one["log"]] == [e["work"] for e in two["log"]]
    assert max(relative_error(g, w) for g, w in zip(two["grads"], one["grads"], strict=True)) <= 1e-5
    alone = train(1, dataset, log=tmp_path / "alone.jsonl")
    assert [e["work"] for e in alone["log"]] != [e["work"] for e in one["log"]]


def test_ranks_that_plan_differently_stop_with_an_error(dataset):
    with pytest.raises(RuntimeError, match=r"ranks planned step 0 differently .*same dataset files, flags"):
        train(2, dataset, *CP2, flags_of_rank={1: ["--wlb-outlier-thresholds", "40,160"]})


@pytest.mark.parametrize(
    ("size", "layout"), [(1, ""), (3, "--pipeline-model-parallel-size 3 --num-virtual-stages-per-pipeline-rank 2")]
)
def test_data_workers_give_the_same_run(size, layout, dataset, tmp_path, monkeypatch):
    """On stages between the first and the last, too, and batches are made once for both of their model chunks."""
    flags = f"{layout} --num-layers 6 --global-batch-size 9 --num-workers".split()
    plain = train(size, dataset, *flags, "0", log=tmp_path / "plain.jsonl")
    made = multiprocessing.get_context("fork").Value("i", 0)
    get = DocumentDataset.__getitem__

    def in_a_worker(self, plan):
        assert torch.utils.data.get_worker_info() is not None
        with made.get_lock():
            made.value += 1
        return get(self, plan)

    monkeypatch.setattr(DocumentDataset, "__getitem__", in_a_worker)
    workers = train(size, dataset, *flags, "2", log=tmp_path / "workers.jsonl")
    assert [e["loss"] for e in workers["log"]] == [e["loss"] for e in plain["log"]]
    ahead = 2 * 2  # torch's DataLoader reads two batches ahead in each worker
    assert 2 * 9 * size <= made.value <= (2 * 9 + ahead) * size


def test_s_max_follows_the_memory_budget(dataset, tmp_path):
    with pytest.raises(RuntimeError, match="tokens fit into memory, less than --seq-length"):
        train(1, dataset, "--wlb-max-tokens", "auto", "--wlb-memory-budget", "0.001")
    run = train(1, dataset, "--wlb-max-tokens", "auto", "--wlb-memory-budget", "0.1", log=tmp_path / "log.jsonl")
    assert len(run["log"]) == 2

"""FLOP counts and TFLOP/s under --wlb: upstream's formula, with the documents that were trained."""

from argparse import Namespace

import numpy as np
import pytest
import torch.distributed as dist
from megatron.core import timers
from megatron.training import training

from megatron_wlb.adapter.layers.attention import attended_squares
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.describe.shape import model_of
from megatron_wlb.documents import document_work
from tests.adapter.datasets import write_lengths
from tests.adapter.training import ADAM, CP2, entries, train

# By hand, of the MODEL: 4 layers, hidden 64, 8 query and 2 key heads of 8, SwiGLU of 96, 256 words; forward + backward.
_PER_TOKEN = 4 * (6 * 64 * (64 + 2 * 16 + 64) + 6 * 64 * 3 * 96) + 6 * 64 * 256
_PER_SQUARE = 4 * 6 * 64


def by_hand(lengths):
    return _PER_TOKEN * lengths.sum() + _PER_SQUARE * (lengths.astype(np.int64) ** 2).sum()


@pytest.fixture
def rates(monkeypatch, tmp_path):
    """What upstream reports as TFLOP/s, on rank 0, if the steps of a line take one second altogether."""
    elapsed = timers.Timer.elapsed

    def second(self, *args, **kwargs):
        return 1.0 if self.name == "interval-time" else elapsed(self, *args, **kwargs)

    def track(log_throughput=False, throughput=None):
        if throughput is not None and dist.get_rank() == 0:
            with (tmp_path / "rates").open("a") as file:
                file.write(f"{throughput}\n")

    monkeypatch.setattr(timers.Timer, "elapsed", second)
    monkeypatch.setattr(training.one_logger_utils, "track_e2e_metrics", track)
    return lambda: [float(line) * 1e12 for line in (tmp_path / "rates").read_text().splitlines()]


@pytest.mark.parametrize(("skip", "share"), [(None, 1.0), (2, 0.5), ([0, 0, 0, 1], 0.25)])
def test_sliding_windows(skip, share):
    """Tokens see themselves and 16 before them."""
    args = Namespace(window_size=(16, 0), window_attn_skip_freq=skip, num_layers=4)
    lengths = np.array([5, 17, 18, 200])

    # Upstream takes half of the square, half a pair for each token less; here up to where the window begins to slide.
    def pairs(window):
        return sum(sum(min(i, window) for i in range(1, n + 1)) - min(n, window) / 2 for n in lengths)

    expected = (1 - share) * pairs(1 << 30) + share * pairs(17)
    assert attended_squares(args, lengths) / 2 == pytest.approx(expected)
    model = model_of(MegatronArguments.of(vars(args) | {"hidden_size": 64, "num_attention_heads": 8}))
    work = document_work(lengths, 0) - model.pairs_beyond(lengths)
    assert work.sum() / 2 == pytest.approx(expected, abs=len(lengths))


def test_a_document_for_every_micro_batch_counts_as_upstream_counts(rates, tmp_path):
    prefix = write_lengths(tmp_path / "windows", np.full(81, 256))
    for wlb in (True, False):
        train(1, prefix, "--train-iters", "1", "--data-cache-path", str(tmp_path), wlb=wlb)
    ours, upstreams = rates()
    assert ours == upstreams == 8 * by_hand(np.array([256]))


def test_lines_and_the_sum_count_the_documents(dataset, rates, tmp_path):
    """A line of two steps reports their mean; the sum goes on over a restart."""
    size, log, checkpoint = 2, tmp_path / "log.jsonl", str(tmp_path / "ckpt")
    common = [*CP2.split(), *ADAM, "--log-interval", "2", "--save", checkpoint]
    common += ["--save-interval", "2", "--ckpt-format", "torch_dist", "--log-progress", "--train-iters"]
    train(size, dataset, *common, "4", log=log)
    train(size, dataset, *common, "6", "--load", checkpoint, "--override-opt-param-scheduler", log=log)
    steps = [by_hand(np.concatenate([*map(np.array, e["lengths"])])) for e in entries(log)]
    assert len({round(step / min(steps), 3) for step in steps}) == 6
    # Upstream also prints after the first step of a run, which goes into the next line once more.
    parts = [steps[:1], steps[:2], steps[2:4], steps[4:5], steps[4:6]]
    assert rates() == pytest.approx([sum(part) / size for part in parts], rel=1e-9)
    progress = (tmp_path / "ckpt" / "progress.txt").read_text()
    saved = [float(part.split(": ")[1]) for part in progress.split("\t") if part.startswith("Floating-point")]
    assert saved == [float(f"{sum(steps[:n]):.2e}") for n in (2, 4, 6)]

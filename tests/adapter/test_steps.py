"""`Training` by hand: the splits that run, how their samples are read, and the arguments of a forward pass."""

from argparse import Namespace

import numpy as np
import pytest
import torch

from megatron_wlb.adapter import training
from megatron_wlb.adapter.clock import Clock
from megatron_wlb.adapter.data import SampleReader
from megatron_wlb.adapter.training import Training
from megatron_wlb.packing.adaptive import AdaptivePacking
from tests.adapter.test_data import DEPTHS, C, batches
from tests.jobs import job

TRAIN, VALID, OTHER, TEST = "train", "valid", "other", "tests"
"""Datasets: what is built has a length."""
FREE = job(num_micro_batches=12)
"""The job of the flags, before the data choose one."""
ARGS = {"skip_train": False, "full_validation": False, "multiple_validation_sets": False, "eval_iters": 2}
ARGS |= {"consumed_train_samples": 40, "consumed_valid_samples": 6, "phase_transition_iterations": None}
ARGS |= {"wlb_windows_per_micro_batch": 3, "wlb_eval_windows_per_micro_batch": 5, "seq_length": C}
ARGS |= {"dataloader_inter_document_masking": False, "reset_position_ids": False, "position_embedding_type": "rope"}
ARGS |= {"wlb_means_in_evaluation": False, "padded_vocab_size": 99}


def loaded(monkeypatch, built=(TRAIN, VALID, TEST), packing=None, digest=False, apart=False, **changes):
    """A run that has loaded these datasets."""
    chosen, run = job(packing=packing or AdaptivePacking()), object.__new__(Training)
    run._args, run._run = Namespace(**ARGS | changes), Namespace(run_settings=Namespace(digest=digest))
    run._kinds = [Namespace(depths=lambda args, depths=depths: depths) for depths in (2, 1)]
    run._source, run._job, run._digest = Namespace(apart=apart), FREE, Namespace(part="part")
    monkeypatch.setattr(training.jobs, "best_job", lambda args, of, data: (chosen, [args, of, data]))
    monkeypatch.setattr(training, "Plans", lambda *given: given)

    def begin(*given):
        run.begun = given

    run._report = Namespace(begin=begin)
    run.load(built, lambda each, args, name, first: Namespace(datasets=[each], name=name, first=first, steps=11))
    return run


@pytest.mark.parametrize(
    ("changes", "splits"),
    [
        ({}, {"train": (TRAIN, 40), "valid": (VALID, 6), "test": (TEST, 0)}),
        ({"eval_iters": 0}, {"train": (TRAIN, 40)}),
        ({"skip_train": True}, {"valid": (VALID, 0), "test": (TEST, 0)}),
        ({"built": (TRAIN, VALID, None)}, {"train": (TRAIN, 40), "valid": (VALID, 6)}),
        ({"full_validation": True, "eval_iters": 0}, {"train": (TRAIN, 40), "valid": (VALID, 0), "test": (TEST, 0)}),
        (
            {"full_validation": True, "multiple_validation_sets": True, "built": (TRAIN, [VALID, OTHER], TEST)},
            {"train": (TRAIN, 40), "valid 0": (VALID, 0), "valid 1": (OTHER, 0)},
        ),
        ({"multiple_validation_sets": True}, {"train": (TRAIN, 40), "valid 0": (VALID, 0)}),
    ],
)
def test_the_splits_that_run_begin_at_their_first_sample(changes, splits, monkeypatch):
    run = loaded(monkeypatch, **changes)
    assert {name: (*each.datasets, each.first) for name, each in run._splits.items()} == splits
    assert all(name == each.name for name, each in run._splits.items())
    whole = run._args.multiple_validation_sets or not changes.get("full_validation")
    given = ARGS | changes
    # Upstream takes its own number of steps for a list.
    expected = (given["eval_iters"], given["full_validation"]) if whole else (11, False)
    assert (run._args.eval_iters, run._args.full_validation) == expected
    skips = "skip_train" in changes
    assert run._plans == (run._args, run._job, run._splits, run._readers) and (run._job is FREE) == skips
    of_job, plans, tried, digested = run.begun
    assert (of_job, plans, digested()) == (run._job, run._plans, "part")
    assert tried == ([] if skips else [run._args, run._run, run._splits["train"]])


@pytest.mark.parametrize(
    ("built", "which"),
    [((None, VALID, TEST), "training"), ((TRAIN, "", TEST), "validation"), ((TRAIN, VALID, ""), "test")],
)
def test_an_empty_split_is_refused(built, which, monkeypatch):
    """Not that of training where none is trained, nor others where none is evaluated."""
    with pytest.raises(ValueError, match=f"the {which} split is empty"):
        loaded(monkeypatch, built)
    loaded(monkeypatch, built, **{"skip_train": True} if which == "training" else {"eval_iters": 0})


@pytest.mark.parametrize(
    ("changes", "train", "valid"),
    [
        ({}, {}, {}),
        ({"packing": AdaptivePacking(max_delay_steps=20)}, {"samples_per_micro_batch": None}, {}),
        ({"apart": True}, {"ahead_in_document": True}, {"ahead_in_document": True}),
        ({"position_embedding_type": "learned_absolute"}, {"in_window": True}, {"in_window": True}),
        ({"position_embedding_type": "learned_absolute", "reset_position_ids": True}, {}, {}),
        (
            {"position_embedding_type": "learned_absolute", "dataloader_inter_document_masking": True},
            {"ahead_in_document": True},
            {"ahead_in_document": True},
        ),
        ({"wlb_means_in_evaluation": True}, {}, {"mean_of_means": True}),
        ({"digest": True}, {"digest": True}, {}),
    ],
)
def test_samples_are_read_as_upstream_has_them(changes, train, valid, monkeypatch):
    common = {"context_length": C, "vocabulary": 99, "depths": 3, "ahead_in_document": False}
    readers = loaded(monkeypatch, **changes)._readers
    assert readers == {
        "train": SampleReader(split="train", datasets=[TRAIN], **common | {"samples_per_micro_batch": 3} | train),
        "valid": SampleReader(split="valid", datasets=[VALID], **common | {"samples_per_micro_batch": 5} | valid),
        "test": SampleReader(split="test", datasets=[TEST], **common | {"samples_per_micro_batch": 5} | valid),
    }


@pytest.mark.parametrize(
    ("split", "per_token", "share", "weights"),
    [
        ("train", False, 0.5, [[1.1, 11 / 12], [1.1, 11 / 6]]),
        ("train", True, 1, [[1, 1], [1, 2]]),
        ("valid", True, 0.5, [[1.1, 11 / 12], [1.1, 11 / 6]]),
    ],
)
def test_targets_of_a_step_weigh_by_the_counts_of_all_ranks(split, per_token, share, weights):
    run = object.__new__(Training)
    run._args, run._device = Namespace(wlb_per_token_loss=per_token), torch.device("cpu")
    run._readers = {split: Namespace(samples_per_micro_batch=2)}
    run._weigh(split, np.array([[4, 4], [1, 1], [0, 0], [6, 3]]), 22)
    assert run._trained_share == share
    torch.testing.assert_close(run._weights, torch.tensor(weights, dtype=torch.float32))
    run._weigh(split, None, 22)
    assert run._trained_share == 1 and run._weights is None


class Model:
    """Notes its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, *given, **named):
        self.calls.append(("forward", *given, named))

    def build_schedule_plan(self, *given, **named):
        self.calls.append(("plan", *given, named))

    def set_input_tensor(self, tensor):
        self.calls.append(("input", tensor))


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("on", ["first and last", "middle"])
def test_a_forward_pass_by_hand(on, plans):
    """Upstream's model lets its last input go; a plan has yet to read it."""
    dataset, ((_, batch), *_) = batches(**{"is_first": False, "is_last": False} if on == "middle" else {})
    run, model, whole = object.__new__(Training), Model(), on != "middle"
    run._device, run._readers, run._job = torch.device("cpu"), {"train": dataset.reader}, job(context_length=C)
    run._args = Namespace(check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=False)
    run._weights, run._report = torch.rand(1 + DEPTHS, 2), Namespace(clock=Clock())
    run._kinds = [Namespace(inputs=lambda of, to, name=name: {name: (of.step, to)}) for name in ("one", "two")]
    run.forward_step(iter([batch]), model, return_schedule_plan=plans)
    (way, tokens, positions, nothing, named), *rest = model.calls
    assert (way, nothing, rest) == (("plan", None, []) if plans else ("forward", None, [("input", None)]))
    expected = batch.positions if whole else batch.metadata.positions
    assert torch.equal(positions, expected[None]) and named["one"] == named["two"] == (1, model)
    given = [tokens, named["labels"], named["loss_mask"]]
    for found, of in zip(given, (batch.tokens, batch.labels, batch.loss_mask), strict=True):
        assert torch.equal(found, of[:1]) if whole else found is None
    assert named["packed_seq_params"].wlb.integers is batch.metadata.integers
    if whole:
        rolled, weights = [*named["packed_seq_params"].depth_inputs], run._weights[:, batch.upstream_micro_batch]
        assert torch.equal(rolled[5][0], (batch.loss_mask * weights)[1:2])

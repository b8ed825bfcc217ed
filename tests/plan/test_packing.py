"""Packing policies: Algorithm 1 worked by hand, and what no policy may ever do to a document."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.plan.metrics import delays, imbalance
from megatron_wlb.plan.packing import OriginalPolicy, WlbPolicy
from megatron_wlb.plan.types import DOCUMENT
from megatron_wlb.plan.workload import document_work


def documents(lengths, *, first=0, arrival=0):
    """DOCUMENT rows that follow one another."""
    rows = np.zeros(len(lengths), DOCUMENT)
    rows["index"] = rows["document"] = np.arange(first, first + len(lengths))
    rows["length"] = lengths
    rows["arrival"] = arrival
    return rows


@pytest.fixture
def make_policy(use_native):
    def make(*, num_micro_batches, max_tokens, outlier_thresholds=(), crossover_tokens=10):
        return WlbPolicy(
            num_micro_batches=num_micro_batches,
            max_tokens=max_tokens,
            outlier_thresholds=outlier_thresholds,
            crossover_tokens=crossover_tokens,
            use_native=use_native,
        )

    return make


def packed(packing):
    """Document indices of each micro-batch."""
    return [packing.micro_batch(i)["index"].tolist() for i in range(len(packing))]


def waiting(policy):
    return {name: rows["index"].tolist() for name, rows in policy.waiting().items()}


def test_algorithm_1_by_hand(make_policy):
    policy = make_policy(num_micro_batches=2, max_tokens=10, outlier_thresholds=[6])

    # Document 1 is an outlier and waits. Work d * (d + 10) of the others: 4 -> 56, 3 -> 39, 2 -> 24. Longest first:
    # 0 to micro-batch 0 (56), 2 to 1 (39), 3 to 1 (78), 4 to 0 (80).
    assert packed(policy.pack(documents([4, 7, 3, 3, 2]))) == [[0, 4], [2, 3]]
    assert waiting(policy) == {"queue0": [1], "remained": []}

    # Document 5 is the second outlier, so both are released: 5 to 0 (144), 1 to 1 (119), 6 to 1 (158), now full with
    # exactly S_max. 7 to 0 (168), full too; 8 fits nowhere and remains.
    assert packed(policy.pack(documents([8, 3, 2, 2], first=5))) == [[5, 7], [1, 6]]
    assert waiting(policy) == {"queue0": [], "remained": [8]}

    # What remained runs with the next batch, in its place by length.
    assert packed(policy.pack(documents([3, 1], first=9))) == [[9], [8, 10]]
    assert waiting(policy) == {"queue0": [], "remained": []}


def test_when_the_lightest_is_full_the_shortest_is_tried(make_policy):
    # Work d * (d + 1): one document of 6 weighs 42, three of 3 weigh 36 in 9 tokens. The last two fit only where the
    # work is larger and the tokens are fewer.
    policy = make_policy(num_micro_batches=2, max_tokens=10, crossover_tokens=1)
    assert packed(policy.pack(documents([6, 3, 3, 3, 2, 2]))) == [[0, 4, 5], [1, 2, 3]]


def test_ties_go_to_the_earlier_document_and_the_first_micro_batch(make_policy):
    policy = make_policy(num_micro_batches=3, max_tokens=10)
    assert packed(policy.pack(documents([4] * 6))) == [[0, 3], [1, 4], [2, 5]]


def test_every_queue_keeps_its_own_lengths(make_policy):
    policy = make_policy(num_micro_batches=3, max_tokens=40, outlier_thresholds=[10, 20])
    policy.pack(documents([9, 10, 19, 20, 40]))
    assert waiting(policy) == {"queue0": [1, 2], "queue1": [3, 4], "remained": []}
    assert packed(policy.pack(documents([15], first=5))) == [[2], [5], [1]]
    assert waiting(policy) == {"queue0": [], "queue1": [3, 4], "remained": []}


def test_a_queue_of_n_gives_every_micro_batch_one_outlier(make_policy):
    policy = make_policy(num_micro_batches=4, max_tokens=100, outlier_thresholds=[50])
    for first in range(3):
        assert packed(policy.pack(documents([90], first=first))) == [[], [], [], []]
    step = policy.pack(documents([90, 1, 1, 1, 1], first=3))
    assert packed(step) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_document_of_s_max_is_placed(make_policy):
    policy = make_policy(num_micro_batches=2, max_tokens=10)
    assert packed(policy.pack(documents([1, 10]))) == [[1], [0]]


def test_a_document_beyond_s_max_is_refused(make_policy):
    policy = make_policy(num_micro_batches=2, max_tokens=10)
    with pytest.raises(ValueError, match="^a document of 11 tokens exceeds max_tokens 10; raise it$"):
        policy.pack(documents([1, 11]))


def test_one_giant_a_step(make_policy):
    """Each waits until there are N of them; meanwhile the micro-batches hold what is short."""
    policy = make_policy(num_micro_batches=4, max_tokens=1000, outlier_thresholds=[500])
    giants = []
    for step in range(8):
        packing = policy.pack(documents([1000, 3, 3, 3, 3], first=5 * step))
        giants.append(sum(packing.documents["length"] == 1000))
        assert len(packing) == 4
    assert giants == [0, 0, 0, 4, 0, 0, 0, 4]


def test_equal_documents_are_balanced_perfectly(make_policy):
    policy = make_policy(num_micro_batches=4, max_tokens=125)
    packing = policy.pack(documents([10] * 40))
    work = packing.sums(document_work(packing.documents["length"], 10))
    assert packing.sums(packing.documents["length"]).tolist() == [100] * 4
    assert imbalance(work) == 1


def test_fewer_documents_than_micro_batches(make_policy):
    policy = make_policy(num_micro_batches=5, max_tokens=10)
    packing = policy.pack(documents([3, 7]))
    assert packed(packing) == [[1], [0], [], [], []]
    assert packing.sums(packing.documents["length"]).tolist() == [7, 3, 0, 0, 0]


batches = st.lists(st.lists(st.integers(1, 32), max_size=25), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(batches=batches, num_micro_batches=st.integers(1, 6), thresholds=st.sets(st.integers(1, 32), max_size=3))
@pytest.mark.parametrize("native", [False, True], ids=["python", "native"])
def test_wlb_keeps_every_document_whole_and_once(native, batches, num_micro_batches, thresholds):
    policy = WlbPolicy(
        num_micro_batches=num_micro_batches,
        max_tokens=32,
        outlier_thresholds=sorted(thresholds),
        crossover_tokens=20,
        use_native=native,
    )
    arrived, ran = np.empty(0, DOCUMENT), np.empty(0, DOCUMENT)
    for step, lengths in enumerate(batches):
        rows = documents(lengths, first=len(arrived), arrival=step)
        packing = policy.pack(rows)
        arrived, ran = np.concatenate((arrived, rows)), np.concatenate((ran, packing.documents))
        assert len(packing) == num_micro_batches
        assert packing.bounds[0] == 0
        assert packing.bounds[-1] == len(packing.documents)
        assert (packing.sums(packing.documents["length"]) <= 32).all()
        assert all(len(rows) < num_micro_batches for name, rows in policy.waiting().items() if name != "remained")
        everything = np.concatenate((ran, *policy.waiting().values()))
        np.testing.assert_array_equal(np.sort(everything, order="index"), arrived)


def test_original_by_hand():
    policy = OriginalPolicy(num_micro_batches=2, context_length=10)

    first = policy.pack(documents([4, 9, 10]))
    assert [tuple(d[["index", "offset", "length"]]) for d in first.documents] == [
        (0, 0, 4),
        (1, 0, 6),
        (1, 6, 3),
        (2, 0, 7),
    ]
    assert first.bounds.tolist() == [0, 2, 4]

    second = policy.pack(documents([17], first=3))
    assert [tuple(d[["index", "offset", "length"]]) for d in second.documents] == [(2, 7, 3), (3, 0, 7), (3, 7, 10)]
    assert second.bounds.tolist() == [0, 2, 3]
    assert len(policy.waiting()["carry"]) == 0


@settings(max_examples=150, deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(1, 60), max_size=25), min_size=1, max_size=8),
    num_micro_batches=st.integers(1, 6),
    context_length=st.integers(1, 40),
)
def test_original_cuts_at_windows_only(batches, num_micro_batches, context_length):
    policy = OriginalPolicy(num_micro_batches=num_micro_batches, context_length=context_length)
    number, drawn, ran = 0, 0, []
    for lengths in batches:
        packing = policy.pack(documents(lengths, first=number))
        number, drawn = number + len(lengths), drawn + sum(lengths)
        assert len(packing) == num_micro_batches
        # Full micro-batches, then one that is cut short by the end of the documents, then empty ones.
        sums = packing.sums(packing.documents["length"])
        full = int((sums == context_length).sum())
        assert (sums[:full] == context_length).all()
        assert sums[full : full + 1].sum() < context_length
        assert not sums[full + 1 :].any()
        ran.extend(packing.documents)

        everything = [*ran, *policy.waiting()["carry"]]
        assert sum(int(d["length"]) for d in everything) == drawn
        position = 0  # within the present micro-batch
        for before, after in pairwise(everything):
            position = (position + int(before["length"])) % context_length
            if before["index"] == after["index"]:
                assert after["offset"] == before["offset"] + before["length"]
                assert position == 0
            else:
                assert after["index"] == before["index"] + 1
                assert after["offset"] == 0
        if full < num_micro_batches:
            break  # the next step would begin a new window


def test_delays_count_tokens_by_steps_waited(make_policy):
    policy = make_policy(num_micro_batches=2, max_tokens=20, outlier_thresholds=[8])
    assert delays(policy.pack(documents([9, 3, 4])), 0) == {0: 7}
    assert delays(policy.pack(documents([10, 5], first=3, arrival=1)), 1) == {0: 15, 1: 9}
    assert delays(policy.pack(documents([], first=5, arrival=2)), 2) == {}


def test_imbalance():
    assert imbalance(np.array([3, 1, 1, 1])) == 2
    assert imbalance(np.zeros(4, np.int64)) == 1

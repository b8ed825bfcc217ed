"""Packing policies: worked by hand, and what no policy may ever do to a document; flags and a policy of one's own."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fixed import FixedPacking
from megatron_wlb.job import MAX_TOKENS
from megatron_wlb.model import MODELS
from megatron_wlb.packing import DEFAULT_POLICY, DIFFERS, POLICIES, REFUSED, policy_of
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.megatron import MegatronPacking, without_wlb
from megatron_wlb.packing.paper import BACKLOG_STEPS, LATE_STEPS, PaperPacking, assign
from megatron_wlb.plan.packer import Packer
from tests.jobs import job, samples
from tests.jobs import packer as make
from tests.packing.steps import documents, fixed, pack, packed, steps_of, tokens


def wlb(num_micro_batches, max_tokens, thresholds=(), crossover_tokens=10):
    sizes = {"context_length": max_tokens, "max_tokens": max_tokens, "crossover_tokens": crossover_tokens}
    return PaperPacking(outlier_thresholds=thresholds).policy(job(num_micro_batches=num_micro_batches, **sizes))


def pieces(packing):
    """(index, offset, length) of the pieces of each micro-batch."""
    return [[tuple(d[["index", "offset", "length"]]) for d in packing.micro_batch(i)] for i in range(len(packing))]


def waiting(policy):
    return {name: rows["index"].tolist() for name, rows in policy.waiting().items()}


def test_megatron_gathers_keys_where_layers_have_windows():
    """Its ring has none."""
    for pattern, exchange in (("*", "ring"), ("W*", "all")):
        model = replace(MODELS["llama2-7b"], window=4096, pattern=pattern)
        assert without_wlb(job(model=model, cp=2)).cp_exchange == exchange


def test_algorithm_1_by_hand():
    policy = wlb(2, 10, (6,))

    # Document 1 is an outlier and waits. Work d * (d + 10) of the others: 4 -> 56, 3 -> 39, 2 -> 24. Longest first:
    # 0 to micro-batch 0 (56), 2 to 1 (39), 3 to 1 (78), 4 to 0 (80).
    assert packed(pack(policy, documents([4, 7, 3, 3, 2]))) == [[0, 4], [2, 3]]
    assert waiting(policy) == {"queue0": [1], "remained": []}

    # Document 5 is the second outlier, so both are released: 5 to 0 (144), 1 to 1 (119), 6 to 1 (158), now full with
    # exactly S_max. 7 to 0 (168), full too; 8 fits nowhere and remains.
    assert packed(pack(policy, documents([8, 3, 2, 2], first=5))) == [[5, 7], [1, 6]]
    assert waiting(policy) == {"queue0": [], "remained": [8]}

    # What remained runs with the next batch, in its place by length.
    assert packed(pack(policy, documents([3, 1], first=9))) == [[9], [8, 10]]
    assert waiting(policy) == {"queue0": [], "remained": []}


def test_when_the_lightest_is_full_the_shortest_is_tried():
    # Work d * (d + 1): one document of 6 weighs 42, three of 3 weigh 36 in 9 tokens. The last two fit only where the
    # work is larger and the tokens are fewer.
    policy = wlb(2, 10, crossover_tokens=1)
    assert packed(pack(policy, documents([6, 3, 3, 3, 2, 2]))) == [[0, 4, 5], [1, 2, 3]]


def test_every_queue_keeps_its_own_lengths():
    policy = wlb(3, 40, (10, 20))
    pack(policy, documents([9, 10, 19, 20, 40]))
    assert waiting(policy) == {"queue0": [1, 2], "queue1": [3, 4], "remained": []}
    assert packed(pack(policy, documents([15], first=5))) == [[2], [5], [1]]
    assert waiting(policy) == {"queue0": [], "queue1": [3, 4], "remained": []}


@pytest.mark.parametrize("lengths", [(650, 900), (500, 1000), (300, 1000)])
def test_documents_that_fit_badly_wait_for_a_bounded_time(lengths):
    """Micro-batches are as long as a window, so that few are full. As Algorithm 1 stands, ever more would wait."""
    n, window = 16, 1000
    sizes = {"context_length": window, "max_tokens": window, "crossover_tokens": window}
    given = job(packing=PaperPacking(), num_micro_batches=n, **sizes)
    data = samples(np.random.default_rng(0).integers(*lengths, 4000), context_length=window)
    seen, remained = [], []
    for step in steps_of(Packer(data, given)):
        rows = step.waiting["remained"]
        remained.append(int(rows["length"].sum()))
        seen += step.batch.documents["index"].tolist()
        assert (step.step - rows["arrival"]).max(initial=0) < 40
    assert sorted(seen) == data.documents(0, len(data))["index"].tolist()
    assert max(remained) <= BACKLOG_STEPS * n * window


def test_what_is_late_comes_first():
    """The shortest is left over as long as longer ones arrive."""
    policy = wlb(1, 10)
    early = documents([6, 5])
    assert packed(pack(policy, early)) == [[0]]
    for step in range(1, LATE_STEPS + 1):
        assert packed(pack(policy, documents([6], first=step + 1, arrival=step), step=step)) == [[step + 1]]
    late = documents([6], first=100, arrival=LATE_STEPS + 1)
    assert packed(pack(policy, late, step=LATE_STEPS + 1)) == [[1]]


@given(st.lists(st.integers(1, 64), max_size=40), st.integers(1, 6), st.integers(0, 1000))
def test_what_algorithm_1_leaves_over_fits_nowhere(lengths, num_micro_batches, crossover):
    lengths = np.array(lengths, np.int64)
    chosen = assign(lengths, lengths * (lengths + crossover), num_micro_batches, 64)
    assert chosen.dtype == np.int64
    held = [0] * num_micro_batches
    for length, i in zip(lengths.tolist(), chosen.tolist(), strict=True):
        if i == num_micro_batches:
            assert min(held) + length > 64
        else:
            held[i] += length
    assert max(held) <= 64


def test_the_largest_sums_of_work_stay_exact():
    work = np.array([2**60, 2**60 - 1, 2**60 - 2, 2**60])
    assert assign(np.full(4, MAX_TOKENS // 2), work, 2, MAX_TOKENS).tolist() == [0, 1, 1, 0]


def test_original_by_hand():
    running = make(job(packing=MegatronPacking(), num_micro_batches=2, context_length=10), [4, 9, 10, 13], seed=None)
    assert [pieces(step.batch) for step in steps_of(running)] == [
        [[(0, 0, 4), (4, 0, 6)], [(10, 6, 3), (13, 0, 7)]],
        [[(20, 7, 3), (23, 0, 7)], []],  # the data ends
    ]


def test_megatron_alone_has_nothing_of_ours():
    sizes = {"num_micro_batches": 4, "global_batch_size": 8, "max_tokens": 128, "tp_tile_rows": 64}
    given = job(**sizes, tp=2, cp=2, pp=2, vpp=2)
    alone = without_wlb(given)
    assert given.overlap_transfers and given.reorders
    assert alone.packing == MegatronPacking() and (alone.num_micro_batches, alone.max_tokens) == (8, 64)
    assert not (alone.overlap_transfers or alone.reorder or alone.tp_tile_rows)
    assert (alone.cp_exchange, alone.sharding.cp_sharding, alone.parallel.group_size) == ("ring", "per-document", 2)
    assert without_wlb(replace(given, parallel=replace(given.parallel, group_size=4))).parallel.group_size == 4
    assert without_wlb(job(num_micro_batches=5, pp=4, vpp=2, group_size=5)).parallel.group_size == 5


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"save": "msc://x"}, True),
        ({"load": "msc://x"}, True),
        ({"save": "x", "load": "y"}, False),
        ({"phase_transition_iterations": [5]}, True),
        ({}, False),
    ],
)
def test_what_a_delay_cannot_serve_is_served_without_one(given, refused):
    for name, policy in (("adaptive", False), ("paper", True), ("adaptive:20", True)):
        a = SimpleNamespace(
            **{"save": None, "load": None, "phase_transition_iterations": None} | given, wlb_packing=name
        )
        assert any(refuses(a) for refuses in REFUSED.values()) == (refused and policy)
        assert [text.format(a=a) for text, differs in DIFFERS.items() if differs(a)] == [
            f"--wlb-packing {name} trains documents in other steps"
        ] * policy


def test_the_most_tokens_of_a_step():
    """With a delay 7 % more than windows hold, or what is paid back and half a filler document, an eighth of a mean."""
    delay = AdaptivePacking(max_delay_steps=20)
    assert [delay.most_step_tokens(job(num_micro_batches=n)) for n in (1, 4)] == [
        math.ceil(64 * (1 + 0.0125 + 1 / 16)), math.ceil(4 * 64 * 1.07)
    ]  # fmt: skip
    assert AdaptivePacking().most_step_tokens(job()) == MegatronPacking().most_step_tokens(job()) == 4 * 64
    assert PaperPacking().most_step_tokens(job()) is None


def test_documents_wait_from_half_a_window_on_by_default():
    policy = PaperPacking().policy(job(num_micro_batches=3))
    pack(policy, documents([31, 32, 47, 48]))
    assert waiting(policy) == {"queue0": [1, 2], "queue1": [3], "remained": []}
    assert waiting(PaperPacking().policy(job(context_length=2))).keys() == {"queue0", "remained"}


def test_documents_that_waited_are_trained_by_other_thresholds():
    """A queue per new threshold; what is below all of them goes next."""
    policy = PaperPacking(outlier_thresholds=(20, 40)).policy(job(num_micro_batches=3))
    pack(policy, documents([25, 35, 45, 55]))
    other = PaperPacking(outlier_thresholds=(30, 50, 60)).policy(job(num_micro_batches=3))
    other.load_waiting(policy.waiting())
    assert waiting(other) == {"queue0": [1, 2], "queue1": [3], "queue2": [], "remained": [0]}


def test_fixed_spreads_the_last_documents():
    policy = fixed(global_batches=4)
    assert packed(pack(policy, documents([9, 4, 4, 4]), exhausted=True)) == [[0], [1]]
    assert packed(pack(policy, documents([]), exhausted=True)) == [[2], [3]]
    assert waiting(policy) == {"carry": []}
    assert packed(pack(policy, documents([]), exhausted=True)) == [[], []]


@settings(max_examples=2 * settings().max_examples)
@given(
    packing=st.sampled_from(
        [
            MegatronPacking(),
            *(FixedPacking(global_batches=k) for k in (1, 2, 4)),
            *(PaperPacking(outlier_thresholds=lengths) for lengths in (None, (1, 2), (7, 15))),
            AdaptivePacking(max_delay_steps=20),
        ]
    ),
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=40),
    num_micro_batches=st.integers(1, 5),
    context_length=st.integers(1, 30),
)
def test_data_runs_once_and_to_its_end(packing, lengths, num_micro_batches, context_length):
    described = job(packing=packing, num_micro_batches=num_micro_batches, context_length=context_length)
    data, ran = samples([*lengths, 31], context_length=context_length), []
    longest = context_length if packing.fixed_length else described.max_tokens
    for step in steps_of(Packer(data, described)):
        assert len(step.batch) == num_micro_batches
        assert len(step.batch.documents)
        assert (step.batch.sums(step.batch.documents["length"]) <= longest).all()
        ran.append(step.batch.documents)
        assert len(ran) <= sum(lengths) + 31

    rows, expected = np.concatenate(ran), data.documents(0, len(data))
    np.testing.assert_array_equal(tokens(rows), tokens(expected))
    if packing.name != "fixed":
        assert len(rows) == len(expected), "nothing is cut"
    # Parts of what is cut run in their order.
    order = np.argsort(rows["index"], kind="stable")
    again = np.flatnonzero(np.diff(rows["index"][order]) == 0)
    assert (rows["offset"][order][again] < rows["offset"][order][again + 1]).all()


def test_wlb_releases_its_outliers_at_the_end_the_longest_first():
    policy = wlb(2, 20, (5, 10, 15))
    pack(policy, documents([6, 12, 15]))
    assert packed(pack(policy, documents([]), exhausted=True)) == [[2], [1]]
    assert packed(pack(policy, documents([]), exhausted=True)) == [[0], []]


def test_a_policy_and_its_parameter_are_one_word():
    assert policy_of(None) == POLICIES[DEFAULT_POLICY]()
    assert policy_of("paper:7,9") == PaperPacking(outlier_thresholds=(7, 9))
    assert policy_of("adaptive:20") == AdaptivePacking(max_delay_steps=20)
    assert [name for name in POLICIES if not policy_of(name).same_steps] == ["paper"]
    for text in (*POLICIES, "paper:7,9", "adaptive:20"):
        assert str(policy_of(text)) == text
    for text, message in {
        "best": "--wlb-packing is 'best'; choose one of adaptive, megatron, paper",
        "": "--wlb-packing is ''; choose one of",
        "megatron:3": "--wlb-packing megatron:3: megatron packing has no parameter '3'; leave it out",
        "paper:9,7": "--wlb-packing paper:9,7: give lengths of at least 1 in increasing order",
        "paper:7,7": "--wlb-packing paper:7,7: give lengths of at least 1 in increasing order",
        "paper:0,7": "--wlb-packing paper:0,7: give lengths of at least 1 in increasing order",
        "paper:x": "--wlb-packing paper:x: 'x' must be integers, such as 32768,65536",
        "adaptive:19": "--wlb-packing adaptive:19: give a delay from 20, half of which place late documents, to",
        "adaptive:-1": "--wlb-packing adaptive:-1: give a delay from 20",
        "adaptive:20,30": "--wlb-packing adaptive:20,30: '20,30' must be an integer",
    }.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            policy_of(text)

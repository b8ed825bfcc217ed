"""A closed batch is planned whole: every sequence once, within bounds."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_wlb import balance
from megatron_wlb.documents import document_work
from megatron_wlb.plan import closed
from tests.jobs import MODEL, job

lengths = st.lists(st.integers(1, 128), min_size=1, max_size=40)


def job_on(dp, **layout):
    return job(dp=dp, num_micro_batches=2 * dp * layout.get("pp", 1), max_tokens=128, **layout)


def sequences(lengths, job, **given):
    """Of every micro-batch of every rank."""
    plans = [balance(lengths, job, rank, **given) for rank in range(job.parallel.dp)]
    return [[m.documents["document"].tolist() for m in plan.micro_batches] for plan in plans]


layouts = st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (3, 3)])


@given(lengths, st.integers(1, 4), layouts, st.booleans())
@example([5, 19, 25, 28, 42, 58, 80], 1, (2, 1), False)
@example([128, *[1] * 15, *[24] * 16], 2, (1, 1), True)
def test_every_sequence_runs_once_within_the_bound(lengths, dp, stages, equal):
    """No micro-batch is empty, unless no number of them holds the sequences that is not over theirs."""
    lengths = lengths[: len(lengths) // dp * dp] or lengths * dp if equal else lengths
    on = job_on(dp, pp=stages[0], vpp=stages[1])
    each = planned(lengths, on, equal_counts=equal)
    if not all(each):
        assert len(lengths) < len(each) < len(lengths) + dp * stages[0]
        for count in range(dp, len(lengths) + 1, dp):
            with pytest.raises(ValueError, match=f"do not fit into {count} micro-batches"):
                balance(lengths, on, num_micro_batches=count, equal_counts=equal)


@given(lengths, st.integers(1, 4), layouts, st.integers(1, 12), st.booleans())
@example([128, 1, 1, 1, 1, 1, 1], 2, (1, 1), 2, False)
def test_a_number_of_micro_batches_that_is_asked_for_is_kept(lengths, dp, stages, count, equal):
    lengths = lengths * dp if equal else lengths
    on = job_on(dp, pp=stages[0], vpp=stages[1])
    try:
        each = planned(lengths, on, num_micro_batches=count * dp, equal_counts=equal)
    except ValueError:  # too few, or not to be interleaved
        assert stages[1] > 1 or sum(lengths) > 64 * count * dp or equal
        return
    assert len(each) == count * dp
    assert all(each) or len(each) > len(lengths)


def planned(lengths, on, **given):
    """The sequences of every micro-batch, once it is checked what holds of any plan."""
    ranks = sequences(lengths, on, **given)
    each = list(chain.from_iterable(ranks))
    assert sorted(chain.from_iterable(each)) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in rows) for rows in each) <= 128
    assert len({len(rank) for rank in ranks}) == 1
    assert not given["equal_counts"] or len({sum(map(len, rank)) for rank in ranks}) == 1
    return each


def test_ranks_have_equal_work_also_where_they_divide_experts():
    drawn = np.random.default_rng(0).integers(1, 128, 400)
    for on in (job_on(4), job_on(4, pp=2), job_on(4, model=replace(MODEL, moe_router_topk=2), ep=4)):
        for equal in (False, True):
            work = [
                sum(int(document_work(drawn[rows], on.crossover_tokens).sum()) for rows in rank)
                for rank in sequences(drawn, on, equal_counts=equal)
            ]
            assert max(work) <= 1.02 * np.mean(work), (on.parallel, equal)


def test_ranks_of_equally_many_sequences_are_alike():
    drawn = np.random.default_rng(0).lognormal(8, 1, 1024).astype(int).clip(max=32_768)
    on = job(dp=16, num_micro_batches=16, max_tokens=1 << 17)
    work = document_work(drawn, on.crossover_tokens)
    sums = [sum(int(work[rows].sum()) for rows in rank) for rank in sequences(drawn, on, equal_counts=True)]
    assert max(sums) <= 1.00001 * np.mean(sums)


@given(st.lists(st.integers(0, 40), min_size=2, max_size=24), st.integers(2, 4))
def test_equal_shares_swap_as_long_as_that_brings_ranks_closer(work, ranks):
    """By trying all pairs: of the ranks of most and of least work, those that even them out most."""
    work = work[: len(work) // ranks * ranks] or work * ranks
    each, held = len(work) // ranks, [[] for _ in range(ranks)]
    for amount in sorted(work, reverse=True):
        min((rank for rank in held if len(rank) < each), key=sum).append(amount)
    for _ in range(closed.SWAPS * ranks):
        most, least = max(held, key=sum), min(held, key=sum)
        half = (sum(most) - sum(least)) // 2
        pairs = ((a - b, i, j) for i, a in enumerate(most) for j, b in enumerate(least) if 0 < a - b <= half)
        if (closer := max(pairs, default=None)) is None:
            break
        _, i, j = closer
        most[i], least[j] = least[j], most[i]
    parts = closed.equal_shares(np.array(work), ranks)
    assert sorted(np.concatenate(parts)) == list(range(len(work))) and {len(part) for part in parts} == {each}
    assert sorted(sum(work[i] for i in part) for part in parts) == sorted(map(sum, held))


@given(lengths, st.integers(1, 4), layouts, st.booleans())
def test_divided_are_the_sequences_of_the_plan(lengths, dp, stages, equal):
    lengths = lengths[: len(lengths) // dp * dp] or lengths * dp if equal else lengths
    on = job_on(dp, pp=stages[0], vpp=stages[1])
    assert closed.divide(lengths, on, equal_counts=equal) == sequences(lengths, on, equal_counts=equal)


def test_ranks_of_few_long_sequences_are_even():
    """A micro-batch holds one or two. Filled first, ranks were 6 % slower than even ones."""
    for seed in range(8):
        drawn = np.random.default_rng(seed).lognormal(4, 0.5, 24).clip(16, 128).astype(int)
        on = job_on(4)
        work = document_work(drawn, on.crossover_tokens)
        sums = [sum(int(work[rows].sum()) for rows in rank) for rank in sequences(drawn, on)]
        assert max(sums) <= 1.02 * np.mean(sums), seed


def test_ranks_have_equally_many_also_where_only_balance_asks_for_it():
    """Micro-batches of 128 tokens hold one each. Dealt one by one, 110 would have a 74 beside it: 2.5 % more work."""
    drawn = [74, 58, 74, 70, 78, 110]
    ranks = [[drawn[i] for rows in rank for i in rows] for rank in sequences(drawn, job_on(2))]
    assert [sorted(rank) for rank in ranks] == [[58, 70, 110], [74, 74, 78]]


def test_a_pipeline_makes_more_micro_batches_than_fit():
    drawn = [100] * 8 + [4] * 64
    assert len(balance(drawn, job_on(1)).batch) < len(balance(drawn, job_on(1, pp=4)).batch)
    assert len(balance(drawn, job_on(1, pp=4), num_micro_batches=12).batch) == 12


@pytest.mark.parametrize(
    ("drawn", "given", "message"),
    [
        ([], {}, "shape .0,. of float64; give at least one whole number"),
        ([[1]], {}, "shape .1, 1. of int64; give at least one whole number"),
        *(([wrong], {}, "give at least one whole number") for wrong in (1.9, "12", True)),
        ([129], {}, "1 sequences of 129 to 129 tokens; give them 1 to 128 tokens"),
        ([0, 1], {}, "2 sequences of 0 to 1 tokens; give them 1 to 128 tokens"),
        ([1, 2], {"num_micro_batches": -2}, "num_micro_batches is -2; it must be int >= 1"),
        *(
            ([1, 2], {"dp_rank": rank}, f"dp_rank is {rank}; {why}")
            for rank, why in ((-1, "it must be int >= 0"), (2, "give one from 0 to 1"))
        ),
        ([1, 2, 3], {"equal_counts": True}, "3 sequences do not divide over 2 data-parallel ranks"),
        ([1, 2, 3], {"num_micro_batches": 3}, "3 micro-batches do not divide"),
        ([128] * 3, {"num_micro_batches": 2}, "3 sequences of 384 tokens do not fit into 2 micro-batches of 128"),
    ],
)
def test_what_cannot_be_planned_is_refused(drawn, given, message):
    with pytest.raises(ValueError, match=message):
        balance(drawn, job_on(2), **given)


def test_what_is_kept_for_the_next_call_cannot_be_written_to():
    plan = balance([5, 4, 3, 2], job_on(2))
    for array in (plan.batch.documents, plan.batch.bounds, plan.packed.drawn, plan.micro_batches[0].documents):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = array[::-1]


def test_sequences_that_do_not_fit_take_few_attempts(monkeypatch):
    """The numbers of micro-batches that are tried grow by a share, and none is empty where that can be."""
    tried = []
    best_with = closed._best_with
    monkeypatch.setattr(
        closed,
        "_best_with",
        lambda documents, job, count, equal: tried.append(count) or best_with(documents, job, count, equal),
    )
    drawn, rng = 4000, np.random.default_rng(0)
    alike = [np.full(drawn, length) for length in (34, 40, 64)]
    for lengths in (rng.integers(1, 60, drawn), rng.integers(33, 60, drawn), *alike):
        tried.clear()
        plan = balance(lengths, job(dp=2, context_length=64))
        assert len(tried) < 120 and all(len(each.documents) for each in plan.micro_batches)
    assert len(tried) <= len(closed.TIMES_THE_FEWEST)  # none of 64 tokens shares a micro-batch of 80


@pytest.mark.parametrize(("length", "count"), [(64, 4), (65, 8)])
def test_two_sequences_share_a_micro_batch_that_both_just_fill(length, count):
    assert len(balance([length] * 8, job_on(2)).batch) == count


@pytest.mark.parametrize(("gain", "chosen"), [(0.002, 0), (0.02, -1)])
def test_the_fewest_micro_batches_are_taken_that_are_about_as_fast(gain, chosen, monkeypatch):
    tried, best_with = [], closed._best_with

    def timed(documents, job, count, equal):
        """Every number takes less time than the one before."""
        tried.append(count)
        return best_with(documents, job, count, equal)._replace(time=int(1e15 * (1 - gain * len(tried))))

    monkeypatch.setattr(closed, "_best_with", timed)
    closed._packed.cache_clear()
    plan = balance([20, 30, 40] * 16, job(dp=2, pp=2, context_length=64, max_tokens=128))
    assert len(tried) == len(closed.TIMES_THE_FEWEST) and len(plan.batch) == tried[chosen]

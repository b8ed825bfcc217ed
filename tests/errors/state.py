"""Errors of packer states that no packer over these datasets has saved."""

import numpy as np

from megatron_wlb.plan.state import _Dataset
from megatron_wlb.plan.types import DOCUMENT
from tests.errors.case import At, Case
from tests.plan.test_packer import finite, make_packer, row, saved


def load(policy="adaptive", **changes):
    return lambda at: make_packer(policy, stream=finite()).load_state(saved(policy, **changes))


def pool(make):
    """Loads a state whose pool is `make(its first row of more than one token, as a dict)`."""

    def call(at: At):
        rows = saved("adaptive")["waiting"]["pool"]
        first = dict(zip(DOCUMENT.names, next(r for r in rows if r[4] > 1), strict=True))
        load(waiting__pool=[list((first | changes).values()) for changes in make(first)])(at)

    return call


def drawn(number=0):
    """A dataset of `finite()` as a state says that it has been drawn."""
    stream = saved("adaptive")["stream"]
    return _Dataset(
        source=finite().sources[number],
        number=number,
        drawn=stream["drawn"][number],
        seed=stream["seed"],
        shuffle=stream["shuffle"],
    )


def head_within_a_piece(at: At):
    load(stream__head=[0, drawn().source.first + drawn().last(), 1])(at)


def piece_to_come(at: At):
    dataset = drawn()
    seen = np.concatenate(list(dataset.documents()))
    document = next(i for i, pairs in enumerate(dataset.source.pairs) if 0 < pairs <= 64 and i not in seen)
    load(waiting__pool=[[0, 0, document, 0, int(dataset.source.pairs[document]), 0]])(at)


def damaged(what):
    return f"the packer state is damaged: {what}; restore it or resume an older one"


CASES: list[Case] = [
    (
        "the state is not a packer state: its format is <'other'>, not <'megatron-wlb-packer-state'>; give "
        "iter_XXXXXXX.wlb.json of a checkpoint",
        load(format="other"),
    ),
    (
        "packer state of version <2>; this release reads version <1>, resume with the release that saved it",
        load(version=2),
    ),
    (
        "the packer state was saved with context_length <32>, this run has <64>; resume with the same setting",
        load(context_length=32),
    ),
    (
        damaged("base <[7, 0]> does not fit its step and the position of the stream"),
        load("native", base=[7, 0]),
    ),
    # plan/state.py
    (damaged("$.step: <-1> is less than the minimum of <0>"), load(step=-1)),
    (
        damaged("step <1099511627776>, base … and position of the stream contradict each other"),
        load(step=1 << 40),
    ),
    (
        damaged("drawn, given and tokens of the stream must count <2> datasets"),
        load(stream__drawn=[1, 1, 1], stream__given=[1, 1, 1], stream__tokens=[1, 1, 1]),
    ),
    (
        damaged("after <0> documents of dataset 0, … documents of … tokens cannot have been taken"),
        lambda at: load(stream__drawn=[0, drawn(1).drawn])(at),
    ),
    (
        damaged("head <[2, 0, 64]> of the stream is not the document that was drawn last"),
        load(stream__head=[2, 0, 64]),
    ),
    (damaged("head <[0, …, 1]> of the stream is not at a piece of its document"), head_within_a_piece),
    (damaged("… pieces of <0> tokens are not what was taken from the datasets"), load(stream__position=0)),
    (
        damaged("documents wait in waiting: <['carry']> instead of <['pool']>"),
        load(waiting={"carry": []}),
    ),
    (damaged("waiting.pool[0] is <row>, not <6 integers from 0 to 9007199254740992>"), load(waiting__pool=["row"])),
    (
        damaged("<waiting.planned0> has more than the <64> tokens of a window"),
        load("fixed", waiting={"carry": [], "planned0": [[0, 0, 0, 0, 65, 0]]}),
    ),
    (
        damaged("in waiting, {…'dataset': <2>, …} is not of one of the <2 datasets>"),
        lambda at: load(waiting__pool=[row(saved("adaptive"), "pool", dataset=2)])(at),
    ),
    (
        damaged("in waiting, {…'length': <0>, …} does not lie within a piece of a document of its dataset"),
        lambda at: load(waiting__pool=[row(saved("adaptive"), "pool", length=0)])(at),
    ),
    (
        damaged("in waiting, {…'arrival': <1125899906842624>} is of a document that the stream has not come to"),
        lambda at: load(waiting__pool=[row(saved("adaptive"), "pool", arrival=1 << 50)])(at),
    ),
    (
        damaged("in waiting, <{…}> does not go on where the row of the same index before it ends"),
        pool(lambda first: [{}, {}]),
    ),
    (
        damaged("in waiting, <{…}> lacks the rest of its piece"),
        pool(lambda first: [{"length": first["length"] - 1}]),
    ),
    (
        damaged("in waiting, <{…}> is not a whole piece"),
        pool(lambda first: [{"length": 1}, {"offset": first["offset"] + 1, "length": first["length"] - 1}]),
    ),
    (
        damaged("in waiting, <{…}> waits more often than it was drawn"),
        pool(lambda first: [{"index": 0}, {"index": 1}]),
    ),
    (damaged("in waiting, <{…}> is yet to come in the stream"), piece_to_come),
]

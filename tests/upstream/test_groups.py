"""Ranks that divide experts are those of upstream's groups."""

import itertools

import pytest
from megatron.core.parallel_state import RankGenerator

from megatron_wlb.job import Parallel


def test_ranks_that_divide_experts_are_those_of_upstreams_groups():
    """Data-parallel ranks that a chain of upstream's expert groups connects, of ranks in its default order."""
    for tp, cp, dp, ep, etp in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 4, 6), (1, 2, 3, 4, 8), (None, 1, 2)):
        expert_tp = etp or tp
        if tp * cp * dp % (ep * expert_tp):
            with pytest.raises(ValueError, match="do not divide"):
                Parallel(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp)
            continue
        sizes = {"tp": expert_tp, "ep": ep, "dp": tp * cp * dp // (ep * expert_tp), "pp": 2, "cp": 1}
        groups = RankGenerator(**sizes, order="tp-cp-ep-dp-pp").get_ranks("tp-ep")
        replicas = Parallel(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp).pooling_ranks
        together = [{rank // (tp * cp) for rank in group} for group in groups]
        for i in range(2 * dp):
            meets = {i}
            for _ in range(dp):
                meets = meets.union(*(each for each in together if each & meets))
            assert meets == set(range(i // replicas * replicas, (i // replicas + 1) * replicas))

"""Transfers between stages: what is kept until it is sent, and in which groups it travels; parity trains by them."""

import os
import weakref
from collections import deque
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, _p2p_ops

from megatron_wlb.adapter import p2p
from megatron_wlb.runtime.all_to_all import gradient_group
from tests.adapter.training import VPP2, train
from tests.worlds import run_world


class Request:
    done, kept = False, None

    def wait(self):
        assert self.kept is None or self.kept() is not None, "what is on its way was let go"
        self.done = True


def test_what_is_sent_is_kept_for_a_while(monkeypatch):
    """Upstream is not told of the request, so that it waits for none, and frees its output at once."""
    posted = []

    def post(self, **given):
        posted.append(Request())
        return None, None, {name[len("tensor_") :]: posted[-1] for name in given if name.startswith("tensor_")}

    monkeypatch.setattr(P2PCommunicator, "_communicate", post)
    communicator = object.__new__(p2p.PlannedP2PCommunicator)
    communicator._sent = deque()
    communicator.pp_group = SimpleNamespace(size=lambda: 2)
    outputs = [torch.ones(3), torch.ones(3)]
    for output, name in zip(outputs, ("tensor_send_next", "tensor_send_prev"), strict=True):
        assert communicator._communicate(wait_on_reqs=False, **{name: output}) == (None, None, {})
        output.data = torch.zeros(1)
    assert [kept.tolist() for _, kept in communicator._sent] == [[1, 1, 1]] * 2
    for request, kept in communicator._sent:
        request.kept = weakref.ref(kept)
    del kept
    communicator._communicate(wait_on_reqs=False, tensor_send_next=torch.ones(3))
    assert [request.done for request in posted] == [True, False, False]
    communicator.settle()
    assert all(request.done for request in posted)


def test_memory_of_what_was_sent_waits_for_the_stream_that_waited(monkeypatch):
    """Upstream's combined schedule settles on its communication stream; computation must not take the memory again."""
    communicator, done = object.__new__(p2p.PlannedP2PCommunicator), []
    request = SimpleNamespace(wait=lambda: done.append("sent"))
    output = SimpleNamespace(record_stream=lambda stream: done.append(stream))
    communicator._sent = deque([(request, output)])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "communication")
    communicator.settle()
    assert done == ["sent", "communication"] and not communicator._sent


@pytest.mark.parametrize(
    ("rank", "posted"),
    [
        (2, ["send_next", "recv_prev", "send_prev", "recv_next"]),
        (1, ["recv_prev", "send_next", "recv_next", "send_prev"]),
    ],
)
def test_activations_and_gradients_travel_in_groups_of_their_own(rank, posted, monkeypatch):
    """In upstream's order, which is that of its dictionary of requests."""
    moved = []
    monkeypatch.setattr(torch.distributed, "isend", lambda tensor, dst, group: moved.append((tensor, dst, group)))
    monkeypatch.setattr(torch.distributed, "irecv", lambda tensor, src, group: moved.append((tensor, src, group)))
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD="world"))
    group = SimpleNamespace(size=lambda: 4, rank=lambda: rank)
    given = {f"tensor_{name}": name for name in posted}
    given |= {"group": group, "prev_pipeline_rank": rank - 1, "next_pipeline_rank": rank + 1}
    requests = p2p.by_direction(_p2p_ops)(**given)
    groups = {"send_next": group, "recv_prev": group, "send_prev": "world", "recv_next": "world"}
    assert moved == [(name, rank + (1 if "next" in name else -1), groups[name]) for name in posted]
    assert list(requests) == posted == list(_p2p_ops(**given))
    assert p2p.by_direction(_p2p_ops)(**given | {"tensor_send_prev": None, "tensor_recv_next": None}).keys() == {
        "send_next",
        "recv_prev",
    }


@pytest.mark.parametrize(("size", "backend"), [(2, "nccl"), (4, "ucc")])
def test_two_stages_have_upstreams_groups(size, backend, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: backend)
    given = {"group": SimpleNamespace(size=lambda: size), "tensor_send_next": None}
    assert p2p.by_direction(lambda **rest: rest)(**given) == given


@pytest.mark.parametrize(
    ("shape", "exchange", "overlaps", "more", "pairs"),
    [
        ({"cp": 1, "vpp": 1}, "all", False, [], False),
        ({"cp": 2, "vpp": 1}, "all", True, ["cp"], False),
        ({"cp": 2, "vpp": 2}, "shared", False, ["cp", "gradients of cp"], False),
        ({"cp": 1, "vpp": 2}, "shared", True, [], True),
    ],
)
def test_communicators_are_made_before_the_first_step(shape, exchange, overlaps, more, pairs, monkeypatch):
    """Those that a step uses: of all layers, of some, of context parallelism, and of neighbours among stages."""
    pp, moved, reduced, posted = SimpleNamespace(size=lambda: 4, rank=lambda: 3), Request(), [], []
    names = ["tp", "intra_dp_cp", pp, "mp", "intra_dist_opt", "ep"]
    groups = SimpleNamespace(**{name if isinstance(name, str) else "pp": name for name in (*names, "cp", "tp_cp")})
    monkeypatch.setattr(p2p.ProcessGroupCollection, "use_mpu_process_groups", lambda: groups)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: reduced.append(group))
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: 10 * rank)
    monkeypatch.setattr(p2p, "gradient_group", lambda group: f"gradients of {group}")
    monkeypatch.setattr(p2p.p2p_communication, "_p2p_ops", lambda **given: posted.append(given) or {"send": moved})
    job = SimpleNamespace(parallel=SimpleNamespace(**shape), cp_exchange=exchange, overlap_transfers=overlaps)
    p2p.connect(job, torch.device("cpu"), ["ep"])
    assert reduced == [*names, *more] and moved.done == bool(posted) == pairs
    for given in posted:
        tensors = {name for name, tensor in given.items() if name.startswith("tensor_") and tensor.tolist() == [0]}
        assert tensors == {"tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next"}
        assert (given["group"], given["prev_pipeline_rank"], given["next_pipeline_rank"]) == (pp, 20, 0)


def test_transfers_hide(dataset, monkeypatch, tmp_path):
    """Of training and of evaluation, in a run: upstream receives ahead, something is kept, and nothing at the end.

    Each has groups of its own: of 4 micro-batches all, of 8 windows 3, 3 and 2.
    """
    settle = p2p.PlannedP2PCommunicator.settle

    def settled(self, *kept):
        if kept:
            return settle(self, *kept)
        kept = len(self._sent)
        settle(self)
        with (tmp_path / str(os.getpid())).open("a") as file:
            flush, group = self.config.overlap_p2p_comm_warmup_flush, self.config.microbatch_group_size_per_vp_stage
            print(flush, kept > 0, len(self._sent), len(self._rows), group, file=file)

    monkeypatch.setattr(p2p.PlannedP2PCommunicator, "settle", settled)
    flags = f"{VPP2} --train-iters 2 --eval-iters 1 --eval-interval 1 --wlb-micro-batches 4 --wlb-max-tokens 640"
    train(2, dataset, *flags.split())
    found = [path.read_text().splitlines() for path in tmp_path.iterdir()]
    assert len(found) == 2
    assert all(len(lines) >= 4 and set(lines) == {"True True 0 4 4", "True True 0 8 3"} for lines in found)


def test_the_second_group_has_the_timeout_and_the_options_of_megatrons(monkeypatch):
    """Options are NCCL's, which Gloo does not take."""
    assert run_world(_timeouts, 2) == [[timedelta(minutes=3)] * 2] * 2
    given = {"is_high_priority_stream": True, "cga_cluster_size": 2, "max_ctas": 8, "min_ctas": 3, "net_name": "Socket"}
    options = parallel_state.get_nccl_options("cp", {"cp": given})
    options._timeout, options.group_name = timedelta(minutes=40), "of the first"
    backend = SimpleNamespace(options=options)
    first = SimpleNamespace(_device_types=["cuda"], _get_backend=lambda device: backend)
    made = {}
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "new_group", lambda ranks, **how: made.update(how, ranks=ranks))
    gradient_group.__wrapped__(first)
    copied = made.pop("pg_options")
    assert made == {"ranks": [0, 1], "use_local_synchronization": True, "timeout": timedelta(minutes=40)}
    found = {name: getattr(copied.config, name) for name in given if name != "is_high_priority_stream"}
    assert found | {"is_high_priority_stream": copied.is_high_priority_stream} == given
    copied.group_name = "of the second"
    assert options.group_name == "of the first" and copied._timeout == made["timeout"]


def _timeouts():
    parallel_state.initialize_model_parallel(context_parallel_size=2, distributed_timeout_minutes=3)
    first = parallel_state.get_context_parallel_group()
    return [each._get_backend(torch.device("cpu")).options._timeout for each in (first, gradient_group(first))]

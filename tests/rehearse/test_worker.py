"""What a worker changes for its ranks: arguments, routers, process groups and the lines that it names."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_rehearsal import world
from megatron_rehearsal.experts import Experts
from megatron_rehearsal.task import GPUS, Task
from megatron_rehearsal.worker import _OFF, _UNSET, Run, Watch, _norm
from megatron_wlb.plan import closed
from tests.jobs import job

EP, TP, EXPERTS, TOP = 2, 2, 6, 2


class Dispatcher(SimpleNamespace):
    __hash__ = object.__hash__


def dispatcher_of(rank):
    """As a layer's own, with counts to be written."""
    local = [3 * (rank // TP) + i for i in range(EXPERTS // EP)]
    given = {"drop_and_pad": False, "tp_ep_group": "peers", "num_experts": EXPERTS, "local_expert_indices": local}
    given |= {"config": SimpleNamespace(moe_router_topk=TOP), "ep_size": EP, "tp_size": TP, "tp_rank": rank % TP}
    sizes = {"input_splits": (EP,), "output_splits": (EP,), "output_splits_tp": (TP,), "num_out_tokens": ()}
    sizes["num_global_tokens_per_local_expert"] = (TP, EP, len(local))
    return Dispatcher(**given, **{name: torch.full(size, -1) for name, size in sizes.items()})


def counted(experts, dispatcher, rows):
    """The counts after a pass over so many rows, and those of the rank's own experts."""
    own = experts.preprocess(lambda *given: torch.full((3,), -1), dispatcher, torch.zeros(rows, EXPERTS))
    names = "input_splits output_splits output_splits_tp num_out_tokens num_global_tokens_per_local_expert"
    return SimpleNamespace(own=own, **{name: getattr(dispatcher, name).clone() for name in names.split()})


@pytest.fixture
def ranks(monkeypatch):
    """Lets code run as one of four ranks that divide experts."""
    at = [0]
    monkeypatch.setattr(dist, "get_rank", lambda: at[0])
    monkeypatch.setattr(dist, "get_process_group_ranks", {"peers": [0, 1, 2, 3]}.get)
    return at


def test_an_even_router_sends_every_rank_what_it_is_told(ranks):
    """Ranks have the rows of their data-parallel rank's micro-batch, shared by tensor-parallel ranks."""
    on = job(dp=2, tp=2, ep=2, etp=2, num_micro_batches=4, context_length=64, max_tokens=128)
    plans = [closed.balance([100, 60, 90, 10, 80], on, rank) for rank in (0, 1)]
    rows = [[m.padded_tokens // 2 for m in plan.micro_batches] for plan in plans]
    assert rows[0][0] != rows[1][0] and rows[0] != rows[0][::-1]
    passes = [[] for _ in range(4)]  # forward and backward of two micro-batches
    for ranks[0] in range(4):
        experts, dispatcher, mine = Experts(), dispatcher_of(ranks[0]), rows[ranks[0] // 2]
        assert int(counted(experts, dispatcher, 9).own.sum()) == 4 * 9  # without a plan, all ranks have as many
        experts.begin(plans[0], on)
        for experts.backward in (False, True):
            passes[ranks[0]] += [counted(experts, dispatcher, n) for n in mine]
        dispatcher.drop_and_pad = True
        assert counted(experts, dispatcher, 9).own.tolist() == [-1] * 3
    for number, of_ranks in enumerate(zip(*passes, strict=True)):
        sent = torch.stack([counts.input_splits for counts in of_ranks])
        assert sent.sum(1).tolist() == [TOP * rows[rank // 2][number % 2] for rank in range(4)]
        for rank, counts in enumerate(of_ranks):
            arrives = sent[:, rank // TP].reshape(EP, TP).T  # by tensor-parallel rank, then by expert-parallel rank
            table = counts.num_global_tokens_per_local_expert
            assert counts.num_out_tokens == sent[rank].sum() and torch.equal(table.sum(2), arrives)
            assert torch.equal(counts.output_splits, arrives[rank % TP])
            assert torch.equal(counts.output_splits_tp, arrives.sum(1))
            assert torch.equal(counts.own, table.sum((0, 1))) and int((table.amax(2) - table.amin(2)).max()) <= 1
            assert (table.diff(dim=2) <= 0).all()  # the first experts have what is left over


def test_arguments_that_a_rehearsal_changes():
    given = {
        "world_size": 8,
        "steps": 6,
        "gpu": GPUS["h100"],
        "script": [],
        "flags": [],
        "vocab_size": 9,
        "folder": "F",
    }
    off = dict.fromkeys(_UNSET) | dict.fromkeys(_OFF, False) | {"train_iters": 6, "eval_iters": 0, "vocab_size": 9}
    off |= {"lr_warmup_samples": 0, "lr_warmup_iters": 0, "rerun_mode": "disabled", "data_cache_path": "F"}
    off |= {"config_logger_dir": "", "tokenizer_type": "NullTokenizer", "sft": False}
    data = "data_path train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path".split()
    mock = {"mock_data": True, "num_workers": 0} | dict.fromkeys(data)
    chats = {name: value for name, value in off.items() if name not in ("tokenizer_model", "tokenizer_type", "sft")}
    for wlb, mocks, sft, impl, changes in (
        (False, False, False, "transformer_engine", off),
        (False, False, False, "local", off | {"apply_rope_fusion": False}),
        (True, False, False, "transformer_engine", off | {"wlb_log": None}),
        (True, True, False, "transformer_engine", off | mock | {"wlb_log": None, "wlb_sft_skip": None}),
        (False, True, True, "transformer_engine", off | mock),
        (True, False, True, "transformer_engine", chats | {"wlb_log": None}),
    ):
        run = Run(Task(**given, wlb=wlb, mock_data=mocks), 0, None)
        assert run._changes(Namespace(sft=sft, transformer_impl=impl)) == changes


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/x/site-packages/einops/y.py", "einops/y.py:1"),
        ("/x/site-packages/megatron/core/y.py", "megatron/core/y.py:1"),
        ("/x/megatron_wlb/adapter/y.py", "megatron_wlb/adapter/y.py:1"),
        ("/x/checkout/megatron/y.py", "megatron/y.py:1"),
        ("/x/pretrain.py", "pretrain.py:1"),
        ("/x/site-packages/torch/y.py", None),
        ("<string>", None),
    ],
)
def test_lines_are_named_from_their_package_on(name, said):
    """Of torch, and of what only hands on, those that call it."""
    watch = Watch.__new__(Watch)
    watch._lines, watch.at = {("before", "start"): 0}, "step 0"
    here = ("/torch/", "<", "/tests/")
    watch._passes_on = lambda file: any(part in file for part in here)
    exec(compile("watch._where()", name, "exec"), {"watch": watch})
    exec(compile("watch._where()", name, "exec"), {"watch": watch})
    ((line, at), number) = [*watch._lines.items()][1]
    assert len(watch._lines) == 2 and (at, number) == ("step 0", 1)
    assert line == said if said else not line.startswith(("torch/", "<", "tests/"))


@pytest.fixture
def alone(monkeypatch):
    """Torch's functions of groups in a world of which one rank is there, and what they are given."""
    made = []
    for module in (dist, c10d):
        for name in ("init_process_group", "new_group"):
            monkeypatch.setattr(module, name, lambda *given, name=name, **named: made.append((name, given, named)))
        for name in ("all_gather_object", "gather_object", "broadcast_object_list", "barrier"):
            monkeypatch.setattr(module, name, None)
    monkeypatch.setattr(dist.Backend, "register_backend", lambda *given, **named: made.append((given[0], named)))
    monkeypatch.setenv("RANK", "3")
    return world.install(8), made


def test_groups_begin_without_other_ranks(alone):
    store, made = alone
    dist.init_process_group(backend="nccl", rank=0)
    c10d.new_group([1, 3], "timeout", "gloo", group_desc="x", device_id=0)
    dist.new_group([1, 3])
    both = "cpu:silent,cuda:nccl"
    assert made == [
        ("silent", {"extended_api": True, "devices": "cpu"}),
        ("init_process_group", (both,), {"rank": 3, "world_size": 8, "store": store}),
        ("new_group", ([1, 3], "timeout", "silent"), {"group_desc": "x"}),
        ("new_group", ([1, 3], None, both), {}),
    ]
    objects = [None] * 2
    dist.all_gather_object(objects, "mine")
    assert objects == ["mine", "mine"] and dist.barrier() is None
    c10d.gather_object("other", objects)
    c10d.gather_object("nobody's", None)
    dist.broadcast_object_list(objects, src=0)
    assert objects == ["other", "other"]


def test_a_store_has_what_every_rank_would_have_set(alone, monkeypatch):
    """Communicators are found by their ids, of which others have the key's own."""
    store, _ = alone
    groups = {"whole": [0, 1, 2, 3], "pair": [1, 3]}
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_group_ranks=groups, pg_names={n: f"{n}s" for n in groups}))
    assert store.add("x", 1) == 8 and not store.check(["a//cuda:0//0"])
    store.set("default_pg/wholes//cuda:0//0", bytes([7]) + bytes(127))
    other = store.get("default_pg/pairs//cuda:0//0:1")
    assert len(other) == 128 and other == store.get("default_pg/pairs//cuda:0//0:1") != store.get("pairs//cuda//1")
    store.set("wholes//short", b"1")
    store.set("nobodys//cuda//0", bytes([9]) + bytes(127))
    assert store.check(["wholes//short"]) and not store.check(["wholes//short", "none"])
    store.wait(["none"])
    numbers = [
        int.from_bytes(store.get(key)[:8], "little") for key in ("default_pg/pairs//cuda:0//0:1", "pairs//cuda//1")
    ]
    assert store.clone().communicators() == {
        7: ("default_pg/wholes//cuda:0//0", [0, 1, 2, 3]),
        numbers[0]: ("default_pg/pairs//cuda:0//0:1", [1, 3]),
        numbers[1]: ("pairs//cuda//1", [1, 3]),
    }
    store.set("wholes//cuda:0//3:1", bytes([8]) + bytes(127))
    assert store.communicators()[8] == ("wholes//cuda:0//3:1", [3, 1])


def test_gradient_norms_are_fixed_once_upstream_has_computed_its_own():
    seen = []
    assert _norm(lambda *given, **named: seen.append((given, named)), 1, norm_type=2) == 2.0
    assert seen == [((1,), {"norm_type": 2})]

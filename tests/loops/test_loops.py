"""Loops divide batches as the plan says, in their own functions, and get these back.

Of verl and ms-swift the released file is loaded, without the packages that it imports:

    .venv/bin/python -m pip install --no-deps --target .venv/loops --requirement requirements/loops.txt
"""

import inspect
import sys
from argparse import Namespace
from itertools import chain
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from megatron_wlb import balance
from megatron_wlb.loops import ms_swift, nemo_rl, patch, slime, verl
from megatron_wlb.plan.closed import divide, equal_shares
from tests.jobs import job
from tests.worlds import run_world

RELEASED = Path(sys.prefix) / "loops"
LAYOUTS = [{}, {"pp": 4}, {"pp": 2, "vpp": 2}, {"cp": 2, "tp": 2}, {"pp": 2, "vpp": 2, "group_size": 2, "cp": 2}]
LONGEST = 4096


def drawn(count, seed=0):
    return np.random.default_rng(seed).lognormal(6.5, 1, count).astype(int).clip(16, LONGEST).tolist()


def job_on(**layout):
    return job(num_micro_batches=16, context_length=LONGEST, crossover_tokens=2000, **layout)


def module(monkeypatch, name, **attributes):
    """A module, below empty ones."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    vars(sys.modules[name]).update(attributes)
    return sys.modules[name]


def released(monkeypatch, name, **imported):
    """A module of a release, above stand-ins for what it imports of its package."""
    path = RELEASED / f"{name.replace('.', '/')}.py"
    if not path.exists():
        pytest.skip(f"{RELEASED} lacks {name}")
    monkeypatch.syspath_prepend(RELEASED)  # for binpacking
    loaded = module(monkeypatch, name)
    for other, attributes in imported.items():
        module(monkeypatch, other.replace("__", "."), **attributes)
        owner, _, last = other.replace("__", ".").rpartition(".")
        monkeypatch.setattr(sys.modules[owner], last, sys.modules[other.replace("__", ".")], raising=False)
    monkeypatch.setitem(sys.modules, name, loaded)
    exec(compile(path.read_text(), path, "exec"), vars(loaded))
    return loaded


class Attends(torch.nn.Module):
    """Log probabilities of tokens, by attention inside each sequence of a pack."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.nn.Parameter(torch.randn(32, 8, generator=generator, dtype=torch.float64))
        self.projection = torch.nn.Parameter(torch.randn(8, 24, generator=generator, dtype=torch.float64))

    def forward(self, tokens, lengths):
        sequence, place = torch.arange(len(lengths)).repeat_interleave(lengths), torch.arange(len(tokens))
        seen = (sequence[:, None] == sequence) & (place[:, None] >= place)
        q, k, v = (self.embedding[tokens] @ self.projection).chunk(3, -1)
        found = (q @ k.T).masked_fill(~seen, -torch.inf).softmax(-1) @ v
        return (found @ self.embedding.T).log_softmax(-1)[place, tokens]


def token_rows(count):
    """Sequences of up to 256 tokens."""
    rng = np.random.default_rng(1)
    return [torch.from_numpy(rng.integers(0, 32, length // 16 + 1)) for length in drawn(count)]


def spread(parts, lengths, on):
    """The heaviest over the mean."""
    work = on.work(np.array(lengths))
    sums = [work[rows].sum() for rows in parts]
    return max(sums) / np.mean(sums)


# verl ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def seqlen_balancing(monkeypatch):
    return released(
        monkeypatch,
        verl.MODULE,
        verl__protocol={"DataProto": object},
        verl__utils__tensordict_utils={"index_select_tensor_dict": lambda batch, rows: rows},
        verl__utils__device={"get_device_name": lambda: "cpu"},
    )


def batch_of(lengths, nested=True):
    if nested:
        return {"input_ids": torch.nested.nested_tensor([torch.zeros(n) for n in lengths], layout=torch.jagged)}
    mask = torch.arange(LONGEST) < torch.tensor(lengths)[:, None]
    return {"input_ids": mask.long(), "attention_mask": mask.long()}


def test_ranks_of_verl_have_equal_work(seqlen_balancing):
    lengths, on = drawn(512), job_on()
    for weights in (
        seqlen_balancing.calculate_workload(torch.tensor(lengths)),
        seqlen_balancing.calculate_workload(torch.tensor(lengths, dtype=torch.float32)),  # as its SFT trainer
        [seqlen_balancing.calculate_workload(length) for length in lengths],
    ):
        theirs = seqlen_balancing.get_seqlen_balanced_partitions(weights, 8, equal_size=True)
        with verl.balanced(on):
            ours = seqlen_balancing.get_seqlen_balanced_partitions(weights, k_partitions=8, equal_size=True)
        assert sorted(chain.from_iterable(ours)) == list(range(512)) and {len(rows) for rows in ours} == {64}
        assert all(rows == sorted(rows) for rows in ours)
        assert spread(ours, lengths, on) < 1.001 < spread(theirs, lengths, on)
    with verl.balanced(on), pytest.raises(AssertionError):
        seqlen_balancing.get_seqlen_balanced_partitions(weights, 5, equal_size=True)


def test_lengths_are_found_by_their_weight():
    lengths = np.append(np.arange(1, 5000), [1 << 17, 1 << 20, (1 << 24) - 1])
    assert (verl._lengths(verl.LINEAR * lengths + lengths**2) == lengths).all()


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_micro_batches_of_verl_are_those_of_the_plan(seqlen_balancing, layout, nested):
    """In its order, within the limit, and in whole groups where stages are virtual."""
    lengths, on = drawn(96), job_on(**layout)
    group = on.parallel.pp if on.parallel.vpp > 1 else None
    batch = batch_of(lengths, nested)
    with verl.balanced(on):
        made, rows = seqlen_balancing.rearrange_micro_batches(batch, 8192, num_batches_divided_by=group)
    assert made == rows and sorted(chain.from_iterable(rows)) == list(range(96))
    assert max(sum(lengths[i] for i in each) for each in rows) <= 8192
    assert len(rows) % (group or 1) == 0
    assert rows == divide(lengths, patch.sized(on, 8192), num_micro_batches=len(rows))[0]
    wanted = divide(lengths, patch.sized(on, 8192))[0]
    assert len(rows) == -(-len(wanted) // (group or 1)) * (group or 1)


def test_verl_takes_more_micro_batches_where_they_do_not_fit(seqlen_balancing):
    lengths = [5000, 5000, 5000, 3100, 3100, 3100, 100]
    with verl.balanced(job_on()):
        _, rows = seqlen_balancing.rearrange_micro_batches(batch_of(lengths), 8192)
        assert len(rows) == 4 and max(sum(lengths[i] for i in each) for each in rows) <= 8192
        _, rows = seqlen_balancing.rearrange_micro_batches(batch_of([5000] * 8), 8192, num_batches_divided_by=4)
        assert len(rows) == 8
        with pytest.raises(ValueError, match="Cannot satisfy max_token_len"):
            seqlen_balancing.rearrange_micro_batches(batch_of([5000] * 7), 8192, num_batches_divided_by=4)
        with pytest.raises(ValueError, match="1 sequences of 9000 to 9000 tokens"):
            seqlen_balancing.rearrange_micro_batches(batch_of([9000]), 8192)


def test_verl_has_no_more_micro_batches_than_sequences(seqlen_balancing):
    """Seven would be fastest, but are no whole groups, and eight need a sequence more."""
    with verl.balanced(job_on(pp=2)):
        for group, count in ((None, 7), (2, 6), (3, 6)):
            _, rows = seqlen_balancing.rearrange_micro_batches(batch_of([3000] * 7), 8192, num_batches_divided_by=group)
            assert len(rows) == count


def test_forced_groups_stay_verls(seqlen_balancing):
    batch = batch_of(drawn(96))
    _, theirs = seqlen_balancing.rearrange_micro_batches(batch, 16384, force_group_size=2)
    with verl.balanced(job_on(pp=2)):
        _, ours = seqlen_balancing.rearrange_micro_batches(batch, 16384, force_group_size=2)
    assert ours == theirs


def test_ranks_of_verl_have_equally_many_micro_batches(seqlen_balancing):
    """Of which one rank alone needs most."""
    every = [[100] * 12, [3000] * 12]

    def run():
        group = torch.distributed.group.WORLD
        with verl.balanced(job_on()):
            batch = batch_of(every[torch.distributed.get_rank()])
            return seqlen_balancing.rearrange_micro_batches(batch, LONGEST, dp_group=group)[1]

    ranks = run_world(run, 2)
    assert [len(rows) for rows in ranks] == [12, 12]
    assert all(sorted(chain.from_iterable(rows)) == list(range(12)) for rows in ranks)


@pytest.fixture
def engine(monkeypatch):
    """What all engines of verl divide a batch with, and put its outputs together."""
    released(monkeypatch, "verl.utils.tensordict_utils")
    others = {"verl__protocol": {"DataProto": object}, "verl__utils__device": {"get_device_name": None}}
    released(monkeypatch, verl.MODULE, **others)
    released(monkeypatch, "verl.utils.dataset.dataset_utils")
    of_devices = dict.fromkeys(("is_npu_available", "manual_seed", "manual_seed_all"))
    others = {"verl__utils__device": of_devices, "verl__utils__py_functional": {"append_to_dict": None}}
    return released(monkeypatch, "verl.workers.engine.utils", **others)


def trained_by(engine, sequences, group):
    """Places by micro-batch; log probabilities in the batch's order, gradients of sequences' weights and the model."""
    weights = torch.ones(len(sequences), dtype=torch.float64, requires_grad=True)
    ids = torch.nested.nested_tensor(sequences, layout=torch.jagged)
    batch = engine.tu.get_tensordict({"input_ids": ids, "weights": weights}, {"max_token_len_per_gpu": 512})
    model, outputs = Attends(), []
    micro_batches, places = engine.prepare_micro_batches(batch, num_batches_divided_by=group)
    for micro_batch in micro_batches:
        ids = micro_batch["input_ids"]
        lengths = ids.offsets().diff()
        found = model(ids.values(), lengths)
        (found * micro_batch["weights"].repeat_interleave(lengths)).sum().backward()
        found = torch.nested.nested_tensor_from_jagged(found.detach(), ids.offsets())
        outputs.append({"model_output": {"log_probs": found}})
    found = engine.postprocess_batch_func(outputs, places, batch)["model_output"]["log_probs"]
    return places, [found.values(), weights.grad, *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize(("layout", "group"), [({}, None), ({"pp": 4}, None), ({"pp": 2, "vpp": 2}, 2)])
def test_an_engine_of_verl_trains_every_sequence_as_without(engine, layout, group):
    sequences = token_rows(64)
    theirs, want = trained_by(engine, sequences, group)
    with verl.balanced(job_on(**layout)):
        ours, got = trained_by(engine, sequences, group)
    assert ours != theirs and want[1].count_nonzero() == 64
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


# All of them: their functions' parameters -------------------------------------------------------------------------


def their_schedule(args, train_parallel_config, total_lengths, *, global_batch_size, rollout_indices):
    return "theirs"


@pytest.mark.parametrize("layout", [*LAYOUTS, {"dp": 8, "cp": 2, "ep": 8}], ids=str)
def test_every_sample_of_slime_runs_in_its_step(layout, monkeypatch):
    loop = module(monkeypatch, "slime.utils.dp_schedule", build_dp_schedule=their_schedule)
    user = module(monkeypatch, "slime.ray.rollout", build_dp_schedule=their_schedule)
    on, others = job_on(**layout), ("cp", "vpp", "group_size")  # which slime knows itself
    limit = LONGEST * on.parallel.cp
    lengths = [limit, *drawn(95)]
    config = {"dp_size": 4, "cp_size": on.parallel.cp, "vpp_size": on.parallel.vpp}
    config["microbatch_group_size_per_vp_stage"] = group = 3
    given = {"global_batch_size": 20, "rollout_indices": [i // 2 for i in range(96)]}
    args = Namespace(max_tokens_per_gpu=LONGEST, use_dynamic_batch_size=True)
    with slime.balanced(job_on(**{name: size for name, size in layout.items() if name not in others})):
        assert loop.build_dp_schedule is user.build_dp_schedule is not their_schedule
        ranks, places, counts, sizes = user.build_dp_schedule(args, config, lengths, **given)
        with pytest.raises(ValueError, match="use_dynamic_batch_size is off"):
            user.build_dp_schedule(Namespace(use_dynamic_batch_size=False), config, lengths, **given)
        with pytest.raises(ValueError, match="48 rollouts are less than a step's 50"):
            user.build_dp_schedule(args, config, lengths, **given | {"global_batch_size": 50})
        with pytest.raises(ValueError, match="step 0 has 2 samples for"):
            user.build_dp_schedule(args, config, lengths, **given | {"global_batch_size": 1})
    assert loop.build_dp_schedule is user.build_dp_schedule is their_schedule
    assert sizes == [20, 20] and sorted(chain.from_iterable(ranks)) == list(range(80))  # it drops what is left over
    planned = [divide(lengths[i : i + 40], patch.sized(on, limit, dp=4, group_size=group)) for i in (0, 40)]
    assert counts == [len(step[0]) for step in planned]
    for rank, mine, first, second in zip(ranks, places, *planned, strict=True):
        assert list(chain.from_iterable(mine)) == list(range(len(rank)))
        assert [[rank[i] for i in rows] for rows in mine] == first + [[40 + i for i in rows] for rows in second]


def their_partitions(seqlen_list, k_partitions, equal_size):
    return "theirs"


def their_micro_batches(
    batch,
    max_token_len,
    dp_group=None,
    num_batches_divided_by=None,
    same_micro_num_in_dp=True,
    min_num_micro_batch=None,
    use_dynamic_bsz_balance=True,
    force_group_size=1,
):
    """As verl's, takes more until they fit; returns others of its arguments, too."""
    lengths, count = batch["lengths"], min_num_micro_batch or 1
    weights = [verl.LINEAR * n + n * n for n in lengths]
    told = (use_dynamic_bsz_balance, same_micro_num_in_dp, force_group_size)
    if force_group_size > 1:
        return count, told
    while (rows := sys.modules[verl.MODULE].get_seqlen_balanced_partitions(weights, count, False)) == "theirs":
        count += num_batches_divided_by or 1
        if count > len(lengths):
            raise ValueError("theirs")
    return rows, told


@pytest.fixture
def verl_alone(monkeypatch):
    functions = {"get_seqlen_balanced_partitions": their_partitions, "rearrange_micro_batches": their_micro_batches}
    return module(monkeypatch, verl.MODULE, **functions, calculate_workload=lambda d: verl.LINEAR * d + d * d)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("layout", [*LAYOUTS, {"dp": 4, "ep": 4}], ids=str)
def test_verl_is_told_the_micro_batches_of_the_plan(layout, nested, verl_alone):
    """Of a rank alone, at least as many as it asks for, and none once they are divided."""
    lengths, on = drawn(96), job_on(**layout)
    batch, planned = batch_of(lengths, nested) | {"lengths": lengths}, patch.sized(on, 8192, dp=1, ep=1)
    wanted = divide(lengths, planned)[0]
    with verl.balanced(on):
        loop = verl_alone.rearrange_micro_batches
        assert loop(batch, 8192, same_micro_num_in_dp=False) == (wanted, (False, False, 1))
        for least, group, count in ((None, 8, len(wanted)), (len(wanted) + 8, None, len(wanted) + 8)):
            rows, _ = loop(batch, 8192, None, group, min_num_micro_batch=least)
            assert rows == divide(lengths, planned, num_micro_batches=count)[0]
        assert loop(batch, 8192, force_group_size=2, min_num_micro_batch=7) == (7, (True, True, 2))
        with pytest.raises(ValueError, match="sequences of [0-9]+ to 4096 tokens"):
            loop(batch, 4000)
        assert verl_alone.get_seqlen_balanced_partitions([verl.LINEAR + 1] * 8, 4, False) == "theirs"


def test_verl_grows_counts_by_groups_until_they_fit(verl_alone):
    """Seven sequences make no more than three groups of two, of which each has one or two."""
    with verl.balanced(job_on(pp=2)):
        for length, limit, group, count in ((3000, 8192, 2, 6), (3000, 8192, 3, 6), (3000, 8192, None, 7)):
            batch = batch_of([length] * 7) | {"lengths": [length] * 7}
            assert len(verl_alone.rearrange_micro_batches(batch, limit, None, group)[0]) == count
    with verl.balanced(job_on()):
        lengths = [5000, 5000, 5000, 3100, 3100, 3100, 100]
        rows, _ = verl_alone.rearrange_micro_batches(batch_of(lengths) | {"lengths": lengths}, 8192)
        assert len(rows) == 4 and max(sum(lengths[i] for i in each) for each in rows) <= 8192
        with pytest.raises(ValueError, match="theirs"):
            verl_alone.rearrange_micro_batches(batch_of([5000] * 7) | {"lengths": [5000] * 7}, 8192, None, 4)
        assert verl_alone.get_seqlen_balanced_partitions([verl.LINEAR + 1] * 8, 4, False) == "theirs"


def test_verl_is_told_equal_shares_where_ranks_have_equally_many(verl_alone):
    lengths, on = np.array(drawn(96)), job_on(pp=4)
    weights = [verl_alone.calculate_workload(length) for length in lengths.tolist()]
    with verl.balanced(on):
        shares = verl_alone.get_seqlen_balanced_partitions(weights, 8, True)
        assert shares == [sorted(rows.tolist()) for rows in equal_shares(on.work(lengths), 8)]
        assert shares != [rows.tolist() for rows in equal_shares(on.work(lengths), 8)]
        assert verl_alone.get_seqlen_balanced_partitions(weights, 5, True) == "theirs"
        assert verl_alone.get_seqlen_balanced_partitions(weights, 8, False) == "theirs"


def their_groups(sequences, packing_length, is_finished=True, strategy="binpack"):
    return [sequences, packing_length, is_finished], strategy


@pytest.mark.parametrize("layout", [*LAYOUTS, {"dp": 4, "ep": 4}], ids=str)
def test_ms_swift_is_told_packs_of_the_plan_the_fullest_first(layout, monkeypatch):
    loop = module(monkeypatch, "swift.dataset.packing", calculate_matched_group=their_groups)
    items, on = [(10 + i, length) for i, length in enumerate(drawn(96))], job_on(**layout)
    one = {"dp": 1, "pp": 1, "vpp": 1, "ep": 1, "group_size": None}
    found = divide([length for _, length in items], patch.sized(on, 8192, **one))[0]
    packs = sorted(([items[i] for i in rows] for rows in found), key=lambda pack: -sum(n for _, n in pack))
    assert len(packs) > 1 and packs != [[items[i] for i in rows] for rows in found]
    with ms_swift.balanced(on):
        assert loop.calculate_matched_group(items, 8192) == (packs, [])
        assert loop.calculate_matched_group(items, 8192, False) == (packs[:-1], packs[-1])
        assert loop.calculate_matched_group([], 8192) == ([[], 8192, True], "binpack")
        assert loop.calculate_matched_group(items, 8192, False, "sequential") == ([items, 8192, False], "sequential")


class SequencePacker:
    def __init__(self, bin_capacity, collect_metrics=False, min_bin_count=None, bin_count_multiple=None):
        self.bin_capacity, self.bin_count_multiple = bin_capacity, bin_count_multiple

    def pack(self, sequence_lengths):
        return self._pack_implementation(sequence_lengths)


def their_packer(algorithm, bin_capacity, collect_metrics=False, min_bin_count=None, bin_count_multiple=None):
    return "theirs"


@pytest.mark.parametrize("multiple", [4, None])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bins_of_nemo_rl_are_dealt_to_the_ranks_of_the_plan(layout, multiple, monkeypatch):
    module(monkeypatch, nemo_rl.MODULE, SequencePacker=SequencePacker, get_packer=their_packer)
    user = module(monkeypatch, "nemo_rl.distributed.batched_data_dict", get_packer=their_packer)
    on, lengths = job_on(**layout), drawn(96)
    with nemo_rl.balanced(on):
        packer = user.get_packer("first_fit_shuffle", 8192, min_bin_count=4, bin_count_multiple=multiple)
        bins = packer.pack(lengths)
    assert user.get_packer is their_packer
    dp = multiple or 1
    planned = patch.sized(on, 8192, dp=dp)
    for rank in range(dp):
        assert bins[rank::dp] == [
            m.documents["document"].tolist() for m in balance(lengths, planned, rank).micro_batches
        ]


# ms-swift ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def packing(monkeypatch):
    names = "get_external_files get_logger import_external_file is_dist is_master split_list"
    utils = {name: lambda *args: None for name in names.split()}
    return released(
        monkeypatch, "swift.dataset.packing", swift__template={"MaxLengthError": ValueError}, swift__utils=utils
    )


def test_the_packs_of_ms_swift_train_every_sequence_as_without(packing, monkeypatch):
    """Its own dataset, made by its own worker."""
    monkeypatch.setattr(packing, "is_master", lambda: True)
    monkeypatch.setattr(packing, "split_list", lambda lengths, parts: [lengths])
    sequences = token_rows(64)

    class Rows:
        def __getitem__(self, key):
            return [len(row) for row in sequences] if key == "lengths" else (key, sequences[key])

        def __len__(self):
            return len(sequences)

    def train():
        weights, model = torch.ones(64, dtype=torch.float64, requires_grad=True), Attends()
        packs = packing.PackingDataset(Namespace(max_length=512), Rows(), multiprocessing_context="fork")
        for i in range(len(packs)):
            places, rows = zip(*packs[i], strict=True)
            lengths = torch.tensor([len(row) for row in rows])
            (model(torch.cat(rows), lengths) * weights[list(places)].repeat_interleave(lengths)).sum().backward()
        return packs.packed_idx, [weights.grad, *(weight.grad for weight in model.parameters())]

    theirs, want = train()
    with ms_swift.balanced(job_on(pp=2)):
        ours, got = train()
    assert ours != theirs and want[0].count_nonzero() == 64
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_packs_of_ms_swift_have_equal_work(packing):
    lengths = drawn(400)
    items, on = list(enumerate(lengths)), job_on(pp=4, dp=2, cp=2)
    theirs, _ = packing.calculate_matched_group(items, 8192)
    with ms_swift.balanced(on):
        ours, none = packing.calculate_matched_group(items, 8192)
        most, rest = packing.calculate_matched_group(items, 8192, is_finished=False)
        empty = packing.calculate_matched_group([], 8192)
        in_order = packing.calculate_matched_group(items, 8192, strategy="sequential")
    assert empty == ([], []) and none == []
    assert in_order == packing.calculate_matched_group(items, 8192, strategy="sequential")
    assert sorted(chain.from_iterable(ours)) == sorted(chain(rest, *most)) == items
    assert min(most, key=lambda pack: sum(length for _, length in pack)) and rest not in most
    for packs in (ours, [*most, rest]):
        assert max(sum(length for _, length in pack) for pack in packs) <= 8192 and len(packs) <= len(theirs)
    assert sum(length for _, length in rest) <= min(sum(length for _, length in pack) for pack in most)
    spreads = [spread([[i for i, _ in pack] for pack in packs], lengths, on) for packs in (ours, theirs)]
    assert spreads[0] < 1.2 < spreads[1]


def test_the_dataset_of_ms_swift_takes_them(packing):
    """Its own loop over parts of a thousand sequences."""
    lengths, sent = drawn(2500), []
    with ms_swift.balanced(job_on()):
        packing.PackingDataset.create_packed_idx(0, 10, lengths, Namespace(put=sent.append), 8192, "binpack")
    packs = [pack for _, packs, _ in sent for pack in packs]
    assert sorted(chain.from_iterable(packs)) == [(10 + i, length) for i, length in enumerate(lengths)]
    assert sum(count for _, _, count in sent) == 2500 - 1


# All of them ---------------------------------------------------------------------------------------------------------


def test_a_function_with_other_parameters_is_refused(monkeypatch):
    loop = module(monkeypatch, "slime.utils.dp_schedule", build_dp_schedule=lambda args, lengths: None)
    with pytest.raises(
        RuntimeError, match=r"is not the function that megatron_wlb expects \(args lengths, not args train_"
    ):
        slime.balanced(job_on())
    del loop.build_dp_schedule
    with pytest.raises(RuntimeError, match="is missing"):
        slime.balanced(job_on())


def test_verl_is_left_whole_where_one_function_is_another(monkeypatch):
    def theirs(seqlen_list, k_partitions, equal_size):
        raise AssertionError

    functions = {"calculate_workload": lambda d: 24576 * d + d * d, "rearrange_micro_batches": lambda batch: None}
    loop = module(monkeypatch, verl.MODULE, get_seqlen_balanced_partitions=theirs, **functions)
    with pytest.raises(RuntimeError, match="rearrange_micro_batches is not the function"):
        verl.balanced(job_on())
    assert loop.get_seqlen_balanced_partitions is theirs
    loop.calculate_workload = lambda d: d * d
    with pytest.raises(RuntimeError, match="has another formula"):
        verl.balanced(job_on())


def test_modules_that_imported_it_while_it_was_replaced_get_it_back(monkeypatch):
    loop = module(monkeypatch, "slime.utils.dp_schedule", build_dp_schedule=their_schedule)
    other = module(monkeypatch, "others", build_dp_schedule=their_packer)
    undo = slime.balanced(job_on())
    assert inspect.signature(loop.build_dp_schedule) == inspect.signature(their_schedule)
    late = module(monkeypatch, "slime.late", build_dp_schedule=loop.build_dp_schedule)
    undo.close()
    assert late.build_dp_schedule is loop.build_dp_schedule is their_schedule
    assert other.build_dp_schedule is their_packer


def test_two_hundred_thousand_sequences_are_divided():
    lengths = drawn(200_000)
    for layout in ({"dp": 16}, {"dp": 2, "pp": 4, "vpp": 2}):
        ranks = divide(lengths, patch.sized(job_on(**layout), 1 << 15))
        assert len(ranks) == layout["dp"] and len({len(rank) for rank in ranks}) == 1
        assert sorted(chain.from_iterable(chain.from_iterable(ranks))) == list(range(200_000))

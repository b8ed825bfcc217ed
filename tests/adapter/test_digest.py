"""`--wlb-digest`: equal training has equal digests, and whatever else the model or the loss is given has another."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_wlb.adapter import data, digest, loss, training
from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.plan.mock import FINALIZER, GOLDEN
from megatron_wlb.plan.samples import Windows
from megatron_wlb.runtime.backends import get_backend
from megatron_wlb.runtime.metadata import ShardMetadata
from megatron_wlb.sharding.select import divide
from tests.adapter.chats import conversation, write_chats, write_tokenizer
from tests.adapter.test_conversations import PACKED, WITHOUT, sft_flags
from tests.adapter.training import CP2, PP2, VPP2, each_version, full, train
from tests.upstream.test_same_step import EOD_MASK, GENTLE, digests

LEARNED = "--position-embedding-type learned_absolute"
ONE_STEP = ["--train-iters", "1"]
DIGEST = [*GENTLE.split(), "--wlb-digest"]


def digested(size, dataset, folder, *flags, wlb=True, without=""):
    """The digests of a run's steps."""
    prints = folder / f"prints{len([*folder.iterdir()])}"
    train(size, dataset, *DIGEST, *flags, wlb=wlb, without=without, prints=prints)
    return [digest for _, digest in digests(prints)]


@pytest.mark.parametrize(
    ("size", "layout", "flags", "without"),
    [
        each_version(4, f"{CP2} {VPP2}", "", ""),
        (2, VPP2, EOD_MASK, ""),
        full(4, f"{CP2} {VPP2}", f"{EOD_MASK} --calculate-per-token-loss", ""),
        (2, VPP2, f"{EOD_MASK} --micro-batch-size 2 {LEARNED}", "--reset-position-ids"),
        (2, CP2, LEARNED, ""),
        (2, CP2, "--allow-ambiguous-pad-tokens", ""),
        (2, CP2, f"--allow-ambiguous-pad-tokens {EOD_MASK}", ""),
    ],
)
def test_both_sides_print_the_same_in_any_layout(size, layout, flags, without, dataset, tmp_path):
    """`test_chaos` has that steps differ in it. A pad token may be EOD."""
    common = ["--num-layers", "4", *flags.split()]
    theirs = digested(2, dataset, tmp_path, *common, *PP2.split(), wlb=False, without=without)
    ours = digested(size, dataset, tmp_path, *common, *layout.split(), without=without)
    assert theirs == ours and len(set(ours)) == 2


def test_weights_count_and_not_how_they_are_written(dataset, tmp_path):
    """Where all windows are full, targets weigh the same in micro-batches of any size, and by tokens."""
    sizes = ["--micro-batch-size 1", "--micro-batch-size 2", "--calculate-per-token-loss"]
    said = [digested(1, dataset, tmp_path, *each.split(), wlb=False) for each in sizes]
    assert said[0] == digested(1, dataset, tmp_path, *sizes[1].split())
    masked = [digested(1, dataset, tmp_path, EOD_MASK, *each.split(), wlb=False) for each in sizes]
    assert said[0] == said[1] == said[2]
    assert len({tuple(each) for each in (said[0], *masked)}) == 4


def test_without_a_mask_digests_differ(dataset, tmp_path):
    without = "--reset-attention-mask --reset-position-ids"
    theirs, ours = (digested(1, dataset, tmp_path, wlb=wlb, without=without) for wlb in (False, True))
    assert not set(theirs) & set(ours)


@pytest.mark.parametrize("prompt", ["nemotron-nano-v2", "identity"])
def test_conversations(prompt, tmp_path):
    """Rows of Megatron's are padded, and those of the plugin packed."""
    rows = [[m for answers in row for m in conversation(answers, len(answers) + i)] for i, row in enumerate(PACKED)]
    flags = sft_flags(write_tokenizer(tmp_path / "tokenizer"), prompt)
    path = write_chats(tmp_path / "packed.jsonl", rows)
    theirs = digested(1, path, tmp_path, *flags, wlb=False, without=WITHOUT)
    assert theirs == digested(2, path, tmp_path, *flags, *PP2.split(), without=WITHOUT)


VIEWS = {"slice", "select", "unsqueeze", "squeeze", "view", "expand", "as_strided", "split_with_sizes", "detach"}


class Operations(TorchDispatchMode):
    """Counts operations that are no views."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation.name().partition("::")[2].partition(".")[0] not in VIEWS
        return operation(*args, **(kwargs or {}))


def test_windows_of_some_layers_leave_keys_to_others(monkeypatch):
    """Only where all layers have one, a token sees less of its document, in a run without `--wlb`."""
    args = Namespace(position_embedding_type="rope", sft=False, num_layers=2)
    monkeypatch.setattr(digest.mpu, "get_context_parallel_world_size", lambda: 1)
    monkeypatch.setattr(digest, "get_args", lambda: args)
    tokens = torch.arange(16)[None]

    def given(keys):
        monkeypatch.setattr(digest, "keys_before", lambda _: keys)
        upstream = digest.Upstream()
        upstream._add({"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(1, 16)})
        return int(upstream._parts[0])

    assert given([None, 4]) == given([None, None]) == given([99, 99]) != given([4, 4])


LENGTHS = [30, 20, 52]


@pytest.fixture
def alone(monkeypatch):
    """A micro-batch of LENGTHS on one rank, which is first and last stage: arguments, metadata by window, and batch."""
    backend, args = get_backend("cpu", "cpu", (8, 8)), Namespace(position_embedding_type="rope", wlb_sft=False)
    args.sft, args.num_layers = False, 1
    for name in ("is_pipeline_first_stage", "is_pipeline_last_stage", "get_context_parallel_world_size"):
        monkeypatch.setattr(digest.mpu, name, lambda **_: 1)
    for name in ("get_tensor_model_parallel_rank", "get_context_parallel_rank", "get_context_parallel_group"):
        monkeypatch.setattr(digest.mpu, name, lambda: 0)
    for name, value in {"get_args": args, "get_attr_wrapped_model": None, "keys_before": [None]}.items():
        monkeypatch.setattr(digest, name, lambda *_, value=value: value)
    monkeypatch.setattr(digest, "get_tokenizer", lambda: Namespace(pad=3))
    kernel = KernelModel(tile_rows=1, launch=0, tile=1, query_tile=0)

    def given(window=None):
        plan = divide(np.array(LENGTHS), 1, "per-document", kernel)
        metadata = ShardMetadata.build(plan, 0, backend.encode, [window], False)
        tokens, labels = torch.randint(9, (2, 1, 102), generator=torch.Generator().manual_seed(0))
        rows = {"tokens": tokens, "labels": labels, "positions": torch.arange(102) + 7, "metadata": metadata}
        return Namespace(**rows, padding=torch.arange(102) >= 95)

    return Namespace(args=args, planned=digest.Planned(args, backend, torch.device("cpu")), given=given)


def signed(x):
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def mixed(x):
    x = signed(x + GOLDEN)
    for shift, factor in FINALIZER:
        x = signed((x ^ x >> shift) * factor)
    return x ^ x >> 31


def hashed(tokens, positions, window):
    """Hashes of rows, one after the other: of a token, its position, and the sum of those that it sees."""
    for rows in np.split(np.arange(sum(LENGTHS)), np.cumsum(LENGTHS)[:-1]):
        keys = [mixed(tokens[i] << 32 ^ positions[i]) for i in rows]
        for i, key in enumerate(keys):
            yield mixed(key ^ signed(sum(keys[0 if window is None else max(0, i - window) : i + 1])))


@pytest.mark.parametrize("order", [None, lambda rows: torch.arange(rows).flip(0)])
@pytest.mark.parametrize(
    ("window", "learned", "sft"), [(None, False, False), (4, False, True), (0, False, False), (None, True, False)]
)
def test_a_digest_by_hand(window, learned, sft, order, alone):
    """Of the rows in any order; padding counts for nobody, and pad tokens not where conversations have them."""
    batch, turned = alone.given(window), slice(None) if order is None else order(102)
    alone.args.position_embedding_type, alone.args.wlb_sft = "learned_absolute" if learned else "rope", sft
    positions = batch.positions if learned else batch.metadata.positions
    hashes = [*hashed(batch.tokens[0].tolist(), positions.tolist(), window)]
    spare = batch.padding | (batch.tokens[0] == 3) & sft
    weights = torch.rand(102, generator=torch.Generator().manual_seed(1)).masked_fill(batch.padding, 0)
    batch.tokens, batch.labels = batch.tokens[:, turned], batch.labels[:, turned]
    labels, batch.positions, batch.padding = batch.labels[0], batch.positions[turned], batch.padding[turned]
    trained = alone.planned.given(batch, None, order)
    assert int(alone.planned.part) == signed(
        sum(h for h, skipped in zip(hashes, spare.tolist(), strict=True) if not skipped)
    )
    before, factors = int(alone.planned.part), digest._factors(weights).tolist()
    assert [factor != 0 for factor in factors] == (weights != 0).tolist() and len({*factors}) == 96
    trained(weights[turned])
    labels = labels.flip(0) if order is not None else labels
    targets = sum(mixed(h ^ label) * factor for h, label, factor in zip(hashes, labels.tolist(), factors, strict=True))
    assert int(alone.planned.part) == signed(before + targets)


@pytest.mark.parametrize(("first", "last", "rank"), [(1, 0, 0), (0, 1, 0), (0, 0, 0), (1, 1, 1)])
def test_one_rank_of_a_stage_counts_what_the_stage_has(first, last, rank, alone, monkeypatch):
    for name, value in (("first", first), ("last", last)):
        monkeypatch.setattr(digest.mpu, f"is_pipeline_{name}_stage", lambda value=value, **_: value)
    monkeypatch.setattr(digest.mpu, "get_tensor_model_parallel_rank", lambda: rank)
    trained = alone.planned.given(alone.given(), None, None)
    assert (trained is not None, bool(alone.planned.part)) == (last and not rank, first and not rank)


@pytest.mark.parametrize(("sft", "targets"), [(False, [3, 2]), (True, [1, 4])])
def test_means_are_over_the_targets_of_context_parallel_ranks(sft, targets, alone, monkeypatch):
    """Of upstream's, each of which has the same two pieces of the window, or of every conversation."""
    monkeypatch.setattr(digest.mpu, "get_context_parallel_world_size", lambda: 2)
    alone.args.sft, upstream = sft, digest.Upstream()
    tokens, mask = torch.arange(8)[None], torch.tensor([[1.0, 1, 1, 0, 0, 1, 1, 0]])
    bounds = {"cu_seqlens": torch.tensor([[0, 4, 8]], dtype=torch.int32)} if sft else {}
    upstream._add({"tokens": tokens, "labels": tokens, "loss_mask": mask} | bounds)
    assert upstream._means[0][1].tolist() == targets


@pytest.mark.parametrize(
    ("changes", "seen"), [({}, 1), ({"last": 0}, 0), ({"rank": 1}, 0), ({"training": False}, 0), ({"data": None}, 0)]
)
def test_data_are_seen_once_where_they_are_trained(changes, seen, alone, monkeypatch):
    """All context-parallel ranks read them, and of tensor-parallel ranks one."""
    given = {
        "last": 1,
        "rank": 0,
        "training": True,
        "data": [{"tokens": torch.zeros(1, 8, dtype=torch.long)}],
    } | changes
    monkeypatch.setattr(digest.mpu, "is_pipeline_last_stage", lambda **_: given["last"])
    monkeypatch.setattr(digest.mpu, "get_context_parallel_rank", lambda: given["rank"])
    monkeypatch.setattr(digest, "masks_documents", lambda args: False)
    upstream, model, added = digest.Upstream(), Namespace(training=given["training"]), []
    upstream._add = added.append
    read = upstream.watching(lambda data, of: None if data is None else next(data))
    assert read(None if given["data"] is None else iter(given["data"]), model) is (given["data"] and given["data"][0])
    assert len(added) == seen


def test_it_takes_as_many_operations_as_the_page_says(alone):
    batch, weights, upstream = alone.given(), torch.ones(102), digest.Upstream()
    with Operations() as ours:
        alone.planned.given(batch, None, None)(weights)
    mask = torch.ones(1, 1, 102, 102, dtype=torch.bool).triu(1)
    with Operations() as theirs:
        upstream._add(vars(batch) | {"loss_mask": weights[None], "attention_mask": mask})
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    assert f"{ours.count} operations of at most 24 bytes per token in a micro-batch, {theirs.count} without" in page


# Faults --------------------------------------------------------------------------------------------------------------


def fed(change):
    """A forward step with batches that are changed behind the loader."""
    step = training.Training.forward_step

    def forward_step(self, batches, model):
        def changed():
            for batch in batches:
                change(batch)
                yield batch

        return step(self, changed(), model)

    return training.Training, "forward_step", forward_step


def shift_positions(batch):
    batch.positions[-3:] -= (batch.positions[-3:] > 0).long()


def shift_turns(batch):
    batch.metadata.integers[: batch.metadata.sizes[0]] += batch.metadata.cp_rank


def replace_tokens(batch):
    batch.tokens[0, 3:6] = 1


def shift_targets(batch):
    batch.labels[0, :7] = batch.labels[0, :7].roll(1)


def drop_targets(batch):
    batch.loss_mask[0, :10] = 0


def weigh(counts, *args, **kwargs):
    found = WEIGHTS(counts, *args, **kwargs)
    found[0, 0] *= 1.5
    return found


def lose(args, loss_mask, *rest, **kwargs):
    """A loss that leaves out short micro-batches."""
    return TOKEN_LOSS(args, loss_mask * (loss_mask.numel() > 128), *rest, **kwargs)


def see_before(cls, plan, cp_rank, encode, *args, **kwargs):
    """A mask whose boundaries are one key off."""

    def shifted(key_begins, segments):
        begins = key_begins.copy()
        begins[1:-1] -= 1
        return encode(begins, segments)

    return BUILD(cls, plan, cp_rank, shifted, *args, **kwargs)


def send_others(cls, plan, *args, **kwargs):
    """An exchange of wrong rows."""
    metadata = BUILD(cls, plan, *args, **kwargs)
    for part in metadata.rounds:
        part.sent_rows[:2] = part.sent_rows[2:4].clone() if len(part.sent_rows) > 3 else part.sent_rows[:2]
    return metadata


def twice(first, batch, others, count):
    for i, each in enumerate(OF_STEP(first, batch, others, count)):
        yield batch if i == 1 and batch.metadata.num_rows == each.metadata.num_rows else each


def sample_twice(self, samples):
    samples = np.array(samples)
    samples[2:3] = samples[1:2]
    return PIECES(self, samples)


def shift_read(self, document, start, stop):
    tokens, labels, trained = ROWS(self, document, start, stop)
    return tokens, np.roll(labels, 1, axis=1), trained


WEIGHTS, TOKEN_LOSS, OF_STEP = loss.weights, training.token_loss, training._of_step
BUILD, PIECES, ROWS = ShardMetadata.build.__func__, Windows.documents, data.SampleReader.rows
FAULTS = [
    ("", lambda: fed(shift_turns)),
    (LEARNED, lambda: fed(shift_positions)),
    ("", lambda: fed(replace_tokens)),
    ("", lambda: fed(shift_targets)),
    ("", lambda: fed(drop_targets)),
    ("", lambda: (loss, "weights", weigh)),
    ("", lambda: (training, "token_loss", lose)),
    ("", lambda: (ShardMetadata, "build", classmethod(see_before))),
    ("", lambda: (ShardMetadata, "build", classmethod(send_others))),
    ("--wlb-packing megatron", lambda: (training, "_of_step", twice)),
    ("", lambda: (Windows, "documents", sample_twice)),
    ("", lambda: (data.SampleReader, "rows", shift_read)),
]


@pytest.fixture(scope="module")
def right(dataset, tmp_path_factory):
    """The digests of a run by its flags."""
    found = {}

    def run(flags):
        if flags not in found:
            found[flags] = digested(
                2, dataset, tmp_path_factory.mktemp("right"), EOD_MASK, *ONE_STEP, *CP2.split(), *flags.split()
            )
        return found[flags]

    return run


@pytest.mark.parametrize(("flags", "fault"), FAULTS)
def test_other_training_has_other_digests(flags, fault, dataset, tmp_path, right, monkeypatch):
    """Positions, inputs, targets, weights, boundaries of the mask and keys of other ranks, wherever they go wrong."""
    expected = right(flags)
    monkeypatch.setattr(*fault())
    found = digested(2, dataset, tmp_path, EOD_MASK, *ONE_STEP, *CP2.split(), *flags.split())
    assert len(found) == 1 and found != expected

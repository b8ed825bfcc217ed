"""What the plugin makes of Megatron-Bridge's configs, rows and steps, without Bridge: `test_bridge` trains with it."""

import contextlib
from dataclasses import field, make_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_wlb.plan.samples import Samples
from megatron_wlb.plan.step import digest_of
from tests.adapter.specs import DOUBTFUL
from tests.adapter.stand_ins import standing_in

with standing_in("megatron.bridge"):
    from megatron_wlb import bridge
    from megatron_wlb.bridge import rows

# Rows ----------------------------------------------------------------------------------------------------------------

MASKS = ([0, 1, 1, 0, 0, 0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1])
BOUNDS = ([0, 4, 6, 9], None, [0, 1, 3])


class Conversations:
    """Rows of 10 i + 0, 1, ..., whose labels are a hundred more."""

    file_path = "file"

    def __len__(self):
        return len(MASKS)

    def __getitem__(self, number):
        return number

    def collate_fn(self, numbers):
        (number,) = numbers
        tokens = torch.arange(len(MASKS[number])) + 10 * number
        batch = {
            "tokens": tokens[None],
            "labels": tokens[None] + 100,
            "loss_mask": torch.tensor(MASKS[number])[None].float(),
        }
        if BOUNDS[number] is None:
            return batch
        wrong = {"cu_seqlens_q": torch.tensor([[0, 2]])} if number == 0 else {}
        name = "cu_seqlens_q_padded" if number == 0 else "cu_seqlens_q"  # what is padded counts
        return batch | wrong | {name: torch.tensor([BOUNDS[number]])}


def test_conversations_end_with_their_last_target():
    """Without one they are left out, as is the row that fills a batch; a document is a piece of its row."""
    found = rows._Rows(Conversations(), 16, kept=2)
    pieces = found.documents(np.array([2, 0, -1, 1, 0]))
    names = ["index", "document", "offset", "length", "dataset", "arrival"]
    assert [[int(piece[name]) for name in names] for piece in pieces] == [
        *([0, 2, 0, 1, 0, 0], [1, 2, 1, 2, 0, 0], [16, 0, 0, 3, 0, 0], [22, 0, 6, 1, 0, 0]),
        *([64, 0, 0, 3, 0, 0], [70, 0, 6, 1, 0, 0]),
    ]
    tokens, labels, trained = found.read(pieces[1], 1, 5)
    assert (tokens.tolist(), labels.tolist(), trained.tolist()) == ([22], [122], [True])
    tokens, labels, trained = found.read(pieces[2], 1, 2)
    assert (tokens.tolist(), labels.tolist(), trained.tolist()) == ([1, 2], [101, 102], [True, True])
    assert tokens.dtype == labels.dtype == np.int64 and len(found) == 3 and found.masks


class Sampler:
    """Rows of an epoch in falling order; the last batch is filled by -1."""

    def __init__(self, **given):
        self.given = given

    def __iter__(self):
        total, size = self.given["total_samples"], self.given["global_batch_size"]
        count = total // size * size if self.given["drop_last"] else -(-total // size) * size
        first = 100 * (self.given["consumed_samples"] // count)
        order = [first + i if i < total else -1 for i in range(count)]
        return iter(order[i : i + 4] for i in range(0, count, 4))


@pytest.mark.parametrize("drops", [True, False])
def test_ranks_take_the_rows_of_a_batch_in_turn(drops, monkeypatch):
    """Of 18 rows in batches of 8, four micro-batches of two on two ranks; an epoch begins with a batch."""
    made = []
    monkeypatch.setattr(
        rows, "MegatronPretrainingBatchSampler", lambda **given: made.append(Sampler(**given)) or made[-1]
    )
    order = rows._Batches(rows=18, size=8, micro_batch_size=2, ranks=2, seed=5, drops=drops)
    batch = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    last = [] if drops else [16, -1, -1, -1, 17, -1, -1, -1]
    epoch = [*batch, *(batch + 8), *last]
    expected = [*epoch, *(row + 100 * (row >= 0) for row in epoch)]
    assert order(np.arange(2 * len(epoch))).tolist() == expected
    assert order(np.array([len(epoch), 1])).tolist() == [100, 2] and len(made) == 2
    fixed = {"total_samples": 18, "micro_batch_size": 1, "global_batch_size": 8, "data_parallel_rank": 0}
    fixed |= {"data_parallel_size": 1, "drop_last": drops, "pad_samples_to_global_batch_size": not drops, "seed": 5}
    assert made[1].given == fixed | {"consumed_samples": len(epoch)}


@pytest.mark.parametrize(
    ("split", "drop_last", "how"),
    [
        ("train", True, {"size": 2, "micro_batch_size": 1, "drops": True}),
        ("train", False, {"size": 2, "micro_batch_size": 1, "drops": False}),
        ("valid", False, {"size": 3, "micro_batch_size": 3, "drops": True}),
    ],
)
def test_a_split_has_the_batches_of_bridge(split, drop_last, how, monkeypatch):
    """It evaluates whole batches alone."""
    monkeypatch.setattr(rows, "_Batches", lambda **given: given)
    args = SimpleNamespace(global_batch_size=2, eval_global_batch_size=3, drop_last=drop_last, data_parallel_size=7)
    vars(args).update(wlb_windows_per_micro_batch=1, wlb_eval_windows_per_micro_batch=3, seed=5, seq_length=16)
    found = rows.split_data(Conversations(), args, split, 40)
    (of_rows,) = found.datasets
    order = how | {"rows": 3, "ranks": 7, "seed": 5}
    assert found.samples == Samples(datasets=(of_rows,), context_length=16, order=order)
    assert (found.first_sample, found.steps, found.remark) == (40, None, "")
    assert found.identity == digest_of("file", 3, 5, how["drops"])
    args.global_batch_size = args.eval_global_batch_size = 4
    if how["drops"]:
        with pytest.raises(
            ValueError, match=rf"the {split} split has 3 rows, and {split}.*global_batch_size is 4; give"
        ):
            rows.split_data(Conversations(), args, split, 40)
    else:
        rows.split_data(Conversations(), args, split, 40)


SFT = {"dataloader_type": "batch", "offline_packing_specs": None, "dataset_kwargs": None, "seq_length": 16, "seed": 5}
SFT |= {"num_epochs": None, "wlb_sft_skip": None, "wlb_digest": False}


@pytest.mark.parametrize(
    ("changes", "other"),
    [
        ({}, None),
        ({"offline_packing_specs": SimpleNamespace(packed_sequence_size=16)}, None),
        ({"dataset_kwargs": {"return_cu_seqlen": True}}, None),
        ({"dataloader_type": "single"}, "dataset.dataloader_type single"),
        ({"offline_packing_specs": SimpleNamespace(packed_sequence_size=17)}, "packed_sequence_size"),
        ({"dataset_kwargs": {"return_cu_seqlen": False}}, "return_cu_seqlen"),
        ({"num_epochs": 1}, "num_epochs"),
        ({"wlb_sft_skip": ("long",)}, "sft_skip"),
        ({"wlb_digest": True}, "digest"),
    ],
)
def test_what_differs_of_fine_tuning_is_told(changes, other):
    given = SFT | changes
    found = rows.others(SimpleNamespace(**given), SimpleNamespace(num_epochs=given["num_epochs"]), given)
    told = [name for name, is_given in found.items() if is_given]
    assert len(told) == (other is not None) and all(other in name for name in told)


# Configs -------------------------------------------------------------------------------------------------------------


class Provider(bridge.GPTModelProvider):
    """A model, which is its own transformer config."""


bridge.GPTModelProvider.provide = object()


class FillsIn(bridge.GPTFIMDatasetConfig, bridge.GPTDatasetConfig):
    """Of documents that are filled in, for which Bridge's class is one of others, too."""


def part(kind=object, **values):
    """A config of these fields."""
    return make_dataclass(
        "Part", [(name, Any, field(default=value)) for name, value in values.items()], bases=(kind,)
    )()


BLENDS = {"blend": (["a", "b"], [0.25, 0.75]), "blend_per_split": None, "dataloader_type": "cyclic", "seq_length": 16}
BLENDS |= {"inter_document_masking": True, "full_validation": False, "multiple_validation_sets": False, "shared": 1}
MODEL = dict.fromkeys(set(bridge._ARGUMENTS) - {"average_in_collective", "grad_reduce_in_fp32"}) | {"random_seed": 3}
MODEL |= dict.fromkeys("mtp_num_layers restore_modelopt_state experimental_attention_variant".split())
MODEL |= {"share_embeddings_and_output_weights": True, "pipeline_model_parallel_layout": None, "shared": 3}
PARTS = {
    **{name: {} for name in ("logger", "rerun_state_machine", "optimizer", "validation")},
    "ddp": {"grad_reduce_in_fp32": False, "average_in_collective": True},
    "dist": {"use_decentralized_pg": 0, "eval_context_parallel_size": 0, "use_torch_fsdp2": 0},
    "checkpoint": {"non_persistent_save_interval": 0},
    "train": {"iterations_to_skip": 0, "step_batch_size_schedule": 0, "num_epochs": None, "shared": 2},
}


def config(changes=(), dataset=None, kind=Provider):
    """A ConfigContainer with `changes` by their paths."""
    parts = {name: part(**values) for name, values in PARTS.items()} | {"model": part(kind, **MODEL)}
    parts |= {
        "dataset": dataset or part(bridge.GPTDatasetConfig, **BLENDS),
        "comm_overlap": part(tp_comm_overlap=False),
    }
    made = SimpleNamespace(**parts, peft=None, inprocess_restart=None, data_parallel_size=2)
    for path, value in dict(changes).items():
        owner, _, name = path.rpartition(".")
        setattr(getattr(made, owner) if owner else made, name, value)
    return made


def test_configs_are_megatrons_arguments(monkeypatch):
    """By its names; of a name that several have, the model's counts, and what overlaps where it says something."""
    monkeypatch.setattr(bridge, "get_rank_safe", lambda: 4)
    monkeypatch.setattr(bridge, "get_world_size_safe", lambda: 8)
    chunks = [[["embedding"], ["decoder", "decoder"]], [["decoder"], ["mtp", "loss"]]]
    layout = [[[SimpleNamespace(name=name) for name in chunk] for chunk in stage] for stage in chunks]
    given = config({"model.pipeline_model_parallel_layout": SimpleNamespace(layout=layout), "peft": bridge.LoRA()})
    found = bridge.arguments(given, SimpleNamespace(shared=4, tp_comm_overlap=None))
    expected = {"seed": 3, "shared": 4, "skip_train": None, "phase_transition_iterations": None, "rank": 4}
    expected |= {"accumulate_allreduce_grads_in_fp32": False, "grad_reduce_in_bf16": True, "data_parallel_size": 2}
    expected |= {"ddp_average_in_collective": True, "untie_embeddings_and_output_weights": False, "world_size": 8}
    expected |= {"dataloader_type": "external", "wlb_dataloader_type": "cyclic", "wlb_frozen": True, "spec": None}
    expected |= {"pipeline_model_parallel_layout": "E|t|tt|mL", "group_query_attention": True, "mock_data": False}
    expected |= {"data_path": ["0.25", "a", "0.75", "b"], "train_data_path": None, "padded_vocab_size": None}
    expected |= {"dataloader_inter_document_masking": True, "data_args_path": None, "per_split_data_args_path": None}
    assert {name: found[name] for name in expected} == expected
    assert not bridge._ARGUMENTS.keys() & found.keys() and "tp_comm_overlap" not in found
    plain = bridge.arguments(config())
    assert (plain["shared"], plain["wlb_frozen"], plain["pipeline_model_parallel_layout"]) == (3, False, None)


@pytest.mark.parametrize(
    ("blends", "expected"),
    [
        ({"blend": None}, {"mock_data": True}),
        ({"blend": (["a"], None)}, {"data_path": ["a"]}),
        (
            {"blend": None, "blend_per_split": [(["a"], None), None, (["b"], [1])]},
            {"train_data_path": ["a"], "test_data_path": ["1", "b"]},
        ),
    ],
)
def test_blends_are_data_paths(blends, expected):
    names = {"data_path", "train_data_path", "valid_data_path", "test_data_path", "mock_data"}
    found = bridge._of_blends(SimpleNamespace(**BLENDS | blends))
    assert {name: found[name] for name in names} == dict.fromkeys(names) | {"mock_data": False} | expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"inprocess_restart": SimpleNamespace(enabled=False)}, None),
        ({"model": object()}, "config.model is of object; leave wlb out"),
        ({"dataset": object()}, "pre-trains on .bin/.idx datasets; give a GPTDatasetConfig, not object"),
        ({"dataset": part(FillsIn, **BLENDS)}, "pre-trains on .bin/.idx datasets; give a GPTDatasetConfig, not Part"),
        ({"peft": bridge.LoRA()}, "does not support peft"),
        ({"inprocess_restart": SimpleNamespace(enabled=True)}, "does not support inprocess_restart"),
        *(({path: 1}, f"does not support {path};") for path in (*bridge._REFUSED, "dataset.full_validation")),
        ({"dataset.multiple_validation_sets": True}, "does not support dataset.multiple_validation_sets"),
    ],
)
def test_what_bridge_alone_has_is_refused(changes, message):
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        bridge._refuse(config(changes), bridge.GPTDatasetConfig, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"peft": bridge.LoRA()}, None),
        ({"peft": part(bridge.LoRA)}, "does not support peft, but for LoRA in finetune"),
        (
            {"dataset": part(bridge.GPTDatasetConfig, **BLENDS)},
            "fine-tunes on rows of conversations; give a GPTSFTDataset",
        ),
        ({"train.num_epochs": 1}, r"does not support train\.num_epochs"),
    ],
)
def test_what_fine_tuning_does_not_have_is_refused(changes, message):
    given = config({"dataset": part(bridge.GPTSFTDatasetConfig, **SFT)} | changes)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        bridge._refuse(given, bridge.GPTSFTDatasetConfig, SFT)


@pytest.mark.parametrize(
    ("dropout", "asked"), [(bridge.TransformerConfig.attention_dropout, ()), (0.2, ("attention_dropout",))]
)
def test_fields_are_set_where_they_are(dropout, asked, monkeypatch):
    """By Bridge's names, on every config that has them; what was not there before is an argument of the run's own."""
    given = config({"comm_overlap": part(tp_comm_overlap=True, shared=1)})
    args = SimpleNamespace(attention_dropout=dropout, tp_comm_overlap=True, seed=3, shared=3)
    changes = SimpleNamespace(priced=[], lines=lambda: ["said", *changes.priced])

    def adapt(args, of):
        assert of == asked
        args.seed, args.shared, args.wlb_new = 9, 7, 1
        return changes

    monkeypatch.setattr(bridge, "adapt", adapt)
    added, (said, priced) = bridge._set(given, args)
    assert (added, said) == ({"wlb_new": 1}, "said") and priced.startswith("no tp_comm_overlap: Bridge makes user buff")
    assert given.model.random_seed == 9 and not hasattr(given.model, "seed") and not given.comm_overlap.tp_comm_overlap
    assert [each.shared for each in (given.dataset, given.train, given.model, given.comm_overlap)] == [7] * 4


@pytest.mark.parametrize(
    "made", [DOUBTFUL, lambda model: DOUBTFUL, lambda model, vp_stage: DOUBTFUL if vp_stage == 0 else None]
)
def test_a_core_attention_of_its_own_is_refused(made):
    layer = get_gpt_layer_local_spec()
    bridge._check_attention(SimpleNamespace(transformer_layer_spec=layer))
    block = TransformerBlockSubmodules(layer_specs=[layer, DOUBTFUL])
    for spec in (made, block):
        with pytest.raises(ValueError, match="config.model has DoubtfulAttention; train without wlb"):
            bridge._check_attention(SimpleNamespace(transformer_layer_spec=spec))


# Runs ----------------------------------------------------------------------------------------------------------------


def run_of(**args):
    """A run past its beginning, whose `Training` notes its calls."""
    made = object.__new__(bridge._Run)
    made._args, made.calls, made._while_training = SimpleNamespace(**args), [], contextlib.ExitStack()
    made._training = SimpleNamespace(
        ran=lambda *given, **how: made.calls.append((*given, how)) or np.array([3, 4, 8]),
        load=lambda *given: made.calls.append(given),
        save=lambda iteration: made.calls.append((iteration, made._args.consumed_train_samples)),
        batches=lambda: {"train": iter("ab"), "valid": None, "test": iter("c")},
    )
    return made


def test_settings_are_flags_without_their_prefix(monkeypatch):
    refused = []
    monkeypatch.setattr(bridge, "_refuse", lambda *given: refused.append(given))
    made = bridge._Run("config", {"max_tokens": 99}, "kind")
    assert (made._wlb["wlb"], made._wlb["wlb_max_tokens"], refused) == (True, 99, [("config", "kind", made._wlb)])
    with pytest.raises(ValueError, match="most_tokens is no setting of the plugin; leave it out"):
        bridge._Run("config", {"max_tokens": 99, "most_tokens": 1}, "kind")


def test_a_step_is_reported_and_its_documents_are_shared_by_ranks():
    """Bridge multiplies by the ranks."""
    made = run_of(window_size=None, window_attn_skip_freq=None, num_layers=2)
    state = SimpleNamespace(train_state=SimpleNamespace(step=6), cfg=SimpleNamespace(data_parallel_size=2))
    made.on_train_step_end(SimpleNamespace(state=state, loss_dict="losses", skipped_iter=1))
    assert made.calls == [("losses", 7, {"skipped": True})]
    assert (state._flops_seqlen_sum, state._flops_seqlen_sq_sum) == (15 // 2, 89 // 2)
    state.train_state.consumed_train_samples = 40
    made._saved(None)("model", "data", 7)
    assert made.calls[1:] == [(7, 40)]


@pytest.mark.parametrize("sft", [False, True])
def test_data_begin_where_training_does(sft, monkeypatch):
    made = run_of(wlb_sft=sft)
    monkeypatch.setattr(bridge, "build_train_valid_test_datasets", lambda *given: ("of bridge", *given))
    monkeypatch.setattr(bridge, "get_train_valid_test_num_samples", lambda cfg: "samples")
    monkeypatch.setattr(bridge.datasets, "build", lambda *given: ("ours", *given))
    cfg = SimpleNamespace(dataset="dataset")
    state = SimpleNamespace(step=3, consumed_train_samples=40, consumed_valid_samples=6)
    train, valid, test = made._iterators(None)(cfg, state, "provider", other=1)
    loaded = (("of bridge", cfg, "provider"), rows.split_data) if sft else (("ours", made._args, "samples", "dataset"),)
    assert made.calls == [loaded] and valid is None and [*train.iterable, *test.iterable] == ["a", "b", "c"]
    assert (state.do_train, state.do_valid, state.do_test) == (True, False, True)
    begins = {"iteration": 3, "consumed_train_samples": 40, "consumed_valid_samples": 6}
    assert vars(made._args) == {"wlb_sft": sft} | begins


@pytest.mark.parametrize(("pads", "vocabulary"), [(False, 99), (True, (99, 128, 2))])
def test_the_model_is_built_by_adapted_specs(pads, vocabulary, monkeypatch):
    """Inside of the replacements for training, which last until it ends."""
    made, entered = run_of(), []
    made._said = ["said"]
    model = SimpleNamespace(vocab_size=99, should_pad_vocab=pads, make_vocab_size_divisible_by=128, hooks=[])
    model.tensor_model_parallel_size, model.transformer_layer_spec = 2, get_gpt_layer_local_spec()
    model.register_pre_wrap_hook = model.hooks.append

    def configure(built):
        assert built.transformer is model and built.transformer_layer_spec is model.transformer_layer_spec
        built.transformer_layer_spec, built.pre_wrap_hooks = "spec", ["one", "two"]

    @contextlib.contextmanager
    def installed():
        entered.append(model.transformer_layer_spec)
        yield
        entered.append("left")

    training = SimpleNamespace(
        configure=configure, installed=installed, writes_to=lambda writers: entered.append(writers)
    )
    monkeypatch.setattr(bridge, "Training", lambda args, said: entered.append((args, said)) or training)
    monkeypatch.setattr(bridge, "calculate_padded_vocab_size", lambda *given: given)
    built = made._built(lambda *given: (*given, entered[-1]))(cfg := SimpleNamespace(model=model), "groups")
    assert built == (cfg, "groups", "spec") and model.hooks == ["one", "two"]
    assert made._args.padded_vocab_size == vocabulary and entered[0] == (made._args, ["said"])
    made._state = SimpleNamespace(tensorboard_logger="board", wandb_logger="wandb")
    assert entered[1]() == ("board", "wandb")
    made._while_training.close()
    assert entered[-1] == "left"


def test_configs_are_set_before_bridge_finishes_them_and_checked_after(monkeypatch):
    made, calls = object.__new__(bridge._Run), []
    made._wlb = {"wlb_max_tokens": 99}
    cfg = SimpleNamespace(set_data_parallel_size=lambda: calls.append("ranks"), comm_overlap="overlap")

    def check(args):
        calls.append(args)
        raise ValueError("no")

    monkeypatch.setattr(bridge, "arguments", lambda *given: {"calls": len(calls), "given": given[1:]})
    monkeypatch.setattr(bridge, "_set", lambda cfg, args: calls.append(args) or ({"wlb_new": 1}, ["said"]))
    monkeypatch.setattr(bridge.jobs, "check", check)
    with pytest.raises(ValueError, match=r"no \(flags are fields of the ConfigContainer here\)"):
        made._configured(lambda cfg: calls.append("final"))(cfg)
    assert (calls[0], calls[2], made._said, made._args) == ("ranks", "final", ["said"], calls[3])
    assert vars(calls[1]) == {"calls": 1, "given": ("overlap",), "wlb_max_tokens": 99}
    assert vars(calls[3]) == {"calls": 3, "given": (), "wlb_max_tokens": 99, "wlb_new": 1}

"""Every step trains what Megatron's own run trains: losses, gradients and parameters, whatever the data and the layout.

`upstream_script` runs Megatron as it is, with its dense masks (`--reset-attention-mask`).
"""

import re
from pathlib import Path

import numpy as np
import pytest
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

from megatron_wlb.adapter.sources.eod import SAMPLED
from tests.adapter.datasets import EOD, VOCABULARY, write_dataset, write_index, write_lengths
from tests.adapter.training import (
    ADAM,
    CP2,
    EXPERT_BIAS,
    MOE,
    MTP,
    PP2,
    TP2,
    VPP2,
    each_version,
    full,
    named,
    relative_error,
    train,
)

LOSS, NORM, PARAMETERS = 1e-6, 1e-5, 1e-5
GENTLE = "--num-layers 2 --lr 0.05"
"""At which rounding does not grow in a hundred steps."""
EOD_MASK = "--eod-mask-loss"
EVALUATE = "--eval-iters 1 --eval-interval 1"


def spread(run, theirs):
    """Largest relative differences of losses, gradient norms and parameters."""
    losses, norms = (
        float(np.abs(np.array(run[name]) / np.array(theirs[name]) - 1).max()) for name in ("losses", "norms")
    )
    return losses, norms, relative_error(run["params"], theirs["params"])


def compare(run, theirs):
    assert len(run["losses"]) == len(theirs["losses"])
    loss, norm, parameters = spread(run, theirs)
    assert loss <= LOSS and norm <= NORM and parameters <= PARAMETERS
    assert run["evaluations"] == pytest.approx(theirs["evaluations"], rel=LOSS)


@pytest.mark.parametrize(
    ("size", "layout", "flags"),
    [
        (2, CP2, "--num-layers 1 --global-batch-size 4"),
        full(2, VPP2, "--num-layers 4"),
        full(2, "", ""),
        full(1, "", ""),
    ],
)
def test_a_hundred_steps(size, layout, flags, dataset, upstream):
    common = f"{GENTLE} {flags} --train-iters 100"
    compare(train(size, dataset, *common.split(), *layout.split()), upstream(common))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("other") / "corpus", seed=3, documents=100)


def write_inner(prefix: Path, *, ends: bool) -> str:
    """A dataset whose documents hold four texts each; `ends`: EOD ends each of these. Returns the prefix."""
    rng = np.random.default_rng(1)
    parts = rng.integers(20, 60, (120, 4))
    tokens = rng.integers(0, VOCABULARY, int(parts.sum()), dtype=np.int32)
    if ends:
        tokens[np.cumsum(parts) - 1] = EOD
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    write_index(prefix.with_suffix(".idx"), parts.sum(axis=1))
    return str(prefix)


CASES = {
    "eod": (2, CP2, EOD_MASK),
    "eod-per-token": each_version(2, VPP2, f"--num-layers 4 {EOD_MASK} --calculate-per-token-loss"),
    "eod-micro-batches-of-two": (2, "", f"{EOD_MASK} --micro-batch-size 2"),
    "epochs": full(2, CP2, "--train-iters 16"),
    "mtp": each_version(2, CP2, f"{MTP} {EOD_MASK}"),
    "mtp-per-token": full(2, PP2, f"{MTP} {EOD_MASK} --calculate-per-token-loss"),
    "experts": each_version(2, CP2, f"{MOE} {EXPERT_BIAS} --moe-z-loss-coeff 1e-3 {EOD_MASK}"),
    "experts-per-token": full(2, PP2, f"{MOE} {EXPERT_BIAS} --moe-z-loss-coeff 1e-3 --calculate-per-token-loss"),
    "experts-mtp": full(2, CP2, f"{MOE} {MTP} {EXPERT_BIAS} --moe-z-loss-coeff 1e-3"),
    "evaluation": (4, f"{PP2} {CP2}", EVALUATE),
    "cyclic": (1, "", f"--dataloader-type cyclic --train-iters 14 {EVALUATE}"),
    "cyclic-micro-batches-of-two": full(2, "", f"--dataloader-type cyclic --micro-batch-size 2 {EOD_MASK}"),
    "cyclic-unsharded": full(1, "", "--dataloader-type cyclic --no-data-sharding --train-iters 14"),
    "learned-positions": each_version(4, f"{TP2} {CP2}", "--position-embedding-type learned_absolute"),
    "batch-schedule": (1, "", "--step-batch-size-schedule 0:4,2048:8 --micro-batch-size 2 --lr-decay-style linear"),
    "samples": full(1, "", "--train-samples 24 --lr-decay-style linear"),
}
EXCLUDED = {
    "--train-samples": "--train-iters",
    "--step-batch-size-schedule": "--global-batch-size",
    "learned_absolute": "--reset-position-ids",
}
"""Flags of MODEL that do not go with others."""


@pytest.mark.parametrize(("size", "layout", "flags"), named(CASES))
def test_data_and_weights(size, layout, flags, dataset, upstream):
    without = " ".join(name for other, name in EXCLUDED.items() if other in flags)
    common = f"{GENTLE} {flags}"
    theirs = upstream(common, without=without, size=1 if "cyclic" not in flags else size)
    compare(train(size, dataset, *common.split(), *layout.split(), without=without), theirs)


def test_positions_begin_anew_where_documents_are_packed(dataset, upstream):
    """As --dataloader-inter-document-masking has them in Megatron, whose attention over them needs a GPU."""
    resets, learned = "--reset-attention-mask --reset-position-ids", "--position-embedding-type learned_absolute"
    flags = f"{GENTLE} {learned} --dataloader-inter-document-masking {CP2}"
    compare(train(2, dataset, *flags.split(), without=resets), upstream(f"{GENTLE} {learned}"))


def test_fp16_has_the_scale_of_a_mean_over_tokens(dataset, upstream):
    flags = f"{GENTLE} --fp16 --loss-scale 65536 --train-iters 3"
    loss, norm, _ = spread(train(1, dataset, *flags.split()), upstream(flags))
    assert loss <= 1e-5 and norm <= 1e-3


@pytest.mark.parametrize(
    "blend",
    ["0.7 {} 0.3 {}", full("{} {}"), "defer", "per split", full("args path"), "full validation", "one set", "mock"],
)
def test_datasets(blend, dataset, other, tmp_path):
    """Blends, split by split, from files, evaluated; also read late, and over whole validation sets."""
    data, without = "", "--split"
    flags = [*GENTLE.split(), *EVALUATE.split(), "--data-cache-path", str(tmp_path / "cache")]
    match blend:
        case "per split":
            flags += ["--train-data-path", "2", dataset, "1", other, "--valid-data-path", other]
            flags += ["--test-data-path", other]
        case "full validation" | "one set":
            flags = f"{GENTLE} --full-validation --eval-interval 2 --global-batch-size 2 --train-data-path".split()
            sets = [other] if blend == "one set" else [other, other]
            flags += [dataset, "--valid-data-path", *sets, "--multiple-validation-sets"]
            without = "--split --eval-iters"
        case "args path":
            (tmp_path / "blend").write_text(f"0.5 {dataset}\n0.5 {other}\n")
            flags, without = [*flags, "--data-args-path", str(tmp_path / "blend")], ""
        case "mock":
            flags += ["--mock-data"]
        case _:
            without = ""
            data = (blend if "{}" in blend else "0.7 {} 0.3 {}").format(dataset, other)
    theirs = train(1, data, *flags, wlb=False, without=without)
    flags += ["--dataloader-defer-npy-index-mmap"] if blend == "defer" else []
    assert theirs["evaluations"] or blend == "mock"
    compare(train(2, data, *flags, *PP2.split(), without=without), theirs)


def test_cached_indexes_of_former_datasets_are_refused(tmp_path):
    """Upstream keeps them by the name of a dataset, and of a blend."""
    data, flags = tmp_path / "corpus", [*GENTLE.split(), "--split", "100,0,0", "--train-iters", "1"]
    blend = f"1 {data} 1 {data}"
    cached = ["--data-cache-path", str(tmp_path / "cache")]
    for lengths in ([60] * 250, [100] * 400, [60] * 125 + [100] * 75):
        write_lengths(data, np.array(lengths))
        if lengths[-1] == 60:
            train(1, str(data), *flags)
            train(1, blend, *flags, *cached)
            train(1, str(data), *flags)  # from the cache
        else:
            with pytest.raises(RuntimeError, match=f"cached index {data}/cache/.* is not of the documents of {data}: "):
                train(1, str(data), *flags)
            with pytest.raises(RuntimeError, match=f"cached index {tmp_path}/cache/.* is not of .*; delete it"):
                train(1, blend, *flags, *cached)


@pytest.mark.parametrize("flags", ["", EOD_MASK])
def test_tokenizers_without_a_pad_token(flags, dataset, monkeypatch):
    monkeypatch.setattr(NullTokenizer, "pad_id", None, raising=False)
    theirs = train(1, dataset, *GENTLE.split(), *flags.split(), wlb=False)
    compare(train(2, dataset, *GENTLE.split(), *flags.split(), *CP2.split()), theirs)


def test_indexes_that_are_loaded_without_the_documents_of_a_split(dataset, tmp_path):
    """--dataloader-fast-cache-load, from a cache that is there; documents that the start samples are the index's."""
    flags = [*GENTLE.split(), "--train-data-path", dataset, "--data-cache-path", str(tmp_path)]
    theirs = train(1, "", *flags, wlb=False, without="--split")
    fast, prints = [*flags, "--dataloader-fast-cache-load"], tmp_path / "prints"
    compare(train(2, "", *fast, *CP2.split(), without="--split", prints=prints), theirs)
    assert "sampled" not in prints.read_text()


@pytest.mark.parametrize("ends", [True, False])
def test_texts_inside_documents(ends, tmp_path):
    """Where resetting is asked for, EOD ends a text wherever it is; a document without EOD goes on in the next."""
    data, prints = write_inner(tmp_path / "corpus", ends=ends), tmp_path / "prints"
    flags = [*GENTLE.split(), EOD_MASK]
    theirs = train(1, data, *flags, wlb=False)
    compare(train(2, data, *flags, *CP2.split(), prints=prints), theirs)
    assert "sampled documents do not end with their only EOD token: pieces end where" in prints.read_text()
    without = "--reset-attention-mask --reset-position-ids"
    train(1, data, "--train-iters", "1", without=without, prints=(said := tmp_path / "said"))
    assert f"attention goes across EOD for {'73.' if ends else '0.0%'}" in said.read_text()
    assert (
        "> wlb: differs: attention stops at the end of a document; without --wlb this run lets it cross"
        in said.read_text()
    )


@pytest.mark.parametrize("inner", [True, False])
def test_rare_texts_inside_documents(inner, tmp_path):
    """EOD inside one document of ten, or not at its end, and in none that the start samples.

    Pieces are the same where Megatron ignores the mask.
    """
    rng, data = np.random.default_rng(5), tmp_path / "corpus"
    lengths = rng.integers(60, 200, 10 * SAMPLED)
    tokens, ends = rng.integers(0, VOCABULARY, int(lengths.sum()), dtype=np.int32), np.cumsum(lengths)
    tokens[ends - 1] = EOD
    rare = slice(7, None, 10)
    tokens[ends[rare] - (lengths[rare] // 2 if inner else 1)] = EOD if inner else 0
    data.with_suffix(".bin").write_bytes(tokens.tobytes())
    write_index(data.with_suffix(".idx"), lengths)
    flags, prints = [*GENTLE.split(), "--split", "100,0,0", "--train-iters", "3"], tmp_path / "prints"
    theirs = train(1, str(data), *flags, wlb=False)
    compare(train(2, str(data), *flags, *CP2.split(), prints=prints), theirs)
    assert "> wlb is on: every step trains the same as without --wlb\n" in (said := prints.read_text())
    assert "sampled" not in said
    compare(train(1, str(data), *flags, "--no-create-attention-mask-in-dataloader", prints=prints), theirs)
    assert "ignore --reset-attention-mask" in prints.read_text()


def test_documents_that_are_packed_do_not_end_at_eod(tmp_path):
    """--dataloader-inter-document-masking ends attention and positions with documents alone, in Megatron, too."""
    data, masked = write_inner(tmp_path / "corpus", ends=True), "--dataloader-inter-document-masking"
    without, flags = "--reset-attention-mask --reset-position-ids", ["--train-iters", "1", masked]
    theirs = train(1, data, *flags, without=without)
    compare(train(1, data, *flags), theirs)


@pytest.mark.each_version
def test_one_curve(dataset, tmp_path):
    """Plain, with `--wlb`, plain, and with it again in other layouts, micro-batches and S_max: one run."""
    common = [*ADAM, *f"--lr 1e-4 --adam-eps 1e-2 --data-cache-path {tmp_path / 'cache'}".split()]
    common += "--num-layers 2 --train-samples 64 --lr-decay-style linear --eval-iters 1 --eval-interval 3".split()
    whole = train(1, dataset, *common, wlb=False, without="--train-iters")
    checkpoint = ["--save", str(tmp_path / "ckpt"), "--load", str(tmp_path / "ckpt"), "--save-interval", "99"]
    parts = [
        (1, False, ""),
        (2, True, f"{CP2} --wlb-micro-batches 4 --wlb-max-tokens 640"),
        (1, False, "--micro-batch-size 2"),
        (2, True, f"{PP2} --wlb-micro-batches 12"),
    ]
    losses = []
    for i, (size, wlb, flags) in enumerate(parts):
        run = train(
            size, dataset, *common, *checkpoint, *flags.split(), "--exit-interval", str(2 * i + 2),
            wlb=wlb, without="--train-iters", exits=True,
        )  # fmt: skip
        losses += run["losses"]
    assert losses == pytest.approx(whole["losses"], rel=LOSS)
    assert relative_error(run["params"], whole["params"]) <= PARAMETERS
    assert not list((tmp_path / "ckpt").glob("*.wlb.json"))


def test_weights_trained_on_shorter_sequences(dataset, tmp_path):
    """`--finetune` from them begins at the first sample, as Megatron's does."""
    load = ["--load", str(tmp_path), "--finetune"]
    short = f"--seq-length 64 --save {tmp_path} --save-interval 2".split()
    first, _ = train(1, dataset, *GENTLE.split(), *short, wlb=False)["losses"]
    theirs = train(1, dataset, *GENTLE.split(), *load, wlb=False)
    compare(train(2, dataset, *GENTLE.split(), *load, *CP2.split()), theirs)
    assert theirs["losses"][0] < first - 0.01  # not from the beginning


def digests(path):
    return re.findall(r"wlb step +(\d+) \| digest ([0-9a-f]{16})", path.read_text())

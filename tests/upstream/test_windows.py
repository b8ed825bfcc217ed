"""Rows that are read of a window, and its pieces, are the tokens, labels, mask and positions of upstream's sample."""

from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron_wlb.adapter.sources.windows import FromIndex
from tests.adapter.datasets import write_index

WINDOW, EOD, PAD = 24, 0, 5
NAMES = ("tokens", "labels", "loss_mask")
RESETS = ("reset_position_ids", "reset_attention_mask")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """Documents of 0 to 60 tokens, EOD and pad tokens anywhere."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("windows") / "corpus"
    lengths = rng.integers(0, 60, 40)
    path.with_suffix(".bin").write_bytes(rng.integers(0, 12, int(lengths.sum()), dtype=np.int32).tobytes())
    write_index(path.with_suffix(".idx"), lengths)
    return str(path)


@pytest.mark.parametrize("pad", [PAD, EOD, None])
@pytest.mark.parametrize("masks_eod", [False, True])
@pytest.mark.parametrize("resets", [(), *((each,) for each in RESETS), RESETS], ids=str)
def test_a_window_is_upstreams_sample(resets, masks_eod, pad, prefix, tmp_path):
    flags = {name: name in resets for name in RESETS}
    tokenizer = SimpleNamespace(eod=EOD, vocab_size=12, unique_identifiers={}, **{} if pad is None else {"pad": pad})
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=WINDOW, blend=([prefix], None), split="1,0,0", path_to_cache=str(tmp_path),
        tokenizer=tokenizer, eod_mask_loss=masks_eod, create_attention_mask=False, allow_ambiguous_pad_tokens=True,
        **flags,
    )  # fmt: skip
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, [60, 0, 0], lambda: True, config).build()[0]
    dataset.masks_and_position_ids_are_cacheable = (
        False  # a mask that it keeps has the pad tokens of all samples so far
    )
    source = FromIndex(Namespace(seq_length=WINDOW, dataloader_inter_document_masking=False, **flags))
    samples, text = source.opened(dataset)
    assert text.masks == (masks_eod or pad is not None)
    for number in range(len(dataset)):
        theirs = dataset[number]
        pieces = samples.documents(np.array([number]))
        assert pieces["length"].sum() == WINDOW and pieces["index"][0] == 0
        found = [text.read(piece, 0, int(piece["length"])) for piece in pieces]
        for ours, name in zip(map(np.concatenate, zip(*found, strict=True)), NAMES, strict=True):
            assert ours.tolist() == theirs[name].tolist(), name
        if "reset_position_ids" in resets:
            assert np.concatenate([*map(np.arange, pieces["length"])]).tolist() == theirs["position_ids"].tolist()
        # Further rows go over pieces, up to the end of the window.
        for piece in pieces[:: max(1, len(pieces) - 1)]:
            start = int(piece["length"]) // 2
            place = int(piece["index"]) + start
            for ours, name in zip(text.read(piece, start, WINDOW), NAMES, strict=True):
                assert ours.tolist() == [*theirs[name].tolist()[place:], *[0] * place], name

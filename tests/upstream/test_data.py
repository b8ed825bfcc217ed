"""Samples that commands cut from data without torch have the sizes and blends of upstream's own datasets."""

from types import SimpleNamespace

import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

from megatron_wlb.cli.data import data_of
from megatron_wlb.plan.mock import MockDocuments, mock_lengths
from tests.cli.analyses import MODEL, run
from tests.cli.test_data import SAMPLES, WINDOW, prefixes, samples

__all__ = ["prefixes"]
TOKENIZER = SimpleNamespace(eod=0, pad=1, vocab_size=9, unique_identifiers={})


def of_upstream(kind, folder, blend, split):
    """Upstream's training dataset of so many samples."""
    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=WINDOW, blend=blend, split=split, path_to_cache=str(folder),
        tokenizer=TOKENIZER, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(kind, [SAMPLES, 0, 0], lambda: True, config).build()[0]


@pytest.mark.parametrize("split", ["1,0,0", "80,20,0"])
@pytest.mark.parametrize("weights", [None, [0.5, 0.3, 0.2]])
def test_a_blend_is_that_of_upstream(weights, split, prefixes, tmp_path):
    prefixes = prefixes if weights else prefixes[:2]
    theirs = of_upstream(GPTDataset, tmp_path, (prefixes, weights), split)
    words = prefixes if weights is None else [w for pair in zip(weights, prefixes, strict=True) for w in pair]
    ours = samples("--split", split, "--data-path", *words)
    for column, upstream in zip(ours.blend, (theirs.dataset_index, theirs.dataset_sample_index), strict=True):
        assert column.tolist() == upstream.tolist()
    for part, upstream in zip(ours.datasets, theirs.datasets, strict=True):
        assert len(part) == len(upstream) and len(part.document_index) == len(upstream.document_index)
        assert sorted(part.document_index) == sorted(upstream.document_index - upstream.document_index.min())
    again = ours.documents(0, len(ours)), ours.documents(len(ours), 2 * len(ours))
    assert (again[0]["document"] == again[1]["document"]).all()  # they begin anew


def test_one_dataset_has_as_many_epochs_as_samples_need(prefixes, tmp_path):
    theirs = of_upstream(GPTDataset, tmp_path, (prefixes[2:], None), "1,0,0")
    ours = samples("--split 1 --data-path", prefixes[2])
    assert len(ours) == len(theirs) >= SAMPLES and len(ours.datasets[0].document_index) == len(theirs.document_index)


def test_mock_data_are_those_of_upstream(tmp_path):
    """A third of them is trained, whatever --split says."""

    def mock(*words):
        of = run(MODEL, f"--seq-length {WINDOW} --global-batch-size 2 --mock-data --split 1", *words)
        return data_of(of.arguments, [], of.run_settings)

    theirs = of_upstream(MockGPTDataset, tmp_path, None, None)
    found = mock()
    assert found.lengths[0].tolist() == theirs.dataset.sequence_lengths[theirs.indices].tolist()
    drawn = mock("--wlb-mock-lengths F2")
    every = MockDocuments(distribution=mock_lengths("F2"), seed=1234, vocabulary=9).sequence_lengths
    assert drawn.lengths[0].tolist() == every[: round(len(every) / 3)].tolist()
    assert (found.prefixes, drawn.prefixes) == (["mock data"], ["mock data, F2"])

"""Samples that commands cut from data without torch: sizes and blends are those of upstream's own datasets."""

import resource
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

from megatron_wlb.cli.data import data_of
from megatron_wlb.plan.mock import MockDocuments, mock_lengths
from tests.adapter.datasets import write_lengths
from tests.cli.analyses import MODEL, described, run
from tests.limits import limited

WINDOW, SAMPLES = 128, 70
TOKENIZER = SimpleNamespace(eod=0, pad=1, vocab_size=9, unique_identifiers={})


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    """Of three datasets, the last without a window of its own."""
    rng, folder = np.random.default_rng(1), tmp_path_factory.mktemp("data")
    lengths = rng.integers(0, 300, 60), rng.integers(1, 50, 90), np.array([0, 40, 41])
    return [write_lengths(folder / f"{i}", each) for i, each in enumerate(lengths)]


def of_upstream(kind, folder, blend, split):
    """Upstream's training dataset of so many samples."""
    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=WINDOW, blend=blend, split=split, path_to_cache=str(folder),
        tokenizer=TOKENIZER, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(kind, [SAMPLES, 0, 0], lambda: True, config).build()[0]


def samples(*words):
    data = described(MODEL, f"--seq-length {WINDOW} --global-batch-size 2", *words).data
    return data.samples(1234, WINDOW, SAMPLES)


@pytest.mark.parametrize("split", ["1,0,0", "80,20,0"])
@pytest.mark.parametrize("weights", [None, [0.5, 0.3, 0.2]])
def test_a_blend_is_that_of_upstream(weights, split, prefixes, tmp_path):
    prefixes = prefixes if weights else prefixes[:2]
    theirs = of_upstream(GPTDataset, tmp_path, (prefixes, weights), split)
    words = prefixes if weights is None else [w for pair in zip(weights, prefixes, strict=True) for w in pair]
    ours = samples("--split", split, "--data-path", *words)
    for column, upstream in zip(ours.blend, (theirs.dataset_index, theirs.dataset_sample_index), strict=True):
        assert column.tolist() == upstream.tolist()
    for part, upstream in zip(ours.parts, theirs.datasets, strict=True):
        assert len(part) == len(upstream) and len(part.document_index) == len(upstream.document_index)
        assert sorted(part.document_index) == sorted(upstream.document_index - upstream.document_index.min())
    again = ours.pieces(0, len(ours)), ours.pieces(len(ours), 2 * len(ours))
    assert (again[0]["document"] == again[1]["document"]).all()  # they begin anew


def test_one_dataset_has_as_many_epochs_as_samples_need(prefixes, tmp_path):
    theirs = of_upstream(GPTDataset, tmp_path, (prefixes[2:], None), "1,0,0")
    ours = samples("--split 1 --data-path", prefixes[2])
    assert len(ours) == len(theirs) >= SAMPLES and len(ours.parts[0].document_index) == len(theirs.document_index)


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


def test_a_blend_may_have_more_datasets_than_files_may_be_open(prefixes):
    with limited(resource.RLIMIT_NOFILE, 100):
        found = samples("--split 1 --data-path", *prefixes[:2] * 200)
    assert len(found.parts) == 400 and len(found.pieces(0, len(found)))


def test_numbers_of_a_split_are_those_of_upstream(prefixes):
    texts = "60,20,20", "60:20:20", "[60 20 20]"
    alike = [samples(f"--data-path {prefixes[0]} --split {shlex.quote(text)}") for text in texts]
    assert len({len(each.parts[0].lengths) for each in alike}) == 1
    with pytest.raises(ValueError, match="--split 1e2,0,0: give shares"):  # four numbers
        samples(f"--data-path {prefixes[0]} --split 1e2,0,0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--split 1 --data-path LAST LAST", "2 fills no window of 128 tokens; give the blend weights"),
        ("--split 1,2,0 --data-path LAST", r"has no token among the first 33.333% of 3 documents \(--split 1,2,0\)"),
    ],
)
def test_data_that_train_nothing_are_refused(words, message, prefixes):
    with pytest.raises(ValueError, match=message):
        samples(words.replace("LAST", prefixes[2]))


@pytest.mark.parametrize(
    ("blend", "message"),
    [
        (b"\n", "the blend names no dataset; give it the prefix of one"),
        (b"\xff", "--data-args-path .* is no text; give --data-args-path a file of weights and prefixes"),
    ],
)
def test_a_file_that_holds_no_blend_is_refused(blend, message, tmp_path):
    (tmp_path / "blend").write_bytes(blend)
    with pytest.raises(ValueError, match=message):
        samples(f"--data-args-path {tmp_path / 'blend'}")

"""Layers of virtual stages."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.pipeline.split import EVEN, Split, laid_out
from tests.jobs import EDGES, MODEL, job


@pytest.mark.parametrize(
    ("split", "layers"),
    [
        (EVEN, [[3, 3], [3, 3]]),
        (Split(decoder_first_pipeline_num_layers=2), [[1, 1], [5, 5]]),
        (Split(decoder_last_pipeline_num_layers=4), [[4, 4], [2, 2]]),
        (Split(decoder_last_pipeline_num_layers=0), [[4, 4], [0, 0]]),
        (Split(decoder_first_pipeline_num_layers=4, decoder_last_pipeline_num_layers=8), [[2, 2], [4, 4]]),
        (Split(account_for_embedding_in_pipeline_split=True), [[2, 3], [3, 3]]),
        (Split(account_for_loss_in_pipeline_split=True), [[3, 3], [3, 2]]),
        (EDGES, [[2, 3], [3, 2]]),
        (Split(pipeline_model_parallel_layout="Et*3|(tt|)*2,tL"), [[3, 2], [2, 1]]),
        (laid_out(np.array([[1, 0], [5, 2]])), [[1, 0], [5, 2]]),
    ],
    ids=str,
)
def test_layers_by_hand(split, layers):
    """Of a stage a row, and of its chunks a column: micro-batches go through all stages, chunk by chunk."""
    assert split.layers(np.sum(layers), 2, 2).tolist() == layers


def test_other_layouts_are_refused():
    assert Split(pipeline_model_parallel_layout="Et*2|t|m*2L").layers(3, 3, 1).ravel().tolist() == [2, 1, 0]
    for layout in ("", "tL", "Et", "Em|tL", "EtL|t", "E(t|L", "Et*L", "Et*9999|L", "E((t)*2|)*2L", "EEL", "E t L"):
        with pytest.raises(ValueError, match=r"is not E, then t and \|, then L; give MTP"):
            Split(pipeline_model_parallel_layout=layout).layers(2, 2, 1)


def test_mtp_layers_are_on_the_last_virtual_stage():
    given = job(model=replace(MODEL, mtp_num_layers=2), pp=2, vpp=2)
    assert np.array_equal(given.layers() - given.decoder_layers(), [[0, 0], [0, 2]])


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"has 3 layers on 2 virtual stages, not 4 on 2 stages of 1 chunks"):
        Split(pipeline_model_parallel_layout="Ett|tL").layers(4, 2, 1)
    with pytest.raises(ValueError, match=r"8 layers \(5 on stage 0, 4 on stage 1\) do not divide"):
        Split(decoder_first_pipeline_num_layers=5, decoder_last_pipeline_num_layers=4).layers(8, 2, 1)
    with pytest.raises(ValueError, match=r"4 layers \(3 on stage 0, 3 on stage 2\) do not divide over 3 stages"):
        Split(decoder_first_pipeline_num_layers=3, decoder_last_pipeline_num_layers=3).layers(4, 3, 1)
    with pytest.raises(ValueError, match="--account-for-.*-split and --pipeline-model-parallel-layout are different"):
        Split(account_for_embedding_in_pipeline_split=True, pipeline_model_parallel_layout="EtL")
    with pytest.raises(ValueError, match=r"126 layers and 1 for the edges do not divide over 16 stages of 1 chunks"):
        Split(account_for_loss_in_pipeline_split=True).layers(126, 16, 1)
    with pytest.raises(ValueError, match=r"--decoder-last-.* and --pipeline-model-parallel-layout are different ways"):
        Split(decoder_last_pipeline_num_layers=1, pipeline_model_parallel_layout="EtL")

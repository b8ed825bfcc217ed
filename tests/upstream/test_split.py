"""Layers of virtual stages are those that upstream builds."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from megatron_wlb.pipeline.split import EVEN, Split, laid_out
from tests.jobs import EDGES


def built(split, num_layers, pp, vpp):
    """By upstream, which takes layers for granted that it never builds."""
    config = SimpleNamespace(
        num_layers=num_layers,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=split.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=split.decoder_last_pipeline_num_layers,
        account_for_embedding_in_pipeline_split=split.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=split.account_for_loss_in_pipeline_split,
    )
    chunks = range(vpp) if vpp > 1 else [None]
    layers = np.array([[get_num_layers_to_build(config, chunk, stage) for chunk in chunks] for stage in range(pp)])
    assert layers.sum() == num_layers and (layers >= 0).all(), "upstream would lose layers"
    return layers


def splits():
    yield EVEN
    yield EDGES
    yield Split(account_for_embedding_in_pipeline_split=True)
    yield Split(account_for_loss_in_pipeline_split=True)
    for first in (None, 0, 1, 2, 3, 4):
        for last in (None, 0, 2, 3, 4, 6):
            yield Split(decoder_first_pipeline_num_layers=first, decoder_last_pipeline_num_layers=last)


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 3)])
def test_layers_are_those_that_upstream_builds(pp, vpp):
    taken = 0
    for split in splits():
        for num_layers in range(2, 26):
            try:
                expected = built(split, num_layers, pp, vpp)
            except AssertionError:
                with pytest.raises(ValueError, match=f"{num_layers} layers"):
                    split.layers(num_layers, pp, vpp)
                continue
            assert np.array_equal(split.layers(num_layers, pp, vpp), expected), (split, num_layers)
            taken += 1
    assert taken > 5


LAYOUTS = [
    "Et*3|(tt|)*5,tL",
    "E|(t|)*2,L",
    "Ettt|t|tt*2|L",
    "E(tt|)*3tL",
    "(E)*1t|*2,L",
    "E,t*12|t|(|t)*2L",
    "E|L",
    "EtL",
]


def random_layout(draw):
    parts = draw.choices(["t", "t*3", "|", "(t|)*2", "(tt|t)*3", ",", "|t", "t*2|*2", "(t*2|)*2"], k=draw.randint(0, 9))
    return f"E{''.join(parts)}L"


def test_layouts_are_read_as_upstream_does():
    for layout in (*LAYOUTS, *map(random_layout, map(random.Random, range(40)))):
        split = Split(pipeline_model_parallel_layout=layout)
        stages = len(PipelineParallelLayerLayout.parse_str_to_list(layout))
        assert split.num_virtual_stages == stages, layout
        for pp in (each for each in range(1, stages + 1) if stages % each == 0):
            theirs = [
                [stage.count(LayerType.decoder) for stage in chunks]
                for chunks in PipelineParallelLayerLayout(layout, pp).layout
            ]
            assert np.array_equal(split.layers(np.sum(theirs), pp, stages // pp), theirs), layout


def test_layers_as_a_layout():
    rng = np.random.default_rng(0)
    for pp, vpp in ((1, 1), (2, 1), (4, 1), (2, 3), (4, 8)):
        for most in (1, 2, 5, 12):
            layers = rng.integers(0, most + 1, (pp, vpp))
            split = laid_out(layers)
            assert np.array_equal(split.layers(layers.sum(), pp, vpp), layers)
            stages = PipelineParallelLayerLayout.parse_str_to_list(split.pipeline_model_parallel_layout)
            assert [stage.count(LayerType.decoder) for stage in stages] == layers.T.ravel().tolist()
    assert laid_out(np.array([[9], [9], [9], [5]])) == Split(pipeline_model_parallel_layout="E(t*9|)*3t*5L")

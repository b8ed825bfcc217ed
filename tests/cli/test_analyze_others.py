"""What `megatron-wlb analyze` tries beside the run: other flags, other layouts."""

import re
from dataclasses import replace

import numpy as np

from benchmarks.lengths import stream
from megatron_wlb.cli.analyze import layouts
from megatron_wlb.describe.make import make_job
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.job import Job, Parallel
from megatron_wlb.model import MODELS
from megatron_wlb.packing.original import OriginalPacking
from megatron_wlb.pipeline.split import Split
from megatron_wlb.simulate.memory import peak_bytes
from tests.cli.analyses import JOB, analyse, setup


def test_fewer_layers_on_the_last_stage_are_mentioned_where_they_would_be_faster(tmp_path, data, capsys):
    words = f"{JOB} --num-layers 8 --pipeline-model-parallel-size 2 --vocab-size 16384 --wlb-crossover 9000"
    words += f" --wlb-micro-batches 8 --data-path {data}"

    def layouts_of(found):
        return [each for each in found["other_flags"] if "layout" in each["flag"]]

    found = analyse(tmp_path, words, "--steps 24")
    (other,) = layouts_of(found)
    assert re.fullmatch(r"--pipeline-model-parallel-layout 'Et\*\d\|(tt|ttt)L'", other["flag"])
    assert other["speedup"] > found["schemes"]["ours"]["speedup"]
    assert "Megatron would gain, too" in capsys.readouterr().out
    again = analyse(tmp_path, words, other["flag"].replace("'", ""), "--steps 24")
    assert again["schemes"]["ours"]["us_per_token"] < found["schemes"]["ours"]["us_per_token"]
    assert layouts_of(again) == []
    # Nor where memory is enough for even stages alone.
    ours = setup(words).job
    enough = max(peak_bytes(ours, stage) for stage in range(2)) / 2**30
    for share, mentioned in ((1.001, False), (2, True)):
        given = setup(words, f"--wlb-memory-budget {share * enough}")
        assert given.job.max_tokens == ours.max_tokens and (other["flag"] in given.others) == mentioned


def test_layers_leave_a_last_stage_that_the_vocabulary_fills():
    """One by one, from its last chunk, as long as that makes the fullest stage less full."""

    def relieved(model="llama3-8b", **parallel):
        given = Job(
            model=MODELS[model], parallel=Parallel(**parallel), context_length=1 << 17, num_micro_batches=16,
            global_batch_size=16, max_tokens=1 << 17, crossover_tokens=37_000, packing=OriginalPacking(),
            profile=load_profile("h100-fa2"),
        )  # fmt: skip
        found = layouts.relieved(given, stream(np.full(100, 30_000), given.context_length))
        assert replace(found, parallel=given.parallel) == given and (found == given or found.layers().sum() == 32)
        return found.parallel.split.pipeline_model_parallel_layout

    assert relieved(pp=4) == "Et*9|(t*8|)*2t*7L"
    assert relieved(pp=4, vpp=8) == "E(t|)*28tt|(t|)*2L"
    assert relieved(pp=2) == "Et*17|t*15L"
    assert relieved(pp=4, split=Split(decoder_last_pipeline_num_layers=5)) is None
    assert relieved("llama2-7b", pp=4) is relieved() is None


def test_other_layouts_are_those_of_the_same_gpus_in_chunks_of_a_layer():
    job = make_job(
        model=MODELS["llama2-7b"],
        context_length=4096,
        global_batch_size=8,
        parallel=Parallel(tp=8, cp=2, pp=4, vpp=2, dp=2),
    )
    assert layouts.sizes(job) == [(2, 4, 8), (8, 1, 1), (2, 1, 1), (4, 4, 8), (16, 1, 1), (4, 2, 16)]
    assert (2, 4, 8) not in layouts.sizes(replace(job, parallel=replace(job.parallel, vpp=8)))
    assert [layouts.virtual_stages(layers, 4) for layers in (24, 28, 4, 126)] == [6, 7, 1, 1]

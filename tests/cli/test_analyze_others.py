"""What `megatron-wlb analyze` tries beside the run: other flags, other layouts."""

import re
from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.cli.analyze.entries import _alternatives
from megatron_wlb.cli.analyze.report import Faster, Others, Ratio, Steps, at_its_best, compared
from megatron_wlb.cli.analyze.setup import Schemes
from megatron_wlb.cli.analyze.table import _faster
from megatron_wlb.cost.attention import attention_kernels
from megatron_wlb.describe import alternatives
from megatron_wlb.describe.alternatives import Alternative
from megatron_wlb.describe.make import make_job
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.job import Job, Parallel, Recompute
from megatron_wlb.model import MODELS
from megatron_wlb.packing.megatron import MegatronPacking
from megatron_wlb.pipeline.split import Split
from megatron_wlb.plan.samples import Samples, windows
from megatron_wlb.simulate.memory import peak_bytes, weight_bytes
from tests.adapter.datasets import write_index
from tests.cli.analyses import JOB, N, analyse, report, run, setup
from tests.jobs import EDGES


def with_a_flag(setup):
    """Jobs with one more flag, by flag."""
    return {way.flags: way.job for way in setup.others() if way.kind == "other_flags"}


def test_fewer_layers_on_the_last_stage(tmp_path, data):
    # Layers of so many microseconds that launches do not matter.
    words = f"{JOB} --num-layers 8 --hidden-size 4096 --ffn-hidden-size 16384 --pipeline-model-parallel-size 2"
    words += f" --vocab-size 131072 --wlb-micro-batches 8 --data-path {data}"

    def layouts_of(found):
        return [each for each in found["other_flags"] if "layout" in each["flag"]]

    found = analyse(tmp_path, words, "--steps 24")
    (other,) = layouts_of(found)
    assert re.fullmatch(r"--pipeline-model-parallel-layout 'Et\*\d\|(tt|ttt)L'", other["flag"])
    assert other["speedup"] > found["schemes"]["ours"]["speedup"]
    again = analyse(tmp_path, words, other["flag"].replace("'", ""), "--steps 24")
    assert again["schemes"]["ours"]["us_per_token"] < found["schemes"]["ours"]["us_per_token"]
    assert layouts_of(again) == [] and other["flag"] not in with_a_flag(setup(words, other["flag"]))
    # Nor where memory is enough for even stages alone.
    ours = setup(words).job
    enough = peak_bytes(ours) / 2**30
    for share, mentioned in ((1.001, False), (2, True)):
        given = setup(words, f"--wlb-memory-budget {share * enough}")
        assert given.job.max_tokens == ours.max_tokens and (other["flag"] in with_a_flag(given)) == mentioned


def test_megatron_dispatches_and_attends_as_its_flags_say(data):
    """With --wlb tokens go all-to-all where they were gathered, and attention stays in bf16."""
    words = f"{JOB} --data-path {data} --num-experts 4 --gpu gb200 --fp8-format hybrid --fp8-dot-product-attention"
    words += " --wlb-micro-batches 4"
    ncclep = "flex --moe-flex-dispatcher-backend ncclep"
    for dispatcher, ours in (("", "alltoall"), ("allgather", "alltoall"), ("flex", "flex"), (ncclep, "alltoall")):
        found = setup(words, f"--moe-token-dispatcher-type {dispatcher}" if dispatcher else "")
        job = found.without_wlb().job
        assert (found.job.moe_dispatcher, job.moe_dispatcher) == (ours, dispatcher.split(" ")[0] or "alltoall")
        remarks = " ".join(found.run.screened.remarks)
        assert ("--moe-flex-dispatcher-backend" in remarks) == (dispatcher == ncclep) and "refuses" not in remarks
        assert (found.job.fp8_attention, job.fp8_attention) == (False, True)
        assert attention_kernels(job)[0].tile < attention_kernels(found.job)[0].tile


def test_gradients_in_the_dtype_of_the_model(data):
    words = f"{JOB} --data-path {data} --context-parallel-size 2 --wlb-packing megatron"
    found = setup(words)
    assert with_a_flag(found) == {"--wlb-cp-gradients model": found.job.sharded(cp_gradients="model")}
    assert not with_a_flag(setup(words, "--wlb-cp-gradients model"))
    assert not with_a_flag(setup(words.replace("-parallel-size 2", "-parallel-size 1")))


def test_overlap_of_tensor_parallel_communication(data):
    """Not beyond a node, nor where it is on."""
    words = f"{JOB} --data-path {data} --hidden-size 8192 --num-attention-heads 64 --wlb-micro-batches 4"

    def tried(tp, *more):
        found = setup(f"{words} --tensor-model-parallel-size {tp}", *more)
        return [job.tp_tile_rows for flag, job in with_a_flag(found).items() if flag == "--tp-comm-overlap"]

    assert [tried(tp) for tp in (1, 2, 8, 16)] == [[], [4096], [4096], []]
    assert tried(8, "--tp-comm-overlap") == tried(8, "--multi-latent-attention") == []


def test_layers_leave_a_last_stage_that_the_vocabulary_fills():
    """One by one, from its last chunk, as long as that makes the fullest stage less full."""

    def relieved(model=MODELS["llama3-8b"], length=30_000, window=1 << 17, **parallel):
        given = Job(
            model=model, parallel=Parallel(**parallel), context_length=window, num_micro_batches=16,
            global_batch_size=16, max_tokens=window, crossover_tokens=37_000, packing=MegatronPacking(),
            profile=load_profile("h100-fa2"),
        )  # fmt: skip
        part = windows(np.full(200, length), given.context_length)
        found = alternatives.relieved(given, Samples(datasets=[part], context_length=given.context_length))
        assert replace(found, parallel=given.parallel) == given and (found == given or found.layers().sum() == 32)
        return found.parallel.split.pipeline_model_parallel_layout

    assert relieved(pp=4) == "Et*9|(t*8|)*2t*7L"
    assert relieved(pp=4, vpp=8) == "E(t|)*28tt|(t|)*2L"
    assert relieved(pp=2) == "Et*17|t*15L"
    assert relieved(pp=4, split=Split(decoder_last_pipeline_num_layers=5)) is None
    assert relieved(MODELS["llama2-7b"], pp=4) is relieved() is None
    # Of layers of 218 M weights, the output layer is 525 / (218 + 234.5 x length / 37,000).
    assert [relieved(pp=4, length=n, window=n) for n in (47_000, 50_000)] == ["Et*9|(t*8|)*2t*7L", None]
    for changes in ({"mtp_num_layers": 1}, {"hybrid": True}):
        assert relieved(replace(MODELS["llama3-8b"], **changes), pp=4) is None


def test_what_is_faster_is_told_by_its_kind(data):
    """In the JSON with its own values; at the top of the report the fastest layout and recomputation."""
    given = setup(JOB, "--wlb-micro-batches 4 --data-path", data)

    def faster(kind, flags, gain=1.1, **megatron):
        return Faster(Alternative(kind, flags, given.job), gain, 1.2, 0.5, 0.01, **megatron)

    layouts = [faster("layouts", flags, 1.3, megatron=1.0) for flags in ("--first", "--second")]
    every = [*layouts, faster("recompute", ""), faster("delay", "--late"), faster("other_flags", "--other")]
    gains = {"gain": 1.1, "speedup": 1.2, "late_steps": 0.5, "speedup_error": 0.01}
    job, gib = given.job, alternatives.gib(given.job)
    found = _alternatives(report(given, 1.1, faster=every))
    assert [each["flags"] for each in found["layouts"]] == ["--first", "--second"]
    assert found["layouts"][0] == gains | {
        **{"tp": 1, "cp": 1, "pp": 1, "vpp": 1, "dp": 1, "num_micro_batches": 4, "max_tokens": job.max_tokens},
        **{"gib": gib, "megatron": 1.0, "flags": "--first", "gain": 1.3},
    }
    assert found["recompute"] == {"flags": "", "gib": gib} | gains
    assert found["delay"] == {"flag": "--late", "num_micro_batches": 4} | gains
    assert found["other_flags"] == [{"flag": "--other"} | gains]
    told = [line.split(",")[0] for line in _faster(report(given, 1.1, faster=every))]
    assert told == [f"{how} on the same GPUs" for how in ("Without recomputation", "With --first")]
    nothing = report(given, 1.1, faster=[faster("recompute", "", 1.04)])
    assert not list(_faster(nothing)) and _alternatives(nothing)["delay"] is None


def test_a_run_that_offloads_activations_has_the_recomputation_that_fits():
    words = "--model llama2-7b --num-layers 4 --tensor-model-parallel-size 8 --num-gpus 8 --global-batch-size 4"
    words += " --mock-data --fine-grained-activation-offloading --seq-length"
    fits, large = (run(words, size) for size in (4 << 17, 6 << 17))
    assert fits.on_device().recompute is None
    flags = "--recompute-granularity selective --recompute-modules mlp"
    assert large.on_device().job().recompute.flags == flags
    assert f"wants {flags} to fit GPUs of 80 GiB" in large.screened.remarks[-1]


def test_other_layouts_have_the_tokens_of_the_run(data):
    """Where no flag says how many windows a step has, too, and none of the arguments of its stages."""
    words = JOB.replace(f"--global-batch-size {N} ", ""), "--data-path", data
    stages = "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --microbatch-group-size-per-vp-stage 2"
    found = setup(*words, f"--pipeline-model-parallel-size 2 --num-gpus 4 {stages.replace('vp-', 'virtual-pipeline-')}")
    layouts = [*alternatives.layouts(found.run, found.job, found.samples)]
    assert {way.job.global_batch_size for way in layouts} == {found.job.global_batch_size} == {4}
    assert {way.flags: (way.job.parallel, way.kind) for way in layouts} == {
        f"--context-parallel-size {cp} --pipeline-model-parallel-size {pp}{more}": (Parallel(**sizes), "layouts")
        for cp, pp, more, sizes in (
            (2, 1, "", {"cp": 2, "dp": 2}),
            (1, 1, "", {"dp": 4}),
            (2, 2, " --num-virtual-stages-per-pipeline-rank 2", {"cp": 2, "pp": 2, "vpp": 2}),
        )
    }


def test_memory_in_another_layout_is_what_its_weights_leave():
    """On 4 GPUs: of two stages, half of the layers and a matrix of the vocabulary; of one, all of them."""
    words = f"{JOB} --num-layers 4 --num-gpus 4 --wlb-memory-budget 8 --pipeline-model-parallel-size"
    found, other = run(words, 2), run(words, 1, "--context-parallel-size 2")
    layer, matrix = found.job().model.layer_weights, found.job().model.vocabulary_weights
    less = (4 * layer + 2 * matrix) * (6 + 12 / 4) - (2 * layer + matrix) * (6 + 12 / 2)
    budget_in = alternatives._budget_in
    assert budget_in(found, found.job(), other.without_memory()) == 8 * 2**30 - less
    assert budget_in(found.without_memory(), found.job(), other) is None
    assert budget_in(found, found.job(), run(words, 1, "--optimizer sgd")) is None
    crowded = run(f"{JOB} --vocab-size 1048576 --pipeline-model-parallel-size 2").job()
    first, last = (peak_bytes(crowded, stage) for stage in (0, 1))
    assert last > first and alternatives.gib(crowded) == (weight_bytes(crowded) + last) / 2**30


def test_other_ways_depend_on_what_the_run_leaves_open(data, monkeypatch):
    """A delay beside packing without one, and layouts and recomputation beside a number of micro-batches that is not
    given."""
    monkeypatch.setattr(alternatives, "TOLD", {"layouts": lambda *given: iter(("told",))})
    samples = setup(JOB, "--wlb-micro-batches 4 --data-path", data).samples

    def ways(*words, **how):
        found = run(JOB, *words)
        return [*alternatives.others(found, found.job(), samples, **how)]

    (delay,) = ways("--wlb-micro-batches 4")
    assert (delay.kind, delay.flags, delay.least) == ("delay", "--wlb-packing adaptive:30", alternatives.CLOSE)
    assert str(delay.job.packing) == "adaptive:30" and delay.words == "with --wlb-packing adaptive:30"
    assert ways("--wlb-micro-batches 4", may_wait=False) == ways("--wlb-packing megatron") == []
    (other,) = ways("--wlb-packing paper")
    assert (other.kind, other.flags, str(other.job.packing)) == ("other_flags", "--wlb-packing adaptive", "adaptive")
    assert ways("--wlb-packing adaptive:20") == ways(may_wait=False) == ["told"]


@pytest.mark.parametrize(
    ("again", "time", "told"), [("mlp", 0.9, True), ("mlp", 1.1, False), ("core_attn", 0.9, False)]
)
def test_recomputation_is_told_if_it_is_another_and_faster(again, time, told, monkeypatch):
    """Both times are of the work of the job without a limit of memory."""
    given = run(f"{JOB} --recompute-activations --wlb-memory-budget 8")
    free, way = given.without_memory().job(), Recompute(granularity="selective", modules=(again,))
    job, other = replace(given.job(), reorder=False), replace(given.job(), recompute=way)
    monkeypatch.setattr(alternatives, "recomputed", lambda *of, first_sample: [(other, time), (free, 0.1)])
    monkeypatch.setattr(alternatives, "time_per_work", lambda job, unit, *of: 1.0 if unit == free else 0.0)
    found = [*alternatives.recomputation(given, job, None)]
    assert found == told * [Alternative("recompute", way.flags, other)]
    assert not [*alternatives.recomputation(given.without_memory(), job, None)]


def test_megatron_has_its_best_micro_batch_size_in_other_layouts_too(tmp_path):
    write_index(tmp_path / "short.idx", np.random.default_rng(0).integers(2, 300, 3000))
    words = "--num-layers 4 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --swiglu --seq-length 1024"
    words += f" --global-batch-size 16 --wlb-micro-batches 16 --num-gpus 2 --split 1 --data-path {tmp_path}/short.idx"

    def there(size):
        """The speed-up of Megatron on two data-parallel ranks instead of two stages."""
        found, steps = setup(words, f"--pipeline-model-parallel-size 2 --micro-batch-size {size}"), Steps(2, 2)
        ours = found.with_wlb(found.job)
        alone, _ = at_its_best(found.without_wlb(), found.run.budget, steps)
        others = Others(found, compared(Schemes(found.of_run, alone, ours), steps), Ratio(1.0, 0.0), 1)
        return others._of_megatron(replace(found.job, parallel=Parallel(dp=2)))

    assert there(1) == there(2) == there(8) > 1.05


def test_other_layouts_are_those_of_the_same_gpus_in_chunks_of_a_layer():
    job = make_job(
        model=MODELS["llama2-7b"],
        context_length=4096,
        global_batch_size=16,
        parallel=Parallel(tp=8, cp=2, pp=4, vpp=2, dp=4),
    )
    assert alternatives.sizes(job) == [(2, 4, 8), (8, 1, 1), (2, 1, 1), (4, 4, 8), (8, 4, 8), (4, 2, 16)]
    assert (2, 4, 8) not in alternatives.sizes(replace(job, parallel=replace(job.parallel, vpp=8)))
    many = replace(job, global_batch_size=1 << 12, num_micro_batches=1 << 12)
    assert alternatives.sizes(many) == [(2, 4, 8), (2, 1, 1), (4, 4, 8), (4, 2, 16)]  # up to 2^14 shards
    assert alternatives.sizes(replace(job, parallel=Parallel(pp=3))) == [(3, 1, 1), (1, 1, 1)]
    ends = replace(job, model=replace(job.model, num_layers=30), parallel=Parallel(pp=2, split=EDGES))
    assert alternatives.sizes(ends) == [(1, 2, 16), (2, 1, 1), (1, 1, 1)]
    two, one = (alternatives.sizes(replace(job, parallel=replace(job.parallel, dp=dp))) for dp in (2, 1))
    assert (4, 4, 8) in two and (8, 4, 8) not in two and (4, 4, 8) not in one
    assert [alternatives.virtual_stages(layers, 4) for layers in (24, 28, 4, 126)] == [6, 7, 1, 1]

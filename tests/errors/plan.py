"""Errors of the settings and of planning."""

import functools
import json
from types import SimpleNamespace

import numpy as np

from megatron_wlb.config import WlbConfig
from megatron_wlb.plan import Layout, document_log, files, native, pipeline, plan_step, step
from megatron_wlb.plan.dataset import read_index, read_tokens
from megatron_wlb.plan.metrics import summarise
from megatron_wlb.plan.packer import Snapshot, make_packer
from megatron_wlb.plan.packing.adaptive_core import PythonAdaptiveCore
from megatron_wlb.plan.packing.ilp import IlpPolicy
from megatron_wlb.plan.packing.wlb import PythonWlbCore
from megatron_wlb.plan.sharding import shard
from megatron_wlb.plan.step import Planner
from megatron_wlb.plan.stream import DocumentStream
from megatron_wlb.plan.types import DOCUMENT
from megatron_wlb.plan.workload import FLOPS_PROFILE, load_profile
from tests.errors.case import At, Case, cause
from tests.plan.test_api import pack, stream
from tests.plan.test_dataset import write
from tests.plan.test_native import adaptive_settings, columns
from tests.plan.test_stream import source
from tests.plan.test_workload import profile

FLOPS = FLOPS_PROFILE.kernel(heads=2)
INTACT = {"lengths": [3, 1, 4], "boundaries": [0, 1, 2, 3]}


def dataset(**changes):
    return lambda at: read_index(write(at.folder, **(INTACT | changes)))


def cut_index(size):
    def call(at: At):
        prefix = write(at.folder, **INTACT)
        path = at.folder / "data.idx"
        path.write_bytes(path.read_bytes()[:size])
        read_index(prefix)

    return call


def planned(packer, first_step=0):
    layout = Layout(dp_size=1, dp_rank=0, crossover_tokens=30)
    return Planner(packer, layout, first_step=first_step, ahead=1).get(first_step)


def without_a_thread(at: At):
    at.patch.setattr(Planner, "_run", lambda self: None)
    at.patch.setattr(step, "_LOOK_SECONDS", 0.01)
    cause(lambda: planned(pack()))


def streamed(**changes):
    stream = DocumentStream([source(5)], seed=1, context_length=10)
    stream.load_state(stream.state() | changes)


def not_a_log(read):
    def call(at: At):
        (at.folder / "x.log").write_text("x")
        read(at.folder / "x.log")

    return call


def log_of(read, **replacements):
    """Reads a document log of two steps; replaced is what the second and the reader see."""

    def call(at: At):
        made, path = pack(), at.folder / "x.log"
        document_log.append(path, 0, made.next().packing)
        for name, value in replacements.items():
            at.patch.setattr(document_log, name, value)
        document_log.append(path, 1, made.next().packing)
        read(path)

    return call


def damaged_before_the_end(at: At):
    """A step, something else, and the beginning of another step."""
    path = at.folder / "x.log"
    document_log.append(path, 0, pack().next().packing)
    with path.open("ab") as file:
        file.write(b"damage" + document_log._BEGIN)
    document_log.mend(path)


def to_the_end(at: At):
    layout = Layout(dp_size=1, dp_rank=0, crossover_tokens=30)
    Planner(pack(stream(num_epochs=1)), layout, first_step=0, ahead=1).get(1000)


def of_no_dataset(at: At):
    rows = np.zeros(1, DOCUMENT)
    rows["document"] = 3
    document_log._check_datasets(rows, [np.ones(2)])


def folder_as_dataset(at: At):
    (at.folder / "data.idx").mkdir()
    read_tokens(str(at.folder / "data"))


def solved(x):
    """Equation 1 of two documents of 5 tokens in four windows of 10, by a solver that gives `x`."""

    def call(at: At):
        at.patch.setattr("scipy.optimize.milp", lambda **problem: SimpleNamespace(x=x, message="over"))
        policy = IlpPolicy(num_micro_batches=2, context_length=10, num_global_batches=1, time_limit_seconds=1.0)
        policy._solve(np.array([5]), np.array([2]), 4)

    return call


def profiled(**changes):
    def call(at: At):
        (at.folder / "mine.json").write_text(json.dumps(profile(**changes)))
        load_profile(str(at.folder / "mine.json"))

    return call


def of_profile(what):
    return f"…mine.json is not a megatron_wlb profile: …{what}…; give what `megatron-wlb profile` wrote"


def without_native(call):
    def patched(at: At):
        at.patch.setattr(native, "AVAILABLE", False)
        call()

    return patched


max_tokens_for = functools.partial(WlbConfig.max_tokens_for, context_length=1000, unit=16)

CASES: list[Case] = [
    # config.py
    ("--wlb-packing is <'best'>; choose one of <original, …>", lambda at: WlbConfig(packing="best")),
    (
        "--wlb-outlier-thresholds is <'9,3'>; give lengths of at least <1 in increasing order>, such as 32768,65536",
        lambda at: WlbConfig(outlier_thresholds=(9, 3)),
    ),
    ("--wlb-crossover is <0>; it must be from <1 to 34359738368>", lambda at: WlbConfig(crossover=0)),
    ("--wlb-balance-tolerance is <2>; it must be from <0 to 1>", lambda at: WlbConfig(balance_tolerance=2)),
    (
        "--wlb-memory-budget is <80000.0>; give GiB of a GPU, more than <0> and at most <1024>",
        lambda at: WlbConfig(memory_budget=80e3),
    ),
    (
        "--wlb-max-tokens is <67108865>; work is exact up to <67108864> tokens, give at most that",
        lambda at: WlbConfig(max_tokens=67108865),
    ),
    (
        "micro-batches of at most <992> tokens fit into memory, less than --seq-length <1000>; recompute activations, "
        "use more pipeline, context or tensor parallelism, or raise --wlb-memory-budget",
        lambda at: max_tokens_for(WlbConfig(), fitting=992),
    ),
    (
        "--wlb-max-tokens <auto> needs to know the memory: give --wlb-memory-budget in GiB",
        lambda at: max_tokens_for(WlbConfig(max_tokens="auto")),
    ),
    (
        "micro-batches of <1264> tokens (S_max) need more memory for activations than there is; give --wlb-max-tokens "
        "<1200> or auto, recompute activations, or raise --wlb-memory-budget",
        lambda at: max_tokens_for(WlbConfig(), fitting=1200),
    ),
    (
        "--wlb-max-tokens <999> is under --seq-length <1000>: a document of a full window would fit nowhere; give at "
        "least <1000>",
        lambda at: max_tokens_for(WlbConfig(max_tokens=999)),
    ),
    (
        "--wlb-max-tokens <1001> cannot be shared by the context- and sequence-parallel ranks; give a multiple of <16>"
        ", such as 1008",
        lambda at: max_tokens_for(WlbConfig(max_tokens=1001)),
    ),
    # plan/dataset.py
    (
        "dataset file <…none.idx> does not exist; give --data-path the prefix of a .bin/.idx pair",
        lambda at: read_index(str(at.folder / "none")),
    ),
    (
        "dataset file <…none.idx> does not exist; give --data-path the prefix of a .bin/.idx pair",
        lambda at: read_tokens(str(at.folder / "none")),
    ),
    (
        "dataset file <…data.idx> is a folder, pipe or device; give --data-path files on a disk",
        folder_as_dataset,
    ),
    (
        "…data.bin has <31> bytes, …data.idx describes <32>: the file is truncated, build it again",
        dataset(bin_bytes=31),
    ),
    (
        "<…data.idx> has a document whose sequences do not follow each other in …data.bin; build it again",
        dataset(boundaries=[0, 2, 3], pointers=[0, 16, 12]),
    ),
    (
        "<…data.idx> holds no document; build it again from a non-empty corpus",
        dataset(lengths=[], boundaries=[]),
    ),
    (
        "…data.idx has <9> bytes, its header alone needs <34>: the file is truncated, build it again",
        cut_index(9),
    ),
    (
        "…data.idx has <40> bytes, its header announces <102>: the file is truncated, build it again",
        cut_index(40),
    ),
    (
        r"…data.idx is not a Megatron .idx file: it begins with <b'NUMPYIDX\x00'>, not <b'MMIDIDX\x00\x00'>; give one "
        "that preprocess_data.py wrote",
        dataset(magic=b"NUMPYIDX\x00"),
    ),
    (
        "…data.idx has version <2> and dtype code 4; supported: version <1>, codes <1 to 8>, build it again",
        dataset(version=2),
    ),
    (
        "<…data.idx> holds a negative length or pointer: the file is damaged, build it again",
        dataset(pointers=[0, -12, 16]),
    ),
    (
        "<…data.idx> has document boundaries that do not cover its <3> sequences in order; build it again",
        dataset(boundaries=[0, 1, 2]),
    ),
    # plan/step.py
    (
        "dp_rank is <2>; of <2> data-parallel ranks it must be <0 to dp_size - 1>",
        lambda at: Layout(dp_size=2, dp_rank=2, crossover_tokens=30),
    ),
    (
        "unit_tokens is <2>; 2 context-parallel ranks hold two chunks each, give a multiple of <4>",
        lambda at: Layout(dp_size=1, dp_rank=0, cp_size=2, unit_tokens=2, crossover_tokens=30),
    ),
    (
        "<4> micro-batches a step cannot be shared by <3> data-parallel ranks; choose a multiple of <3>",
        lambda at: plan_step(pack(), Layout(dp_size=3, dp_rank=0, crossover_tokens=30)),
    ),
    ("planning failed before step <0>; see its cause above", lambda at: planned(None)),
    (
        "the data ends before step <1000>: after … steps every document has been trained; train fewer steps, or more "
        "epochs",
        to_the_end,
    ),
    (
        "the packer is at step <0>, training at step <5>; load the state of that step",
        lambda at: cause(lambda: planned(pack(), first_step=5)),
    ),
    (
        "the planner's thread has ended at step <0>, or this process was forked since; read plans in the process that "
        "trains",
        without_a_thread,
    ),
    # plan/packer.py
    ("num_micro_batches is <0>; it must be at least <1>", lambda at: pack(num_micro_batches=0)),
    (
        "max_tokens <99> is under the context length <100>: a document of a full window would fit nowhere; give at "
        "least <100>",
        lambda at: pack(max_tokens=99),
    ),
    (
        "the work of <4> micro-batches of 125 tokens at a crossover of 1152921504606846976 overflows <64 bits>; lower "
        "one of them",
        lambda at: pack(crossover_tokens=1 << 60),
    ),
    (
        "use_native is <True>, but the native core was not built; reinstall with a C++ compiler",
        without_native(lambda: pack(use_native=True)),
    ),
    # plan/metrics.py, document_log.py, stream.py
    (
        "nothing to summarise: <0> steps, of which 0 at either end are left out; give more steps",
        lambda at: summarise([], num_waiting=0),
    ),
    (
        "<…x.log> is not a document log: it does not begin with a whole step; name another file",
        not_a_log(document_log.mend),
    ),
    (
        "…x.log is not a document log, or it is damaged at byte <0>; restore it",
        not_a_log(document_log.read),
    ),
    (
        "<…> is not a document log but a folder, pipe or device; name another file",
        lambda at: document_log.mend(at.folder),
    ),
    (
        "…x.log is damaged at byte <…>, before its last step; restore it, or name another file",
        damaged_before_the_end,
    ),
    (
        "…x.log unpacks to over a quarter of <4> bytes of memory; audit it on a larger one",
        log_of(document_log.read, _memory_bytes=lambda: 4),
    ),
    (
        "step <1> has … documents, … bytes where --wlb-document-log takes <10>; train without it",
        log_of(document_log.read, MAX_STEP_BYTES=10),
    ),
    (
        "document <3> of dataset 0 was trained or waits, and 1 datasets have <[2]> documents; give "
        "--data-path the datasets of the run",
        of_no_dataset,
    ),
    (
        "[Errno …] cannot append <1> bytes to --wlb-log …: …; free space there, or name a file that can be written",
        lambda at: files.append(at.folder, b"x", "--wlb-log"),
    ),
    (
        "dataset <1> of the blend is empty: it has no document of at least <2 tokens>; leave it out",
        lambda at: DocumentStream([source(5), source(0, 0)], seed=0, context_length=10),
    ),
    (
        "dataset 0 of the blend has a document of <-1> pairs; give its tokens - 1, which must be <at least 0>",
        lambda at: DocumentStream([source(5, -1)], seed=0, context_length=10),
    ),
    (
        "dataset 0 of the blend has weight <0.0>; weights must be <positive>",
        lambda at: DocumentStream([source(5, weight=0.0)], seed=0, context_length=10),
    ),
    ("the blend is <empty>; give at least <one> dataset", lambda at: DocumentStream([], seed=0, context_length=10)),
    (
        "the state has <2> datasets, this blend has <1>; resume with as many",
        lambda at: streamed(drawn=[0, 0]),
    ),
    (
        "the state was saved with seed <2>, this run has <1>; resume with the same",
        lambda at: streamed(seed=2),
    ),
    (
        "the state is damaged: drawn, given and tokens count 1, <0> and 1 datasets, and the document begun has 0 parts"
        ", not <0 or 3>; restore it",
        lambda at: streamed(given=[]),
    ),
    (
        "max_tokens is <134217728>; work is exact up to <67108864> tokens, give at most that",
        lambda at: make_packer(
            DocumentStream([source(5)], seed=0, context_length=10),
            num_micro_batches=1,
            crossover_tokens=1,
            max_tokens=1 << 27,
        ),
    ),
    # plan/packing/, plan/sharding/, plan/workload.py, plan/pipeline.py
    (
        "num_global_batches is <0>; it must be <at least 1>",
        lambda at: IlpPolicy(num_micro_batches=2, context_length=10, num_global_batches=0, time_limit_seconds=1.0),
    ),
    (
        "a document of <11> tokens exceeds max_tokens <10>; raise it",
        lambda at: PythonWlbCore(2, 10, []).step(*columns([11])),
    ),
    (
        "a document of <101> tokens exceeds max_tokens <100>; raise it",
        lambda at: PythonAdaptiveCore(adaptive_settings()).add(*columns([101]), np.zeros(1, np.int64)),
    ),
    (
        "HiGHS found no packing of <2> documents into 4 windows within <1.0 s> (over); raise the time limit or pack "
        "fewer global batches",
        solved(None),
    ),
    (
        "HiGHS' packing of <2> documents breaks a window of <10> tokens or loses a document by its tolerance; choose "
        "another policy",
        solved(np.zeros(6)),
    ),
    (
        "unknown packing policy <'best'>; choose one of <original, …>",
        lambda at: pack(policy="best"),
    ),
    (
        "the policy is <'mine'>, whose state could not be loaded; choose one of <original, …>, or tell plan/state.py "
        "of it",
        lambda at: Snapshot(header={"policy": "mine"}, waiting={}, original={}).state(),
    ),
    (
        "unknown mode <'fast'> of adaptive packing; choose one of <constant-tokens, low-displacement>",
        lambda at: pack(mode="fast"),
    ),
    (
        "max_delay_steps is <11>; adaptive packing can guarantee <12> or more, give at least that",
        lambda at: pack(max_delay_steps=11),
    ),
    ("balance_tolerance is <2>; it must be from <0 to 1>", lambda at: pack(balance_tolerance=2)),
    (
        "unknown sharding <'best'>; choose one of <per-sequence, …>",
        lambda at: shard(np.array([4]), 2, "best", FLOPS, use_native=False),
    ),
    (
        "no profile <'a100'>: give a JSON file or one of the shipped profiles <flops, …>",
        lambda at: load_profile("a100"),
    ),
    (
        of_profile("its kernel times are <(-1, 0.5, 0.25)>; they must be <finite, at least 0, and not all 0>"),
        profiled(forward={"launch": -1}),
    ),
    (
        of_profile("us_per_mib is <{'gather': -1}>; it must be <finite and at least 0>"),
        profiled(us_per_mib={"gather": -1}),
    ),
    (
        of_profile(
            "linear_tflops is <{'forward': 1, 'backward': 0}>; it must be <finite and over 0>, and go with a tile over "
            "0"
        ),
        profiled(linear_tflops={"forward": 1, "backward": 0}),
    ),
    (of_profile("crossover_tokens is <0>; it must be <an integer of at least 1>"), profiled(crossover_tokens=0)),
    (of_profile("tile_rows is <96>; it must be <a power of two up to 65536>"), profiled(kernel={"tile_rows": 96})),
    (
        "a micro-batch has work <-1>; it must be <0 to …> for predicted times to fit 64 bits; lower S_max or the "
        "crossover",
        lambda at: pipeline.order(np.array([-1, 1]), 2, 1, use_native=False),
    ),
]

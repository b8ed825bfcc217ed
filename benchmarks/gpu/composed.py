"""Steps of a job of many GPUs, composed of passes measured on one: Megatron's own, and with `--wlb`.

    python -m benchmarks.gpu.composed NAME [--script CHECKOUT/pretrain_gpt.py] [--check]
    python -m benchmarks.gpu.composed NAME --script ... --world-size 64 --ranks 16 24 -- FLAGS

Megatron's `--fake-process-group` trains as one rank of a job: its kernels run at their real size, and all communication
returns at once. Each rank trains alone, one after the other. The passes of its stage, on the slowest of the measured
context-parallel ranks, then go through the graph of the pipeline (`simulate.step`), a stage without a measured rank
taking those of the nearest with as many layers. All communication is added by the network model, on both sides:
what it adds to predicted passes, gradients, parameters, and the optimizer. Both sides train the same windows.

Rows are composed of measured passes, not measured. Beside them stands the prediction of the same steps. Memory that
would arrive from other ranks is random, so losses mean nothing; experts, whose tokens come from there, are refused.
"""

import argparse
import functools
import itertools
import json
import pickle
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import results
from benchmarks.gpu import machine, script
from benchmarks.lengths import f2
from benchmarks.results import Goal, Row, at_least, at_most
from benchmarks.training_cpu import VOCABULARY, write_dataset
from megatron_rehearsal.world import answer_for_others
from megatron_wlb.cli.analyze.report import ratio_of
from megatron_wlb.describe import tiles
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.hardware.network import Collective
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.job import Job
from megatron_wlb.packing.megatron import without_wlb
from megatron_wlb.sharding.select import shard
from megatron_wlb.simulate.passes import Passes, pass_times
from megatron_wlb.simulate.step import simulate_step, step_of

WARM = 1
"""Steps that are left out: cuDNN plans in the first."""
FAKE = "--fake-process-group --no-check-for-nan-in-loss-and-grad"
COMMON = f"""--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer
--micro-batch-size 1 --calculate-per-token-loss --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --split 100,0,0
--eval-iters 0 --eval-interval 1000 --lr 1e-4 --lr-decay-style constant --log-interval 1 --log-memory-interval 1"""
AT_128K = f"{COMMON} --bf16 --seq-length 131072 --max-position-embeddings 131072 --global-batch-size 16"
AT_128K += " --tensor-model-parallel-size 8 --sequence-parallel --make-vocab-size-divisible-by 4000"
RING = "--cp-comm-type p2p"


class Case(NamedTuple):
    flags: str
    world: int
    ranks: dict[str, tuple[int, ...]]
    """Those measured, by way; tensor-parallel ranks are alike."""
    wlb: str
    """What --wlb would choose by the memory of an 80 GiB device."""
    steps: int
    goal: float
    """Tokens a second over Megatron's."""


CASES = {
    "7b": Case(
        f"""{AT_128K} {RING} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
        --context-parallel-size 2 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 8
        --tp-comm-overlap""",
        64,
        {"megatron": (16, 24, 48), "wlb": (16, 24, 48)},
        "--wlb-micro-batches 16 --wlb-max-tokens 131072",
        3,
        1.17,
    ),
    "8b": Case(
        f"""{AT_128K} {RING} --num-layers 8 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
        --group-query-attention --num-query-groups 8 --rotary-base 500000 --context-parallel-size 8
        --tp-comm-overlap""",
        64,
        {"megatron": (0,), "wlb": (0, 24, 56)},
        "--wlb-micro-batches 4 --wlb-max-tokens 655360",
        2,
        1.10,
    ),
    "rehearsed": Case(
        f"""{COMMON} --num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 256
        --max-position-embeddings 256 --global-batch-size 4 --pipeline-model-parallel-size 2
        --num-virtual-stages-per-pipeline-rank 2""",
        2,
        {"megatron": (0,), "wlb": (0,)},
        "--wlb-micro-batches 4 --wlb-profile h100-cudnn",
        3,
        0.0,
    ),
}
"""`7b` is that of scripts/slurm/7b.sbatch with four windows a stage: ranks 16 and 24 are stage 1, 48 is stage 3, which
has the output layer. `8b` has 8 of its 32 layers, which are alike, and a quarter of its vocabulary; M and S_max
are those of the whole job."""


def watch(file: Path) -> None:
    """Write a line a step: milliseconds of passes in the order in which they ran, and with --wlb the documents."""
    from megatron.core.pipeline_parallel import p2p_communication, schedules
    from megatron.training import training

    from megatron_wlb.plan import step as planning

    answer_for_others()
    on_gpu, spans, plans = torch.cuda.is_available(), defaultdict[str, list[Any]](list), dict[int, Row]()

    def mark() -> Any:
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = mark()
            result = function(*args, **kwargs)
            spans[name].append((begin, mark()))
            return result

        return call

    def milliseconds(begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) if on_gpu else 1e3 * (end - begin)

    train_step, plan_packed, setup = training.train_step, planning.plan_packed, training.setup_model_and_optimizer
    communicate = p2p_communication.P2PCommunicator._communicate

    def trained(*args: Any, **kwargs: Any) -> Any:
        spans.clear()
        result = timed(train_step, "step")(*args, **kwargs)
        if on_gpu:
            torch.cuda.synchronize()
        row = {name: [milliseconds(*span) for span in of] for name, of in spans.items()}
        row |= plans.pop(lines[0], {})
        row |= {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if on_gpu else {}
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")
        lines[0] += 1
        return result

    def planned(packed: Any, job: Job, dp_rank: int) -> Any:
        plan = plan_packed(packed, job, dp_rank)
        file.with_suffix(".job").write_bytes(pickle.dumps(job))
        sample = packed.drawn["index"] // job.context_length
        windows = np.split(packed.drawn["length"], np.flatnonzero(np.diff(sample)) + 1)
        plans[plan.step] = {
            "lengths": [m.documents["length"].tolist() for m in plan.micro_batches],
            "windows": [each.tolist() for each in windows],
        }
        return plan

    def received(*args: Any, **kwargs: Any) -> Any:
        result = communicate(*args, **kwargs)
        for tensor in result[:2]:
            if tensor is not None:
                tensor.data.normal_()  # zeros, on which products are faster, are not what arrives
        return result

    def prepared(*args: Any, **kwargs: Any) -> Any:
        if on_gpu:  # memory that was never written holds zeros as well
            torch.empty(int(0.3 * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device="cuda").random_(60, 65)
            torch.cuda.reset_peak_memory_stats()
        return setup(*args, **kwargs)

    lines = [0]
    file.unlink(missing_ok=True)
    schedules.forward_step = timed(schedules.forward_step, "forward")
    schedules.backward_step = timed(schedules.backward_step, "backward")
    training.train_step, planning.plan_packed = functools.wraps(train_step)(trained), planned
    training.setup_model_and_optimizer = functools.wraps(setup)(prepared)
    p2p_communication.P2PCommunicator._communicate = functools.wraps(communicate)(received)


Side = dict[int, list[Row]]
"""Steps of measured ranks."""


def read(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()][WARM:]


def placed(times: Sequence[float], job: Job, count: int, *, backward: bool) -> np.ndarray:
    """Return times of a stage's passes in the order in which they ran as float64 [chunks, M]."""
    schedule = job.schedule(count)
    if len(times) != schedule.num_chunks * count:
        raise ValueError(
            f"{len(times)} passes were measured of {count} micro-batches in {schedule.num_chunks} chunks; measure the "
            "job that is composed"
        )
    micro_batch, chunk = schedule.table().T
    found = np.empty((schedule.num_chunks, count))
    found[schedule.num_chunks - 1 - chunk if backward else chunk, micro_batch] = times
    return found


def without_communication(job: Job) -> Job:
    """Return the job on a network that takes no time, as a rank of a fake group runs."""
    network = job.profile.network
    names = ("all_gather", "reduce_scatter", "all_reduce")
    at_once = {name: Collective((1, 2), (0.0, 0.0), (1e9, 1e9)) for name in names}
    network = replace(network, **at_once, link_gb_per_s=1e9, hop_us=0.0)
    return replace(job, tp_overlap=0.0, tp_tile_rows=0, profile=replace(job.profile, network=network))


def composed(job: Job, side: Side, documents: Sequence[Sequence[Sequence[Sequence[int]]]]) -> tuple[float, float]:
    """Return milliseconds of a step, composed and predicted.

    `side` has one step of each rank; `documents` the lengths of every micro-batch of every data-parallel rank.
    """
    count = len(documents[0])
    job = job.of_step(count * job.parallel.dp, sum(sum(map(sum, each)) for each in documents))
    ranks, shards, passes = {rank: job.parallel.place(rank) for rank in side}, [], list[Passes]()
    for dp, micro_batches in enumerate(documents):
        shards.append([shard(np.array(each, np.int64), job) for each in micro_batches])
        predicted, alone = pass_times(job, shards[-1]), pass_times(without_communication(job), shards[-1])
        times = []
        for name in ("forward", "backward"):
            added = getattr(predicted, name) - getattr(alone, name)
            of_stage = defaultdict[int, list[np.ndarray]](list)
            for rank, place in ranks.items():
                if place.dp == dp:
                    measured = placed(side[rank][0][name], job, count, backward=name == "backward")
                    of_stage[place.stage].append(1e3 * measured)
            if not of_stage:
                raise ValueError(f"no rank of data-parallel rank {dp} was measured; give one by --ranks")
            for stage in range(job.parallel.pp):
                added[stage] += np.max(of_stage[_stand_in(stage, [*of_stage], job)], axis=0)
            times.append(added)
        passes.append(replace(predicted, forward=times[0], backward=times[1]))
    return step_of(job, shards, passes).time / 1e3, simulate_step(job, shards).time / 1e3


def _stand_in(stage: int, measured: Sequence[int], job: Job) -> int:
    """Return the measured stage whose passes are those of `stage`: itself, or the nearest without the output layer."""
    layers, last = job.layers().sum(axis=1), job.parallel.pp - 1
    return min(measured, key=lambda s: (s != stage, s == last, layers[s] != layers[stage], abs(s - stage)))


def rows_of(jobs: dict[str, Job], sides: dict[str, Side]) -> list[Row]:
    """A row for each way: milliseconds of its steps, composed and predicted, and what its ranks took."""
    steps = min(len(of_rank) for side in sides.values() for of_rank in side.values())
    parallel = jobs["wlb"].parallel
    dp, by_rank = parallel.dp, {parallel.place(rank).dp: of_rank for rank, of_rank in sides["wlb"].items()}
    rows = []
    for way, side in sides.items():
        found = []
        for i in range(steps):
            if way == "wlb":
                documents = [by_rank[rank][i]["lengths"] for rank in range(dp)]
            else:
                documents = [by_rank[0][i]["windows"][rank::dp] for rank in range(dp)]
            found.append(composed(jobs[way], {rank: [of_rank[i]] for rank, of_rank in side.items()}, documents))
        row: Row = {"way": way, "micro_batches": len(documents[0]) * dp, "ranks": [*side]}
        row["composed_ms"], row["predicted_ms"] = (list(each) for each in zip(*found, strict=True))
        row["over_predicted"] = sum(row["composed_ms"]) / sum(row["predicted_ms"])
        row["rank_ms"] = {rank: [step["step"][0] for step in of_rank] for rank, of_rank in side.items()}
        row["peak_gib"] = max(step.get("peak_gib", 0.0) for of_rank in side.values() for step in of_rank)
        rows.append(row)
    return rows


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("name", help=f"one of {', '.join(CASES)}, or of your own job")
    parser.add_argument("--script", type=Path, default=script.STAND_IN, help="pretrain_gpt.py of a checkout")
    parser.add_argument("--world-size", type=int, help="of your own job")
    parser.add_argument("--ranks", type=int, nargs="+", help="those measured, of your own job")
    parser.add_argument("--with-wlb", default="", help="of the side with --wlb, of your own job")
    parser.add_argument("--steps", type=int, help="default: 3, of which the first is left out")
    parser.add_argument("--profile", help="by which steps are predicted and communication is added; default: the job's")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end], argparse.Namespace(flags=sys.argv[end + 1 :]))
    case = CASES.get(args.name) or own(args)
    with tempfile.TemporaryDirectory() as temporary:
        folder, goals = (
            (args.output / "work" / f"composed_{args.name}" if args.output else Path(temporary)),
            list[Goal](),
        )
        sides: dict[str, Side] = {way: {} for way in case.ranks}
        for run in script.trained(runs_of(case, args, folder)):
            way, (rank,) = run.name.split(",")[0], run.ranks
            if run.failed:
                sys.exit(f"{run.name} failed:\n{run.text()[-6000:]}")
            sides[way][rank] = read(run.file(rank))
            print(f"{run.name}: {[round(step['step'][0], 1) for step in sides[way][rank]]} ms a step", flush=True)
            if not sides["wlb"]:
                continue
            job = replaced(pickle.loads(next(folder.glob("wlb*.job")).read_bytes()), case, args.profile)
            found = [{job.parallel.place(rank).dp for rank in side} for side in sides.values()]
            if all(len(ranks) == job.parallel.dp for ranks in found):  # after every rank, in case that the machine goes
                jobs = {"megatron": without_wlb(job), "wlb": job}
                goals = written(args, case, job, rows_of(jobs, sides))
    if not goals:
        sys.exit(
            f"--ranks {args.ranks} are of {len(found[0])} of {job.parallel.dp} data-parallel ranks; give one of each"
        )
    results.conclude(goals, args.check)
    ratio, predicted = (goal["value"] for goal in goals[:2])
    print(f"{args.name}: {ratio:.3f} over Megatron, composed; {predicted:.3f} predicted")


def replaced(job: Job, case: Case, profile: str | None) -> Job:
    """The job with another profile, and with the overlap of tensor parallelism that single ranks cannot run."""
    if profile:
        job = replace(job, profile=load_profile(profile))
    if "--tp-comm-overlap" not in case.flags.split():
        return job
    return tiles.switched_on(MegatronArguments(seq_length=job.context_length), job) or job


def written(args: argparse.Namespace, case: Case, job: Job, rows: list[Row]) -> list[Goal]:
    """Write the result file; return the goals, of which the first is the speed-up."""
    (ratio, error), (predicted, _) = (
        ratio_of(*(np.array(row[name]) for row in rows)) for name in ("composed_ms", "predicted_ms")
    )
    rows[1] |= {"over_megatron": ratio, "error": error}
    goals = [
        at_least(f"{args.name}: tokens a second over Megatron, composed", ratio, case.goal),
        at_least(f"{args.name}: the same, predicted", predicted, case.goal),
    ]
    for row in rows:
        off = abs(row["over_predicted"] - 1)
        goals.append(at_most(f"{args.name}, {row['way']}: composed over predicted steps, off", off, 0.05))
    gpu = machine.gpu()
    settings = {"command": sys.argv[1:], "case": case._asdict(), "profile": job.profile.name}
    settings |= {"cuda": torch.version.cuda, "communication, optimizer": "predicted"}
    if args.output or gpu:
        results.write("composed", settings=settings, rows=rows, goals=goals, **machine.where(args, gpu, args.name))
    return goals


def own(args: argparse.Namespace) -> Case:
    """The case of a user's job. Raises SystemExit for what cannot be composed."""
    if not (args.flags and args.world_size and args.ranks):
        sys.exit(
            f"{args.name} is none of {', '.join(CASES)}; give --world-size, --ranks, and the job's flags behind --"
        )
    if "--num-experts" in args.flags:
        sys.exit("--num-experts: tokens of other ranks do not come to a rank alone; compose a dense model")
    ranks = dict.fromkeys(("megatron", "wlb"), tuple(args.ranks))
    return Case(" ".join(args.flags), args.world_size, ranks, args.with_wlb, args.steps or 3, 1.0)


def runs_of(case: Case, args: argparse.Namespace, folder: Path) -> list[script.Run]:
    """The ranks of both sides, the middle ones first."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = args.steps or case.steps
    flags = [word for word in case.flags.split() if word != "--tp-comm-overlap"]  # user buffers want real ranks
    given = dict(itertools.pairwise(flags))
    if "--data-path" not in given:
        cp, window = int(given.get("--context-parallel-size", 1)), int(given["--seq-length"])
        lengths = f2(20 + 2 * steps * int(given["--global-batch-size"]) * window // 5000, 0, window)
        # TransformerEngine's ring wants whole chunks of every document.
        flags += ["--data-path", write_dataset(folder / "data", np.maximum(1, lengths // (2 * cp)) * 2 * cp)]
    flags += [*FAKE.split(), "--train-iters", str(steps)]
    flags += (script.ON_GPU if torch.cuda.is_available() else script.ON_CPU).split()
    return [
        script.Run(
            name=f"{way}, {rank}",
            folder=folder,
            script=args.script,
            flags=[*flags, *(["--wlb", *case.wlb.split()] if way == "wlb" else [])],
            watcher="composed",
            ranks=(rank,),
            world=case.world,
        )
        for i in range(max(map(len, case.ranks.values())))
        for way, ranks in case.ranks.items()
        for rank in ranks[i : i + 1]
    ]


if __name__ == "__main__":
    main()

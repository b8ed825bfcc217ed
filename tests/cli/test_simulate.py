"""Plan files on simulated jobs: planned as in training, timed by the simulator, and refused where they are broken."""

import io
import json
import re

import numpy as np
import pytest
from megatron_wlb.cli.job import layout_of
from megatron_wlb.plan.workload import document_work

from megatron_wlb.cli.main import main
from megatron_wlb.plan import pipeline, sharding
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.packing import make_policy
from megatron_wlb.plan.step import Layout, plan_step, shard_step
from megatron_wlb.plan.stream import DocumentStream, Source
from megatron_wlb.simulate import MODELS, Job, balanced_time, simulate_step

N, C = 8, 4096
LAYOUT = "--tensor-model-parallel-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 2 --num-gpus 16"
FLAGS = f"--model llama2-7b {LAYOUT} --num-virtual-stages-per-pipeline-rank 2".split()
JOB = Job(model=MODELS["llama2-7b"], tp=2, cp=2, pp=2, vpp=2, dp=2, cp_head_groups=2)
HEADER = {
    "format": "megatron-wlb-plan",
    "version": 1,
    "policy": "wlb",
    "micro_batches": 2,
    "context_length": 100,
    "max_tokens": 150,
    "crossover": 50,
    "documents": 9,
}
STEP = {"step": 0, "micro_batches": [[[0, 0, 100], [1, 0, 20]], [[2, 0, 90]]]}
SUMMARY = {"summary": {}, "waiting": []}


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    lengths = np.random.default_rng(5).lognormal(6, 1.2, 800).astype(int).clip(2, C).tolist()
    (folder / "lengths.json").write_text(json.dumps(lengths))
    flags = f"--global-batch-size {N} --seq-length {C} --wlb-max-tokens 5120 --wlb-packing adaptive".split()
    out = folder / "plan.jsonl"
    assert main(["plan", str(folder / "lengths.json"), *flags, "--wlb-crossover", "50000", "--output", str(out)]) == 0
    return out


def simulated(plan_file, tmp_path, *flags):
    out = tmp_path / "times.json"
    assert main(["simulate", str(plan_file), *flags, "--json", str(out)]) == 0
    return json.loads(out.read_text())


def write(path, *entries):
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries))
    return path


@pytest.mark.parametrize("policy", ["original", "adaptive"])
def test_steps_are_placed_and_sharded_as_in_training(policy):
    """What Packer and plan_step give every rank of a run is what its lengths alone give here."""
    lengths = np.random.default_rng(1).lognormal(6, 1.2, 200).astype(np.int64).clip(2, C)
    crossover, kernel = 50_000, JOB.hardware.attention.kernel(heads=16, row_bytes=2 * 16 * 128 * 2, head_groups=2)

    def steps(rank):
        stream = DocumentStream([Source(pairs=lengths)], seed=0, context_length=C, shuffle=False, num_epochs=1)
        data = {"num_micro_batches": N, "context_length": C, "max_tokens": 5120, "crossover_tokens": crossover}
        made = make_policy(policy, **data, outlier_thresholds=(1024, 2048), use_native=False)
        packer = Packer(
            stream, made, num_micro_batches=N, context_length=C, fingerprint="", policy_name=policy, use_native=False
        )
        layout = Layout(
            dp_size=2,
            dp_rank=rank,
            cp_size=2,
            pp_size=2,
            vp_size=2,
            unit_tokens=4,
            cp_sharding="adaptive",
            kernel=kernel,
            crossover_tokens=crossover,
            balance=policy != "original",
            use_native=False,
        )
        return [plan_step(packer, layout) for _ in range(3)]

    layout = layout_of(
        JOB, unit_tokens=4, crossover_tokens=crossover, cp_sharding="adaptive", balance=policy != "original"
    )
    for trained in zip(steps(0), steps(1), strict=True):
        packing = trained[0].packing
        micro_batches = [packing.micro_batch(i)["length"] for i in range(N)]
        for rank, plan in zip(trained, shard_step(micro_batches, layout), strict=True):
            assert len(rank.micro_batches) == len(plan) == N // 2
            for ours, theirs in zip(plan, rank.micro_batches, strict=True):
                assert ours.strategy == theirs.shards.strategy
                np.testing.assert_array_equal(ours.lengths, theirs.shards.lengths)
                for a, b in zip(ours.shards, theirs.shards.shards, strict=True):
                    assert all(np.array_equal(x, y) for x, y in zip(a.colours, b.colours, strict=True))


def test_times_are_those_of_the_simulator(plan_file, tmp_path):
    result = simulated(plan_file, tmp_path, *FLAGS)
    entries = [json.loads(line) for line in plan_file.read_text().splitlines()][1:-1]
    assert [e["step"] for e in result["steps"]] == [e["step"] for e in entries]
    kernel = JOB.hardware.attention.kernel(heads=16, row_bytes=2 * 16 * 128 * 2, head_groups=2)
    for given, got in list(zip(entries, result["steps"], strict=True))[:3]:
        lengths = [np.array([d[2] for d in m], np.int64) for m in given["micro_batches"]]
        work = np.array([document_work(each, 50_000).sum() for each in lengths])
        plans = []
        for rank in pipeline.place(work, 2, balance=True, num_stages=2, num_chunks=2):
            plans.append([])
            for i in rank[pipeline.order(work[rank], 2, 2)]:
                padded = [*lengths[i], *([-lengths[i].sum() % 4] if lengths[i].sum() % 4 else [])]
                in_order = sharding.shard(np.array(padded), 2, "adaptive", kernel, use_native=False)
                mirrored = lengths[i][sharding.mirrored_order(lengths[i])]
                padded[: len(mirrored)] = mirrored
                other = sharding.shard(np.array(padded), 2, "per-sequence", kernel, use_native=False)
                plans[-1].append(min(in_order, other, key=lambda p: p.time))
        step = simulate_step(JOB, plans)
        assert got["time_us"] == pytest.approx(step.time)
        assert got["limit_us"] == pytest.approx(balanced_time(step))
        assert got["tokens"] == sum(map(sum, lengths))
        assert got["imbalance"] == pytest.approx(work.max() / work.mean())
        assert sum(got["breakdown_us"].values()) == pytest.approx(step.time)
        assert 1 <= got["cp_imbalance"] < 2


def test_what_is_printed_and_written(plan_file, tmp_path, capsys):
    result = simulated(plan_file, tmp_path, *FLAGS)
    out = capsys.readouterr().out
    mean = result["mean"]
    assert re.search(rf"^ step +{mean['time_us'] / 1e3:.2f} +100.0%", out, re.M)
    assert re.search(rf"^ limit: all alike +{mean['limit_us'] / 1e3:.2f} +{mean['of_limit']:.1%}", out, re.M)
    assert f"on 16 GPUs, simulated with profile h100-fa2: {mean['of_limit']:.1%} of the limit's speed" in out
    assert result["layout"] == {"tp": 2, "cp": 2, "pp": 2, "vpp": 2, "dp": 2} | {
        "group_size": None,
        "edge_layers": 0,
        "recompute": False,
    }
    assert result["model"]["num_layers"] == 32
    edge = len(result["steps"]) // 10
    assert result["left_out"] == edge > 0
    assert mean["time_us"] == pytest.approx(np.mean([e["time_us"] for e in result["steps"][edge:-edge]]))
    slowest = max(result["steps"][edge:-edge], key=lambda e: e["time_us"])
    assert f"step {slowest['step']}, the slowest, ms" in out
    assert main(["simulate", str(plan_file), *FLAGS, "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == result
    assert "limit: all alike" in printed.err


def test_uneven_plans_are_slower_and_further_from_their_limit(tmp_path):
    def times(name, *micro_batches):
        step = {"step": 0, "micro_batches": [[[i, 0, n] for n in m] for i, m in enumerate(micro_batches)]}
        header = HEADER | {"micro_batches": 4, "context_length": 65536, "max_tokens": 65536}
        plan = write(tmp_path / name, header, step, SUMMARY)
        return simulated(plan, tmp_path, "--model", "llama2-7b", "--pipeline-model-parallel-size", "4")["mean"]

    even, uneven = times("even", *[[32768]] * 4), times("uneven", [65536], [32768], [16384, 8192], [8192])
    assert even["tokens"] == uneven["tokens"]
    assert even["of_limit"] == pytest.approx(1)
    assert uneven["of_limit"] < 0.95
    assert uneven["breakdown_us"]["imbalance"] > 0
    total = sum(n * (n + 50) for n in (65536, 32768, 16384, 8192, 8192))
    assert uneven["imbalance"] == pytest.approx(4 * 65536 * 65586 / total)


def test_a_trace_of_any_step(plan_file, tmp_path):
    result = simulated(plan_file, tmp_path, *FLAGS, "--trace", str(tmp_path / "0.json"))
    simulated(plan_file, tmp_path, *FLAGS, "--trace", str(tmp_path / "3.json"), "--trace-step", "3")
    for number in (0, 3):
        entry = result["steps"][number]
        events = json.loads((tmp_path / f"{number}.json").read_text())["traceEvents"]
        spans = [e for e in events if e["ph"] == "X"]
        assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(entry["time_us"], abs=0.01)
        assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
        assert {(e["pid"], e["tid"]) for e in spans} == {(rank, stage) for rank in range(2) for stage in range(2)}


def test_standard_input_and_a_part_of_the_steps(plan_file, tmp_path, monkeypatch):
    whole = simulated(plan_file, tmp_path, *FLAGS)
    monkeypatch.setattr("sys.stdin", io.StringIO(plan_file.read_text()))
    assert simulated("-", tmp_path, *FLAGS, "--steps", "2")["steps"] == whole["steps"][:2]


def test_sizes_of_models(tmp_path):
    plan = write(tmp_path / "plan", HEADER, STEP, SUMMARY)
    sizes = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --vocab-size 1000".split()
    assert simulated(plan, tmp_path, *sizes, "--swiglu")["model"] == {
        "name": None,
        "num_layers": 4,
        "hidden_size": 256,
        "ffn_hidden_size": 640,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "padded_vocab_size": 1024,
        "kv_channels": 64,
        "gated_linear_unit": True,
    }
    assert simulated(plan, tmp_path, *sizes)["model"]["ffn_hidden_size"] == 1024
    assert simulated(plan, tmp_path, "--model", "llama2-7b", "--num-layers", "8")["model"]["num_layers"] == 8
    edges = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split".split()
    layout = simulated(plan, tmp_path, "--model", "llama2-7b", "--num-layers", "6", *edges)["layout"]
    assert layout["edge_layers"] == 1
    virtual = ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "4"]
    assert simulated(plan, tmp_path, "--model", "llama2-7b", *virtual)["layout"]["vpp"] == 4


BROKEN = {
    "empty": ([], "line 1: the file ends where a header should be"),
    "text": (["hello"], "line 1: not JSON (Expecting value)"),
    "list": (["[1]"], "line 1: a JSON list, where a header should be"),
    "another file": ([{"format": "megatron-wlb-tune", "version": 1}], "no header of megatron-wlb-plan version 1"),
    "newer": ([HEADER | {"version": 2}], "no header of megatron-wlb-plan version 1"),
    "crossover": ([HEADER | {"crossover": 0}], "crossover is 0; it must be an integer from 1 to"),
    "boolean": ([HEADER | {"micro_batches": True}], "micro_batches is true; it must be"),
    "missing": ([{k: v for k, v in HEADER.items() if k != "max_tokens"}], "max_tokens is null; it must be"),
    "policy": ([HEADER | {"policy": ["x"] * 30}], 'policy is ["x", "x"'),
    "no steps": ([HEADER, SUMMARY], "holds no step"),
    "cut off": ([HEADER, STEP], "line 3: the file ends where a step, or the summary should be, as if it were cut"),
    "cut line": ([HEADER, json.dumps(STEP)[:-9]], "line 2: not JSON"),
    "digits": ([HEADER, "9" * 5000], "line 2: not JSON"),
    "nested": ([HEADER, "[" * 100_000], "line 2: not JSON"),
    "order": ([HEADER, STEP | {"step": 1}], "line 2: it is not step 0 of the plan"),
    "count": ([HEADER, STEP | {"micro_batches": [[]]}], "1 micro-batches, where the plan has 2 a step"),
    "nothing": ([HEADER, STEP | {"micro_batches": [[], []]}], "all micro-batches are empty"),
    "flat": ([HEADER, STEP | {"micro_batches": [[1, 2], []]}], "micro-batch 0 is not a list of [document, offset, len"),
    "pair": ([HEADER, STEP | {"micro_batches": [[], [[1, 2]]]}], "micro-batch 1 is not a list of [document, offset"),
    "zero": ([HEADER, STEP | {"micro_batches": [[[0, 0, 0]], []]}], "a document of length 0; it must be from 1 to 100"),
    "huge": ([HEADER, STEP | {"micro_batches": [[[0, 0, 10**30]], []]}], "a document of length 1000000"),
    "fraction": ([HEADER, STEP | {"micro_batches": [[[0, 0, 1.5]], []]}], "a document of length 1.5; it must be"),
    "S_max": ([HEADER, STEP | {"micro_batches": [[[0, 0, 99]] * 2, []]}], "micro-batch 0 holds 198 tokens, over max_t"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plans_are_refused(name, tmp_path, capsys):
    entries, message = BROKEN[name]
    out = tmp_path / "times.json"
    plan = write(tmp_path / "plan", *entries)
    assert main(["simulate", str(plan), "--model", "llama2-7b", "--json", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "no --num-layers, --hidden-size, --num-attention-heads: give the sizes of the model"),
        ("--model llama2-7b --num-gpus 3 --context-parallel-size 2", "3 GPUs are no multiple of"),
        (
            "--model llama2-7b --num-gpus 3",
            "2 micro-batches a step (--global-batch-size) cannot be shared by 3 data-pa",
        ),
        ("--model llama2-7b --micro-batch-size 2", "--micro-batch-size is 2; a micro-batch of --wlb is one packed seq"),
        (
            "--model llama2-7b --seq-length 64",
            "--seq-length is 64, and PLAN was made with 100; leave it out, or change",
        ),
        ("--model llama2-7b --global-batch-size 8", "--global-batch-size is 8, and PLAN was made with 2"),
        ("--model llama2-7b --wlb-packing original", "--wlb-packing is original, and PLAN was made with wlb"),
        ("--model llama2-7b --wlb-crossover 51", "--wlb-crossover is 51, and PLAN was made with 50"),
        ("--model llama2-7b --wlb-cp-head-groups 0", "--wlb-cp-head-groups is 0; it must be from 1 to 1024"),
        ("--model llama2-7b --pipeline-model-parallel-size 5", "32 layers do not divide over 5 stages of 1 chunks"),
        ("--model llama2-7b --tensor-model-parallel-size 3", "32 attention heads do not divide over 3 ranks"),
        ("--model llama2-7b --num-query-groups 5", "--num-query-groups 5 does not divide 32 attention heads"),
        (
            "--model llama2-7b --num-virtual-stages-per-pipeline-rank 2",
            "2 model chunks need at least 2 pipeline stages",
        ),
        (
            "--model llama2-7b --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
            "the interleaved schedule runs groups of 4 micro-batches",
        ),
        (
            "--model llama2-7b --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            "--num-layers-per-virtual-pipeline-stage 3 x 2 pipeline stages do not divide 32 layers",
        ),
        ("--model llama2-7b --account-for-loss-in-pipeline-split", "give both or none"),
        (
            "--num-layers 2 --hidden-size 100 --num-attention-heads 3 --vocab-size 9",
            "does not divide --hidden-size 100",
        ),
        ("--model llama2-7b --wlb-profile nothing", "no profile 'nothing'"),
        ("--model llama2-7b --wlb-profile flops", "needs one in us"),
        ("--model llama2-7b --trace-step 1", "--trace-step is for --trace"),
        ("--model llama2-7b --trace /nowhere/trace.json", "--trace /nowhere/trace.json: its folder does not exist"),
    ],
)
def test_wrong_flags_are_refused(flags, message, tmp_path, capsys):
    plan = write(tmp_path / "plan", HEADER, STEP, SUMMARY)
    assert main(["simulate", str(plan), *flags.split()]) == 2
    assert message.replace("PLAN", str(plan)) in capsys.readouterr().err


def test_other_refusals(tmp_path, capsys):
    plan = write(tmp_path / "plan", HEADER, STEP, SUMMARY)
    assert main(["simulate", str(tmp_path / "none"), "--model", "llama2-7b"]) == 2
    assert "No such file" in capsys.readouterr().err
    trace = ["--trace", str(tmp_path / "trace.json"), "--trace-step", "7"]
    assert main(["simulate", str(plan), "--model", "llama2-7b", *trace]) == 2
    assert re.search("--trace-step 7: .* has 1 steps", capsys.readouterr().err)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00plan")
    assert main(["simulate", str(tmp_path / "binary"), "--model", "llama2-7b"]) == 2
    assert "line 1: not JSON" in capsys.readouterr().err
    with pytest.raises(SystemExit) as refused:
        main(["simulate", str(plan), "--model", "gpt-9"])
    assert refused.value.code == 2


@pytest.mark.parametrize(
    ("flags", "groups"),
    [("--model llama2-7b", 2), ("--model llama2-70b", 1), ("--model llama2-7b --wlb-cp-head-groups 3", 2)],
)
def test_head_groups_divide_the_key_heads_of_a_rank(flags, groups, plan_file, tmp_path):
    """Four key heads a rank of 7B, one of 70B: what attention itself makes of them."""
    layout = "--tensor-model-parallel-size 8 --context-parallel-size 2".split()
    assert simulated(plan_file, tmp_path, *flags.split(), *layout)["cp_head_groups"] == groups


def test_a_launch_line_says_the_rest(plan_file, tmp_path, capsys):
    line = (
        "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size "
        f"11008 --num-attention-heads 32 --swiglu --vocab-size 32000 {LAYOUT.split(' --num-gpus')[0]} "
        f"--num-virtual-stages-per-pipeline-rank 2 --seq-length {C} --global-batch-size {N} --wlb "
        "--wlb-packing adaptive --recompute-granularity selective --profile --profile-step-start 4 --data-path corpus "
        "--attention-backend flash --bf16"
    )
    (tmp_path / "train.sh").write_text(line)
    expected = simulated(plan_file, tmp_path, *FLAGS)
    for words in (line.split(), ["--launch", str(tmp_path / "train.sh")]):
        capsys.readouterr()
        found = simulated(plan_file, tmp_path, *words)
        assert found == expected | {"model": expected["model"] | {"name": None}}
        assert (
            "- Not simulated, and so without effect on these numbers: --attention-backend.\n" in capsys.readouterr().err
        )


def test_key_heads_are_grouped_as_upstream_does(plan_file, tmp_path, capsys):
    sizes = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --vocab-size 1000".split()
    for flags, groups in (("", 4), ("--group-query-attention", 1), ("--group-query-attention --num-query-groups 2", 2)):
        assert simulated(plan_file, tmp_path, *sizes, *flags.split())["model"]["num_query_groups"] == groups
    assert "--group-query-attention" not in capsys.readouterr().err
    assert simulated(plan_file, tmp_path, *sizes, "--num-query-groups", "2")["model"]["num_query_groups"] == 4
    assert "counts with --group-query-attention only" in capsys.readouterr().err

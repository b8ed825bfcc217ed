"""Rehearsals of small jobs: torch's build for CUDA over the stand-in, without a GPU."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rehearsal import record, run
from megatron_rehearsal.__main__ import _ranks, main
from megatron_rehearsal.build import library
from megatron_rehearsal.match import match
from megatron_rehearsal.record import Kind
from megatron_wlb.cli.launch import read_command
from megatron_wlb.job import Parallel
from tests.adapter.chats import conversation, write_chats, write_tokenizer
from tests.adapter.datasets import write_dataset
from tests.cli.analyses import printed

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="torch has no CUDA build")
JOB = """torchrun --nproc-per-node 4 pretrain_gpt.py --wlb --transformer-impl local
--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2
--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 4096 --max-position-embeddings 4096
--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0
--untie-embeddings-and-output-weights --attention-dropout 0 --bf16 --use-distributed-optimizer --micro-batch-size 1
--calculate-per-token-loss --global-batch-size 4 --log-interval 1 --lr 1e-4 --train-iters 100 --vocab-size 8000
--mock-data --no-rope-fusion --no-masked-softmax-fusion --no-persist-layer-norm --save NOWHERE""".split()


def rehearse(tmp_path, *words, job):
    """What `megatron-rehearse` writes."""
    path = tmp_path / "rehearsal.json"
    assert main(["--gpu", "h100", "--json", str(path), *words, "--", *job]) == 0
    return json.loads(path.read_text())


def job_of(ranks, *more, without=()):
    """`JOB` on so many ranks, with more flags, and without some."""
    words = [word for word in JOB if word not in without]
    words[words.index("--nproc-per-node") + 1] = str(ranks)
    return [*words, *more]


def over_the_stand_in(*words):
    """What a Python says with the stand-in loaded."""
    environment = os.environ | {"LD_PRELOAD": str(library() / "libcuda.so.1"), "LD_LIBRARY_PATH": str(library())}
    environment["PYTHONPATH"] = os.getcwd()
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)


def test_a_small_job_fits_and_says_what_it_does(tmp_path, capsys, monkeypatch):
    programs = []
    monkeypatch.setattr(run, "match", lambda given, one_queue: programs.append(given) or match(given, one_queue))
    (log := tmp_path / "log").write_text("of the run\n")
    words = ["--ranks", "all", "--steps", "4", "--html", str(tmp_path / "rehearsal.html")]
    # Of this folder nothing is imported, and in it nothing is written.
    (here := tmp_path / "here").mkdir()
    (here / "msgspec.py").write_text("raise SystemExit('shadow')")
    monkeypatch.chdir(here)
    writes = ["--wlb-log", str(log), "--record-memory-history", "--config-logger-dir", str(here), "--log-progress"]
    found = rehearse(tmp_path, *words, job=[*JOB, *writes])
    assert [each.name for each in here.iterdir()] == ["msgspec.py"]
    assert found["verdict"] == "fits" and found["nccl"] == []
    first = found["ranks"][0]
    for rank in found["ranks"]:
        assert 0 < rank["allocated_gib"] <= rank["reserved_gib"] < 1
        assert rank["retries"] == 0 and len(rank["steps"]) == 4 and rank["out_of_memory"] is None
        assert rank["launches"] > 100 and rank["made_in_steps"] == {}
        # Upstream's host waits for the loss and the gradient norm; ours for nothing.
        assert rank["syncs"] and not [line for line in rank["syncs"] if "wlb" in line]
    page = (tmp_path / "rehearsal.html").read_text()
    assert "<h1 class=gain>Fits.</h1>" in page and page.count("<img ") == 4
    assert "<script" not in page and "prefers-color-scheme: dark" in page
    # A layer and direction gathers over TP; stages exchange a tensor per micro-batch and direction.
    assert first["nccl"]["send of 2"]["calls"] == first["nccl"]["receive of 2"]["calls"] > 0
    assert first["nccl"]["all_gather of 2"]["calls"] > 4
    assert not (tmp_path / "NOWHERE").exists() and log.read_text() == "of the run\n"
    assert "nothing was computed" in capsys.readouterr().err.lower()
    # Two neighbouring collectives of a group that one rank calls in the other order.
    swapped = {rank: [*program] for rank, program in programs[0].items()}
    calls = [i for i, item in enumerate(swapped[3]) if item[3] and item[3][0].kind == Kind.ALL_GATHER]
    i = next(i for i in reversed(calls) if swapped[3][i][3][0].same != swapped[3][calls[-1]][3][0].same)
    swapped[3][i], swapped[3][calls[-1]] = swapped[3][calls[-1]], swapped[3][i]
    (said,) = [said for said in match(swapped, True) if "rank 3" in said and ".py:" in said]
    assert "step 3, backward " in said


def test_a_plain_job_runs_its_own_script_with_its_own_data(tmp_path, capsys):
    """Every rank makes the index of the data by itself, and nothing of it stays."""
    script = Path(__file__).parents[1] / "adapter" / "upstream_script.py"
    left_out = ("--wlb", "--sequence-parallel", "--mock-data")  # local layers have no norms for the second
    job = [str(script) if word == "pretrain_gpt.py" else word for word in JOB if word not in left_out]
    data = write_dataset(tmp_path / "data", seed=0, documents=4000)
    found = rehearse(tmp_path, "--ranks", "all", "--steps", "2", job=[*job, "--data-path", data, "--split", "80,10,10"])
    assert found["verdict"] == "fits" and found["nccl"] == []
    for rank in found["ranks"]:
        assert len(rank["steps"]) == 2 and rank["predicted_gib"] is None
        assert 0 < rank["allocated_gib"] <= rank["reserved_gib"] < 2
    assert {path.name for path in tmp_path.iterdir()} == {"data.bin", "data.idx", "rehearsal.json"}
    refused = [*job, "--mock-data"]
    refused[job.index(str(script))] = "elsewhere.py"
    assert main(["--gpu", "h100", "--", *refused]) == 2
    assert main(["--gpu", "h100", "--", *job, "--log-interval", "0"]) == 2
    assert "--log-interval is 0, by which upstream divides after the first step; give 1" in capsys.readouterr().err


def test_conversations_are_tokenized_for_a_rehearsal_alone(tmp_path, monkeypatch):
    """By the job's own tokenizer, in a folder that goes with it; stages are numbered before data-parallel ranks."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = write_chats(tmp_path / "chats.jsonl", [conversation([5, 300, 30], i) for i in range(80)])
    sft = ["--sft", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", write_tokenizer(tmp_path / "tokenizer")]
    sft += ["--sft-tokenizer-prompt-format", "nemotron-nano-v2", "--data-path", path, "--split", "100,0,0"]
    job = job_of(8, *sft, "--eval-iters", "0", "--use-tp-pp-dp-mapping", without=("--mock-data",))
    before = {*tmp_path.rglob("*")}
    found = rehearse(tmp_path, "--steps", "2", job=job)
    assert found["verdict"] == "fits" and found["ranks"][0]["steps"][0]["tokens"] != [4096] * 4
    assert [rank["rank"] for rank in found["ranks"]] == [0, 2, 4, 6]
    assert {*tmp_path.rglob("*")} - before == {tmp_path / "rehearsal.json"}


def test_experts_take_even_shares_of_what_every_rank_has(tmp_path):
    """Ranks that divide experts send each other by the rows of both; recomputed layers as in their first pass."""
    experts = "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
    layout = "--num-layers 2 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    job = job_of(2, *f"{experts} {layout} {recompute}".split(), without=("--sequence-parallel",))
    found = rehearse(tmp_path, "--ranks", "all", "--steps", "1", job=job)
    assert found["nccl"] == [] and found["verdict"] == "fits"
    # A layer sends rows there and back, forward, once more, and in backward.
    assert all(rank["nccl"]["send of 2"]["bytes"] > 0 for rank in found["ranks"])


def test_experts_overlap_in_as_much_memory_as_is_predicted(tmp_path):
    """Of passes that run by turns, one fills memory as the other frees it."""
    experts = "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
    layout = "--num-layers 8 --tensor-model-parallel-size 1 --num-virtual-stages-per-pipeline-rank 2"
    counts = "--global-batch-size 12 --wlb-micro-batches 12 --overlap-moe-expert-parallel-comm"
    job = job_of(4, *f"{experts} {layout} {counts}".split(), without=("--sequence-parallel",))
    found = rehearse(tmp_path, "--ranks", "all", "--steps", "2", job=job)
    assert found["nccl"] == [] and found["verdict"] == "fits"
    for rank in found["ranks"]:
        assert rank["allocated_gib"] == pytest.approx(rank["predicted_gib"], rel=0.04)


def test_a_job_of_a_log_that_is_too_large_is_told_with_its_rank(tmp_path, monkeypatch):
    stated = {"world_size": 4, "wlb_memory_budget": 40}  # or planning would refuse it
    (tmp_path / "evil.py").write_text("open('ran', 'w')\nx = None\n")
    monkeypatch.chdir(tmp_path)
    hostile = {"spec": ["evil", "x"], "record_memory_history": True, "memory_snapshot_path": "ran", "wlb_log": "ran"}
    hostile |= {"config_logger_dir": "ran", "tensorboard_dir": "ran", "nccl_communicator_config_path": "ran"}
    stated |= hostile
    # As upstream prints what it has derived.
    stated |= {"exp_avg_dtype": "torch.float32", "start_weight_decay": 0.01, "tensor_parallel_num_weight_shards": 2}
    stated |= read_command(JOB).stated | {"add_bias_linear": False, "persist_layer_norm": False}
    log, path = tmp_path / "train.log", tmp_path / "rehearsal.json"
    log.write_text(printed(stated))
    words = ["--gpu", "h100", "--gpu-memory", "0.25", "--ranks", "3", "--steps", "1", "--json", str(path)]
    assert main([*words, str(log)]) == 1
    found = json.loads(path.read_text())
    assert found["verdict"] == "does not fit"
    assert "rank 3" in found["remedy"] and "--wlb-max-tokens" in found["remedy"]
    assert found["ranks"][0]["reserved_gib"] <= 0.25
    assert {"spec", "memory_snapshot_path", "nccl_communicator_config_path"} <= {*found["ranks"][0]["left_out"]}
    assert not (tmp_path / "ran").exists()


def test_a_job_that_fits_does_so_also_where_memory_is_predicted_wrong():
    rank = {"rank": 3, "out_of_memory": None, "retries": 0, "reserved_gib": 7.0, "allocated_gib": 6.56}
    task = SimpleNamespace(gpu=SimpleNamespace(gib=80.0), wlb=True)
    for predicted, said in ((6.3, ""), (6.22, "rank 3 allocates 6.56 GiB where 6.22 were predicted: --wlb-")):
        found, remark = run.verdict([rank | {"predicted_gib": predicted}], task, [], modelled=True)
        assert found == "fits" and remark.startswith(said) and bool(remark) == bool(said)
    small = rank | {"allocated_gib": 0.0, "predicted_gib": 0.0}  # megabytes
    ranks = [small, small | {"allocated_gib": 0.2}, rank | {"predicted_gib": 6.22}]
    assert run.verdict(ranks, task, [], modelled=True) == ("fits", remark)
    assert run.verdict(ranks[:2], task, [], modelled=True) == ("fits", "")
    steps = {"steps": [dict.fromkeys(("predicted", "allocated", "reserved", "retries"), 1)], "communicators": {}}
    told = steps | {"rank": 0, "lines": [], "weights": 1, "passes": [], "left_out": []}
    assert record.summary(told, np.empty(0, record.RECORD))["predicted_gib"] == 0


def test_the_stand_in_is_no_gpu_by_itself_and_names_what_it_lacks():
    code = "import ctypes, torch; print(torch.cuda.is_available(), flush=True); ctypes.CDLL(None).cudaGraphLaunch()"
    done = over_the_stand_in("-c", code)
    assert done.stdout.strip() == "False"
    assert done.returncode == 86 and "cudaGraphLaunch is called" in done.stderr
    assert not hasattr(ctypes.CDLL(None), "rehearsal_configure")


def test_attention_of_cudnn_runs_over_the_stand_in():
    """By torch's own graphs here; TransformerEngine makes the same calls."""
    code = """
import os
from megatron_rehearsal.task import GPUS
from megatron_rehearsal.worker import Watch
Watch(GPUS["h100"])
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
q = torch.empty(1, 8, 256, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
print(tuple(q.grad.shape), flush=True)
os._exit(0)  # as ranks do
"""
    done = over_the_stand_in("-c", code)
    assert done.stdout.strip() == "(1, 8, 256, 128)", done.stderr


def test_kernels_of_triton_are_launched_and_not_compiled(tmp_path):
    script = tmp_path / "kernels.py"
    script.write_text("""
import ctypes, os, torch, triton
from megatron_rehearsal import kernels
from megatron_rehearsal.task import GPUS
from megatron_rehearsal.worker import Watch
Watch(GPUS["h100"])
launches = []
kernels.install(lambda *given: launches.append(given) or ctypes.CDLL(None).cuLaunchKernel(*given))
@triton.jit
def plain(x, rows: triton.language.constexpr): no_such_name
@triton.autotune([triton.Config({"rows": 4}), triton.Config({"rows": 8})], key=[])
@triton.jit
def tuned(x, rows: triton.language.constexpr): no_such_name
x = torch.arange(1 << 15).to("cuda")  # of a size at which other copies move nothing
plain[(1,)](x, rows=4)
tuned[lambda chosen: (8 // chosen["rows"],)](x)
print(len(launches), tuned.best_config.kwargs, x[-1:].cpu().item(), flush=True)
os._exit(0)
""")
    done = over_the_stand_in(str(script))
    assert done.stdout.strip() == "2 {'rows': 4} 32767", done.stderr


UP_PROJECTION = "--recompute-granularity selective --recompute-modules mla_up_proj"
"""Its recomputation compiles C++, in the rehearsal's own folder."""


@pytest.mark.parametrize(
    ("ranks", "recompute"),
    [
        ("0", ""),
        pytest.param("0", UP_PROJECTION, marks=pytest.mark.ci),
        pytest.param("all", UP_PROJECTION, marks=pytest.mark.full),
    ],
)
def test_latent_attention_over_context_parallel_ranks_matches(ranks, recompute, tmp_path):
    latent = "--multi-latent-attention --qk-layernorm --q-lora-rank 128 --kv-lora-rank 128 --qk-head-dim 64"
    latent += " --qk-pos-emb-head-dim 32 --v-head-dim 96"
    job = job_of(8, "--context-parallel-size", "2", *latent.split(), *recompute.split())
    found = rehearse(tmp_path, "--ranks", ranks, "--steps", "2", job=job)
    assert len(found["ranks"]) == {"0": 1, "all": 8}[ranks] and found["verdict"] == "fits" and found["nccl"] == []


@pytest.mark.parametrize("gib", ["nan", "inf", "-5", "0", "1e300", "2048", "\uff18", ""])
def test_memory_of_no_card_is_refused_before_ranks_start(gib, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--gpu", "h100", f"--gpu-memory={gib}", "--", *JOB])
    assert "must be GiB from 0.125 to 1024" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["0,0", "8", "-1", "", "0,", "\uff10", "0 1", "all,0"])
def test_ranks_that_are_none_of_the_job_are_refused(ranks):
    assert _ranks("1,0", Parallel(dp=8)) == [0, 1]
    with pytest.raises(ValueError, match="must be auto, all, or different ranks below 8, as 0,17"):
        _ranks(ranks, Parallel(dp=8))

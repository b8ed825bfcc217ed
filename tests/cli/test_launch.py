"""Commands as people paste them behind --, typed flags beside them, and what is to be taken out of them."""

import itertools
import os
import re
import shlex
import subprocess

import numpy as np
import pytest
import yaml

from megatron_wlb.cli.launch import Launched, read_command, read_flags
from megatron_wlb.cli.screen import screen, usual
from megatron_wlb.describe.arguments import MegatronArguments, Refused, rows
from megatron_wlb.job import Parallel
from tests.adapter.datasets import write_index
from tests.cli.analyses import JOB, MODEL, RUN, C, described, printed, refused, run
from tests.cli.commands import ROOT, refusal

LINE = """-- torchrun --nproc_per_node=2 --nnodes 2 --rdzv-endpoint host:29500 pretrain_gpt.py \
    --num-layers 4 --hidden-size 512 --num-attention-heads 4 --vocab-size 100 --swiglu --bf16 --use-flash-attn \
    --tensor-model-parallel-size 2 --sequence-parallel --seq-length 4096 --max-position-embeddings 4096 \
    --micro-batch-size 1 --global-batch-size 4 --global-batch-size 8 --lr 1.5e-4 --min-lr=1e-5 --save 'check points' \
    --recompute-granularity selective --tokenizer-type GPTSentencePieceTokenizer --data-path PREFIX --split 1
"""


def test_a_command(data):
    """Of a flag that is given again, the last counts."""
    _, job, blend = found = described(LINE.replace("PREFIX", data))
    assert (job.parallel, job.num_micro_batches, blend.prefixes) == (Parallel(tp=2, dp=2), 8, [data])
    assert (job.model.num_layers, job.model.padded_vocab_size) == (4, 256)
    assert job.model.ffn_hidden_size == 512 * 8 // 3 // 64 * 64
    ignored = "--use-flash-attn --max-position-embeddings --lr --min-lr --save"
    assert found.run.screened.ignored == ignored.split()


def test_typed_flags_take_precedence(data):
    """Of Megatron's and ours, whether they are the defaults or not."""
    line = (
        "-- torchrun --nproc-per-node 2 pretrain_gpt.py --wlb --wlb-packing paper --wlb-cp-gradients model "
        "--wlb-micro-batches 8 --padded-vocab-size 2048 --recompute-modules mlp core_attn --data-path x y "
        "--tensor-model-parallel-size 2 --no-rope-fusion --num-layers 3"
    )
    typed = f"{JOB} --tensor-model-parallel-size=1 --num-gpus 4 --recompute-modules --padded-vocab-size 512"
    typed += f" --wlb-packing adaptive --wlb-cp-gradients fp32 --data-path {data} --num-layers 4"
    found, job, blend = described(typed, line)
    assert (job.parallel, blend.prefixes) == (Parallel(dp=4), [data])
    assert (job.model.padded_vocab_size, job.model.num_layers, job.recompute.modules) == (512, 4, ())
    assert (job.packing.name, job.sharding.cp_gradients, job.num_micro_batches) == ("adaptive", "fp32", 8)
    assert found.screened.ignored == ["--no-rope-fusion"]


@pytest.mark.parametrize(
    ("launcher", "gpus"),
    [
        ("torchrun --nproc-per-node 4 --nnodes=2", 8),
        ("python3 -m torch.distributed.run --nproc_per_node=4 --nnodes 2", 8),
        ("/usr/bin/srun -N 4 --ntasks-per-node 1 torchrun --nproc-per-node 8 --nnodes 4", 32),
        ("srun -N4 --ntasks-per-node=8 --container-image x.sqsh python -u", 32),
        ("srun --ntasks 6 python", 6),
        ("mpirun -np 8 -x A=1 python", 8),
        ("CUDA_DEVICE_MAX_CONNECTIONS=1 WORLD_SIZE=2 python", 2),
        ("docker run --env=WORLD_SIZE=4 image python", 4),
        ("WORLD_SIZE=2 torchrun --nproc-per-node 8", 8),
        ("PET_NPROC_PER_NODE=8 PET_NNODES=2 torchrun --rdzv-backend c10d", 16),
        ("PET_NNODES=2 torchrun --nproc-per-node 8", 16),
        ("srun -N 4 -n 4 -x PET_NNODES=4 torchrun --nproc-per-node=8", 32),
        ("flux run -N 2 --tasks-per-node=8 -g 1 python", 16),
        ("flux run -n16 -N2 python", 16),
        ("jsrun -n 4 -a 4 -c 7 -g 4 python", 16),
        ("jsrun --nrs=4 --tasks_per_rs=2 python", 8),
        ("jsrun -n4 python", 4),
        ("mpirun -H a:8,b:8 python", 16),
        ("mpirun --host a,b -N 4 python", 8),
        ("mpiexec.hydra -hosts a,b,c -ppn 2 python", 6),
        ("mpirun -N 4 -np 8 python", 8),
        ("aprun -n 16 -N 8 python", 16),
        ("accelerate launch --num_processes 16 --num_machines 2", 16),
    ],
)
def test_ranks_of_what_starts_them(launcher, gpus):
    assert read_command([*launcher.split(), "pretrain_gpt.py", "--num-layers", "4"]).world_size == gpus
    job = f"{MODEL} --seq-length {C} --pipeline-model-parallel-size 2"
    _, job, _ = found = described("--", launcher, "pretrain_gpt.py", job)
    assert job.parallel.num_gpus == 2 * job.num_micro_batches == gpus  # a window a data-parallel rank
    assert not any("GPUs" in note for note in found.run.notes)


def test_what_is_given_counts_before_the_launcher_and_flags_are_those_of_what_trains():
    words = (
        "python tools/launch.py torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --lr 0.5 --seed 7".split()
    )
    found = {"num_layers": 4, "lr": 0.5, "seed": 7}
    assert read_command(words) == Launched(found, [], "command", world_size=8)
    assert read_command(words, 2) == Launched(found, [], "command", world_size=2)


@pytest.mark.parametrize("ranks", ["srun -N x --ntasks-per-node 8", "mpirun -np all", "torchrun --nproc-per-node gpu"])
def test_ranks_that_are_no_number(ranks, capsys):
    refused(capsys, f"-- {ranks} python pretrain_gpt.py {JOB}", "is not a number; put it in, or give --num-gpus")
    assert described("--num-gpus 2", "--", ranks, "pretrain_gpt.py", JOB).job.parallel.dp == 2


@pytest.mark.parametrize(
    "launcher",
    [
        *(
            "torchrun",
            "torchrun --nnodes 2 --rdzv-backend c10d",
            "PET_NNODES=2 torchrun",
            "srun python",
            "mpirun python",
        ),
        *(
            "srun --ntasks-per-node 8 python",
            "srun -N 4 python",
            "mpirun --hostfile hosts python",
            "flux run -N 2 python",
        ),
        *("mpirun --map-by ppr:8:node python", "jsrun -a 4 python", "accelerate launch", "kubectl exec pod -- python"),
        *("python -m torch.distributed.run", "docker run image python"),
    ],
)
def test_a_launcher_that_does_not_say_how_many_gpus_there_are_is_no_run_of_one(launcher, capsys):
    refused(capsys, f"-- {launcher} pretrain_gpt.py {JOB}", "does not say how many GPUs there are; give --num-gpus$")
    assert described("--num-gpus 4 --", launcher, "pretrain_gpt.py", JOB).job.parallel.dp == 4


def test_without_a_launcher_there_is_one_process(capsys):
    for alone in ("python", "WORLD_SIZE=0 nohup python3 -u", "python -m megatron_wlb.run"):
        assert described("--", alone, "pretrain_gpt.py", JOB).job.parallel.num_gpus == 1
        message = "does not say how many GPUs there are, and a model takes 2; give --num-gpus"
        refused(capsys, f"-- {alone} pretrain_gpt.py {JOB} --context-parallel-size 2", message)


@pytest.mark.parametrize(
    "name", ["deepspeed pretrain_gpt.py", "torchrun pretrain_t5.py", "python run_clm.py", "x/train_rl.py", "nemo.py"]
)
def test_other_trainers_are_named(name, capsys):
    refused(
        capsys, f"-- {name} {JOB}", "trains no GPT or hybrid model of today's Megatron-core, and --wlb trains no other"
    )


@pytest.mark.parametrize(
    ("name", "gpus", "chunks", "shape"),
    [("550m", 32, 6, (24, 1280)), ("7b", 64, 8, (32, 4096)), ("30b", 128, 12, (48, 7168)),
     ("70b", 256, 20, (80, 8192))],
)  # fmt: skip
def test_our_own_slurm_scripts(name, gpus, chunks, shape, tmp_path):
    """By `--dry-run`, without Slurm: the nodes that they ask for, 128K by default, and that H100s have the memory."""
    write_index(tmp_path / "corpus.idx", np.full(99, 9000))
    job = ["bash", str(ROOT / f"scripts/slurm/{name}.sbatch"), "--dry-run", "--seed", "7"]
    env = {"PATH": os.environ["PATH"], "DATA_PATH": str(tmp_path / "corpus")}
    line = subprocess.run(job, env=env, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    _, job, blend = found = described("--vocab-size 32000 --", *map(shlex.quote, shlex.split(line)))
    parallel = job.parallel
    assert (parallel.num_gpus, job.context_length, parallel.pp, parallel.vpp) == (gpus, 131072, 4, chunks)
    assert (job.global_batch_size, job.packing.name) == (4 * parallel.dp, "adaptive")
    assert (job.model.num_layers, job.model.hidden_size, job.model.gated_linear_unit) == (*shape, True)
    assert (found.run.arguments.seed, found.run.screened.refused) == (7, [])
    assert blend.prefixes == [str(tmp_path / "corpus")]
    assert not any(
        "attention cross documents" in note for note in found.run.screened.remarks
    )  # they have --wlb already
    assert not list(tmp_path.glob("runs*"))
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    for windows, more in itertools.product((4, 16), ("", full)):
        flags = f"--vocab-size 32000 --global-batch-size {windows * parallel.dp} {more} --"
        known = run(flags, *map(shlex.quote, shlex.split(line))).on_device()
        assert known.budget is not None and known.job().max_tokens >= 131072


def test_what_training_refuses_is_to_be_taken_out(capsys):
    """By the table of training, in `describe/arguments.py`; what is not simulated is refused here already."""
    assert run(RUN, JOB, "--fim-data --rerun-mode report_stats").screened.refused == ["--fim-data", "--rerun-mode"]
    assert run(RUN, JOB, "--rerun-mode disabled --attention-backend=flash --save dir").screened.refused == []
    for name in [name for name, row in rows(Refused) if row.unlike]:
        refused(capsys, f"{RUN} {JOB} --{name.replace('_', '-')} 8", " cannot be simulated; give")
    assert run(RUN, JOB, "--hybrid-override-pattern", "M*M*M").arguments.num_layers == 5
    assert run(RUN, JOB, "--multi-latent-attention --window-size 64,0").screened.refused == []


def test_weight_shards_are_usual_where_they_are_the_ranks():
    given = {"tensor_model_parallel_size": 2, "tensor_parallel_num_weight_shards": 2}
    assert usual(given | {"expert_tensor_parallel_num_weight_shards": 4}) == {"tensor_parallel_num_weight_shards"}
    assert usual({"expert_tensor_parallel_num_weight_shards": 1}) == {"expert_tensor_parallel_num_weight_shards"}


def test_what_training_refuses_together_is_said():
    """Of flags that each are served, also where they are typed alone; known models are gated."""

    def refusals(*words):
        nets = "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --seq-length 4096"
        remarks = run(*words, nets).screened.remarks
        return [each.rpartition(" ")[2] for each in remarks if each.startswith("Training with --wlb refuses this run")]

    assert refusals(JOB) == refusals(RUN, JOB) == ["--swiglu."]
    assert refusals(JOB, "--swiglu") == refusals("--model llama2-7b") == []
    layouts = "--swiglu --tensor-model-parallel-size 2", "--swiglu --context-parallel-size 32"
    assert [refusals(RUN, JOB, each) for each in layouts] == [["--sequence-parallel."], ["ranks."]]


@pytest.mark.parametrize(("flag", "meant"), [("seq-lenght", "seq-length"), ("tpcomm-overlap", "tp-comm-overlap")])
def test_a_misspelt_flag_is_refused(flag, meant, tmp_path, capsys):
    """Behind -- and in a log; that none of upstream's own is taken for one, `test_logs` shows."""
    message = f"--{flag} is no flag of Megatron's; give --{meant}, or leave it out"
    refused(capsys, f"{RUN} {JOB} --{flag} 4", message)
    arguments = {"num_layers": 2, "world_size": 8, "seq_length": 64, flag.replace("-", "_"): 4}
    (tmp_path / "log").write_text(printed(arguments))
    refused(capsys, str(tmp_path / "log"), message)


def test_what_training_switches_off_is_named():
    found = run(RUN, JOB, "--cuda-graph-impl local --log-max-attention-logit --dataloader-type single")
    assert found.screened.refused == found.screened.ignored == []
    said = "Switched off by --wlb: --cuda-graph-impl --log-max-attention-logit."
    assert said in found.screened.remarks
    assert not any("Switched" in remark for remark in run(RUN, JOB, "--cuda-graph-impl none").screened.remarks)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--cp-comm-type a2a", "Not simulated, and so without effect on these numbers: --cp-comm-type."),
        ("--fp8-dot-product-attention", "Switched off by --wlb: --fp8-dot-product-attention."),
        ("--min-dynamic-context-parallel-size 2", "these numbers: --min-dynamic-context-parallel-size."),
    ],
)
def test_what_is_not_simulated_is_said(flags, note):
    assert any(note in each for each in run(RUN, JOB, flags).screened.remarks)


@pytest.mark.parametrize("way", ["p2p", "allgather"])
def test_both_ways_of_context_parallelism_are_simulated(way):
    assert not any("--cp-comm-type" in each for each in run(RUN, JOB, "--cp-comm-type", way).screened.remarks)


@pytest.mark.parametrize(("is_log", "refused"), [(True, []), (False, ["--tensor-parallel-num-weight-shards"])])
def test_weight_shards_that_a_log_shows_were_not_given(is_log, refused):
    launched = Launched({"tensor_parallel_num_weight_shards": 1}, [], "command", is_log=is_log)
    assert screen(launched, MegatronArguments(), model=None, approximate=False).refused == refused


@pytest.mark.parametrize(
    ("words", "crosses"),
    [
        (RUN, True),
        (f"{RUN} --reset-position-ids --eod-mask-loss", True),
        (f"{RUN} --reset-attention-mask", True),
        (f"{RUN} --bf16 --reset-attention-mask --transformer-impl local", True),
        (f"{RUN} --bf16 --reset-attention-mask --transformer-impl local --no-masked-softmax-fusion", False),
        (f"{RUN} --reset-attention-mask --transformer-impl local", False),
        (f"{RUN} --reset-attention-mask --transformer-impl local --no-create-attention-mask-in-dataloader", True),
        (f"{RUN} --dataloader-inter-document-masking", False),
        (f"{RUN} --sft", False),
        (f"{RUN} --wlb", False),
        ("", False),
    ],
)
def test_attention_across_documents_is_named(words, crosses):
    """Of a run; flags alone are none that exists. What upstream does with each mask, `tests/adapter` shows."""
    (notes,) = ([note for note in run(words, JOB).screened.remarks if note.startswith("The run lets")],)
    assert len(notes) == crosses and any("#2357" in note for note in notes) == (crosses and "reset-att" in words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "^no --seq-length; give the log of a run, its command behind --, or its flags$"),
        ("--seq-lenght 64", "^--seq-lenght is no flag of Megatron's; give --seq-length, or leave it out$"),
        ("--lr 3", "^--lr is not read; leave it out, or give the run's command behind --$"),
        (f"train.log {RUN}", "^train.log and a command behind --; give one of them$"),
        ("-- torchrun --nproc-per-node 8 mine --seq-length 64", "^no script such as pretrain_gpt.py in torchrun .*; "
         "give the run's command behind --, from torchrun or srun on$"),
        ("-- torchrun ${RANKS[@]} pretrain_gpt.py", "RANKS.*is not expanded; give the words that it stands for"),
        (f"{RUN} {JOB} --num-layers $LAYERS", r"^--num-layers is '\$LAYERS'; it must be int"),
        (f"{RUN} {JOB} --wlb-packings adaptive", "--wlb-packings"),
        (f"{RUN} {JOB} --wlb-memory-budget high", "--wlb-memory-budget: invalid float value: 'high'"),
        (f"{RUN} {JOB} --wlb-memory-budget", "--wlb-memory-budget: expected one argument"),
        ("--model gpt5", "argument --model: invalid choice: 'gpt5'"),
        ("--num-layers $LAYERS", r"^--num-layers is '\$LAYERS'; it must be int"),
    ],
)  # fmt: skip
def test_words_that_are_no_run(words, message, capsys):
    refused(capsys, words, message)


STARTS = "torchrun --nproc-per-node 4 pretrain_gpt.py"
SCRIPTS = {
    "alone": "COMMAND",
    "between others": "cd / && ls >&2; COMMAND && echo done >&2 || echo failed",
    "in a line of its own": "cd /\nexport NCCL_DEBUG=INFO\nCOMMAND\necho done >&2\n",
    "in lines that go on": "torchrun \\\n  --nproc-per-node 4 pretrain_gpt.py\\\n  FLAGS \\\n  --lr 1e-4",
    "piped": "COMMAND 2>&1 | cat",
    "to a file": "COMMAND --lr 1e-4 > out 2> err",
    "to a file in the middle": "torchrun --nproc-per-node 4 > out pretrain_gpt.py FLAGS 2>err --lr 1e-4",
    "to a file, both": "COMMAND &> out; cat out",
    "to a file that grows": "COMMAND >>out 2>&1 < /dev/null",
    "behind a comment": "# don't (really) run x.py\nCOMMAND  # 8 GPUs; it's > enough",
    "with a # in a word": "COMMAND --save s#1",
    "in the background": "COMMAND & wait",
    "in a subshell": "(cd /; COMMAND)",
    "in brackets": "{ COMMAND; }",
    "in a condition": "if true; then COMMAND; fi",
    "in a loop": "for i in 1; do COMMAND --seed 3; done",
    "in a function": "function main { COMMAND; }; main",
    "behind a document": "cat > hosts <<'END'\nit's; a | file.py\nEND\nCOMMAND",
    "beside other scripts": "python3 -c 1 tools/make.py --num-layers 3; COMMAND; python3 -c 1 report.py --x 4",
    "with variables": "NCCL_DEBUG=INFO OMP_NUM_THREADS=1 COMMAND",
    "with an exec": "exec COMMAND",
    "quoted": "COMMAND --save 'a b' --load \"c; d\" --wandb-exp-name it\\'s --data-path x\\ y z",
    "in a word again": "bash -c 'cd /; COMMAND --lr 3' 2>&1",
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_text_for_a_shell_is_cut_as_a_shell_cuts_it(kind, tmp_path):
    """By bash itself, in which a command writes its words down; the run is that of the words."""
    text = SCRIPTS[kind].replace("COMMAND", f"{STARTS} FLAGS").replace("FLAGS", JOB)
    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\0" "$@" > words\n')
    (tmp_path / "torchrun").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = text.replace("cd /", "true")
    subprocess.run(["bash", "-c", script], env=env, cwd=tmp_path, check=True, capture_output=True)
    words = ["torchrun", *(tmp_path / "words").read_text().split("\0")[:-1]]
    found, shown = read_command(["srun", "bash", "-c", text]), read_command(words)
    assert found == shown and found.world_size == 4


def test_a_text_for_a_shell_that_does_not_say_what_trains(capsys):
    def said(text, *behind):
        return refusal(capsys, "analyze", "--", "srun", "-n", "4", "bash", "-c", text, *behind)

    unclosed = said("python ' pretrain_gpt.py --lr 1")
    assert "is not understood as shell; give the command without bash -c" in unclosed
    assert "has 2 commands that may train; give one of them" in said(f"{STARTS} {JOB}; {STARTS} {JOB} --seed 3")
    assert "--lr stands behind the text for bash -c; put it into the text" in said(f"{STARTS} {JOB}", "--lr", "3")
    assert "${ARGS[@]} is not expanded; give the words" in said(f'{STARTS} {JOB} "${{ARGS[@]}}"')
    assert "$ARGS is not expanded; give the words" in said(f"{STARTS} {JOB} --bf16 $ARGS")
    exported = f"export PET_NNODES=2 PET_NPROC_PER_NODE=8\ntorchrun pretrain_gpt.py {JOB}"
    assert read_command(["srun", "bash", "-c", exported]).world_size == 16
    message = "a b.py c"  # of a flag's value, which is no command
    assert read_command([*STARTS.split(), *JOB.split(), "--save", message]).stated["save"] == message


DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\uff0d"


@pytest.mark.parametrize(
    ("words", "stranger"),
    [
        *((f"--bf16 {dash}context-parallel-size 2", f"{dash}context-parallel-size") for dash in DASHES),
        *(
            (f"--data-path d {dash}{more}bf16", f"{dash}{more}bf16")
            for dash in DASHES[4:6]
            for more in ("", "-", "\u2014")
        ),
        ("--log-throughput context-parallel-size 2", "context-parallel-size"),
        ("--use-flash-attn bf16", "bf16"),
        ("--no-gradient-reduce-div-fusion 1 --seed 3", "1"),
        ("--save -tp 2", "-tp"),
        ("--save a b", "b"),
        ("--bf16 true", "true"),
        ("--dataloader-inter-document-masking false", "false"),
        ("--overlap-grad-reduce False", "False"),
        ("--no-rope-fusion 1", "1"),
        ("--sequence-parallel 1", "1"),
        ("--num-layers 2 3", "3"),
        ("--lr 1e-4 \\ ", "' '"),
    ],
)
def test_words_that_belong_to_no_flag_are_refused(words, stranger):
    """As Megatron's parser refuses them, behind -- and typed; before any flag, too."""
    each = [" " if word == "\\" else word for word in words.split()]
    for refuse in (lambda: read_command([*STARTS.split(), *JOB.split(), *each]), lambda: read_flags(each)):
        with pytest.raises(ValueError, match=f"^{re.escape(stranger)} belongs to no flag"):
            refuse()
    with pytest.raises(ValueError, match="^mine belongs to no flag"):
        read_command([*STARTS.split(), "mine", *JOB.split()])
    with pytest.raises(ValueError, match="^--bf16 takes no value, and 1 is one; leave it out"):
        read_command([*STARTS.split(), "--bf16=1"])


def test_flags_of_experts_are_refused_where_there_are_some():
    flags = f"{JOB} --moe-router-load-balancing-type quantile_balancing"
    dense, experts = (run(f"-- {STARTS} {flags} {more}").screened for more in ("", "--num-experts 4"))
    assert dense.refused == [] and experts.refused == ["--moe-router-load-balancing-type"]


def test_compare_takes_no_flags_of_a_run_and_no_command(capsys):
    for words in ("run.jsonl --num-layers 2", "run.jsonl -- torchrun"):
        assert refusal(capsys, "compare", *words.split()).startswith("unrecognized arguments: ")


@pytest.mark.parametrize("name", ["pytorchjob", "skypilot"])
def test_files_of_clouds_hold_a_command_that_is_served(name):
    file = yaml.safe_load((ROOT / "scripts" / "cloud" / f"{name}.yaml").read_text())
    replicas = file["spec"]["pytorchReplicaSpecs"]["Worker"] if name == "pytorchjob" else None
    text = replicas["template"]["spec"]["containers"][0]["args"][0] if replicas else file["run"]
    words = ["torchrun", *text.replace("\\\n", " ").split("torchrun", 1)[1].split()]
    assert (replicas["replicas"] if replicas else file["num_nodes"]) == 8
    typed = "--mock-data --vocab-size 32000 --num-gpus 64"
    found, job, _ = described(typed, f"-- {' '.join(words[words.index('/opt/megatron_wlb/pretrain_gpt.py') :])}")
    assert job.parallel == Parallel(tp=8, cp=2, pp=4, vpp=8) and not found.screened.refused

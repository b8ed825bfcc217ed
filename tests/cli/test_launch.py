"""Commands as people type and paste them into `megatron-wlb analyze`, and what is to be taken out of them."""

import io
import os
import re
import subprocess

import numpy as np
import pytest
from megatron_wlb.cli.command import of_file

from megatron_wlb.cli import command
from megatron_wlb.cli.launch import NOT_SIMULATED, world_size
from megatron_wlb.cli.main import main
from megatron_wlb.describe.flags import REFUSED
from megatron_wlb.job import Parallel
from tests.adapter.datasets import write_index
from tests.cli.analyses import JOB, LARGE, MODEL, C, analyse, described, refused
from tests.cli.commands import ROOT, refusal

LINE = """torchrun --nproc_per_node=2 --nnodes 2 --rdzv-endpoint host:29500 pretrain_gpt.py \
    --num-layers 4 --hidden-size 512 --num-attention-heads 4 --vocab-size 100 --swiglu --bf16 --use-flash-attn \
    --tensor-model-parallel-size 2 --sequence-parallel --seq-length 4096 --max-position-embeddings 4096 \
    --micro-batch-size 1 --global-batch-size 8 --lr 1.5e-4 --min-lr=1e-5 --save 'check points' \
    --recompute-granularity selective --tokenizer-type GPTSentencePieceTokenizer --data-path PREFIX \\
    --split 99,1,0 2>&1 | tee "log.txt"
"""


@pytest.fixture
def script(tmp_path):
    """Writes a launch script, and gives the flag that names it."""

    def write(text):
        (tmp_path / "train.sh").write_text(text)
        return f"--launch {tmp_path / 'train.sh'}"

    return write


def test_a_command(script, data, monkeypatch):
    """As words, from a file, and from standard input: the same job."""
    line = LINE.replace("PREFIX", data)
    monkeypatch.setattr("sys.stdin", io.StringIO(line))
    typed = line.replace("\\\n", " ").replace("check points", "x").replace("'", "").split(" 2>&1")[0]
    for words in (script(line), "--launch=-", typed):
        args, job, blend, _ = described(words)
        assert (job.parallel, job.num_micro_batches, blend.prefixes) == (Parallel(tp=2, dp=2), 8, [data])
        assert (job.model.num_layers, job.model.padded_vocab_size) == (4, 256)
        assert job.model.ffn_hidden_size == 512 * 8 // 3 // 64 * 64
        assert args.ignored == IGNORED


IGNORED = "--bf16 --use-flash-attn --sequence-parallel --max-position-embeddings --lr --min-lr --save".split()


@pytest.mark.parametrize(
    ("words", "gpus", "assumed"),
    [
        ("WORLD_SIZE=8 python -u pretrain_gpt.py", 8, False),
        ("--num-gpus 6", 6, False),
        ("WORLD_SIZE=0", 2, True),
        ("", 2, True),
    ],
)
def test_world_size(words, gpus, assumed):
    _, job, _, notes = described(words, f"{MODEL} --seq-length {C} --pipeline-model-parallel-size 2")
    assert job.parallel.num_gpus == job.num_micro_batches == gpus  # PP x DP
    assert any("GPUs" in note for note in notes) == assumed


ACROSS = (
    "The run lets attention cross documents (it has neither --reset-attention-mask nor "
    "--dataloader-inter-document-masking); Megatron here is the same run with attention inside of them."
)


VALUES = {
    "attention_backend": "local",
    "attention_dropout": "0.1",
    "cuda_graph_impl": "local",
    "dataloader_type": "single",
    "load": "s3://bucket",
    "moe_token_dispatcher_type": "allgather",
    "position_embedding_type": "mrope",
    "rerun_mode": "report_stats",
    "save": "s3://bucket",
}
"""Of flags of which not every value is refused."""


@pytest.mark.parametrize("name", [*REFUSED, *VALUES])
def test_what_training_refuses_is_to_be_taken_out(name, capsys):
    """Named, or refused here already."""
    flag = f"--{name.replace('_', '-')}"
    if flag[2:] in NOT_SIMULATED:
        refused(capsys, f"{JOB} {flag} 8", f"{flag}: .* cannot be simulated; give")
        if name != "yaml_cfg":
            assert len(described(JOB, "--approximate", flag, "8").args.left_out) == 1
    elif name == "moe_token_dispatcher_type":
        args = described(JOB, "--num-experts 4", flag, VALUES[name]).args
        assert args.refused == [flag] and args.needs_dispatcher
    elif name == "attention_dropout":  # the flags to add overrule it
        assert described(JOB, flag, "0.1").args.refused == []
    else:
        assert described(JOB, flag, VALUES.get(name, "")).args.refused == [flag]


def test_what_training_takes_is_not_to_be_taken_out():
    """All of docs/training.md but what is refused: other values, and values that are spelled differently."""
    words = (
        "--dataloader-type external --attention-dropout 0.0 --cuda-graph-impl none --rerun-mode disabled --save dir "
        "--position-embedding-type rope --attention-backend=flash --eval-micro-batch-size 1 --softmax-type vanilla "
        "--moe-token-dispatcher-type alltoall --num-experts 4"
    )
    assert described(JOB, words).args.refused == []


def test_what_to_take_out_is_printed(tmp_path, lengths, capsys):
    write_index(tmp_path / "long.idx", 8 * lengths + 1)
    words = f"--steps 40 --sft --rampup-batch-size 2 2 100 --dataloader-type=cyclic --html {tmp_path / 'page'}"
    analyse(tmp_path, LARGE, words, "--data-path", str(tmp_path / "long"))
    printed = capsys.readouterr().out
    assert printed.endswith("Take out:\n  --sft --rampup-batch-size --dataloader-type\n")
    assert "--wlb-packing adaptive" in printed.split("Add to the command:\n")[1]
    assert "<h2>Take out</h2><pre>--sft" in (tmp_path / "page").read_text()


@pytest.mark.parametrize(
    ("name", "gpus", "chunks", "shape"),
    [("550m", 32, 6, (24, 1280)), ("7b", 64, 8, (32, 4096)), ("70b", 256, 20, (80, 8192))],
)
def test_our_own_slurm_scripts(name, gpus, chunks, shape, tmp_path, script):
    """By `--dry-run`, without Slurm: the nodes that they ask for, and 128K by default."""
    write_index(tmp_path / "corpus.idx", np.full(99, 9000))
    job = ["bash", str(ROOT / f"scripts/slurm/{name}.sbatch"), "--dry-run", "--seed", "7"]
    env = {"PATH": os.environ["PATH"], "DATA_PATH": str(tmp_path / "corpus")}
    line = subprocess.run(job, env=env, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    args, job, blend, notes = described(script(line), "--vocab-size 32000")
    parallel = job.parallel
    assert (parallel.num_gpus, job.context_length, parallel.pp, parallel.vpp) == (gpus, 131072, 4, chunks)
    assert (job.global_batch_size, job.packing.name, args.seed) == (4 * parallel.dp, "adaptive", 7)
    assert (job.model.num_layers, job.model.hidden_size, job.model.gated_linear_unit) == (*shape, True)
    assert blend.prefixes == [str(tmp_path / "corpus")]
    assert ACROSS not in notes  # they have --wlb already
    assert not list(tmp_path.glob("runs*"))


SCRIPTS = (
    "TP=8\ntorchrun pretrain_gpt.py --num-layers 4 --tensor-model-parallel-size $TP",
    "torchrun pretrain_gpt.py --num-layers $(cat layers)",
    "torchrun pretrain_gpt.py --num-layers `cat layers`",
    "if true; then\ntorchrun pretrain_gpt.py --num-layers 4\nfi",
    "torchrun pretrain_gpt.py --num-layers 4; torchrun pretrain_gpt.py --num-layers 8",
    "torchrun pretrain_gpt.py --num-layers 4 --data-path 'x",
    "srun bash -c 'torchrun --nnodes $N pretrain_gpt.py --num-layers 4'",
    "echo hello",
)


@pytest.mark.parametrize("text", SCRIPTS)
def test_scripts_are_refused_with_the_way_to_their_command(text, script, capsys):
    with pytest.raises(SystemExit):
        main(["analyze", *script(text).split()])
    error, *remedy = capsys.readouterr().err.splitlines()
    assert re.search("train.sh is (a script|neither)", error)
    assert "see " not in error and "To print that" in error and len(remedy) == 2
    assert remedy[1] == "  megatron-wlb analyze --launch command.txt"


def test_the_way_to_a_command_works(tmp_path):
    """What the error says, typed into bash, prints the command that the script would run, and runs nothing."""
    (tmp_path / "train.sh").write_text(
        "python -c 'print(1)'\nN=2; ARGS=(--seq-length 64 --save 'a b')\n[[ $N == 3 ]] && ARGS+=(--bf16)\n"
        'srun -N $N torchrun --nproc-per-node 4 pretrain_gpt.py --num-layers 3 "${ARGS[@]}" 2>&1 | tee log\n'
    )
    with pytest.raises(ValueError, match="is a script") as error:
        of_file(str(tmp_path / "train.sh"))
    subprocess.run(["bash", "-c", error.value.__notes__[0]], cwd=tmp_path, check=True)
    launched = of_file(str(tmp_path / "command.txt"))
    assert launched.launcher == "srun -N 2 torchrun --nproc-per-node 4".split()
    assert launched.flags == ["--num-layers", "3", "--seq-length", "64", "--save", "a b"]


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
        ("WORLD_SIZE=0 python", None),
        ("srun bash -c", 8),
    ],
)
def test_ranks_of_what_starts_them(launcher, gpus, script):
    line = "pretrain_gpt.py --num-layers 4"
    if launcher.endswith("-c"):
        line = f"'torchrun --nproc-per-node 8 {line}'"
    assert world_size(described(script(f"{launcher} {line}"), f"{MODEL} --seq-length {C}").args) == gpus


@pytest.mark.parametrize("ranks", ["srun -N x --ntasks-per-node 8", "mpirun -np all"])
def test_ranks_that_are_no_number(ranks, capsys):
    refused(capsys, f"{ranks} python pretrain_gpt.py {JOB}", "is not a number; put it in")


@pytest.mark.parametrize(
    "name", ["deepspeed pretrain_gpt.py", "torchrun pretrain_t5.py", "python run_clm.py", "x/train_rl.py"]
)
def test_other_trainers_are_named(name, capsys):
    refused(capsys, f"{name} {JOB}", "does not train a GPT of Megatron-core, and nothing else runs with --wlb")


def test_flags_beside_launch_overrule_what_is_no_number(script, data, capsys):
    """By any of their names, and however many values they have."""
    line = (
        "torchrun --nproc_per_node half --nnodes 2 pretrain_gpt.py --padded-vocab-size many --recompute-modules mlp "
        "core_attn --hidden-size=wide --data-path x y --tensor-model-parallel-size half --num-layers 3"
    )
    refused(capsys, script(line), "--padded-vocab-size: 'many' must be an integer")
    words = f"--tensor-model-parallel-size=2 --nproc-per-node 2 --recompute-modules --data-path {data}"
    _, job, blend, _ = described(words, JOB, script(line))
    assert (job.parallel, blend.prefixes) == (Parallel(tp=2, dp=2), [data])
    assert (job.model.padded_vocab_size, job.model.hidden_size, job.recompute.modules) == (1024, 512, ())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "is a folder; give the log"),
        (lambda path: path.write_bytes(bytes(9999)), "is binary"),
        (lambda path: path.write_bytes("a log".encode("utf-16")), "is UTF-16; give it as iconv"),
        (lambda path: path.write_bytes(b""), "holds nothing"),
        (lambda path: path.write_bytes(b"\xe9\xff\n" * 99), "neither a log .* nor a command"),
        (lambda path: os.mkfifo(path), "holds nothing"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device"),
        (lambda path: path.symlink_to("/proc/self/mem"), "Input/output error; give the log"),
        (lambda path: (path.touch(), os.truncate(path, 1 << 40)), "has 1,048,576 MiB, over 256; give .*sed -n"),
    ],
)
def test_files_that_are_neither(tmp_path, make, message):
    path = tmp_path / "train.log"
    make(path)
    with pytest.raises(ValueError, match=message) as error:
        of_file(str(path))
    assert str(path) in str(error.value)


def test_pipes(monkeypatch):
    """As `--launch <(bash 7b.sbatch --dry-run)` gives them; one that stays open and says nothing is refused."""
    reading, writing = os.pipe()
    with open(reading, "rb"):
        with open(writing, "wb") as other:
            monkeypatch.setattr(command, "SILENT_SECONDS", 0.01)
            with pytest.raises(ValueError, match="nothing came for"):
                of_file(f"/dev/fd/{reading}")
            other.write(b"torchrun pretrain_gpt.py --num-layers 4\n")
        assert of_file(f"/dev/fd/{reading}").flags == ["--num-layers", "4"]


def test_values_are_cut(capsys):
    assert len(refusal(capsys, "analyze", "--launch", "x" * 9999)) < 400
    assert len(refusal(capsys, "analyze", "--num-layers", "9" * 9999)) < 300
    assert len(refusal(capsys, "analyze", *JOB.split(), "--recompute-granularity", "x" * 9999)) < 400


@pytest.mark.parametrize(
    ("words", "crosses"),
    [
        ("torchrun pretrain_gpt.py", True),
        ("torchrun pretrain_gpt.py --reset-position-ids --eod-mask-loss", True),
        ("torchrun pretrain_gpt.py --reset-attention-mask", False),
        ("torchrun pretrain_gpt.py --dataloader-inter-document-masking", False),
        ("torchrun pretrain_gpt.py --sft", False),
        ("torchrun pretrain_gpt.py --wlb", False),
        ("", False),
    ],
)
def test_attention_across_documents_is_named(words, crosses):
    """Of a run; flags alone are none that exists."""
    assert (ACROSS in described(words, JOB).notes) == crosses


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{}/train.sh", "train.sh is a file, .* give --launch .*train.sh if it is a log or a command, or --data-path"),
        ("bash {}/train.sh --seq-length 64", "train.sh is a file"),
        ("--launch {}/x.py python x.py --seq-length 8", "and a command beside it; give one"),
        ("{}/f2.idx --num-gpus 8", "f2.idx is a file"),
        (
            "python nemo.py trainer.devices=8 model.x=[1,2]",
            "^nemo.py does not train a GPT",
        ),
        (
            "torchrun --nproc-per-node 8 --standalone mine.py model.x=1",
            "in mine.py --nproc-per-node 8 .*, and",
        ),
        ("python pretrain_gpt.py --num-layers 8", "^no --"),
        ("python {}/x.py --seq-length 8", "^no --"),
        ("--lr 3", "^no --"),
        ("", "^no --"),
        ("--model gpt5", r"argument --model: invalid choice: 'gpt5'"),
        ("--num-layers $LAYERS", r"argument --num-layers: '\$LAYERS' must be an integer"),
        ("--wlb-packings adaptive", r"--wlb-packings is no flag of ours"),
        ("--launch no/such/file", r"No such file"),
        (f"{JOB.split(' --vocab')[0]} --seq-length 64", "the vocabulary is not known; give --vocab-size"),
    ],
)
def test_words_that_are_no_flags(words, message, tmp_path, script, capsys):
    script("python nemo.py model.x=1\n")
    for name in ("f2.idx", "x.py"):
        (tmp_path / name).touch()
    refused(capsys, words.format(tmp_path), message)

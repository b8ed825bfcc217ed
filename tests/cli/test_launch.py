"""Launch lines and scripts as people paste them into `megatron-wlb analyze`, and what is to be taken out of them."""

import io

import numpy as np
import pytest

from megatron_wlb.adapter.arguments import REFUSED
from megatron_wlb.cli.launch import NOT_SIMULATED, words_of
from megatron_wlb.job import Parallel
from tests.adapter.datasets import write_index
from tests.cli.analyses import JOB, LARGE, MODEL, C, analyse, described, refused
from tests.cli.commands import ROOT

LINE = """torchrun --nproc_per_node=2 --nnodes 2 --rdzv-endpoint host:29500 pretrain_gpt.py \
    --num-layers 4 --hidden-size 512 --num-attention-heads 4 --vocab-size 100 --swiglu --bf16 --use-flash-attn \
    --tensor-model-parallel-size 2 --sequence-parallel --seq-length 4096 --max-position-embeddings 4096 \
    --micro-batch-size 1 --global-batch-size 8 --lr 1.5e-4 --min-lr=1e-5 --save $CHECKPOINTS \
    --recompute-granularity selective --tokenizer-type GPTSentencePieceTokenizer --data-path PREFIX \\
    --split 99,1,0 2>&1 | tee "log $RANK.txt"
"""


@pytest.fixture
def script(tmp_path):
    """Writes a launch script, and gives the flag that names it."""

    def write(text):
        (tmp_path / "train.sh").write_text(text)
        return f"--launch {tmp_path / 'train.sh'}"

    return write


def test_a_launch_line(script, data, monkeypatch):
    """As words, from a file, and from standard input: the same job."""
    line = LINE.replace("PREFIX", data)
    monkeypatch.setattr("sys.stdin", io.StringIO(line))
    for words in (script(line), "--launch=-", line.replace("\\\n", " ").split(" 2>&1")[0]):
        args, job, blend, _ = described(words)
        assert (job.parallel, job.num_micro_batches, blend.prefixes) == (Parallel(tp=2, dp=2), 8, [data])
        assert (job.model.num_layers, job.model.padded_vocab_size) == (4, 256)
        assert job.model.ffn_hidden_size == 512 * 8 // 3 // 64 * 64
        assert args.ignored == IGNORED


IGNORED = (
    "--rdzv-endpoint --bf16 --use-flash-attn --sequence-parallel --max-position-embeddings --lr --min-lr --save "
    "--tokenizer-type"
).split()


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


H100 = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
CHECKPOINTS=${1:-"checkpoints/8b"}
TOKENIZER_ARG=${2:-"MOCK"} # or a path
DATA_ARG=${3:-"MOCK"}     # don't give it to use mock data
mkdir -p "$(dirname "$CHECKPOINTS")"
GPUS_PER_NODE=8
NUM_NODES=2; TP_SIZE=1
export CP_SIZE=2 SEQ_LENGTH=8192
NODE_RANK=${NODE_RANK:-0}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
DTYPE="fp8"
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank $NODE_RANK
)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --swiglu
    --seq-length $SEQ_LENGTH
    --hidden-dropout 0.0   # --num-layers 99
    --attention-backend fused
)
TRAINING_ARGS=(
    --micro-batch-size ${MICRO_BATCH_SIZE:=1}
    --global-batch-size $((4 * GPUS_PER_NODE * NUM_NODES))
    --rampup-batch-size 16 16 1000
    --exit-duration-in-mins 235
    --bf16
)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-param-gather"
    )
fi
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP_SIZE
    --context-parallel-size $CP_SIZE
    # --pipeline-model-parallel-size 7
)
TRAINING_ARGS+=("${MODEL_PARALLEL_ARGS[@]}")
if [[ "$DATA_ARG" == "MOCK" ]] || [[ -z "$TOKENIZER_ARG" ]]; then
    DATA_ARGS_LIST+=(
        "--mock-data"
        "--vocab-size 128256"
        "--split '99,1,0'"
    )
else
    DATA_ARGS_LIST+=(
        "--data-path $DATA_ARG"
        "--tokenizer-model $TOKENIZER_ARG"
        "--split '99,1,0'"
        "--vocab-size 128256"
    )
fi
EVAL_AND_LOGGING_ARGS=( --profile --profile-step-start 4 --save "$CHECKPOINTS" )
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} ${DTYPE_ARGS[@]} \\
    ${DATA_ARGS_LIST[@]} ${EVAL_AND_LOGGING_ARGS[@]}
"""


ACROSS = (
    "The launch line lets attention cross documents (it has neither --reset-attention-mask nor "
    "--dataloader-inter-document-masking); Megatron here is the same run with attention inside of them."
)


def test_a_script_of_the_shape_of_nvidias(script, data):
    args, job, blend, notes = described(script(H100), "--data-path", data)
    assert (job.parallel, job.num_micro_batches) == (Parallel(cp=2, dp=8), 64)
    assert (job.context_length, blend.prefixes, len(blend.sources[0].lengths)) == (8192, [data], round(0.99 * 8000))
    assert (job.model.num_layers, job.model.num_query_groups, job.model.padded_vocab_size) == (32, 8, 128256)
    assert notes == [
        ACROSS,
        "Left out, since training with --wlb refuses them: --rampup-batch-size --mock-data.",
        "FP8 and FP4 (--fp8-format --fp8-param-gather) are not modelled: all numbers are those of bf16.",
        "Not simulated, and so without effect on these numbers: --attention-backend.",
    ]
    known = "--node_rank --use-mcore-models --exit-duration-in-mins --bf16 --tokenizer-model --profile "
    assert args.ignored == [*known.split(), "--profile-step-start", "--save"]


def test_a_job_of_slurm_whose_flags_are_one_word(script, data):
    """As upstream's sc21 scripts: no torchrun, GPUs by #SBATCH, training in `sh -c`."""
    launch = script(
        "#!/bin/bash\n#SBATCH --nodes=2 --exclusive --ntasks-per-node=8\n"
        f'options=" \\\n --seq-length {C} {MODEL} \\\n --context-parallel-size 2 --data-path {data}"\n'
        'run="python -u pretrain_gpt.py ${options} --dataloader-type cyclic"\n'
        'srun -l --output=log sh -c "${run}"\n'
    )
    args, job, blend, _ = described(launch)
    assert (job.parallel, blend.prefixes) == (Parallel(cp=2, dp=8), [data])
    assert args.refused == ["--dataloader-type"] and "--dataloader-type" not in args.ignored
    assert described("--num-gpus 4", launch).job.parallel.num_gpus == 4


VALUES = {
    "attention_backend": "local",
    "attention_dropout": "0.1",
    "cuda_graph_impl": "local",
    "dataloader_type": "single",
    "eval_micro_batch_size": "2",
    "load": "s3://bucket",
    "moe_token_dispatcher_type": "allgather",
    "position_embedding_type": "mrope",
    "rerun_mode": "report_stats",
    "save": "s3://bucket",
    "softmax_type": "learnable",
}
"""Of flags of which not every value is refused."""


@pytest.mark.parametrize("name", [*REFUSED, *VALUES])
def test_what_training_refuses_is_to_be_taken_out(name, capsys):
    """Named, or refused here already."""
    flag = f"--{name.replace('_', '-')}"
    if flag[2:] in NOT_SIMULATED:
        refused(capsys, f"{JOB} {flag} 8", f"{flag}: .* cannot be simulated")
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
    assert described(JOB, "--attention-dropout $DROPOUT").args.refused == ["--attention-dropout"]


def test_what_to_take_out_is_printed(tmp_path, lengths, capsys):
    write_index(tmp_path / "long.idx", 8 * lengths + 1)
    words = f"--steps 40 --sft --rampup-batch-size 2 2 100 --dataloader-type=cyclic --html {tmp_path / 'page'}"
    analyse(tmp_path, LARGE, words, "--data-path", str(tmp_path / "long"))
    printed = capsys.readouterr().out
    assert printed.endswith("Take out:\n  --sft --rampup-batch-size --dataloader-type\n")
    assert "--wlb-packing wlb" in printed.split("Add to the launch line:\n")[1]
    assert "<h2>Take out</h2><pre>--sft" in (tmp_path / "page").read_text()


@pytest.mark.parametrize(
    ("name", "gpus", "shape"), [("550m", 32, (24, 1280)), ("7b", 64, (32, 4096)), ("70b", 256, (80, 8192))]
)
def test_our_own_slurm_scripts(name, gpus, shape, tmp_path):
    """With the train.sh that they source, the nodes that they ask for, and 128K by default."""
    write_index(tmp_path / "corpus.idx", np.full(99, 9000))
    launch = f"--launch {ROOT / f'scripts/slurm/{name}.sbatch'}"
    _, job, _, notes = described(launch, "--data-path", str(tmp_path / "corpus"))
    parallel = job.parallel
    assert (parallel.num_gpus, job.context_length, parallel.pp, parallel.vpp) == (gpus, 131072, 4, 2)
    assert (job.global_batch_size, job.packing.name) == (4 * parallel.dp, "adaptive")
    assert (job.model.num_layers, job.model.hidden_size, job.model.gated_linear_unit) == (*shape, True)
    assert ACROSS not in notes  # they have --wlb already
    assert not any("may hold" in note for note in notes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#SBATCH --nodes=8\n$SLURM_JOB_NUM_NODES", "8"),
        ("#SBATCH -p x --nodes=8 --gres=gpu:h100:4 --time 1\n#SBATCH --ntasks-per-node=2", "; WORLD_SIZE=32"),
        ("#SBATCH --gpus-per-node=4 -N 2\n$SLURM_GPUS_ON_NODE", "4 ; WORLD_SIZE=8"),
        ("#SBATCH --gpus-per-node=4\n#SBATCH --ntasks-per-node=4", ""),  # on as many nodes as sbatch is told
    ],
)
def test_what_slurm_is_asked_for(text, words):
    assert " ".join(words_of(text)) == words


@pytest.mark.parametrize(
    "text",
    [
        "A=" + "$aaaa" * 9999 + "(",
        "x # " * 9999 + "'a'",
        ". " + "a" * 99999 + "(",
        '"' + "${a:-" * 9999 + '"',
        "$((" * 9999,
        "((a" * 9999,
        "${a:-${" * 9999,
        "$((1" + "*(1+1)" * 9999 + "))",
        'A=\'eval "$A"; sh -c "$A"; sh -c "$A"\'; eval "$A"',
    ],
)
def test_words_of_a_shell_end_however_odd(text):
    """Of what makes a regular expression try every way to divide it, which would take years."""
    words_of(text)


@pytest.mark.parametrize(
    "text",
    [
        "A=x\n" + 'A="$A$A"\n' * 40,
        "A=x\n" + "A+=$A\n" * 40,
        "A+=x\n" * 99999,
        "A=(x)\n" + 'A+=("${A[@]}")\n' * 40,
        "B='" + "x" * 9999 + "'\n" + "$B" * 999,
        "#" + "x" * (1 << 20),
    ],
)
def test_a_script_that_grows_by_its_variables(text, script, capsys):
    refused(capsys, script(text), "characters with its variables put in, and may have 1048576")


def test_a_script_with_an_open_quote(script, capsys):
    line = "torchrun pretrain_gpt.py --data-path 'x"
    refused(capsys, script(line), "is not one of a shell: no closing quotation")


VARIED = """TP=${TP:-half}
NUM=${NUM}
PAR="--tensor-model-parallel-size $TP"
PAR+=" --padded-vocab-size many --nproc_per_node $NUM"
torchrun $PAR --nnodes 2 pretrain_gpt.py --recompute-modules mlp $A core_attn --hidden-size=wide --data-path x y
"""


def test_flags_beside_launch_overrule_what_is_no_number(script, data, capsys):
    """By any of their names, and however many values they have."""
    refused(capsys, script(VARIED), "--tensor-model-parallel-size: 'half' must be an integer")
    words = f"--tensor-model-parallel-size=2 --nproc-per-node 2 --recompute-modules --data-path {data}"
    _, job, blend, _ = described(words, JOB, script(VARIED))
    assert (job.parallel, blend.prefixes) == (Parallel(tp=2, dp=2), [data])
    assert (job.model.padded_vocab_size, job.model.hidden_size, job.recompute.modules) == (1024, 512, ())


def test_options_that_the_script_itself_reads(script):
    launch = script(
        'while [ $# -gt 0 ]; do case $1 in --global-batch-size) GBS="$2"; shift 2 ;; --context-parallel-size) shift;; '
        "esac; done\ntorchrun --nproc-per-node 4 pretrain_gpt.py --context-parallel-size 2 --global-batch-size 16\n"
    )
    job = described(launch, f"{MODEL} --seq-length {C}").job
    assert (job.parallel, job.num_micro_batches) == (Parallel(cp=2, dp=2), 16)


def test_string_options_that_are_built_up(script, data):
    launch = script(
        f'DP=2 OPTIONS="{MODEL} --data-path {data}"\n'
        "SEQ=$((4*1024)) GBS=$((DP*8)) PAR='--tensor-model-parallel-size 2'\n"
        'if [ "$LONG" = 1 ]; then\n  PAR+=" --context-parallel-size 2"\nfi\n'
        'PAR="$PAR --pipeline-model-parallel-size 2"\n'
        "torchrun --nproc-per-node 8 --nnodes $((DP)) pretrain_gpt.py $OPTIONS $PAR --seq-length $SEQ "
        "--global-batch-size ${GBS}\necho done\n"
    )
    _, job, blend, _ = described(launch)
    assert job.parallel == Parallel(tp=2, cp=2, pp=2, dp=2)
    assert (job.context_length, job.num_micro_batches, blend.prefixes) == (C, 16, [data])


@pytest.mark.parametrize(
    ("before", "command", "names"),
    [
        ("", "torchrun $DIST pretrain_gpt.py --lr $LR $GPT ${MORE} --save $OUT/x $GPT", "$DIST, $GPT, ${MORE}"),
        ("", "python -u pretrain_gpt.py --bf16 $A --swiglu ${B[@]} --lr 3 $C --min-lr=1 $D", "$A, ${B[@]}, $C, $D"),
        ("A=$(cat flags)", "python pretrain_gpt.py $A", "$A"),
        ('A="$A --lr 3"', "torchrun -m x $A", "$A"),
        ("A=1 B=() C=", 'python pretrain_gpt.py $A ${B[@]} $C ${D:-} "$@" $1 $* --save "$OUT" -o $O', None),
        ("cd $HOME", 'if [ -n $X ]; then echo --flag 3 $Y; fi; srun sh -c "echo $Z"', None),
        ("", "srun bash -c 'torchrun x.py $A'", "$A"),
        ("", "torchrun x.py --data-path 0.3 $A 0.7 $B --bf16 ${C[@]:1} ${D^^}", "${C[@]:1}, ${D^^}"),
    ],
)
def test_variables_that_the_file_does_not_assign(before, command, names, script, data):
    notes = described(script(f"{before}\n{command}\n"), JOB, "--data-path", data).notes
    said = f"Flags that {names} may hold are missing here: the file does not say what is in them."
    assert [note for note in notes if note.startswith("Flags that ")] == [said] * bool(names)


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
def test_attention_across_documents_is_named(words, crosses, script):
    """Of a launch line and of a script; flags alone are no run that exists."""
    for line in (words, script(words)):
        assert (ACROSS in described(line, JOB).notes) == crosses


def test_masks_are_no_matter():
    words = "--reset-position-ids --reset-attention-mask --eod-mask-loss --dataloader-inter-document-masking"
    args, _, _, notes = described(JOB, words)
    assert args.ignored == words.split()
    assert not any("Not simulated" in note for note in notes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{}/train.sh", "train.sh is a file, .* give --launch .*train.sh if .* --data-path if it is a dataset"),
        ("bash {}/train.sh --seq-length 64", "train.sh is a file"),
        ("{}/f2.idx --num-gpus 8", "f2.idx is a file"),
        (
            "python nemo.py trainer.devices=8 model.x=[1,2]",
            "in python nemo.py trainer.*, and nothing else",
        ),
        (
            "torchrun --nproc-per-node 8 --standalone nemo.py model.x=1",
            "in torchrun --standalone nemo.py model.x=1, and",
        ),
        ("--launch {}/train.sh", "no flags of pretrain_gpt.py such as --num-layers in python nemo.py model.x=1, and"),
        ("python pretrain_gpt.py --num-layers 8", "^no --"),
        ("python {}/x.py --seq-length 8", "^no --"),
        ("--lr 3", "^no --"),
        ("", "^no --"),
        ("--model gpt5", r"argument --model: invalid choice: 'gpt5'"),
        ("--num-layers $LAYERS", r"argument --num-layers: '\$LAYERS' must be an integer"),
        ("--wlb-packings adaptive", r"--wlb-packings is no flag of ours"),
        ("--launch no/such/file", r"No such file"),
    ],
)
def test_words_that_are_no_flags(words, message, tmp_path, script, capsys):
    script("python nemo.py model.x=1\n")
    for name in ("f2.idx", "x.py"):
        (tmp_path / name).touch()
    refused(capsys, words.format(tmp_path), message)

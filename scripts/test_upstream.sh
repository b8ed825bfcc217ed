#!/usr/bin/env bash
# Tests a Megatron-LM checkout with the plugin: scripts/test_upstream.sh CHECKOUT, of a supported version.
# Works on a copy. The patch must apply and come off again; the unmodified script under megatron_wlb.run, the patched one
# and, from 0.19 on, this repository's own must train the same with --wlb, and the first two without it, too; with the
# default packing both ways have the same losses.
# Needs no GPU, and fetches nothing of upstream's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

checkout=${1:?usage: scripts/test_upstream.sh CHECKOUT, a clone of Megatron-LM}
info=$checkout/megatron/core/package_info.py
if [[ ! -f $info || ! -f $checkout/pretrain_gpt.py ]]; then
    echo "test_upstream: $checkout is no Megatron-LM checkout: megatron/core/package_info.py or pretrain_gpt.py is missing" >&2
    exit 2
fi
bash scripts/setup.sh
# Upstream builds its dataset helpers with python3 and python3-config; virtual environments lack the latter.
PATH=$PWD/.venv/bin:$PATH
MAKEFLAGS=LIBEXT=$(python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
export MAKEFLAGS
version=$(python -c 'import runpy, sys; print(runpy.run_path(sys.argv[1])["__version__"].split("+")[0])' "$info")
patch=$PWD/patches/pretrain_gpt.patch

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for copy in plain patched; do
    mkdir "$work/$copy"
    cp -r "$checkout"/{pretrain_gpt.py,gpt_builders.py,model_provider.py,megatron} "$work/$copy"
done
GIT_DIR=none git -C "$work/patched" apply "$patch"
GIT_DIR=none git -C "$work/patched" apply --reverse "$patch"
cmp "$work/patched/pretrain_gpt.py" "$checkout/pretrain_gpt.py"
GIT_DIR=none git -C "$work/patched" apply "$patch"
echo "== megatron-core $version: the patch applies and comes off again"

python -c 'import pathlib, sys; from tests.adapter.datasets import write_dataset as write
write(pathlib.Path(sys.argv[1]), seed=0, documents=900)' "$work/data"
flags=(
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 512
    --max-position-embeddings 512 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1
    --global-batch-size 4 --train-iters 3 --lr 1e-3 --lr-decay-style constant --tokenizer-type NullTokenizer
    --vocab-size 255 --data-path "$work/data" --split '100,0,0' --eval-iters 0 --eval-interval 100
    --log-interval 1 --reset-attention-mask --reset-position-ids --calculate-per-token-loss --data-cache-path "$work/cache" --distributed-backend gloo
)
balanced=(--context-parallel-size 2 --wlb --wlb-packing paper:256 --wlb-max-tokens 768)

train() { # NAME CHECKOUT SCRIPT..., which are flags of torchrun's, and ours
    local name=$1 path=$PWD:$work/$2
    shift 2
    if ! PYTHONPATH=$path CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=1 timeout 600 \
        torchrun --standalone --nproc-per-node 2 "$@" "${flags[@]}" >"$work/$name.txt" 2>&1; then
        tail -n 60 "$work/$name.txt" >&2
        echo "test_upstream: $name failed with megatron-core $version" >&2
        exit 1
    fi
    # Losses alone: times differ from run to run.
    grep -o 'lm loss: [^|]*\|wlb step.* documents' "$work/$name.txt" >"$work/$name.losses"
}

same() { # NAME NAME: of two runs
    if ! diff "$work/$1.losses" "$work/$2.losses"; then
        echo "test_upstream: $1 and $2 trained differently" >&2
        exit 1
    fi
}

train unmodified plain -m megatron_wlb.run "$work/plain/pretrain_gpt.py" "${balanced[@]}"
train patched patched "$work/patched/pretrain_gpt.py" "${balanced[@]}"
same unmodified patched
[[ $(grep -c 'wlb step' "$work/patched.losses") == 3 ]]
if [[ $version != 0.1[78].* ]]; then
    train ours plain pretrain_gpt.py "${balanced[@]}"
    same ours unmodified
fi
train unmodified_without plain -m megatron_wlb.run "$work/plain/pretrain_gpt.py"
train patched_without patched "$work/patched/pretrain_gpt.py"
same unmodified_without patched_without
[[ $(grep -c 'lm loss' "$work/patched_without.losses") == 3 ]]
train unmodified_default plain -m megatron_wlb.run "$work/plain/pretrain_gpt.py" --context-parallel-size 2 --wlb
python - "$work"/unmodified_{default,without}.txt <<'PYTHON'
import pathlib, re, sys
with_wlb, without = (re.findall(r"lm loss: (\S+)", pathlib.Path(path).read_text()) for path in sys.argv[1:])
assert all(abs(float(a) / float(b) - 1) <= 1e-6 for a, b in zip(with_wlb, without, strict=True)), (with_wlb, without)
PYTHON
echo "== megatron-core $version: unmodified and patched scripts train the same, with --wlb what they train without it"

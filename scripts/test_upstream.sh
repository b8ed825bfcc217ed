#!/usr/bin/env bash
# Tests Megatron-LM with the plugin: scripts/test_upstream.sh [CHECKOUT], of a supported version; by default the installed
# megatron-core, with the script of the tests, since wheels have none.
# Works on a copy. From one checkpoint, the unmodified script under megatron_wlb.run, the patched one and, from 0.19 on,
# this repository's own must train the same with --wlb, the first two the same without it; with the default packing both
# ways have the same losses. The patch must apply and come off again, and patches/upstream apply and work on a new main.
# Needs no GPU, and fetches nothing of upstream's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

checkout=${1:-}
info=$checkout/megatron/core/package_info.py
if [[ -n $checkout && (! -f $info || ! -f $checkout/pretrain_gpt.py) ]]; then
    echo "test_upstream: $checkout is no Megatron-LM checkout: megatron/core/package_info.py or pretrain_gpt.py is missing" >&2
    exit 2
fi
bash scripts/setup.sh
# Upstream builds its dataset helpers with python3 and python3-config; virtual environments lack the latter.
PATH=$PWD/.venv/bin:$PATH
MAKEFLAGS=LIBEXT=$(python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
export MAKEFLAGS

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work"/{plain,patched}
script=$PWD/tests/adapter/upstream_script.py
if [[ -n $checkout ]]; then
    script=$work/plain/pretrain_gpt.py
    patch=$PWD/patches/pretrain_gpt.patch
    for copy in plain patched; do
        cp -r "$checkout"/{pretrain_gpt.py,gpt_builders.py,model_provider.py,megatron} "$work/$copy"
    done
    GIT_DIR=none git -C "$work/patched" apply "$patch"
    GIT_DIR=none git -C "$work/patched" apply --reverse "$patch"
    cmp "$work/patched/pretrain_gpt.py" "$checkout/pretrain_gpt.py"
    GIT_DIR=none git -C "$work/patched" apply "$patch"
fi
version=$(PYTHONPATH=$work/plain python -c 'from megatron.core.package_info import __version__; print(__version__)' 2>/dev/null)

python -c 'import pathlib, sys; from tests.adapter.datasets import write_dataset as write
write(pathlib.Path(sys.argv[1]), seed=0, documents=900)' "$work/data"
flags=(
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 512
    --max-position-embeddings 512 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1
    --global-batch-size 4 --lr 1e-3 --lr-decay-style constant --tokenizer-type NullTokenizer
    --vocab-size 255 --data-path "$work/data" --split '100,0,0' --eval-iters 0 --eval-interval 100 --log-interval 1
    --reset-attention-mask --reset-position-ids --calculate-per-token-loss --data-cache-path "$work/cache"
    --distributed-backend gloo --transformer-impl local --ckpt-format torch
)
# Initial weights depend on the layout on a CPU, so that all runs begin with those of one checkpoint.
save=(--train-iters 1 --save "$work/start" --save-interval 1)
load=(--train-iters 3 --load "$work/start" --finetune)
balanced=("${load[@]}" --context-parallel-size 2 --wlb --wlb-packing paper:256 --wlb-max-tokens 768)

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
    if grep '> wlb: .* newer' "$work/$name.txt"; then
        echo "test_upstream: add this to megatron_wlb/adapter/upstream/scripts.py if $name is right" >&2
        exit 1
    fi
}

same() { # NAME NAME: of two runs
    if ! diff "$work/$1.losses" "$work/$2.losses"; then
        echo "test_upstream: $1 and $2 trained differently" >&2
        exit 1
    fi
}

train start plain -m megatron_wlb.run "$script" "${save[@]}"
train unmodified plain -m megatron_wlb.run "$script" "${balanced[@]}"
[[ $(grep -c 'wlb step' "$work/unmodified.losses") == 3 ]]
train unmodified_without plain -m megatron_wlb.run "$script" "${load[@]}"
[[ $(grep -c 'lm loss' "$work/unmodified_without.losses") == 3 ]]
if [[ -n $checkout ]]; then
    train patched patched "$work/patched/pretrain_gpt.py" "${balanced[@]}"
    same unmodified patched
    train patched_without patched "$work/patched/pretrain_gpt.py" "${load[@]}"
    same unmodified_without patched_without
fi
if [[ $version != 0.18.* ]]; then
    train ours plain pretrain_gpt.py "${balanced[@]}"
    same ours unmodified
fi
train unmodified_default plain -m megatron_wlb.run "$script" "${load[@]}" --context-parallel-size 2 --wlb
python - "$work"/unmodified_{default,without}.txt <<'PYTHON'
import pathlib, re, sys
with_wlb, without = (re.findall(r"lm loss: (\S+)", pathlib.Path(path).read_text()) for path in sys.argv[1:])
assert all(abs(float(a) / float(b) - 1) <= 1e-6 for a, b in zip(with_wlb, without, strict=True)), (with_wlb, without)
PYTHON
if [[ -n $checkout ]] && grep -q sequence_packing_scheduler "$checkout/pretrain_gpt.py"; then # main from #6742 on
    cp -r "$work/plain" "$work/changed"
    for each in "$PWD"/patches/upstream/*.patch; do
        GIT_DIR=none git -C "$work/changed" apply "$each"
    done
    PYTHONPATH=$work/changed python -m pytest -q tests/adapter/test_upstream_patches.py
fi
echo "== megatron-core $version: all scripts train the same, with --wlb what they train without it"

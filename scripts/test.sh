#!/usr/bin/env bash
# Sets up and runs the tests: scripts/test.sh [--full] [--versions] [pytest arguments, paths from the repository root].
# With --versions, those of the adapter run with every version of megatron-core that is supported, one after another.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

older=(0.18.2) # .venv has the newest
versions=false
path_given=false
arguments=()
for argument in "$@"; do
    case $argument in
        --versions)
            versions=true
            continue
            ;;
        --full) argument=--run-full ;;
        *) [[ ! -e ${argument%%::*} ]] || path_given=true ;;
    esac
    arguments+=("$argument")
done
if ! $path_given; then
    $versions && arguments+=(tests/adapter) || arguments+=(tests)
    arguments+=(-n auto --maxprocesses 4 --dist worksteal)
fi

failed=()
if $versions; then
    for version in "${older[@]}"; do
        bash scripts/setup_version.sh "$version"
        echo "== megatron-core $version"
        ".venv-$version/bin/python" -m pytest -q "${arguments[@]}" || failed+=("$version")
    done
    echo "== megatron-core of .venv"
fi
.venv/bin/python -m pytest -q "${arguments[@]}" || failed+=(".venv")
if [[ ${#failed[@]} -gt 0 ]]; then
    ! $versions || echo "test: failed with megatron-core ${failed[*]}" >&2
    exit 1
fi

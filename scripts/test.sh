#!/usr/bin/env bash
# Sets up and runs the tests: scripts/test.sh [--full] [pytest arguments, paths from the repository root].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

paths=(tests)
arguments=()
for argument in "$@"; do
    if [[ $argument == --full ]]; then
        argument=--run-full
    elif [[ -e ${argument%%::*} ]]; then
        paths=()
    fi
    arguments+=("$argument")
done
exec .venv/bin/python -m pytest -q ${paths[@]+"${paths[@]}"} ${arguments[@]+"${arguments[@]}"}

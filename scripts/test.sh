#!/usr/bin/env bash
# Sets up and runs the tests: scripts/test.sh [--full] [pytest arguments, paths from the repository root].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

path_given=false
arguments=()
for argument in "$@"; do
    case $argument in
        --full) argument=--run-full ;;
        *) [[ ! -e ${argument%%::*} ]] || path_given=true ;;
    esac
    arguments+=("$argument")
done
$path_given || arguments+=(tests -n auto --maxprocesses 4 --dist worksteal)
.venv/bin/python -m pytest -q "${arguments[@]}"

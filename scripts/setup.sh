#!/usr/bin/env bash
# Makes .venv in the repository root with everything that tests and the demo need, or with `demo` what the demo needs.
# Returns at once when nothing changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
constraints=requirements/constraints.txt
extras=train,analysis,demo
[[ ${1:-} == demo ]] || extras+=,dev
stamp=$venv/.megatron_wlb-$extras

# Besides the inputs of the build: where the tree lies (an editable install points there) and which extensions are
# built (a cleaned tree has lost them, whatever the virtual environment says).
fingerprint() {
    {
        pwd
        find megatron_wlb -name '*.so' | sort
        find setup.py pyproject.toml "$constraints" csrc -type f -not -name '.*' -print0 | sort -z | xargs -0 cat
    } | sha256sum
}

usable() {
    "$1" - >/dev/null 2>&1 <<'PYTHON'
import ensurepip, os, sys, sysconfig, venv
assert sys.version_info >= (3, 12)
assert os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
PYTHON
}

# Every candidate is run: a pyenv shim may exist and fail, a system Python may lack venv or its headers.
find_python() {
    local versions=${PYENV_ROOT:-$HOME/.pyenv}/versions candidate
    for candidate in python3.12 "$versions"/3.12*/bin/python python3.13 python3.14 python3 "$versions"/*/bin/python; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: no working Python >= 3.12 with venv and headers (Python.h) on PATH or under $versions." >&2
    echo "setup: install one, for example python3.12, python3.12-venv and python3.12-dev, or 'pyenv install 3.12'." >&2
    return 1
}

if ! "$venv/bin/python" -c 'import sys, pip; assert sys.version_info >= (3, 12)' >/dev/null 2>&1; then
    python=$(find_python)
    echo "setup: $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
for made in "$stamp" "$stamp,dev"; do
    if [[ -f $made && $(<"$made") == "$(fingerprint)" ]]; then
        exit 0
    fi
done
rm -f "$venv"/.megatron_wlb-*

# Byte code is made when a module is first imported; of all modules it would take as long as unpacking them.
pip=("$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check --constraint "$constraints")
torch=$(grep -m1 -oE '^torch==[^ ;#]+' "$constraints")
# On its own and pinned: resolved together with the rest, a machine without a GPU may get another build.
echo "setup: $torch with CUDA, 2.6 GB to download"
"${pip[@]}" "$torch"
echo "setup: megatron_wlb and its dependencies"
"${pip[@]}" --editable ".[$extras]"
fingerprint >"$stamp"

#!/usr/bin/env bash
# Makes .venv-VERSION with another megatron-core over .venv: scripts/setup_version.sh VERSION, for example 0.18.2.
# Everything else, torch above all, comes from .venv, so that an environment costs a few MB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=${1:?usage: scripts/setup_version.sh VERSION, a version of megatron-core such as 0.18.2}
base=.venv/bin/python
venv=.venv-$version
python=$venv/bin/python

ready() {
    "$python" - "$version" >/dev/null 2>&1 <<'PYTHON'
import importlib.metadata, importlib.util, os, sys
assert importlib.metadata.version("megatron-core") == sys.argv[1]
assert os.path.samefile(os.path.dirname(importlib.util.find_spec("torch").origin) + "/../../../..", ".venv")
PYTHON
}

if [[ ! -x $base ]]; then
    bash scripts/setup.sh
fi
if ready; then
    exit 0
fi
echo "setup: $venv with megatron-core $version"
rm -rf "$venv"
"$base" -m venv --without-pip "$venv"
echo '*' >"$venv/.gitignore"
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
# Last on the path, so that what this environment has of its own wins; addsitedir also reads its .pth files.
echo "import site; site.addsitedir('$("$base" -c "$purelib")')" >"$("$python" -c "$purelib")/base.pth"
"$base" -m pip --python "$python" install --quiet --disable-pip-version-check --no-deps "megatron-core==$version"
ready || {
    echo "setup: $venv lacks megatron-core $version, or torch of .venv" >&2
    exit 1
}

#!/usr/bin/env bash
# Profiles this machine, predicts a small run, trains it Megatron's way and with --wlb by turns, kills and resumes it, and
# writes demo/report.html. Needs no GPU; uses those that are there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
echo "demo: downloads 2.9 GB the first time, 2.7 of them torch with CUDA"
bash scripts/setup.sh demo
exec .venv/bin/python -m scripts.demo.run

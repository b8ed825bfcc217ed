#!/usr/bin/env bash
# Predicts what --wlb brings to a 64-GPU job, trains a small GPT plain and with --wlb by turns, kills and resumes it, and
# writes demo/report.html. Needs no GPU; uses those that are there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh demo
exec .venv/bin/python -m scripts.demo.run

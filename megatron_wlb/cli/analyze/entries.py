"""A report as JSON."""

import datetime
import json
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_wlb import __version__
from megatron_wlb.cli.analyze.report import Faster, Layout, Measured, Ratio, Report, sources
from megatron_wlb.cli.analyze.setup import WARM_UP, Setup
from megatron_wlb.describe.alternatives import gib
from megatron_wlb.hardware.network import NETWORKS
from megatron_wlb.hardware.profile import profile_file
from megatron_wlb.settings import flag_with_value

FORMAT = "megatron-wlb-analysis"
VERSION = 14


def entries(report: Report) -> dict[str, Any]:
    """Return the report as JSON types."""
    setup = report.setup
    screened = setup.run.screened
    schemes = zip(report.schemes, report.speedups, strict=True)
    return {
        "format": FORMAT,
        "version": VERSION,
        "prediction": True,
        "job": setup.job.to_json(),
        "model": setup.run.model,
        "data": report.documents._asdict(),
        "launch": setup.run.launched.source,
        "date": datetime.date.today().isoformat(),
        "release": __version__,
        "left_out": screened.left_out,
        "scheme_of_run": "thd" if setup.masks_documents else "plain",
        "steps": {"warm_up": WARM_UP} | report.steps._asdict(),
        "profile": origin_of(setup),
        "published": report.published._asdict(),
        "best_size": report.best_size,
        "sources": sources(report.schemes),
        "balance": report.balance,
        "prices": [each._asdict() for each in report.prices],
        "readings": [each._asdict() for each in report.readings],
        "micro_batches": [
            {"micro_batches": each.job.num_micro_batches, "time": each.time, "late_steps": each.late_steps}
            for each in setup.tried
        ],
        "schemes": dict(zip(report.schemes._fields, (_scheme(*each) for each in schemes), strict=True)),
        "layouts": [_layout(each) for each in report.layouts],
        "recompute": report.recompute and _recompute(report.recompute),
        "delay": report.delay and _delay(report.delay),
        "other_flags": [{"flag": flag} | _faster(each) for flag, each in report.other_flags.items()],
        "flags": setup.flags(),
        "pins": setup.pins(),
        "warnings": screened.remarks + setup.data.remarks,
        "notes": setup.notes,
        "ignored": screened.ignored,
        "refused": screened.refused,
    }


def _scheme(measured: Measured, speedup: Ratio) -> dict[str, Any]:
    job = measured.scheme.job
    return {
        "packing": job.packing.name,
        "num_micro_batches": measured.scheme.num_micro_batches,
        "micro_batch_size": measured.scheme.micro_batch_size,
        "cp_sharding": job.sharding.cp_sharding if job.parallel.cp > 1 else None,
        "step_ms": measured.step_ms,
        "us_per_token": measured.us_per_token,
        "us_per_token_error": measured.relative_error,
        "late_steps": measured.late_steps,
        "max_delay_steps": measured.max_delay_steps,
        "token_cv": measured.token_cv,
        "longest_micro_batch_tokens": measured.scheme.longest_tokens,
        "activation_gib": measured.activation_gib,
        "imbalance": {
            **measured.imbalance,
            "work_mean": float(measured.work_imbalance.mean()),
            "work_p95": float(np.quantile(measured.work_imbalance, 0.95)),
        },
        "speedup": speedup.value,
        "speedup_error": speedup.error,
        "parts_ms": measured.parts_ms,
    }


def _faster(faster: Faster) -> dict[str, float]:
    return {name: value for name, value in faster._asdict().items() if name != "job"}


def _layout(layout: Layout) -> dict[str, Any]:
    job = layout.faster.job
    sizes = {name: getattr(job.parallel, name) for name in ("tp", "cp", "pp", "vpp", "dp")}
    of_job = {"num_micro_batches": job.num_micro_batches, "max_tokens": job.max_tokens, "gib": gib(job)}
    return sizes | of_job | {"megatron": layout.megatron, "flags": layout.flags} | _faster(layout.faster)


def _recompute(faster: Faster) -> dict[str, Any]:
    return {"flags": faster.job.recompute.flags, "gib": gib(faster.job)} | _faster(faster)


def _delay(faster: Faster) -> dict[str, Any]:
    flag = flag_with_value("packing", faster.job.packing)
    return {"flag": flag, "num_micro_batches": faster.job.num_micro_batches} | _faster(faster)


def origin_of(setup: Setup) -> dict[str, Any]:
    """Return origin and stated errors of the profile and of its network, as their files have them."""
    profile = setup.job.profile
    stated = json.loads(profile_file(setup.run.profile).read_text())
    shipped = {file.name: file for file in NETWORKS.iterdir()}
    network = shipped.get(f"{profile.network.name}.json")
    of_network = json.loads(network.read_text()) if network else {"name": profile.network.name}
    origin = ("name", "device", "source", "kernel_measured", "date", "error")
    return {
        **{key: stated[key] for key in origin if key in stated},
        "versions": {name: version for name, version in asdict(profile.versions).items() if version},
        "backward_measured": profile.backward is not None,
        "linear_measured": profile.linear_tflops is not None,
        "network": {key: of_network[key] for key in origin if key in of_network},
    }

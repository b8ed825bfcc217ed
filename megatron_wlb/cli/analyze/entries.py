"""A report as JSON."""

import datetime
import json
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_wlb import __version__
from megatron_wlb.cli.analyze.report import Faster, Measured, Ratio, Report, sources
from megatron_wlb.cli.analyze.setup import WARM_UP, Setup
from megatron_wlb.describe.alternatives import Kind, gib
from megatron_wlb.hardware.network import NETWORKS
from megatron_wlb.hardware.profile import profile_file

FORMAT = "megatron-wlb-analysis"
VERSION = 14
SHOWN: dict[Kind, str] = {
    "layouts": "tp cp pp vpp dp num_micro_batches max_tokens gib megatron flags",
    "recompute": "flags gib",
    "delay": "flag num_micro_batches",
    "other_flags": "flag",
}
"""Values of the alternatives of every kind, besides their gains."""
SEVERAL = ("layouts", "other_flags")
"""Kinds that may have more than one."""


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
        **_alternatives(report),
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


def _alternatives(report: Report) -> dict[str, Any]:
    found = {kind: [_faster(each, names) for each in report.of_kind(kind)] for kind, names in SHOWN.items()}
    return {kind: each if kind in SEVERAL else next(iter(each), None) for kind, each in found.items()}


def _faster(faster: Faster, names: str) -> dict[str, Any]:
    """Return the gains of an alternative, after values by their names."""
    job, flags = faster.way.job, faster.way.flags
    sizes = {name: getattr(job.parallel, name) for name in ("tp", "cp", "pp", "vpp", "dp")}
    of_job = {"num_micro_batches": job.num_micro_batches, "max_tokens": job.max_tokens, "gib": gib(job)}
    values = sizes | of_job | {"megatron": faster.megatron, "flags": flags, "flag": flags}
    shown = {name: values[name] for name in names.split()}
    return shown | {name: getattr(faster, name) for name in ("gain", "speedup", "late_steps", "speedup_error")}


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

"""The site builds and loads nothing from elsewhere; what its pages name exists, and what they quote is said."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_wlb.job import CP_SHARDINGS
from megatron_wlb.plan.packing import POLICIES
from scripts import docs

ROOT = Path(__file__).parents[1]
DOCS = sorted(ROOT.glob("docs/*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "patches" / "README.md", *DOCS]
FLAGS = {action.option_strings[0] for action in docs.actions()}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    return folder


def test_every_page_is_built(site):
    built = {path.parent.name for path in site.glob("*/index.html")}
    assert built >= {page.stem for page in DOCS} - {"index"}


def test_the_site_loads_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="?([^"\s>]+)', text)
        loaded += re.findall(r'<link\b(?![^>]*rel="?canonical)[^>]*\bhref="?([^"\s>]+)', text)
        assert loaded
        assert not [url for url in loaded if re.match(r"(\w+:)?//", url)], page


def test_every_flag_has_a_section(site):
    page = (site / "flags" / "index.html").read_text()
    assert set(re.findall(r"<h3[^>]*><code>(--wlb-[\w-]+)</code>", page)) == FLAGS
    for choice in (*POLICIES, *CP_SHARDINGS):
        assert f"<code>{choice}</code>" in page


def test_every_missed_goal_is_on_the_performance_page(site):
    page = (site / "performance" / "index.html").read_text()
    goals = {path.name: json.loads(path.read_text())["goals"] for path in ROOT.glob("benchmarks/results/*.json")}
    missed = [goal for found in goals.values() for goal in found if not goal["holds"]]
    assert page.count("</strong>, goal ") == len(missed)
    assert all(f"<strong>{goal['value']:.4g}</strong>" in page for goal in missed)
    for name, found in goals.items():
        holds = sum(goal["holds"] for goal in found)
        assert not found or f"<td><code>{name}</code></td>\n<td>{holds} of {len(found)}</td>" in page


def test_generated_parts_are_up_to_date():
    """Else run python -m scripts.docs."""
    for path, text in docs.pages().items():
        assert path.read_text() == text, path


def test_every_refused_flag_is_named():
    section = (ROOT / "docs" / "training.md").read_text().split("## What is refused")[1]
    source = ast.parse((ROOT / "megatron_wlb" / "adapter" / "arguments.py").read_text())
    (function,) = [n for n in source.body if isinstance(n, ast.FunctionDef) and n.name == "_refusals"]
    (table,) = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and isinstance(n.value, ast.List)]
    messages = [texts(row.elts[1]) for row in table.elts]
    assert len(messages) > 20
    for message in messages:
        what = message.split(";")[0].split(", give")[0]  # the rest is the remedy
        for flag in set(re.findall(r"--[a-z][\w-]+", what)) - {"--wlb", "--seq-length", "--data-path"}:
            assert flag in section, message


def test_text_of_the_code_is_shown_unchanged():
    assert docs._escaped("a_b* | <c> & `--d_e|f`") == r"a\_b\* \| &lt;c> &amp; `--d_e|f`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_named_exists(page):
    text = page.read_text()
    assert set(re.findall(r"--wlb-[a-z][a-z-]*[a-z]", text)) <= FLAGS
    for path in re.findall(r"`(benchmarks/results/[^`\s*]+\.json)`", text):
        assert re.search("[A-Z]{2}", path) or (ROOT / path).is_file(), path
    for path in re.findall(r"`((?:tests|scripts|docs|patches|plan|adapter|cli)/[\w/.-]+\.(?:py|sh|md))`", text):
        assert (ROOT / path).is_file() or (ROOT / "megatron_wlb" / path).is_file(), path


def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_figures_are_those_of_the_results():
    demo, packing, balance = (result(name)["settings"] for name in ("demo", "packing", "cp_balance"))
    f2 = {r["policy"]: r for r in result("packing")["rows"] if (r["data"], r["N"], r["S_max"]) == ("F2", 4, 1.25)}
    milliseconds = {timing["what"]: timing["median_ms"] for timing in packing["timings"]}
    goals = {goal["name"]: goal["value"] for goal in result("cp_balance")["goals"]}
    messages = next(row for row in result("pipeline_p2p")["rows"] if row["layout"] == "PP=4")
    error = max(row["error_max"] for row in result("simulator")["rows"])
    trained = {(row["layout"], row["method"]): row for row in result("end_to_end_cpu")["rows"]}
    attention = {
        row["case"]: row["total_over_ours"]
        for row in result("cp_attention_cpu")["rows"]
        if (row["method"], row["threads"]) == ("by segment", 1)
    }
    predicted = {row["job"]: row["speedup"] for row in result("analyze")["rows"] if row["scheme"] == "ours"}
    unbalanced = f"{f2['original']['imbalance_mean']:.3f}"
    expected = [
        ("demo", f"{demo['mean imbalance of micro-batches, original']:.2f}"),
        ("demo", f"{demo['mean imbalance of micro-batches, wlb']:.2f}"),
        ("demo", f"{demo['mean imbalance of CP ranks, per-sequence']:.2f}"),
        ("demo", f"{demo['mean imbalance of CP ranks, chosen']:.2f}"),
        ("packing", unbalanced),
        ("packing", f"{f2['adaptive, constant-tokens']['imbalance_mean']:.3f}"),
        ("packing", unbalanced),
        ("packing", f"{f2['Algorithm 1, 0.5/0.75']['imbalance_mean']:.3f}"),
        ("packing", f"{milliseconds['whole step, N=4']:.3f} ms"),
        ("packing", f"{milliseconds['whole step, N=2048']:.0f} ms"),
        ("cp_balance", f"{balance['selection']['native_ms']:.2f} ms"),
        ("cp_balance", f"{goals['F2, original packing, 128K, CP=4: share of the gain of the limit']:.2f}"),
        ("analyze", "1"),
        ("analyze", f"{predicted['7B']:.2f}"),
        ("pipeline_p2p", str(messages["handshake_messages"])),
        ("pipeline_p2p", str(messages["planned_messages"])),
        ("simulator", f"{error:.1%}".replace("%", " %")),
        ("cp_attention_cpu", "1"),
        ("cp_attention_cpu", f"{attention['20 documents, CP=4']:.2f}"),
        ("cp_attention_cpu", "1"),
        ("cp_attention_cpu", f"{attention['20 documents, CP=4, bf16']:.1f}"),
        ("telemetry", f"{result('telemetry')['goals'][0]['value']:.2%}".replace("%", " %")),
        ("end_to_end_cpu", "1"),
        ("end_to_end_cpu", f"{trained['DP=2', 'wlb']['speedup_per_work']:.3f}"),
        ("end_to_end_cpu", "1"),
        ("end_to_end_cpu", f"{trained['DP=2', 'wlb']['speedup_per_token']:.3f}"),
        ("end_to_end_cpu", "1"),
        ("end_to_end_cpu", f"{trained['CP=2', 'adaptive']['speedup_per_token']:.3f}"),
        ("end_to_end_cpu", "1"),
        ("end_to_end_cpu", f"{trained['PP=2', 'wlb']['speedup_per_token']:.3f}"),
    ]
    shown = []
    for row in (ROOT / "docs" / "performance.md").read_text().splitlines():
        if file := re.match(r"\| .* \| `benchmarks/results/(\w+)\.json` \|$", row):
            figures = [cell.split(",")[0].strip() for cell in row.split("|")[2:4]]
            shown += [(file[1], figure) for figure in figures if figure]
    assert shown == expected
    readme = (ROOT / "README.md").read_text()
    gains = ", ".join(f"{predicted[job]:.2f}" for job in ("550M", "7B", "30B", "70B"))
    assert f"| {gains} | | `benchmarks/results/analyze.json` |" in readme
    for key in (("DP=2", "wlb"), ("CP=2", "adaptive"), ("PP=2", "wlb")):
        row = trained[key]
        said = f"| {row['speedup_per_token']:.2f} | {row['speedup_per_work']:.2f}, of {row['attainable']:.2f}"
        assert said in readme
    dp, cp = trained["DP=2", "wlb"], trained["CP=2", "adaptive"]
    soak = result("soak")
    of_soak = {goal["name"]: goal["value"] for goal in soak["goals"]}
    page = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    for said in (
        f"{dp['fraction']:.0%} (DP=2), {cp['fraction']:.0%} (CP=2; {cp['fraction_by_cpu_time']:.0%} by CPU time",
        f"need {dp['work_per_token'] - 1:.0%} more work",
        f"DP=2: {dp['speedup_in_tokens_min']:.2f} to {dp['speedup_in_tokens_max']:.2f} in rounds",
        f"{of_soak['documents'] / 1e9:.1f} billion documents, {soak['settings']['documents_per_second']:,.0f} a second",
        f"{-of_soak['growth of malloc_mib after warm-up']:.0%} less of what malloc",
        f"{of_soak['growth of python_blocks after warm-up']:.1%} more Python objects",
        f"{of_soak['states Python went on from alike']:.0f} times the Python reference",
    ):
        assert said.replace("%", " %") in page, said


def texts(node):
    """The parts of a text that are fixed, in order, with … for the others."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value


def test_quoted_messages_are_those_of_the_code():
    sources = [path.read_text() for path in sorted((ROOT / "megatron_wlb").rglob("*.py"))]
    said = [
        texts(node)
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]
    table = (ROOT / "docs" / "troubleshooting.md").read_text().splitlines()
    quoted = [q for row in table if row.startswith("| ") for q in re.findall("`([^`]+)`", row.split(" | ")[0])]
    assert len(quoted) > 50
    for quote in set(quoted) - {"Timed out waiting"}:  # torch's
        pattern = ".*".join(map(re.escape, quote.split("…")))
        assert any(re.search(pattern, text, re.DOTALL) for text in said), quote

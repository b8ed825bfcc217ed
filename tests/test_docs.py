"""The site builds and loads nothing from elsewhere; what pages name exists, and what they quote is said."""

import ast
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_wlb.adapter.upstream.versions import SUPPORTED
from megatron_wlb.describe import same
from scripts import docs

ROOT = Path(__file__).parents[1]
DOCS = sorted(ROOT.glob("docs/*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("*/README.md")), ROOT / "benchmarks/results/README.md", *DOCS]
FLAGS = {action.option_strings[0] for action in docs.actions()}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    assert {path.parent.name for path in tmp_path.glob("*/index.html")} >= {page.stem for page in DOCS}
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="?([^"\s>]+)', page.read_text())
        loaded += re.findall(r'<link\b(?![^>]*rel="?canonical)[^>]*\bhref="?([^"\s>]+)', page.read_text())
        assert loaded
        assert not [url for url in loaded if re.match(r"(\w+:)?//", url)], page


def test_generated_parts_are_up_to_date():
    """Else run python -m scripts.docs."""
    for path, text in docs.pages().items():
        assert path.read_text() == text, path


def test_text_of_the_code_is_shown_unchanged():
    assert docs._escaped("a_b* | <c> & `--d_e|f`") == r"a\_b\* \| &lt;c> &amp; `--d_e|f`"


@each_page
def test_what_is_named_exists(page):
    text = page.read_text().partition("### Removed")[0]
    for target in re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", text):
        assert re.match("https?:", target) or (page.parent / target).exists(), target
    folders = "adapter|benchmarks|cli|cost|describe|docs|examples|hardware|packing|patches|pipeline|plan|runtime|"
    folders += "scripts|sharding|simulate|tests"
    for path in re.findall(rf"`((?:{folders})/[a-z\d_/.-]+\.\w+)`", text):
        assert (ROOT / path).is_file() or (ROOT / "megatron_wlb" / path).is_file(), path
    for module in re.findall(r"python -m ((?:benchmarks|scripts)[.\w]*\w)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
    if page.name != "CHANGELOG.md":  # which names former flags, too
        assert set(re.findall(r"--wlb-[a-z][a-z-]*[a-z]", text)) <= FLAGS


DIALECT = {
    "semicolons in a chain": r";[^.;]*;",
    "'what' as a noun": r"\b[Ww]hat (?!is (refused|set|the same)|changes|runs|if|would end|was tested|Megatron's)",
    "'that of'": r"\b(?:that|those) of\b",
    "nobody as a subject": r"\b(?:[Nn]obody|[Nn]othing|[Ss]omebody) (?!(?:is|was|has|to) )",
    "'alike', 'anew'": r"\b(?:alike|anew)\b",
    "'go by' for 'follow'": r"\b(?:go|goes|went) by\b",
    "'a' for 'per'": r"\b(?:tokens|micro-batches|windows|times) a (?:second|step|rank|GPU|pipeline|stage)\b",
    "'has' for 'lists'": r"\.(?:md\)|json`) has\b",
}
"""Expressions of odd English, by name."""
LEFT_OUT = re.compile(r"<!-- .*? -->.*?<!-- end of .*? -->|```.*?```|^    .*?$|^#.*?$", re.DOTALL | re.MULTILINE)


def texts(source):
    """Every text in a Python file, with … for the parts that are filled in, and whether it is a docstring."""
    nodes = [*ast.walk(ast.parse(source.read_text()))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values), False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, id(node) in docstrings


def odd(text, separators, left_out=()):
    """Places of odd English in a text, by paragraph."""
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`", text))
    return [
        f"{name}: {block[max(0, found.start() - 60) : found.end() + 40]}"
        for block in (" ".join(part.split()) for part in re.split(separators, text))
        for name, pattern in DIALECT.items()
        if name not in left_out and ("semicolons" not in name or not block.startswith("|"))
        for found in re.finditer(pattern, block)
    ]


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda page: page.stem)
def test_plain_english(page):
    found = odd(LEFT_OUT.sub("", page.read_text()), r"\n\n|\n(?=\| |- |\d\. )")
    assert not found, "\n".join(found)


SOURCES = sorted(path for package in ("megatron_wlb", "megatron_rehearsal") for path in (ROOT / package).rglob("*.py"))


def test_plain_english_in_docstrings_messages_and_help():
    found = [
        f"{path.relative_to(ROOT)}: {place}"
        for path in SOURCES
        for text, is_docstring in texts(path)
        # Messages have semicolons before the remedy, and between values of a list.
        for place in odd(text, r"\n\n", () if is_docstring else ("semicolons in a chain",))
    ]
    facts = re.sub(r"{%.*?%}", "", (ROOT / "megatron_wlb/cli/templates/facts.txt").read_text())
    found += odd(re.sub(r"{{.*?}}", "…", facts), "\n", ("semicolons in a chain",))
    assert not found, "\n".join(found)


def test_quoted_messages_are_those_of_the_code():
    said = "\n\n".join(text for source in SOURCES for text, _ in texts(source))
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = {quote for row in rows for quote in re.findall("`([^`]+)`", row)} - {"Timed out waiting"}  # torch's
    assert len(quoted) > 20
    for quote in quoted:
        assert re.search("[^\n]*".join(map(re.escape, quote.split("…"))), said), quote


def test_the_report_that_is_shown_is_the_one_on_record():
    shown = re.search(r"## A report\n[^#]*?\n\n((?:    .*\n)+)", (ROOT / "docs" / "analyze.md").read_text())
    on_record = " ".join((ROOT / "tests" / "cli" / "reports" / "use.txt").read_text().split())
    parts = [" ".join(part.split()) for part in shown[1].split("    ...\n")]
    assert len(parts) > 3 and not [part for part in parts if part not in on_record]


def test_everything_of_upstreams_that_is_replaced_has_a_row():
    source = "\n".join(path.read_text() for path in (ROOT / "megatron_wlb" / "adapter").rglob("*.py"))
    replaced = re.findall(r'\breplaced\(\s*[\w.]+,\s*"(\w+)"', source)
    assert len(replaced) == source.count("replaced(") - 2 > 8  # its definition, and one of the table
    replaced += [row.tracker[1] for row in SUPPORTED.values()]
    section = (ROOT / "docs" / "architecture.md").read_text().split("## What is replaced at run time")[1]
    first_cells = " ".join(re.findall(r"^\| (.*?) \|", section, re.MULTILINE))
    named = {name.split(".")[-1] for name in re.findall(r"`([\w.]+)`", first_cells)} - {"py"}
    assert set(replaced) <= named
    assert all(name in source for name in named)


def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def numbers(node):
    if isinstance(node, dict | list):
        return [number for value in (node.values() if isinstance(node, dict) else node) for number in numbers(value)]
    return [node] if type(node) in (int, float) else []


FIGURE = re.compile(r"(?<![\w.±-])(?<!± )(?<!section )(\d[\d,]*\.\d+|\d+,\d{3})\b")


@each_page
def test_figures_are_in_the_result_that_is_named_with_them(page):
    for paragraph in re.split(r"\n\n|\n(?=\| |- )", page.read_text()):
        named = set(re.findall(r"`benchmarks/results/(\w+)\.json`", paragraph))
        known = numbers(result(named.pop())) if len(named) == 1 else []
        for figure in FIGURE.findall(paragraph) if known else []:
            digits = len(figure.partition(".")[2])
            shown = {f"{value * scale:,.{digits}f}".lstrip("-") for value in known for scale in (1, 100, 1e-9)}
            assert figure in shown, paragraph


def test_the_table_of_an_h100_shows_the_results():
    large = [row for row in result("training_h100")["rows"] if not row["job"].startswith("tiny")]
    _, two_windows, ours, rehearsed = large
    page = (ROOT / "docs" / "performance.md").read_text()
    table = page.split("## Measured on an H100")[1].split("## ")[0]
    for name, shown in {
        "losses": [f"{row['loss_difference']:.1e}" for row in (ours, two_windows)],
        "gradient norms": [f"{row['norm_difference']:.1e}" for row in (ours, two_windows)],
        "steps with": [f"{row['same_digests']} of {row['steps']}" for row in (ours, two_windows)],
        "tokens per": [f"{row['over_megatron']:.3f} ± {row['error']:.3f}" for row in (ours, two_windows)],
        "memory": [
            f"{ours['allocated_gib']:.1f} (rehearsed {rehearsed['allocated_gib']:.1f}, predicted "
            f"{rehearsed['predicted_gib']:.1f})",
            f"{two_windows['allocated_gib']:.1f}",
        ],
        "predicted": [" to ".join(f"{of(ours['predicted_over_measured']):.2f}" for of in (min, max)), ""],
        "the same, by": [" to ".join(f"{of(ours['by_own_profile']):.2f}" for of in (min, max)), ""],
    }.items():
        (cells,) = re.findall(rf"^\| {name}.*? \| (.*?) \| (.*?) ?\|$", table, re.MULTILINE)
        assert list(cells) == shown
    attention = {
        (row["model"], row["cp"], row["sharding"]): row["total_ms"] for row in result("cp_attention_h100")["rows"]
    }
    jobs = [key[:2] for key in attention if key[2] == "auto"]
    slower = [attention[*job, "per-sequence"] / attention[*job, "auto"] for job in jobs]
    assert f"takes {min(slower):.2f} to {max(slower):.2f} times" in table
    halves = [attention[*job, "whole"] / 2 / attention[*job, "per-document"] for job in jobs if job[1] == 2]
    assert f"take {' and '.join(f'{each:.2f}' for each in halves)} times" in table


def test_the_state_on_the_first_page_shows_the_results():
    page = " ".join((ROOT / "README.md").read_text().split())
    (measured,) = re.findall(r"\| \*\*measured\*\*: \[([\d.]+) of Megatron's\]", page)
    large = [row for row in result("training_h100")["rows"] if not row["job"].startswith("tiny")]
    _, two_windows, ours, _ = large
    assert measured == f"{ours['over_megatron']:.3f}"
    assert (
        f"differ by {_short(ours['loss_difference'])}, and by {_short(two_windows['loss_difference'])} between" in page
    )
    rows = result("end_to_end_cpu")["rows"]
    for pattern, values in {
        r"\[([\d.]+) to ([\d.]+) times\]": [row["speedup"] for row in rows if row["method"] == "--wlb"],
        r"of ([\d.]+) to ([\d.]+) possible": [row["attainable"] for row in rows if row["method"] == "plain"],
        r"Predicted: ([\d.]+) to ([\d.]+) times": [row["over ring per document"] for row in _memory()],
    }.items():
        assert re.findall(pattern, page) == [(f"{min(values):.2f}", f"{max(values):.2f}")], pattern


def _short(value):
    return f"{value:.1e}".replace("e-0", "e-")


def _memory():
    return result("step_time")["settings"]["memory"]


def test_the_tables_of_two_cores_show_the_results():
    step_ms = {timing["what"]: timing["median_ms"] for timing in result("packing")["settings"]["timings"]}
    selection = result("cp_balance")["settings"]["selection"]
    expected = [
        f"{step_ms['core, N=4']:.3f} ms",
        f"{step_ms['core, N=2048']:.0f} ms",
        f"{selection['native_ms']:.2f} ms",
        f"{max(row['error_max'] for row in result('simulator')['rows']) * 100:.1f} %",
    ]
    page = (ROOT / "docs" / "performance.md").read_text()
    assert re.findall(r"\| ([^|]*) \| `benchmarks/results/", page) == expected
    rows = {(row["layout"], row["windows"], row["method"]): row for row in result("end_to_end_cpu")["rows"]}
    shown = re.findall(r"^\| ([CDP]P=2.*?) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert len(shown) == 4
    for layout, *cells in shown:
        plain, trained = ([rows[layout, windows, way] for windows in (4, 8)] for way in ("plain", "--wlb"))
        faster = " / ".join(f"{row['speedup']:.2f} ± {row['speedup_error']:.2f}" for row in trained)
        of = (plain, "attainable"), (plain, "imbalance"), (trained, "imbalance")
        assert cells == [faster, *(" / ".join(f"{row[name]:.2f}" for row in some) for some, name in of)]
        assert all(row["speedup"] + row["speedup_error"] >= 1 for row in trained)


def test_the_start_of_a_run_says_how_far_balancing_losses_are():
    rows = {row["case"]: row["wlb"]["gradient"] for row in result("same_step")["rows"]}
    most = max(distance for case, distance in rows.items() if "aux_loss" in case)
    assert any(f"({100 * most:.1f} % of a small GPT's gradient" in text for text in same._DIFFERENCES)


def test_the_table_of_jobs_with_experts_shows_the_results():
    section = (ROOT / "docs" / "performance.md").read_text().split("## Expert parallelism")[1].split("\n## ")[0]
    rows = re.findall(r"^\| [^-|][^|]* \| (.*) \|$", section, re.MULTILINE)
    jobs = result("placement")["rows"]
    for way, row in zip(("megatron", "sums", "slots"), rows, strict=True):
        some = [[job[way] for job in jobs if job["PP"] == pp] for pp in (1, 4)]
        assert row == " | ".join(f"{statistics.mean(times):.3f} ({max(times):.3f})" for times in some)
    saved = [100 * (1 - job["slots / sums"]) for job in jobs]
    assert f"Placing saves {statistics.mean(saved):.1f} % in the mean, from {min(saved):.1f} %" in section
    assert f"to {max(saved):.0f} % (eight ranks, PP=4)" in section

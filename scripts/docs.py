"""Writes what pages take from the code and from the benchmarks' results: python -m scripts.docs"""

import argparse
import itertools
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.convergence_report import page
from benchmarks.paper import report
from megatron_wlb.describe.flags import add_wlb_arguments

ROOT = Path(__file__).parents[1]


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)


def pages() -> dict[Path, str]:
    """Pages with their generated parts as they should be."""
    texts = {ROOT / "docs" / "index.md": index()}
    parts = (
        ("flags", "flags", flags()),
        ("performance", "limit", limit()),
        ("performance", "goals", goals()),
        ("convergence", "results", convergence()),
        ("paper", "result", paper()),
        ("recipes", "table", recipes()),
        ("paper", "checks", checks()),
    )
    for stem, name, part in parts:
        path = ROOT / "docs" / f"{stem}.md"
        begin, end = f"<!-- {name}: written by python -m scripts.docs -->\n", f"<!-- end of {name} -->\n"
        before, rest = texts.get(path, path.read_text()).split(begin)
        texts[path] = before + begin + part + end + rest.split(end)[1]
    return texts


def index() -> str:
    """What the README says to users, with links as they are from docs/."""
    text = (ROOT / "README.md").read_text().split("## How it works\n")[0]
    text = re.sub(r"\[([^]]*)\]\((?!https:|docs/)[^)]*\)", r"\1", text).replace("](docs/", "](")
    head, body = text.split("\n", 1)
    mark = "<!-- written by python -m scripts.docs, from README.md -->"
    links = "[Concepts](concepts.md), [On a cluster](cluster.md), [Flags](flags.md), [Glossary](glossary.md)"
    return f"{head}\n\n{mark}\n{body}Next: {links}.\n"


def actions() -> list[argparse.Action]:
    """The flags of training, all but `--wlb` itself."""
    parser = add_wlb_arguments(argparse.ArgumentParser(add_help=False))
    return [action for action in parser._actions if action.dest != "wlb"]


def flags() -> str:
    """A section for every flag: its help and its choices; the default comes last."""
    sections = []
    for action in actions():
        text, default, value = _escaped((action.help or "").replace("%%", "%")).partition(" Default: ")
        choices = ", ".join(f"`{choice}`" for choice in re.findall(r"[\w-]+", str(action.metavar or "")))
        text += " Switch, off unless given." if action.nargs == 0 else f" One of {choices}." if choices else ""
        sections.append(f"### `{action.option_strings[0]}`\n\n{text}{default}{value}\n")
    return "\n".join(["", *sections, ""])


def limit() -> str:
    """Shares of the limit that a step reaches on F2, by layout and scheme."""
    rows = _result("step_time")["rows"]
    shown = ["ring per sequence", "ring per document", "paper", "ours, M = N", "ours, auto"]
    titles = ["job", "window", *shown[:3], "`--wlb`, M = N", "`--wlb`, auto", "M, N", "over ring per document", "delay"]
    lines = []
    for (layout, window), several in itertools.groupby(
        (row for row in rows if row["data"] == "F2"), key=lambda row: (row["layout"], row["window"])
    ):
        schemes = {row["scheme"]: row for row in several}
        best, over = schemes["ours, auto"], "over_ring per document"
        cells = [layout, f"{window >> 10}K", *(f"{100 * schemes[name]['of_limit']:.0f} %" for name in shown)]
        cells += [f"{best['micro_batches']}, {best['windows']}", f"{best[over]:.2f} ± {best[f'{over}_error']:.2f}"]
        lines.append([*cells, f"{best['late_steps']:.2f}"])
    return _table(titles, lines)


def goals() -> str:
    """The results that set themselves goals, and every goal that they missed."""
    rows = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        entries = json.loads(path.read_text())["goals"]
        missed = [
            f"{_escaped(goal['name'])}: **{goal['value']:.4g}**, goal {goal['direction']} {goal['goal']:g}"
            for goal in entries
            if not goal["holds"]
        ]
        if entries:
            rows.append([f"`{path.name}`", f"{len(entries) - len(missed)} of {len(entries)}", "<br>".join(missed)])
    return _table(["result", "goals that hold", "missed"], rows)


def convergence() -> str:
    """The comparison of packing policies."""
    return page(_result("convergence"))


def recipes() -> str:
    """Public recipes by what `--wlb` does to them, what it changes how often, and why it refuses."""
    found = _result("recipes")
    verdicts = [name for name in found["rows"][0] if name != "source"]
    rows = [[_escaped(row["source"]), *(str(row[name]) for name in verdicts)] for row in found["rows"]]
    sums = [f"**{sum(row[name] for row in found['rows'])}**" for name in verdicts]
    changed = [[f"`{flag}`", str(n)] for flag, n in found["settings"]["changed"].items() if n > 1]
    reasons = [[_escaped(reason), str(n)] for reason, n in found["settings"]["reasons"].items()]
    tables = (
        (["source", *verdicts], [*rows, ["all", *sums]]),
        (["changed", "recipes"], changed),
        (["refused", "recipes"], reasons),
    )
    return "".join(_table(*table) for table in tables)


def paper() -> str:
    """The simulated numbers beside the paper's, without times and with no other factor on attention than 1.2."""
    lines = [
        [line["figure"], line["what"], *(f"{line[c]:.2f}" if line.get(c) else "" for c in report.COLUMNS)]
        for line in _result("paper")["settings"]["comparison"]
        if line["figure"] in report.FIGURES and not re.search(r"^ms |x 1\.[13]|of the two", line["what"])
    ]
    return _table(["figure", "what", *report.COLUMNS], lines)


def checks() -> str:
    """Published numbers to which nothing was fitted."""
    found = _result("paper")["settings"]["checks"]
    tflops, seconds = found["llama3_tflops"], found["step_seconds"]
    trained = "Llama 3 405B, {}, 8K tokens: TFLOP/s per GPU (The Llama 3 Herd of Models, table 4)"
    lines = [
        [trained.format("8,192 GPUs"), "430", f"{tflops['8192 GPUs']:.0f}"],
        [trained.format("16,384 GPUs"), "400", f"{tflops['16384 GPUs']:.0f}"],
        [
            "a step of 7B-128K, of which 20 ms are under 0.65 % (paper, section 7.4)",
            f"over {seconds['paper, at least']:.2f} s",
            f"{seconds['reproduced']:.2f} s",
        ],
    ]
    return _table(["", "published", "simulated"], lines)


def _result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def _table(titles: list[str], lines: list[list[str]]) -> str:
    rows = [titles, ["---"] * len(titles), *lines]
    return "\n".join(["", *("| " + " | ".join(row) + " |" for row in rows), "", ""])


def _escaped(text: str) -> str:
    """Text as Markdown that shows it unchanged, but for `code`."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        parts[i] = "".join("\\" + c if c in "\\*_[]#|" else {"<": "&lt;", "&": "&amp;"}.get(c, c) for c in parts[i])
    return "`".join(parts)


if __name__ == "__main__":
    main()

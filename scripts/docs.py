"""Writes what pages take from the code and from the benchmarks' results: python -m scripts.docs"""

import argparse
import itertools
import json
import re
from pathlib import Path

from benchmarks.convergence_report import page
from megatron_wlb.adapter.arguments import add_wlb_arguments

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
    rows = json.loads((ROOT / "benchmarks" / "results" / "step_time.json").read_text())["rows"]
    shown = ["ring per sequence", "ring per document", "paper", "ours, M = N", "ours, auto"]
    titles = ["job", "window", *shown[:3], "`--wlb`, M = N", "`--wlb`, auto", "M, N", "over ring per document", "delay"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for (layout, window), several in itertools.groupby(
        (row for row in rows if row["data"] == "F2"), key=lambda row: (row["layout"], row["window"])
    ):
        schemes = {row["scheme"]: row for row in several}
        best, over = schemes["ours, auto"], "over_ring per document"
        cells = [layout, f"{window >> 10}K", *(f"{100 * schemes[name]['of_limit']:.0f} %" for name in shown)]
        cells += [f"{best['micro_batches']}, {best['windows']}", f"{best[over]:.2f} ± {best[f'{over}_error']:.2f}"]
        lines.append("| " + " | ".join([*cells, f"{best['late_steps']:.2f}"]) + " |")
    return "\n".join(["", *lines, "", ""])


def goals() -> str:
    """The results that set themselves goals, and every goal that they missed."""
    rows = ["| result | goals that hold | missed |", "|---|---|---|"]
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        entries = json.loads(path.read_text())["goals"]
        missed = [
            f"{_escaped(goal['name'])}: **{goal['value']:.4g}**, goal {goal['direction']} {goal['goal']:g}"
            for goal in entries
            if not goal["holds"]
        ]
        if entries:
            rows.append(f"| `{path.name}` | {len(entries) - len(missed)} of {len(entries)} | {'<br>'.join(missed)} |")
    return "\n".join(["", *rows, "", ""])


def convergence() -> str:
    """The comparison of packing policies."""
    return page(json.loads((ROOT / "benchmarks" / "results" / "convergence.json").read_text()))


def _escaped(text: str) -> str:
    """Text as Markdown that shows it unchanged, but for `code`."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        parts[i] = "".join("\\" + c if c in "\\*_[]#|" else {"<": "&lt;", "&": "&amp;"}.get(c, c) for c in parts[i])
    return "`".join(parts)


if __name__ == "__main__":
    main()

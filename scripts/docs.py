"""Writes what pages take from the code and from the benchmarks' results: python -m scripts.docs"""

import argparse
import itertools
import json
import math
import re
import shlex
import statistics
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.convergence_report import page
from benchmarks.dynamic_cp import PROFILES as GPUS
from benchmarks.paper import report
from benchmarks.results import Row
from benchmarks.step_time import ACROSS, DELAY, LAYOUTS, OURS, RING, WIDER, Case, flags_of
from megatron_wlb.adapter.upstream.versions import SUPPORTED
from megatron_wlb.describe.adapt import ADAPTATIONS, said
from megatron_wlb.describe.alternatives import CLOSE
from megatron_wlb.describe.arguments import Refused, flag_of, rows
from megatron_wlb.describe.flags import add_wlb_arguments
from megatron_wlb.describe.refusals import RULES
from megatron_wlb.plan.mock import PROFILES

ROOT = Path(__file__).parents[1]
OFF = math.log(1.15)


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)


def pages() -> dict[Path, str]:
    """Pages with their generated parts as they should be."""
    texts: dict[Path, str] = {}
    tables = "benchmarks/results/README"
    parts = (
        ("README", "equal memory", equal_memory()),
        ("docs/flags", "flags", flags()),
        ("docs/compatibility", "versions", versions()),
        ("docs/training", "set", changed(priced=False)),
        ("docs/training", "switched off", changed(priced=True)),
        ("docs/training", "refused", refused()),
        ("README", "command", f"\n{_command(_result('step_time')['settings']['memory'][0])}\n"),
        ("docs/performance", "equal memory", equal_memory()),
        ("docs/performance", "documents", documents()),
        ("docs/performance", "published", published(by_publication=False)),
        ("docs/analyze", "profiles", profiles()),
        ("docs/convergence", "results", convergence()),
        (tables, "commands", commands()),
        (tables, "closed", closed_batches()),
        (tables, "recipes", recipes()),
        (tables, "limit", limit()),
        (tables, "goals", goals()),
        (tables, "publications", published(by_publication=True)),
        (tables, "left out", left_out()),
        (tables, "attention", cp_attention()),
        (tables, "rows", cp_rows()),
        (tables, "layers", cp_layers()),
        (tables, "dynamic", dynamic_cp()),
        (tables, "checks", checks()),
        (tables, "result", paper()),
    )
    for place, name, part in parts:
        path = ROOT / f"{place}.md"
        begin, end = f"<!-- {name}: written by python -m scripts.docs -->\n", f"<!-- end of {name} -->\n"
        before, rest = texts.get(path, path.read_text()).split(begin)
        texts[path] = before + begin + part + end + rest.split(end)[1]
    return texts


def actions() -> list[argparse.Action]:
    """The flags of training, all but `--wlb` itself."""
    parser = add_wlb_arguments(argparse.ArgumentParser(add_help=False))
    return [each for each in parser._actions if each.dest != "wlb" and each.help != argparse.SUPPRESS]


def flags() -> str:
    """A section for every flag: its help and its choices; the default comes last."""
    sections = []
    for action in actions():
        text, default, value = _escaped((action.help or "").replace("%%", "%")).partition(" Default: ")
        choices = ", ".join(f"`{choice}`" for choice in re.findall(r"[\w-]+", str(action.metavar or "")))
        text += " Switch, off unless given." if action.nargs == 0 else f" One of {choices}." if choices else ""
        sections.append(f"### `{action.option_strings[0]}`\n\n{text}{default}{value}\n")
    return "\n".join(["", *sections, ""])


def versions() -> str:
    """Versions of what trains, by the files that CI reads."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(re.findall(r"^(\S+)==(\S+)", (ROOT / "requirements/constraints.txt").read_text(), re.MULTILINE))
    needed = dict(re.findall(r"([\w-]+)>=([\d.]+)", " ".join(project["optional-dependencies"]["train"])))
    older = re.findall(r"megatron-core-([\d.]+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    jobs = (ROOT / ".github/workflows/ci.yml").read_text()
    pythons = re.findall(r'"(3\.\d+)"', re.findall(r"python: \[(.*?)\]", jobs)[0])
    (planning,) = re.findall(r'python-version: "(3\.\d+)"', jobs)
    (bridge,) = re.findall(r"megatron-bridge==([\d.]+)", (ROOT / "requirements/bridge.txt").read_text())
    measured = _result("training_h100")["versions"]
    (engines,) = re.findall(
        r"TransformerEngine ([\d.]+ to [\d.]+)\.\n", (ROOT / "megatron_wlb/runtime/backends/te.py").read_text()
    )
    *minors, newest = SUPPORTED
    releases = ", ".join(f"{minor}.x" for minor in minors)
    return _table(
        ["", "tested", "expected to work", "refused"],
        [
            [
                "megatron-core",
                f"{', '.join([*older, pinned['megatron-core']])}; main of August 2026 by hand",
                f"{releases}, main ({newest})",
                "others, dev",
            ],
            [
                "torch",
                f"{pinned['torch']}; {measured['torch']} on an H100",
                f"{needed['torch']} or newer",
                "older, by pip",
            ],
            [
                "TransformerEngine",
                f"{measured['transformer-engine']} on an H100",
                engines,
                "one that fails in the try-out at the start",
            ],
            [
                "Python",
                f"{', '.join(pythons)}; planning alone with {planning}",
                "-",
                f"older than {project['requires-python'][2:]}; training with {planning}, by upstream's flags",
            ],
            ["Megatron-Bridge", bridge, "0.7, by its source", "with a megatron-core before 0.19"],
        ],
    )


def changed(*, priced: bool) -> str:
    """The flags that `--wlb` sets for no price, or switches off for one, and the reasons."""
    lines = []
    for each in ADAPTATIONS:
        if bool(each.price) == priced:
            values = [(name, value, value is False or value == "none" or None) for name, value in each.values.items()]
            flags = ", ".join(f"`{said(*value)}`" for value in values if value[1] != [])
            lines.append([flags, _with_flags(each.reason), *([each.price] if priced else [])])
    return _table(["switched off, or set in its place", "since", "price"] if priced else ["set", "since"], lines)


def refused() -> str:
    """What `--wlb` refuses of Megatron's flags, and what to do instead."""
    found: dict[str, list[str]] = {}
    for name, row in rows(Refused):
        found.setdefault(row.reason, []).append(flag_of(name))
    sentences = [f"{' or '.join(flags)} {reason.replace('{}', '…')}" for reason, flags in found.items()]
    texts = [sentence.rpartition("; ") for sentence in (*sentences, *RULES)]
    return _table(["refused", "remedy"], [[_with_flags(why), _with_flags(remedy)] for why, _, remedy in texts])


def _with_flags(text: str) -> str:
    """Text as Markdown, flags as code."""
    return _escaped(re.sub(r"(--[a-z][\w-]*)", r"`\1`", text))


def equal_memory() -> str:
    """Tokens per second over Megatron, both sides with their fastest recomputation within an H100's memory."""
    lines = []
    for row in _result("step_time")["settings"]["memory"]:
        ways = [_recomputed(row[side]["recompute"]) for side in ("megatron", "wlb")]
        how = ways[0] if ways[0] == ways[1] else f"Megatron: {ways[0] or 'nothing'}, `--wlb`: {ways[1] or 'nothing'}"
        lines.append([f"{_job(row)}{f'; recomputed: {how}' if any(ways) else ''}", f"{row[f'over {RING}']:.2f}"])
    return _table(
        ["tokens per second over Megatron's, the same tokens in every step, in equal memory", "`--wlb`"], lines
    )


def commands() -> str:
    """Commands that repeat the rows of `equal_memory`."""
    return "".join(f"\n{_job(row)}:\n\n{_command(row)}" for row in _result("step_time")["settings"]["memory"]) + "\n"


def _command(row: Row) -> str:
    """The command that predicts a row, as code of at most 120 columns."""
    words = shlex.join(flags_of(Case(*Case.of(row)), row["wlb"]["recompute"])).replace(" --", "\n--").split("\n")
    lines = textwrap.wrap(
        "megatron-wlb analyze " + " ".join(word.replace(" ", "\0") for word in words), 112, break_on_hyphens=False
    )
    return "    " + " \\\n        ".join(lines).replace("\0", " ") + "\n"


def documents() -> str:
    """The same jobs with other documents than F2, and where `--wlb` brings nothing."""
    found = {(row["documents"], *Case.of(row)): row for row in _result("documents")["rows"]}
    names, lines = list(dict.fromkeys(name for name, *_ in found)), []
    for f2 in _result("step_time")["settings"]["memory"]:
        ratios = [row[f"over {RING}"] for row in (f2, *(found[name, *Case.of(f2)] for name in names))]
        words = (", slower" if r < 1 - CLOSE else ", nothing" if r < 1 + CLOSE else "" for r in ratios)
        lines.append([_job(f2), *(f"{ratio:.2f}{word}" for ratio, word in zip(ratios, words, strict=True))])
    shares = [f"waiting + exchange, % of a step of {title}, mean" for title in ("Megatron", "`--wlb`")]
    for side, title in zip(("megatron", "wlb"), shares, strict=True):
        of = [[row[side] for (of, *_), row in found.items() if of == name] for name in names]
        means = [[100 * statistics.mean(row[part] for row in rows) for part in ("waiting", "exchange")] for rows in of]
        lines.append([title, "", *(f"{waiting:.0f} + {exchange:.0f}" for waiting, exchange in means)])
    return _table(["tokens per second over Megatron's, by documents", "F2", *names], lines)


def _job(row: Row) -> str:
    """The job of a case, in words."""
    model, sizes = LAYOUTS[row["layout"]]
    given = sizes | ({"dp": row["dp"]} if row["dp"] > 1 else {})
    layout = " ".join(f"{name.upper()}{size}" for name, size in given.items() if name != "etp")
    gpus = math.prod(given.get(name, 1) for name in ("tp", "cp", "pp", "dp"))
    rank = " a rank" if row["dp"] > 1 else ""
    return f"{_MODELS[model]}, {gpus} H100s, {layout}, {row['windows']} windows of {row['window'] >> 10}K{rank}"


def profiles() -> str:
    """The length profiles: their fits, and the published figures that these were made for."""
    lines = []
    for name, each in PROFILES.items():
        of = each.lengths
        tail = f", {100 * of.share:g} % Pareto from {of.minimum:,g} on, exponent {of.alpha:g}" if of.share else ""
        fit = f"log-normal, median {math.exp(of.mu):,.0f}, deviation {of.sigma:g}{tail}"
        sources = ", ".join(f"[{i}]({url})" for i, url in enumerate(each.sources, 1))
        lines.append([f"`{name}`", each.documents, each.figures, fit, sources])
    return _table(["name", "documents", "published, in tokens", "fit", "source"], lines)


_MODELS = {
    "llama2-7b": "7B", "30b": "30B", "llama2-70b": "70B", "llama3-8b": "8B", "codellama-34b": "34B",
    "llama3-405b": "405B", "qwen3-30b-a3b": "Qwen3-30B-A3B",
}  # fmt: skip


def _recomputed(flags: str) -> str:
    """What `--recompute` flags run again, in words."""
    if modules := re.search(r"--recompute-modules (.*)", flags):
        return modules[1].replace("mlp", "MLPs")
    layers = re.search(r"--recompute-num-layers (\d+)", flags)
    return f"{layers[1]} layers a virtual stage" if layers else ""


def closed_batches() -> str:
    """Speed of `balance` over the split of each loop, by sequences, and over Megatron-Bridge's packed rows."""
    loops: dict[tuple[str, ...], dict[str, float]] = {}
    for row in _result("closed_batches")["rows"]:
        if (faster := row.get("balance_is_faster")) is not None and not row["who"].startswith("balance"):
            key = str(row["data"]), f"{row['longest'] >> 10}K", str(row["who"])
            loops.setdefault(key, {})[row["layout"]] = faster
    tables = []
    for of_rows in (False, True):
        shown = {key: each for key, each in loops.items() if ("Bridge" in key[2]) is of_rows}
        layouts = list(dict.fromkeys(layout for each in shown.values() for layout in each))
        lines = [[*key, *(f"{each[layout]:.2f}" for layout in layouts)] for key, each in shown.items()]
        tables.append(_table(["sequences", "up to", "split of", *layouts], lines))
    return "".join(tables)


def limit() -> str:
    """Shares of the limit that a step reaches on F2, and tokens per second over Megatron, by case and scheme."""
    shown = [ACROSS, RING, "paper", "ours, M = N", OURS]
    titles = ["job", "window", "windows", *shown[:3], "`--wlb`, M = N", "`--wlb`, auto", "M"]
    titles += [f"over {RING}", f"over {ACROSS}", "with a delay (steps late)", "twice the CP"]
    lines = []
    cases = itertools.groupby(
        _result("step_time")["rows"], key=lambda row: (row["layout"], row["dp"], row["window"], row["windows"])
    )
    for (layout, dp, window, windows), several in cases:
        schemes = {row["scheme"]: row for row in several}
        best, delay, wider = (schemes.get(name) for name in (OURS, DELAY, WIDER))
        assert best is not None
        cells = [f"{layout}{f' DP{dp}' if dp > 1 else ''}", f"{window >> 10}K", str(windows)]
        cells += [f"{100 * schemes[name]['of_limit']:.0f} %" for name in shown]
        cells += [f"{best['micro_batches']}", f"{best[f'over {RING}']:.2f} ± {best[f'over {RING}, error']:.2f}"]
        cells += [f"{best[f'over {ACROSS}']:.2f}"]
        cells += [f"{delay[f'over {RING}']:.2f} ({delay['late_steps']:.2f})" if delay else ""]
        lines.append([*cells, f"{wider[f'over {RING}']:.2f}" if wider else ""])
    return _table(titles, lines)


def published(*, by_publication: bool) -> str:
    """Errors of predictions by publication, or by kind of run, and how many are more than 15 % off."""
    settings, rows = _result("published")["settings"], _result("published")["rows"]
    lines = []
    for group in (each for each in settings["groups"] if (", " in each["group"]) is by_publication):
        numbers = [f"{group['ratio']:.2f}", *(f"{100 * group[f'{name}_error']:.0f} %" for name in ("median", "p90"))]
        lines.append([group["group"], str(group["numbers"]), *numbers, f"{100 * group['within_15_percent']:.0f} %"])
    first = "publication, precision" if by_publication else "runs"
    table = _table([first, "numbers", "predicted / measured", "median error", "p90", "within 15 %"], lines)
    if by_publication:
        return table
    off = sum(abs(math.log(row["ratio"])) > OFF for row in rows)
    left = f"{len(settings['not_predicted'])} publications are not predicted; the file has the reasons."
    return f"{table}{off} numbers are more than 15 % off. {left}\n\n"


def left_out() -> str:
    """Errors of mixtures of experts by constants that are fitted to other groups, and the ranges of these."""
    lines = []
    for each in _result("published")["settings"]["left_out"]:
        errors = [f"{100 * each[f'{name}_error']:.0f} %" for name in ("median", "p90")]
        shown = ([f"{value:.{0 if value >= 10 else 2}f}" for value in of] for of in each["constants"].values())
        ranges = [" to ".join(dict.fromkeys(of)) for of in shown]
        lines.append([each["left_out"], str(each["groups"]), *errors, *ranges])
    names = _result("published")["settings"]["left_out"][0]["constants"]
    return _table(["left out", "groups", "median error", "p90", *names], lines)


def cp_attention() -> str:
    """Speed-ups of the slowest rank's attention over per-sequence sharding, and the share of the attainable gain."""
    shown = ("per-document", "paper", "auto")
    lines = []
    for (packing, cp), of in _balance("F2", ("megatron", "adaptive"), (2, 4, 8, 16, 32)):
        cells = [f"{of[name]['speedup']:.2f} ({100 * of[name]['share_of_gain']:.0f} %)" for name in shown]
        lines.append([packing, str(cp), *cells, f"{of['limit']['speedup']:.2f}"])
    titles = ["packing", "CP", "per-document", "`paper`", "`auto` (ours)", "limit"]
    return _table(titles, lines)


def cp_rows() -> str:
    """Rows that come to a rank, and in brackets the time of the slowest rank over that of `auto` by attention alone."""
    shown = ("per-document, ring", "MagiAttention's dispatch", "dynamic CP", "FlashCP", "auto", "auto, exchange")
    lines = []
    for data, title in (("F2", "F2"), ("dist_wlbllm", "DistCA's")):
        for (packing, cp), of in _balance(data, ("megatron",), (8, 16, 32)):
            base = of["auto"]["predicted_us"]
            cells = [f"{of[name]['rows_in']:.2f} ({of[name]['predicted_us'] / base:.2f})" for name in shown]
            lines.append([title, packing, str(cp), *cells])
    titles = ["documents", "packing", "CP", *shown[:4], "`auto`, attention alone", "`auto` in a job"]
    return _table(titles, lines)


def cp_layers() -> str:
    """Share of its limit that a layer reaches, and in brackets of the exchange that is exposed, in percent."""
    shown = ("per-sequence, ring", "per-document, ring", "wlb, all-gather", "MagiAttention", "dynamic CP", "FlashCP")
    lines = []
    found = [row for row in _result("cp_balance")["settings"]["exchange"] if row["packing"] == "adaptive"]
    keys = sorted({(row["model"], row["key_heads"], row["window"], row["cp"]) for row in found if row["cp"] in (8, 32)})
    for model, heads, window, cp in sorted(keys, key=lambda key: ("7B 30B 8B 34B".split().index(key[0]), *key[2:])):
        some = [row for row in found if (row["model"], row["window"], row["cp"]) == (model, window, cp)]
        cells = [
            f"{100 * statistics.mean(row[way] for row in some):.0f} "
            f"({100 * statistics.mean(row[f'{way}, exposed'] for row in some):.1f})"
            for way in (*shown, "auto, exchange")
        ]
        lines.append([f"{model}, {heads}", f"{window >> 10}K", str(cp), *cells])
    return _table(["model, key heads of a rank", "window", "CP", *shown, "`auto`"], lines)


def dynamic_cp() -> str:
    """Megatron's example of dynamic context parallelism: ratios of steps, measured and predicted."""
    lines = []
    for row in _result("dynamic_cp")["rows"]:
        ways = [f"{row[way]:.2f} ± {row[f'{way}, error']:.2f}" for way in (*GPUS, "only launches")]
        shares = [f"{100 * share:.0f}" for share in row[f"{GPUS[0]}, of measured"]]
        counts = " / ".join(f"{count:.2f}" for count in row["micro_batches"])
        took = " / ".join(f"{ms:.0f}" for ms in row["measured_ms"])
        lines.append([str(row["gpus"]), took, f"{row['measured']:.2f}", *ways, counts, " / ".join(shares)])
    titles = ["GPUs", "measured, ms", "ratio", *(f"predicted, {name}" for name in GPUS), "only launches"]
    return _table([*titles, "micro-batches of a rank", f"predicted, {GPUS[0]}, % of measured"], lines)


def _balance(data: str, packings: tuple[str, ...], cps: tuple[int, ...]) -> Iterator[tuple[tuple[str, int], Row]]:
    """Rows of cp_balance at 128K by strategy, for every packing and CP."""
    for case in itertools.product(packings, cps):
        rows = [row for row in _result("cp_balance")["rows"] if (row["data"], row["window"]) == (data, 1 << 17)]
        yield case, {row["strategy"]: row for row in rows if (row["packing"], row["cp"]) == case}


def goals() -> str:
    """The results that set themselves goals, and every goal that they missed."""
    rows = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        entries = json.loads(path.read_text()).get("goals", [])  # a profile has none
        missed = [
            f"{_escaped(goal['name'])}: **{goal['value']:.5g}**, goal {goal['direction']} {goal['goal']:g}"
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
    """Public recipes by what `--wlb` does to them, and what it changes how often."""
    found = _result("recipes")
    texts = ("source", "megatron")
    verdicts = [name for name in found["rows"][0] if name not in texts]
    rows = [[_escaped(str(each)) for each in row.values()] for row in found["rows"]]
    sums = [f"**{sum(row[name] for row in found['rows'])}**" for name in verdicts]
    changed = [[f"`{flag}`", str(n)] for flag, n in found["settings"]["changed"].items() if n > 1]
    return _table([*texts, *verdicts], [*rows, ["all", "", *sums]]) + _table(["changed", "recipes"], changed)


def paper() -> str:
    """The simulated numbers beside the paper's."""
    lines = [
        [line["figure"], line["what"], *(f"{line[c]:.2f}" if line.get(c) else "" for c in report.COLUMNS)]
        for line in _result("paper")["settings"]["comparison"]
    ]
    return _table(["figure", "what", *report.COLUMNS], lines)


def checks() -> str:
    """A published number to which nothing was fitted."""
    seconds = _result("paper")["settings"]["checks"]["step_seconds"]
    step = "a step of 7B-128K, of which 20 ms are under 0.65 % (paper, section 7.4)"
    line = [step, f"over {seconds['paper, at least']:.2f} s", f"{seconds['reproduced']:.2f} s"]
    return _table(["", "published", "simulated"], [line])


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

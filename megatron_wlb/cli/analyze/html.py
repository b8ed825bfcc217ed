"""The report as one page that needs nothing else: no script, no font, no file beside it."""

import html

from megatron_wlb.cli.analyze import pictures, table
from megatron_wlb.cli.analyze.report import Report

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>What --wlb would bring</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 76rem; margin: 0 auto;
       padding: 1rem }}
h1 {{ font-size: 1.5rem; margin: .5rem 0 }}
h2 {{ font-size: 1.05rem; margin: 0 0 .25rem }}
p {{ margin: 0 0 .5rem }}
.lead {{ font-size: 1.15rem; border-left: 4px solid #0072b2; padding-left: .75rem; margin: 1rem 0 }}
table {{ border-collapse: collapse; width: 100%; max-width: 48rem; margin: 1rem 0; font-variant-numeric: tabular-nums }}
th, td {{ padding: .2rem 0 .2rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e3e3e3 }}
th:first-child, td:first-child {{ text-align: left; white-space: normal; padding-left: 0 }}
td.part {{ padding-left: 1rem !important; color: #555 }}
tbody tr:first-child {{ font-weight: 600 }}
.ours {{ color: #0072b2 }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; background: #f3f5f7; padding: .75rem; border-radius: 4px;
      font-size: .85rem }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 2rem;
       margin: 1.5rem 0 }}
section p, li {{ font-size: .9rem; color: #444; overflow-wrap: anywhere }}
img {{ width: 100%; max-width: 36rem; height: auto }}
ul {{ padding-left: 1.1rem }}
@media (max-width: 30rem) {{ table {{ font-size: .78rem }} th, td {{ padding-left: .35rem }} }}
</style>
<h1>What <code>--wlb</code> would bring</h1>
<p>{described}</p>
<p class="lead">{headline}</p>
{table}
{flags}
<main>{sections}</main>
<h2>What this goes by</h2>
<ul>{facts}</ul>
</html>
"""


def page(report: Report) -> str:
    """The whole page."""
    text = html.escape
    sections = "".join(
        f'<section><h2>{text(title)}</h2><p>{text(explanation)}</p><img alt="{text(title)}" src="{address}"></section>'
        for title, explanation, address in pictures.pictures(report)
    )
    return _PAGE.format(
        described=text(table.described(report)),
        headline=text(table.headline(report)),
        table=_table(report),
        flags="".join(f"<h2>{title}</h2><pre>{text(flags)}</pre>" for title, flags in table.to_paste(report)),
        sections=sections,
        facts="".join(f"<li>{text(fact)}</li>" for fact in table.facts(report)),
    )


def _table(report: Report) -> str:
    titles, body = table.rows(report)
    ours = len(report.results) - 1

    def cells(tag: str, values: list[str]) -> str:
        return "".join(
            f"<{tag}{' class=ours' if i == ours else ''}>{html.escape(value)}</{tag}>" for i, value in enumerate(values)
        )

    rows = "".join(
        f"<tr><td{' class=part' if title.startswith(' ') else ''}>{html.escape(title.strip())}</td>"
        f"{cells('td', values)}</tr>"
        for title, values in body
    )
    return f"<table><thead><tr><th></th>{cells('th', titles)}</tr></thead><tbody>{rows}</tbody></table>"

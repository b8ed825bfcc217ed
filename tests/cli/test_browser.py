"""Pages of reports in a browser, on a phone and on paper. `.ci/run` installs one; without one, tests skip."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_wlb.cli.main import main
from scripts.demo import report
from tests.cli.analyses import LARGE, RUN
from tests.cli.trials import environment, words

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
BROKEN = """() => {
    const broken = [], most = document.documentElement.clientWidth;
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode, cell = node.parentElement.closest("th, td");
        for (const word of node.data.matchAll(/[^\\s-]+|-+/g)) {
            const range = document.createRange();
            range.setStart(node, word.index);
            range.setEnd(node, word.index + word[0].length);
            const rows = [...range.getClientRects()];
            const seen = !node.parentElement.closest("details:not([open])") || matchMedia("print").matches;
            const scrolls = node.parentElement.closest("SCROLLS");
            if (seen && !rows.length) broken.push(`hidden: ${word[0]}`);
            if (seen && rows.some(row => row.right > most + 1) && !scrolls) broken.push(`cut off: ${word[0]}`);
            if (cell && new Set(rows.map(row => row.top)).size > 1) broken.push(`broken: ${word[0]}`);
        }
    }
    for (const image of document.images)
        if (!image.naturalWidth || image.getBoundingClientRect().right > most + 1) broken.push(`image: ${image.alt}`);
    if (document.documentElement.scrollWidth > most) broken.push("the page scrolls sideways");
    return broken;
}"""
"""What of a page is cut off, hidden, or a word of a table in several lines; CSS says what may scroll."""


@dataclass
class Pages:
    folder: Path
    browser: object

    def broken(self, name, width, media):
        """What is broken on a page of so many CSS pixels; a picture of it lies beside it."""
        page = self.browser.new_page(viewport={"width": width, "height": 844})
        page.emulate_media(media=media)
        page.goto((self.folder / f"{name}.html").as_uri())
        page.screenshot(path=self.folder / f"{name}-{media}-{width}.png", full_page=True)
        scrolls = "pre, details .scroll" if media == "screen" else "nothing"
        found = page.evaluate(BROKEN.replace("SCROLLS", scrolls))
        page.close()
        return found


def demo(folder):
    """Write the demo's page into a folder, of steps that are made up."""
    for name in ("megatron", "wlb"):
        for rank in range(2):
            passes = [(kind, i, i + 0.4, 0.3) for i, kind in enumerate(("forward", "backward") * 3)]
            lines = [json.dumps({"begin": 0.0, "end": 6.5, "passes": passes}) for _ in range(8)]
            (folder / f"{name}-{rank}.jsonl").write_text("\n".join(lines))
    plain, ours = (
        [
            {"step": i, "step_ms": ms + i, "predicted_ms": ms, "tokens": 9216, "loss": 6 - 0.1 * i, "work": [9 + i, 9]}
            | {how: {"busy": 0.9} for how in ("predicted", "measured")}
            for i in range(8)
        ]
        for ms in (1500, 1250)
    )
    said = {"prediction": 1.21, "resumed": "Killed, and resumed.", "nothing": "Documents that are all alike."}
    report.write(folder, plain, ours, warm=2, on="2 CPU cores", **said)


@pytest.fixture(scope="module")
def pages(tmp_path_factory, data):
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed; install one, e.g. by apt-get")
    folder = tmp_path_factory.mktemp("pages")
    flags = f"--steps 2 --html {folder}/analyze.html {RUN} {LARGE} --data-path {data}"
    assert main(["analyze", *flags.split()]) == 0
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment(folder / "trial").items():
            patched.setenv(name, value)
        assert main(words(folder / "trial", data, f"--html {folder}/trial.html")) == 0
    demo(folder)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield Pages(folder, browser)
        browser.close()


@pytest.mark.parametrize(("media", "width"), [("screen", 390), ("screen", 1280), ("print", 690)])
@pytest.mark.parametrize("name", ["analyze", "trial", "report"])
def test_nothing_is_cut_off_or_in_letters(pages, name, media, width):
    """A sheet of A4 has about 690 CSS pixels between its margins."""
    assert pages.broken(name, width, media) == []


def test_a_narrow_column_is_found(pages):
    """By what these tests ask a page."""
    style = "<style>.scroll { overflow: visible } td { overflow-wrap: anywhere; white-space: normal }</style>"
    page = (pages.folder / "analyze.html").read_text()
    table = f"<table style='width: 9rem'><tr><td>{'</td><td>'.join(['documents'] * 4)}</td></tr></table>"
    bad = (
        page.replace("<h1", f"{table}<h1")
        .replace("style-src", "style-src 'unsafe-inline'; x")
        .replace("<h1", style + "<h1")
    )
    (pages.folder / "bad.html").write_text(bad)
    assert "broken: documents" in pages.broken("bad", 390, "screen")

"""Every error says the value that was given, the limit where there is one, and what to do about it.

The tables in tests/errors/ have a case for each; a new error in megatron_wlb/ or csrc/ fails here until it has one.
"""

import re

import pytest

from tests.errors import adapter, analyze, cli, lengths, native, plan, runtime, simulate, state
from tests.errors.case import At, plain, said, value_of
from tests.errors.sites import native_sites, python_sites

CASES = [
    pytest.param(message, call, id=f"{room.__name__.split('.')[-1]}-{plain(message)[:60]}")
    for room in (adapter, analyze, cli, lengths, native, plan, runtime, simulate, state)
    for message, call in room.CASES
]
MESSAGES = [case.values[0] for case in CASES]
SITES = [*python_sites(), *native_sites()]
VERBS = (
    "adapt|add|audit|build|cast|change|check|choose|close|copy|create|drop|free|give|import|install|leave|load|log|"
    "lower|move|name|pass|pip install|plan|put|raise|read|recompute|reinstall|rename|report|restore|resume|run|"
    "see|switch|train|use|write"
)
REMEDY = re.compile(rf"[;:,)] (?:or |and |then )?(?:{VERBS})\b| must \w+ |; (?:indices|lengths|weights) must \w+")
"""What to do, or what must be: there the limit says what to do."""
WITHOUT_CASE = {
    "--wlb: ": "stands before the refusals of flags, each of which has a case",
    "in ": "stands before what is wrong with a row of a packer state, which has cases",
    ": ": "a place in a packer state and what its schema says, which has a case",
    "the stages of a schedule wait for each other": "an assertion: no work or size that is given leads there",
}
"""Errors without a case, by their longest fixed text, with why they need none."""
LEAST_TEXT = 7
"""Characters of fixed text, under which anything would match."""


@pytest.mark.parametrize(("message", "call"), CASES)
def test_an_error_says_value_limit_and_remedy(message, call, tmp_path, monkeypatch):
    text = said(call, At(folder=tmp_path, patch=monkeypatch))
    pattern = ".*".join(map(re.escape, plain(message).split("…")))
    assert re.fullmatch(rf"(megatron-wlb \w+: error: )?{pattern}", text, re.DOTALL), text
    assert REMEDY.search(text), text
    if " must be " in message:
        assert re.search(" must be [^;]*<", message), "the limit is not marked"


@pytest.mark.parametrize("message", dict.fromkeys(MESSAGES))
def test_the_value_is_what_was_given_and_no_part_of_the_text(message):
    value, text = value_of(message), plain(message)
    matches = [m for site in SITES if site.longest not in WITHOUT_CASE and (m := site.pattern.search(text))]
    spans = [m.span(group) for m in matches for group in range(1, len(m.groups()) + 1)]
    assert matches
    assert not spans or any(begin < value.stop and value.start < end for begin, end in spans)


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.place)
def test_every_error_has_a_case(site):
    if site.longest not in WITHOUT_CASE:
        assert len(site.longest) >= LEAST_TEXT, f"{site.place}: too little text to know the error by"
        found = any(site.pattern.search(plain(message)) for message in MESSAGES)
        assert found, f"{site.place}: no case in tests/errors/ says {'…'.join(site.texts)!r}"


def test_errors_without_a_case_exist():
    assert {site.longest for site in SITES} >= WITHOUT_CASE.keys()

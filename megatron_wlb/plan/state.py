"""What a packer state from disk must be, so that the run that goes on from it loses and doubles nothing.

Structure by JSON Schema; values against the datasets: what waits are pieces of documents that the stream has drawn,
each to its end and no more often than drawn. That a state names the wrong one of two such pieces can't be seen.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_wlb.plan.stream import DocumentStream, Source, shuffled
from megatron_wlb.plan.types import DOCUMENT

FORMAT = "megatron-wlb-packer-state"
VERSION = 1

_MOST = 1 << 53
_CHUNK = 1 << 14
_PLACES = {
    "original": ("carry", None),
    "fixed": ("carry", "planned"),
    "ilp": ("carry", "planned"),
    "wlb": ("remained", "queue"),
    "adaptive": ("pool", None),
}
"""Where documents wait, by policy: one place, and places that are numbered from 0."""
_WHOLE = ("wlb", "adaptive")
"""Policies that never cut a piece."""


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_COUNT = {"type": "integer", "minimum": 0, "maximum": _MOST}
_COUNTS = {"type": "array", "items": _COUNT}
_ROWS = {"type": "object", "additionalProperties": {"type": "array"}}  # one by one they would take seconds
SCHEMA = _object(
    format={"const": FORMAT},
    version={"const": VERSION},
    fingerprint={"type": "string"},
    context_length=_COUNT,
    policy={"enum": list(_PLACES)},
    num_micro_batches={"type": "integer", "minimum": 1, "maximum": 1 << 20},
    step=_COUNT,
    base=_COUNTS | {"minItems": 2, "maxItems": 2},
    stream=_object(
        seed={"type": "integer"},
        shuffle={"type": "boolean"},
        drawn=_COUNTS,
        given=_COUNTS,
        tokens=_COUNTS,
        position=_COUNT,
        index=_COUNT,
        head={"anyOf": [{"type": "null"}, _COUNTS | {"minItems": 3, "maxItems": 3}]},
    ),
    waiting=_ROWS,
    original=_ROWS,
)


def damaged(what: str) -> ValueError:
    """The error for a state that no packer has saved, or that something has happened to since."""
    return ValueError(f"the packer state is damaged: {what}; restore it or resume an older one")


def check_format(state: Any, name: str) -> None:
    """Raises ValueError unless this is, or was, a packer state, of whatever version."""
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise ValueError(
            f"{name} is not a packer state: its format is {_short(repr(found))}, not {FORMAT!r}; give "
            "iter_XXXXXXX.wlb.json of a checkpoint"
        )


@functools.cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator, validators

    types = Draft202012Validator.TYPE_CHECKER.redefine_many(
        {
            "integer": lambda _, value: type(value) is int,  # neither true nor 1.0
            "array": lambda _, value: isinstance(value, (list, tuple)),
        }
    )
    return validators.extend(Draft202012Validator, type_checker=types)(SCHEMA)


def _schema_error(state: dict[str, Any]) -> Any:
    """What is most wrong with the structure, a jsonschema error, or None. Imported here, since planning needs none."""
    from jsonschema.exceptions import best_match

    return best_match(_validator().iter_errors(state))


def read(state: dict[str, Any], stream: DocumentStream) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What waits in the policy and in the original order of a state: DOCUMENT arrays by place.

    Args:
        state: of a packer; format and version have been looked at.
        stream: over the datasets of the state, in whatever position.

    Raises ValueError, saying what is wrong, unless a packer over these datasets can go on from the state. Takes a pass
    over the lengths, and for datasets with documents that have nothing to train the shuffle of the epoch so far:
    without counting those, a state that is one document off would pass, and the document run twice.
    """
    if (error := _schema_error(state)) is not None:
        raise damaged(f"{error.json_path}: {_short(error.message)}")
    drawn = _check_stream(state["stream"], stream)
    if not 0 <= state["step"] - state["base"][0] <= state["stream"]["position"]:
        raise damaged(f"step {state['step']}, base {state['base']} and position of the stream contradict each other")
    waiting = _places(state["waiting"], "waiting", state["policy"], stream.context_length)
    original = _places(state["original"], "original", "original", stream.context_length)
    for name, places, whole in (("waiting", waiting, state["policy"] in _WHOLE), ("original", original, False)):
        rows = np.concatenate(list(places.values()))
        latest = state["step"] + state["stream"]["position"]  # more than any
        wrong = (rows["index"] >= state["stream"]["index"]) | (rows["arrival"] > latest)
        _refuse(name, rows, wrong, "is of a document that the stream has not come to")
        _check_pieces(name, rows, drawn, stream.context_length, whole)
        _check_drawn(name, rows, drawn, state["stream"]["head"], stream.context_length)
    return waiting, original


def waiting(state: dict[str, Any]) -> np.ndarray:
    """What waits in a state, as far as that can be looked at without its datasets: DOCUMENT [n].

    Raises ValueError for what no packer has saved.
    """
    state = {name: state[name] for name in SCHEMA["properties"] if name in state}  # a file has more
    if (error := _schema_error(state)) is not None:
        raise damaged(f"{error.json_path}: {_short(error.message)}")
    places = _places(state["waiting"], "waiting", state["policy"], state["context_length"])
    return np.concatenate(list(places.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dataset:
    """What a state says has been drawn from one dataset: `drawn` documents, the last `places` in the last epoch."""

    source: Source
    number: int
    drawn: int
    seed: int
    shuffle: bool

    @property
    def epoch(self) -> int:
        """Full epochs before the last document was drawn."""
        return max(0, self.drawn - 1) // len(self.source.pairs)

    def documents(self) -> Iterator[np.ndarray]:
        """Drawn in the last epoch, as rows of `source.pairs`, in parts from the end: int64 arrays."""
        size = len(self.source.pairs)
        for stop in range(self.drawn - self.epoch * size, 0, -_CHUNK):
            places = np.arange(max(0, stop - _CHUNK), stop)
            yield shuffled(places, size, (self.seed, self.number, self.epoch)) if self.shuffle else places

    def last(self) -> int:
        """Row of the document that was drawn last, -1 if there is none."""
        return next((int(rows[-1]) for rows in self.documents()), -1)

    def given(self) -> int:
        """Of the documents drawn, those with something to train."""
        if not self.source.too_short:
            return self.drawn
        before = self.epoch * (len(self.source.pairs) - self.source.too_short)
        return before + sum(int((self.source.pairs[rows] > 0).sum()) for rows in self.documents())


def _check_stream(state: dict[str, Any], stream: DocumentStream) -> list[_Dataset]:
    """Raises ValueError unless the counts fit the datasets and each other."""
    if not len(state["drawn"]) == len(state["given"]) == len(state["tokens"]) == len(stream.sources):
        raise damaged(f"drawn, given and tokens of the stream must count {len(stream.sources)} datasets")
    datasets = [
        _Dataset(source=source, number=i, drawn=drawn, seed=state["seed"], shuffle=state["shuffle"])
        for i, (source, drawn) in enumerate(zip(stream.sources, state["drawn"], strict=True))
    ]
    for dataset, given, tokens in zip(datasets, state["given"], state["tokens"], strict=True):
        total = int(dataset.source.pairs.sum())
        least = dataset.epoch * total
        if dataset.given() != given or not least <= tokens <= least + total or tokens < given:
            raise damaged(
                f"after {dataset.drawn} documents of dataset {dataset.number}, {given} documents of {tokens} tokens "
                "cannot have been taken"
            )
    begun = 0
    if state["head"]:
        number, document, offset = state["head"]
        last = datasets[number].last() if number < len(datasets) else -1
        if last < 0 or document != stream.sources[number].first + last:
            raise damaged(f"head {state['head']} of the stream is not the document that was drawn last")
        begun = int(stream.sources[number].pairs[last]) - offset
        if begun <= 0 or not offset or offset % stream.context_length:
            raise damaged(f"head {state['head']} of the stream is not at a piece of its document")
    position, pieces = state["position"], state["index"]
    if position != sum(state["tokens"]) - begun or not pieces <= position <= pieces * stream.context_length:
        raise damaged(f"{pieces} pieces of {position} tokens are not what was taken from the datasets")
    return datasets


def _places(value: dict[str, Any], name: str, policy: str, context_length: int) -> dict[str, np.ndarray]:
    """DOCUMENT arrays by place. Raises ValueError for places and rows that the policy has not."""
    one, numbered = _PLACES[policy]
    expected = {one, *(f"{numbered}{i}" for i in range(len(value) - 1) if numbered)}
    if value.keys() != expected:
        raise damaged(f"documents wait in {name}: {_short(sorted(value))} instead of {_short(sorted(expected))}")
    places = {}
    for place, rows in value.items():
        for i, row in enumerate(rows):
            columns = len(DOCUMENT.names or ())
            if not (isinstance(row, (list, tuple)) and len(row) == columns and all(map(_is_count, row))):
                raise damaged(f"{name}.{place}[{i}] is {_short(row)}, not {columns} integers from 0 to {_MOST}")
        places[place] = np.array(rows, "<i8").reshape(-1, len(DOCUMENT.names or ())).view(DOCUMENT)[:, 0]
        if place.startswith("planned") and places[place]["length"].sum() > context_length:
            raise damaged(f"{name}.{place} has more than the {context_length} tokens of a window")
    return places


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _check_pieces(name: str, rows: np.ndarray, datasets: list[_Dataset], context_length: int, whole: bool) -> None:
    """Raises ValueError unless the rows are pieces of documents, or the rest of a piece, cut in rows that follow."""
    _refuse(name, rows, rows["dataset"] >= len(datasets), f"is not of one of the {len(datasets)} datasets")
    pairs = np.zeros(len(rows), np.int64)
    for dataset in datasets:
        here = rows["dataset"] == dataset.number
        row = rows["document"] - dataset.source.first
        known = here & (row >= 0) & (row < len(dataset.source.pairs))
        pairs[known] = dataset.source.pairs[row[known]]
    stops = np.minimum((rows["offset"] // context_length + 1) * context_length, pairs)
    outside = (rows["offset"] >= stops) | (rows["length"] < 1) | (rows["length"] > stops - rows["offset"])
    _refuse(name, rows, outside, "does not lie within a piece of a document of its dataset")

    order = np.lexsort((rows["offset"], rows["index"]))
    rows, ends, stops = rows[order], (rows["offset"] + rows["length"])[order], stops[order]
    again = np.diff(rows["index"], prepend=-1) == 0
    goes_on = np.zeros(len(rows), bool)
    goes_on[1:] = rows["offset"][1:] == ends[:-1]
    for column in ("dataset", "document", "arrival"):
        goes_on[1:] &= rows[column][1:] == rows[column][:-1]
    _refuse(name, rows, again & ~goes_on, "does not go on where the row of the same index before it ends")
    last = ~np.append(again[1:], False)
    _refuse(name, rows, last & (ends != stops), "lacks the rest of its piece")
    if whole:
        _refuse(name, rows, again | (rows["offset"] % context_length > 0), "is not a whole piece")


def _check_drawn(
    name: str, rows: np.ndarray, datasets: list[_Dataset], head: list[int] | None, context_length: int
) -> None:
    """Raises ValueError for pieces that the stream is yet to deliver, or that wait more often than they were drawn."""
    rows = rows[np.unique(rows["index"], return_index=True)[1]]
    for dataset in datasets:
        here = rows[rows["dataset"] == dataset.number]
        pieces = np.stack((here["document"], here["offset"] // context_length))
        _, where, count = np.unique(pieces, axis=1, return_index=True, return_counts=True)
        _refuse(name, here[where], count > dataset.epoch + 1, "waits more often than it was drawn")
        if dataset.epoch:
            continue
        unseen = np.unique(here["document"]) - dataset.source.first
        for drawn in dataset.documents():
            if not len(unseen):
                break
            unseen = unseen[~np.isin(unseen, drawn)]
        to_come = np.isin(here["document"] - dataset.source.first, unseen)
        if head and head[0] == dataset.number:
            to_come |= (here["document"] == head[1]) & (here["offset"] >= head[2])
        _refuse(name, here, to_come, "is yet to come in the stream")


def _refuse(name: str, rows: np.ndarray, wrong: np.ndarray, why: str) -> None:
    if wrong.any():
        row = dict(zip(DOCUMENT.names or (), rows[wrong.argmax()].tolist(), strict=True))
        raise damaged(f"in {name}, {row} {why}")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."

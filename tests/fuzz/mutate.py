"""Mutations of bytes, of numbers in them, and of JSON values; all choices come from one `random.Random`."""

import re
from collections.abc import Sequence
from random import Random
from typing import Any

MOST_BYTES = 1 << 16
NUMBERS = [
    *(0, 1, 2, 3, 7, 63, 64, 65, 255, 256, 1 << 20, (1 << 26) + 1, 10**30),
    *(sign * (1 << bits) + off for bits in (15, 16, 31, 32, 53, 62, 63, 64) for off in (-1, 0, 1) for sign in (1, -1)),
]


def of_bytes(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One to eight changes of `data`, or a part of it and a part of another one."""
    out = bytearray(data)
    for _ in range(1 << random.randrange(4)):
        at = random.randrange(len(out) + 1)
        kind = random.randrange(9)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << random.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = random.randrange(256)
        elif kind in (2, 3):
            size = random.choice((2, 4, 8))
            number = random.choice(NUMBERS) % (1 << 8 * size)
            out[at : at + size] = number.to_bytes(size, "little")
        elif kind == 4:
            del out[at : at + random.randrange(1, 17)]
        elif kind == 5:
            out[at:at] = random.randbytes(random.randrange(1, 17))
        elif kind == 6:
            begin = random.randrange(len(out) + 1)
            out[at:at] = out[begin : begin + random.randrange(1, 129)]
        elif kind == 7 and random.randrange(8) == 0:
            del out[at:]
        elif kind == 8 and random.randrange(4) == 0:
            other = random.choice(others)
            out[at:] = other[random.randrange(len(other) + 1) :]
    return bytes(out[:MOST_BYTES])


def of_text(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """As `of_bytes`; half of the times a number becomes another one instead."""
    numbers = list(re.finditer(rb"-?\d+(?:\.\d+)?", data)) if random.randrange(2) else []
    if not numbers:
        return of_bytes(random, data, others)
    number = random.choice(numbers)
    text = random.choice((str(random.choice(NUMBERS)), str(random.randrange(300)), "1e400", "NaN", "9" * 5000, "0.5"))
    return (data[: number.start()] + text.encode() + data[number.end() :])[:MOST_BYTES]


def of_json(random: Random, value: Any) -> Any:
    """A copy with one change somewhere."""
    if isinstance(value, dict) and value and random.randrange(20):
        copy, key = dict(value), random.choice(list(value))
        if random.randrange(30) == 0:
            del copy[key]
        elif random.randrange(30) == 0:
            copy[f"{key}1"] = copy[key]
        else:
            copy[key] = of_json(random, value[key])
        return copy
    if isinstance(value, list) and value and random.randrange(10):
        copy, at = list(value), random.randrange(len(value))
        kind = random.randrange(12)
        if kind == 0:
            del copy[at]
        elif kind == 1:
            copy.insert(at, random.choice(value))
        elif kind == 2:
            other = random.randrange(len(value))
            copy[at], copy[other] = copy[other], copy[at]
        else:
            copy[at] = of_json(random, value[at])
        return copy
    if type(value) is int and random.randrange(2):
        return value + random.choice((-64, -1, 1, 2, 64, value))
    return random.choice((*NUMBERS, None, True, -1.5, 1e400, "", "text", [], {}, [value], {"a": value}, str(value)))

"""Cuts a CUDA library to one GPU architecture, so that it travels: 252 MB of libnccl.so.2 become 14 MB.

Addresses stay. Of each fat binary, a container of cubins by architecture, only those of one stay, moved to its front.
A container without any is left as it is. Of `__nv_relfatbin`, the inputs of the device linker, only heads stay: the
driver takes them only where no linked cubin fits. All behind the last loaded byte goes, such as debuggers' symbols.
"""

import lzma
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MAGIC, _CUBIN, _PROGRAM, _ALLOCATED, _DYNSYM = 0xBA55ED50, 2, 1, 2, 11
_PAGE = 1 << 16


class Section(NamedTuple):
    """A section header of ELF, 64 bits."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry: int


def sections(data: bytes) -> dict[str, Section]:
    """Return the sections of a library by name, in their order. Raises ValueError for other files."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("this is no 64-bit little-endian ELF file; give a shared library")
    (at,) = struct.unpack_from("<Q", data, 0x28)
    size, number, names = struct.unpack_from("<HHH", data, 0x3A)
    found = [Section(*struct.unpack_from("<IIQQQQIIQQ", data, at + i * size)) for i in range(number)]
    base = found[names].offset
    return {data[base + s.name : data.index(b"\0", base + s.name)].decode(): s for s in found}


def symbols(data: bytes, *, defined: bool) -> set[str]:
    """Return the names that a library defines, or takes from others."""
    table = next(s for s in sections(data).values() if s.type == _DYNSYM)
    names, found = [*sections(data).values()][table.link].offset, set()
    for at in range(table.offset, table.offset + table.size, table.entry):
        name, _, _, section = struct.unpack_from("<IBBH", data, at)
        if (section != 0) is defined:
            found.add(data[names + name : data.index(b"\0", names + name)].decode())
    return found


def _containers(data: bytes, section: Section) -> Iterator[tuple[int, int, int, list[tuple[int, int, int, int, int]]]]:
    """Yield begin, end of the head, end, and entries (kind, architecture, begin, end, head) of fat binaries."""
    at = section.offset
    while at + 16 <= section.offset + section.size:
        magic, _, head, length = struct.unpack_from("<IHHQ", data, at)
        if magic != _MAGIC:
            at += 8
            continue
        entries, entry, end = [], at + head, at + head + length
        while entry < end:
            kind, _, entry_head, payload = struct.unpack_from("<HHIQ", data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + 28)
            entries.append((kind, architecture, entry, entry + entry_head + payload, entry_head))
            entry += entry_head + payload
        yield at, at + head, end, entries
        at = -(-end // 8) * 8


def architectures(data: bytes) -> set[int]:
    """Return those of all cubins that the driver loads, 90 for sm_90."""
    fat = [s for name, s in sections(data).items() if "fatbin" in name and name != "__nv_relfatbin"]
    every = (entry for section in fat for *_, entries in _containers(data, section) for entry in entries)
    return {architecture for kind, architecture, *_ in every if kind == _CUBIN}


def thinned(given: bytes, architecture: int) -> bytes:
    """Return the library for one architecture."""
    data, by_name = bytearray(given), sections(given)
    for name, section in by_name.items():
        if "fatbin" not in name:
            continue
        for begin, head, end, entries in _containers(given, section):
            kept = [e for e in entries if e[:2] == (_CUBIN, architecture)]
            if not kept:  # no code for this GPU in any case
                continue
            data[head:end], at = bytes(end - head), head
            for _, _, first, last, entry_head in kept:
                stays = first + entry_head if name == "__nv_relfatbin" else last
                data[at : at + stays - first] = given[first:stays]
                at += last - first
            struct.pack_into("<Q", data, begin + 8, at - head)
    return _without_tail(data, given, by_name)


def _without_tail(data: bytearray, given: bytes, by_name: dict[str, Section]) -> bytes:
    """Drop all that is not loaded, but names and heads of loaded sections, for readelf and cuobjdump."""
    (at,), (size, number) = struct.unpack_from("<Q", given, 0x20), struct.unpack_from("<HH", given, 0x36)
    programs = [struct.unpack_from("<IIQQQQQQ", given, at + i * size) for i in range(number)]
    loaded = max(each[2] + each[5] for each in programs if each[0] == _PROGRAM)
    every, names = [*by_name.values()], by_name[".shstrtab"]
    last = max(i for i, section in enumerate(every) if section.flags & _ALLOCATED)
    strings = given[names.offset : names.offset + names.size]
    del data[loaded:]
    data += bytes(-len(data) % 8)
    names = names._replace(flags=0, offset=len(data))
    data += strings + bytes(-len(strings) % 8)
    struct.pack_into("<Q", data, 0x28, len(data))
    struct.pack_into("<HHH", data, 0x3A, 64, last + 2, last + 1)
    for section in [*every[: last + 1], names]:
        data += struct.pack("<IIQQQQIIQQ", *section)
    return bytes(data)


def pack(library: Path, packed: Path, architecture: int, preset: int = 6) -> None:
    packed.write_bytes(lzma.compress(thinned(library.read_bytes(), architecture), preset=preset))


def unpack(packed: Path, library: Path) -> None:
    """Write a library, sparsely."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(packed) as given, library.open("wb") as file:
        while block := given.read(_PAGE):
            if any(block):
                file.write(block)
            else:
                file.seek(len(block), 1)
        file.truncate(file.tell())
    library.chmod(0o755)

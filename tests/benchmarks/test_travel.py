"""What a GPU machine is given is what it wants, as far as no GPU is needed to see it."""

import ctypes
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from benchmarks.gpu import thin, travel

NCCL = next(Path(str(file.locate())) for file in distribution("nvidia-nccl-cu13").files if file.name == "libnccl.so.2")


@pytest.fixture(scope="module")
def thinned(tmp_path_factory):
    """This environment's NCCL for one architecture, packed and unpacked."""
    folder = tmp_path_factory.mktemp("thin")
    thin.pack(NCCL, folder / "nccl.xz", travel.ARCHITECTURE, preset=0)
    thin.unpack(folder / "nccl.xz", folder / "there" / "libnccl.so.2")
    return folder / "there" / "libnccl.so.2"


def test_a_thinned_library_is_small_and_loads_and_has_all_that_torch_calls(thinned):
    data, whole = thinned.read_bytes(), NCCL.read_bytes()
    assert thinned.parents[1].joinpath("nccl.xz").stat().st_size < len(whole) / 10
    assert 512 * thinned.stat().st_blocks < len(whole) / 4 < len(data)  # addresses stay
    assert 90 in thin.architectures(data) < thin.architectures(whole)  # some code is of other GPUs alone
    import torch

    wanted = thin.symbols((Path(torch.__file__).parent / "lib" / "libtorch_cuda.so").read_bytes(), defined=False)
    wanted = {name for name in wanted if name.startswith("nccl")}
    assert len(wanted) > 20 and wanted <= thin.symbols(data, defined=True) == thin.symbols(whole, defined=True)
    # Preloaded, as it is there, it is what a program finds before the one that torch brings.
    code = (
        "import ctypes, torch; v = ctypes.c_int(); ctypes.CDLL(None).ncclGetVersion(ctypes.byref(v)); "
        "print(v.value, open('/proc/self/maps').read().count('there/libnccl'))"
    )
    env = {"LD_PRELOAD": str(thinned)}
    version, mapped = subprocess.check_output([sys.executable, "-c", code], env=env, text=True).split()
    known = ctypes.c_int()
    ctypes.CDLL(str(NCCL)).ncclGetVersion(ctypes.byref(known))
    assert int(version) == known.value > 20000 and int(mapped) > 0


def test_code_of_the_architecture_is_what_it_was(thinned):
    def cubins(data):
        section = thin.sections(data)[".nv_fatbin"]
        for *_, entries in thin._containers(data, section):
            for kind, architecture, begin, end, _ in entries:
                if (kind, architecture) == (thin._CUBIN, travel.ARCHITECTURE):
                    yield bytes(data[begin:end])

    assert list(cubins(thinned.read_bytes())) == list(cubins(NCCL.read_bytes()))


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no 64-bit little-endian ELF file; give a shared library"):
        thin.thinned(b"text", 90)


def test_the_folder_unpacks_with_the_extension_of_this_torch(tmp_path, monkeypatch):
    """A made folder of small files in the place of wheels."""
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("import model_provider\n")
    script.with_name("model_provider.py").write_text("")

    def pip(python, *words, env=None):
        into = Path(words[words.index("--target") + 1])
        into.mkdir(parents=True, exist_ok=True)
        (into / f"{words[-1].partition('==')[0]}.txt").write_text(" ".join(words))
        if travel.WHEELS[0] in words:
            (into / "engine").mkdir()
            (into / "engine" / "libengine.so").write_bytes(b"E" * travel.LARGE_BYTES)
        if travel.NCCL in words:
            (into / "libnccl.so.2").write_bytes(b"NCCL" + bytes(1 << 17) + b"end")

    monkeypatch.setattr(travel, "_pip", pip)
    monkeypatch.setattr(thin, "thinned", lambda data, architecture: data)
    with pytest.raises(subprocess.CalledProcessError):  # these libraries do not load
        travel.make(tmp_path / "text", script, [sys.executable])
    monkeypatch.setattr(travel, "_load", lambda folder, python: None)
    travel.make(tmp_path / "made", script, [sys.executable])
    there = travel.unpack(tmp_path / "made", tmp_path / "there")
    assert there == travel.unpack(tmp_path / "made", tmp_path / "there")
    assert "transformer-engine-torch==" in (there.site / "transformer-engine-torch.txt").read_text()
    assert "megatron-core==" in (there.site / f"{travel.WHEELS[-1]}.txt").read_text()
    assert (there.site / "engine" / "libengine.so").stat().st_size == travel.LARGE_BYTES
    assert there.nccl.read_bytes() == b"NCCL" + bytes(1 << 17) + b"end"
    assert there.script.read_text() == script.read_text() and there.script.with_name("model_provider.py").exists()
    monkeypatch.setattr(travel, "_said", lambda python, code: "2.1.0")
    with pytest.raises(ValueError, match=r"torch is 2\.1\.0, and .* has an extension for torch-2\.\d+"):
        travel.unpack(tmp_path / "made", tmp_path / "elsewhere")
    monkeypatch.setattr(travel, "LIMIT_MIB", 0)
    with pytest.raises(ValueError, match="more than 0; give fewer"):
        travel.make(tmp_path / "again", script, [])

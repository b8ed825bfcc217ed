"""What a GPU machine without a network lacks, as a folder of at most 60 MiB, made on a CPU from package registries.

    python -m benchmarks.gpu.travel FOLDER --script CHECKOUT/pretrain_gpt.py [--python PYTHON ...]

NCCL, which takes several ranks on one GPU, and TransformerEngine are cut to one architecture (`thin`). The extension of
torch in TransformerEngine is built for the torch of every PYTHON, by default this one; that takes minutes, but no nvcc.
There, `quarter --travel FOLDER` unpacks all, and takes the extension of its torch. Neither torch nor cuDNN are in it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu import thin

ARCHITECTURE = 90
LIMIT_MIB = 60
NCCL = "nvidia-nccl-cu13==2.30.7"
ENGINE = "2.20.2"
WHEELS = (
    *(f"transformer-engine=={ENGINE}", f"transformer-engine-cu13=={ENGINE}", "megatron-core==0.19.2"),
    *("fla-core==0.6.0", "flash-linear-attention==0.6.0", "nvdlfw-inspect", "einops", "msgspec", "allpairspy"),
    *("onnx", "onnx-ir", "onnxscript", "ml-dtypes", "protobuf"),
    *("pydantic==2.14.4", "pydantic-core==2.50.5", "annotated-types", "typing-inspection"),
)
"""What a machine with torch, triton, transformers and pytest may lack."""
TO_BUILD = ("nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cudnn-frontend", "setuptools", "wheel", "pybind11")
"""What building the extension takes besides, as docs/rehearse.md has it."""
LARGE_BYTES = 1 << 22
"""Libraries from this size on travel by themselves, thinned."""
BESIDE = ("gpt_builders.py", "model_provider.py", "hybrid_builders.py", "mamba_builders.py")
"""Modules that the script of a checkout imports from its folder, where they are there."""


class There(NamedTuple):
    """The unpacked folder."""

    site: Path
    """For PYTHONPATH."""
    nccl: Path
    script: Path


def make(folder: Path, script: Path, pythons: list[str]) -> None:
    """Make the folder. Raises ValueError if it is too large."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        packages = work / "packages"
        _pip(sys.executable, "install", "--target", str(packages / "site"), *WHEELS)
        _pip(sys.executable, "install", "--target", str(work / "nccl"), NCCL)
        shutil.copy(next((work / "nccl").rglob("libnccl.so.2")), work / "libnccl.so.2")
        libraries = {"libnccl.so.2": "nccl/libnccl.so.2"}
        for python in pythons:
            version = _said(python, "import torch; print(torch.__version__.partition('+')[0])")
            _extension(python, work / f"build-{version}", packages / f"torch-{version}")
        for library in [path for path in packages.rglob("*.so*") if path.stat().st_size >= LARGE_BYTES]:
            name = f"{len(libraries)}-{library.name}"
            libraries[name] = str(library.relative_to(packages))
            shutil.move(library, work / name)
        for name in libraries:
            thin.pack(work / name, folder / f"{name}.xz", ARCHITECTURE)
        with tarfile.open(folder / "packages.tar.xz", "w:xz") as archive:
            archive.add(packages, "", filter=lambda info: None if "__pycache__" in info.name else info)
    (folder / "script").mkdir()
    for path in (script, *(script.with_name(name) for name in BESIDE)):
        if path.exists():
            shutil.copy(path, folder / "script")
    (folder / "libraries.json").write_text(json.dumps(libraries, indent=1) + "\n")
    sizes = {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    for name, size in sizes.items():
        print(f"{size / 2**20:6.1f} MiB {name}")
    if (total := sum(sizes.values()) / 2**20) > LIMIT_MIB:
        raise ValueError(f"{folder} has {total:.1f} MiB, more than {LIMIT_MIB}; give fewer --python, or fewer WHEELS")
    print(f"{total:6.1f} MiB in all")
    for python in pythons:
        _load(folder, python)


def _load(folder: Path, python: str) -> None:
    """Unpack the folder elsewhere, and load NCCL and TransformerEngine with the torch of a Python.

    Raises CalledProcessError if one does not load.
    """
    with tempfile.TemporaryDirectory() as temporary:
        there = unpack(folder, Path(temporary), python)
        code = f"import ctypes, torch; ctypes.CDLL({str(there.nccl)!r}); import transformer_engine.pytorch"
        subprocess.run([python, "-c", code], env={**os.environ, "PYTHONPATH": str(there.site)}, check=True)


def _extension(python: str, work: Path, built: Path) -> None:
    """Build TransformerEngine's extension of torch against the torch of `python`."""
    more = work / "more"
    packages = (f"transformer-engine=={ENGINE}", f"transformer-engine-cu13=={ENGINE}", *TO_BUILD)
    _pip(python, "install", "--target", str(more), *packages)
    env = {"NVTE_BUILD_USE_NVIDIA_WHEELS": "1", "NVTE_PYTORCH_FORCE_BUILD": "TRUE", "NVTE_WITH_NCCL_EP": "0"}
    # What torch brings lies beside, where the build does not look once it has found another folder of NVIDIA's.
    find = "import glob, nvidia; print(*(i for p in nvidia.__path__ for i in glob.glob(p + '/*/include')), sep=':')"
    env |= {"PYTHONPATH": str(more), "CPATH": _said(python, find)}
    # A wheel in pip's cache may be of another torch, which its name does not say.
    words = ("--no-build-isolation", "--no-cache-dir", "--target", str(built), f"transformer-engine-torch=={ENGINE}")
    _pip(python, "install", *words, env=env)


def _pip(python: str, *words: str, env: dict[str, str] | None = None) -> None:
    quiet = ("--quiet", "--no-deps", "--no-compile", "--disable-pip-version-check")
    subprocess.run([python, "-m", "pip", words[0], *quiet, *words[1:]], env={**os.environ, **(env or {})}, check=True)


def _said(python: str, code: str) -> str:
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def unpack(folder: Path, there: Path, python: str = sys.executable) -> There:
    """Unpack on the GPU machine, once. Raises ValueError if the torch of its Python has no extension."""
    libraries = json.loads((folder / "libraries.json").read_text())
    if not (done := there / "unpacked").exists():
        with tarfile.open(folder / "packages.tar.xz") as archive:
            archive.extractall(there, filter="data")
        for name, place in libraries.items():
            thin.unpack(folder / f"{name}.xz", there / place)
        shutil.copytree(folder / "script", there / "script", dirs_exist_ok=True)
        version = _said(python, "import torch; print(torch.__version__.partition('+')[0])")
        if not (extension := there / f"torch-{version}").exists():
            found = ", ".join(sorted(path.name for path in there.glob("torch-*")))
            raise ValueError(f"torch is {version}, and {folder} has an extension for {found}; make it with that torch")
        shutil.copytree(extension, there / "site", dirs_exist_ok=True)  # beside the package, where alone it looks
        done.touch()
    script = next((there / "script").glob("pretrain_*.py"))
    return There(there / "site", there / libraries["libnccl.so.2"], script)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="is made")
    parser.add_argument("--script", type=Path, required=True, help="pretrain_gpt.py of a checkout")
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="PYTHON", help="with a torch each")
    args = parser.parse_args()
    make(args.folder, args.script, args.python)


if __name__ == "__main__":
    main()

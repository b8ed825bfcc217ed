"""Builds the stand-in for CUDA and NCCL (`native/`) for the torch that is installed."""

import hashlib
import importlib.util
import os
import re
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
LIBRARIES = ("c10_cuda", "torch_cuda", "torch_python", "torch_cpu", "torch_cuda_linalg")
"""Torch's libraries whose calls into CUDA and NCCL are stood in for."""
STANDS_IN = re.compile(r"(__)?cuda[A-Z]|cu[A-Z]|nvrtc|nccl[A-Z]|cublas")
"""Names of functions that torch must not find anywhere else."""
NOTHING = re.compile(
    r"cublas.*|nvrtc.*|nccl(CommDestroy|CommAbort|CommFinalize|RedOpDestroy|Comm(Reg|Dereg)ister)"
    r"|cuda(GetLastError|PeekAtLastError|FuncSetAttribute|Profiler\w+|HostRegister|HostUnregister|DeviceEnablePeerAccess"
    r"|(Event|Stream)(Query|Destroy)|ThreadExchangeStreamCaptureMode)"
    r"|__cuda(InitModule|PushCallConfiguration|RegisterFatBinaryEnd|RegisterFunction|RegisterVar|UnregisterFatBinary)"
)
"""Names of functions that succeed and do nothing. Others, if called, end the process with their name."""


def library() -> Path:
    """Return the folder with the stand-in, built on first use; its files are named as the driver's libraries.

    Raises ValueError, with the remedy, if torch is not a build for CUDA, without a compiler, and as `_cache`.
    """
    torch, include = _torch(), _include("cuda_runtime_api.h")
    sources = sorted(SOURCES.rglob("*.[ch]*"))
    sizes, cache = {str(path): path.stat().st_size for path in transformer_engine()}, _cache()
    named = hashlib.sha256(f"{torch} {sizes}".encode())
    for path in (torch / "version.py", *sources, Path(__file__)):
        named.update(path.read_bytes())
    folder = cache / f"rehearsal-{named.hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    nccl = re.search(r"define NCCL_VERSION_CODE (\d+)", (_include("nccl.h") / "nccl.h").read_text())
    assert nccl is not None
    with tempfile.TemporaryDirectory(dir=cache) as built:
        flags = [f"-I{SOURCES}", f"-I{include}", f"-DNCCL_VERSION={nccl[1]}"]
        objects = [_compile(path, Path(built), flags) for path in sources if path.suffix == ".cpp"]
        of_torch = [path for name in LIBRARIES if (path := torch / "lib" / f"lib{name}.so").exists()]
        called = _names([*of_torch, *transformer_engine()], "--dynamic", "--undefined-only")
        missing = {name for name in called if STANDS_IN.match(name)} - _names(objects, "--defined-only")
        stubs = Path(built, "stubs.cpp")
        results = {name: 0 if NOTHING.fullmatch(name) else f'rehearsal_missing("{name}")' for name in sorted(missing)}
        bodies = [f"int {name}() {{ return {result}; }}" for name, result in results.items()]
        stubs.write_text("\n".join(['extern "C" {', "int rehearsal_missing(const char*);", *bodies, "}\n"]))
        objects.append(_compile(stubs, Path(built), ["-fno-builtin"]))
        made = Path(built, "made")
        made.mkdir()
        _run("g++", "-shared", "-o", str(made / "libcuda.so.1"), *map(str, objects))
        (made / "libnvidia-ml.so.1").symlink_to("libcuda.so.1")
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    return folder


def _cache() -> Path:
    """Return the folder of built libraries, made if need be.

    Files there run. Raises ValueError if others may write there, or if the loader cannot take its name.
    """
    home, remedy = os.environ.get("XDG_CACHE_HOME", ""), "give a folder of your own as XDG_CACHE_HOME"
    try:
        folder = (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "megatron_wlb"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # without a home
        raise ValueError(f"no folder for the stand-in for CUDA ({error}); {remedy}") from None
    folder = folder.resolve()
    if re.search(r"[\s:;]", str(folder)):
        raise ValueError(f"{folder} has a blank, colon or semicolon, at which LD_PRELOAD is cut; {remedy}")
    if folder.stat().st_uid != os.geteuid():
        raise ValueError(f"{folder} is another user's, and files there would run; {remedy}")
    folder.chmod(0o700)
    for each in folder.parents:
        mode = each.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ValueError(f"all may write in {each}, and files in {folder} would run; {remedy}")
    return folder


def _torch() -> Path:
    """Return torch's folder, without its import."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    folder = Path(spec.submodule_search_locations[0])
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        raise ValueError(
            f"the torch in {folder} is not built for CUDA, and a rehearsal runs a build that is; install torch as "
            "torch's page says for Linux and CUDA (no GPU is needed)"
        )
    return folder


def _include(header: str) -> Path:
    """Return the folder of a CUDA header among the packages that torch's wheel brings."""
    spec = importlib.util.find_spec("nvidia")
    for packages in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        for path in sorted(Path(packages).glob(f"*/include/{header}")):
            return path.parent
    raise ValueError(f"{header} is in none of the packages nvidia-* that torch's wheels bring; install torch from one")


def transformer_engine() -> list[Path]:
    """Return the compiled libraries of TransformerEngine, [] if its extension of torch is not installed."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        return []
    package = Path(spec.origin).parent
    found = [path for folder in (package.parent, package, package / "wheel_lib") for path in folder.glob("*.so")]
    found = [path for path in found if path.name.startswith(("libtransformer_engine", "transformer_engine_torch"))]
    return found if any(path.name.startswith("transformer_engine_torch") for path in found) else []


def _names(paths: list[Path], *options: str) -> set[str]:
    listed = _run("nm", *options, *map(str, paths))
    return {words[-1].partition("@")[0] for line in listed.splitlines() if len(words := line.split()) > 1}


def _compile(source: Path, folder: Path, flags: list[str]) -> Path:
    made = folder / f"{source.stem}.o"
    _run("g++", "-std=c++17", "-O1", "-w", "-fPIC", *flags, "-c", str(source), "-o", str(made))
    return made


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"LC_ALL": "C"})
    except FileNotFoundError:
        raise ValueError(f"{command[0]} is not installed; install g++, which brings it") from None
    except subprocess.CalledProcessError as error:
        raise ValueError(
            f"the stand-in for CUDA was not built ({' '.join(error.stderr.split())[:300]}); report it with torch's "
            "version"
        ) from None
    return done.stdout

"""What a log may set in a rehearsal, what a rehearsal may write, and where what it loads may lie."""

import argparse
import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rehearsal import build
from megatron_rehearsal.allowed import of_log
from megatron_wlb.cli.main import main
from megatron_wlb.describe.flags import add_wlb_arguments
from tests.cli.analyses import printed

HOSTILE = {
    **{"spec": ["evil", "x"], "record_memory_history": True, "memory_snapshot_path": "victim", "wlb_log": "victim"},
    **{"config_logger_dir": "victim", "data_cache_path": "victim", "tokenizer_model": "some/one", "save": "victim"},
    **{"tensorboard_dir": "victim", "trust_remote_code": True, "fp8_quantizer_factory": "evil.x", "yaml_cfg": "victim"},
    **{"tp_comm_overlap_cfg": "victim", "run_workload_inspector_server": True, "wlb_profile": "victim", "load": "x"},
    **{"normalization": "evil", "moe_router_load_balancing_type": ["aux_loss", "evil"], "num_layers": "evil"},
    **{"tensor_parallel_num_weight_shards": 3},
}
HARMLESS = {
    **{"num_layers": 4, "normalization": "RMSNorm", "add_bias_linear": False, "lr": 0.25, "data_path": ["1", "x"]},
    **{"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "wlb_max_tokens": "auto", "wlb": True},
    **{"wlb_packing": "original", "wlb_profile": "h100-fa2", "untie_embeddings_and_output_weights": True},
}


@pytest.fixture(scope="module")
def parser():
    from megatron.training.arguments import add_megatron_arguments

    return add_wlb_arguments(add_megatron_arguments(argparse.ArgumentParser()))


def test_a_log_sets_known_arguments_and_none_that_names_a_file_a_module_or_an_address(parser):
    options = parser.parse_args([])
    assert of_log(HOSTILE, options, parser) == ({}, [*HOSTILE])
    assert of_log(HARMLESS, options, parser) == (HARMLESS, [])
    of_tp = {"tensor_model_parallel_size": 2, "tensor_parallel_num_weight_shards": 2}
    assert of_log(of_tp | {"start_weight_decay": 0.1}, options, parser) == ({"tensor_model_parallel_size": 2}, [])
    assert of_log(vars(options) | {"world_size": 4, "of_no_release": 3}, options, parser) == ({}, [])
    by_name = {"attention_backend": "AttnBackend.flash", "exp_avg_dtype": "torch.bfloat16"}
    taken, left_out = of_log(by_name, options, parser)
    assert (taken["attention_backend"].name, taken["exp_avg_dtype"], left_out) == ("flash", "bf16", [])


ALONE, NOBODY = "a rehearsal leaves the run's files alone", "a rehearsal has no network"
CHANGES = """truncate(other, 0)|setxattr(other, 'user.x', b'')|rmdir(other)|chmod(other, 0o600)|chown(other, -1, -1)
utime(other)|link(own + '/c', other + '.l')|symlink(own, other + '.l')|link(other, own + '/l')""".replace(
    "\n", "|"
).split("|")
SAID = {
    "open(own + '/a/b', 'w').write('x'); os.replace(own + '/a/b', own + '/c'); open(other).read()": "",
    "shutil.rmtree(own + '/a'); os.mkdir('b', dir_fd=os.open(own, os.O_RDONLY))": "",
    "subprocess.run(['true'], stdout=subprocess.DEVNULL, check=True)": "",
    "os.remove('ownother', dir_fd=os.open(own + '/..', os.O_RDONLY))": ALONE,
    "open(other, 'a')": ALONE,
    "os.open(other, os.O_RDWR)": ALONE,
    "os.mkdir(other + '.d')": ALONE,
    "os.replace(own + '/c', other)": ALONE,
    "os.remove(other)": ALONE,
    **dict.fromkeys((f"os.{call}" for call in CHANGES), ALONE),
    "socket.create_connection(('localhost', 9))": NOBODY,
    "socket.socket().bind(('127.0.0.1', 0))": NOBODY,
    "socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('127.0.0.1', 9))": NOBODY,
    "socket.socket(type=socket.SOCK_DGRAM).sendmsg([b''], [], 0, ('127.0.0.1', 9))": NOBODY,
    "socket.getaddrinfo('example.invalid', 80)": NOBODY,
    "socket.gethostbyname('example.invalid')": NOBODY,
}


def test_a_rehearsal_writes_in_its_own_folder_alone_and_asks_nobody(tmp_path):
    own, other = tmp_path / "own", tmp_path / "ownother"
    (own / "a").mkdir(parents=True)
    other.write_text("precious")
    program = f"""
import os, shutil, socket, subprocess
from megatron_rehearsal.allowed import confine
own, other = {str(own)!r}, {str(other)!r}
confine(own)
for code in {[*SAID]}:
    try:
        exec(code)
        print()
    except OSError as error:
        print(type(error).__name__, error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for (code, said), line in zip(SAID.items(), done.stdout.splitlines(), strict=True):
        assert line.startswith(f"PermissionError {said}") if said else not line, code
    assert other.read_text() == "precious" and {each.name for each in tmp_path.iterdir()} == {"own", "ownother"}
    assert {each.name for each in own.iterdir()} == {"b", "c"}


def test_what_is_built_lies_where_nobody_else_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert build._cache() == tmp_path / "home" / ".cache" / "megatron_wlb"
    folder = tmp_path / "xdg" / "megatron_wlb"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build._cache() == folder and folder.stat().st_mode & 0o777 == 0o700
    folder.parent.chmod(0o777)
    with pytest.raises(ValueError, match=f"all may write in {folder.parent}, and files in {folder} would run;"):
        build._cache()
    folder.parent.chmod(0o1777)  # as /tmp is
    build._cache()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ValueError, match="another user's, and files there would run; give a folder of your own as"):
        build._cache()
    for name in ("a b", "a:b"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        with pytest.raises(ValueError, match="has a blank, colon or semicolon, at which LD_PRELOAD is cut; give a"):
            build._cache()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home")))
    with pytest.raises(ValueError, match=r"no folder for the stand-in for CUDA \(Could not determine home\); give"):
        build._cache()


def test_of_two_first_rehearsals_the_slower_takes_what_the_faster_built(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_torch", lambda: Path(torch.__file__).parent)
    (tmp_path / "nccl.h").write_text("#define NCCL_VERSION_CODE 22800")
    monkeypatch.setattr(build, "_include", lambda header: tmp_path)
    monkeypatch.setattr(build, "_run", lambda *command: "")
    rename = Path.rename

    def second(made, folder):
        (folder / "by the faster").mkdir(parents=True)
        rename(made, folder)

    monkeypatch.setattr(Path, "rename", second)
    found = build.library()
    assert [each.name for each in found.iterdir()] == ["by the faster"]

    def refused(made, folder):
        raise OSError(errno.EACCES, "no", str(folder))

    monkeypatch.setattr(Path, "rename", refused)
    monkeypatch.setattr(build, "NOTHING", re.compile("another"))
    (found / "by the faster").rmdir()
    found.rmdir()
    with pytest.raises(OSError, match="no"):
        build.library()


def test_conversations_of_a_log_are_not_read(tmp_path, capsys):
    """Nor is a tokenizer fetched; both are if the user gives them."""
    stated = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "world_size": 1, "seq_length": 64}
    stated |= {"tokenizer_type": "SFTTokenizer", "tokenizer_model": "some/one", "data_path": "['chats.jsonl']"}
    stated["sft"] = True
    log = tmp_path / "log"
    log.write_text(printed(stated))
    for words in ((), ("--data-path", "chats.jsonl"), ("--tokenizer-model", "here")):
        assert main(["analyze", str(log), "--vocab-size", "9", *words]) == 2
        assert "named only in a log are not read; give --data" in capsys.readouterr().err

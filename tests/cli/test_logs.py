"""Logs as people send them; that they say what the flags of their run say, `tests/upstream/test_commands.py` shows."""

import json
import os
import re

import pytest

from megatron_wlb.cli import launch
from megatron_wlb.cli.launch import BLOCK, read_log
from tests.cli.analyses import described, printed, run

SIZES = {
    "hidden_size": 64,
    "world_size": 16,
    "bf16": True,
    "vocab_size": 1000,
    "tp_comm_overlap": False,
    "data_path": None,
}
DENSE = printed({"num_layers": 4, "num_attention_heads": 4, "seq_length": 128, "global_batch_size": 16, **SIZES})
LLAMA = {
    **{"num_layers": 8, "num_attention_heads": 8, "group_query_attention": True, "num_query_groups": 2},
    **{"swiglu": True, "ffn_hidden_size": 96, "seq_length": 256, "global_batch_size": 24},
    **{"tensor_model_parallel_size": 2, "context_parallel_size": 2, "pipeline_model_parallel_size": 2},
    **{"virtual_pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2},
    **{"sequence_parallel": True, "recompute_modules": ["core_attn"], "split": "90,5,5"},
    **SIZES,
}


def test_the_last_block_counts_whatever_stands_around_it(tmp_path):
    """A run that was requeued, with another rank's lines in between, and prefixes of srun and torchrun."""
    first, second = printed(LLAMA), DENSE
    other = [f"[default0]:3: {line}\n[rank7]: a warning \xe9\n" for line in second.splitlines()]
    padded = "> padded vocab (size: 1000) with 536 dummy tokens (new size: 1536)\n"
    begun = first[: first.index("num_layers")]
    log = tmp_path / "log"
    before = padded.replace("1536", "2048")
    log.write_text(first + before + "iteration 1\n" + "".join(other) + padded + begun, encoding="latin-1")
    job = described(log).job
    assert (job.model.num_layers, job.model.padded_vocab_size, job.context_length) == (4, 1536, 128)
    assert os.system(f"{BLOCK} {log} > {tmp_path / 'block'}") == 0
    assert read_log(str(tmp_path / "block")).stated["num_layers"] == 4
    shards = [word for i in range(16_000) for word in ("1", f"/data/shard_{i:05d}_text_document")]
    log.write_text(re.sub(r"(  data_path \.+) .*", lambda found: f"{found[1]} {shards}", second, count=1))
    assert read_log(str(log)).stated["data_path"] == shards
    log.write_text(second.replace("  world_size", "  deepspeed ....... False\n  world_size"))
    assert read_log(str(log)).stated["deepspeed"] is False
    for text, message in (
        ("begun", "has no arguments as Megatron prints them; give the log of a run, .*or the run's command behind --"),
        (begun, "ends within its arguments; give the log of a run, as Megatron wrote it, to the line that ends"),
        (second.replace("  world_size", "  x"), "its arguments lack num_layers or world_size; give the log"),
        (second.replace("  world_size", "  deepspeed ....... True\n  world_size"), "^DeepSpeed trains no GPT"),
        (second.replace("  world_size", "  is_hybrid_model ... True\n  world_size"), "^pretrain_mamba.py of"),
        (second.replace("  world_size", "  model_parallel_size ... 2\n  world_size"), "^a release before 2023 trains"),
    ):
        log.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_log(str(log))


@pytest.mark.parametrize("name", ["log", "message"])
def test_a_log_in_lines_of_json_or_with_holes_is_read(name, tmp_path):
    block = printed(LLAMA)
    (tmp_path / "log").write_text(block)
    (tmp_path / "json").write_text(
        "".join(json.dumps({name: line, "time": 1}) + "\n" for line in block.splitlines(name == "log"))
    )
    (tmp_path / "holes").write_text("\0" * 4096 + block.replace("num_layers", "\0num_layers", 1))
    for each in ("json", "holes"):
        assert read_log(str(tmp_path / each)).stated == read_log(str(tmp_path / "log")).stated


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [
        (r"^(.*)$", "\x1b[32m\\1\x1b[0m"),  # colours
        (r"^(.*)$", "\x1b[38:5:2m\\1\x1b(B\x1b[m\x1b[K"),  # of tput and grep
        (r"^ *", ""),  # pasted where leading blanks are lost
        (r"^ *", "\t"),
        (r"  *", " "),
    ],
)
def test_a_log_is_read_as_people_send_it(pattern, instead, tmp_path):
    block = printed(LLAMA)
    (tmp_path / "log").write_text(block)
    (tmp_path / "sent").write_text(re.sub(pattern, instead, block, flags=re.MULTILINE))
    assert read_log(str(tmp_path / "sent")).stated == read_log(str(tmp_path / "log")).stated


def test_a_list_of_one_number_of_experts_is_that_number(tmp_path):
    """As Megatron-DeepSpeed prints it, of a dense model, too."""
    (tmp_path / "log").write_text(printed({"num_layers": 4, "world_size": 8, "num_experts": [1]}))
    assert read_log(str(tmp_path / "log")).stated["num_experts"] == 1


def test_what_a_log_says_of_wlb_is_taken(tmp_path):
    """Also of another release, which has other flags and words."""
    lines = {"wlb": True, "wlb_max_delay_steps": 0, "wlb_packing": "paper:20,30"}
    lines |= {"wlb_log": "a b", "wlb_save_gathered_kv": False, "wlb_max_tokens": None, "wlb_memory_budget": 40.5}
    lines |= {"wlb_windows_per_micro_batch": 2, "wlb_before": {"tp_comm_overlap": True, "not_there": 1}}
    text = "".join(f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in lines.items())
    (tmp_path / "log").write_text(DENSE.replace("  world_size", f"{text}  world_size"))
    found = run(tmp_path / "log")
    assert (found.packing.name, found.packing.outlier_thresholds) == ("paper", (20, 30))
    assert (found.settings.memory_budget, found.settings.max_tokens) == (40.5, None)
    assert found.run_settings.log == "a b"
    assert found.arguments.micro_batch_size == 2  # of the run without it
    assert found.arguments.tp_comm_overlap and "not_there" not in found.launched.stated
    assert run(tmp_path / "log", "--wlb-packing adaptive").packing.name == "adaptive"


def test_a_typed_data_flag_replaces_those_of_the_log(data, tmp_path):
    (tmp_path / "log").write_text(printed(LLAMA | {"data_path": ["0.3", "one", "0.7", "another"]}))
    (tmp_path / "blend").write_text(data)
    (tmp_path / "splits").write_text(f'{{"train": ["{data}"]}}')
    for typed in (f"--train-data-path {data}", f"--data-args-path {tmp_path}/blend",
                  f"--per-split-data-args-path {tmp_path}/splits"):  # fmt: skip
        assert described(tmp_path / "log", typed).data.prefixes == [data]
    (tmp_path / "log").write_text(printed(LLAMA | {"data_cache_path": "/of/the/run"}))
    for words, folder in (((), None), (("--data-cache-path /mine",), "/mine")):
        assert run(tmp_path / "log", *words).arguments.data_cache_path == folder
    typed = run(tmp_path / "log", "--mock-data").arguments
    assert typed.mock_data and not typed.data_path


def test_typed_flags_take_precedence(data, tmp_path):
    (tmp_path / "log").write_text(printed(LLAMA))
    _, job, blend = described(tmp_path / "log", "--num-gpus 32 --seq-length 512 --data-path", data)
    assert (job.parallel.dp, job.parallel.vpp, job.context_length, blend.prefixes) == (4, 2, 512, [data])
    for flag, stages in (
        ("--num-virtual-stages-per-pipeline-rank 4", 4),
        ("--num-layers-per-virtual-pipeline-stage 4", 1),
        ("--pipeline-model-parallel-layout E(tt|)*3ttL", 2),
    ):
        assert described(tmp_path / "log", flag).job.parallel.vpp == stages


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "is a folder, pipe or device; give the log of a run, as Megatron wrote it, or"),
        (lambda path: path.write_bytes(bytes(9999)), "has no arguments as Megatron prints them"),
        (lambda path: path.write_bytes("a log".encode("utf-16")), "is UTF-16; give it as iconv"),
        (lambda path: path.write_bytes("\ufeffa log".encode("utf-16-be")), "is UTF-16; give it as iconv"),
        (lambda path: path.write_bytes(b""), "has no arguments as Megatron prints them"),
        (lambda path: path.write_bytes(b"\xe9\xff\n" * 99), "has no arguments as Megatron prints them"),
        (lambda path: path.symlink_to("/proc/self/mem"), "Input/output error; give the log"),
        (lambda path: (path.touch(), os.truncate(path, 1 << 40)), "has over 256 MiB, the limit; give .*sed -n"),
    ],
)
def test_files_that_are_no_log(tmp_path, make, message):
    make(tmp_path / "train.log")
    with pytest.raises(ValueError, match=message) as error:
        read_log(str(tmp_path / "train.log"))
    assert str(tmp_path)[:20] in str(error.value)


def test_arguments_are_parsed_within_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "MOST_VALUES", 9)
    (tmp_path / "log").write_text(DENSE)
    with pytest.raises(ValueError, match="its arguments have over 0 MiB, the limit; give the log of a run"):
        read_log(str(tmp_path / "log"))

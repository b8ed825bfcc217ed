"""What `megatron-wlb compare` reads is in the log of a real run."""

import json

import pytest

from megatron_wlb.cli.main import main
from tests.adapter.training import train


@pytest.mark.parametrize(("size", "flags"), [(1, ""), (4, "--pipeline-model-parallel-size 2 --wlb-packing original")])
def test_the_log_of_a_run_is_compared(size, flags, dataset, tmp_path):
    path, out = tmp_path / "log.jsonl", tmp_path / "compared.json"
    entries = train(size, dataset, *flags.split(), "--train-iters", "3", log=path)["log"]
    for entry in entries:
        assert sum(map(sum, entry["lengths"])) == entry["tokens"]
        assert len(entry["lengths"]) == len(entry["work"]) == 8
        assert entry["step_ms"] > 0
    model = "--num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 8 --swiglu --vocab-size 255"
    model += " --group-query-attention --num-query-groups 2"
    assert main(["compare", str(path), *model.split(), *flags.split(), "--json", str(out)]) == 0
    compared = json.loads(out.read_text())
    assert compared["layout"]["dp"] == 2 if size > 1 else 1
    assert [s["step"] for s in compared["steps"]] == [2, 3]
    assert [s["measured_us"] for s in compared["steps"]] == pytest.approx([1e3 * e["step_ms"] for e in entries[1:]])

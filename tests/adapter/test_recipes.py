"""Recipes as launchers give them, judged by Megatron's parser, what `--wlb` sets, and all checks."""

import gzip
import json
import sys

from benchmarks import recipes

DENSE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
    "--global-batch-size 64 --train-iters 9 --lr 1e-3"
).split()
GIVEN = "--micro-batch-size 1 --calculate-per-token-loss --attention-dropout 0".split()
RECIPES = {
    "mlm-given": [*DENSE, *GIVEN],  # of a supported Megatron, by its name
    "settings": [*DENSE, "--micro-batch-size", "4", "--pipeline-model-parallel-size", "2"],
    "swift": "--micro_batch_size 2 --sequence_parallel true --tensor_model_parallel_size 2 --train_iters 9".split(),
    "shell": [*DENSE, "--micro-batch-size", "--lr-decay-style", "${STYLE}", *GIVEN[2:]],
    "fork": [*DENSE, *GIVEN, "--optimizer", "ademamix", "--xielu"],
    "graphs": [*DENSE, *GIVEN, "--cuda-graph-impl", "local"],
    "dropout": [*DENSE, *GIVEN[:-1], "0.1"],
    "hybrid": [*DENSE, *GIVEN, "--hybrid-layer-pattern", "M*M*", "--mamba-num-groups", "1"],
    "script's": [*DENSE, *GIVEN, "--export-kd-teacher-load", "PATH"],
}


def recipe(name, flags, **more):
    return {"name": name, "source": name, "world_size": None, "flags": flags} | more


def test_every_verdict(tmp_path, monkeypatch, capsys):
    lines = [recipe(name, flags) for name, flags in RECIPES.items()]
    lines.append(recipe("mamba", [*DENSE, *GIVEN], set={"model_type": "mamba"}))
    lines.append(recipe("set", DENSE, set={"attention_dropout": 0.1}))
    path, out = tmp_path / "recipes.gz", tmp_path / "counts.json"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    monkeypatch.setattr(sys, "argv", ["recipes", str(path), "--json", str(out), "--output", str(tmp_path)])
    recipes.main()
    rows = {row["source"]: row for row in json.loads((tmp_path / "recipes.json").read_text())["rows"]}
    verdicts = {name: next(v for v in recipes.VERDICTS if row[v]) for name, row in rows.items()}
    assert verdicts == {
        **{"mlm-given": "as given", "fork": "as given", "hybrid": "as given", "graphs": "something switched off"},
        **dict.fromkeys(("settings", "swift", "shell"), "with settings"),
        **dict.fromkeys(("dropout", "script's", "mamba", "set"), "refused"),
    }
    found = json.loads(out.read_text())
    assert (found["accepted"], found["without_price"], found["total"]) == (7, 6, 11)
    assert found["accepted_where_theirs_is_supported"] == found["theirs_is_supported"] == 1
    assert sum(found["reasons"].values()) == 4
    assert "MISSED share accepted with --wlb alone" in capsys.readouterr().out


def test_what_only_with_wlb_fails_upstreams_validation_is_refused(monkeypatch):
    problem = recipes._problem
    monkeypatch.setattr(recipes, "_problem", lambda args: "no" if args.micro_batch_size == 1 else problem(args))
    rows, _, reasons = recipes.judged([recipe("", RECIPES["settings"])])
    assert rows[0]["refused"] == 1 and list(reasons) == ["only with --wlb, no"]

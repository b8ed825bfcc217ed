"""The task that a command or a log makes, and what is told of ranks that ran; none runs here."""

import json

import msgspec
import pytest
from matplotlib.figure import Figure

from megatron_rehearsal import __main__ as rehearsal
from megatron_rehearsal import build, pictures, run
from megatron_rehearsal.task import GPUS, Gpu, Task
from megatron_wlb.cli.launch import read_command
from tests.adapter.datasets import write_dataset
from tests.cli.analyses import printed
from tests.rehearse.test_rehearse import JOB

GIB = 1 << 30
RANK = {
    **{"rank": 0, "predicted_gib": 6.5, "allocated_gib": 6.456, "reserved_gib": 8.0, "retries": 0, "launches": 70},
    **{"syncs_per_step": 3, "copies_per_step": 1, "out_of_memory": None, "left_out": ["spec"], "weights": GIB},
    **{"syncs": {"a.py:1": 2, "b.py:2": 1}, "copies_to_host": {"c.py:3": 9}},
    **{"nccl": {"send of 2": {"calls": 4, "bytes": 8}, "all_gather of 2": {"calls": 5, "bytes": 8}}},
    **{"passes": [[0, 4 * GIB, 5 * GIB], [0, 6 * GIB, 7 * GIB], [1, 3 * GIB, 8 * GIB]]},
    "steps": [{"kept": 2 * GIB}, {"kept": 3 * GIB}],
}
OTHER = RANK | {
    "rank": 3,
    "syncs": {f"s.py:{i}": 9 - i for i in range(7)},
    "copies_to_host": {"d.py:4": 1, "e.py:5": 1},
}
OTHER |= {"left_out": ["load", "spec"], "passes": []}
F2 = ["--wlb-mock-lengths", "F2"]
MOCK = "- Mock data, since the job's are not read here: "
OF_DATA = [word for word in JOB if word != "--mock-data"]
NOWHERE = ["nowhere.py" if word == "pretrain_gpt.py" else word for word in JOB if word not in ("--wlb", "--mock-data")]


@pytest.fixture
def told(monkeypatch, tmp_path, capsys):
    """Exit status, what `megatron-rehearse` is asked to run, and all that it tells of these ranks."""

    def told(*words, seen=(RANK,), wrong=()):
        asked = []

        def rehearse(task, ranks, advance, whole):
            asked.append((task, ranks, whole))
            advance(len(ranks))
            return [*seen], [*wrong]

        monkeypatch.setattr(rehearsal, "rehearse", rehearse)
        numbers, page = tmp_path / "numbers.json", tmp_path / "page.html"
        status = rehearsal.main(["--gpu", "h100", "--json", str(numbers), "--html", str(page), *words])
        said = capsys.readouterr()
        lines = [" ".join(line.split()) for line in said.out.splitlines()]
        return status, asked, lines, said.err, *(each.read_text() if each.exists() else "" for each in (numbers, page))

    return told


def task(**change):
    usual = {"world_size": 4, "steps": 6, "gpu": GPUS["h100"], "script": ["pretrain_gpt.py"], "wlb": True}
    usual |= {"flags": JOB[JOB.index("--wlb") :], "vocab_size": 8000, "mock_data": True}
    return Task(**usual | change)


def test_what_ranks_tell_is_told(told):
    status, asked, lines, said, numbers, page = told("--ranks", "3,0", "--", *JOB, seen=(RANK, OTHER))
    assert status == 0 and asked == [(task(), [0, 3], False)]
    assert lines[0] == "Fits."
    assert "0 6.50 6.46 8.00 0 3 1 70 9" in lines and "3 6.50 6.46 8.00 0 3 1 70 9" in lines
    waits = ", ".join(f"{9 - i} at s.py:{i}" for i in range(6))
    assert lines[-2:] == [f"The host waits, a step: {waits}, ...", "It reads values, a step: 9 at c.py:3"]
    assert said.splitlines() == [
        "- Not taken from the log: load, spec. Give the run's command if one of them matters.",
        "- GiB, and counts of the last step. Nothing was computed, and no time was measured.",
    ]
    ranks = [{name: value for name, value in rank.items() if name != "passes"} for rank in (RANK, OTHER)]
    found = {"verdict": "fits", "remedy": "", "nccl": [], "gpu": "H100", "gpu_gib": 80, "ranks": ranks}
    assert json.loads(numbers) == found
    assert "<h1 class=gain>Fits.</h1>" in page and "H100, 80 GiB; ranks 0, 3 of 4" in page
    assert page.count("<img ") == 1 and "Rank 0" in page and all(f"<li>{line}</li>" in page for line in lines[-2:])


def test_a_job_that_does_not_fit_is_told_with_the_remedy(told):
    full = RANK | {"out_of_memory": "OutOfMemoryError", "syncs": {}, "copies_to_host": {}, "left_out": []}
    status, _, lines, said, numbers, page = told("--gpu-memory", "7.5", "--", *JOB, seen=(full,))
    assert status == 1 and json.loads(numbers)["gpu_gib"] == 7.5 and "Not taken" not in said
    remedy = "Rank 0 runs out of memory; give a smaller --wlb-max-tokens, or recompute activations."
    assert lines[0] == f"Does not fit. {remedy}" and "0 6.50 6.46 8.00 0 3 1 70 9 out of memory" in lines
    assert "<h1 class=loss>Does not fit.</h1>" in page and f"<p>{remedy}</p>" in page
    assert not any("a step:" in line for line in lines)
    status, _, lines, *_ = told("--", *JOB, seen=(full,), wrong=("rank 1 waits",))
    assert status == 1 and lines[0] == "Hangs. Rank 1 waits; report it with the flags."


def test_a_command_makes_its_task(told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("pretrain_gpt.py", "train.py", "chats.jsonl"):
        (tmp_path / name).touch()
    plain = ["train.py" if word == "nowhere.py" else word for word in NOWHERE]
    runner = [*OF_DATA[:3], "-m", "megatron_wlb.run", *OF_DATA[3:]]
    here = ["--data-path", write_dataset(tmp_path / "data", seed=0, documents=4000)]
    nowhere, fixed = ["--data-path", "nowhere/corpus"], ["--wlb-mock-lengths", "fixed:64"]
    fp8 = ["--fp8-format", "hybrid", "--fp8-recipe", "delayed"]
    gone = ["gone.py" if word == "pretrain_gpt.py" else word for word in runner]
    sft = ["--sft", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", "x", "--data-path"]
    small = Gpu("H100", 7.5, (9, 0), 132, 227 << 10, 50 << 20)
    for own, job, more, change, note in (
        ("--steps 2", JOB, [], {"steps": 2}, ""),
        ("--gpu-memory 7.5", JOB, [], {"gpu": small}, ""),
        ("--ranks all", JOB, fp8, {}, "- Predicted is the memory of bf16, not"),
        ("", OF_DATA, nowhere, {"flags": [*OF_DATA[4:], *nowhere, *F2]}, MOCK),
        ("", OF_DATA, nowhere + fixed, {}, MOCK),
        ("", OF_DATA, here, {"mock_data": False}, ""),
        ("", runner, here, {"mock_data": False, "script": ["megatron_wlb.run", "pretrain_gpt.py"]}, ""),
        ("", gone, here, {"mock_data": False, "script": ["gone.py"]}, ""),
        ("", plain, here, {"mock_data": False, "script": ["train.py"], "wlb": False}, ""),
        ("", plain, nowhere, {"script": ["train.py"], "wlb": False}, MOCK),
        ("", OF_DATA, [*sft, "chats.jsonl"], {"mock_data": False}, ""),
        ("", OF_DATA, [*sft, "no.jsonl"], {"flags": [*OF_DATA[4:], *sft, "no.jsonl", *F2]}, f"{MOCK}no.jsonl does not"),
    ):
        _, asked, lines, said, *_ = told(*own.split(), "--", *job, *more, seen=(RANK | {"predicted_gib": 9.0},))
        ranks = [0, 1, 2, 3] if "all" in own else [0, 2]
        flags = [*job[next(i for i, word in enumerate(job) if word.endswith(".py")) + 1 :], *more]
        assert asked == [(task(**{"flags": flags} | change), ranks, "all" in own)]
        assert said.startswith(note) and ("Mock data" in said) == note.startswith(MOCK)
        assert (lines[0] == "Fits.") == (more == fp8 or job == plain)  # without a prediction, none is wrong


def test_a_log_makes_its_task(told, tmp_path):
    stated = read_command(OF_DATA).stated | {"world_size": 4, "add_bias_linear": False, "persist_layer_norm": False}
    (log := tmp_path / "train.log").write_text(printed(stated))
    _, ((made, ranks, whole),), *_ = told(str(log))
    kept = {"num_layers": 4, "wlb_mock_lengths": "F2", "add_bias_linear": False}
    assert {name: made.stated[name] for name in kept} == kept
    assert (msgspec.structs.replace(made, stated={}), ranks, whole) == (task(flags=["--wlb", *F2]), [0, 2], False)
    (tmp_path / "chats.jsonl").touch()
    log.write_text(printed(stated | {"sft": True, "data_path": f"['{tmp_path}/chats.jsonl']"}))
    _, ((made, *_),), _, said, *_ = told(str(log))
    assert made.mock_data and said.startswith(f"{MOCK}conversations that a log names are not tokenized.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--"], "no job, or two; give the log of a run, or its command behind --"),
        (["log", "--", *JOB], "no job, or two"),
        (["--", *NOWHERE], "nowhere.py is no script, and without --wlb the job's own runs; give its"),
        (["--", *JOB, "--transformer-impl", "transformer_engine"], "are TransformerEngine's, which is not installed"),
    ],
)
def test_what_is_no_job_is_refused(words, message, capsys, monkeypatch):
    monkeypatch.setattr(rehearsal, "transformer_engine", list)
    assert rehearsal.main(["--gpu", "h100", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_memory_of_a_rank_is_drawn_by_kind():
    figure = Figure()
    pictures.memory(RANK, 10.0, figure)
    (axes,) = figure.axes
    tops = [max(path.vertices[:, 1].max() for path in part.get_paths()) for part in axes.collections]
    assert tops == [1, 3, 6, 8] and axes.get_ylim() == (0, 10.5)
    assert axes.get_lines()[0].get_ydata() == [10.0, 10.0]
    steps = dict(zip(axes.get_xticks().tolist(), axes.get_xticklabels(), strict=True))
    assert {place: label.get_text() for place, label in steps.items()} == {0: "step 0", 2: "step 1"}


def test_the_fullest_ranks_are_drawn_in_their_order():
    seen = [RANK | {"rank": i, "reserved_gib": float(i % 5)} for i in (10, 4, 3, 9, 8, 2, 7, 1, 6, 0)]
    assert [each.title for each in pictures.sections(seen, 10.0)] == [f"Rank {i}" for i in (1, 2, 3, 4, 6, 7, 8, 9)]


@pytest.mark.parametrize(
    ("written", "text", "status", "said"),
    [
        ({"error": None}, "", 0, None),
        ({"error": "OutOfMemoryError: of CUDA"}, "", 1, None),
        ({"error": "KeyError: 'x'\nand more"}, "", 1, "rank 3 ended with status 1: KeyError: 'x'$"),
        ({"error": "SystemExit: 2"}, "usage\nx.py: error: no --lr\nbye", 2, "rank 3 ended with status 2: no --lr$"),
        ({"error": "SystemExit: 2"}, "rehearsal: cudaX is called\nbye", 2, "status 2: cudaX is called$"),
        ({"error": "SystemExit: 2"}, "usage\nbye", 2, "status 2: bye$"),
        (None, "", -11, "rank 3 ended with status -11: SystemExit$"),
    ],
)
def test_a_rank_that_ended_for_another_reason_than_memory_is_told(written, text, status, said, tmp_path):
    (tmp_path / "worker.txt").write_text("of the worker")
    (tmp_path / "3.txt").write_text(text)
    if written:
        (tmp_path / "3.json").write_text(json.dumps(written))
    if said is None:
        assert run._result(tmp_path, 3, status) == written
        return
    with pytest.raises(ValueError, match=said):
        run._result(tmp_path, 3, status)
    with pytest.raises(ValueError, match="rank 4 ended with status None: of the worker$"):
        run._result(tmp_path, 4, None)


def test_libraries_of_transformer_engine_are_those_of_its_extension_of_torch(tmp_path, monkeypatch):
    package = tmp_path / "transformer_engine"
    (package / "wheel_lib").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert build.transformer_engine() == []
    made = [package / "libtransformer_engine.so", package / "wheel_lib" / "transformer_engine_torch.abi3.so"]
    for each in (made[0], package / "other.so"):
        each.touch()
    assert build.transformer_engine() == []
    for each in (made[1], extension := tmp_path / "transformer_engine_torch.so"):
        each.touch()
    assert sorted(build.transformer_engine()) == sorted([*made, extension])

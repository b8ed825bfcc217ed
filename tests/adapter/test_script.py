"""The two ways in, as processes: a script that calls upstream itself, under `megatron_wlb.run`, and our own."""

import argparse
import contextlib
import importlib
import inspect
import os
import re
import runpy
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.training import arguments

from megatron_wlb.adapter import script
from megatron_wlb.adapter.upstream import legacy, scripts
from megatron_wlb.describe.arguments import ARGUMENTS
from tests.adapter.training import ALGORITHM_1, MODEL, WLB, less

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("upstream_script.py"))
OURS = str(ROOT / "pretrain_gpt.py")
CPU = "--distributed-backend gloo".split()
RUN = ["-m", "megatron_wlb.run"]


def run(*command, python=sys.executable):
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # a free one
    options = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": 600}
    return subprocess.run([python, *command], check=False, **options)


def steps(finished, pattern=r"wlb step.*? waiting \d+ documents"):
    assert finished.returncode == 0, finished.stderr[:6000]
    return re.findall(pattern, finished.stdout)


def test_an_unmodified_script_trains_as_ours_does(dataset):
    """And with flags of another run, of which --wlb sets what must be otherwise, and says so once."""
    flags = [*WLB, *ALGORITHM_1, *CPU, "--data-path", dataset]
    others = [*less(MODEL, "--attention-dropout"), *"--micro-batch-size 2 --dataloader-type single".split()]
    found = run(*RUN, SCRIPT, *others, *flags)
    assert re.findall("> wlb: (?:sets|without) (.*?):", found.stdout) == [
        "--micro-batch-size 1 instead of 2",
        "--attention-dropout 0.0 instead of 0.1",
        "--dataloader-type external instead of single",
        "--calculate-per-token-loss",
    ]
    *before, start, after = re.split("(?m)^(> wlb is on.*(?:\n> wlb: .*)*)", found.stdout)
    assert "wlb: " not in "".join(before) and start.count("\n") >= 8
    assert start.startswith("> wlb is on: every step trains the same as without --wlb, but for these differences\n")
    assert re.findall("> wlb: differs: (.*)", start) == [
        "--wlb-packing paper:96,160 trains documents in other steps",
        "no attention dropout",
    ]
    assert "[before the start of training step]" in before[0] and " iteration        1/" in after
    theirs = steps(found)
    assert len(theirs) == 2
    assert theirs == steps(run(OURS, *MODEL, *flags))


@pytest.fixture
def hooked(tmp_path):
    """A Python whose site-packages have the .pth file of an installation."""
    venv.create(tmp_path / "venv", with_pip=False)
    (packages,) = (tmp_path / "venv").glob("lib/*/site-packages")
    shutil.copy(ROOT / "megatron_wlb_hook.pth", packages)
    (packages / "packages.pth").write_text("\n".join(site.getsitepackages()))
    return str(tmp_path / "venv" / "bin" / "python")


@pytest.mark.each_version
def test_after_installation_the_script_itself_takes_the_flag(hooked, dataset, monkeypatch):
    """The script imports megatron first, as upstream's does; without the flag nothing of ours is imported."""
    flags = [*MODEL, *WLB, *ALGORITHM_1, *CPU, "--data-path", dataset]
    theirs = steps(run(SCRIPT, *flags, python=hooked))
    assert len(theirs) == 2
    assert theirs == steps(run(*RUN, SCRIPT, *flags))
    loaded = "import sys; print([name for name in sys.modules if 'megatron' in name])"
    assert run("-c", loaded, python=hooked).stdout == "[]\n"
    assert run("-c", loaded, "--wlb", python=hooked).stdout == "['megatron_wlb_hook']\n"
    waits = "import sys; print(any(getattr(finder, 'installs_wlb', False) for finder in sys.meta_path))"
    assert run("-c", waits, "--wlb", python=hooked).stdout == "True\n"
    for off in ("0", "false", "No", "off", ""):
        monkeypatch.setenv("MEGATRON_WLB_HOOK", off)
        assert run("-c", waits, "--wlb", python=hooked).stdout == "False\n"


@pytest.mark.parametrize(
    "files", ["__init__.py", "__init__.py training/x.py", "__init__.py core/__init__.py", "../megatron.py"]
)
def test_another_package_of_that_name_is_left_alone(hooked, files, tmp_path):
    """Without a word, and without torch, whatever words it has."""
    folder = tmp_path / "foreign" / "megatron"
    for name in files.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    script = tmp_path / "foreign" / "own.py"
    script.write_text("import sys, megatron\nprint('torch' in sys.modules, 'megatron_wlb' in sys.modules)\n")
    for words in (["--wlb"], ["--", "--wlb"], ["--message", "--wlb"]):
        found = run(str(script), *words, python=hooked)
        assert (found.returncode, found.stdout, found.stderr) == (0, "False False\n", "")


def test_without_wlb_the_script_trains_by_itself(dataset, tmp_path):
    flags = [*MODEL, *CPU, "--data-path", dataset, "--data-cache-path", str(tmp_path)]
    finished = run(*RUN, SCRIPT, *flags)
    assert len(steps(finished, "lm loss: ")) == 2
    assert "wlb" not in finished.stdout.split("training ...")[1]


def test_the_health_check_of_images():
    assert re.match(r"ok: \d+ documents packed\n", run("scripts/docker/healthcheck.py").stdout)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (RUN, "megatron_wlb.run: error: there is no script; give the path of pretrain_gpt.py"),
        ([*RUN, "nowhere/pretrain_gpt.py"], "nowhere/pretrain_gpt.py is not a file; give the path"),
        ([OURS, *MODEL, *CPU], "with --wlb only; give it, or run upstream's script: python -m megatron_wlb.run"),
        ([OURS, "--wlb", *MODEL, *CPU, "--data-path", "no\n\x1b[31mwhere"], r"file no  \[31mwhere.idx does not"),
        (
            [OURS, "--wlb", *MODEL, *CPU, *"--mock-data --spec tests.adapter.specs doubtful_layer".split()],
            "pretrain_gpt.py: error: --wlb .* the layer's is DoubtfulAttention, not Megatron's DotProductAttention;",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(command, message):
    finished = run(*command)
    assert finished.returncode == 2
    errors = [line for line in finished.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert re.search(message, errors[0])
    assert "Traceback" not in finished.stderr


def parse():
    script._wrap_parse_args(arguments.parse_args, set(), [])()


@pytest.mark.parametrize(
    ("start", "flags", "message"),
    [
        (parse, "--wlb --attention-dropout 0.1", "--attention-dropout is 0.1; packed"),
        (parse, "--wlb --yaml-cfg CITATION.cff", "--yaml-cfg is not supported; give flags"),
        (parse, "--wlb-log log --no-load-wlb", "--wlb-log --no-load-wlb without --wlb; give --wlb too"),
        (script.install, "--wlb", "torch sees no GPU on this machine; .*give --distributed-backend gloo to train on"),
    ],
)
def test_bad_flags_are_one_line_and_status_2(start, flags, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *MODEL, "--data-path", "unused", *flags.split()])
    with pytest.raises(SystemExit, match="2"):
        start()
    assert re.fullmatch(f"pretrain_gpt.py: error: .*{message}.*\n", capsys.readouterr().err)


def test_an_error_is_seen_whichever_rank_has_it(monkeypatch, capsys):
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"), script.one_line():
        raise ValueError("no\nfile")
    assert re.fullmatch(r"\S+: error on rank 3: no file\n", capsys.readouterr().err)
    monkeypatch.delenv("RANK")  # which a launcher may set later
    with pytest.raises(SystemExit, match="2"), script.one_line():
        raise ValueError("no\x1b[31m file")
    assert re.fullmatch(r"\S+: error: no \[31m file\n", capsys.readouterr().err)


FUNCTIONS = """
def get_batch(data_iterator, vp_stage=None):
    args = get_args()
    return next(data_iterator)

def loss_func(loss_mask, output_tensor, model=None):
    losses = output_tensor.view(-1)
    loss = torch.sum(losses * loss_mask)
    return loss, num_tokens, report

def forward_step(data_iterator, model):
    args = get_args()
    tokens, loss_mask = get_batch(data_iterator)
    output_tensor = model(tokens, loss_mask=loss_mask)
    return output_tensor, partial(loss_func, loss_mask, model=model)

def core_gpt_dataset_config_from_args(args):
    blend = get_blend_and_blend_per_split(args)
    data_args = {"split": args.split, "tokenizer": build_tokenizer(args)}
    return GPTDatasetConfig(**data_args)

def train_valid_test_datasets_provider(num_samples):
    config = core_gpt_dataset_config_from_args(get_args())
    train_ds, valid_ds, test_ds = BlendedMegatronDatasetBuilder(num_samples, config).build()
    return train_ds, valid_ds, test_ds
""".replace("num_samples", "train_val_test_num_samples")
OFF = "def get_batch(data_iterator, vp_stage=None):\n    args = get_args()\n"
NEW = OFF + "    if args.new_scheduler is not None:\n        return scheduled(data_iterator, args)\n"


def config(*, hybrid=False):
    made = object.__new__(importlib.import_module("megatron.training.models").GPTModelConfig)
    made.transformer = SimpleNamespace(is_hybrid_model=hybrid)  # by --hybrid-layer-pattern
    return made


def check(path, text, **flags):
    path.write_text(text)
    args = SimpleNamespace(**{"rank": 0, "split": "99,1,0", "new_scheduler": None, "new_data": None} | flags)
    scripts.check_script(config(), None, runpy.run_path(str(path))["forward_step"], args)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("* loss_mask)", "* loss_mask)  # as in the paper", None),
        ("def loss_func(loss_mask,", 'def loss_func(  \n    loss_mask: "torch.Tensor",', None),
        ("    blend = ", '    """Return it."""\n    blend = ', None),
        ("    blend = ", "    blend, rest = ", None),
        (
            "    blend = ",
            "    if args[0] or args.unknown:\n        args.split()\n    blend = ",
            r"has args\[0\] split",
        ),
        (
            "return loss,",
            "return loss + z_loss(losses),",
            r"loss_func has \(loss\+z_loss\(losses\),.*z_loss\(\), loss_func l",
        ),
        ("losses * loss_mask", "losses", r"loss_func lacks losses\*loss_mask"),
        (
            "losses * loss_mask",
            "losses * losses * loss_mask",
            r"loss_func has losses\*losses losses\*losses\*loss_mask",
        ),
        (
            "    output_tensor",
            "    loss_mask[tokens == 3] = 0\n    output_tensor",
            r"has loss_mask\[tokens==3\]=0 tokens==3",
        ),
        ("    loss = torch", "    losses = losses[kept]\n    loss = torch", r"loss_func has losses\[kept\]"),
        ("    loss = torch", "    losses = output_tensor\n    loss = torch", "loss_func has losses=output_tensor"),
        ("(tokens, ", "(tokens, extra=args, ", r"forward_step has extra="),
        ("= get_batch(", "= goldfish(get_batch)(", r"forward_step has goldfish\(\), forward_step lacks get_batch\(\)"),
        ("def get_batch", "get_batch = None\ndef get_other_batch", r"get_batch lacks next\(\)"),
        ('"split": args', '"shuffle": args', "core_gpt_dataset_config_from_args has shuffle="),
        ("return train_ds,", "return None,", r"provider has \(None,valid_ds,test_ds\), .* lacks \(train_ds,valid_ds"),
    ],
)
def test_a_script_that_does_what_tested_ones_do_not_is_refused(old, new, message, tmp_path):
    """And not blamed for it. Comments, layout, annotations and names of variables do not count."""
    assert old in FUNCTIONS
    refused = (
        rf"pretrain.py is of a newer Megatron-LM than those tested .* or was changed: .*{message}.*; take a tested"
    )
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=refused):
        check(tmp_path / "pretrain.py", FUNCTIONS.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "flags"),
    [
        (OFF, NEW, {"new_scheduler": "balanced"}),
        ("args.split, ", "args.split, 'new_data': args.new_data, ", {"new_data": "x"}),
        ("(**data_args)", "(**data_args, new_data=args.new_data)", {"new_data": 1}),
    ],
)
def test_what_flags_switch_off_is_said_and_trains(old, new, flags, tmp_path, capsys):
    assert old in FUNCTIONS
    check(tmp_path / "pretrain.py", FUNCTIONS)
    assert not capsys.readouterr().out
    check(tmp_path / "pretrain.py", text := FUNCTIONS.replace(old, new))
    assert re.search(
        "> wlb: this script is of a newer .* makes no difference .*: .*(scheduled|new_data)", capsys.readouterr().out
    )
    with pytest.raises(ValueError, match=r"or was changed: .*(scheduled\(\)|new_data=)"):
        check(tmp_path / "pretrain.py", text, **flags)


def test_a_script_with_another_model_is_refused():
    with pytest.raises(ValueError, match=r"GPT and hybrid .* has a model of SimpleNamespace; leave"):
        scripts.check_script(SimpleNamespace(), None, None, None)
    with pytest.raises(ValueError, match="has a model_provider of its own; leave --wlb out"):
        scripts.check_script(config(), lambda: None, None, None)
    with pytest.raises(ValueError, match="ignores --hybrid-layer-pattern; run pretrain_hybrid.py or leave it out"):
        scripts.check_script(config(hybrid=True), None, None, None)


def test_before_019_a_script_that_makes_another_model_is_refused(monkeypatch, capsys):
    def pretrain(train_valid_test_dataset_provider, model_provider, forward_step_func):
        model_provider()

    call = inspect.signature(pretrain).bind(None, lambda: torch.nn.Linear(1, 1), None)
    training = SimpleNamespace(installed=contextlib.nullcontext, dataset_provider=None, forward_step=None)
    monkeypatch.setattr("megatron.training.get_args", lambda: SimpleNamespace(wlb_per_token_loss=True))
    with pytest.raises(SystemExit, match="2"):
        legacy.pretrain(pretrain, call, lambda: training)
    assert "GPT and hybrid models, and this script has a model of Linear; leave" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "flags", "expands"),
    [
        ({}, ["--wlb"], True),
        ({}, [], False),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, ["--wlb"], False),
        ({}, ["--wlb", "--use-nccl-ub"], False),
    ],
)
def test_memory_segments_expand_unless_the_user_says_otherwise(monkeypatch, given, flags, expands):
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name} | given
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    script.before_megatron()
    assert ("PYTORCH_CUDA_ALLOC_CONF" in environment) == expands


@pytest.mark.each_version
def test_every_argument_of_upstreams_parser_has_a_row():
    """In `describe/arguments.py`: a new one is judged, and listed with its group."""
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    strange = {
        group.title: [action.dest for action in group._group_actions if action.dest not in {*ARGUMENTS, "help"}]
        for group in parser._action_groups
    }
    assert not {title: names for title, names in strange.items() if names}


def test_an_argument_that_has_no_row_is_said_where_it_is_set(monkeypatch):
    def parse(provider, ignore_unknown_args):
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
        parser.add_argument("--of-tomorrow", type=int, default=3)
        parser.add_argument("--no-old-way", action="store_false", dest="old_way")
        args = provider(parser).parse_args()
        args.rank = 0
        return args

    monkeypatch.setattr(script, "_finish_arguments", lambda args, given, said: None)
    for words, flags in (
        ("", ""),
        ("--of-tomorrow 3", ""),
        ("--of-tomorrow 4 --no-old-way", "--of-tomorrow --no-old-way"),
    ):
        monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--wlb", "--lr", "1", *words.split()])
        script._wrap_parse_args(parse, set(), said := [])()
        assert said == ([f"> wlb: unknown to this release; trained as Megatron would: {flags}"] if flags else [])

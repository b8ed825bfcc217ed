"""The two ways in, as processes: a script that calls upstream itself, under `megatron_wlb.run`, and our own."""

import argparse
import ast
import contextlib
import importlib
import inspect
import os
import pkgutil
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
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe import router
from megatron.training import arguments

from megatron_wlb.adapter import script
from megatron_wlb.adapter.layers.norm import TorchNorm
from megatron_wlb.adapter.upstream import legacy, scripts
from megatron_wlb.adapter.upstream.helpers import prebuilt_dataset_helpers
from megatron_wlb.adapter.upstream.means import means_over
from megatron_wlb.adapter.upstream.tracker import whole_tracker
from megatron_wlb.adapter.upstream.versions import Upstream, upstream
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
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit, match="2"), script.one_line():
        raise ValueError("no file")
    assert re.fullmatch(r"\S+: error: no file\n", capsys.readouterr().err)
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


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("args.new and not args.old", False),
        ("args.old > 2", True),
        ("args.old > 2 or other", None),
        ("args.old > args.unknown", None),
        ("args.words[0]", None),
        ("len(args.words)", None),
        ("args.text.split()", None),
        ("True", None),
    ],
)
def test_a_condition_holds_by_flags_alone(condition, holds):
    args = SimpleNamespace(new=None, old=3, words=["a"], text="a", split="1")
    test = ast.parse(condition, mode="eval").body
    assert scripts._holds(test, args) is holds and scripts._holds(test, None) is None


def test_a_script_with_another_model_is_refused():
    with pytest.raises(ValueError, match=r"GPT and hybrid .* has a model of SimpleNamespace; leave"):
        scripts.check_script(SimpleNamespace(), None, None, None)
    with pytest.raises(ValueError, match="has a model_provider of its own; leave --wlb out"):
        scripts.check_script(config(), lambda: None, None, None)
    with pytest.raises(ValueError, match="ignores --hybrid-layer-pattern; run pretrain_hybrid.py or leave it out"):
        scripts.check_script(config(hybrid=True), None, None, None)


@pytest.mark.parametrize(("per_token", "scale"), [(False, 2 * 2 * 3), (True, 2)])
def test_before_019_a_script_makes_its_model(per_token, scale, monkeypatch, capsys):
    """Of GPT alone; upstream counts the tokens of one rank, of as many as divide them, unless the run asked for it."""
    args = SimpleNamespace(wlb_per_token_loss=per_token, tensor_model_parallel_size=2, context_parallel_size=3)
    run, made = SimpleNamespace(installed=contextlib.nullcontext, dataset_provider="data", forward_step="step"), []
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    monkeypatch.setattr(router.MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    constructor, set_scale = GPTModel.__init__, router.MoEAuxLossAutoScaler.set_loss_scale

    def pretrain(train_valid_test_dataset_provider, model_provider, forward_step_func):
        assert (train_valid_test_dataset_provider, forward_step_func) == ("data", "step")
        assert GPTModel.__init__ is not constructor
        router.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(2.0))
        return model_provider(4, vp_stage=1)

    def call(model):
        provider = lambda *given, **named: made.append((given, named)) or model  # noqa: E731
        return legacy.pretrain(pretrain, inspect.signature(pretrain).bind(None, provider, None), start)

    def start():
        assert args.dataloader_inter_document_masking is False
        return run

    gpt = object.__new__(GPTModel)
    assert call(gpt) is gpt and made == [((4,), {"vp_stage": 1})]
    assert router.MoEAuxLossAutoScaler.main_loss_backward_scale == scale
    with pytest.raises(SystemExit, match="2"):
        call(torch.nn.Linear(1, 1))
    assert "GPT and hybrid models, and this script has a model of Linear; leave" in capsys.readouterr().err
    assert (GPTModel.__init__, router.MoEAuxLossAutoScaler.set_loss_scale) == (constructor, set_scale)


def test_before_019_a_model_is_built_by_adapted_specs(monkeypatch):
    """Of its layers and of those for multi-token prediction, for its stage; hooks run once it is there."""
    inner, config, calls = SimpleNamespace(mtp_model_layer="inner"), SimpleNamespace(transformer_impl="local"), []
    block = SimpleNamespace(layer_specs=[SimpleNamespace(submodules=inner)])

    def configure(chunk):
        assert chunk.transformer is config and chunk.transformer_layer_spec(config) == "spec"
        chunk.transformer_layer_spec = lambda *given: given
        chunk.pre_wrap_hooks.append(lambda chunks: calls.append(chunks))

    def constructor(self, config, transformer_layer_spec, vocabulary, mtp_block_spec=None, vp_stage=None):
        calls.append((transformer_layer_spec, vocabulary, mtp_block_spec, vp_stage))

    monkeypatch.setattr("megatron_wlb.adapter.layers.adapt", lambda *given, **how: calls.append((given, how)))
    training = SimpleNamespace(configure=configure, attention="options")
    legacy._built(training)(constructor)("model", config, "spec", 99, mtp_block_spec=block, vp_stage=1)
    adapted = (("inner", config), {"options": "options"})
    assert calls == [adapted, ((config, 1), 99, block, 1), ["model"]]
    assert inner.enorm is inner.hnorm is inner.layer_norm is TorchNorm
    legacy._built(training)(constructor)("model", config, "spec", 99)
    assert calls[3:] == [((config, None), 99, None, None), ["model"]]


def test_the_note_of_the_latest_checkpoint_changes_at_once(tmp_path, monkeypatch):
    """Any other file is opened as upstream does, and the note to read it, or in object storage."""
    owner, name = upstream().tracker
    owner = pkgutil.resolve_name(owner)
    monkeypatch.setattr(owner, name, lambda path, mode="r", **how: contextlib.nullcontext((str(path), mode, how)))
    note = tmp_path / "latest_checkpointed_iteration.txt"
    note.write_text("1")
    with whole_tracker():
        with getattr(owner, name)(note, "w") as file:
            file.write("2")
            assert note.read_text() == "1"
        assert note.read_text() == "2"
        for given in ((str(note), "r"), (str(tmp_path / "other.txt"), "w"), (f"s3://bucket/{note.name}", "w")):
            with getattr(owner, name)(*given, encoding="utf-8") as found:
                assert found == (*given, {"encoding": "utf-8"})
    assert getattr(owner, name)(note, "w").enter_result[1] == "w"


@pytest.mark.parametrize("built", [True, False])
def test_helpers_are_compiled_unless_they_are_there(built, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "it" if built else None)
    monkeypatch.setitem(sys.modules, "made_up", made_up := SimpleNamespace(compile_helpers=lambda: "compiled"))
    with prebuilt_dataset_helpers("made_up"):
        assert made_up.compile_helpers() == (None if built else "compiled")
    assert made_up.compile_helpers() == "compiled"


def test_losses_of_layers_are_logged_as_means_over_windows():
    report = means_over(lambda: 2.5)(lambda step, loss_scale, *, name="loss": (step, loss_scale, name))
    assert report(3, 4.0) == (3, 10.0, "loss") and report(3, loss_scale=2.0, name="z") == (3, 5.0, "z")


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


@pytest.mark.parametrize(
    ("words", "trains"),
    [
        *(
            (words, True)
            for words in ("--distributed-backend gloo", "--distributed-backend=gloo --wlb", "-h", "--help")
        ),
        *((words, False) for words in ("--wlb", "--distributed-backend nccl", "--distributed-backend glooey")),
    ],
)
def test_without_a_gpu_only_gloo_trains(words, trains, monkeypatch):
    installed = []
    monkeypatch.setattr("megatron_wlb.adapter.cpu.install", lambda: installed.append(1))
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words.split()])
    with contextlib.nullcontext() if trains else pytest.raises(ValueError, match="torch sees no GPU on this machine"):
        script.before_megatron()
    assert bool(installed) == trains


def test_before_019_our_script_trains_nothing(monkeypatch, capsys):
    monkeypatch.setattr(script, "upstream", lambda: Upstream(passes_functions=True))
    with pytest.raises(SystemExit, match="2"):
        script.train()
    assert "before megatron-core 0.19 a model is made by a checkout's script alone" in capsys.readouterr().err


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("sharded", ["use_torch_fsdp2", "use_megatron_fsdp", None])
def test_arguments_are_set_then_checked(sharded, old, monkeypatch):
    """What is set is said first; with FSDP, which it switches off, the variable that upstream then demands is set."""
    args, calls, said = SimpleNamespace(use_torch_fsdp2=False, use_megatron_fsdp=False), [], ["said"]
    vars(args).update({sharded: True} if sharded else {})

    def adapted(args, given):
        calls.append(("adapt", given))
        args.use_torch_fsdp2 = args.use_megatron_fsdp = False
        return SimpleNamespace(lines=lambda: ["on", "sets"])

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setattr(script, "adapt", adapted)
    monkeypatch.setattr(script, "upstream", lambda: Upstream(passes_functions=old))
    monkeypatch.setattr(legacy, "check", lambda args: calls.append("legacy"))
    monkeypatch.setattr("megatron_wlb.adapter.jobs.check", lambda args: calls.append("check"))
    script._finish_arguments(args, {"lr"}, said)
    assert calls == ["legacy"] * old + [("adapt", {"lr"}), "check"] and said == ["on", "sets", "said"]
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == ("1" if sharded else "8")


@pytest.mark.parametrize("wlb", [False, True])
def test_flags_of_a_checkpoint_are_finished_once_without_its_dropout(wlb, monkeypatch):
    """Upstream loads them from two checkpoints, one after the other."""
    finished, args = [], SimpleNamespace(attention_dropout=0.1, wlb=wlb)
    monkeypatch.setattr(script, "_finish_arguments", lambda *given: finished.append(given))

    def load(args, load_arg, **options):
        args.attention_dropout = 0.3
        return load_arg, options

    wrapped = script._wrap_load_args(load, {"lr"}, said := [])
    assert wrapped(args, load_arg="pretrained_checkpoint", exit=1) == ("pretrained_checkpoint", {"exit": 1})
    assert not finished and wrapped(args) == ("load", {})
    assert finished == [(args, {"lr"}, said)] * wlb and args.attention_dropout == (0.1 if wlb else 0.3)


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

    finished = []
    monkeypatch.setattr(script, "_finish_arguments", lambda args, given, said: finished.append(given))
    for words, flags in (
        ("", ""),
        ("--of-tomorrow 3", ""),
        ("--of-tomorrow 4 --no-old-way", "--of-tomorrow --no-old-way"),
    ):
        monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--wlb", "--lr", "1", *words.split()])
        script._wrap_parse_args(parse, set(), said := [])()
        assert said == ([f"> wlb: unknown to this release; trained as Megatron would: {flags}"] if flags else [])
    assert finished == [{"wlb", "lr", *more} for more in ((), ("of_tomorrow",), ("of_tomorrow", "old_way"))]
    monkeypatch.setattr(
        "sys.argv", ["pretrain_gpt.py", "--wlb", "--use-checkpoint-args", "--dataloader-type", "single"]
    )
    args = script._wrap_parse_args(parse, set(), [])()
    assert (args.wlb_dataloader_type, args.dataloader_type, len(finished)) == ("single", "external", 3)
    args = script._wrap_parse_args(parse, set(), [])(ignore_unknown_args=True)  # upstream looks ahead for a few flags
    assert args.dataloader_type == "single" and len(finished) == 3

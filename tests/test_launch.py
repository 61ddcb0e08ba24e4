"""Launch flags become the command of a launcher, without starting one; and a process knows when others are missing."""

import os
import sys

import pytest

from trl_opd import launch, recipes, shipped
from trl_opd import run as run_module
from trl_opd.cli.main import main
from trl_opd.errors import UsageError
from trl_opd.launch import WANTED, Request, build_command, join, take_flags


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*launch.SIZES, WANTED, "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def test_launch_flags_are_taken_out_and_the_rest_stays():
    rest = ["--config", "r.yaml", "--max_steps", "3", "--dataset_num_proc", "2"]
    assert take_flags(rest) == Request(None, None, rest)
    for flags in (
        ["--accelerate_config", "zero3", "--num_processes", "4"],
        ["--accelerate-config=zero3", "--num-processes=4"],
    ):
        assert take_flags([*rest[:2], *flags, *rest[2:]]) == Request("zero3", 4, rest)
    short = ["--num_process", "2", "--accelerate", "zero3"]
    assert take_flags(short) == Request(None, None, short)  # no abbreviations: left to be refused with the rest


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--num_processes"], "--num_processes needs a value"),
        (["--accelerate_config", "--max_steps", "3"], "--accelerate_config needs a value"),
        (["--num_processes", "two"], "--num_processes is two; it must be a whole number"),
        (["--num_processes=0"], "at least 1"),
        (["--num_processes", "2", "--num-processes", "3"], "stands twice"),
        (["--accelerate_config", "zero4"], "did you mean zero3 or zero2?"),
        (["--accelerate_config", "zero3"], "is for GPUs and this machine has none: try `--accelerate_config cpu2`"),
    ],
)
@pytest.mark.parametrize("job", ["sft", "distill"])
def test_what_is_wrong_is_said_before_anything_starts(job, argv, message, capsys, monkeypatch):
    monkeypatch.setattr(launch, "count_devices", lambda: 0)
    assert main([job, "--config", "r.yaml", *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("config", [None, "cpu2"])
def test_on_a_cpu_torchrun_starts_them(config):
    command, environment = build_command("distill", Request(config, 2, ["--node", "1"]), devices=0)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert command == [sys.executable, *torchrun, "-m", "--", "trl_opd.run_distill", "--node", "1"]
    assert environment == {WANTED: "2", "ACCELERATE_USE_CPU": "true"}


def test_torchrun_takes_no_flag_of_ours_for_its_own():
    """`--node` would be ambiguous to it (`--node-rank`, `--nnodes` ...), `--max_restarts` is one of its own."""
    from torch.distributed.run import parse_args

    rest = ["--node", "1", "--max_restarts", "5", "--no"]
    command, _ = build_command("sft", Request(None, 3, rest), devices=0)
    args = parse_args(command[3:])
    assert (args.nproc_per_node, args.module, args.training_script) == ("3", True, "trl_opd.run_sft")
    assert args.training_script_args == rest and args.max_restarts == 0


def test_one_process_on_a_cpu_needs_no_launcher():
    command, environment = build_command("sft", Request("cpu2", 1, ["--a"]), devices=0)
    assert command == [sys.executable, "-m", "trl_opd.run_sft", "--a"] and environment[WANTED] == "1"


def test_the_number_of_processes_comes_from_the_flag_the_config_or_the_gpus(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("distributed_type: MULTI_GPU\nnum_processes: 3\n")
    for config, asked, expected in ((None, None, 4), ("zero3", None, 4), (str(mine), None, 3), (str(mine), 2, 2)):
        command, environment = build_command("sft", Request(config, asked, []), devices=4)
        assert command[command.index("--num_processes") + 1] == environment[WANTED] == str(expected)


@pytest.mark.parametrize("config", [None, "ddp", "fsdp", "zero2", "zero3"])
def test_on_gpus_accelerate_starts_them(config):
    from accelerate.commands.launch import launch_command_parser

    rest = ["--config", "r.yaml", "--num_machine", "9"]
    command, environment = build_command("sft", Request(config, 2, rest), devices=2)
    assert command[:3] == [sys.executable, "-m", "accelerate.commands.launch"] and environment == {WANTED: "2"}
    args = launch_command_parser().parse_args(command[3:])
    assert args.config_file == shipped.find_accelerate_config(config or "ddp")
    assert (args.num_processes, args.module, args.training_script) == (2, True, "trl_opd.run_sft")
    assert args.training_script_args == rest and args.num_machines is None


@pytest.mark.parametrize(
    "text, devices, message",
    [
        ("distributed_type: MULTI_GPU\nnum_processes: 8\n", 2, "8 processes are asked for and this machine has 2 GPUs"),
        ("distributed_type: FSDP\nuse_cpu: true\n", 0, "FSDP with `use_cpu: true` is not supported"),
        ("distributed_type: MULTI_CPU\nnum_machines: 2\n", 0, "several machines with `use_cpu: true`"),
        ("- a\n- b\n", 0, "holds no `key: value` lines"),
        ("a: [\n", 0, "cannot be read"),
    ],
)
def test_configs_that_cannot_work(text, devices, message, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        build_command("sft", Request(str(tmp_path / "mine.yaml"), None, []), devices)


def test_a_cpu_config_of_accelerates_own_kind_and_deepspeed_on_a_cpu(tmp_path):
    (tmp_path / "mine.yaml").write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n")
    assert "torch.distributed.run" in build_command("sft", Request(str(tmp_path / "mine.yaml"), None, []), 0)[0]
    (tmp_path / "mine.yaml").write_text("distributed_type: DEEPSPEED\nuse_cpu: true\nnum_processes: 2\n")
    assert "accelerate.commands.launch" in build_command("sft", Request(str(tmp_path / "mine.yaml"), None, []), 0)[0]


def test_fewer_processes_than_asked_for_are_an_error():
    environ = {WANTED: "2"}
    with pytest.raises(UsageError, match="2 processes were asked for and the launcher started 1"):
        join(environ)
    assert WANTED not in environ  # processes started from here are not held to it
    with pytest.raises(UsageError, match="4 processes were asked for and the launcher started 2"):
        join({WANTED: "4", "WORLD_SIZE": "2"})
    join({})
    join({WANTED: "1"})


def test_accelerates_single_process_for_several_on_a_cpu_is_an_error():
    launched = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}
    with pytest.raises(UsageError, match="started one, as it does for MULTI_CPU"):
        join(dict(launched))
    join({name: value for name, value in launched.items() if name != "MASTER_ADDR"})  # one was asked for


@pytest.mark.parametrize("devices, expected", [(0, "true"), (2, None)])
def test_processes_on_a_cpu_are_told_to_meet(devices, expected, monkeypatch):
    monkeypatch.setattr(launch, "count_devices", lambda: devices)
    environ = {WANTED: "2", "WORLD_SIZE": "2"}
    join(environ)
    assert environ.get("ACCELERATE_USE_CPU") == expected


def test_fsdp_without_a_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(launch, "count_devices", lambda: 0)
    with pytest.raises(UsageError, match="FSDP is asked for and this machine has no GPU"):
        join({"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"})


@pytest.mark.parametrize(
    "argv, recipe, message",
    [
        (
            ["--learning_rrate", "1"],
            "output_dir: out\n",
            "unknown flag `--learning_rrate`; did you mean `--learning_rate`?",
        ),
        ([], "learning_rrate: 1\n", "unknown key `learning_rrate`; did you mean `learning_rate`?"),
        ([], "max_steps: many\n", "argument --max_steps"),
        ([], "warmup_ratio: 2\n", "warmup_ratio is 2; it must be a share of the steps"),
        (["--config", "none.yaml"], "", "recipe none.yaml: No such file"),
    ],
)
@pytest.mark.parametrize("job", ["sft", "distill"])
def test_a_wrong_recipe_starts_nothing(job, argv, recipe, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started"))
    (tmp_path / "r.yaml").write_text(recipe)
    assert main([job, "--num_processes", "2", *(argv if "--config" in argv else ["--config", "r.yaml", *argv])]) == 2
    said = capsys.readouterr()
    assert said.err.count("error: ") == 1 and message in said.err and said.out == ""


def test_a_good_recipe_is_checked_quietly_and_started_as_it_is(tmp_path, capsys, monkeypatch):
    """What the recipe sets in the environment, and the table of old keys, is left to the processes."""
    started = []
    monkeypatch.setattr(os, "execve", lambda *command: started.append(command))
    monkeypatch.setattr(launch, "count_devices", lambda: 0)
    monkeypatch.setenv("WANDB_PROJECT", "before")
    monkeypatch.setattr(launch, "join", lambda _: (_ for _ in ()).throw(UsageError("back")))
    (tmp_path / "r.yaml").write_text("wandb_project: p\nmax_seq_length: 64\noutput_dir: out\n")
    rest = ["--config", str(tmp_path / "r.yaml"), "--max_steps", "1"]
    assert main(["sft", *rest, "--num_processes", "2"]) == 2
    assert started[0][1][-len(rest) :] == rest
    assert os.environ["WANDB_PROJECT"] == "before" and "max_length" not in capsys.readouterr().err


def test_processes_that_did_not_meet_are_an_error(tmp_path, monkeypatch, capsys):
    """This process is one by itself, whatever the launcher says; of several the first one says so."""
    flags = ["--output_dir", str(tmp_path / "out")]
    with pytest.raises(UsageError, match="there is no model"):
        run_module.run("sft", flags)
    settings = recipes.parse("sft", flags)
    monkeypatch.setattr(recipes, "parse", lambda *_: settings)  # which would look for the other process
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = "says that there are 2 processes and this run has 1: each would train by itself"
    with pytest.raises(UsageError, match=message):
        run_module.run("sft", flags)
    assert run_module.main("sft", flags) == 2 and message in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run_module.main("sft", flags) == 2 and capsys.readouterr().err == ""
    assert not (tmp_path / "out").exists()


def test_a_launcher_is_not_started_from_a_launcher(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["sft", "--num_processes", "2"]) == 2
    assert "a launcher has already started this process, one of 2" in capsys.readouterr().err


def test_help_starts_nothing(monkeypatch, capsys):
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit):
        main(["sft", "--num_processes", "2", "--help"])
    assert "--max_length" in capsys.readouterr().out

"""Runner, results and plotter: presets in miniature, runs that stop, fail and go on, statistics by brute force."""

import csv
import dataclasses
import fcntl
import importlib.util
import itertools
import json
import os
import pty
import re
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro
from torch.utils.tensorboard import SummaryWriter

from benchmark import common, plot, run

ROOT = Path(__file__).parent.parent
TINY = ["num-envs=2", "num-steps=16", "minibatch-size=16", "update-epochs=1", "cuda=False"]


class ForkedProcess:
    """Stands in for subprocess.Popen: a copy of this process, which has the libraries loaded, runs the script."""

    started = []

    def __init__(self, command, stdout, stderr, env, start_new_session):
        assert start_new_session and stdout is stderr
        self.returncode = None
        self.pid = os.fork()
        if self.pid:
            self.started.append(self)
            return
        code = 1
        try:
            os.setsid()
            os.dup2(stdout.fileno(), 1)
            os.dup2(stdout.fileno(), 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            os.environ.update(env)
            sys.argv = command[1:]
            runpy.run_path(command[1], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory, monkeypatch):
    """MuJoCo leaves a log of its warnings in the working directory."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture
def forked(monkeypatch, lazy_disk):
    importlib.import_module("torch._dynamo")  # else every copy does it, which takes most of its time
    monkeypatch.setattr(run, "CORES", 1)
    monkeypatch.setattr(run, "subprocess", SimpleNamespace(Popen=ForkedProcess))
    yield
    while ForkedProcess.started:  # a test that failed leaves nothing behind
        process = ForkedProcess.started.pop()
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)


def start(run_dir, options, settings=()):
    """The runner's exit code."""
    values = dict(item.split("=") for item in [*TINY, *settings])
    settings = [f"{name}={value}" for name, value in values.items()]
    return run.main(tyro.cli(run.Args, args=[*options.split(), "--set", *settings, "--run-dir", str(run_dir)]))


def refusal(capsys, options):
    """What the runner says when it refuses: one sentence, and nothing else."""
    with pytest.raises(SystemExit) as end:
        run.main(tyro.cli(run.Args, args=options.split()))
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


def interrupt_when(monkeypatch, condition, number=signal.SIGINT):
    """A signal for the runner, in its pause between two looks at its runs, once the condition holds."""

    def sleep(seconds):
        time.sleep(0.02)
        if condition():
            monkeypatch.setattr(run, "time", time)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(run, "time", SimpleNamespace(time=time.time, sleep=sleep))


def plotted(*folders, output, curves=("return",)):
    plot.main(plot.Args(tuple(folders), output, curves))
    return tables_of(output)


def tables_of(output):
    """The tables of a page, as lists of dicts."""
    tables = []
    for block in (output / "tables.md").read_text().split("\n\n"):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        if block.startswith("| "):
            tables.append([dict(zip(rows[0], row, strict=True)) for row in rows[2:]])
    return tables


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# --- presets in miniature: run, interrupt, resume, plot ---

BREAKOUT = ("BreakoutNoFrameskip-v4", ["num-envs=1", "num-steps=128", "minibatch-size=128"], 8)
MINIATURES = {  # task, settings, iterations of a run, and the signal that stops it
    "mujoco-figure": ("InvertedDoublePendulum-v5", [], 64, signal.SIGINT),
    "atari-figure": (*BREAKOUT, signal.SIGTERM),
    "ablation": (*BREAKOUT, signal.SIGHUP),
}
METHODS = {
    "mujoco-figure": ["BDPG naive", "PPO+WGAN", "PPO+QR", "PPO"],
    "atari-figure": ["BDPG", "BDPG naive", "PPO+WGAN", "PPO+QR", "PPO"],
    "ablation": ["BDPG, bootstrap_length 1", "BDPG, bootstrap_length 128"],
}


@pytest.mark.parametrize("preset", MINIATURES)
def test_preset_runs_stops_goes_on_and_plots(preset, tmp_path, forked, monkeypatch, capsys):
    env_id, settings, iterations, number = MINIATURES[preset]
    settings = settings + ["bootstrap-length=1,128", "u-bar=inf", "eta=0.1"] * (preset == "ablation")
    runs, options = tmp_path / "runs", f"--preset {preset} --envs {env_id} --seeds 1 2 --workers 1"
    interrupt_when(monkeypatch, lambda: any("step " in path.read_text() for path in runs.rglob("log.txt")), number)
    # So long that it cannot end before the signal.
    assert start(runs, f"{options} --total-timesteps 100000000", settings) == 128 + number
    assert "to go on: python" in capsys.readouterr().out and not list(Path("results").rglob("*.*"))
    (checkpoint,) = runs.rglob("checkpoint-*.pt")  # the only one that had begun, and it was saved
    saved = int(checkpoint.stem.split("-")[1])

    sizes = dict(item.split("=") for item in TINY + settings if item.startswith("num-"))
    total = saved + iterations * int(sizes["num-envs"]) * int(sizes["num-steps"])
    assert start(runs, f"{options} --total-timesteps {total}", settings) == 0
    out = capsys.readouterr().out
    methods = METHODS[preset]
    assert "1 to resume" in out and "2 new" in out
    assert f"{2 * len(methods)} of {2 * len(methods)} runs are finished" in out
    # One folder per run, also where it was resumed, and every run with the arguments that make its method.
    records = [json.loads(path.read_text()) for path in runs.rglob("run.json")]
    assert len(records) == 2 * len(methods) == len(list(runs.rglob("log.txt")))
    assert {(record["args"]["total_timesteps"], record["args"]["env_id"]) for record in records} == {(total, env_id)}
    assert len(list(checkpoint.parent.glob("events.out.tfevents.*"))) == 2

    # The results are there, small, and give the same tables as the runs.
    results = Path("results", "runs")
    assert len(list(results.glob(f"{env_id}/*_seed[12].csv"))) == 2 * len(methods) == len(common.read_records(results))
    table, details, *_ = plotted(results, output=tmp_path / "from-results")
    assert [*table[0]][1 : 1 + len(methods)] == methods and (tmp_path / "from-results" / "return.png").exists()
    assert [(row["method"], row["runs"]) for row in details] == [(method, "2") for method in methods]
    assert plotted(runs, output=tmp_path / "from-runs")[0] == table

    (results / "runs.json").unlink()  # as if nobody had looked on when the runs ended
    assert start(runs, f"{options} --total-timesteps {total}", settings) == 0
    assert f"0 of {2 * len(methods)} runs to do" in capsys.readouterr().out
    assert len(common.read_records(results)) == 2 * len(methods)


def start_as_user(folder, **options):
    """The runner as a program, with a run that has begun."""
    settings = "--scripts bdpg_mujoco.py --envs Pendulum-v1 --seeds 1 --workers 1 --total-timesteps 300000"
    command = [sys.executable, ROOT / "benchmark" / "run.py", *settings.split(), "--run-dir", folder, "--set", *TINY]
    process = subprocess.Popen(command, text=True, start_new_session=True, **options)
    while not any("step " in path.read_text() for path in folder.rglob("log.txt")):
        assert process.poll() is None
        time.sleep(0.1)
    return process


def test_ctrl_c_in_a_terminal_reaches_the_script_once(tmp_path):
    """As the terminal does it: SIGINT for the process group. A second one would stop the script before it saves."""
    process = start_as_user(tmp_path, stdout=subprocess.PIPE)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130 and "stopped: bdpg_mujoco Pendulum-v1 seed 1" in out and "to go on: python" in out
    assert len(list(tmp_path.rglob("checkpoint-*.pt"))) == 1


def test_a_closed_terminal_leaves_no_training_behind(tmp_path):
    terminal, end = pty.openpty()
    process = start_as_user(tmp_path, stdin=end, stdout=end, stderr=end)
    os.close(end)
    os.close(terminal)  # all that is printed from now on fails
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 128 + signal.SIGHUP
    (log,) = tmp_path.rglob("log.txt")
    with open(log) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which the training would still hold
    assert "stopped early" in log.read_text() and len(list(tmp_path.rglob("checkpoint-*.pt"))) == 1


def test_an_error_of_the_runner_itself_stops_the_training_first(tmp_path, forked, monkeypatch):
    def broken(text, end=None):
        raise RuntimeError("the runner is broken")

    monkeypatch.setattr(run, "say", broken)
    interrupt_when(monkeypatch, lambda: any("step " in path.read_text() for path in tmp_path.rglob("log.txt")))
    options = "--scripts bdpg_mujoco.py --envs ShortPendulum-v0 --seeds 1 --total-timesteps 100000000"
    with pytest.raises(RuntimeError, match="the runner is broken"):
        start(tmp_path, options)
    assert len(list(tmp_path.rglob("checkpoint-*.pt"))) == 1 and ForkedProcess.started[-1].poll() == 143


# --- plans ---


ATARI_GAMES = ["Freeway", "Hero", "Seaquest", "Venture", "Breakout", "Qbert", "Asterix", "BeamRider"]
MUJOCO_TASKS = ["Hopper", "HalfCheetah", "Walker2d", "InvertedDoublePendulum", "Swimmer", "Ant"]
GRID = itertools.product([1, 8, 32, 128, 256], [1.0, 10.0, 100.0, np.inf], [0.01, 0.1, 1.0])


@pytest.mark.parametrize(
    "preset, methods, envs, seeds, steps",
    [
        (
            "atari-figure",
            [("bdpg_atari", {"eta": 0.1}), ("bdpg_atari", {"eta": 0.0})]
            + [(f"{name}_atari", {}) for name in ("ppo_wgan", "ppo_qr", "ppo")],
            [f"{game}NoFrameskip-v4" for game in ATARI_GAMES],
            5,
            10_000_000,
        ),
        (
            "mujoco-figure",
            [("bdpg_mujoco", {"eta": 0.0})] + [(f"{name}_mujoco", {}) for name in ("ppo_wgan", "ppo_qr", "ppo")],
            [f"{task}-v5" for task in MUJOCO_TASKS],
            5,
            1_000_000,
        ),
        (
            "ablation",
            [("bdpg_atari", {"bootstrap_length": k, "u_bar": cap, "eta": eta}) for k, cap, eta in GRID],
            ["BreakoutNoFrameskip-v4", "QbertNoFrameskip-v4"],
            1,
            151_000_000,
        ),
    ],
)
def test_presets_are_the_experiments_of_the_paper(preset, methods, envs, seeds, steps, tmp_path):
    planned = run.plan(run.Args(preset=preset, run_dir=tmp_path))
    assert {item.state() for item in planned} == {"new"} and not list(tmp_path.iterdir())
    assert len(planned) == len({item.folder for item in planned})
    found = []
    for item in planned:
        args = importlib.import_module(Path(item.script).stem).Args
        found.append((item.script, dataclasses.asdict(tyro.cli(args, args=item.command()[2:])) | {"run_dir": None}))
    wanted = [  # all else is the script's default
        (f"{script}.py", dataclasses.asdict(importlib.import_module(script).Args()) | rest | own)
        for script, own in methods
        for env_id, seed in itertools.product(envs, range(1, seeds + 1))
        for rest in [{"env_id": env_id, "seed": seed, "total_timesteps": steps, "run_dir": None}]
    ]
    assert sorted(map(str, found)) == sorted(map(str, wanted))


def test_a_preset_with_more_values_goes_on_with_what_is_there(tmp_path):
    def folders(etas):
        args = run.Args(preset="ablation", set=("u-bar=10", "bootstrap-length=1", etas), run_dir=tmp_path)
        return {item.folder for item in run.plan(args)}

    few, more = folders("eta=0.1"), folders("eta=0.1,1")
    assert len(few) == 2 and len(more) == 4 and few < more


def test_the_same_value_in_two_spellings_is_one_run(tmp_path):
    settings = ("eta=0.1,0.10,1e-1,0.2", "u-bar=10,1e1", "anneal-lr=False,false")
    args = dict(scripts=("bdpg_mujoco.py",), envs=("Pendulum-v1", "Pendulum-v1"), seeds=(1, 1), run_dir=tmp_path)
    runs = run.plan(run.Args(set=settings, **args))
    assert [item.method for item in runs] == ["bdpg_mujoco_eta=0.1", "bdpg_mujoco_eta=0.2"]


def test_a_run_is_resumed_with_its_folder_its_steps_and_its_device_alone(tmp_path, mujoco):
    args = run.Args(scripts=("bdpg_mujoco.py",), envs=("Pendulum-v1",), seeds=(7,), set=("cuda=False", "eta=0.3"))
    (item,) = run.plan(dataclasses.replace(args, run_dir=tmp_path, total_timesteps=8192))
    assert tyro.cli(mujoco.Args, args=item.command()[2:]).eta == 0.3
    (item.folder / "NAME").mkdir(parents=True)
    (item.folder / "NAME" / "checkpoint-000000004096.pt").touch()
    resume = ["--resume", str(item.folder / "NAME"), "--total-timesteps", "8192", "--no-cuda"]
    assert item.command()[2:] == resume and item.command()[1] == str(ROOT / "bdpg_mujoco.py")


def test_runs_go_seed_by_seed_so_that_what_is_stopped_early_can_be_compared(tmp_path):
    args = run.Args(preset="mujoco-figure", envs=("Swimmer-v5", "Hopper-v5"), seeds=(2, 1), run_dir=tmp_path)
    order = [(item.seed, item.env_id, item.method) for item in run.plan(args)]
    assert order == list(
        itertools.product((2, 1), ("Swimmer-v5", "Hopper-v5"), ("bdpg-naive", "ppo-wgan", "ppo-qr", "ppo"))
    )


def test_all_combinations_are_run_with_their_arguments(mujoco, tmp_path):
    settings = ("eta=0,0.1", "u_bar=10,inf", "anneal-lr=false")
    args = run.Args(scripts=("bdpg_mujoco.py",), envs=("Pendulum-v1",), seeds=(7,), set=settings, run_dir=tmp_path)
    runs = run.plan(args)
    assert [item.method for item in runs] == [
        f"bdpg_mujoco_eta={eta}_u-bar={cap}" for eta in ("0", "0.1") for cap in ("10", "inf")
    ]
    for item, (eta, cap) in zip(runs, itertools.product((0, 0.1), (10, np.inf)), strict=True):
        parsed = tyro.cli(mujoco.Args, args=item.command()[2:])
        assert (parsed.eta, parsed.u_bar, parsed.anneal_lr, parsed.seed, parsed.env_id) == (
            eta,
            cap,
            False,
            7,
            "Pendulum-v1",
        )
        assert item.steps == 244 * 16 * 256  # whole batches of a million steps


def test_estimate_is_steps_over_speed_and_workers(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SPEED", {"mujoco": (1000, 1), "atari": (100, 2)})
    atari = run.Run("a", "bdpg_atari.py", "X", 1, tmp_path / "a", (), 7_200_000)
    mujoco = run.Run("m", "bdpg_mujoco.py", "Y", 1, tmp_path / "m", (), 7_200_000)
    for runs, workers, threads, hours in (
        ([atari], 1, 1, "20.0"),
        ([atari], 1, 4, "10.0"),
        ([mujoco], 3, 4, "2.0"),
        ([mujoco, atari], 2, 1, "11.0"),
    ):
        run.show_plan(runs, workers, threads, with_commands=False)
        assert f"about {hours} h" in capsys.readouterr().out
    (tmp_path / "m" / "run").mkdir(parents=True)
    (tmp_path / "m" / "run" / "checkpoint-000003600000.pt").touch()
    run.show_plan([mujoco], 1, 1, with_commands=False)
    out = capsys.readouterr().out
    assert "1 to resume" in out and "about 1.0 h" in out


@pytest.mark.parametrize(
    "options, words",
    [
        ("--preset atary-figure", "did you mean atari-figure?"),
        ("--scripts bdpg_mujuco.py --envs Hopper-v5", "did you mean bdpg_mujoco.py?"),
        ("--scripts bdpg_mujoco.py --envs Hoper-v5", "Did you mean: `Hopper`?"),
        ("--preset atari-figure --envs BreakotNoFrameskip-v4", "Did you mean: `BreakoutNoFrameskip`?"),
        ("--preset atari-figure --envs Hopper-v5", "is no Atari game"),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --set etaa=1", "did you mean eta?"),
        ("--preset mujoco-figure --set u-bar=10", "no argument of ppo_wgan_mujoco.py 'u-bar'"),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --set eta=much", "does not take eta=much"),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --set eta=0.1,-1", "--eta must lie"),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --set eta", "NAME=VALUE"),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --set eta=0 eta=1", "eta=VALUE,VALUE"),
        ("--scripts ppo_wgan_mujoco.py --envs Hopper-v5 --set zzz=1", "there are: env-id, "),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --set seed=1", "--seeds"),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --seeds -1", "--seed must lie"),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --total-timesteps 0", "--total-timesteps must lie"),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --workers 0", "--workers"),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --executor slurm --cpus 0", "--cpus"),
        ("--preset mujoco-figure --set eta=1", "tells the methods of mujoco-figure apart"),
        ("--preset mujoco-figure --scripts bdpg_mujoco.py", "either --preset"),
        ("--scripts bdpg_mujoco.py", "--envs"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(options, words, capsys, tmp_path):
    assert words in refusal(capsys, f"{options} --run-dir {tmp_path}")
    assert not list(tmp_path.iterdir())


def test_a_folder_for_the_runs_that_cannot_be_made_is_refused(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        start(tmp_path / "file", "--scripts bdpg_mujoco.py --envs Pendulum-v1 --seeds 1")
    assert "cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"args": []}', '{"args": 1}', None])
def test_a_damaged_record_is_named(text, capsys, tmp_path):
    folder = tmp_path / "bdpg_mujoco" / "Pendulum-v1" / "seed-1" / "run"
    folder.mkdir(parents=True)
    (folder / "checkpoint-old.pt").touch()  # no number: none of the script's
    if text is None:
        (folder / "run.json").mkdir()
    else:
        (folder / "run.json").write_text(text)
    assert f"{folder / 'run.json'} is damaged" in refusal(
        capsys, f"--scripts bdpg_mujoco.py --envs Pendulum-v1 --run-dir {tmp_path}"
    )


# --- runs that fail or clash ---


def test_a_failed_run_does_not_stop_the_others(tmp_path, forked, capsys):
    options = "--scripts bdpg_mujoco.py --envs ShortPendulum-v0 --seeds 1 --total-timesteps 96"
    assert start(tmp_path, options, ["learning-rate=1e30,3e-4"]) == 1
    out, err = capsys.readouterr()
    assert "FAILED: bdpg_mujoco_learning-rate=1e30" in out and "finished: bdpg_mujoco_learning-rate=3e-4" in out
    assert "1 of 2 runs are finished" in out and "is not finite" in err and err.count("\n") == 1
    log = Path(re.search(r"log: (\S+)", err)[1]).read_text()
    assert log.startswith("$ ") and "is not finite" in log

    # What is finished is not run again, what failed is.
    assert start(tmp_path, options, ["learning-rate=1e30,3e-4"]) == 1
    assert "1 of 2 runs to do" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*3e-4/*/*/*/run.json"))) == 1

    # A folder is for one run: other arguments do not pass for it, and are not mixed with it.
    with pytest.raises(SystemExit, match="2"):
        start(tmp_path, options, ["learning-rate=1e30,3e-4", "gamma=0.9"])
    assert "gamma was 0.99" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_fails_its_run_alone(tmp_path, forked, capsys):
    (tmp_path / "runs" / "bdpg_mujoco" / "Pendulum-v1").mkdir(parents=True)
    (tmp_path / "runs" / "bdpg_mujoco" / "Pendulum-v1" / "seed-1").write_text("a file where the folder should be")
    code = start(tmp_path / "runs", "--scripts bdpg_mujoco.py --envs Pendulum-v1 --seeds 1 2 --total-timesteps 64")
    out, err = capsys.readouterr()
    assert (
        code == 1
        and "1 of 2 runs are finished" in out
        and "seed 1: " in err
        and "seed-1" in err
        and "Traceback" not in err
    )


def test_a_run_that_another_process_is_at_is_left_alone(tmp_path, forked, capsys):
    folder = tmp_path / "bdpg_mujoco" / "ShortPendulum-v0" / "seed-1"
    folder.mkdir(parents=True)
    with open(folder / "log.txt", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert start(tmp_path, "--scripts bdpg_mujoco.py --envs ShortPendulum-v0 --seeds 1 --total-timesteps 96") == 1
    assert "another process is at it" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["log.txt"] and not (folder / "log.txt").read_text()


def test_a_run_that_another_process_has_finished_meanwhile_is_finished(tmp_path):
    item = run.Run("m", "bdpg_mujoco.py", "Y", 1, tmp_path, ("--help",), 96)
    assert item.state() == "new"  # when it was planned
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint-000000000096.pt").touch()
    job = run.TrainingJob(item, 1).start()
    assert job.process is None and job.done() and job.result() is None


# --- submitit ---

needs_submitit = pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="submitit is not installed")


@pytest.fixture
def one_run(tmp_path):
    return [run.Run("m", "bdpg_mujoco.py", "Y", 1, tmp_path / "m" / "Y" / "seed-1", (), 1)]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Writes commands of Slurm, as shell scripts, into a folder where they are found."""

    def command(name, script):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    command("srun", "")
    return command


def refused(capsys, runs, **options):
    with pytest.raises(SystemExit, match="2"):
        run.submit(runs, run.Args(**options))
    *said_by_slurm, err = capsys.readouterr().err.splitlines()
    assert err.startswith("error: ") and "Traceback" not in "".join(said_by_slurm)
    return err


def test_slurm_without_submitit_is_refused(capsys, one_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert "pip install submitit" in refused(capsys, one_run)


@needs_submitit
def test_slurm_without_a_cluster_is_refused(capsys, one_run, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Slurm does not take the jobs" in refused(capsys, one_run)


@needs_submitit
def test_slurm_gets_one_array_with_the_options_and_no_second_one(capsys, one_run, slurm, tmp_path):
    slurm("sbatch", f"cp $1 {tmp_path}/batch.sh; echo Submitted batch job 77")
    slurm("squeue", "[ $3 = 77 ] && echo 77_0 PENDING")
    runs = one_run + [dataclasses.replace(one_run[0], seed=2)]
    options = dict(preset="ablation", partition="long", hours=3, cpus=6, gpus=1, workers=40)
    assert [job.job_id for job in run.submit(runs, run.Args(**options))] == ["77_0", "77_1"]
    found = set(re.findall(r"^#SBATCH (--.+)$", (tmp_path / "batch.sh").read_text(), re.M))
    assert {
        "--array=0-1%2",
        "--partition=long",
        "--time=180",
        "--cpus-per-task=6",
        "--gpus-per-node=1",
        "--job-name=ablation",
    } <= found
    assert "scancel 77" in refused(capsys, runs, **options)
    slurm("squeue", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")  # when it has ended
    slurm("sbatch", "echo sbatch: error: invalid partition specified: lon >&2; exit 1")
    assert "invalid partition specified: lon)." in refused(capsys, runs, **options)


@needs_submitit
def test_grid_runs_as_jobs_of_submitit(tmp_path, monkeypatch, capsys):
    import submitit

    executor = submitit.AutoExecutor
    monkeypatch.setattr(submitit, "AutoExecutor", lambda folder, cluster, **options: executor(folder, cluster="local"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where the job finds this module; a script takes itself along
    options = "--scripts bdpg_mujoco.py --envs InvertedDoublePendulum-v5 --seeds 1 --total-timesteps 96"
    options += " --executor slurm --cpus 1"
    assert start(tmp_path, options, ["learning-rate=1e30,3e-4"]) == 1
    out, err = capsys.readouterr()
    assert "1 of 2 runs are finished" in out and "is not finite" in err
    assert len(list(tmp_path.glob("*3e-4/*/*/*/checkpoint-000000000096.pt"))) == 1


@needs_submitit
def test_a_job_whose_time_is_up_saves_and_hands_in_the_rest(tmp_path, forked, monkeypatch):
    args = run.Args(
        scripts=("bdpg_mujoco.py",), envs=("ShortPendulum-v0",), seeds=(1,), set=tuple(TINY), run_dir=tmp_path
    )
    (item,) = run.plan(args)
    job = run.TrainingJob(item, threads=1).start()
    while "step " not in item.log_tail():
        time.sleep(0.02)
    os.kill(job.process.pid, signal.SIGUSR2)  # Slurm sends it to all processes of a job, and the script must survive it
    rest = job.checkpoint()
    assert item.state() == "to resume" and "stopped early" in item.log_tail()
    shorter = run.plan(dataclasses.replace(args, total_timesteps=item.steps_saved() + 64))
    rest.function.run = shorter[0]
    assert rest.function() is None and shorter[0].state() == "finished"
    assert len(list(tmp_path.rglob("run.json"))) == 1


# --- results ---


def write_run(folder, episodes, script="bdpg_mujoco.py", env_id="Hopper-v5", seed=1, also=(), steps=None, **args):
    """A folder as the scripts leave it, with such (step, return) of episodes and (tag, value, step); an iteration has
    1,000 steps on Atari, 250 on MuJoCo."""
    folder = folder / f"{env_id}__{script}__{seed}__{'-'.join(map(str, args.values()))}"
    folder.mkdir(parents=True)
    num_steps = 25 if "mujoco" in script else 100
    args = {"num_envs": 10, "num_steps": num_steps, "bootstrap_length": None, "env_id": env_id, "seed": seed} | args
    record = {"script": script, "args": args | {"run_dir": str(folder)}, "command": "python", "git": "abcdef0123"}
    record["versions"] = {"torch": "2.13.0", "mujoco": "4.0.0", "tqdm": "4.70.1"}
    (folder / "run.json").write_text(json.dumps(record))
    with SummaryWriter(folder, purge_step=1) as writer:
        for step, value in episodes:
            writer.add_scalar("charts/episodic_return", value, step)
        for scalar in (*also, ("charts/learning_rate", 0.0, steps or episodes[-1][0])):
            writer.add_scalar(*scalar)
    return folder


def every_1000(scores):
    return [(1000 * (index + 1), score) for index, score in enumerate(scores)]


@pytest.mark.parametrize("script, bin_steps", [("ppo_mujoco.py", 1000), ("ppo_atari.py", 20_000)])
def test_a_run_in_short_has_a_row_for_each_quarter_of_the_papers_interval(tmp_path, script, bin_steps):
    rng = np.random.default_rng(0)
    ends = np.sort(rng.integers(1, 5 * bin_steps, 300) // 10 * 10 + 10)
    ends = ends[(ends <= 2 * bin_steps) | (ends > 3 * bin_steps)]  # nothing ends in the third
    episodes = [
        (int(step), float(np.float32(value))) for step, value in zip(ends, rng.normal(size=len(ends)), strict=True)
    ]
    also = [("return_model/coverage_80", step / bin_steps, step) for step in range(1000, 5 * bin_steps + 1, 1000)]
    also += [("losses/policy", 1.0, 1000), ("return_model/explained_variance", 0.5, 1000)]
    folder = write_run(tmp_path, episodes, script, also=also, steps=5 * bin_steps)
    table = common.read_run(folder).table
    assert [*table] == ["step", "episodes", "return", "coverage_80", "explained_variance"]
    assert table["step"].tolist() == [bin_steps * n for n in range(1, 6)]
    for n in range(5):
        within = [value for step, value in episodes if n * bin_steps < step <= (n + 1) * bin_steps]
        assert table["episodes"][n] == len(within)
        assert table["return"][n] == pytest.approx(np.mean(within) if within else np.nan, nan_ok=True)
        covered = [
            value for tag, value, step in also if "coverage" in tag and n * bin_steps < step <= (n + 1) * bin_steps
        ]
        assert table["coverage_80"][n] == pytest.approx(np.mean(covered))
    assert table["explained_variance"][0] == 0.5 and np.isnan(table["explained_variance"][1:]).all()


def test_results_say_what_it_takes_to_repeat_a_run(tmp_path):
    values = np.random.default_rng(0).normal(500, 100, 150)
    folder = write_run(
        tmp_path / "runs", [(10 * n, value) for n, value in enumerate(values, start=1)], steps=2500, eta=0.1
    )
    torch.save({"seconds": 123.456}, folder / "checkpoint-000000002500.pt")
    for name in ("Hopper-v5/bdpg_seed1", "Hopper-v5/again_seed1"):
        common.keep_result(common.read_run(folder), tmp_path / "results", name)
    records = json.loads((tmp_path / "results" / "runs.json").read_text())
    assert [*records] == ["Hopper-v5/again_seed1", "Hopper-v5/bdpg_seed1"]
    record = records["Hopper-v5/bdpg_seed1"]
    assert record["args"] == json.loads((folder / "run.json").read_text())["args"] and record["git"] == "abcdef0123"
    assert record["versions"] == {"torch": "2.13.0", "mujoco": "4.0.0"} and record["command"] == "python"
    assert (record["steps"], record["episodes"], record["seconds"]) == (2500, 150, 123.5)
    assert record["score"] == pytest.approx(values[-100:].mean())
    again, _ = common.read_results(tmp_path / "results")
    for name, column in common.read_run(folder).table.items():
        np.testing.assert_allclose(again.table[name], column, rtol=1e-5)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_result_is_written_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "runs", every_1000([1.0, 2.0]))
    common.keep_result(common.read_run(folder), tmp_path, "Hopper-v5/bdpg_seed1")
    before = {path: path.read_text() for path in tmp_path.glob("**/*.[cj]s*")}

    def full_disk(path, text):
        with open(path, "w") as file:
            file.write(text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OSError, match="No space left"):
        common.keep_result(common.read_run(folder), tmp_path, "Hopper-v5/bdpg_seed1")
    assert {path: path.read_text() for path in before} == before


def test_results_of_another_experiment_are_not_overwritten(tmp_path, forked, capsys):
    options = "--scripts bdpg_mujoco.py --envs ShortPendulum-v0 --seeds 1 --total-timesteps"
    assert start(tmp_path / "first" / "name", f"{options} 96") == 0
    kept = {path: path.read_text() for path in Path("results", "name").rglob("*.*")}
    assert len(kept) == 2
    for steps, settings, words in ((96, ["gamma=0.9"], "gamma was 0.99"), (64, [], "is a longer run")):
        with pytest.raises(SystemExit, match="2"):
            start(tmp_path / "second" / "name", f"{options} {steps}", settings)
        assert words in capsys.readouterr().err
    assert {path: path.read_text() for path in Path("results", "name").rglob("*.*")} == kept
    Path("results", "name", "runs.json").write_text("{")
    with pytest.raises(SystemExit, match="2"):
        start(tmp_path / "first" / "name", f"{options} 96")
    assert "runs.json is damaged" in capsys.readouterr().err


def test_a_result_that_cannot_be_kept_is_a_failure_and_is_kept_the_next_time(tmp_path, forked, monkeypatch, capsys):
    options, keep_result = (
        "--scripts bdpg_mujoco.py --envs ShortPendulum-v0 --seeds 1 --total-timesteps 96",
        run.keep_result,
    )

    def full_disk(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "keep_result", full_disk)
    assert start(tmp_path / "name", options) == 1
    assert "No space left on device" in capsys.readouterr().err
    monkeypatch.setattr(run, "keep_result", keep_result)
    assert start(tmp_path / "name", options) == 0
    assert len(list(Path("results", "name").rglob("*.csv"))) == 1


# --- the plotter ---


def assert_interval(low, high, outcomes):
    """The ends are 2.5 % and 97.5 % quantiles of the outcomes, all equally likely, as far as random draws can tell."""
    outcomes, error = np.array(outcomes), 5 * (0.025 * 0.975 / plot.NUM_RESAMPLES) ** 0.5
    assert (outcomes < low - 1e-9).mean() < 0.025 + error and (outcomes <= low + 1e-9).mean() > 0.025 - error
    assert (outcomes > high + 1e-9).mean() < 0.025 + error and (outcomes >= high - 1e-9).mean() > 0.025 - error


def all_resamples(scores):
    return list(itertools.product(scores, repeat=len(scores)))


def test_interval_of_the_mean_is_that_of_all_resamples():
    tasks = [np.array([0.1, 0.4, 2.0, 2.2]), np.array([5.0, 9.0, 7.5])]
    outcomes = [(np.mean(a) + np.mean(b)) / 2 for a in all_resamples(tasks[0]) for b in all_resamples(tasks[1])]
    point, low, high = plot.mean_interval(tasks)
    assert point == pytest.approx((4.7 / 4 + 21.5 / 3) / 2)
    assert_interval(low, high, outcomes)


def test_improvement_is_the_share_of_pairs_won():
    pairs = [(np.array([1.0, 2.0, 3.0]), np.array([2.0, 0.0])), (np.array([4.0, 0.5]), np.array([1.0, 3.0, 5.0]))]

    def wins(xs, ys):
        return sum(1.0 if x > y else 0.5 if x == y else 0.0 for x in xs for y in ys) / (len(xs) * len(ys))

    point, low, high = plot.improvement_interval(pairs)
    assert point == pytest.approx((wins(*pairs[0]) + wins(*pairs[1])) / 2)
    each = [[wins(x, y) for x in all_resamples(xs) for y in all_resamples(ys)] for xs, ys in pairs]
    assert_interval(low, high, [(a + b) / 2 for a in each[0] for b in each[1]])


def test_no_interval_where_a_task_has_a_single_run():
    two, one = np.array([1.0, 2.0]), np.array([3.0])
    assert np.isnan(plot.mean_interval([two, one])[1:]).all()
    assert np.isnan(plot.improvement_interval([(two, one)])[1:]).all()
    assert np.isfinite(plot.mean_interval([two, two])).all()
    assert np.isfinite(plot.improvement_interval([(two, two)])).all()


@pytest.fixture
def pictures(monkeypatch):
    """The figures that are drawn, instead of files."""
    drawn = []
    monkeypatch.setattr(plot.plt.Figure, "savefig", lambda figure, *rest, **options: drawn.append(figure))
    monkeypatch.setattr(plot.plt, "close", lambda figure: None)
    yield drawn
    monkeypatch.undo()
    plot.plt.close("all")


@pytest.mark.parametrize("script, iterations", [("bdpg_mujoco.py", 4), ("bdpg_atari.py", 80)])
def test_curves_are_means_over_the_papers_intervals_and_over_runs(tmp_path, pictures, script, iterations):
    """Two and a half intervals, the last of which does not count; every episode counts alike."""
    interval, rng = 1000 * iterations, np.random.default_rng(0)
    episodes = {}
    for seed in (1, 2, 3):
        ends = np.sort(rng.choice(np.arange(10, 5 * interval // 2, 10), 200, replace=False))
        episodes[seed] = [(int(end), float(np.float32(rng.normal()))) for end in ends]
        write_run(tmp_path / "runs", episodes[seed], script, seed=seed, steps=5 * interval // 2, eta=0.1)
    plotted(tmp_path / "runs", output=tmp_path)
    (line,), (band,) = pictures[0].axes[0].lines, pictures[0].axes[0].collections
    means = np.array(
        [
            [np.mean([value for step, value in of_run if n * interval < step <= (n + 1) * interval]) for n in (0, 1)]
            for of_run in episodes.values()
        ]
    )
    np.testing.assert_allclose(line.get_xdata(), [interval / 1e6, 2 * interval / 1e6])
    np.testing.assert_allclose(line.get_ydata(), means.mean(0))
    std = np.sqrt(((means - means.mean(0)) ** 2).sum(0) / 2)
    corners = band.get_paths()[0].vertices[:, 1]
    for edge in (*(means.mean(0) - std), *(means.mean(0) + std)):
        assert np.abs(corners - edge).min() < 1e-6


def test_a_run_shorter_than_an_interval_is_a_point(tmp_path, pictures):
    write_run(tmp_path / "runs", [(500, 2.0), (1500, 4.0), (1600, 6.0)], eta=0.1)
    plotted(tmp_path / "runs", output=tmp_path)
    assert pictures[0].axes[0].lines[0].get_ydata().tolist() == [4.0]


@pytest.mark.parametrize("number", [1, 2, 4, 7])
def test_legend_is_as_wide_as_the_picture_at_most(number, tmp_path, pictures):
    for cap in range(number):
        write_run(tmp_path, every_1000([1.0, 2.0]), eta=0.1, u_bar=10.0**cap)
    plotted(tmp_path, output=tmp_path)
    (figure,) = pictures
    figure.draw_without_rendering()
    (legend,), box = figure.legends, figure.legends[0].get_window_extent()
    assert len(legend.get_texts()) == number and 0 <= box.x0 and box.x1 <= figure.bbox.x1 and 0 <= box.y0
    assert box.y1 <= figure.axes[0].get_tightbbox().y0 and len(figure.axes[0].lines) == number


def test_too_many_methods_for_a_picture_have_tables_alone(tmp_path, capsys):
    for cap in range(plot.MOST_METHODS + 1):
        write_run(tmp_path, every_1000([1.0, 2.0]), eta=0.1, u_bar=10.0**cap)
    _, details, *_ = plotted(tmp_path, output=tmp_path)
    assert "13 methods are more than a picture can show" in capsys.readouterr().err
    assert len(details) == 13 and not list(tmp_path.glob("*.png"))


def test_the_same_runs_give_the_same_files(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / "runs", every_1000([1.0, 2.0]), eta=0.1, seed=seed)
    for name in ("one", "two"):
        plotted(tmp_path / "runs", output=tmp_path / name)
    files = sorted((tmp_path / "one").iterdir())
    assert [path.name for path in files] == ["return.png", "tables.md"]
    assert all(path.read_bytes() == (tmp_path / "two" / path.name).read_bytes() for path in files)


def test_tables_have_the_scores_of_the_last_100_episodes_beside_published_ones(tmp_path):
    """Scores 100 and 300 of BDPG, 400 of PPO, whose first episode does not count; on Swimmer 30 and 60."""
    for seed, score in ((1, 100.0), (2, 300.0)):
        episodes = [(10 * n, 7777.0 if n == 1 else score) for n in range(1, 102)]
        also = [
            ("return_model/explained_variance", value, 1000 * (n + 1)) for n, value in enumerate([9.0] * 4 + [0.5] * 4)
        ]
        also += [("return_model/coverage_80", seed / 10, 8000)] if seed == 1 else []
        write_run(tmp_path / "runs", episodes, seed=seed, also=also, steps=8000, eta=0.0)
        write_run(tmp_path / "runs", [(10, 0.4 * score)], env_id="Swimmer-v5", seed=seed, steps=8000, eta=0.0)
        write_run(tmp_path / "runs", [(10, 400.0)], script="ppo_mujoco.py", seed=seed, steps=8000)
        write_run(tmp_path / "runs", [(10, 60.0)], "ppo_mujoco.py", "Swimmer-v5", seed, steps=8000)
    beside, details, improvement = plotted(tmp_path / "runs", output=tmp_path)
    assert beside[0] == {
        "task": "Hopper-v5",
        "BDPG naive": "200 ± 141",
        "PPO": "400 ± 0",
        "CleanRL, v4, 1M": "2383 ± 272",
        "SB3 Zoo, v3, 1M, one run": "2410",
        "Tianshou, best within 1M": "2609",
    }
    rows = {(row["task"], row["method"]): row for row in details}
    hopper = rows["Hopper-v5", "BDPG naive"]
    assert (hopper["runs"], hopper["mean"], hopper["std"], hopper["single runs"]) == ("2", "200", "141", "100, 300")
    assert (hopper["95 % from"], hopper["to"], hopper["explained variance"]) == ("100", "300", "0.5")
    assert hopper["coverage of 80 %"] == "" == rows["Hopper-v5", "PPO"]["coverage of 80 %"]  # seed 2 has logged none
    # 200 / 400 and 80 / 60, and their mean
    assert rows["2 tasks (PPO: 1)", "BDPG naive"]["mean"] == f"{(0.5 + 4 / 3) / 2:.3g}"
    assert improvement == [dict(zip(improvement[0], ["BDPG naive > PPO", "2", "0.25", "0", "0.5"], strict=True))]


def test_a_single_run_has_no_interval(tmp_path):
    write_run(tmp_path / "runs", every_1000([2.0]), eta=0.1)
    write_run(tmp_path / "runs", every_1000([4.0]), script="ppo_qr_mujoco.py")
    _, details, improvement = plotted(tmp_path / "runs", output=tmp_path)
    for row in details:
        assert float(row["mean"]) > 0 and row["std"] == row["95 % from"] == row["to"] == ""
    assert [*improvement[0].values()] == ["BDPG > PPO+QR", "1", "0", "", ""]
    assert "nan" not in (tmp_path / "tables.md").read_text()


def test_runs_that_end_early_are_named_and_left_out(tmp_path, capsys):
    write_run(tmp_path / "runs", every_1000([1.0, 2.0, 3.0, 4.0]), eta=0.1)
    crashed = write_run(tmp_path / "runs", every_1000([10.0, 20.0]), eta=0.1, seed=2)
    _, (row,) = plotted(tmp_path / "runs", output=tmp_path)
    assert (row["mean"], row["runs"]) == ("2.5", "1")
    assert f"skipped {crashed}: it ends at step 2,000, others of Hopper-v5 at 4,000" in capsys.readouterr().err


def test_methods_are_named_by_what_differs(tmp_path):
    write_run(tmp_path, every_1000([1.0]), eta=0.0, u_bar=10.0)
    for cap in (10.0, 100.0):
        write_run(tmp_path, every_1000([1.0]), eta=0.1, u_bar=cap, save_every=int(cap))
    write_run(tmp_path, every_1000([1.0]), script="ppo_mujoco.py")
    write_run(tmp_path, every_1000([1.0]), script="ppo_wgan_mujoco.py")
    names = ["BDPG naive", "BDPG, u_bar 10.0", "BDPG, u_bar 100.0", "PPO+WGAN", "PPO"]
    assert plot.name_methods(plot.read_runs([tmp_path])) == names


def test_runs_of_scripts_with_other_arguments_are_told_apart(tmp_path):
    for seed, args in enumerate(({"energy_coef": 4.0}, {"energy_coef": 0.0}, {}), start=1):
        write_run(tmp_path, every_1000([1.0]), seed=seed, eta=0.1, **args)
    names = ["BDPG, energy_coef 0.0", "BDPG, energy_coef 4.0", "BDPG, energy_coef None"]
    assert plot.name_methods(plot.read_runs([tmp_path])) == names


def test_a_method_keeps_its_colour_where_tasks_lack_others(tmp_path, pictures):
    write_run(tmp_path, every_1000([1.0, 2.0]), script="ppo_wgan_mujoco.py")  # on Hopper, the first panel, it is alone
    for script, eta in (("bdpg_mujoco.py", 0.1), ("bdpg_mujoco.py", 0.0), ("ppo_wgan_mujoco.py", None)):
        write_run(tmp_path, every_1000([1.0, 2.0]), script, "Swimmer-v5", eta=eta)
    plotted(tmp_path, output=tmp_path)
    (legend,) = pictures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["BDPG", "BDPG naive", "PPO+WGAN"]
    colours = {
        (line.get_label(), line.get_color(), line.get_linestyle()) for axis in pictures[0].axes for line in axis.lines
    }
    assert len(colours) == 3


def test_methods_without_a_common_task_are_not_compared(tmp_path):
    write_run(tmp_path / "runs", every_1000([1.0]), env_id="Swimmer-v5", eta=0.1)
    write_run(tmp_path / "runs", every_1000([1.0]), script="ppo_qr_mujoco.py")
    assert len(plotted(tmp_path / "runs", output=tmp_path)) == 2


def test_broken_logs_are_named_and_skipped(tmp_path, capsys):
    episodes = every_1000([1.0, 2.0, 3.0])
    whole, cut, empty, *damaged = (write_run(tmp_path, episodes, seed=seed, eta=0.1, steps=2000) for seed in range(7))
    (events,) = cut.glob("events*")
    events.write_bytes(events.read_bytes()[:-5])
    next(empty.glob("events*")).write_bytes(b"")
    texts = '{"args": ', "[]", '{"script": "bdpg_atari.py", "args": {}}', '{"script": "bdpg_atari.py", "args": []}'
    for folder, text in zip(damaged, texts, strict=True):
        (folder / "run.json").write_text(text)
    (tmp_path / "text" / "deep").mkdir(parents=True)
    runs = plot.read_runs([tmp_path])
    assert {item.folder: item.record["score"] for item in runs} == {whole: 2.0, cut: 2.0}
    err = capsys.readouterr().err
    assert f"skipped the end of {events}" in err and all(f"skipped {folder}" in err for folder in damaged)
    assert f"skipped {empty}: no episode has ended yet" in err and str(whole) not in err


def test_a_resumed_log_replaces_what_came_after_the_checkpoint(tmp_path):
    folder = write_run(tmp_path, every_1000([1.0, 2.0, 3.0, 4.0]), eta=0.1)
    (first,) = folder.glob("events*")
    first.rename(folder / "events.out.tfevents.1000000000.host.1.0")
    with SummaryWriter(folder, purge_step=2001) as writer:
        writer.add_scalar("charts/episodic_return", 30.0, 3000)
    (item,) = plot.read_runs([tmp_path])
    assert item.table["return"].tolist() == [1, 2, 30] and item.record["score"] == 11


def test_of_two_equal_runs_the_longer_counts(tmp_path, capsys):
    short = write_run(tmp_path / "a", every_1000([1.0]), eta=0.1)
    long = write_run(tmp_path / "b", every_1000([1.0, 2.0]), eta=0.1)
    (item,) = plot.read_runs([tmp_path])
    assert item.folder == long and f"skipped {short}: the same run is in {long}" in capsys.readouterr().err
    common.keep_result(common.read_run(long), tmp_path / "c", "Hopper-v5/bdpg_seed1")
    (item,) = plot.read_runs([tmp_path])
    assert "the same run is in" in capsys.readouterr().err and item.end == 2000


def test_the_page_says_what_the_runs_were_made_with(tmp_path):
    for seed, seconds in ((1, 72.0), (3, 36.0)):
        folder = write_run(tmp_path / "runs", every_1000([1.0, 2.0]), seed=seed, eta=0.1)
        torch.save({"seconds": seconds}, folder / "checkpoint-000000002000.pt")
    plotted(tmp_path / "runs", output=tmp_path)
    last_line = (tmp_path / "tables.md").read_text().splitlines()[-1]
    made_with = "2 runs of 2,000 steps; seeds 1, 3; commits abcdef0; torch 2.13.0, mujoco 4.0.0; "
    assert last_line == made_with + "0.015 hours a run, 0.03 together."


@pytest.mark.parametrize("number, rows, columns", [(1, 1, 1), (4, 1, 4), (5, 2, 3), (6, 2, 3), (8, 2, 4), (9, 3, 3)])
def test_panels_fill_their_rows(number, rows, columns, tmp_path, pictures):
    for index in range(number):
        write_run(tmp_path / "runs", every_1000([1.0]), env_id=f"Task{index}-v0")
    plotted(tmp_path / "runs", output=tmp_path)
    grid = pictures[0].axes[0].get_gridspec()
    assert (len(pictures[0].axes), grid.nrows, grid.ncols) == (number, rows, columns)


@pytest.mark.parametrize(
    "options, words",
    [
        (["nowhere"], "no folder"),
        (["empty"], "no run with scores"),
        (["runs", "--curves", "retrun"], "no run has retrun; there are: return."),
        (["runs", "--output", "file/below"], "cannot be made"),
        ([], "give folders"),
    ],
)
def test_bad_input_of_the_plotter_is_refused(options, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    write_run(tmp_path / "runs", every_1000([1.0]))
    with pytest.raises(SystemExit, match="2"):
        plot.main(tyro.cli(plot.Args, args=options))
    assert words in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.png")) and not list(tmp_path.rglob("*.md"))

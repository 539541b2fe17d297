"""Experiment runner and plotter: every preset in miniature, runs that stop, fail and go on, statistics against brute force."""

import csv
import dataclasses
import fcntl
import importlib.util
import itertools
import json
import os
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
import tyro
from torch.utils.tensorboard import SummaryWriter

from benchmark import plot, run

ROOT = Path(__file__).parent.parent
TINY = [
    "num-envs=2",
    "num-steps=16",
    "minibatch-size=16",
    "update-epochs=1",
    "num-return-samples=1",
    "score-interval=1",
    "cuda=False",
]


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


def interrupt_when(monkeypatch, condition):
    """Ctrl-C for the runner, in its pause between two looks at its runs, once the condition holds."""

    def sleep(seconds):
        time.sleep(0.02)
        if condition():
            monkeypatch.setattr(run, "time", time)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run, "time", SimpleNamespace(time=time.time, sleep=sleep))


def plotted(folder, output, *options):
    plot.main(tyro.cli(plot.Args, args=[str(folder), "--output", str(output), *options]))


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# --- presets in miniature: run, interrupt, resume, plot ---

BREAKOUT = ("BreakoutNoFrameskip-v4", ["num-envs=1", "num-steps=128", "minibatch-size=128"], 16)
MINIATURES = {  # task, settings, iterations of a run (some 2,000 steps), and the number of methods
    "mujoco-figure": ("InvertedDoublePendulum-v5", [], 64, 2),
    "atari-figure": (*BREAKOUT, 4),
    "ablation": (*BREAKOUT, 2),
}
METHODS = {
    "mujoco-figure": {"BDPG naive", "PPO+WGAN"},
    "atari-figure": {"BDPG", "BDPG naive", "PPO+WGAN", "PPO+QR"},
}


@pytest.mark.parametrize("preset", MINIATURES)
def test_preset_runs_stops_goes_on_and_plots(preset, tmp_path, forked, monkeypatch, capsys):
    env_id, settings, iterations, num_methods = MINIATURES[preset]
    settings = settings + ["bootstrap-length=1,128", "u-bar=inf", "eta=0.1"] * (preset == "ablation")
    runs, options = tmp_path / "runs", f"--preset {preset} --envs {env_id} --seeds 1 2 --workers 1"
    interrupt_when(monkeypatch, lambda: any("step " in path.read_text() for path in runs.rglob("log.txt")))
    assert start(runs, f"{options} --total-timesteps 100000000", settings) == 130  # so long that it cannot end before Ctrl-C
    assert "to go on: python" in capsys.readouterr().out
    (checkpoint,) = runs.rglob("checkpoint-*.pt")  # the only one that had begun, and it was saved
    saved = int(checkpoint.stem.split("-")[1])

    sizes = {name: int(value) for name, value in (item.split("=") for item in TINY + settings) if name in ("num-envs", "num-steps")}
    total = saved + iterations * sizes["num-envs"] * sizes["num-steps"]
    assert start(runs, f"{options} --total-timesteps {total}", settings) == 0
    out = capsys.readouterr().out
    assert "1 to resume" in out and "2 new" in out
    number = 2 * num_methods
    assert f"{number} of {number} runs are finished" in out
    # One folder per run, also where it was resumed, and every run with the arguments that make its method.
    records = [json.loads(path.read_text()) for path in runs.rglob("run.json")]
    assert len(records) == number == len(list(runs.rglob("log.txt")))
    assert all(record["args"]["total_timesteps"] == total and record["args"]["env_id"] == env_id for record in records)
    assert len(list(checkpoint.parent.glob("events.out.tfevents.*"))) == 2

    assert start(runs, f"{options} --total-timesteps {total}", settings) == 0
    assert f"0 of {number} runs to do" in capsys.readouterr().out

    if preset == "ablation":
        plotted(runs, tmp_path / "figure", "--maps-at", "0", "100")
        rows = read_csv(tmp_path / "figure_ablation.csv")
        assert {(row["from step"], row["k"], row["ū"], row["runs"]) for row in rows} == {
            (step, k, "inf", "2") for step in ("0", "100") for k in ("1", "128")
        }
    else:
        plotted(runs, tmp_path / "figure")
        rows = read_csv(tmp_path / "figure_averaged_score.csv")
        assert {(row["method"], row["runs"]) for row in rows} == {(method, "2") for method in METHODS[preset]}
        assert all(np.isfinite(float(row["mean"])) and float(row["step"]) <= total for row in rows)
        aggregate = {row["task"] for row in read_csv(tmp_path / "figure_scores.csv")}
        assert aggregate == {env_id.replace("NoFrameskip-v4", "")} | ({"all games (human = 1)"} if "atari" in preset else set())
    pictures = [path.stem for path in tmp_path.glob("figure*.csv")]
    assert pictures and all((tmp_path / f"{stem}.{ending}").exists() for stem in pictures for ending in ("png", "svg"))
    assert (tmp_path / "figure_table.md").read_text().startswith("| task |")


def test_ctrl_c_in_a_terminal_reaches_the_script_once(tmp_path):
    """As the terminal does it: SIGINT for the whole process group. A second SIGINT would stop the script before it saves."""
    options = "--scripts bdpg_mujoco.py --envs Pendulum-v1 --seeds 1 --workers 1 --total-timesteps 300000"
    command = [sys.executable, str(ROOT / "benchmark" / "run.py"), *options.split(), "--run-dir", str(tmp_path), "--set", *TINY]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    while not any("step " in path.read_text() for path in tmp_path.rglob("log.txt")):
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130 and "stopped: bdpg_mujoco Pendulum-v1 seed 1" in out and "to go on: python" in out
    assert len(list(tmp_path.rglob("checkpoint-*.pt"))) == 1


# --- plans ---


ATARI_GAMES = ["Freeway", "Hero", "Seaquest", "Venture", "Breakout", "Qbert", "Asterix", "BeamRider"]
MUJOCO_TASKS = ["Hopper", "HalfCheetah", "Walker2d", "InvertedDoublePendulum", "Swimmer", "Ant"]
GRID = itertools.product([1, 8, 32, 128, 256], [1.0, 10.0, 100.0, np.inf], [0.01, 0.1, 1.0])


@pytest.mark.parametrize(
    "preset, methods, envs, seeds, steps",
    [
        (
            "atari-figure",
            [("bdpg_atari", {"eta": 0.1}), ("bdpg_atari", {"eta": 0.0}), ("ppo_wgan_atari", {}), ("ppo_qr_atari", {})],
            [f"{game}NoFrameskip-v4" for game in ATARI_GAMES],
            5,
            10_000_000,
        ),
        (
            "mujoco-figure",
            [("bdpg_mujoco", {"eta": 0.0}), ("ppo_wgan_mujoco", {})],
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
    few, more = (
        {
            item.folder
            for item in run.plan(run.Args(preset="ablation", set=("u-bar=10", "bootstrap-length=1", etas), run_dir=tmp_path))
        }
        for etas in ("eta=0.1", "eta=0.1,1")
    )
    assert len(few) == 2 and len(more) == 4 and few < more


def test_runs_go_seed_by_seed_so_that_what_is_stopped_early_can_be_compared(tmp_path):
    args = run.Args(preset="mujoco-figure", envs=("Swimmer-v5", "Hopper-v5"), seeds=(2, 1), run_dir=tmp_path)
    order = [(item.seed, item.env_id, item.method) for item in run.plan(args)]
    assert order == list(itertools.product((2, 1), ("Swimmer-v5", "Hopper-v5"), ("bdpg-naive", "ppo-wgan")))


def test_all_combinations_are_run_with_their_arguments(mujoco, tmp_path):
    settings = ("eta=0,0.1", "u_bar=10,inf", "anneal-lr=false")
    args = run.Args(scripts=("bdpg_mujoco.py",), envs=("Pendulum-v1",), seeds=(7,), set=settings, run_dir=tmp_path)
    runs = run.plan(args)
    assert [item.method for item in runs] == [f"bdpg_mujoco_eta={eta}_u-bar={cap}" for eta in ("0", "0.1") for cap in ("10", "inf")]
    for item, (eta, cap) in zip(runs, itertools.product((0, 0.1), (10, np.inf)), strict=True):
        parsed = tyro.cli(mujoco.Args, args=item.command()[2:])
        assert (parsed.eta, parsed.u_bar, parsed.anneal_lr, parsed.seed, parsed.env_id) == (eta, cap, False, 7, "Pendulum-v1")
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
        ("--scripts bdpg_mujoco.py --envs Hoper-v5", "did you mean Hopper-v5?"),
        ("--preset atari-figure --envs BreakotNoFrameskip-v4", "did you mean BreakoutNoFrameskip-v4?"),
        ("--preset atari-figure --envs Hopper-v5", "not an Atari game"),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --set etaa=1", "did you mean eta?"),
        ("--preset mujoco-figure --set u-bar=10", "no argument of ppo_wgan_mujoco.py 'u-bar'"),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --set eta=much", "does not take eta=much"),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --set eta=0.1,-1", "--eta must be"),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --set eta", "NAME=VALUE"),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --set eta=0 eta=1", "eta=VALUE,VALUE"),
        ("--scripts ppo_wgan_mujoco.py --envs Hopper-v5 --set zzz=1", "there are: env-id, "),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --set seed=1", "--seeds"),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --seeds -1", "--seed must lie"),
        ("--scripts bdpg_mujoco.py --envs Hopper-v5 --total-timesteps 0", "--total-timesteps 0 is less"),
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
    assert code == 1 and "1 of 2 runs are finished" in out and "seed 1: " in err and "seed-1" in err and "Traceback" not in err


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
    options = "--scripts bdpg_mujoco.py --envs InvertedDoublePendulum-v5 --seeds 1 --total-timesteps 96 --executor slurm --cpus 1"
    assert start(tmp_path, options, ["learning-rate=1e30,3e-4"]) == 1
    out, err = capsys.readouterr()
    assert "1 of 2 runs are finished" in out and "is not finite" in err
    assert len(list(tmp_path.glob("*3e-4/*/*/*/checkpoint-000000000096.pt"))) == 1


@needs_submitit
def test_a_job_whose_time_is_up_saves_and_hands_in_the_rest(tmp_path, forked, monkeypatch):
    args = run.Args(scripts=("bdpg_mujoco.py",), envs=("ShortPendulum-v0",), seeds=(1,), set=tuple(TINY), run_dir=tmp_path)
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


# --- the plotter ---


def write_run(folder, scores, script="bdpg_atari.py", env_id="BreakoutNoFrameskip-v4", seed=1, interval=1, also=(), **args):
    """A folder as the scripts leave it, with an averaged score every 1,000 steps, and also such (tag, value, step)."""
    folder = folder / f"{env_id}__{script}__{seed}__{'-'.join(map(str, args.values()))}"
    folder.mkdir(parents=True)
    sizes = {"score_interval": interval, "num_envs": 10, "num_steps": 100, "bootstrap_length": None}
    record = {"script": script, "args": sizes | {"env_id": env_id, "seed": seed, "run_dir": str(folder)} | args}
    (folder / "run.json").write_text(json.dumps(record))
    with SummaryWriter(folder, purge_step=1) as writer:
        for index, score in enumerate(scores):
            writer.add_scalar("charts/averaged_score", score, 1000 * (index + 1))
        for scalar in also:
            writer.add_scalar(*scalar)
    return folder


def brute_force_iqm(scores):
    scores = sorted(scores)
    quarter = int(len(scores) * 0.25)
    middle = scores[quarter:-quarter] if quarter else scores
    return sum(middle) / len(middle)


def assert_interval(low, high, outcomes):
    """The ends are 2.5 % and 97.5 % quantiles of the outcomes, all equally likely, as far as random draws can tell."""
    outcomes, error = np.array(outcomes), 5 * (0.025 * 0.975 / plot.NUM_RESAMPLES) ** 0.5
    assert (outcomes < low - 1e-9).mean() < 0.025 + error and (outcomes <= low + 1e-9).mean() > 0.025 - error
    assert (outcomes > high + 1e-9).mean() < 0.025 + error and (outcomes >= high - 1e-9).mean() > 0.025 - error


def all_resamples(scores):
    return list(itertools.product(scores, repeat=len(scores)))


@pytest.mark.parametrize("n", range(1, 14))
def test_iqm_is_the_mean_of_the_middle(n):
    scores = np.random.default_rng(n).normal(size=(3, n)) ** 3
    for found, row in zip(plot.iqm(scores), scores, strict=True):
        assert found == pytest.approx(brute_force_iqm(row))


def test_iqm_interval_is_that_of_all_resamples():
    tasks = [np.array([0.1, 0.4, 2.0, 2.2]), np.array([5.0, 9.0, 7.5])]
    outcomes = [brute_force_iqm(a + b) for a in all_resamples(tasks[0]) for b in all_resamples(tasks[1])]
    point, low, high = plot.iqm_interval(tasks)
    assert point == pytest.approx(brute_force_iqm([*tasks[0], *tasks[1]]))
    assert_interval(low, high, outcomes)


def test_improvement_is_the_share_of_pairs_won():
    pairs = [(np.array([1.0, 2.0, 3.0]), np.array([2.0, 0.0])), (np.array([4.0, 0.5]), np.array([1.0, 3.0, 5.0]))]

    def wins(xs, ys):
        return sum(1.0 if x > y else 0.5 if x == y else 0.0 for x in xs for y in ys) / (len(xs) * len(ys))

    point, low, high = plot.improvement_interval(pairs)
    assert point == pytest.approx((wins(*pairs[0]) + wins(*pairs[1])) / 2)
    each = [[wins(x, y) for x in all_resamples(xs) for y in all_resamples(ys)] for xs, ys in pairs]
    assert_interval(low, high, [(a + b) / 2 for a in each[0] for b in each[1]])


def test_curves_are_mean_and_standard_deviation_over_runs(tmp_path):
    scores = {1: [1.0, 3.0, 8.0], 2: [3.0, 3.0, 1.0], 3: [5.0, 9.0, 3.0]}
    for seed, values in scores.items():
        write_run(tmp_path, values, seed=seed, eta=0.1)
    write_run(tmp_path, [7.0, 7.0, 7.0, 100.0], script="ppo_qr_atari.py")
    plotted(tmp_path, tmp_path / "figure")
    rows = read_csv(tmp_path / "figure_averaged_score.csv")
    assert {(row["method"], row["runs"]) for row in rows} == {("BDPG", "3"), ("PPO+QR", "1")}
    bdpg = [row for row in rows if row["method"] == "BDPG"]
    for row, values in ((bdpg[0], [1, 3, 5]), (bdpg[-1], [8, 1, 3])):
        assert float(row["mean"]) == pytest.approx(np.mean(values))
        assert float(row["std"]) == pytest.approx(np.sqrt(sum((v - np.mean(values)) ** 2 for v in values) / 2))
    # All are compared at the step that all have reached, which is not that of the longest.
    assert {float(row["step"]) for row in (bdpg[-1], rows[-1])} == {3000.0} and float(rows[-1]["mean"]) == 7


def test_all_curves_are_averaged_over_the_papers_interval(tmp_path):
    """Of three batches; the run ends in the middle of the third interval, which does not count."""
    values = [1.0, 2.0, 6.0, 5.0, 7.0, 0.0, 9.0]
    also = [("losses/policy", value, 1000 * (index + 1)) for index, value in enumerate(values)]
    also += [("charts/episodic_return", 4.0, 1500), ("charts/episodic_return", 8.0, 2900), ("charts/episodic_return", 3.0, 5900)]
    write_run(tmp_path, [3.0, 6.0], interval=3, also=also, eta=0.1)
    (run,) = plot.read_runs([tmp_path])
    for tag, steps, means in (
        ("losses/policy", [3000, 6000], [3, 4]),
        ("charts/episodic_return", [2900, 5900], [6, 3]),
        ("charts/averaged_score", [2000], [4.5]),  # what is there twice in an interval is averaged
    ):
        assert [column.tolist() for column in plot.averaged(run, tag)] == [steps, means]
    run.end = 2500  # of a run that has not completed an interval, all counts
    run.curves["losses/policy"] = np.array([[1000.0, 2000.0], [2.0, 4.0]])
    assert [column.tolist() for column in plot.averaged(run, "losses/policy")] == [[2000], [3]]


@pytest.mark.parametrize("number", [1, 2, 4, 7])
def test_legend_is_as_wide_as_the_picture_at_most(number, tmp_path, monkeypatch):
    for cap in range(number):
        write_run(tmp_path, [1.0, 2.0], eta=0.1, u_bar=10.0**cap)
    pictures = []
    monkeypatch.setattr(plot, "save", lambda figure, *rest: pictures.append(figure))
    plotted(tmp_path, tmp_path / "figure")
    figure = pictures[0]
    figure.draw_without_rendering()
    (legend,), box = figure.legends, figure.legends[0].get_window_extent()
    assert len(legend.get_texts()) == number and 0 <= box.x0 and box.x1 <= figure.bbox.x1 and 0 <= box.y0
    assert box.y1 <= figure.axes[0].get_tightbbox().y0 and len(figure.axes[0].lines) == number


def test_too_many_methods_for_a_picture_are_refused(tmp_path, capsys):
    for cap in range(plot.MOST_METHODS + 1):
        write_run(tmp_path, [1.0, 2.0], eta=0.1, u_bar=10.0**cap)
    with pytest.raises(SystemExit, match="2"):
        plotted(tmp_path, tmp_path / "figure")
    assert "13 methods are more than a picture can show" in capsys.readouterr().err
    plotted(tmp_path, tmp_path / "figure", "--maps-at", "0")
    with pytest.raises(SystemExit, match="2"):
        plotted(tmp_path, tmp_path / "figure", "--maps-at", "0", "2000")
    assert "has a score from step 2,000 on" in capsys.readouterr().err


def test_scores_say_up_to_which_step_they_count(tmp_path):
    write_run(tmp_path, [1.0, 2.0, 3.0, 4.0], eta=0.1)
    write_run(tmp_path, [1.0, 2.0], eta=0.1, seed=2)  # a run that crashed
    plotted(tmp_path, tmp_path / "figure")
    (row,) = [row for row in read_csv(tmp_path / "figure_scores.csv") if row["task"] == "Breakout"]
    assert (row["up to step"], row["mean"], row["runs"]) == ("2000", "2.0", "2")


def test_no_interval_where_a_task_has_a_single_run():
    two, one = np.array([1.0, 2.0]), np.array([3.0])
    assert np.isnan(plot.iqm_interval([two, one])[1:]).all() and np.isnan(plot.improvement_interval([(two, one)])[1:]).all()
    assert np.isfinite(plot.iqm_interval([two, two])).all() and np.isfinite(plot.improvement_interval([(two, two)])).all()


def test_the_same_runs_give_the_same_files(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / "runs", [1.0, 2.0], eta=0.1, seed=seed)
    for name in ("one", "two"):
        plotted(tmp_path / "runs", tmp_path / name / "figure")
    files = sorted((tmp_path / "one").iterdir())
    assert {path.suffix for path in files} == {".png", ".svg", ".csv", ".md"}
    assert all(path.read_bytes() == (tmp_path / "two" / path.name).read_bytes() for path in files)


def test_final_scores_are_normalised_by_human_and_random_play(tmp_path):
    for seed, score in enumerate((30.5, 59.3)):  # a human's score, and twice as far from a random player's
        write_run(tmp_path, [0.0] * 8 + [score - 1, score + 1], seed=seed, eta=0.0)
        write_run(tmp_path, [0.0] * 8 + [13455.0] * 2, env_id="QbertNoFrameskip-v4", seed=seed, eta=0.0)
    plotted(tmp_path, tmp_path / "figure", "--final", "0.2")
    scores = {row["task"]: row for row in read_csv(tmp_path / "figure_scores.csv")}
    assert float(scores["Breakout"]["mean"]) == pytest.approx((30.5 + 59.3) / 2)
    assert float(scores["all games (human = 1)"]["IQM"]) == pytest.approx(1)  # the middle two of 1, 2, 1, 1
    assert float(scores["all games (human = 1)"]["mean"]) == pytest.approx(1.25)
    assert scores["Qbert"]["method"] == "BDPG naive" and scores["Qbert"]["runs"] == "2"


def test_map_takes_the_best_eta_and_the_interval_after_the_step(tmp_path):
    interval = 2  # of 1,000 steps each
    write_run(tmp_path, [9.0, 9.0, 9.0, 0.0, 1.0, 1.0], interval=interval, bootstrap_length=1, u_bar=10.0, eta=0.1)
    write_run(tmp_path, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], interval=interval, bootstrap_length=1, u_bar=10.0, eta=1.0)
    write_run(tmp_path, [7.0, 7.0, 7.0], interval=interval, bootstrap_length=8, u_bar=float("inf"), eta=0.1)
    plotted(tmp_path, tmp_path / "figure", "--maps-at", "1000", "3500")
    rows = {(row["k"], row["from step"]): row for row in read_csv(tmp_path / "figure_ablation.csv")}
    assert rows["1", "1000"]["best η"] == rows["1", "3500"]["best η"] == "1.0"  # better in the long run, if not at first
    # Scores at 3,000 and 6,000 are the first of intervals that start at 1,000 and 3,500 or later.
    assert [float(rows["1", step]["averaged score"]) for step in ("1000", "3500")] == [3.0, 6.0]
    assert float(rows["8", "1000"]["averaged score"]) == 7 and rows["8", "3500"]["averaged score"] == ""


def test_methods_are_named_by_what_differs(tmp_path):
    write_run(tmp_path, [1.0], eta=0.0, u_bar=10.0)
    for cap in (10.0, 100.0):
        write_run(tmp_path, [1.0], eta=0.1, u_bar=cap, save_every=int(cap))
    write_run(tmp_path, [1.0], script="ppo_wgan_atari.py")
    assert plot.name_methods(plot.read_runs([tmp_path])) == ["BDPG naive", "BDPG, u_bar 10.0", "BDPG, u_bar 100.0", "PPO+WGAN"]


def test_runs_of_scripts_with_other_arguments_are_told_apart(tmp_path):
    for seed, args in enumerate(({"law_coef": 4.0}, {"law_coef": 0.0}, {}), start=1):
        write_run(tmp_path, [1.0], seed=seed, eta=0.1, **args)
    assert plot.name_methods(plot.read_runs([tmp_path])) == ["BDPG, law_coef 0.0", "BDPG, law_coef 4.0", "BDPG, law_coef None"]


def test_a_single_run_has_no_interval(tmp_path):
    write_run(tmp_path, [1.0, 2.0], eta=0.1)
    write_run(tmp_path, [3.0, 4.0], script="ppo_qr_atari.py")
    plotted(tmp_path, tmp_path / "figure.v1")
    for row in read_csv(tmp_path / "figure.v1_scores.csv"):
        assert float(row["mean"]) == float(row["IQM"]) > 0 and row["std"] == row["95 % from"] == row["to"] == ""
    assert "| PPO+QR > BDPG" not in (text := (tmp_path / "figure.v1_table.md").read_text())
    assert "| BDPG > PPO+QR | 1 | 0 |  |  |" in text and "nan" not in text


def test_a_method_keeps_its_colour_and_place_where_tasks_lack_others(tmp_path, monkeypatch):
    write_run(tmp_path, [1.0, 2.0], script="ppo_wgan_atari.py")  # on Breakout, the first panel, it is alone
    for eta in (0.1, 0.0):
        write_run(tmp_path, [1.0, 2.0], env_id="FreewayNoFrameskip-v4", eta=eta)
    pictures = []
    monkeypatch.setattr(plot, "save", lambda figure, *rest: pictures.append(figure))
    plotted(tmp_path, tmp_path / "figure")
    curves, scores = pictures[:2]
    (legend,) = curves.legends
    methods = [text.get_text() for text in legend.get_texts()]
    assert methods == ["BDPG", "BDPG naive", "PPO+WGAN"] == [label.get_text() for label in scores.axes[0].get_yticklabels()]
    of_curves = {line.get_label(): line.get_color() for axis in curves.axes for line in axis.lines}
    points = [line for axis in scores.axes for line in axis.lines if line.get_marker() == "o"]
    assert len(points) == 3 and of_curves == {methods[int(point.get_ydata()[0])]: point.get_color() for point in points}


def test_methods_without_a_common_task_are_not_compared(tmp_path):
    write_run(tmp_path, [1.0], env_id="FreewayNoFrameskip-v4", eta=0.1)
    write_run(tmp_path, [1.0], script="ppo_qr_atari.py")
    plotted(tmp_path, tmp_path / "figure")
    assert not (tmp_path / "figure_improvement.png").exists()


def test_broken_logs_are_named_and_skipped(tmp_path, capsys):
    whole, cut, empty, *damaged = (write_run(tmp_path, [1.0, 2.0, 3.0], seed=seed, eta=0.1) for seed in range(7))
    (events,) = cut.glob("events*")
    events.write_bytes(events.read_bytes()[:-5])
    next(empty.glob("events*")).write_bytes(b"")
    texts = '{"args": ', "[]", '{"script": "bdpg_atari.py", "args": {}}', '{"script": "bdpg_atari.py", "args": []}'
    for folder, text in zip(damaged, texts, strict=True):
        (folder / "run.json").write_text(text)
    (tmp_path / "text" / "deep").mkdir(parents=True)
    runs = plot.read_runs([tmp_path])
    assert {item.folder: item.curves[plot.SCORE].tolist() for item in runs} == {
        whole: [[1000, 2000, 3000], [1, 2, 3]],
        cut: [[1000, 2000], [1, 2]],
    }
    err = capsys.readouterr().err
    assert f"skipped the end of {events}" in err and all(f"skipped {folder}" in err for folder in damaged)
    assert f"skipped all of {empty}" in err and f"skipped {empty}" in err and str(whole) not in err


def test_a_resumed_log_replaces_what_came_after_the_checkpoint(tmp_path):
    folder = write_run(tmp_path, [1.0, 2.0, 3.0, 4.0], eta=0.1)
    (first,) = folder.glob("events*")
    first.rename(folder / "events.out.tfevents.1000000000.host.1.0")
    with SummaryWriter(folder, purge_step=2001) as writer:
        writer.add_scalar("charts/averaged_score", 30.0, 3000)
    (item,) = plot.read_runs([tmp_path])
    assert item.curves[plot.SCORE].tolist() == [[1000, 2000, 3000], [1, 2, 30]]


def test_of_two_equal_runs_the_longer_counts(tmp_path, capsys):
    short, long = write_run(tmp_path / "a", [1.0], eta=0.1), write_run(tmp_path / "b", [1.0, 2.0], eta=0.1)
    (item,) = plot.read_runs([tmp_path])
    assert item.folder == long and f"skipped {short}" in capsys.readouterr().err
    copy = write_run(tmp_path / "c", [1.0, 2.0], eta=0.1)
    (item,) = plot.read_runs([tmp_path])
    assert item.folder == long and f"skipped {copy}: the same run is in {long}" in capsys.readouterr().err


def test_kept_runs_are_small_and_give_the_same_pictures(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        after = [("losses/policy", 0.5, 3700)]  # a run may go on after its last averaged score
        write_run(tmp_path / "runs", [1.25, seed + 0.5, 8.0], seed=seed, also=after, eta=0.1)
    plotted(tmp_path / "runs", tmp_path / "first", "--keep", str(tmp_path / "kept"))
    plotted(tmp_path / "kept", tmp_path / "second")
    for name in ("averaged_score.csv", "scores.csv", "table.md"):
        assert (tmp_path / f"first_{name}").read_text() == (tmp_path / f"second_{name}").read_text()
    files = sorted(path for path in (tmp_path / "kept").rglob("*") if path.is_file())
    assert [path.name for path in files] == ["curves.csv", "run.json"] * 2
    assert json.loads(files[1].read_text())["args"]["run_dir"] == f"runs/{files[1].parent.name}"  # from here, not from the root
    assert files[0].read_text().splitlines()[1:] == [
        "charts/averaged_score,1000,1.25",
        "charts/averaged_score,2000,1.5",
        "charts/averaged_score,3000,8",
        "end,3700,0",
    ]
    plotted(tmp_path / "runs", tmp_path / "again", "--tags", "losses/policy", "--keep", str(tmp_path / "kept"))
    more = files[0].read_text().splitlines()
    plotted(tmp_path / "runs", tmp_path / "again", "--keep", str(tmp_path / "kept"))  # takes no curve away
    assert sorted(files[0].read_text().splitlines()) == sorted(more) and "losses/policy,3700,0.5" in more
    with pytest.raises(SystemExit):
        plotted(tmp_path / "kept", tmp_path / "again", "--keep", str(tmp_path / "kept"))
    assert "holds these runs already" in capsys.readouterr().err and files[0].read_text().count("\n") == len(more)
    files[0].write_text("".join(files[0].read_text().splitlines(keepends=True)[:3]) + "broken")
    assert len(plot.read_curves(files[0].parent)["charts/averaged_score"][0]) == 2
    assert f"skipped the end of {files[0]}" in capsys.readouterr().err
    other = write_run(tmp_path / "other", [1.0], eta=0.5)
    other.rename(tmp_path / "other" / files[0].parent.name)
    with pytest.raises(SystemExit):
        plotted(tmp_path / "other", tmp_path / "again", "--keep", str(tmp_path / "kept"))
    assert "is of another run than" in capsys.readouterr().err and json.loads(files[1].read_text())["args"]["eta"] == 0.1
    with pytest.raises(SystemExit):
        plotted(tmp_path / "runs", tmp_path / "third", "--tags", "losses/polcy")
    assert "no run has logged losses/polcy; did you mean losses/policy?" in capsys.readouterr().err


def test_the_table_says_what_the_runs_were_made_with(tmp_path):
    for seed, speed in ((1, 50.0), (3, 100.0)):
        folder = write_run(tmp_path / "runs", [1.0, 2.0], seed=seed, also=[("charts/steps_per_second", speed, 3600)], eta=0.1)
        record = json.loads((folder / "run.json").read_text())
        record |= {"git": "abcdef0123", "versions": {"python": "3.11.7", "torch": "2.13.0"}}
        (folder / "run.json").write_text(json.dumps(record))
    plotted(tmp_path / "runs", tmp_path / "figure", "--keep", str(tmp_path / "kept"))
    last_line = (tmp_path / "figure_table.md").read_text().splitlines()[-1]
    # 3,600 steps at 50 and at 100 a second are 0.02 and 0.01 hours.
    assert last_line == "2 runs, seeds 1, 3; commits abcdef0; python 3.11.7, torch 2.13.0; 0.015 hours a run, mean of 2."
    plotted(tmp_path / "kept", tmp_path / "again")
    assert (tmp_path / "again_table.md").read_text().endswith(f"\n{last_line}\n")


def test_the_table_has_every_run_by_itself(tmp_path):
    """The last tenth of 20 batches is two; the run of seed 2 has logged no coverage."""
    steps = range(1000, 21_000, 1000)
    explained = [("return_model/explained_variance", step / 100_000, step) for step in steps]
    covered = [("return_model/coverage_80", 0.7 + step // 1000 % 2 / 10, step) for step in steps]
    for seed, also in ((2, explained), (1, explained + covered)):
        write_run(tmp_path / "runs", 18 * [1.0] + [3.0, 5.0], seed=seed, also=also, eta=0.1)
    plotted(tmp_path / "runs", tmp_path / "figure", "--keep", str(tmp_path / "kept"))
    text = (tmp_path / "figure_table.md").read_text()
    assert "| task | method | seed | score | explained variance | coverage of 80 % |" in text
    assert "| Breakout | BDPG | 1 | 4 | 0.195 | 0.75 |\n| Breakout | BDPG | 2 | 4 | 0.195 |  |\n" in text
    plotted(tmp_path / "kept", tmp_path / "again")
    assert (tmp_path / "again_table.md").read_text() == text


@pytest.mark.parametrize("number, rows, columns", [(1, 1, 1), (4, 1, 4), (5, 2, 3), (6, 2, 3), (8, 2, 4), (9, 3, 3)])
def test_panels_fill_their_rows(number, rows, columns):
    figure, axes = plot.panels(number, columns=4)
    grid = axes[0].get_gridspec()
    assert (len(figure.axes), grid.nrows, grid.ncols) == (number, rows, columns)
    plot.plt.close(figure)


@pytest.mark.parametrize(
    "options, words",
    [
        (["nowhere"], "no folder"),
        (["."], "no run with scores"),
        ([".", "--final", "0"], "--final"),
        ([".", "--output", "."], "such as figure."),
        ([], "give the folder"),
    ],
)
def test_bad_input_of_the_plotter_is_refused(options, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        plot.main(tyro.cli(plot.Args, args=options))
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())

"""What a user gets wrong ends in one sentence on stderr and exit code 2, the same in every script; what was logged is
kept."""

import importlib
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ATARI, MUJOCO, SCRIPTS, read_scalars, short_args, spy
from gymnasium.spaces import Box, Dict

REPO = Path(__file__).parent.parent


def sentence_of(call, capsys):
    """The one sentence with which the call is refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        call()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    return line


def error_of(script, args, capsys):
    """The one sentence with which train() refuses these arguments."""
    return sentence_of(lambda: script.train(args), capsys)


def error_of_command(script, options, capsys, monkeypatch):
    """The one sentence with which `python SCRIPT OPTIONS` ends."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, options)])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return sentence_of(script.main, capsys)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def common_error(names, args_of, capsys):
    """The one sentence with which all these scripts refuse args_of(script); only names of scripts and runs differ."""
    sentences = {}
    for name in names:
        script = importlib.import_module(name)
        sentences[name] = re.sub(rf"[\w-]+__{name}__[\w-]+", "RUN", error_of(script, args_of(script), capsys))
    assert len(set(sentences.values())) == 1, sentences
    return sentences[name]


@pytest.mark.parametrize(
    "overrides, words",
    [
        (dict(num_envs=0), ["--num-envs", "0"]),
        (dict(num_steps=0), ["--num-steps", "0"]),
        (dict(bootstrap_length=0), ["--bootstrap-length", "0"]),
        (dict(bootstrap_length=-3), ["--bootstrap-length", "-3"]),
        (dict(minibatch_size=0), ["--minibatch-size", "0"]),
        (dict(minibatch_size=1), ["--minibatch-size", "1"]),  # advantages of one sample cannot be standardised
        (dict(minibatch_size=12), ["--minibatch-size", "12", "32"]),
        (dict(bootstrap_length=20, minibatch_size=32), ["--minibatch-size", "32", "40"]),  # a rollout has 20 steps
        (dict(total_timesteps=31), ["--total-timesteps", "31", "32"]),
        (dict(total_timesteps=32, bootstrap_length=24), ["--total-timesteps", "48"]),
        (dict(total_timesteps=10**400), ["--total-timesteps", "100000"]),
        (dict(update_epochs=0), ["--update-epochs", "0"]),
        (dict(save_every=0), ["--save-every", "0"]),
        (dict(gamma=1.01), ["--gamma", "1.01"]),
        (dict(gae_lambda=-0.1), ["--gae-lambda", "-0.1"]),
        (dict(gae_lambda=1.5), ["--gae-lambda", "1.5"]),
        (dict(num_return_samples=0), ["--num-return-samples", "0"]),
        (dict(seed=-1), ["--seed", "-1"]),
        (dict(seed=2**40), ["--seed", str(2**40)]),  # more than the emulator takes
        (dict(log_std_init=11.0), ["--log-std-init", "11.0"]),
        (dict(latent_dim=0), ["--latent-dim", "0"]),
        (dict(num_quantiles=0), ["--num-quantiles", "0"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_arguments_out_of_range(tmp_path, capsys, overrides, words):
    """In every script that has the argument."""
    names = [name for name in SCRIPTS if overrides.keys() <= vars(importlib.import_module(name).Args()).keys()]
    args_of = lambda script: short_args(script, tmp_path, **(dict(total_timesteps=96) | overrides))  # noqa: E731
    message = common_error(names, args_of, capsys)
    assert all(word in message for word in words) and len(message) < 200, message
    assert not list(tmp_path.iterdir())  # nothing was started


def test_every_number_is_checked(script, tmp_path, capsys):
    """Whatever a fork adds: floats are finite and, but for logarithms, not negative; counts are not 0."""
    good = short_args(script, tmp_path)
    script.check_args(good)
    checked = 0
    for name, default in vars(script.Args()).items():
        bad = []
        if type(default) is float:
            bad = [math.nan, -math.inf] + [math.inf] * (name != "u_bar") + [-0.1] * (name != "log_std_init")
        elif type(default) is int:
            bad = [-1] + [0] * (name != "seed")
        for value in bad:
            args = script.Args(**vars(good) | {name: value})
            message = sentence_of(lambda args=args: script.check_args(args), capsys)
            assert message.startswith(f"error: --{name.replace('_', '-')} ") and str(value) in message
            checked += 1
    assert checked > 35


def test_bf16_is_refused_where_it_would_be_emulated(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
    assert "AVX512-BF16" in common_error(ATARI, lambda script: short_args(script, tmp_path, bf16=True), capsys)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    importlib.import_module(ATARI[0]).check_args(importlib.import_module(ATARI[0]).Args(cuda=False, bf16=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there(tmp_path, capsys):
    assert "--no-cuda" in common_error(SCRIPTS, lambda script: short_args(script, tmp_path, cuda=True), capsys)


@pytest.mark.parametrize(
    "name, option",
    [("bdpg_mujoco", "latent-dim"), ("ppo_qr_mujoco", "num-quantiles"), ("bdpg_mujoco", "num-return-samples")],
)
def test_sizes_beyond_any_memory(tmp_path, capsys, monkeypatch, name, option):
    """More than a processor can address, so that the system refuses at once."""
    options = "--env-id Pendulum-v1 --num-envs 2 --num-steps 16 --minibatch-size 16 --no-cuda --no-envpool".split()
    options += ["--run-dir", tmp_path, f"--{option}", 2**40]
    message = error_of_command(importlib.import_module(name), options, capsys, monkeypatch)
    assert "memory" in message and not list(tmp_path.rglob("checkpoint-*"))


def test_more_environments_than_fit(script, tmp_path, capsys):
    """EnvPool ends the whole process where they do not fit, and Atari's environments take minutes to start."""
    args = short_args(script, tmp_path, num_envs=2**20, num_steps=1, minibatch_size=2**20, total_timesteps=2**20)
    assert "--num-envs" in sentence_of(lambda: script.check_args(args), capsys)


@pytest.mark.parametrize(
    "names, env_id, words",
    [
        (MUJOCO, "Hoper-v5", ["Hoper-v5 cannot be made", "Hopper"]),
        (MUJOCO, "hopper-v5", ["Hopper"]),
        (MUJOCO, "BreakoutNoFrameskip-v4", ["BreakoutNoFrameskip"]),
        (MUJOCO, "CartPole-v1", ["CartPole-v1", "Discrete", "vectors of real numbers"]),
        (MUJOCO, "no_such_module:Task-v0", ["no_such_module"]),
        (MUJOCO, "Hopper v5", ["Hopper v5"]),
        (ATARI, "BreakoutNoFrameskp-v4", ["BreakoutNoFrameskp", "BreakoutNoFrameskip"]),
        (ATARI, "Breakout-v4", ["Breakout"]),
        (ATARI, "Hopper-v5", ["Hopper-v5 is no Atari game"]),
        (ATARI, "CartPole-v1", ["CartPole-v1 is no Atari game"]),
        (ATARI, "no_such_module:Pong-v4", ["no_such_module"]),
        (SCRIPTS, ":", [": cannot be made"]),
        (SCRIPTS, "", ["cannot be made"]),
    ],
)
def test_wrong_environments(tmp_path, capsys, names, env_id, words):
    for name in names:
        script = importlib.import_module(name)
        message = error_of(script, short_args(script, tmp_path, env_id=env_id), capsys)
        assert all(word in message for word in words), message
    assert not list(tmp_path.iterdir())


# --- environments that misbehave ---


class Misbehaving(gym.Env):
    """In its 6th step, or as soon as it is made."""

    observation_space, action_space = Box(-math.inf, math.inf, (3,)), Box(-1, 1, (2,))

    def __init__(self, how):
        self.how = how
        if how == "constructor":
            raise RuntimeError("no licence found\nmore")
        if how == "silent constructor":
            raise RuntimeError
        if how == "integer actions":
            self.action_space = Box(-1, 1, (2,), np.int64)
        if how == "unbounded actions":
            self.action_space = Box(-math.inf, math.inf, (2,))
        if how == "images":
            self.observation_space = Box(-1, 1, (3, 3))
        if how == "dictionaries":
            self.observation_space = Dict(a=Box(-1, 1, (3,)))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.t += 1
        assert action.shape == (2,) and (np.abs(action) <= 1).all()
        wrong = {"nan": math.nan, "inf": math.inf}.get(self.how.split()[0], 0.0) if self.t == 6 else 0.0
        obs = np.array([self.t, 0.0, wrong if self.how.endswith("observation") else 0.0], np.float32)
        return obs, 1.0 + (wrong if self.how.endswith("reward") else 0.0), False, self.t == 10, {}


def register(how):
    env_id = f"Misbehaving{how.title().replace(' ', '')}-v0"
    if env_id not in gym.registry:
        gym.register(env_id, Misbehaving, kwargs={"how": how})
    return env_id


@pytest.mark.parametrize(
    "how, words",
    [
        ("constructor", ["cannot be made: no licence found"]),
        ("silent constructor", ["cannot be made: RuntimeError"]),
        ("integer actions", ["int64", "vectors of real numbers"]),
        ("unbounded actions", ["bounds for actions"]),
        ("images", ["vectors of real numbers"]),
        ("dictionaries", ["vectors of real numbers"]),
        ("nan observation", ["not finite"]),
        ("inf observation", ["not finite"]),
        ("nan reward", ["not finite"]),
        ("inf reward", ["not finite"]),
    ],
)
def test_the_environment_is_named(tmp_path, capsys, how, words):
    env_id = register(how)
    message = common_error(MUJOCO, lambda script: short_args(script, tmp_path, env_id=env_id), capsys)
    assert all(word in message for word in [env_id, *words]) and "more" not in message, message
    assert not list(tmp_path.rglob("checkpoint-*"))


@pytest.mark.parametrize("script", MUJOCO, indirect=True)
def test_tasks_of_other_packages(script, tmp_path, monkeypatch):
    """`module:Name-v0` imports the module, which registers the task."""
    (tmp_path / "my_tasks.py").write_text(
        "import gymnasium as gym\n"
        "gym.register('Mine-v0', 'gymnasium.envs.classic_control:PendulumEnv', max_episode_steps=7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_tasks", raising=False)
    script.train(short_args(script, tmp_path / "runs", env_id="my_tasks:Mine-v0", iterations=1))
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("my_tasks-Mine-v0__") and list(folder.glob("checkpoint-*"))
    del gym.registry["Mine-v0"]


# --- paths and tracking ---


@pytest.fixture
def paths(tmp_path):
    """Where no folder can be made, not even by root."""
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    return {
        "below a file": tmp_path / "file" / "runs",
        "a file": tmp_path / "file",
        "symlink loop": tmp_path / "loop",
        "over-long name": tmp_path / ("x" * 300),
    }


QUICK = "--num-envs 2 --num-steps 16 --minibatch-size 16 --total-timesteps 32 --update-epochs 1 --no-cuda".split()


@pytest.mark.parametrize("kind", ["below a file", "a file", "symlink loop", "over-long name"])
def test_run_folder_that_cannot_be_made(paths, capsys, monkeypatch, kind):
    for name in ("bdpg_mujoco", "ppo_atari"):
        env_id = [] if name in ATARI else ["--env-id", "Hopper-v5"]
        options = [*QUICK, *env_id, "--run-dir", paths[kind]]
        message = error_of_command(importlib.import_module(name), options, capsys, monkeypatch)
        assert str(paths[kind]) in message


@pytest.mark.parametrize(
    "kind",
    [
        "below a file",
        "a file",
        "symlink loop",
        "over-long name",
    ],
)
def test_resume_from_where_no_folder_can_be(paths, capsys, monkeypatch, kind):
    for name in SCRIPTS:
        message = error_of_command(importlib.import_module(name), ["--resume", paths[kind]], capsys, monkeypatch)
        assert str(paths[kind]) in message


@pytest.mark.parametrize("name", ["lock", "run.json", "checkpoint-000000000064.tmp"])
def test_a_folder_where_a_file_should_go(trained, tmp_path, capsys, monkeypatch, name):
    """The checkpoint that was there is still there."""
    folder = tmp_path / "run"
    folder.mkdir()
    (checkpoint,) = (path for path in trained["ppo_mujoco"].glob("checkpoint-*"))
    (folder / checkpoint.name).write_bytes(checkpoint.read_bytes())
    name = f"checkpoint-{int(checkpoint.stem.split('-')[1]) + 32:012d}.tmp" if name.endswith("tmp") else name
    (folder / name).mkdir()
    script = importlib.import_module("ppo_mujoco")
    message = error_of_command(script, ["--resume", folder, "--total-timesteps", 96], capsys, monkeypatch)
    assert name in message
    assert (folder / checkpoint.name).read_bytes() == checkpoint.read_bytes()


def test_missing_wandb(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes its import fail
    for name in ("bdpg_mujoco", "ppo_atari"):
        options = [*QUICK, "--run-dir", tmp_path, "--track"]
        assert "wandb" in error_of_command(importlib.import_module(name), options, capsys, monkeypatch)


# --- numbers that stop being finite ---


def test_loss_that_is_not_finite_stops_the_run_and_loses_nothing(script, tmp_path, capsys, monkeypatch, lazy_disk):
    calls, ppo_loss = [], script.ppo_loss

    def fails_at_the_end_of_the_second_iteration(*args):
        calls.append(args)
        loss, *rest = ppo_loss(*args)
        return (loss * math.nan if len(calls) == 8 else loss, *rest)  # 2 epochs of 2 minibatches an iteration

    monkeypatch.setattr(script, "ppo_loss", fails_at_the_end_of_the_second_iteration)
    message = error_of(script, short_args(script, tmp_path, save_every=1), capsys)
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{32:012d}.pt"]
    assert message.startswith("error: policy is not finite in iteration 2; ")
    logged = read_scalars(tmp_path)["losses/policy"]
    assert [step for step, _ in logged] == [32, 64]
    assert [math.isfinite(value) for _, value in logged] == [True, False]


def test_parameter_that_is_not_finite_stops_the_run(script, tmp_path, capsys, monkeypatch, lazy_disk):
    """Every loss of the iteration was finite: the last step of all broke the network."""
    made, descend, calls = spy(monkeypatch, script, "make_optimizers"), script.descend, []

    def breaks_in_its_last_call(optimizer, *args):
        result = descend(optimizer, *args)
        if optimizer is made[0][1]["main"]:  # the last loss of a minibatch
            calls.append(optimizer)
            if len(calls) == 4:  # 2 epochs of 2 minibatches
                with torch.no_grad():
                    optimizer.param_groups[0]["params"][-1].fill_(math.inf)
        return result

    monkeypatch.setattr(script, "descend", breaks_in_its_last_call)
    message = error_of(script, short_args(script, tmp_path, save_every=1, iterations=1), capsys)
    assert re.match(r"error: [\w.]+ is not finite in iteration 1; ", message), message
    assert not list(tmp_path.rglob("checkpoint-*"))
    assert all(math.isfinite(value) for values in read_scalars(tmp_path).values() for _, value in values)


# --- as a user runs it ---


def run(*command, cwd):
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(REPO)}
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("bdpg_mujoco", ["--env-id", "Hoper-v5"], ["Hopper"]),
        ("ppo_wgan_mujoco", ["--gamma", "nan"], ["--gamma"]),
        ("bdpg_atari", ["--env-id", "Hopper-v5"], ["Hopper-v5 is no Atari game"]),
        ("ppo_atari", ["--total-timesteps", "9" * 400], ["--total-timesteps"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_command_line(tmp_path, name, options, words):
    result = run(str(REPO / f"{name}.py"), *options, cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == "", result
    (line,) = result.stderr.strip().splitlines()
    assert all(word in line for word in words) and "Traceback" not in line


def test_import_has_no_side_effects(tmp_path):
    result = run("-c", f"import {', '.join(SCRIPTS)}", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())

"""What a user gets wrong ends in one sentence on stderr and exit code 2, the same in every script; what was logged is kept."""

import importlib
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch
from conftest import ATARI, MUJOCO, SCRIPTS, read_scalars, short_args, spy

REPO = Path(__file__).parent.parent


def error_of(script, args, capsys):
    """The one sentence with which train() refuses these arguments."""
    with pytest.raises(SystemExit) as stop:
        script.train(args)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    return line


def common_error(names, args_of, capsys):
    """The one sentence with which all these scripts refuse args_of(script); only the name of a run's folder is its own."""
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
        (dict(bootstrap_length=20, minibatch_size=32), ["--minibatch-size", "32", "40"]),  # the rollout is 20 steps, not 16
        (dict(total_timesteps=31), ["--total-timesteps", "31", "32"]),
        (dict(total_timesteps=32, bootstrap_length=24), ["--total-timesteps", "48"]),
        (dict(update_epochs=0), ["--update-epochs", "0"]),
        (dict(score_interval=0), ["--score-interval", "0"]),
        (dict(save_every=0), ["--save-every", "0"]),
        (dict(gamma=0.0), ["--gamma", "0.0"]),
        (dict(gamma=1.01), ["--gamma", "1.01"]),
        (dict(gamma=math.nan), ["--gamma", "nan"]),
        (dict(gae_lambda=-0.1), ["--gae-lambda", "-0.1"]),
        (dict(gae_lambda=1.5), ["--gae-lambda", "1.5"]),
        (dict(gae_lambda=math.nan), ["--gae-lambda", "nan"]),
        (dict(learning_rate=0.0), ["--learning-rate"]),
        (dict(learning_rate=math.nan), ["--learning-rate", "nan"]),
        (dict(clip_coef=0.0), ["--clip-coef"]),
        (dict(ent_coef=-0.1), ["--ent-coef", "-0.1"]),
        (dict(vf_coef=math.nan), ["--vf-coef", "nan"]),
        (dict(max_grad_norm=0.0), ["--max-grad-norm"]),
        (dict(num_return_samples=0), ["--num-return-samples", "0"]),
        (dict(seed=-1), ["--seed", "-1"]),
        # BDPG's and its siblings' own:
        (dict(eta=-0.1), ["--eta", "-0.1"]),
        (dict(eta=math.inf), ["--eta", "inf"]),
        (dict(eta=math.nan), ["--eta", "nan"]),
        (dict(u_bar=-1.0), ["--u-bar", "-1.0"]),
        (dict(u_bar=0.0), ["--u-bar", "0.0"]),
        (dict(u_bar=math.nan), ["--u-bar", "nan"]),
        (dict(latent_dim=0), ["--latent-dim", "0"]),
        (dict(adversarial_learning_rate=-1e-3), ["--adversarial-learning-rate"]),
        (dict(r1_coef=-0.1), ["--r1-coef", "-0.1"]),
        (dict(law_coef=-0.1), ["--law-coef", "-0.1"]),
        (dict(critic_learning_rate=-1e-3), ["--critic-learning-rate"]),
        (dict(critic_learning_rate=math.nan), ["--critic-learning-rate"]),
        (dict(num_critic_steps=0), ["--num-critic-steps", "0"]),
        (dict(gradient_penalty=-0.1), ["--gradient-penalty", "-0.1"]),
        (dict(gradient_penalty=math.nan), ["--gradient-penalty", "nan"]),
        (dict(num_quantiles=0), ["--num-quantiles", "0"]),
    ],
    ids=str,
)
def test_arguments_out_of_range(tmp_path, capsys, overrides, words):
    """In every script that has the argument."""
    names = [name for name in SCRIPTS if all(hasattr(importlib.import_module(name).Args, argument) for argument in overrides)]
    args_of = lambda script: short_args(script, tmp_path, **(dict(total_timesteps=96) | overrides))  # noqa: E731
    message = common_error(names, args_of, capsys)
    assert all(word in message for word in words), message
    assert not list(tmp_path.iterdir())  # nothing was started


def test_seed_too_large_for_the_emulator(tmp_path, capsys):
    assert "--seed" in common_error(SCRIPTS, lambda script: short_args(script, tmp_path, seed=2**40), capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there(tmp_path, capsys):
    assert "--no-cuda" in common_error(SCRIPTS, lambda script: short_args(script, tmp_path, cuda=True), capsys)


@pytest.mark.parametrize(
    "names, env_id, words",
    [
        (MUJOCO, "Hoper-v5", ["'Hoper-v5'", "Hopper-v5"]),
        (MUJOCO, "HalfCheeta-v5", ["HalfCheetah-v5"]),
        (MUJOCO, "hopper-v5", ["Hopper-v5"]),
        (MUJOCO, "BreakoutNoFrameskip-v4", ["bdpg_atari.py"]),
        (MUJOCO, "ALE/Breakout-v5", ["bdpg_atari.py"]),
        (MUJOCO, "CartPole-v1", ["discrete", "bdpg_atari.py"]),
        (MUJOCO, "no_such_module:Task-v0", ["no_such_module"]),
        (MUJOCO, "Hopper v5", ["Hopper v5"]),
        (ATARI, "BreakoutNoFrameskp-v4", ["'BreakoutNoFrameskp-v4'", "BreakoutNoFrameskip-v4"]),
        (ATARI, "Seaquest-v5", ["ALE/Seaquest-v5"]),
        (ATARI, "Breakout-v0", ["Breakout"]),
        (ATARI, "Hopper-v5", ["bdpg_mujoco.py"]),
        (ATARI, "CartPole-v1", ["not an Atari game"]),
    ],
)
def test_wrong_environments(tmp_path, capsys, names, env_id, words):
    message = common_error(names, lambda script: short_args(script, tmp_path, env_id=env_id), capsys)
    assert all(word in message for word in words), message


def test_missing_wandb(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes its import fail
    assert "pip install wandb" in common_error(SCRIPTS, lambda script: short_args(script, tmp_path, track=True), capsys)


def test_wandb_that_refuses(tmp_path, capsys, monkeypatch):
    class Error(Exception):
        pass

    def init(**options):
        raise Error("api_key not configured (no-tty).\nmore")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=Error))
    for name in SCRIPTS:  # each in a folder of its own
        message = common_error([name], lambda script, name=name: short_args(script, tmp_path / name, track=True), capsys)
        assert "api_key not configured (no-tty)." in message and "wandb login" in message and "more" not in message


def test_video_of_a_task_that_cannot_be_drawn(tmp_path, capsys, monkeypatch):
    def render(env):
        raise RuntimeError("no OpenGL here\nmore")

    monkeypatch.setattr(gym.make("Hopper-v5").unwrapped.__class__, "render", render)
    message = common_error(MUJOCO, lambda script: short_args(script, tmp_path, env_id="Hopper-v5", capture_video=True), capsys)
    assert "Hopper-v5 cannot be drawn here (no OpenGL here)" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("names, env_id", [(ATARI, "PongNoFrameskip-v4"), (MUJOCO, "InvertedPendulum-v5")])
def test_missing_moviepy(tmp_path, capsys, monkeypatch, names, env_id):
    for module in [name for name in sys.modules if name.partition(".")[0] == "moviepy"] + ["moviepy"]:
        monkeypatch.setitem(sys.modules, module, None)
    message = common_error(names, lambda script: short_args(script, tmp_path, env_id=env_id, capture_video=True), capsys)
    assert "moviepy" in message.lower() and "pip install" in message, message


def test_run_folder_that_cannot_be_made(tmp_path, capsys):
    """Below a regular file, where not even root can make a folder."""
    (tmp_path / "file").write_text("")
    for names, capture_video in ((SCRIPTS, False), (ATARI, True)):
        args = dict(run_dir=tmp_path / "file" / "runs", capture_video=capture_video)
        message = common_error(names, lambda script, args=args: short_args(script, **args), capsys)
        assert "--run-dir" in message and str(tmp_path / "file") in message


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
    assert message == (
        "error: losses/policy is not finite after iteration 2; try lower learning rates, "
        f"or go on from the last good checkpoint, if any: {shlex.join(['python', sys.argv[0], '--resume', str(folder)])}"
    )
    logged = read_scalars(tmp_path)["losses/policy"]
    assert [step for step, _ in logged] == [32, 64]
    assert [math.isfinite(value) for _, value in logged] == [True, False]


def test_parameter_that_is_not_finite_stops_the_run(script, tmp_path, capsys, monkeypatch):
    """Every loss of the iteration was finite: the last step of all broke the network."""
    made, descend, calls = spy(monkeypatch, script, "make_optimizers"), script.descend, []

    def breaks_in_its_last_call(optimizer, *args):
        result = descend(optimizer, *args)
        if optimizer is made[0][1]["policy, trunk and generator"]:  # the last loss of a minibatch
            calls.append(optimizer)
            if len(calls) == 4:  # 2 epochs of 2 minibatches
                with torch.no_grad():
                    optimizer.param_groups[-1]["params"][0].parts[-1].fill_(math.inf)
        return result

    monkeypatch.setattr(script, "descend", breaks_in_its_last_call)
    message = error_of(script, short_args(script, tmp_path), capsys)
    assert re.match(r"error: return_model\.generator\.(output\.)?bias is not finite after iteration 1; ", message), message
    assert all(math.isfinite(value) for values in read_scalars(tmp_path).values() for _, value in values)


# --- as a user runs it ---


def run(*command, cwd):
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(REPO)}
    return subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("bdpg_mujoco", ["--env-id", "Hoper-v5"], ["Hopper-v5"]),
        ("bdpg_mujoco", ["--gamma", "nan"], ["--gamma"]),
        ("bdpg_atari", ["--env-id", "Hopper-v5"], ["bdpg_mujoco.py"]),
        ("bdpg_atari", ["--eta", "-1"], ["--eta"]),
        ("ppo_wgan_mujoco", ["--env-id", "ALE/Breakout-v5"], ["bdpg_atari.py"]),
        ("ppo_wgan_atari", ["--gradient-penalty", "-1"], ["--gradient-penalty"]),
        ("ppo_qr_atari", ["--num-quantiles", "0"], ["--num-quantiles"]),
    ],
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

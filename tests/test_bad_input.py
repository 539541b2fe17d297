"""What a user gets wrong ends in one sentence on stderr and exit code 2; what was logged until then is kept."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SCRIPTS, is_atari, read_scalars, short_args

REPO = Path(__file__).parent.parent


def error_of(script, args, capsys):
    """The one sentence with which train() refuses these arguments."""
    with pytest.raises(SystemExit) as stop:
        script.train(args)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    return line


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
        (dict(gamma=0.0), ["--gamma", "0.0"]),
        (dict(gamma=1.01), ["--gamma", "1.01"]),
        (dict(gamma=math.nan), ["--gamma", "nan"]),
        (dict(gae_lambda=-0.1), ["--gae-lambda", "-0.1"]),
        (dict(gae_lambda=1.5), ["--gae-lambda", "1.5"]),
        (dict(gae_lambda=math.nan), ["--gae-lambda", "nan"]),
        (dict(learning_rate=0.0), ["--learning-rate"]),
        (dict(learning_rate=math.nan), ["--learning-rate", "nan"]),
        (dict(adversarial_learning_rate=-1e-3), ["--adversarial-learning-rate"]),
        (dict(clip_coef=0.0), ["--clip-coef"]),
        (dict(ent_coef=-0.1), ["--ent-coef", "-0.1"]),
        (dict(vf_coef=math.nan), ["--vf-coef", "nan"]),
        (dict(max_grad_norm=0.0), ["--max-grad-norm"]),
        (dict(eta=-0.1), ["--eta", "-0.1"]),
        (dict(eta=math.inf), ["--eta", "inf"]),
        (dict(eta=math.nan), ["--eta", "nan"]),
        (dict(u_bar=-1.0), ["--u-bar", "-1.0"]),
        (dict(u_bar=0.0), ["--u-bar", "0.0"]),
        (dict(u_bar=math.nan), ["--u-bar", "nan"]),
        (dict(num_return_samples=0), ["--num-return-samples", "0"]),
        (dict(latent_dim=0), ["--latent-dim", "0"]),
        (dict(r1_coef=-0.1), ["--r1-coef", "-0.1"]),
        (dict(mean_coef=-0.1), ["--mean-coef", "-0.1"]),
        (dict(seed=-1), ["--seed", "-1"]),
    ],
    ids=str,
)
def test_arguments_out_of_range(script, tmp_path, capsys, overrides, words):
    message = error_of(script, short_args(script, tmp_path, **(dict(total_timesteps=96) | overrides)), capsys)
    assert all(word in message for word in words), message
    assert not list(tmp_path.iterdir())  # nothing was started


def test_seed_too_large_for_the_emulator(atari, tmp_path, capsys):
    assert "--seed" in error_of(atari, short_args(atari, tmp_path, seed=2**40), capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there(script, tmp_path, capsys):
    assert "--no-cuda" in error_of(script, short_args(script, tmp_path, cuda=True), capsys)


@pytest.mark.parametrize(
    "name, env_id, words",
    [
        ("bdpg_mujoco", "Hoper-v5", ["'Hoper-v5'", "Hopper-v5"]),
        ("bdpg_mujoco", "HalfCheeta-v5", ["HalfCheetah-v5"]),
        ("bdpg_mujoco", "hopper-v5", ["Hopper-v5"]),
        ("bdpg_mujoco", "BreakoutNoFrameskip-v4", ["bdpg_atari.py"]),
        ("bdpg_mujoco", "ALE/Breakout-v5", ["bdpg_atari.py"]),
        ("bdpg_mujoco", "CartPole-v1", ["discrete", "bdpg_atari.py"]),
        ("bdpg_mujoco", "no_such_module:Task-v0", ["no_such_module"]),
        ("bdpg_mujoco", "Hopper v5", ["Hopper v5"]),
        ("bdpg_atari", "BreakoutNoFrameskp-v4", ["'BreakoutNoFrameskp-v4'", "BreakoutNoFrameskip-v4"]),
        ("bdpg_atari", "Seaquest-v5", ["ALE/Seaquest-v5"]),
        ("bdpg_atari", "Breakout-v0", ["Breakout"]),
        ("bdpg_atari", "Hopper-v5", ["bdpg_mujoco.py"]),
        ("bdpg_atari", "CartPole-v1", ["not an Atari game"]),
    ],
)
def test_wrong_environments(request, tmp_path, capsys, name, env_id, words):
    script = request.getfixturevalue(name.removeprefix("bdpg_"))
    message = error_of(script, short_args(script, tmp_path, env_id=env_id), capsys)
    assert all(word in message for word in words), message


def test_missing_wandb(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes its import fail
    assert "pip install wandb" in error_of(script, short_args(script, tmp_path, track=True), capsys)


def test_missing_moviepy(script, tmp_path, capsys, monkeypatch):
    for module in [name for name in sys.modules if name.partition(".")[0] == "moviepy"] + ["moviepy"]:
        monkeypatch.setitem(sys.modules, module, None)
    env_id = "PongNoFrameskip-v4" if is_atari(script) else "InvertedPendulum-v5"
    message = error_of(script, short_args(script, tmp_path, env_id=env_id, capture_video=True), capsys)
    assert "moviepy" in message.lower() and "pip install" in message, message


def test_run_folder_that_cannot_be_made(script, tmp_path, capsys):
    """Below a regular file, where not even root can make a folder."""
    (tmp_path / "file").write_text("")
    message = error_of(script, short_args(script, tmp_path / "file" / "runs"), capsys)
    assert "--run-dir" in message and str(tmp_path / "file") in message


# --- numbers that stop being finite ---


def test_loss_that_is_not_finite_stops_the_run_and_keeps_its_log(script, tmp_path, capsys, monkeypatch):
    calls, ppo_loss = [], script.ppo_loss

    def fails_at_the_end_of_the_second_iteration(*args):
        calls.append(args)
        loss, *rest = ppo_loss(*args)
        return (loss * math.nan if len(calls) == 8 else loss, *rest)  # 2 epochs of 2 minibatches an iteration

    monkeypatch.setattr(script, "ppo_loss", fails_at_the_end_of_the_second_iteration)
    message = error_of(script, short_args(script, tmp_path), capsys)
    assert "losses/policy" in message and "iteration 2" in message
    logged = read_scalars(tmp_path)["losses/policy"]
    assert [step for step, _ in logged] == [32, 64]
    assert [math.isfinite(value) for _, value in logged] == [True, False]


def test_parameter_that_is_not_finite_stops_the_run(script, tmp_path, capsys, monkeypatch):
    """Every loss of the iteration was finite: the last step of all broke the network."""
    calls, descend = [], script.descend

    def breaks_in_its_last_call(optimizer, *args):
        calls.append(optimizer)
        result = descend(optimizer, *args)
        if len(calls) == 12:  # 2 epochs of 2 minibatches of 3 losses
            with torch.no_grad():
                optimizer.param_groups[0]["params"][-1].fill_(math.inf)
        return result

    monkeypatch.setattr(script, "descend", breaks_in_its_last_call)
    message = error_of(script, short_args(script, tmp_path), capsys)
    assert "return_model.generator.output.bias" in message and "iteration 1" in message
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
    ],
)
def test_command_line(tmp_path, name, options, words):
    result = run(str(REPO / f"{name}.py"), *options, cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == "", result
    (line,) = result.stderr.strip().splitlines()
    assert all(word in line for word in words) and "Traceback" not in line


@pytest.mark.parametrize("name", SCRIPTS)
def test_import_has_no_side_effects(tmp_path, name):
    result = run("-c", f"import {name}", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())

"""A run that is stopped, killed or out of disk goes on as if nothing had happened."""

import importlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import MUJOCO, SCRIPTS, change_games, is_atari, is_bdpg, newest, read_scalars, short_args, spy
from gymnasium.envs.classic_control import PendulumEnv

ROOT = Path(__file__).resolve().parent.parent
TINY = dict(env_id="Pendulum-v1", num_envs=2, num_steps=32, minibatch_size=16, update_epochs=1, seed=3)
BATCH = 64
PER_ITERATION = "charts/learning_rate"
on_mujoco = pytest.mark.parametrize("script", MUJOCO, indirect=True)


class FixedPendulum(PendulumEnv):
    """Every episode starts in the same state: restarted environments are then where they were."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = np.array([1.0, 0.5])
        return self._get_obs(), {}


gym.register("FixedPendulum-v0", FixedPendulum, max_episode_steps=8)  # whole episodes fit into rollouts of 16 steps


def tiny_args(script, folder, iterations, **overrides):
    tiny = TINY | dict(run_dir=folder, cuda=False, total_timesteps=iterations * BATCH, save_every=1) | overrides
    return script.Args(**tiny | (dict(eta=0.1) if is_bdpg(script) else {}))


def run_folder(folder):
    (path,) = folder.iterdir()
    return path


def load(path):
    return torch.load(path, weights_only=True)


def resume(script, monkeypatch, path, *options):
    """What `python SCRIPT --resume PATH ...` does."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", "--resume", str(path), *map(str, options)])
    return script.train(script.parse_args())


def assert_same(a, b):
    """Equal to the bit, whatever is nested in whatever; NaN equals NaN."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_same(left, right)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    else:
        assert a == b or (a != a and b != b)


# --- resuming ---


class Reached(Exception):
    pass


def test_learner_state_is_identical_at_the_resume_point(script, monkeypatch, tmp_path, short_games, lazy_disk):
    script.train(short_args(script, tmp_path, iterations=2, save_every=1))
    path = newest(run_folder(tmp_path))
    saved = load(path)
    agents, optimizers = spy(monkeypatch, script, "Agent"), spy(monkeypatch, script, "make_optimizers")

    def first_reset(envs, seed):
        assert_same(torch.get_rng_state(), saved["rng"])
        raise Reached

    monkeypatch.setattr(script, "reset_envs", first_reset)
    with pytest.raises(Reached):
        resume(script, monkeypatch, path, "--total-timesteps", 10_000)
    assert_same(dict(agents[0][1].state_dict()), dict(saved["agent"]))
    for name, optimizer in optimizers[0][1].items():
        assert_same(optimizer.state_dict(), saved["optimizers"][name])


def test_resumed_run_equals_the_straight_one(script, monkeypatch, tmp_path, lazy_disk):
    """Where the environments' restart changes nothing, the rest of the run is the same to the bit: weights, optimisers, random
    numbers, running statistics, counters, annealed learning rates and η_t."""
    change_games(monkeypatch, noop_max=0, max_num_frames_per_episode=64)  # each game is a rollout of 16 steps, from the same start
    tiny = dict(iterations=5, save_every=1, score_interval=3)
    if not is_atari(script):
        tiny["env_id"] = "FixedPendulum-v0"
    script.train(short_args(script, tmp_path / "straight", **tiny))
    straight = run_folder(tmp_path / "straight")

    class Interrupted(Exception):
        pass

    save_checkpoint = script.save_checkpoint

    def save_and_die(folder, checkpoint):
        save_checkpoint(folder, checkpoint)
        if checkpoint["iteration"] == 2:
            raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(script, "save_checkpoint", save_and_die)
        with pytest.raises(Interrupted):
            script.train(short_args(script, tmp_path / "resumed", **tiny))
    resumed = run_folder(tmp_path / "resumed")

    time.sleep(1.1)  # TensorBoard orders a run's event files by the second of their making
    resume(script, monkeypatch, resumed)
    assert newest(straight).name == newest(resumed).name
    a, b = load(newest(straight)), load(newest(resumed))
    for key in ("agent", "optimizers", "recent_scores", "interval_scores", "iteration", "global_step", "rng"):
        assert_same(a[key], b[key])
    log_a, log_b = read_scalars(straight), read_scalars(resumed)
    assert log_a.keys() == log_b.keys() and {"charts/learning_rate", "charts/averaged_score"} <= log_a.keys()
    assert ("curiosity/eta_t" in log_a) == is_bdpg(script)
    for tag in log_a.keys() - {"charts/steps_per_second"}:
        assert log_a[tag] == log_b[tag], tag


@on_mujoco
def test_annealing_statistics_and_counters_go_on(script, monkeypatch, tmp_path):
    script.train(tiny_args(script, tmp_path, 6, save_every=3))
    folder = run_folder(tmp_path)
    before = read_scalars(folder)
    newest(folder).unlink()  # as if the run had died after the checkpoint of iteration 3 and before that of iteration 6
    at_3 = load(newest(folder))
    resume(script, monkeypatch, folder)
    after, checkpoint = read_scalars(folder), load(newest(folder))
    assert checkpoint["iteration"] == 6 and checkpoint["global_step"] == 6 * BATCH
    assert after[PER_ITERATION] == before[PER_ITERATION]
    assert [value for _, value in after[PER_ITERATION]] == pytest.approx([3e-4 * (1 - i / 6) for i in range(6)])
    assert after.get("curiosity/eta_t") == before.get("curiosity/eta_t")
    for name in ("reward_stats", "u_stats") if is_bdpg(script) else ("reward_stats",):
        assert checkpoint["agent"][f"{name}.count"] == at_3["agent"][f"{name}.count"] + 3 * BATCH == 6 * BATCH
    assert checkpoint["agent"]["obs_stats.count"] >= at_3["agent"]["obs_stats.count"] + 3 * BATCH
    assert checkpoint["seconds"] > at_3["seconds"]
    assert checkpoint["recent_scores"][: len(at_3["recent_scores"])] == at_3["recent_scores"]


@on_mujoco
def test_curves_neither_jump_nor_overlap(script, monkeypatch, tmp_path):
    script.train(tiny_args(script, tmp_path, 6, save_every=3, env_id="ShortPendulum-v0"))
    folder = run_folder(tmp_path)
    newest(folder).unlink()
    resume(script, monkeypatch, folder, "--total-timesteps", 8 * BATCH)
    assert run_folder(tmp_path) == folder  # no second folder
    log = read_scalars(folder)
    assert {step for step, _ in log[PER_ITERATION]} == {i * BATCH for i in range(1, 9)}
    for tag, events in log.items():
        steps = [step for step, _ in events]
        if tag in ("charts/episodic_return", "charts/episodic_length"):  # two episodes may end in the same step
            assert steps == sorted(steps)
            assert max(steps.count(step) for step in set(steps)) <= 2, tag
        else:
            assert all(a < b for a, b in zip(steps, steps[1:], strict=False)), tag


@on_mujoco
def test_total_timesteps_may_grow(script, monkeypatch, tmp_path):
    script.train(tiny_args(script, tmp_path, 2))
    folder = run_folder(tmp_path)
    resume(script, monkeypatch, folder, "--total-timesteps", 4 * BATCH)
    checkpoint = load(newest(folder))
    assert checkpoint["iteration"] == 4 and checkpoint["args"]["total_timesteps"] == 4 * BATCH
    rates = [value for _, value in read_scalars(folder)[PER_ITERATION]]
    assert rates == pytest.approx([3e-4, 1.5e-4, 1.5e-4, 0.75e-4])  # the second half anneals over the new length


@on_mujoco
def test_environments_of_other_runs_and_of_resumed_ones_have_other_seeds(script, monkeypatch, tmp_path):
    resets = spy(monkeypatch, script, "reset_envs")
    script.train(tiny_args(script, tmp_path, 1))
    resume(script, monkeypatch, run_folder(tmp_path), "--total-timesteps", 2 * BATCH)
    script.train(tiny_args(script, tmp_path / "4", 1, seed=4))
    seeds = [seed + i for (_, seed), _ in resets for i in range(TINY["num_envs"])]  # environment i gets seed + i
    assert len(set(seeds)) == len(seeds) == 3 * TINY["num_envs"]
    assert all(0 <= seed < 2**31 for seed in seeds)  # what ALE takes
    script.train(tiny_args(script, tmp_path / "again", 1))
    assert resets[3][0][1] == resets[0][0][1]


@on_mujoco
def test_going_back_to_an_older_checkpoint_leaves_the_later_ones_behind(script, monkeypatch, tmp_path):
    """Else the next --resume of the folder would go on from what was given up."""
    script.train(tiny_args(script, tmp_path, 3, save_every=1))
    folder = run_folder(tmp_path)
    oldest, *later = sorted(folder.glob("checkpoint-*.pt"))
    given_up = {path.stem: path.read_bytes() for path in later}
    monkeypatch.setattr(script, "STOP_SIGNALS", [signal.SIGINT])  # stops after one iteration
    with pytest.raises(SystemExit):
        resume(script, monkeypatch, oldest)
    assert load(newest(folder))["iteration"] == 2 and oldest.exists()
    assert {path.stem: path.read_bytes() for path in folder.glob("*.abandoned-*")} == given_up  # nothing is lost
    with pytest.raises(SystemExit):
        resume(script, monkeypatch, folder, "--total-timesteps", 5 * BATCH)
    assert load(newest(folder))["iteration"] == 3

    # Now back to what was given up first: the other branch, which has a checkpoint of the same step, is set aside beside it.
    (chosen,) = folder.glob(f"{later[0].stem}.abandoned-*")
    branch = {path.stem: path.read_bytes() for path in later}
    monkeypatch.setattr(script.time, "strftime", lambda *_: "some-other-second")
    resume(script, monkeypatch, chosen)
    assert {path.stem: path.read_bytes() for path in folder.glob("*.abandoned-some-other-second")} == branch
    assert chosen.read_bytes() == given_up[chosen.stem] and load(newest(folder))["iteration"] == 3


def test_a_stop_in_the_last_iteration_is_no_early_stop(mujoco, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(mujoco, "STOP_SIGNALS", [signal.SIGINT])
    with pytest.raises(SystemExit):
        mujoco.train(tiny_args(mujoco, tmp_path / "two", 2))
    assert "stopped early" in capsys.readouterr().out
    mujoco.train(tiny_args(mujoco, tmp_path / "one", 1))
    assert "stopped early" not in capsys.readouterr().out


def refusal(name, monkeypatch, capsys, path, *options):
    """The one sentence with which the script of this name refuses to resume; the folder stays as it is."""
    folder = path if path.is_dir() else path.parent
    contents = lambda: {file: file.is_file() and file.read_bytes() for file in folder.iterdir()}  # noqa: E731
    before = contents()
    with pytest.raises(SystemExit, match="2"):
        resume(importlib.import_module(name), monkeypatch, path, *options)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert before == contents()
    return line


def test_other_arguments_may_not_change(trained, monkeypatch, capsys):
    expected = "error: a resumed run keeps its arguments, but num_envs was 2, now 4; gamma was 0.99, now 0.9."
    for name in SCRIPTS:
        changed = ("--total-timesteps", 4 * BATCH, "--gamma", 0.9, "--num-envs", 4)
        assert refusal(name, monkeypatch, capsys, trained[name], *changed) == expected


def test_curiosity_may_not_change(trained, monkeypatch, capsys):
    message = refusal("bdpg_mujoco", monkeypatch, capsys, trained["bdpg_mujoco"], "--total-timesteps", 4 * BATCH, "--eta", 0)
    assert "eta was 0.1, now 0.0" in message


def test_finished_run_is_not_resumed(trained, monkeypatch, capsys):
    expected = "error: this run is complete at 64 steps; to go on, give a larger --total-timesteps."
    for name in SCRIPTS:
        assert refusal(name, monkeypatch, capsys, trained[name]) == expected


def test_bad_checkpoints_are_not_resumed(trained, monkeypatch, tmp_path, capsys):
    """Every script refuses them, with the same sentence."""
    empty, file = tmp_path / "empty", tmp_path / "checkpoint-1.pt"
    empty.mkdir()
    sentences = {}
    for name in SCRIPTS:
        good, content = load(newest(trained[name])), newest(trained[name]).read_bytes()
        for path in (tmp_path / "missing", empty):
            assert refusal(name, monkeypatch, capsys, path).startswith("error: there is no checkpoint")
        bad = {
            "truncated": content[:5000],
            "random": bytes(range(256)) * 40,
            "foreign": {"weights": torch.zeros(3)},
            "no agent": {key: value for key, value in good.items() if key != "agent"},
            "no arguments": {key: value for key, value in good.items() if key != "args"},
            "unknown argument": good | {"args": good["args"] | {"warp": 9}},
            "wrong shape": good | {"agent": good["agent"] | {"reward_stats.mean": torch.zeros(7)}},
            "missing optimiser": good | {"optimizers": {}},
            "missing part of the agent": good | {"agent": {key: v for key, v in good["agent"].items() if "generator" not in key}},
        }
        for kind, what in bad.items():
            file.write_bytes(what) if isinstance(what, bytes) else torch.save(what, file)
            message = refusal(name, monkeypatch, capsys, file, "--total-timesteps", 4 * BATCH)
            assert sentences.setdefault(kind, message) == message, name
            assert str(file) in message


def test_checkpoints_of_other_scripts_are_not_resumed(monkeypatch, tmp_path, capsys):
    file = tmp_path / "checkpoint-1.pt"
    for maker in SCRIPTS:
        torch.save({"script": f"{maker}.py"}, file)
        for name in set(SCRIPTS) - {maker}:
            expected = f"was made by {maker}.py, not by {name}.py."
            assert refusal(name, monkeypatch, capsys, file).endswith(expected)


# --- saving ---


@on_mujoco
def test_newest_three_are_kept_and_need_no_pickled_code(script, tmp_path):
    script.train(tiny_args(script, tmp_path, 5))
    folder = run_folder(tmp_path)
    assert [path.name for path in sorted(folder.glob("checkpoint-*"))] == [f"checkpoint-{i * BATCH:012d}.pt" for i in (3, 4, 5)]
    checkpoint = load(newest(folder))  # with weights_only=True
    held = {"agent", "optimizers", "args", "versions", "script", "command", "git", "rng", "iteration", "global_step"}
    assert held <= checkpoint.keys()
    assert {"obs_stats.mean", "reward_stats.var", "return_model.residual_scale"} <= checkpoint["agent"].keys()
    assert ("u_stats.count" in checkpoint["agent"]) == is_bdpg(script)


@pytest.mark.parametrize("where", ["os.replace", "os.fsync", "torch.save"])
def test_failed_save_leaves_the_previous_one_whole(mujoco, monkeypatch, tmp_path, capsys, where):
    owner, name = {"os": os, "torch": torch}[where.split(".")[0]], where.split(".")[1]
    original, calls = getattr(owner, name), []

    def full_disk(*args, **kwargs):
        calls.append(1)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="2"):
        patch.setattr(owner, name, full_disk)
        mujoco.train(tiny_args(mujoco, tmp_path, 3))
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "No space left on device" in message
    folder = run_folder(tmp_path)
    assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{BATCH:012d}.pt"]
    assert load(newest(folder))["iteration"] == 1
    resume(mujoco, monkeypatch, folder)
    assert load(newest(folder))["iteration"] == 3


# --- signals, in processes of their own ---


def start(*options):
    command = [sys.executable, str(ROOT / "bdpg_mujoco.py"), "--no-cuda", "--save-every", "1", *map(str, options)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fresh_options(folder, **overrides):
    options = TINY | {"eta": 0.1, "total_timesteps": 10**7, "run_dir": folder} | overrides
    return [item for name, value in options.items() for item in (f"--{name.replace('_', '-')}", value)]


def wait_for_checkpoint(process, folder, after=-1):
    """Waits for one with more than `after` steps, and returns its steps."""
    deadline = time.time() + 120
    while time.time() < deadline and process.poll() is None:
        steps = max((int(path.stem.split("-")[1]) for path in folder.rglob("checkpoint-*.pt")), default=-1)
        if steps > after:
            return steps
        time.sleep(0.02)
    process.kill()
    pytest.fail(f"no checkpoint: {process.communicate()}")


def test_signals_save_and_say_how_to_go_on(tmp_path):
    process = start(*fresh_options(tmp_path))
    steps = wait_for_checkpoint(process, tmp_path)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "stopping after this iteration" in err and "Traceback" not in err
    assert not list(tmp_path.rglob("*.tmp"))
    stopped_at = load(newest(run_folder(tmp_path)))["global_step"]
    assert stopped_at >= steps
    command = shlex.split(out.splitlines()[-1].split("to go on: ")[1])
    assert command[0] == "python" and Path(command[1]).name == "bdpg_mujoco.py"

    process = start(*command[2:])
    steps = wait_for_checkpoint(process, tmp_path, after=stopped_at)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143 and "to go on: " in out and "Traceback" not in err
    assert load(newest(run_folder(tmp_path)))["global_step"] >= steps


def test_second_signal_stops_at_once(tmp_path):
    process = start(*fresh_options(tmp_path, update_epochs=3000))  # an iteration takes a minute
    (deadline, ready) = time.time() + 120, []
    while time.time() < deadline and not ready:
        time.sleep(0.1)
        ready = list(tmp_path.rglob("events.out.*"))  # opened just before the signals are handled
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert "stopping after this iteration" in process.stderr.readline() + process.stderr.readline()
    process.send_signal(signal.SIGINT)
    stopped = time.time()
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT and time.time() - stopped < 20  # a shell shows 130
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_newest_checkpoint_survives_kill_9(tmp_path):
    """Three moments here; benchmark/kill_test.py takes twenty."""
    moments, last = np.random.default_rng(0).uniform(0, 0.4, 3), -1
    for moment in moments:
        process = start(*(fresh_options(tmp_path, num_steps=16) if last < 0 else ("--resume", run_folder(tmp_path))))
        wait_for_checkpoint(process, tmp_path, after=last)
        time.sleep(moment)
        process.kill()
        process.communicate()
        checkpoint = load(newest(run_folder(tmp_path)))
        assert checkpoint["global_step"] > last
        last = checkpoint["global_step"]

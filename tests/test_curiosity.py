"""The study of curiosity: its tasks, its control arm, and a run in miniature."""

import dataclasses
import itertools
import json

import gymnasium as gym
import numpy as np
import pytest
import torch

from studies import curiosity


def test_sparse_pendulum_pays_near_upright_only():
    env = gym.make("SparsePendulum-v0")
    obs, _ = env.reset(seed=1)
    assert obs[0] == pytest.approx(-1, abs=0.01)  # hanging
    for angle, reward in [(0.0, 1), (0.25, 1), (-0.25, 1), (0.3, 0), (-0.3, 0), (np.pi, 0)]:
        env.reset(seed=1)
        env.unwrapped.state = np.array([angle, 0.0])
        env.unwrapped.dt = 0.0  # the angle stays
        assert env.step(np.zeros(1))[1] == reward
    env.reset(seed=2)
    ends = [env.step(np.zeros(1))[2:4] for _ in range(200)]
    assert ends == [(False, False)] * 199 + [(False, True)]


def test_shuffling_moves_the_gains_of_steps_and_keeps_them_all():
    gains = torch.rand(64, 16, 2)
    moved = curiosity.shuffled(gains)
    assert moved.shape == gains.shape and (moved != gains).float().mean() > 0.9
    of_steps, of_moved = (values.flatten(0, 1).tolist() for values in (gains, moved))
    assert sorted(of_steps) == sorted(of_moved)  # the latent dimensions of a step stay together


def test_curves_average_the_last_20_episodes():
    job = {"episodes": [(10 * n, float(n)) for n in range(1, 41)]}
    found = curiosity.curve(job, np.array([5, 10, 25, 400]))
    np.testing.assert_allclose(found, [np.nan, 1, 1.5, np.mean(range(21, 41))])


def test_interval_of_the_mean_is_that_of_all_sets_of_runs_that_can_be_drawn():
    curves = np.array([[0.0, 1.0], [1.0, 3.0], [5.0, 2.0], [20.0, 2.5]])
    means = np.array([curves[list(runs)].mean(0) for runs in itertools.product(range(4), repeat=4)])
    low, high = np.quantile(means, (0.025, 0.975), axis=0)
    found = curiosity.mean_and_interval(curves)
    np.testing.assert_allclose(found, [curves.mean(0), low, high])


def test_report_is_of_all_that_is_finished_whatever_is_asked_for(tmp_path, capsys):
    """Seed 1 finds the goal at step 2000 and loses it, seed 2 keeps it from step 4000 on, seed 3 never finds it."""
    returns = {1: [-9.0, 50.0] + 20 * [-5.0], 2: 3 * [-9.0] + 20 * [90.0], 3: 23 * [-7.0]}
    rest = dict(eta=1.0, total_timesteps=200_000, git="0123456789", versions={"python": "3"}, hours=0.5)
    for env, arm, seed in itertools.product(curiosity.GOALS, curiosity.ARMS, returns):
        episodes = [(1000 * number, value) for number, value in enumerate(returns[seed], start=1)]
        with open(tmp_path / "finished.jsonl", "a") as file:
            print(json.dumps(dict(env=env, arm=arm, seed=seed, episodes=episodes) | rest), file=file)
    curiosity.main(curiosity.Args(envs=("SparsePendulum-v0",), seeds=(2,), output=tmp_path))
    out = capsys.readouterr().out
    assert "0 runs to do, 18 done before" in out
    for env, arm in itertools.product(curiosity.GOALS, curiosity.ARMS):
        assert f"| {env} | {arm} | 3 | 26.0 (-7.0 to 90.0) | 2 | 3,000 | 1 |" in out
    assert "; commit `0123456`; python 3; 9.0 hours of one core." in out


def test_in_miniature_and_again(tmp_path, capsys):
    args = curiosity.Args(
        envs=("SparsePendulum-v0",), seeds=(1, 1), total_timesteps=4096 * 2, workers=2, output=tmp_path
    )
    curiosity.main(args)
    out = capsys.readouterr().out
    assert "3 runs to do, 0 done before" in out
    finished = [json.loads(line) for line in (tmp_path / "finished.jsonl").read_text().splitlines()]
    assert {job["arm"] for job in finished} == set(curiosity.ARMS)
    records = [json.loads(path.read_text()) for path in tmp_path.rglob("run.json")]
    # plot.py does not take one arm for another.
    assert {record["args"]["arm"] for record in records} == set(curiosity.ARMS)
    episodes = {job["arm"]: job["episodes"] for job in finished}
    assert all(step % 3200 == 0 for runs in episodes.values() for step, _ in runs)  # 16 episodes of 200 steps at once
    for arm in curiosity.ARMS:
        assert f"| SparsePendulum-v0 | {arm} | 1 |" in out
    assert f"commit `{str(finished[0]['git'])[:7]}`; torch " in out and "hours of one core." in out
    assert (tmp_path / "curiosity.png").stat().st_size > 5000
    assert (tmp_path / "curiosity.csv").read_text().count("\n") == 1 + 3 * 100
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    curiosity.main(dataclasses.replace(args, output=moved))  # wherever the folder is
    assert "0 runs to do, 3 done before" in capsys.readouterr().out
    moved.rename(tmp_path)

    # An interruption leaves the folder of a run, and half a line.
    lines = (tmp_path / "finished.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "finished.jsonl").write_text("".join(lines[:2]) + lines[2][:50])
    curiosity.main(args)
    assert "1 runs to do, 2 done before" in capsys.readouterr().out
    again = [json.loads(line) for line in (tmp_path / "finished.jsonl").read_text().splitlines()]
    assert again == [*finished[:2], finished[2] | {"hours": again[2]["hours"]}]  # the same run again, bit for bit
    assert all(0 < 3600 * job["hours"] < 600 for job in again)


def test_a_run_that_gives_up_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(curiosity.bdpg, "check_args", lambda args: None)
    args = curiosity.Args(envs=("SparsePendulum-v0",), seeds=(-1,), workers=2, output=tmp_path)
    assert curiosity.main(args) == 1
    failures = capsys.readouterr().err.splitlines()
    logs = {str(log): log.read_text() for log in tmp_path.glob("runs/*/*/log.txt")}
    assert len(logs) == len(failures) == 3 and all("--seed must lie" in log for log in logs.values())
    for arm in curiosity.ARMS:
        (line,) = [line for line in failures if line.startswith(f"failed: SparsePendulum-v0, {arm}, -1, ")]
        assert any(line.endswith(f": {log} says why") for log in logs)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(workers=0), "--workers must be at least 1"),
        (dict(eta=0.0), "--eta above 0"),
        (dict(envs=()), "--envs one or more"),
        (dict(write=True), "--write has its own folder"),
        (dict(total_timesteps=16383), "at least 16384, or no episode of MountainCarContinuous-v0 would end"),
        (dict(total_timesteps=100), "--total-timesteps 100 is less than the"),
        (
            dict(envs=("Hopper-v5",)),
            "Hopper-v5 is none of this study's tasks, which are MountainCarContinuous-v0 and SparsePendulum-v0.",
        ),
    ],
)
def test_wrong_arguments_are_refused(wrong, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        curiosity.main(curiosity.Args(output=tmp_path / "new", **wrong))
    assert stop.value.code == 2 and message in capsys.readouterr().err and not (tmp_path / "new").exists()

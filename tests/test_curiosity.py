"""The study of curiosity: its mazes, its bonuses, how it judges them, and runs in miniature."""

import collections
import dataclasses
import itertools
import json

import gymnasium as gym
import numpy as np
import pytest
import torch

import bdpg_mujoco
from studies import curiosity

MAIN = tuple(curiosity.ARMS)


def walk(env, *legs):
    """Goes (dx, dy) for some steps, and so on; where it got to and what it was paid."""
    total = 0.0
    for dx, dy, steps in legs:
        for _ in range(steps):
            obs, reward, terminated, truncated, _ = env.step(np.array([dx, dy], np.float32))
            total += reward
            if terminated or truncated:
                return obs, total, terminated, truncated
    return obs, total, False, False


def test_a_maze_is_a_snake():
    for name, walls in curiosity.WALLS.items():
        height = 1 / (walls + 1)
        env = gym.make(f"Maze-{name}-v0")
        env.reset()
        obs, *_ = walk(env, (0, 1, 60))
        assert obs[1] == pytest.approx(height, abs=1e-4)  # the first wall
        obs, *_ = walk(env, (1, 1, 18))  # slides along it
        assert obs[0] < 0.8 and obs[1] == pytest.approx(height, abs=1e-4)
        obs, *_ = walk(env, (1, 0, 10), (0, 0.5, 1))  # through the gap, to the middle of the next corridor
        assert obs[1] > height
        env.reset()
        # From end to end: along a corridor to the gap, up by one corridor, and back.
        legs = [(0, (height / 2 - 0.025) / 0.04, 1)]
        rises = [(0, height / 0.04 / 7, 7)]
        for i in range(walls):
            legs += [((1, -1)[i % 2], 0, 25), *rises]
        obs, paid, terminated, truncated = walk(env, *legs, ((1, -1)[walls % 2], 0, 25))
        assert paid == 0 and not terminated
        if name == "hard":  # 200 steps of an episode do not suffice along straight lines
            assert truncated
        else:
            assert not truncated and obs[1] > 1 - height
            # The same way leads through the goal.
            env = gym.make("Maze-easy-goal-v0")
            env.reset()
            obs, paid, terminated, truncated = walk(env, *legs)
            assert paid == 1 and terminated and not truncated and height < obs[1] < 2 * height and 0.45 < obs[0] < 0.5


def test_no_step_passes_through_a_wall():
    rng = np.random.default_rng(0)
    for walls in curiosity.WALLS.values():
        maze = curiosity.Maze(walls)
        for _ in range(300):
            maze.reset()
            maze.x, maze.y = before = rng.random(2)
            (x, y), reward, terminated, *_ = maze.step(rng.uniform(-1, 1, 2).astype(np.float32))
            assert 0 <= x <= 1 and 0 <= y <= 1 and reward == 0 and not terminated
            assert np.abs(np.array([x, y]) - before).max() <= 0.04 + 1e-5
            heights = [(i + 1) / (walls + 1) for i in range(walls)]
            for i, height in enumerate(heights):
                if (before[1] < height) == (maze.y < height):
                    continue
                share = (height - before[1]) / (maze.y - before[1])
                at = before[0] + share * (maze.x - before[0])
                assert at > 0.8 if i % 2 == 0 else at < 0.2


def test_ranks_and_novelty_correlation_by_their_definitions():
    rng = np.random.default_rng(1)
    values = rng.integers(0, 6, 40)
    brute_force = [(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values]
    np.testing.assert_array_equal(curiosity.ranks(values), brute_force)

    path, u, visits = rng.integers(0, 12, (30, 4)), rng.random((30, 4)), rng.integers(0, 5, 400)
    seen = sorted(set(path.flatten().tolist()))
    u_ranks = curiosity.ranks(u.ravel()).reshape(u.shape)
    bonus = [np.mean([u_ranks[at] for at in np.ndindex(30, 4) if path[at] == cell]) for cell in seen]
    bonus = curiosity.ranks(np.array(bonus))
    rarity = curiosity.ranks(np.array([-visits[c] for c in seen]))
    expected = np.cov(bonus, rarity, bias=True)[0, 1] / np.sqrt(bonus.var() * rarity.var())
    assert curiosity.novelty_correlation(u, path, visits) == pytest.approx(expected, abs=1e-4)
    assert curiosity.novelty_correlation(u, path, np.zeros(400, int)) is None  # everything is equally new
    assert curiosity.novelty_correlation(1.0 / (1 + visits[path]), path, visits) == 1


def test_paired_p_counts_all_signs():
    differences = np.array([3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.0])
    sums = [abs(np.dot(signs, differences)) for signs in itertools.product([1, -1], repeat=7)]
    assert curiosity.paired_p(differences) == np.mean([s >= abs(differences.sum()) for s in sums])
    assert curiosity.paired_p([1.0] * 10) == 2 / 2**10


def test_interval_of_the_mean_is_that_of_all_sets_of_runs_that_can_be_drawn():
    curves = np.array([[0.0, 1.0], [1.0, 3.0], [5.0, 2.0], [20.0, 2.5]])
    means = np.array([curves[list(runs)].mean(0) for runs in itertools.product(range(4), repeat=4)])
    low, high = np.quantile(means, (0.025, 0.975), axis=0)
    found = curiosity.mean_and_interval(curves)
    np.testing.assert_allclose(found, [curves.mean(0), low, high])


# --- bonuses ---
def test_shuffling_moves_the_gains_of_steps_and_keeps_them_all():
    gains = torch.rand(64, 16)
    moved = curiosity.Bench().shuffled(gains)
    assert moved.shape == gains.shape and (moved != gains).float().mean() > 0.9
    assert sorted(gains.flatten().tolist()) == sorted(moved.flatten().tolist())


def test_counts_are_of_all_visits():
    bench, rng = curiosity.Bench(), np.random.default_rng(2)
    counter = collections.Counter()
    for _ in range(3):
        bench.path = list(rng.integers(0, 30, (50, 4)))
        path = np.stack(bench.path)
        counter.update(path.flatten().tolist())
        expected = [[counter[cell] ** -0.5 for cell in row] for row in path.tolist()]
        np.testing.assert_allclose(bench.inverse_root_counts(), expected)
        bench.record(bench.inverse_root_counts())
    assert bench.covered[-1] == len(counter) and sum(bench.visits) == 600


def test_rnd_is_larger_where_it_has_not_been():
    torch.manual_seed(0)
    bench = curiosity.Bench()
    known, new = torch.rand(256, 16, 2) - 2, torch.rand(256, 16, 2) + 1
    for _ in range(20):
        bench.rnd_error(known)
    of_known = bench.rnd_error(known).mean()  # first, for what is learnt of the new changes it
    assert bench.rnd_error(new).mean() > 10 * of_known


def test_intrinsic_advantages_reach_past_the_end_of_an_episode():
    torch.manual_seed(0)
    bench, bonus = curiosity.Bench(), torch.rand(5, 3)
    for parameter in bench.value.parameters():
        parameter.data.zero_()
    found = bench.intrinsic_advantages(bonus, torch.zeros(5, 3, 2), torch.zeros(3, 2), bdpg_mujoco.k_step_gae)
    expected = [sum((0.99 * 0.95) ** (i - t) * bonus[i] for i in range(t, 5)) for t in range(5)]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("arm", [*MAIN, *curiosity.CANDIDATES, "gain+averaged+value+shuffled"])
def test_the_edits_of_every_arm_fit_the_script(arm):
    script, arguments = curiosity.compile_arm(arm)
    script.check_args(script.Args(**arguments))


def test_an_edit_that_does_not_fit_is_named(monkeypatch):
    monkeypatch.setitem(curiosity.PARTS, "misfit", [("no such line", "")])
    with pytest.raises(ValueError, match="'no such line' stands 0 times in bdpg_mujoco.py"):
        curiosity.compile_arm("gain+misfit")


def test_bonuses_that_point_at_the_new_are_told_from_noise():
    """In miniature: the novelty correlation of counts is nearly perfect, that of RND clear, that of noise absent."""
    novelty = {}
    for arm in ("counts", "RND", "gain+shuffled"):
        jobs = [dict(maze="easy", arm=arm, seed=seed, total_timesteps=4 * 4096) for seed in (1, 2)]
        novelty[arm] = np.mean([curiosity.run_job(job)["novelty"] for job in jobs])
    assert novelty["counts"] > 0.8 and 0.2 < novelty["RND"] and abs(novelty["gain+shuffled"]) < 0.15


# --- the study ---
def test_report_is_of_all_that_is_finished_whatever_is_asked_for(tmp_path, capsys):
    """The gain visits ten cells more than nothing with every seed, its shuffled copy equally many."""
    rest = dict(total_timesteps=8192, novelty=0.5, git="0123456789", versions={"python": "3"}, hours=0.5)
    for maze, arm, seed in itertools.product(("easy", "easy-goal"), MAIN, range(1, 7)):
        cells = 100 + seed + (10 if arm == "gain" else 0)
        job = dict(maze=maze, arm=arm, seed=seed, covered=[50, cells]) | rest
        if maze == "easy-goal":
            job |= dict(first_found=1000 * seed if seed < 4 else None, success=seed / 6)
        with open(tmp_path / "finished.jsonl", "a") as file:
            print(json.dumps(job), file=file)
    args = curiosity.Args(mazes=("easy",), seeds=(2,), total_timesteps=8192, output=tmp_path)
    assert curiosity.main(args) == 0
    out = capsys.readouterr().out
    assert "0 runs to do, 60 done before" in out
    assert f"| gain | 6 | 114 (112 to 115) | {2 / 2**6:.2g} | {2 / 2**6:.2g} | 0.50 |" in out
    assert "| none | 6 | 104 (102 to 105) |  | 1 | 0.50 |" in out
    assert "| RND | 6 | 104 (102 to 105) | 3 | 2,000 | 0.58 | 1 | 1 | 0.50 |" in out
    assert "8,192 steps a run; commit `0123456`; python 3; 30.0 hours of one core." in out
    assert (tmp_path / "table.md").read_text() in out and (tmp_path / "curves.png").stat().st_size > 5000


def test_in_miniature_and_again(tmp_path, capsys):
    args = curiosity.Args(
        arms=("none", "gain"), mazes=("easy-goal",), seeds=(1, 1), total_timesteps=4096 * 2, workers=2, output=tmp_path
    )
    curiosity.main(args)
    out = capsys.readouterr().out
    assert "2 runs to do, 0 done before" in out
    finished = [json.loads(line) for line in (tmp_path / "finished.jsonl").read_text().splitlines()]
    assert {job["arm"] for job in finished} == {"none", "gain"}
    assert all(0 < job["covered"][0] <= job["covered"][1] <= 400 and len(job["covered"]) == 2 for job in finished)
    assert "| none | 1 |" in out and "| gain | 1 |" in out
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    curiosity.main(dataclasses.replace(args, output=moved))  # wherever the folder is
    assert "0 runs to do, 2 done before" in capsys.readouterr().out
    moved.rename(tmp_path)

    # An interruption leaves half a line.
    lines = (tmp_path / "finished.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "finished.jsonl").write_text("".join(lines[:1]) + lines[1][:50])
    curiosity.main(args)
    assert "1 runs to do, 1 done before" in capsys.readouterr().out
    again = [json.loads(line) for line in (tmp_path / "finished.jsonl").read_text().splitlines()]
    assert again == [finished[0], finished[1] | {"hours": again[1]["hours"]}]  # the same run again, bit for bit
    assert all(0 < 3600 * job["hours"] < 600 for job in again)


def test_a_run_that_gives_up_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(curiosity.PARTS, "broken", [("# --- minibatch updates", "fail('no more.')\n        #")])
    args = curiosity.Args(arms=("broken", "gain"), mazes=("easy",), seeds=(1,), total_timesteps=4096, output=tmp_path)
    assert curiosity.main(args) == 1
    captured = capsys.readouterr()
    assert "failed: easy, broken, 1, 4096: error: no more." in captured.err and "| gain | 1 |" in captured.out


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(workers=0), "--workers must be at least 1"),
        (dict(mazes=()), "--mazes and --seeds one or more"),
        (dict(total_timesteps=100), "--total-timesteps 100 is less than the"),
        (dict(seeds=(-1,)), "--seed must lie between 0 and"),
        (dict(mazes=("Hopper-v5",)), "Hopper-v5 is none of this study's mazes, which are easy, hard, easy-goal"),
        (dict(arms=("gain+luck",)), "gain+luck is not made of this study's parts, which are none, gain, RND"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        curiosity.main(curiosity.Args(output=tmp_path / "new", **wrong))
    assert stop.value.code == 2 and message in capsys.readouterr().err and not (tmp_path / "new").exists()

"""A run that was stopped goes on where it was; what is damaged or does not fit is refused and nothing written."""

import importlib
import signal
import sys
import time
import zipfile

import envpool  # noqa: F401  its first import keeps the frame of train() alive, and with it the lock of a run
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import MUJOCO, SCRIPTS, is_bdpg, newest, read_scalars, short_args, spy
from gymnasium.envs.classic_control import PendulumEnv

TINY = dict(env_id="ShortPendulum-v0", num_envs=2, num_steps=32, minibatch_size=16, update_epochs=1, seed=3)
BATCH = 64
PER_ITERATION = "charts/learning_rate"
on_mujoco = pytest.mark.parametrize("script", MUJOCO, indirect=True)
pytestmark = pytest.mark.usefixtures("lazy_disk")


class FixedPendulum(PendulumEnv):
    """Every episode starts in the same state: restarted environments are then where they were."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = np.array([1.0, 0.5])
        return self._get_obs(), {}


gym.register("FixedPendulum-v0", FixedPendulum, max_episode_steps=8)  # whole episodes fit into rollouts of 16 steps


def tiny_args(script, folder, iterations, **overrides):
    tiny = TINY | dict(run_dir=str(folder), cuda=False, total_timesteps=iterations * BATCH, save_every=1) | overrides
    return script.Args(**tiny | (dict(eta=0.1) if is_bdpg(script) else {}))


def run_folder(folder):
    (path,) = folder.iterdir()
    return path


def load(path):
    return torch.load(path, weights_only=True)


def resume(script, monkeypatch, path, *options):
    """What `python SCRIPT --resume PATH ...` does."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", "--resume", str(path), *map(str, options)])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        script.main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def assert_same(a, b):
    """Equal to the bit, whatever is nested in whatever."""
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
        assert a.dtype == b.dtype and torch.equal(a, b)
    else:
        assert a == b


# --- resuming ---


class Reached(Exception):
    pass


def test_learner_state_is_identical_at_the_resume_point(script, monkeypatch, tmp_path, short_games):
    script.train(short_args(script, tmp_path, iterations=2, save_every=1))
    folder = run_folder(tmp_path)
    saved = load(newest(folder))
    agents, optimizers = spy(monkeypatch, script, "Agent"), spy(monkeypatch, script, "make_optimizers")

    def first_reset(envs):
        raise Reached

    monkeypatch.setattr(script.Environments, "reset", first_reset)
    with pytest.raises(Reached):
        resume(script, monkeypatch, folder, "--total-timesteps", 10_000)
    assert_same(dict(agents[0][1].state_dict()), dict(saved["agent"]))
    assert_same({name: one.state_dict()["state"] for name, one in optimizers[0][1].items()}, saved["optimizers"])


@on_mujoco
def test_a_resumed_run_repeats_bit_for_bit(script, monkeypatch, tmp_path):
    """It starts new episodes with samples of its own, the same ones every time."""
    results = []
    for name in ("first", "again"):
        script.train(tiny_args(script, tmp_path / name, 2))
        resume(script, monkeypatch, run_folder(tmp_path / name), "--total-timesteps", 4 * BATCH)
        results.append(load(newest(run_folder(tmp_path / name))))
    for key in ("agent", "optimizers", "recent_scores", "iteration", "global_step"):
        assert_same(results[0][key], results[1][key])


@on_mujoco
def test_annealing_statistics_and_counters_go_on(script, monkeypatch, tmp_path):
    script.train(tiny_args(script, tmp_path, 6, save_every=3))
    folder = run_folder(tmp_path)
    before = read_scalars(folder)
    newest(folder).unlink()  # as if the run had died after the checkpoint of iteration 3 and before that of iteration 6
    at_3 = load(newest(folder))
    time.sleep(1.1)  # TensorBoard orders a run's event files by the second of their making
    resume(script, monkeypatch, folder)
    after, checkpoint = read_scalars(folder), load(newest(folder))
    assert checkpoint["iteration"] == 6 and checkpoint["global_step"] == 6 * BATCH
    assert after[PER_ITERATION] == before[PER_ITERATION]
    assert [value for _, value in after[PER_ITERATION]] == pytest.approx([6e-4 * (1 - i / 6) for i in range(6)])
    for name in ("reward_stats", "u_stats") if is_bdpg(script) else ("reward_stats",):
        assert checkpoint["agent"][f"{name}.count"] == at_3["agent"][f"{name}.count"] + 3 * BATCH == 6 * BATCH
    assert checkpoint["agent"]["obs_stats.count"] == at_3["agent"]["obs_stats.count"] + 3 * BATCH
    assert checkpoint["seconds"] > at_3["seconds"]
    assert checkpoint["recent_scores"][: len(at_3["recent_scores"])] == at_3["recent_scores"]


def test_a_resumed_run_learns_what_an_unbroken_one_would_have(mujoco, monkeypatch, tmp_path):
    """Policy and environments without chance: the first iteration after the break has the same rewards and statistics
    as without it."""
    options = dict(env_id="FixedPendulum-v0", num_steps=16, log_std_init=-10.0, minibatch_size=32, learning_rate=0.0)
    options |= dict(adversarial_learning_rate=0.0, total_timesteps=3 * 32)
    mujoco.train(tiny_args(mujoco, tmp_path / "straight", 3, **options))
    straight = run_folder(tmp_path / "straight")
    mujoco.train(tiny_args(mujoco, tmp_path / "broken", 3, **options | dict(total_timesteps=2 * 32)))
    broken = run_folder(tmp_path / "broken")
    time.sleep(1.1)  # TensorBoard orders a run's event files by the second of their making
    resume(mujoco, monkeypatch, broken, "--total-timesteps", 3 * 32)
    a, b = load(newest(straight))["agent"], load(newest(broken))["agent"]
    for name in ("obs_stats", "reward_stats"):
        for moment in ("mean", "std"):
            torch.testing.assert_close(a[f"{name}.{moment}"], b[f"{name}.{moment}"], rtol=0.02, atol=0.02)
    log_a, log_b = (read_scalars(folder)["charts/episodic_return"] for folder in (straight, broken))
    assert [step for step, _ in log_a] == [step for step, _ in log_b]
    np.testing.assert_allclose([value for _, value in log_a], [value for _, value in log_b], rtol=1e-3)


@on_mujoco
def test_curves_neither_jump_nor_overlap(script, monkeypatch, tmp_path):
    script.train(tiny_args(script, tmp_path, 6, save_every=3))
    folder = run_folder(tmp_path)
    newest(folder).unlink()
    time.sleep(1.1)  # TensorBoard orders a run's event files by the second of their making
    resume(script, monkeypatch, folder, "--total-timesteps", 8 * BATCH)
    assert run_folder(tmp_path) == folder  # no second folder
    log = read_scalars(folder)
    assert {step for step, _ in log[PER_ITERATION]} == {i * BATCH for i in range(1, 9)}
    for tag, events in log.items():
        steps = [step for step, _ in events]
        if tag == "charts/episodic_return":  # two episodes may end in the same step
            assert steps == sorted(steps)
            assert max(steps.count(step) for step in set(steps)) <= 2, tag
        else:
            assert all(a < b for a, b in zip(steps, steps[1:], strict=False)), tag


@on_mujoco
def test_total_timesteps_may_grow(script, monkeypatch, tmp_path):
    script.train(tiny_args(script, tmp_path, 2))
    folder = run_folder(tmp_path)
    time.sleep(1.1)
    resume(script, monkeypatch, folder, "--total-timesteps", 4 * BATCH)
    checkpoint = load(newest(folder))
    assert checkpoint["iteration"] == 4 and checkpoint["args"]["total_timesteps"] == 4 * BATCH
    rates = [value for _, value in read_scalars(folder)[PER_ITERATION]]
    assert rates == pytest.approx([6e-4, 3e-4, 3e-4, 1.5e-4])  # the second half anneals over the new length


@on_mujoco
def test_environments_of_other_runs_and_of_resumed_ones_have_other_seeds(script, monkeypatch, tmp_path):
    made = spy(monkeypatch, script.Environments, "__init__")
    script.train(tiny_args(script, tmp_path / "3", 1))
    resume(script, monkeypatch, run_folder(tmp_path / "3"), "--total-timesteps", 2 * BATCH)
    script.train(tiny_args(script, tmp_path / "4", 1, seed=4))
    seeds = [seed + i for (_, _, seed), _ in made for i in range(TINY["num_envs"])]  # environment i gets seed + i
    assert len(set(seeds)) == len(seeds) == 3 * TINY["num_envs"]
    assert all(0 <= seed < 2**31 for seed in seeds)  # what ALE takes
    script.train(tiny_args(script, tmp_path / "again", 1))
    assert made[3][0][2] == made[0][0][2]


def test_a_stop_in_the_last_iteration_is_no_early_stop(mujoco, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(mujoco, "STOP_SIGNALS", [signal.SIGINT])
    with pytest.raises(SystemExit, match="130"):
        mujoco.train(tiny_args(mujoco, tmp_path / "two", 2))
    assert "stopped early" in capsys.readouterr().out
    mujoco.train(tiny_args(mujoco, tmp_path / "one", 1))
    assert "stopped early" not in capsys.readouterr().out


# --- refusing to resume ---


def refusal(name, monkeypatch, capsys, path, *options):
    """The one sentence with which the script of this name refuses to resume; the folder stays as it is."""
    contents = lambda: {file: file.is_file() and file.read_bytes() for file in path.iterdir()}  # noqa: E731
    before = contents() if path.is_dir() else None
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        resume(importlib.import_module(name), monkeypatch, path, *options)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert before is None or before == contents()
    return line


def test_other_arguments_may_not_change(trained, monkeypatch, capsys):
    expected = "error: a resumed run keeps its arguments: leave out all but --resume, --total-timesteps and --cuda."
    for name in SCRIPTS:
        for changed in (("--gamma", 0.9), ("--num-envs", 4), ("--run-dir", "elsewhere"), ("--no-anneal-lr",)):
            assert refusal(name, monkeypatch, capsys, trained[name], "--total-timesteps", 960, *changed) == expected


def test_finished_run_is_not_resumed(trained, monkeypatch, capsys):
    expected = "error: this run is complete; to go on, give a larger --total-timesteps."
    for name in SCRIPTS:
        assert refusal(name, monkeypatch, capsys, trained[name]) == expected


def changed(checkpoint, path, value):
    """A copy of nested dictionaries with another value at this path; None takes the key out."""
    key, *rest = path
    copy = dict(checkpoint)
    if rest:
        copy[key] = changed(copy[key], rest, value)
    elif value is None:
        del copy[key]
    else:
        copy[key] = value
    return copy


STATE = ("optimizers", "main")
MOMENTS = (*STATE, 2, "exp_avg")
SQUARES = (*STATE, 2, "exp_avg_sq")
STEP = (*STATE, 2, "step")


@pytest.mark.parametrize(
    "path, value",
    [
        (("agent",), None),
        (("agent",), 3),
        (("args",), None),
        (("args", "warp"), 9),
        (("agent", "reward_stats.mean"), torch.zeros(7)),
        (("agent", "reward_stats.mean"), None),
        (("agent", "reward_stats.mean"), torch.tensor(torch.nan, dtype=torch.float64)),
        (("agent", "reward_stats.var"), torch.tensor(torch.nan, dtype=torch.float64)),
        (("agent", "reward_stats.var"), torch.tensor(-1.0, dtype=torch.float64)),
        (("agent", "reward_stats.std"), torch.tensor(torch.inf, dtype=torch.float64)),
        *((("agent", f"reward_stats.{name}"), torch.tensor(-1.0, dtype=torch.float64)) for name in ("std", "count")),
        (("agent", "reward_stats.mean"), "zero"),
        *((path, torch.zeros(64)) for path in (MOMENTS, SQUARES, STEP)),
        *((STEP, value) for value in ("one", None)),
        *((path, torch.zeros(())) for path in (MOMENTS, SQUARES)),
        *((path, torch.zeros(1, 1).expand(64, 64)) for path in (MOMENTS, SQUARES)),  # Adam would write past its end
        *((path, torch.eye(64).to_sparse()) for path in (MOMENTS, SQUARES)),
        *((path, None) for path in (MOMENTS, SQUARES)),
        *((("iteration",), value) for value in ("2", 1.5, -1, 0, [2])),
        *((("recent_scores",), value) for value in (3, ["a"], [torch.nan], {1.0: 2.0})),
        *((("seconds",), value) for value in ("1", [1.0], torch.nan)),
        (("optimizers", "main"), None),
        *(((key,), None) for key in ("iteration", "seconds", "recent_scores", "optimizers")),
    ],
    ids=lambda value: "/".join(map(str, value)) if isinstance(value, tuple) else str(getattr(value, "shape", value)),
)
def test_what_does_not_fit_is_refused_before_anything_is_written(trained, monkeypatch, tmp_path, capsys, path, value):
    """Each part of a checkpoint in turn missing, of another type or shape, or impossible."""
    checkpoint = changed(load(newest(trained["ppo_mujoco"])), path, value)
    torch.save(checkpoint, tmp_path / "checkpoint-000000000064.pt")
    message = refusal("ppo_mujoco", monkeypatch, capsys, tmp_path, "--total-timesteps", 4 * BATCH)
    assert str(tmp_path) in message and "ppo_mujoco" in message or "does not fit this script" in message, message


def test_checkpoints_of_other_scripts_are_not_resumed(trained, monkeypatch, capsys):
    for maker, name in zip(SCRIPTS, SCRIPTS[1:] + SCRIPTS[:1], strict=True):
        message = refusal(name, monkeypatch, capsys, trained[maker], "--total-timesteps", 960)
        assert f"{name}.py" in message or "does not fit this script" in message


def test_what_is_no_checkpoint_is_not_resumed(trained, monkeypatch, tmp_path, capsys):
    content = newest(trained["bdpg_mujoco"]).read_bytes()
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    empty.mkdir(), broken.mkdir()
    for path in (tmp_path / "missing", empty, newest(trained["bdpg_mujoco"]).parent / "run.json"):
        assert str(path) in refusal("bdpg_mujoco", monkeypatch, capsys, path)
    for what in (b"", content[:5000], content[:-1], bytes(range(256)) * 40):
        (broken / "checkpoint-000000000064.pt").write_bytes(what)
        assert "no intact checkpoint" in refusal("bdpg_mujoco", monkeypatch, capsys, broken, "--total-timesteps", 960)
    torch.save({"weights": torch.zeros(3)}, broken / "checkpoint-000000000064.pt")
    assert "no intact checkpoint" in refusal("bdpg_mujoco", monkeypatch, capsys, broken, "--total-timesteps", 960)


def test_a_flipped_byte_of_a_tensor_is_refused(trained, monkeypatch, tmp_path, capsys):
    """In every script: a plausible number in the place of another one is not noticed later."""
    for name in SCRIPTS:
        path = newest(trained[name])
        content, file = bytearray(path.read_bytes()), tmp_path / name / path.name
        with zipfile.ZipFile(path) as archive:
            record = max(archive.infolist(), key=lambda info: info.file_size)
        content[record.header_offset + record.file_size // 2] ^= 1
        file.parent.mkdir()
        file.write_bytes(content)
        message = refusal(name, monkeypatch, capsys, file.parent, "--total-timesteps", 960)
        assert str(file) in message and "checksum" in message, message


# --- saving ---


@on_mujoco
def test_newest_three_are_kept_and_need_no_pickled_code(script, tmp_path):
    script.train(tiny_args(script, tmp_path, 5))
    folder = run_folder(tmp_path)
    names = [path.name for path in sorted(folder.glob("checkpoint-*"))]
    assert names == [f"checkpoint-{i * BATCH:012d}.pt" for i in (3, 4, 5)]
    checkpoint = load(newest(folder))  # with weights_only=True
    held = {"agent", "optimizers", "args", "versions", "script", "command", "git", "python", "iteration", "global_step"}
    assert checkpoint.keys() == held | {"recent_scores", "seconds"}
    assert {"obs_stats.mean", "reward_stats.var"} <= checkpoint["agent"].keys()
    assert ("u_stats.count" in checkpoint["agent"]) == is_bdpg(script)


def test_a_checkpoint_does_not_choose_what_is_imported(trained, monkeypatch, tmp_path, capsys):
    checkpoint = changed(load(newest(trained["ppo_mujoco"])), ("args", "env_id"), "antigravity:Task-v0")
    torch.save(checkpoint, tmp_path / "checkpoint-000000000064.pt")
    message = refusal("ppo_mujoco", monkeypatch, capsys, tmp_path, "--total-timesteps", 4 * BATCH)
    assert "add --env-id antigravity:Task-v0" in message and "antigravity" not in sys.modules

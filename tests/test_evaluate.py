"""evaluate.py: honest numbers, an untouched agent, pictures that exist, and one sentence for whatever is wrong."""

import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    BDPG,
    DISTRIBUTIONAL,
    MUJOCO,
    PPO,
    SCRIPTS,
    change_games,
    lambda_weights,
    n_step_target,
    newest,
    rollout,
    short_args,
    spy,
)

import evaluate

ROOT = Path(evaluate.__file__).resolve().parent


@pytest.fixture
def hopper(trained):
    return trained["bdpg_mujoco"]


def run(path, **options):
    return evaluate.evaluate(evaluate.Args(path=path, **options))


# --- playing ---


@pytest.mark.parametrize("name", SCRIPTS)
def test_agent_is_unchanged_to_the_bit(trained, name, monkeypatch, tmp_path, short_games):
    path = newest(trained[name])
    before, content = torch.load(path, weights_only=True)["agent"], path.read_bytes()
    rebuilt = spy(monkeypatch, evaluate, "rebuild")
    run(path, episodes=2, output=tmp_path / "e.json")
    after = rebuilt[0][1][0].state_dict()
    assert before.keys() == after.keys()
    for key in before:
        assert torch.equal(before[key], after[key]), key
    assert path.read_bytes() == content


def test_the_example_still_runs(tmp_path):
    """The trained agent of the README fits the script as it is now."""
    (path,) = (ROOT / "examples").glob("*/checkpoint-*.pt")
    assert path.stat().st_size < 500_000
    assert run(path, episodes=2, output=tmp_path / "e.json")["mean"] > 3000


def test_same_seed_same_scores(hopper, tmp_path):
    options = dict(episodes=5, output=tmp_path / "e.json")
    first = run(hopper, **options)
    again = run(hopper, report=True, **options)  # looking closer must not change the game
    assert (first["scores"], first["lengths"]) == (again["scores"], again["lengths"])
    assert run(hopper, seed=5, **options)["scores"] != first["scores"]
    mode = run(hopper, deterministic=True, **options)
    assert mode["scores"] != first["scores"]
    assert mode["scores"] == run(hopper, deterministic=True, **options)["scores"]


def test_json_says_what_was_measured(hopper, tmp_path):
    result = run(hopper, episodes=11, output=tmp_path / "e.json", seed=70)
    saved = json.loads((tmp_path / "e.json").read_text())
    assert saved == result
    scores = np.array(saved["scores"])
    assert len(scores) == len(saved["lengths"]) == len(saved["seeds"]) == 11
    assert saved["mean"] == pytest.approx(sum(scores) / 11)
    assert saved["std"] == pytest.approx(np.sqrt(np.mean((scores - scores.mean()) ** 2)))
    assert saved["median"] == sorted(scores)[5]
    assert saved["mean_95"][0] < saved["mean"] < saved["mean_95"][1]
    assert saved["seeds"] == [70, 70, 71, 71, 72, 72, 73, 74, 75, 76, 77]  # 8 environments, the first three play twice
    assert saved["checkpoint"] == str(newest(hopper)) and saved["global_step"] == 64
    assert saved["script"] == "bdpg_mujoco.py" and saved["env_id"] == "Hopper-v5" and saved["deterministic"] is False
    assert saved["versions"]["torch"] and saved["command"].startswith("python ")


def test_bootstrap_interval_has_the_width_of_the_standard_error():
    scores = np.random.default_rng(1).normal(10, 3, 200)
    low, high = evaluate.summarise(scores)["mean_95"]
    assert high - low == pytest.approx(2 * 1.96 * 3 / np.sqrt(200), rel=0.15)
    assert evaluate.summarise([5.0])["mean_95"] == [5.0, 5.0]


class CountingEnvironments:
    """Episodes take lengths[i] steps of reward i + 1; each has so many lives."""

    def __init__(self, lengths, lives=1):
        self.lengths, self.lives, self.seed, self.clock = np.array(lengths), lives, 0, np.zeros(len(lengths), dtype=int)

    def reset(self):
        return self.clock[:, None].copy()

    def step(self, actions):
        self.clock += 1
        ended, terminated = self.clock % self.lengths == 0, self.clock % (self.lengths // self.lives) == 0
        return self.reset(), np.arange(len(ended)) + 1.0, terminated, np.zeros_like(ended), None, ended


STILL_AGENT = SimpleNamespace(
    observe=lambda obs: torch.as_tensor(obs).float(),
    trunk=lambda obs: obs,
    policy=lambda obs, c: torch.distributions.Categorical(logits=torch.zeros(len(obs), 2)),
)


def test_short_episodes_are_not_preferred():
    episodes, _ = evaluate.play(STILL_AGENT, CountingEnvironments([2, 20]), [2, 2])
    assert [(episode["score"], episode["length"]) for episode in episodes] == [(2, 2), (2, 2), (40, 20), (40, 20)]
    assert not any(episode["cut"] for episode in episodes)


def test_lost_life_ends_the_learning_episode_but_not_the_game():
    episodes, record = evaluate.play(STILL_AGENT, CountingEnvironments([6, 12], lives=3), [1, 1], keep=100)
    assert [episode["length"] for episode in episodes] == [6, 12]
    assert record.dones[:, 1].nonzero().flatten().tolist() == [3, 7, 11]
    assert record.counts.sum(0).tolist() == [6, 12]  # what is played beyond the quota does not count
    assert record.embeddings[:, 0].flatten().tolist() == [*range(13)]  # one more than steps
    for keep in (5, 12):
        _, record = evaluate.play(STILL_AGENT, CountingEnvironments([6, 12]), [1, 1], keep=keep)
        assert len(record.rewards) == keep and record.embeddings[-1].flatten().tolist() == [keep, keep]


def test_a_task_that_never_ends_is_cut():
    episodes, _ = evaluate.play(STILL_AGENT, CountingEnvironments([4, 10**9]), [3, 2], max_steps=7)
    assert [(episode["length"], episode["cut"]) for episode in episodes] == [(4, False)] * 3 + [(7, True)]
    exactly, _ = evaluate.play(STILL_AGENT, CountingEnvironments([7]), [2], max_steps=7)
    assert [(episode["length"], episode["cut"]) for episode in exactly] == [(7, False)] * 2


def test_cut_episodes_are_counted_and_named(hopper, tmp_path, capsys):
    result = run(hopper, episodes=11, max_steps=3, seed=70, output=tmp_path / "e.json")
    assert result["lengths"] == [3] * 11 and result["cut_at_max_steps"] == 11 and result["max_steps"] == 3
    assert result["seeds"] == [*range(70, 81)]  # eight environments, then three of the next eight
    assert "11 cut at --max-steps 3\n" in capsys.readouterr().out
    whole = run(hopper, episodes=2, output=tmp_path / "e.json")
    assert whole["cut_at_max_steps"] == 0 and "--max-steps" not in capsys.readouterr().out


# --- beliefs ---


@pytest.mark.parametrize("name", SCRIPTS)
def test_looking_back_against_brute_force(name):
    """A critic whose value is the observation itself, and rewards in the unit of the environment."""
    script = importlib.import_module(name)
    rewards, g, next_g, terminations, dones = rollout(40, 3, seed=4)
    critic = SimpleNamespace(value=lambda c: c, reward_stats=SimpleNamespace(std=torch.tensor(2.0)))
    critic.observe, critic.trunk = lambda obs: torch.as_tensor(obs).unsqueeze(-1), lambda obs: obs
    cut_short = [(t, i, next_g[t, i]) for t, i in (dones & ~terminations).nonzero().tolist()]
    record = SimpleNamespace(embeddings=torch.cat([g, next_g[-1:]]).unsqueeze(-1), rewards=2 * rewards, dones=dones)
    record.terminations, record.cut_short = terminations, cut_short
    args = SimpleNamespace(gamma=0.9, gae_lambda=0.8, bootstrap_length=5, target="lambda")
    truth = evaluate.look_back(script, critic, args, record)
    for t in range(40):
        for i in range(3):
            returns = [n_step_target(rewards, next_g, terminations, dones, 0.9, t, i, n) for n in (1, 2, 3, 4, 5, 1000)]
            assert truth.returns[t, i].item() == pytest.approx(returns[-1], abs=1e-5)
            assert truth.x[t, i].item() == pytest.approx(lambda_weights(0.8, 5) @ returns[:5], abs=1e-5)
            end = next((step for step in range(t, 40) if dones[step, i]), 39)
            assert truth.known[t, i] == (terminations[end, i] or 0.9 ** (end - t + 1) <= 0.25)
    assert truth.u is None


@pytest.mark.parametrize("name", SCRIPTS)
def test_looking_back_has_the_scale_of_training(trained, name):
    checkpoint, path, script = evaluate.load(trained[name])
    agent, args, envs, _ = evaluate.rebuild(script, checkpoint, path, 2)
    with torch.no_grad():
        _, record = evaluate.play(agent, envs, [1, 1], max_steps=60, keep=60)
        record.rewards[3] = 1e9  # clipped
        truth = evaluate.look_back(script, agent, args, record)
    assert truth.returns.abs().max() < 100
    if name in BDPG:
        assert truth.u.shape == truth.x.shape and (truth.u >= 0).all() and (truth.u <= args.u_bar).all()
    else:
        assert truth.u is None  # no encoder, no information gain


@pytest.mark.parametrize("name", BDPG)
def test_information_gain_is_that_of_gaussians(trained, name):
    """The divergence of q(z|x) from q(z|g), integrated over samples of z; x is the λ-average whatever the target."""
    checkpoint, path, script = evaluate.load(trained[name])
    agent, args, envs, _ = evaluate.rebuild(script, checkpoint, path, 2)
    args.target = "sr"
    asked = []
    agent.return_model.encode = lambda x, b, c: (
        asked.append(x) or type(agent.return_model).encode(agent.return_model, x, b, c)
    )
    with torch.no_grad():
        _, record = evaluate.play(agent, envs, [1, 1], max_steps=20, keep=20)
        truth = evaluate.look_back(script, agent, args, record)
        x, g = asked
        b, c = agent.return_model.centre(record.embeddings[:-1]), record.embeddings[:-1]
        q_x, q_g = agent.return_model.encode(x, b, c), agent.return_model.encode(g, b, c)
        z = q_x.sample((20_000,))
        expected = (q_x.log_prob(z) - q_g.log_prob(z)).sum(-1).mean(0)
    torch.testing.assert_close(truth.u, expected, rtol=0.1, atol=0.02)
    assert (x != truth.x).any()


def test_calibrated_samples_look_calibrated():
    states, levels = 20_000, torch.linspace(0, 1, 11)
    mean, std = torch.randn(states), torch.rand(states) + 0.5
    samples = mean + std * torch.randn(64, states)
    pit = evaluate.probability_integral(samples, mean + std * torch.randn(states))
    assert (pit > 0).all() and (pit < 1).all()
    assert torch.histc(pit, 20, 0, 1).div(states / 20).sub(1).abs().max() < 0.15
    torch.testing.assert_close(evaluate.coverage(pit, levels), levels, rtol=0, atol=0.015)
    # Too narrow, too wide, shifted:
    truth = mean + std * torch.randn(states)
    at_80 = torch.tensor([0.8])
    assert evaluate.coverage(evaluate.probability_integral(mean + (samples - mean) / 2, truth), at_80) < 0.55
    assert evaluate.coverage(evaluate.probability_integral(mean + (samples - mean) * 2, truth), at_80) > 0.95
    assert evaluate.probability_integral(samples - 2, truth).mean() > 0.8
    # A distribution on a few values, ties and all, is calibrated too; one without spread never is.
    dice = evaluate.probability_integral(torch.randint(6, (64, states)), torch.randint(6, (states,)))
    torch.testing.assert_close(evaluate.coverage(dice, levels), levels, rtol=0, atol=0.015)
    assert evaluate.coverage(evaluate.probability_integral(mean.expand(64, -1), truth), at_80) == 0


def test_metrics_of_a_known_distribution():
    """Samples from N(mean, 1), truths from N(mean + shift, scale): quantiles of the residuals are known."""
    states, normal = 40_000, torch.distributions.Normal(0.0, 1.0)
    mean = 3 * torch.randn(states)
    samples = mean + torch.randn(64, states)
    for shift, scale in ((0.0, 1.0), (0.7, 1.0), (0.0, 3.0)):
        truth = mean + shift + scale * torch.randn(states)
        pit = evaluate.probability_integral(samples, truth)
        metrics = evaluate.distribution_metrics(samples, truth, pit)
        std, levels = (9 + scale**2) ** 0.5, (torch.arange(100) + 0.5) / 100
        inside = torch.tensor([-1.2816, 1.2816])
        low, high = normal.cdf((inside - shift) / scale).tolist()
        w1 = (shift + (scale - 1) * normal.icdf(levels)).abs().mean().item()
        assert metrics["coverage_80"] == pytest.approx(high - low, abs=0.015)
        assert metrics["w1"] == pytest.approx(w1 / std, abs=0.02)
        assert metrics["spread"] == pytest.approx(1 / std, rel=0.02)
        assert metrics["explained_variance"] == pytest.approx(9 / std**2, abs=0.02)
    same = evaluate.distribution_metrics(samples, torch.ones(states), torch.rand(states))
    assert same["w1"] is None and same["spread"] is None  # divided by a spread of 0, and no number in JSON


# --- pictures ---


@pytest.fixture
def drawable():
    """Skips where this machine has no OpenGL."""
    if sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        gym.make("Hopper-v5", render_mode="rgb_array").unwrapped.mujoco_renderer.render("rgb_array")
    except Exception as error:
        pytest.skip(f"no OpenGL: {error}")


@pytest.mark.parametrize("name", SCRIPTS)
def test_video_and_report(trained, name, tmp_path, request, monkeypatch):
    import imageio.v3 as iio

    change_games(monkeypatch, max_num_frames_per_episode=1000)  # long enough for returns that are known
    if name in MUJOCO:
        request.getfixturevalue("drawable")
    distributional = name in DISTRIBUTIONAL
    options = dict(video=True, video_steps=4, report=distributional)
    result = run(trained[name], episodes=1, **options, output=tmp_path / "e.json")
    frames = iio.imread(tmp_path / "e.mp4")
    assert frames.shape == (4, 720, 1280, 3)
    game, beliefs = frames[:, 100:620, 50:500], frames[:, :, 560:]
    assert game.std() > 10 and beliefs.std() > 10
    assert (beliefs[0] != beliefs[-1]).any()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.json", "e.mp4", "e.png"][: 2 + distributional]
    if distributional:
        picture = iio.imread(tmp_path / "e.png")
        assert picture.shape[0] > 900 and picture.shape[1] > 1200 and picture.std() > 20
        report = json.loads((tmp_path / "e.json").read_text())["report"]
        assert report == result["report"] and report["states"] > 0
        for truth in ("true_returns", "targets"):
            assert 0 <= report[truth]["coverage_80"] <= 1 and report[truth]["w1"] > 0 and report[truth]["spread"] > 0


def test_task_of_a_module_can_be_filmed(mujoco, drawable, tmp_path, monkeypatch):
    task = user_task(tmp_path, monkeypatch)
    args = short_args(mujoco, tmp_path / "runs", env_id=task, iterations=1)
    mujoco.train(args)
    result = run(tmp_path / "runs", env_id=task, episodes=1, max_steps=5, video=True, video_steps=3)
    assert result["env_id"] == task
    (movie,) = tmp_path.glob("runs/*/evaluation.mp4")
    assert movie.stat().st_size > 1000


@pytest.mark.parametrize("env_id", ["BreakoutNoFrameskip-v4", "ALE/Breakout-v5"])
def test_filmed_game_is_the_one_that_the_agent_sees(atari, env_id):
    import cv2

    envs, camera, _ = evaluate.make_camera(atari, atari.Args(env_id=env_id), seed=3)
    obs = envs.reset()
    rng = np.random.default_rng(0)
    ends = 0
    for _ in range(200):  # past lost lives, after which FIRE is pressed in both
        action = rng.integers(0, 4, 1)
        picture = camera(action)
        grey = picture @ np.array([0.299, 0.587, 0.114])
        assert np.abs(cv2.resize(grey, (84, 84), interpolation=cv2.INTER_AREA) - obs[0, -1]).mean() < 1
        obs, _, terminations, *_ = envs.step(action)
        ends += terminations[0]
    assert ends > 1


# --- bad input ---


def fails(capsys, path, **options):
    """Runs into one sentence and exit code 2, and leaves every file as it was."""
    folder = path if path.is_dir() else path.parent
    before = {file: file.read_bytes() for file in folder.iterdir() if file.is_file()} if folder.exists() else {}
    with pytest.raises(SystemExit) as exit:
        run(path, **options)
    message = capsys.readouterr().err
    assert exit.value.code == 2
    assert message.startswith("error: ") and len(message.splitlines()) == 1
    assert before == (
        {file: file.read_bytes() for file in folder.iterdir() if file.is_file()} if folder.exists() else {}
    )
    return message


def test_missing_and_damaged_checkpoints(hopper, tmp_path, capsys):
    assert "there is no checkpoint" in fails(capsys, tmp_path)
    assert "there is no checkpoint" in fails(capsys, tmp_path / "nowhere")
    file = tmp_path / "checkpoint-1.pt"
    for content in (b"", bytes(range(256)) * 40, newest(hopper).read_bytes()[:9000]):
        file.write_bytes(content)
        assert "not a readable checkpoint" in fails(capsys, tmp_path)
    for content in ({"weights": torch.zeros(3)}, [1, 2], torch.zeros(3)):
        torch.save(content, file)
        assert "not a readable checkpoint" in fails(capsys, file)


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_changed_byte_is_refused(trained, name, tmp_path, capsys):
    content, file = bytearray(newest(trained[name]).read_bytes()), tmp_path / "checkpoint-1.pt"
    weights = next(iter(torch.load(newest(trained[name]), weights_only=True)["agent"].values()))
    place = content.index(weights.numpy().tobytes())
    content[place + 2] ^= 64
    file.write_bytes(content)
    assert "no intact checkpoint" in fails(capsys, file)


def test_hand_edited_checkpoints(hopper, tmp_path, capsys):
    good, file = torch.load(newest(hopper), weights_only=True), tmp_path / "checkpoint-1.pt"
    args, agent = good["args"], good["agent"]
    bad = [
        ({"script": "evil.py"}, "not one of the training scripts"),
        ({"script": "nothing_atari.py"}, "not one of the training scripts"),
        ({"script": "../bdpg_mujoco.py"}, "not one of the training scripts"),
        ({"script": "bdpg_mujoco.py\n"}, "not one of the training scripts"),
        ({"script": 3}, "not one of the training scripts"),
        ({"script": "bdpg_atari.py"}, "no intact checkpoint of this bdpg_atari.py"),
        ({"script": "ppo_wgan_mujoco.py"}, "no intact checkpoint of this ppo_wgan_mujoco.py"),
        ({"args": args | {"warp": 9}}, "no intact checkpoint"),
        ({"args": None}, "no intact checkpoint"),
        ({"args": args | {"gamma": "much"}}, "does not fit"),
        ({"args": args | {"bootstrap_length": "long"}}, "does not fit"),
        ({"args": args | {"gamma": 7.0}}, "--gamma"),
        ({"args": args | {"latent_dim": 5}}, "does not fit"),
        ({"args": args | {"env_id": "Nope-v0"}}, "Nope-v0 cannot be made"),
        ({"args": args | {"env_id": "Pendulum-v1"}}, "does not fit"),
        ({"args": args | {"env_id": 5}}, "5 cannot be made"),
        ({"agent": {key: value for key, value in agent.items() if key != "obs_stats.mean"}}, "does not fit"),
        ({"agent": agent | {"policy.log_std": torch.zeros(9)}}, "does not fit"),
        ({"agent": agent | {"policy.log_std": torch.full((3,), float("nan"))}}, "policy.log_std cannot be nan"),
        ({"agent": agent | {"obs_stats.var": -agent["obs_stats.var"]}}, "obs_stats.var cannot be -"),
        ({"agent": 5}, "no intact checkpoint"),
        ({"global_step": None}, "does not fit"),
    ]
    for change, expected in bad:
        torch.save(good | change, file)
        assert expected in fails(capsys, file), change
    for key, expected in (("args", "no intact"), ("agent", "no intact"), ("global_step", "does not fit")):
        torch.save({name: value for name, value in good.items() if name != key}, file)
        assert expected in fails(capsys, file), key


def user_task(folder, monkeypatch):
    """A module outside this repository that registers a task and leaves a trace where it was imported."""
    code = f"""
        import gymnasium, pathlib
        pathlib.Path({str(folder / "imported")!r}).touch()
        gymnasium.register("Task-v0", "gymnasium.envs.mujoco.hopper_v5:HopperEnv", max_episode_steps=50)
    """
    (folder / "user_module.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "user_module", raising=False)
    return "user_module:Task-v0"


def test_a_checkpoint_chooses_no_code(mujoco, tmp_path, capsys, monkeypatch):
    task = user_task(tmp_path, monkeypatch)
    mujoco.train(short_args(mujoco, tmp_path / "runs", env_id=task, iterations=1))
    (folder,) = (tmp_path / "runs").iterdir()
    capsys.readouterr()
    (tmp_path / "imported").unlink()
    del sys.modules["user_module"]
    assert "would import the module 'user_module'" in fails(capsys, folder)
    assert "--env-id user_module:Task-v0" in fails(capsys, folder)
    assert "is of an agent for" in fails(capsys, folder, env_id="user_module:Other-v0")
    assert "is of an agent for" in fails(capsys, folder, env_id="Task-v0")
    assert not (tmp_path / "imported").exists()
    assert run(folder, env_id=task, episodes=1)["env_id"] == task
    assert (tmp_path / "imported").exists()


def test_bad_options(hopper, tmp_path, capsys):
    assert "--episodes must lie between 1 and 2**30, not be 0." in fails(capsys, hopper, episodes=0)
    assert "--video-steps" in fails(capsys, hopper, video_steps=0)
    assert "--max-steps" in fails(capsys, hopper, max_steps=-3)
    assert "--seed" in fails(capsys, hopper, seed=-1)
    assert "--seed must lie between 0 and 2**30" in fails(capsys, hopper, seed=2**31)  # ALE takes no more


def test_output_never_takes_the_place_of_something_else(hopper, tmp_path, capsys):
    (tmp_path / "e.mp4").mkdir()
    for output in ("nowhere/e.json", "e.pt", ".", "e.json", newest(hopper), hopper / "run.json"):
        assert "cannot be written" in fails(capsys, hopper, output=tmp_path / output), output
    (tmp_path / "e.mp4").rmdir()
    (tmp_path / "e.json").symlink_to("e.json")  # a loop, which is replaced
    assert run(hopper, episodes=1, output=tmp_path / "e.json") == json.loads((tmp_path / "e.json").read_text())
    (tmp_path / "n.json").symlink_to(hopper / "run.json")
    record = (hopper / "run.json").read_text()
    run(hopper, episodes=1, output=tmp_path / "n.json")
    assert (hopper / "run.json").read_text() == record


@pytest.mark.parametrize("name", PPO)
def test_plain_ppo_has_no_report(trained, name, capsys):
    assert f"plain PPO ({name}.py)" in fails(capsys, trained[name], report=True)


def test_missing_encoder(hopper, monkeypatch, capsys):
    import imageio_ffmpeg

    def missing():
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", missing)
    monkeypatch.setattr(evaluate, "play", lambda *args, **kwargs: pytest.fail("played before it looked"))
    assert "--video needs ffmpeg (No ffmpeg exe" in fails(capsys, hopper, video=True)


def test_scores_beyond_all_numbers(hopper, tmp_path, monkeypatch, capsys):
    episodes = [{"score": score, "length": 1, "seed": 0, "cut": False} for score in (1e308, -1e308)]
    monkeypatch.setattr(evaluate, "play", lambda *args, **kwargs: (episodes, None))
    assert "beyond all numbers" in fails(capsys, hopper, episodes=2, output=tmp_path / "e.json")
    assert not [*tmp_path.iterdir()]


def test_machine_without_gl(hopper, monkeypatch, capsys):
    from gymnasium.envs.mujoco import MujocoEnv

    def render(env):
        raise AttributeError("'NoneType' object has no attribute 'eglQueryString'\nmore")

    monkeypatch.setattr(MujocoEnv, "render", render)
    assert "MUJOCO_GL" in fails(capsys, hopper, video=True)


def test_report_without_known_returns(mujoco, tmp_path, capsys):
    """Episodes of seven steps, all cut: the return is mostly guessed."""
    mujoco.train(short_args(mujoco, tmp_path, iterations=1))
    (folder,) = tmp_path.iterdir()
    capsys.readouterr()
    assert "cut too early" in fails(capsys, folder, episodes=2, report=True)


def test_command_line(hopper, tmp_path):
    """Without a path it is the newest run's newest checkpoint in runs/."""
    for age, name in enumerate(("older", "newest", "oldest")):
        folder = shutil.copytree(hopper, tmp_path / "runs" / name)
        os.utime(newest(folder), (10**9, 10**9 + [1, 2, 0][age]))
    command = [sys.executable, ROOT / "evaluate.py", "--episodes", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "2 episodes: mean" in done.stdout and "95 % interval" in done.stdout
    assert done.stdout.endswith("runs/newest/evaluation.json\n")
    assert len(json.loads((tmp_path / "runs/newest/evaluation.json").read_text())["scores"]) == 2


def test_nobody_reads_the_output(hopper, tmp_path):
    code = f"{sys.executable} {ROOT / 'evaluate.py'} {hopper} --episodes 1 --output {tmp_path / 'e.json'} | true"
    done = subprocess.run(code, shell=True, capture_output=True, text=True)
    assert done.stderr == "" and json.loads((tmp_path / "e.json").read_text())["scores"]


@pytest.mark.parametrize("options, limit", [({}, 500), ({"report": True}, 20_000), ({"video": True}, 4000)])
def test_full_disk(trained, tmp_path, capsys, monkeypatch, options, limit):
    """No file may grow larger than `limit`: JSON, picture and video each end in one sentence and leave nothing."""
    change_games(monkeypatch, max_num_frames_per_episode=1000)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
    try:
        output = dict(episodes=1, video_steps=3, output=tmp_path / "e.json")
        assert "cannot be written" in fails(capsys, trained["bdpg_atari"], **options, **output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert [path.name for path in tmp_path.iterdir()] == (["e.json"] if "video" in options else [])


def main(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, options)])
    with pytest.raises(SystemExit) as exit:
        evaluate.main()
    return exit.value.code


def test_interrupted(hopper, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "summarise", lambda scores: os.kill(os.getpid(), signal.SIGINT))
    assert main(monkeypatch, hopper, "--episodes", 1, "--output", tmp_path / "e.json") == 130
    assert capsys.readouterr().err == "" and not [*tmp_path.iterdir()]


def test_overlong_names(hopper, tmp_path, monkeypatch, capsys):
    long = "x" * 252
    for options in ((hopper, "--output", tmp_path / f"{long}.json"), (tmp_path / f"{long}.json",)):
        assert main(monkeypatch, *options) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ") and len(message.splitlines()) == 1 and "too long" in message
    almost = tmp_path / f"{'x' * 250}.json"  # a name that is not too long itself, but that of a temporary file is
    assert main(monkeypatch, hopper, "--episodes", 1, "--output", almost) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and len(message.splitlines()) == 1 and not [*tmp_path.iterdir()]

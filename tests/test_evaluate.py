"""evaluate.py: honest numbers, an untouched agent, pictures that exist, and one sentence for whatever is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ATARI, BDPG, MUJOCO, SCRIPTS, change_games, n_step_target, newest, rollout, short_args, spy

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


def counting_script(lengths, lives=1):
    """A script with environments whose episodes take lengths[i] steps of reward i + 1; each episode has so many lives."""
    clock = np.zeros(len(lengths), dtype=int)
    lengths = np.array(lengths)

    def step_envs(envs, actions):
        clock[:] += 1
        game_over, terminated = clock % lengths == 0, clock % (lengths // lives) == 0
        nothing = np.zeros(len(lengths), dtype=bool)
        return clock[:, None], np.arange(len(lengths)) + 1.0, terminated, nothing, None, game_over

    return SimpleNamespace(reset_envs=lambda envs, seed: clock[:, None], step_envs=step_envs)


STILL_AGENT = SimpleNamespace(
    observe=lambda obs, learn: torch.as_tensor(obs).float(),
    trunk=lambda obs: obs,
    policy=lambda obs, c: torch.distributions.Categorical(logits=torch.zeros(len(obs), 2)),
)


def test_short_episodes_are_not_preferred():
    episodes, _ = evaluate.play(counting_script([2, 20]), STILL_AGENT, None, 0, [2, 2])
    assert [(episode["score"], episode["length"]) for episode in episodes] == [(2, 2), (2, 2), (40, 20), (40, 20)]


def test_lost_life_ends_the_learning_episode_but_not_the_game():
    episodes, record = evaluate.play(counting_script([6, 12], lives=3), STILL_AGENT, None, 0, [1, 1], keep=100)
    assert [episode["length"] for episode in episodes] == [6, 12]
    assert record.dones[:, 1].nonzero().flatten().tolist() == [3, 7, 11]
    assert record.counts.sum(0).tolist() == [6, 12]  # what is played beyond the quota does not count
    assert record.last_embedding.flatten().tolist() == [12, 12]
    _, record = evaluate.play(counting_script([6, 12]), STILL_AGENT, None, 0, [1, 1], keep=5)
    assert len(record.rewards) == 5 and record.last_embedding.flatten().tolist() == [5, 5]


# --- beliefs ---


def test_returns_to_go_against_brute_force():
    rewards, _, next_g, terminations, dones = rollout(40, 3, seed=4)
    returns, weights = evaluate.returns_to_go(rewards, next_g, terminations, dones, 0.9)
    for t in range(40):
        for i in range(3):
            assert returns[t, i].item() == pytest.approx(n_step_target(rewards, next_g, terminations, dones, 0.9, t, i, 1000))
            end = next((step for step in range(t, 40) if dones[step, i]), 39)
            known = terminations[end, i].item()
            assert weights[t, i].item() == pytest.approx(0 if known else 0.9 ** (end - t + 1))


@pytest.mark.parametrize("name", SCRIPTS)
def test_looking_back_has_the_scale_of_training(trained, name):
    """With λ = 1 and no limit on k the Bellman target is the return itself, so both must come out equal."""
    checkpoint, path, script = evaluate.load(trained[name])
    agent, args, envs, _ = evaluate.rebuild(script, checkpoint, path, 2)
    args.gae_lambda, args.num_steps = 1.0, 10**6
    with torch.no_grad():
        _, record = evaluate.play(script, agent, envs, 0, [1, 1], max_steps=60, keep=60)
        record.rewards[3] = 1e9  # clipped
        truth = evaluate.look_back(script, agent, args, record)
    torch.testing.assert_close(truth.x, truth.returns, rtol=1e-4, atol=1e-4)
    assert truth.returns.abs().max() < 100
    if name in BDPG:
        assert truth.u.shape == truth.x.shape and (truth.u >= 0).all() and (truth.u <= args.u_bar).all()
    else:
        assert truth.u is None  # no encoder, no information gain
    if name in ATARI:
        args.clip_reward = True
        signs = evaluate.look_back(script, agent, args, record)
        step = signs.returns[3] - args.gamma * signs.returns[4] * ~record.dones[3]
        assert step.tolist() == pytest.approx([1, 1], abs=1e-4)


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
    run(trained[name], episodes=1, video=True, video_steps=4, report=True, output=tmp_path / "e.json")
    frames = iio.imread(tmp_path / "e.mp4")
    assert frames.shape == (4, 720, 1280, 3)
    game, beliefs = frames[:, 100:620, 50:500], frames[:, :, 560:]
    assert game.std() > 10 and beliefs.std() > 10
    assert (beliefs[0] != beliefs[-1]).any()
    report = iio.imread(tmp_path / "e.png")
    assert report.shape[0] > 900 and report.shape[1] > 1200 and report.std() > 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.json", "e.mp4", "e.png"]


@pytest.mark.parametrize("env_id", ["BreakoutNoFrameskip-v4", "ALE/Breakout-v5"])
def test_filmed_game_is_the_one_that_the_agent_sees(atari, env_id):
    import cv2

    envs, camera, _ = evaluate.make_camera(atari, atari.Args(env_id=env_id, num_envs=1), seed=3)
    obs = atari.reset_envs(envs, 3)
    rng = np.random.default_rng(0)
    for _ in range(80):
        action = rng.integers(0, 4, 1)
        picture = camera(action)
        grey = picture @ np.array([0.299, 0.587, 0.114])
        assert np.abs(cv2.resize(grey, (84, 84), interpolation=cv2.INTER_AREA) - obs[0, -1]).mean() < 1
        obs = atari.step_envs(envs, action)[0]


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
    assert before == ({file: file.read_bytes() for file in folder.iterdir() if file.is_file()} if folder.exists() else {})
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


def test_hand_edited_checkpoints(hopper, tmp_path, capsys):
    good, file = torch.load(newest(hopper), weights_only=True), tmp_path / "checkpoint-1.pt"
    args, agent = good["args"], good["agent"]
    bad = [
        ({"script": "evil.py"}, "not a training script"),
        ({"script": "nothing_atari.py"}, "not a training script"),
        ({"script": "../bdpg_mujoco.py"}, "not a training script"),
        ({"script": 3}, "not a training script"),
        ({"script": "bdpg_atari.py"}, "is not an Atari game"),
        ({"script": "ppo_wgan_mujoco.py"}, "does not fit ppo_wgan_mujoco.py"),
        ({"args": args | {"warp": 9}}, "does not fit"),
        ({"args": None}, "does not fit"),
        ({"args": args | {"gamma": "much"}}, "does not fit"),
        ({"args": args | {"gamma": 7.0}}, "--gamma"),
        ({"args": args | {"latent_dim": 5}}, "does not fit"),
        ({"args": args | {"env_id": "Nope-v0"}}, "there is no environment 'Nope-v0'"),
        ({"args": args | {"env_id": "Pendulum-v1"}}, "does not fit"),
        ({"agent": {key: value for key, value in agent.items() if key != "obs_stats.mean"}}, "does not fit"),
        ({"agent": agent | {"policy.log_std": torch.zeros(9)}}, "does not fit"),
        ({"agent": agent | {"policy.log_std": torch.full((3,), float("nan"))}}, "policy.log_std is not finite"),
        ({"agent": 5}, "does not fit"),
        ({"global_step": None}, "does not fit"),
    ]
    for change, expected in bad:
        torch.save(good | change, file)
        assert expected in fails(capsys, file), change
    for key in ("args", "agent", "global_step"):
        torch.save({name: value for name, value in good.items() if name != key}, file)
        assert "does not fit" in fails(capsys, file), key


def test_bad_options(hopper, tmp_path, capsys):
    assert "--episodes must be at least 1, not 0." in fails(capsys, hopper, episodes=0)
    assert "--video-steps" in fails(capsys, hopper, video_steps=0)
    assert "--seed" in fails(capsys, hopper, seed=-1)
    assert "--seed must be less than 2**30" in fails(capsys, hopper, seed=2**31)  # ALE takes no more
    for output in ("nowhere/e.json", "e.mp4", "."):
        assert "cannot be written" in fails(capsys, hopper, output=tmp_path / output)


@pytest.mark.parametrize(
    "module, options", [("matplotlib", {"report": True}), ("imageio_ffmpeg", {"video": True}), ("imageio", {"video": True})]
)
def test_missing_libraries(hopper, monkeypatch, capsys, module, options):
    monkeypatch.setitem(sys.modules, module, None)  # as if not installed
    monkeypatch.setattr(evaluate, "play", lambda *args, **kwargs: pytest.fail("played before it looked"))
    assert f"pip install {module.split('_')[0]}" in fails(capsys, hopper, **options)


def test_missing_encoder(hopper, monkeypatch, capsys):
    import imageio_ffmpeg

    def missing():
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", missing)
    assert "needs an encoder" in fails(capsys, hopper, video=True)


def test_environment_that_cannot_be_made(hopper, mujoco, monkeypatch, capsys):
    def make_envs(args, video_dir):
        raise RuntimeError("invalid value for environment variable MUJOCO_GL: nonsense")

    monkeypatch.setattr(mujoco, "make_envs", make_envs)
    assert "Hopper-v5 cannot be made here (invalid value" in fails(capsys, hopper)


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
    command = [sys.executable, str(ROOT / "evaluate.py"), str(hopper), "--episodes", "2", "--output", str(tmp_path / "e.json")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "2 episodes: mean" in done.stdout and "95 % interval" in done.stdout
    assert len(json.loads((tmp_path / "e.json").read_text())["scores"]) == 2

"""Atari environments against gymnasium's own preprocessing, and the CNN against a plain one."""

import functools
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import make_agent, random_observations, spy
from torch import nn


class StartLikeVectorEnv(gym.Wrapper):
    """Starts a game as ALE's vector environment does: FIRE, if the game has it, then no-ops, `frames` in all."""

    def __init__(self, env, frames):
        super().__init__(env)
        self.frames = frames

    def reset(self, **kwargs):
        self.env.reset(**kwargs)
        has_fire = self.unwrapped.get_action_meanings()[1] == "FIRE"
        for action in [int(has_fire)] + [0] * (self.frames - 1):
            obs, _, _, _, info = self.env.step(action)
        return obs, info


class ReferenceGame:
    """One game in gymnasium's wrappers, whole (no end at a lost life), started when and as the tested one was."""

    def __init__(self, env_id):
        self.base = gym.make(env_id)

    def start(self, frames):
        env = gym.wrappers.AtariPreprocessing(StartLikeVectorEnv(self.base, frames), noop_max=0)
        env = gym.wrappers.FrameStackObservation(env, 4, padding_type="zero")
        self.env = gym.wrappers.RecordEpisodeStatistics(env)
        obs, info = self.env.reset()
        self.lives = info["lives"]
        return obs

    def step(self, action):
        """Observation, reward, whether a life was lost but not the game, whether the game ended, and then its score."""
        obs, reward, game_over, _, info = self.env.step(int(action))
        life_lost, self.lives = 0 < info["lives"] < self.lives, info["lives"]
        return obs, reward, life_lost, game_over, info["episode"]["r"] if game_over else None


def play(atari, monkeypatch, env_id, num_envs):
    """The script's environments as users run them, after their reset, and what they said of themselves so far."""
    envs = atari.make_envs(atari.Args(env_id=env_id, num_envs=num_envs), None)
    infos = spy(monkeypatch, envs, "step")
    resets = spy(monkeypatch, envs, "reset")
    obs = atari.reset_envs(envs, 11)
    start_frames = lambda: (infos or resets)[-1][1][-1]["episode_frame_number"]  # noqa: E731
    return envs, obs, start_frames


@pytest.mark.parametrize(
    "env_id, num_envs, games",
    [
        ("BreakoutNoFrameskip-v4", 3, 6),  # 5 lives; the ball waits for FIRE
        ("SeaquestNoFrameskip-v4", 2, 3),  # lives that can be won back
        ("BankHeistNoFrameskip-v4", 1, 1),  # goes on at 0 lives
        ("PongNoFrameskip-v4", 1, 1),  # no lives, negative rewards
        ("FreewayNoFrameskip-v4", 1, 1),  # no lives, no FIRE
    ],
)
def test_games_equal_those_of_the_reference(atari, monkeypatch, env_id, num_envs, games):
    envs, obs, start_frames = play(atari, monkeypatch, env_id, num_envs)
    references = [ReferenceGame(env_id) for _ in range(num_envs)]
    for i, reference in enumerate(references):
        np.testing.assert_array_equal(obs[i], reference.start(start_frames()[i]))
    scores, finished, lost_lives = np.zeros(num_envs), 0, 0
    rng = np.random.default_rng(0)
    while finished < games:
        actions = rng.integers(envs.single_action_space.n, size=num_envs)
        obs, rewards, terminated, truncated, final_obs, game_over = atari.step_envs(envs, actions)
        scores += rewards  # as train() keeps the score
        assert obs.dtype == np.uint8 and not truncated.any()
        for i, reference in enumerate(references):
            true_obs, reward, life_lost, over, score = reference.step(actions[i])
            assert (rewards[i], terminated[i], game_over[i]) == (reward, life_lost or over, over)
            lost_lives += life_lost
            if over:
                np.testing.assert_array_equal(final_obs[i], true_obs)
                assert scores[i] == score
                scores[i], finished = 0, finished + 1
                true_obs = reference.start(start_frames()[i])  # the next game, in the same step
            np.testing.assert_array_equal(obs[i], true_obs)
    assert (lost_lives > 0) == (env_id[:4] in ("Brea", "Seaq", "Bank"))


def test_truncation_keeps_the_last_observation_and_ends_the_game(atari, monkeypatch, short_games):
    env_id = "PongNoFrameskip-v4"
    envs, obs, start_frames = play(atari, monkeypatch, env_id, 2)
    references = [ReferenceGame(env_id) for _ in range(2)]
    for reference, frames in zip(references, start_frames(), strict=True):
        reference.start(frames)
    for step in range(1, 50):
        actions = np.array([step % 6, (step + 3) % 6])
        obs, _, terminated, truncated, final_obs, game_over = atari.step_envs(envs, actions)
        assert not terminated.any() and (truncated == (step % 15 == 0)).all() and (game_over == truncated).all()
        for i, reference in enumerate(references):
            true_obs, *_ = reference.step(actions[i])
            if truncated[i]:
                # ALE stops a frame early and pools the newest frame of the stack with the one before, so ball and paddles
                # are off by a few pixels there; a stack of the next game would differ everywhere in the older three.
                np.testing.assert_array_equal(final_obs[i, :3], true_obs[:3])
                assert np.mean(final_obs[i, 3] != true_obs[3]) < 0.01
                true_obs = reference.start(start_frames()[i])
            np.testing.assert_array_equal(obs[i], true_obs)


@pytest.mark.parametrize("env_id, sticky", [("BreakoutNoFrameskip-v4", False), ("ALE/Breakout-v5", True)])
def test_only_v5_games_have_sticky_actions(atari, monkeypatch, env_id, sticky):
    """Games that start alike and get the same actions part only by chance, which without no-ops is in sticky actions alone."""
    monkeypatch.setattr(atari, "AtariVectorEnv", functools.partial(atari.AtariVectorEnv, noop_max=0))
    envs = atari.make_envs(atari.Args(env_id=env_id, num_envs=4), None)
    obs = atari.reset_envs(envs, 1)
    same = True
    for step in range(40):
        obs, *_ = atari.step_envs(envs, np.full(4, [2, 3, 3][step % 3]))
        same &= (obs == obs[0]).all()
    assert same == (not sticky)


def test_games_start_at_different_points(atari):
    """Random no-ops: the environments of a run must not play the same game."""
    envs = atari.make_envs(atari.Args(env_id="PongNoFrameskip-v4", num_envs=8), None)
    _, infos = envs.reset(seed=1)
    starts = infos["episode_frame_number"]
    assert len(set(starts)) > 3 and starts.max() <= 31


def test_frames_stay_bytes_and_are_only_transposed(atari):
    agent, _, _ = make_agent(atari)
    frames = np.random.randint(0, 256, (2, 4, 84, 84), dtype=np.uint8)
    for learn in (True, False):
        observed = agent.observe(frames, learn=learn)
        assert observed.dtype == torch.uint8 and observed.is_contiguous()
        np.testing.assert_array_equal(observed.numpy(), frames.transpose(0, 2, 3, 1))


def test_trunk_equals_a_plain_nature_cnn(atari):
    agent, _, _ = make_agent(atari)
    trunk, frames = agent.trunk, random_observations(atari, 5)
    plain = nn.Sequential(
        *(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()),
    )
    with torch.no_grad():
        for ours, theirs in zip((trunk.conv1, trunk.conv2, trunk.conv3), (plain[0], plain[2], plain[4]), strict=True):
            theirs.weight.copy_(ours.weight)
            theirs.bias.copy_(ours.bias.normal_())  # zero at first, which would hide a bias in the wrong place
        # Ours flattens (height, width, channel), the plain one (channel, height, width).
        plain[7].weight.copy_(trunk.linear.weight.view(512, 7, 7, 64).permute(0, 3, 1, 2).flatten(1))
        plain[7].bias.copy_(trunk.linear.bias.normal_())
    pixels = frames.permute(0, 3, 1, 2).float() / 255
    torch.testing.assert_close(trunk(frames), plain(pixels), rtol=1e-4, atol=1e-5)
    trunk(frames).square().sum().backward()
    plain(pixels).square().sum().backward()
    torch.testing.assert_close(trunk.conv1.weight.grad, plain[0].weight.grad, rtol=1e-3, atol=1e-2)
    assert torch.equal(frames, frames.to(torch.uint8))


def test_videos_show_whole_games_of_the_first_environment(atari, monkeypatch, tmp_path):
    """Games of 3, 2 and 4 steps, of which gymnasium's schedule shows the first two. The frame that comes with the end of a game is
    the first of the next."""
    saved = []
    save = lambda frames, folder, **options: saved.append((frames, options))  # noqa: E731
    monkeypatch.setattr("gymnasium.utils.save_video.save_video", save)
    envs = SimpleNamespace(video_dir=tmp_path, video_frames=[], num_games=0)
    all_frames = np.arange(9, dtype=np.uint8)[:, None, None, None] * np.ones((1, 16, 84, 84), np.uint8)
    for step, frames in enumerate(all_frames, start=1):
        atari.record_video(envs, frames[0], step in (3, 5, 9))
    shown = [[int(frame[0, 0, 0]) for frame in frames] for frames, _ in saved]
    assert shown == [[0, 1], [2, 3]] and envs.num_games == 3 and envs.video_frames == []
    assert all(frame.shape == (336, 336, 3) for frames, _ in saved for frame in frames)
    assert [options["episode_index"] for _, options in saved] == [0, 1]
    monkeypatch.undo()
    envs.num_games = 8  # which is to be shown, too
    envs.video_frames = [all_frames[0, 0]] * 4
    atari.record_video(envs, all_frames[1, 0], True)
    assert [path.suffix for path in tmp_path.iterdir()] == [".mp4"]


def test_video_frames_do_not_keep_those_of_other_environments(atari, tmp_path):
    envs = SimpleNamespace(video_dir=tmp_path, video_frames=[], num_games=0)
    atari.record_video(envs, np.zeros((16, 4, 84, 84), np.uint8)[0, -1], False)
    assert envs.video_frames[0].base is None

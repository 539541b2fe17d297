"""Atari environments against gymnasium's own preprocessing, and the CNN against a plain one."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import change_games, make_agent, random_observations, spy
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
    """The script's environments as users run them, the calls of ALE's own ones, and where their games started."""
    envs = atari.Environments(atari.Args(env_id=env_id, num_envs=num_envs), 11)
    resets, steps = spy(monkeypatch, envs.envs, "reset"), spy(monkeypatch, envs.envs, "step")
    start_frames = lambda: (steps or resets)[-1][1][-1]["episode_frame_number"]  # noqa: E731
    return envs, steps, start_frames


@pytest.mark.parametrize(
    "env_id, num_envs, games",
    [
        ("BreakoutNoFrameskip-v4", 3, 6),  # 5 lives; the ball waits for FIRE
        ("SeaquestNoFrameskip-v4", 2, 3),  # lives that can be won back
        ("BankHeistNoFrameskip-v4", 1, 1),  # goes on at 0 lives
        ("MsPacmanNoFrameskip-v4", 1, 1),  # lives, no FIRE
        ("PongNoFrameskip-v4", 1, 1),  # no lives, negative rewards
        ("FreewayNoFrameskip-v4", 1, 1),  # no lives, no FIRE
    ],
)
def test_games_equal_those_of_the_reference(atari, monkeypatch, env_id, num_envs, games):
    """Pixel by pixel and reward by reward; the first step after a lost life presses FIRE, whatever was chosen."""
    envs, executed, start_frames = play(atari, monkeypatch, env_id, num_envs)
    obs = envs.reset()
    references = [ReferenceGame(env_id) for _ in range(num_envs)]
    has_fire = "FIRE" in references[0].base.unwrapped.get_action_meanings()
    assert has_fire == (env_id[:2] not in ("Ms", "Fr"))
    for i, reference in enumerate(references):
        np.testing.assert_array_equal(obs[i], reference.start(start_frames()[i]))
    scores, finished, lost_lives, fire = np.zeros(num_envs), 0, 0, np.zeros(num_envs, dtype=bool)
    rng = np.random.default_rng(0)
    while finished < games:
        actions = rng.integers(envs.action_space.n, size=num_envs)
        obs, rewards, terminated, truncated, final_obs, game_over = envs.step(actions)
        actions[fire] = 1
        np.testing.assert_array_equal(executed[-1][0][0], actions)
        scores += rewards  # as train() keeps the score
        assert obs.dtype == np.uint8 and not truncated.any()
        for i, reference in enumerate(references):
            true_obs, reward, life_lost, over, score = reference.step(actions[i])
            assert (rewards[i], terminated[i], game_over[i]) == (reward, life_lost or over, over)
            lost_lives, fire[i] = lost_lives + life_lost, has_fire and life_lost
            if over:
                np.testing.assert_array_equal(final_obs[i], true_obs)
                assert scores[i] == score
                scores[i], finished = 0, finished + 1
                true_obs = reference.start(start_frames()[i])  # the next game, in the same step
            np.testing.assert_array_equal(obs[i], true_obs)
    assert (lost_lives > 0) == (env_id[:4] in ("Brea", "Seaq", "Bank", "MsPa"))


def test_a_game_goes_on_after_a_lost_life_without_choosing_fire(atari):
    """Breakout's ball waits for FIRE: an agent that never presses it loses all its lives all the same."""
    envs = atari.Environments(atari.Args(env_id="BreakoutNoFrameskip-v4", num_envs=1), 0)
    envs.reset()
    assert any(envs.step(np.array([3]))[-1][0] for _ in range(400))  # to the left


def test_truncation_keeps_the_last_observation_and_ends_the_game(atari, monkeypatch, short_games):
    env_id = "PongNoFrameskip-v4"
    envs, _, start_frames = play(atari, monkeypatch, env_id, 2)
    envs.reset()
    references = [ReferenceGame(env_id) for _ in range(2)]
    for reference, frames in zip(references, start_frames(), strict=True):
        reference.start(frames)
    for step in range(1, 50):
        actions = np.array([step % 6, (step + 3) % 6])
        obs, _, terminated, truncated, final_obs, game_over = envs.step(actions)
        assert not terminated.any() and (truncated == (step % 15 == 0)).all() and (game_over == truncated).all()
        for i, reference in enumerate(references):
            true_obs, *_ = reference.step(actions[i])
            if truncated[i]:
                # ALE stops a frame early and pools the newest frame of the stack with the one before, so ball and
                # paddles are off by a few pixels; a stack of the next game would differ everywhere in the older three.
                np.testing.assert_array_equal(final_obs[i, :3], true_obs[:3])
                assert np.mean(final_obs[i, 3] != true_obs[3]) < 0.01
                true_obs = reference.start(start_frames()[i])
            np.testing.assert_array_equal(obs[i], true_obs)


@pytest.mark.parametrize("env_id, sticky", [("BreakoutNoFrameskip-v4", False), ("ALE/Breakout-v5", True)])
def test_only_v5_games_have_sticky_actions(atari, monkeypatch, env_id, sticky):
    """Games that start alike and get the same actions part only by chance, which is in sticky actions alone."""
    change_games(monkeypatch, noop_max=0)
    envs = atari.Environments(atari.Args(env_id=env_id, num_envs=4), 1)
    envs.reset()
    same = True
    for step in range(40):
        obs, *_ = envs.step(np.full(4, [2, 3, 3][step % 3]))
        same &= (obs == obs[0]).all()
    assert same == (not sticky)


def test_games_start_at_different_points(atari, monkeypatch):
    """Random no-ops: the environments of a run must not play the same game."""
    envs, _, start_frames = play(atari, monkeypatch, "PongNoFrameskip-v4", 8)
    envs.reset()
    assert len(set(start_frames())) > 3 and start_frames().max() <= 31


def test_policy_is_categorical(atari):
    policy, c = atari.Policy(8, 4), torch.randn(5, 8)
    assert (policy(None, c).probs - 0.25).abs().max() < 0.05  # at first every action is about as likely
    policy.logits.weight.data *= 100
    distribution, logits = policy(None, c), policy.logits(c).detach().double().numpy()
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert probs.max() > 0.5
    actions = distribution.sample((20_000,))
    counts = np.stack([(actions == action).double().mean(0) for action in range(4)], -1)
    np.testing.assert_allclose(counts, probs, atol=5 * 0.5 / 20_000**0.5)
    log_probs = np.log(probs)[np.arange(5), actions[:9]]
    np.testing.assert_allclose(distribution.log_prob(actions[:9]).detach(), log_probs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(distribution.entropy().detach(), -(probs * np.log(probs)).sum(-1), rtol=1e-4)
    np.testing.assert_array_equal(distribution.mode, probs.argmax(-1))


def test_frames_stay_bytes_and_are_only_transposed(atari):
    agent, _, _ = make_agent(atari)
    frames = np.random.randint(0, 256, (2, 4, 84, 84), dtype=np.uint8)
    observed = agent.observe(frames)
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


def test_bf16_keeps_embeddings_and_gradients_within_its_precision(atari):
    """bfloat16 has 8 bits of mantissa: relative errors of 2^-8 or so per layer. Weights and outputs stay in float32."""
    exact, _, _ = make_agent(atari)
    rough, _, _ = make_agent(atari, bf16=True)
    rough.load_state_dict(exact.state_dict())
    frames = random_observations(atari, 8)
    embeddings = [agent.trunk(frames) for agent in (exact, rough)]
    assert embeddings[1].dtype == torch.float32 and not torch.equal(*embeddings)
    losses = [c.square().mean() for c in embeddings]
    gradients = [
        torch.autograd.grad(loss, [*agent.trunk.parameters()])
        for loss, agent in zip(losses, (exact, rough), strict=True)
    ]
    for one, other in [embeddings, *zip(*gradients, strict=True)]:
        assert other.dtype == torch.float32
        assert (one - other).norm() < 0.02 * one.norm()

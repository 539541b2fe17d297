"""The study that says how much of its targets' variance a critic could explain."""

import pytest
import torch
from conftest import spy

from studies import ceiling


def test_a_fitted_network_explains_what_can_be_explained():
    """x = sin(3 o) + noise of variance 1/2: sin has variance 1/2 over whole periods, so half can be explained."""
    torch.manual_seed(1)
    obs = (2 * torch.pi / 3) * (2 * torch.rand(24_000, 1) - 1)
    x = torch.sin(3 * obs[:, 0]) + 0.5**0.5 * torch.randn(24_000)
    parts = obs.split(8000), x.split(8000)
    prediction = ceiling.fit(parts[0][0], parts[1][0], parts[0][2], parts[0][1], parts[1][1], seed=1, max_epochs=60)
    # Five standard errors, and what fitting costs.
    assert ceiling.explained(prediction, parts[1][2]) == pytest.approx(0.5, abs=0.04)
    assert ceiling.explained(torch.sin(3 * parts[0][2][:, 0]), parts[1][2]) == pytest.approx(0.5, abs=0.04)


def test_targets_are_discounted_rewards_where_the_critic_says_nothing(trained, monkeypatch):
    script, agent, envs, args = ceiling.load(trained["bdpg_mujoco"], 3, seed=5)
    args.gae_lambda = 1.0
    monkeypatch.setattr(agent.return_model, "sample", lambda c, n: torch.zeros(n, *c.shape[:-1]))
    steps = spy(monkeypatch, envs, "step")
    with torch.no_grad():
        obs, x, mean = ceiling.collect(script, agent, envs, args, 2, seed=5)
    assert obs.shape == (2 * args.num_steps, 3, 11) and not mean.any()
    expected = torch.zeros_like(x)
    for first in (0, args.num_steps):
        total = torch.zeros(3)
        for t in reversed(range(first, first + args.num_steps)):
            _, reward, terminated, truncated, _, _ = steps[t][1]
            reward = (torch.as_tensor(reward) / agent.reward_stats.std).clamp(-10, 10)
            total = reward + args.gamma * total * ~torch.as_tensor(terminated | truncated)
            expected[t] = total
    torch.testing.assert_close(x, expected.float(), rtol=1e-4, atol=1e-4)


def test_a_run_is_judged(trained, capsys):
    ceiling.main(ceiling.Args(trained["ppo_wgan_mujoco"], rollouts=2))
    # Eight environments, two rollouts of 16 steps.
    assert "targets 256; explained variance: the agent " in capsys.readouterr().out


@pytest.mark.parametrize(
    "script, rollouts, message",
    [
        ("bdpg_atari", 1, "MuJoCo scripts"),
        ("ppo_mujoco", 1, "MuJoCo scripts"),
        ("bdpg_mujoco", 0, "--rollouts"),
        (None, 1, "not the folder of a run"),
    ],
)
def test_wrong_arguments_are_refused(trained, capsys, script, rollouts, message, tmp_path):
    with pytest.raises(SystemExit) as stop:
        ceiling.main(ceiling.Args(trained[script] if script else tmp_path, rollouts=rollouts))
    assert stop.value.code == 2 and message in capsys.readouterr().err

"""What was made fast gives the same results as the plain formulation; and the tool that measures speed measures it."""

import json
import math

import gymnasium as gym
import pytest
import torch
import torch.nn.functional as F
from conftest import is_atari, short_args
from torch.distributions import Independent, Normal

from benchmark import speed


def plain_trunk(self, obs):
    """The Nature CNN as one writes it down: pixels scaled, channels first, contiguous weights."""
    h = obs.permute(0, 3, 1, 2).contiguous().float() / 255
    for layer, stride in ((self.conv1, 4), (self.conv2, 2), (self.conv3, 1)):
        h = torch.relu(F.conv2d(h, layer.weight.contiguous(), layer.bias, stride=stride))
    return torch.relu(self.linear(h.permute(0, 2, 3, 1).reshape(len(h), -1)))


def plain_gae(rewards, g, next_g, terminations, dones, gamma, gae_lambda, k):
    """Every step's sum by itself."""
    advantages = torch.zeros_like(rewards)
    deltas = rewards + gamma * next_g * ~terminations - g
    for t in range(len(rewards)):
        alive, weight = torch.ones_like(dones[0]), 1.0
        for later in range(t, min(t + k, len(rewards))):
            advantages[t] += weight * alive * deltas[later]
            alive, weight = alive & ~dones[later], weight * gamma * gae_lambda
    return advantages


def with_larger_epsilon(make_optimizers):
    """Adam divides by sqrt(v) + ε: where gradients are as small as its ε of 1e-5, their rounding errors are as large as a step."""

    def make(agent, args):
        optimizers = make_optimizers(agent, args)
        for group in (group for optimizer in optimizers.values() for group in optimizer.param_groups):
            group["eps"] = 1e-3
        return optimizers

    return make


def plain_optimizers(make_optimizers):
    """Each with its parameters one by one, instead of as a vector."""

    def plain(agent, args):
        optimizers = make_optimizers(agent, args)
        for name, optimizer in optimizers.items():
            groups = [group | {"params": group["params"][0].parts, "fused": False} for group in optimizer.param_groups]
            optimizers[name] = torch.optim.Adam(groups, foreach=False)
        return optimizers

    return plain


def plain_descend(optimizer, loss, max_grad_norm):
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    norm = sum(parameter.grad.double().square().sum() for parameter in parameters).sqrt()
    for parameter in parameters:
        parameter.grad *= min(1, max_grad_norm / norm.item())
    optimizer.step()
    return norm


def test_three_iterations_of_the_fast_code_equal_the_plain_ones(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "make_optimizers", with_larger_epsilon(script.make_optimizers))
    fast = script.train(short_args(script, tmp_path / "fast")).state_dict()
    monkeypatch.setattr(script, "make_optimizers", plain_optimizers(script.make_optimizers))
    monkeypatch.setattr(script, "descend", plain_descend)
    monkeypatch.setattr(script, "k_step_gae", plain_gae)
    if is_atari(script):
        monkeypatch.setattr(script.Trunk, "forward", plain_trunk)
    else:
        monkeypatch.setattr(script, "DiagonalGaussian", lambda mean, log_std: Independent(Normal(mean, log_std.exp()), 1))
        monkeypatch.setattr(script, "VectorEnv", gym.vector.SyncVectorEnv)
    plain = script.train(short_args(script, tmp_path / "plain")).state_dict()
    for name, value in plain.items():
        torch.testing.assert_close(fast[name], value, rtol=1e-3, atol=5e-5, msg=lambda text, name=name: f"{name}: {text}")


# --- the tool ---


def test_phases_of_a_run_add_up_and_operations_are_counted():
    """The scalar critic's operations are known: 2 per weight and row forwards, 4 backwards, 2 in the first layers."""
    sizes = dict(num_envs=2, num_steps=16, minibatch_size=16, update_epochs=2)
    result = speed.run_script("benchmark/ppo_scalar_mujoco", "mujoco", 1, sizes)
    seconds = result["phases"]
    assert set(seconds) == set(speed.PHASES) and all(value > 0 for value in seconds.values())
    assert result["steps_per_second"] == pytest.approx(32 / sum(seconds.values()))
    first, middle, action, value = 2 * 11 * 64, 2 * 64 * 64, 3 * 64, 64  # Hopper has 11 observations and 3 actions
    next_action = 2 * 2 * (first / 2 + middle / 2 + action)  # the count ends when the environments are stepped again
    assert result["flops_of_update"] == 2 * 32 * (4 * first + 6 * (middle + action + value)) + next_action
    assert 100 < result["megabytes"] < 4000


def test_environment_and_matrix_rates_are_positive():
    assert speed.run_environment("bdpg_mujoco", "mujoco", 1, {})["steps_per_second"] > 100
    assert 1 < speed.run_matmul(None, "mujoco", 1, {}) < 1e6


def result(steps_per_second, update, flops=None):
    phases = dict.fromkeys(speed.PHASES, 0.1) | {"update": update}
    return {"steps_per_second": steps_per_second, "phases": phases, "flops_of_update": flops, "megabytes": 300.0}


def test_report_has_ratios_of_the_same_round_and_the_share_of_the_peak():
    runs = {
        "BDPG": [result(90, 0.5, 4e9), result(30, 0.5, 4e9), result(100, 0.5, 4e9)],
        "scalar critic": [result(100, 0.2, 1e9), result(50, 0.2, 1e9), result(200, 0.2, 1e9)],
        "SB3": [result(50, 0.3), result(20, 0.3), result(50, 0.3)],
    }
    record = {"results": runs, "gflops_of_matmul": [9.0, 10.0, 11.0], "sweeps": {"latent_dim": {1: 1234.0, 2: 1000.0}}}
    text = speed.make_report(speed.Args(repeats=3), record)
    assert "| BDPG | 90 | 300 | 500 | 1.80 (1.50-2.00) | 0.60 (0.50-0.90) | 8 (80 %) | 300 |" in text
    assert "| scalar critic | 100 | 300 | 200 | 2.50 (2.00-4.00) |  | 5 (50 %) | 300 |" in text
    assert "`--latent-dim`" in text and "| 1,234 | 1,000 |" in text


def test_everything_is_measured_in_turns_and_written(tmp_path, monkeypatch, capsys):
    order = []

    def measured(function, name, task, iterations, overrides):
        order.append(function.__name__ + (f" {overrides}" if overrides else ""))
        return 10.0 if function is speed.run_matmul else result(100 + len(order), 0.5, 1e9)

    monkeypatch.setattr(speed, "in_own_process", measured)
    monkeypatch.setattr(speed, "ROOT", tmp_path)
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    (tmp_path / "docs" / "speed.md").write_text("before\n<!-- mujoco -->\nold\n<!-- end -->\nafter\n")
    speed.main(speed.Args(repeats=2, write=True))
    a_round = ["run_matmul", *["run_script"] * 3, "run_environment"]
    sweeps = [f"run_script {{'{argument}': {value}}}" for argument, values in speed.SWEEPS.items() for value in values]
    assert order == a_round * 2 + sweeps
    page = (tmp_path / "docs" / "speed.md").read_text()
    assert page.startswith("before\n<!-- mujoco -->\n") and page.endswith("<!-- end -->\nafter\n") and "old" not in page
    record = json.loads((tmp_path / "benchmark" / "results" / "speed_mujoco.json").read_text())
    assert math.isclose(record["results"]["BDPG"][0]["steps_per_second"], 102)
    assert (tmp_path / "docs" / "figures" / "speed_mujoco.png").stat().st_size > 5000
    assert "pip install stable-baselines3" in capsys.readouterr().out


def test_only_what_is_asked_for_is_measured(monkeypatch, capsys):
    order = []

    def measured(function, name, *rest):
        order.append(name)
        return 10.0 if function is speed.run_matmul else result(100, 0.5)

    monkeypatch.setattr(speed, "in_own_process", measured)
    speed.main(speed.Args(repeats=2, sweeps=False, only=("scalar critic", "BDPG")))
    assert order == [None, "benchmark/ppo_scalar_mujoco", "bdpg_mujoco"] * 2
    assert "1.00 (1.00-1.00)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(repeats=0), "at least 1"),
        (dict(iterations=0), "at least 1"),
        (dict(only=("DQN",)), "no 'DQN' to measure; there are: BDPG, "),
    ],
)
def test_wrong_arguments_are_refused(wrong, message, capsys):
    with pytest.raises(SystemExit) as stop:
        speed.main(speed.Args(**wrong))
    assert stop.value.code == 2 and message in capsys.readouterr().err

"""What was made fast gives the same results as the plain formulation; and the tool that measures speed measures it."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import is_atari, short_args

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


def other_optimizers(make_optimizers, fused):
    """Adam divides by sqrt(v) + ε: where gradients are as small as its ε of 1e-5, rounding errors are as large as a
    step, so ε is larger here."""

    def make(agent, args):
        optimizers = make_optimizers(agent, args)
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                group |= {"eps": 1e-3, "fused": fused, "foreach": False}
        return optimizers

    return make


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
    make_optimizers = script.make_optimizers
    monkeypatch.setattr(script, "make_optimizers", other_optimizers(make_optimizers, fused=True))
    fast = script.train(short_args(script, tmp_path / "fast")).state_dict()
    monkeypatch.setattr(script, "make_optimizers", other_optimizers(make_optimizers, fused=False))
    monkeypatch.setattr(script, "descend", plain_descend)
    monkeypatch.setattr(script, "k_step_gae", plain_gae)
    if is_atari(script):
        monkeypatch.setattr(script.Trunk, "forward", plain_trunk)
    plain = script.train(short_args(script, tmp_path / "plain")).state_dict()
    for name, value in plain.items():
        torch.testing.assert_close(
            fast[name], value, rtol=1e-3, atol=5e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


# --- the tool ---

HOPPER, BREAKOUT = "Hopper-v5", "BreakoutNoFrameskip-v4"
TINY = {"num_envs": "2", "num_steps": "16", "minibatch_size": "16", "update_epochs": "2"}


@pytest.mark.parametrize("method, env_id", [("ppo", HOPPER), ("bdpg", BREAKOUT)])
def test_phases_of_an_iteration_are_those_that_the_script_goes_through(method, env_id, monkeypatch):
    """A script whose environments take a second a step, its targets ten seconds, and a gradient step a hundred."""
    script, now = speed.load(speed.ROOT, method, env_id), [0.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])

    def slow(owner, name, seconds):
        original = getattr(owner, name)

        def slowed(*given, **options):
            now[0] += seconds
            return original(*given, **options)

        monkeypatch.setattr(owner, name, slowed)

    slow(script.Environments, "step", 1.0)
    slow(script.Agent, "observe", 0.25)  # of the rollout, apart from the last one
    slow(script, "k_step_gae", 10.0)
    slow(script.torch.optim.Adam, "step", 100.0)
    result = speed.run_script(speed.ROOT, method, env_id, 2, TINY)
    adams, gaes = (1, 1) if method == "ppo" else (3, 2)
    # After its last step a rollout still observes; targets follow: so that is of the targets' time.
    assert result["phases"] == {
        "environments": 16,
        "rest of the rollout": 15 * 0.25,
        "returns and targets": 0.25 + 10 * gaes,
        "update": 4 * adams * 100,
    }
    assert result["steps_per_second"] == 32 / sum(result["phases"].values())
    assert 100 < result["megabytes"] < 4000


def test_scripts_of_another_checkout_are_measured_as_they_are(tmp_path):
    """As in versions in which environments were stepped by a function and plain PPO stood elsewhere."""
    source = (speed.ROOT / "ppo_mujoco.py").read_text().replace("envs.step(", "step_envs(envs, ")
    source = source.replace("class Environments:", "class EarlierEnvironments:").replace(
        "Environments(args", "EarlierEnvironments(args"
    )
    source = source.replace(
        "class Agent(", "def step_envs(envs, actions):\n    return envs.step(actions)\n\n\nclass Agent("
    )
    source = source.replace("self.step_envs(envs, actions", "self.envs.step(actions")
    (tmp_path / "benchmark").mkdir()
    (tmp_path / "benchmark" / "ppo_scalar_mujoco.py").write_text(source)
    assert speed.find_script(tmp_path, "ppo", HOPPER) == "benchmark.ppo_scalar_mujoco"
    assert speed.find_script(tmp_path, "bdpg", HOPPER) is speed.find_script(tmp_path, "ppo", BREAKOUT) is None
    result = speed.in_own_process(speed.run_script, str(tmp_path), "ppo", HOPPER, 1, TINY)
    assert all(seconds > 0 for seconds in result["phases"].values())


@pytest.mark.parametrize("task", ["atari", "mujoco"])
def test_all_eight_scripts_are_found(task):
    names = {
        speed.find_script(speed.ROOT, method, {"atari": BREAKOUT, "mujoco": HOPPER}[task])
        for method in speed.METHODS.values()
    }
    assert names == {path.stem for path in speed.ROOT.glob(f"*_{task}.py")} and len(names) == 4


def result(steps_per_second, update):
    phases = dict.fromkeys((*speed.ROLLOUT, "returns and targets"), 0.1) | {"update": update}
    return {"steps_per_second": steps_per_second, "phases": phases, "megabytes": 300.0}


def test_table_has_ratios_of_the_same_round():
    runs = {
        "BDPG": [result(90, 0.5), result(30, 0.5), result(100, 0.5)],
        "BDPG, old": [result(45, 0.6), result(60, 0.6), result(100, 0.6)],
        "PPO": [result(100, 0.2), result(50, 0.2), result(200, 0.2)],
        "SB3": [{**result(50, 0.3), "phases": {"rollout": 0.4, "update": 0.3}}, result(20, 0.3), result(50, 0.3)][:1]
        * 3,
    }
    text = speed.make_table(runs)
    assert "| BDPG | 90 | 100 | 200 | 500 | 1.80 (0.60-2.00) | 0.60 (0.50-0.90) | 1.00 (0.50-2.00) | 300 |" in text
    assert "| PPO | 100 | 100 | 200 | 200 | 2.00 (1.00-4.00) |  |  | 300 |" in text
    assert "| SB3 | 50 |  | 400 | 300 |  | 0.50 (0.25-1.00) |  | 300 |" in text


def measured(order):
    def measure(function, folder, method, env_id, iterations, settings):
        order.append((folder, method, settings))
        return result(100 + len(order), 0.5)

    return measure


def test_everything_is_measured_in_turns_and_written(tmp_path, monkeypatch, capsys):
    order, old = [], tmp_path / "old"
    old.mkdir()
    (old / "bdpg_mujoco.py").touch()
    monkeypatch.setattr(speed, "in_own_process", measured(order))
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: None)
    settings = ("minibatch-size=64", "envpool=False")
    speed.main(speed.Args(rounds=2, output=tmp_path / "results" / "speed", against=old, set=settings))
    new, parsed = str(speed.ROOT), {"minibatch_size": "64", "envpool": "False"}
    a_round = [(new, "bdpg"), (str(old), "bdpg"), (new, "ppo_wgan"), (new, "ppo_qr"), (new, "ppo")]
    assert order == [(*run, parsed) for run in a_round] * 2
    record = json.loads((tmp_path / "results" / "speed.json").read_text())
    assert [run["steps_per_second"] for run in record["results"]["BDPG"]] == [101, 106]
    text = (tmp_path / "results" / "speed.md").read_text()
    assert "| BDPG, old | 104 |" in text and "| 0.99 (0.99-0.99) |" in text
    out = capsys.readouterr().out
    assert "pip install stable-baselines3" in out and text in out


def test_only_what_is_asked_for_is_measured(monkeypatch, capsys):
    order = []
    monkeypatch.setattr(speed, "in_own_process", measured(order))
    speed.main(speed.Args(rounds=2, only=("PPO", "BDPG")))
    assert [method for _, method, _ in order] == ["ppo", "bdpg"] * 2
    assert "1.01 (1.01-1.01)" in capsys.readouterr().out


def test_settings_go_to_the_scripts_that_have_them(mujoco):
    settings = {"minibatch_size": "64", "envpool": "False", "learning_rate": "1e-3", "num_quantiles": "7"}
    args = speed.make_args(mujoco, "Swimmer-v5", settings)
    assert args == mujoco.Args(
        env_id="Swimmer-v5", cuda=False, save_every=10**9, minibatch_size=64, envpool=False, learning_rate=1e-3
    )


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(rounds=0), "at least 1"),
        (dict(iterations=0), "at least 1"),
        (dict(only=("DQN",)), "no 'DQN' to measure; there are: BDPG, "),
        (dict(set=("minibatch-size",)), "NAME=VALUE"),
        (dict(set=("minibatch-size=many",)), "NAME=VALUE"),
        (dict(against=Path("nowhere")), "no scripts in nowhere"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message, capsys):
    with pytest.raises(SystemExit) as stop:
        speed.main(speed.Args(**wrong))
    assert stop.value.code == 2 and message in capsys.readouterr().err

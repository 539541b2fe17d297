"""Short real runs of train(): repeatable, logged in full, and wired as Algorithm 1 says."""

import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv
from conftest import (
    ATARI,
    BDPG,
    DISTRIBUTIONAL,
    MUJOCO,
    PPO,
    SCRIPTS,
    frozen,
    is_atari,
    is_bdpg,
    read_scalars,
    short_args,
    spy,
)

pytestmark = pytest.mark.usefixtures("short_games", "lazy_disk")
on_atari = pytest.mark.parametrize("script", ATARI, indirect=True)
distributional = pytest.mark.parametrize("script", DISTRIBUTIONAL, indirect=True)

METRICS = {
    *("charts/episodic_return", "charts/learning_rate", "charts/steps_per_second"),
    *(f"losses/{name}" for name in ("policy", "entropy", "approx_kl", "clip_fraction", "grad_norm")),
    "return_model/explained_variance",
}
OWN_METRICS = {
    "bdpg": {
        *(f"losses/{name}" for name in ("discriminator", "discriminator_accuracy", "energy", "generator")),
        *("losses/encoder_prior", "losses/encoder_grad_norm"),
        *(f"return_model/{name}" for name in ("coverage_80", "residual_scale", "prior_mean_abs", "encoder_std_min")),
    },
    "ppo_wgan": {
        *(f"losses/{name}" for name in ("critic", "critic_w1", "generator", "mean")),
        *("return_model/coverage_80", "return_model/residual_scale"),
    },
    "ppo_qr": {"losses/quantile", "return_model/coverage_80"},
    "ppo": {"losses/value"},
}
CURIOSITY_METRICS = {"curiosity/information_gain", "curiosity/information_gain_p99"}


def metrics_of(script):
    """All that a run without curiosity logs."""
    return METRICS | OWN_METRICS[script.__name__.rpartition("_")[0]]


def without_curiosity(script):
    """Overrides for short_args; only BDPG has a curiosity to switch off."""
    return dict(eta=0.0) if is_bdpg(script) else {}


def test_same_seed_same_run_bit_for_bit(script, tmp_path):
    first, again, other = (
        script.train(short_args(script, tmp_path / name, seed=seed)).state_dict()
        for name, seed in (("first", 3), ("again", 3), ("other", 4))
    )
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not all(torch.equal(value, other[name]) for name, value in first.items())


def test_run_folder_is_complete(script, tmp_path):
    args = short_args(script, tmp_path)
    script.train(args)
    scalars = read_scalars(tmp_path)
    assert set(scalars) == metrics_of(script) | (CURIOSITY_METRICS if is_bdpg(script) else set())
    assert all(np.isfinite(value) for values in scalars.values() for _, value in values)
    assert [step for step, _ in scalars["losses/policy"]] == [32, 64, 96]
    fractions = np.array([value for _, value in scalars["charts/learning_rate"]]) / args.learning_rate
    np.testing.assert_allclose(fractions, [1, 2 / 3, 1 / 3], rtol=1e-6)

    (run_json,) = tmp_path.rglob("run.json")
    record = json.loads(run_json.read_text())
    assert record["script"] == Path(script.__file__).name
    assert record["args"] == vars(args) and record["args"]["seed"] == 3
    assert record["versions"]["torch"] == version("torch") and record["versions"]["gymnasium"] == version("gymnasium")
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(script.__file__).parent, capture_output=True, text=True)
    assert record["git"] == git.stdout.strip()


def test_python_version_is_recorded(shared, tmp_path):
    shared.train(short_args(shared, tmp_path, iterations=1))
    (run_json,) = tmp_path.rglob("run.json")
    assert json.loads(run_json.read_text())["python"].startswith(platform.python_version())


def test_run_without_git(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    script.train(short_args(script, tmp_path, iterations=1))
    (run_json,) = tmp_path.rglob("run.json")
    assert json.loads(run_json.read_text())["git"] == ""


def test_weights_and_biases_listens_before_the_log_is_opened(script, tmp_path, monkeypatch):
    """It replaces a class that an open log has used already."""
    order, writer = [], script.SummaryWriter
    wandb = SimpleNamespace(init=lambda **options: order.append(options))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(script, "SummaryWriter", lambda *args, **kwargs: order.append("log") or writer(*args, **kwargs))
    args = short_args(script, tmp_path, iterations=1, track=True)
    script.train(args)
    options, log = order
    assert log == "log" and options["sync_tensorboard"] and options["config"] == vars(args)
    assert (options["dir"] / "run.json").exists() and options["name"] == options["dir"].name


@pytest.mark.parametrize("anneal_lr, fractions", [(True, [1, 2 / 3, 1 / 3]), (False, [1, 1, 1])])
def test_every_learning_rate_is_annealed(script, tmp_path, monkeypatch, anneal_lr, fractions):
    made, descend, seen = spy(monkeypatch, script, "make_optimizers"), script.descend, []

    def watched(optimizer, *args):
        (name,) = (name for name, one in made[0][1].items() if one is optimizer)
        seen.append((name, [group["lr"] for group in optimizer.param_groups]))
        return descend(optimizer, *args)

    monkeypatch.setattr(script, "descend", watched)
    args = short_args(script, tmp_path, update_epochs=1, minibatch_size=32, anneal_lr=anneal_lr)
    fresh = script.make_optimizers(script.train(args), args)
    assert {name for name, _ in seen} == fresh.keys()
    for step, (name, rates) in enumerate(seen):
        fraction = fractions[3 * step // len(seen)]
        assert rates == pytest.approx([fraction * group["lr"] for group in fresh[name].param_groups], rel=1e-6)


def test_scores_are_whole_episodes(script, tmp_path, monkeypatch, capsys):
    """What is logged, printed and saved, against the sum of what the environments paid."""
    steps = spy(monkeypatch, script.Environments, "step")
    script.train(short_args(script, tmp_path, iterations=4))
    running, lengths, expected = np.zeros(2), np.zeros(2), []
    cut_after = 15 if is_atari(script) else 7
    for t, (_, (_, rewards, _, _, _, ended)) in enumerate(steps, start=1):
        running, lengths = running + rewards, lengths + 1
        for i in np.flatnonzero(ended):
            expected.append((2 * t, running[i]))
            assert lengths[i] == cut_after
            running[i] = lengths[i] = 0
    assert len(expected) == 2 * (64 // cut_after)
    returns, scores = read_scalars(tmp_path)["charts/episodic_return"], [score for _, score in expected]
    assert [step for step, _ in returns] == [step for step, _ in expected]
    np.testing.assert_allclose([value for _, value in returns], scores, rtol=1e-6)
    assert f"score {np.mean(scores):.1f}: " in capsys.readouterr().out.splitlines()[-1]
    (checkpoint,) = tmp_path.rglob("checkpoint-*.pt")
    np.testing.assert_allclose(torch.load(checkpoint)["recent_scores"], scores, rtol=1e-6)


def spied_run(script, tmp_path, monkeypatch, **overrides):
    """A run whose calls of k_step_gae are recorded: for x and for the policy in turn; plain PPO's one is for both."""
    gae = spy(monkeypatch, script, "k_step_gae")
    kl = spy(monkeypatch, script, "kl_divergence") if is_bdpg(script) else []
    agent = script.train(short_args(script, tmp_path, **overrides))
    if script.__name__ in PPO:
        gae = [call for call in gae for _ in range(2)]
    return agent, [call[0][0] for call in gae[0::2]], [call[0][0] for call in gae[1::2]], gae, kl


@pytest.mark.parametrize(
    "script, overrides",
    [(name, {}) for name in SCRIPTS] + [(name, dict(eta=0.0)) for name in BDPG],
    indirect=["script"],
)
def test_targets_use_the_rewards_of_the_task_whatever_the_curiosity(script, tmp_path, monkeypatch, overrides):
    """In units of the standard deviation, over all that came before, of the discounted sum of an episode's rewards."""
    paid = spy(monkeypatch, script.Environments, "step")
    _, target_rewards, _, _, _ = spied_run(script, tmp_path, monkeypatch, **overrides)
    running, sums = np.zeros(2), []
    for _, (_, rewards, terminated, truncated, _, _) in paid:
        running = 0.99 * running + rewards
        sums.append(running)
        running = np.where(terminated | truncated, 0, running)
    raw = np.array([rewards for _, (_, rewards, *_) in paid])
    assert raw.any() and len(target_rewards) == 3
    for n, rewards in enumerate(target_rewards):
        expected = np.clip(raw[16 * n : 16 * (n + 1)] / np.sqrt(np.var(sums[: 16 * (n + 1)]) + 1e-8), -10, 10)
        np.testing.assert_allclose(rewards, expected, rtol=1e-5, atol=1e-6)


def test_without_curiosity_the_policy_gets_the_plain_advantage(script, tmp_path, monkeypatch):
    agent, _, _, gae, kl = spied_run(script, tmp_path, monkeypatch, **without_curiosity(script))
    assert len(gae) == 6 and not kl
    for (args_x, advantages_x), (args_policy, advantages_policy) in zip(gae[0::2], gae[1::2], strict=True):
        assert torch.equal(args_x[0], args_policy[0]) and torch.equal(advantages_x, advantages_policy)
    assert not is_bdpg(script) or agent.u_stats.count == 0
    assert set(read_scalars(tmp_path)) == metrics_of(script)


def test_curiosity_is_the_clipped_gain_in_units_of_earlier_gains(bdpg, tmp_path, monkeypatch):
    """With made-up gains, half of which are above the cap."""
    monkeypatch.setattr(bdpg, "kl_divergence", lambda q_x, q_g: torch.rand(q_x.mean.shape))  # its sum has mean 1
    _, target_rewards, policy_rewards, _, kl = spied_run(bdpg, tmp_path, monkeypatch, eta=0.3, u_bar=1.0)
    gains = [u.double().sum(-1).clamp(max=1.0).numpy() for _, u in kl]
    assert 0.3 < np.mean([gain == 1 for gain in gains]) < 0.7
    assert torch.equal(policy_rewards[0], target_rewards[0])  # no earlier gains, no bonus
    for n in (1, 2):
        earlier = np.concatenate(gains[:n])
        t = 2 * (n + 1)  # 2 epochs an iteration
        bonus = 0.3 * np.sqrt(np.log(t) / t) * (gains[n] - earlier.mean()) / earlier.std()
        np.testing.assert_allclose((policy_rewards[n] - target_rewards[n]).numpy(), bonus, rtol=1e-4, atol=1e-5)
    logged = read_scalars(tmp_path)["curiosity/information_gain"]
    np.testing.assert_allclose([value for _, value in logged], [gain.mean() for gain in gains], rtol=1e-5)


class SumOfEmbedding(torch.nn.Module):
    """In place of plain PPO's layer for the value."""

    def forward(self, c):
        return c.sum(-1, keepdim=True)


def test_truncated_steps_bootstrap_from_their_own_last_observation(script, tmp_path, monkeypatch):
    """Returns are made a known function of the state, and the networks too slow to change: next_g can be computed
    afterwards."""
    if script.__name__ in PPO:
        make_agent = script.Agent
        monkeypatch.setattr(
            script, "Agent", lambda *args: setattr(agent := make_agent(*args), "value", SumOfEmbedding()) or agent
        )
    else:
        sums = lambda self, c, n: c.sum(-1).expand(n, *c.shape[:-1]).clone()  # noqa: E731
        monkeypatch.setattr(script.ReturnModel, "sample", sums)
    steps = spy(monkeypatch, script.Environments, "step")
    options = dict(iterations=1, num_steps=32) | frozen(script)
    if not is_atari(script):
        options |= dict(env_id="ShortHopper-v0", num_steps=128)  # falls, or is cut after 18 steps
    agent, _, _, gae, _ = spied_run(script, tmp_path, monkeypatch, **options)
    (_, g, next_g, terminations, dones, *_), _ = gae[0]
    if not is_atari(script):
        agent.obs_stats = script.RunningMeanStd(agent.obs_stats.mean.shape)  # as it was during the rollout

    def return_of(raw_observation):
        with torch.no_grad():
            return agent.trunk(agent.observe(raw_observation[None])).sum()

    cuts = falls = 0
    for t, (_, (obs, _, terminated, truncated, final_obs, _)) in enumerate(steps):
        assert torch.equal(terminations[t], torch.tensor(terminated))
        assert torch.equal(dones[t], torch.tensor(terminated | truncated))
        for i in range(2):
            if terminated[i]:
                falls += 1  # whatever next_g is here, k_step_gae does not use it
            elif truncated[i]:
                expected, wrong = return_of(final_obs[i]), return_of(obs[i])
                torch.testing.assert_close(next_g[t, i], expected, rtol=1e-4, atol=1e-3)
                assert abs(next_g[t, i] - wrong) > 0.01  # the next episode's first state would have been noticed
                cuts += 1
            elif t + 1 < len(steps):
                assert next_g[t, i] == g[t + 1, i]
            else:
                torch.testing.assert_close(next_g[t, i], return_of(obs[i]), rtol=1e-4, atol=1e-3)
    assert cuts >= 2 and (falls > 0) != is_atari(script)


def test_rollout_is_as_long_as_the_bootstrap(script, tmp_path, monkeypatch):
    options = dict(num_steps=8, bootstrap_length=24, iterations=1)
    _, target_rewards, _, gae, _ = spied_run(script, tmp_path, monkeypatch, **options)
    assert target_rewards[0].shape == (24, 2) and gae[0][0][-1] == 24


def test_a_short_bootstrap_leaves_the_rollout_alone(script, tmp_path, monkeypatch):
    options = dict(num_steps=16, bootstrap_length=4, iterations=1)
    _, target_rewards, _, gae, _ = spied_run(script, tmp_path, monkeypatch, **options)
    assert target_rewards[0].shape == (16, 2) and gae[0][0][-1] == 4


def test_slope_penalty_is_lazy_but_keeps_its_weight(bdpg, tmp_path, monkeypatch):
    """At every fourth step of D, fourfold: on average the weight that was asked for. Here with made-up slopes of 100.
    The adversaries learn from every second of the 16 minibatches."""
    made, losses = spy(monkeypatch, bdpg, "make_optimizers"), spy(monkeypatch, bdpg, "descend")
    monkeypatch.setattr(torch.autograd, "grad", lambda output, inputs, **_: (torch.full_like(inputs, 100.0),))
    options = dict(minibatch_size=4, update_epochs=2, r1_coef=0.25, adversarial_interval=2, iterations=1)
    bdpg.train(short_args(bdpg, tmp_path, **options))
    discriminator = made[0][1]["discriminator"]
    losses = [loss.item() for (optimizer, loss, _), _ in losses if optimizer is discriminator]
    penalty = 4 * 0.25 * 3 * 100**2  # x and two dimensions of z
    assert losses == pytest.approx(2 * ([penalty] + 3 * [0]), rel=1e-3, abs=20)


def test_sampled_targets_leave_the_advantage_alone(script, tmp_path, monkeypatch):
    """--target sr draws x; the policy's advantage is still generalised advantage estimation."""
    gae, draws = spy(monkeypatch, script, "k_step_gae"), spy(monkeypatch, script, "sr_targets")
    script.train(short_args(script, tmp_path, target="sr", iterations=2, **without_curiosity(script)))
    assert len(draws) == 2
    for (gae_args, _), (sr_args, _) in zip(gae[len(gae) // 2 - 1 :: len(gae) // 2], draws, strict=True):
        assert torch.equal(gae_args[0], sr_args[0]) and torch.equal(gae_args[2], sr_args[1])


@distributional
def test_many_return_samples_are_averaged_for_the_policy_only(script, tmp_path, monkeypatch):
    samples = spy(monkeypatch, script.ReturnModel, "sample")
    _, _, _, gae, _ = spied_run(script, tmp_path, monkeypatch, num_return_samples=5, iterations=1)
    drawn = samples[0][1][:, :-1]
    (_, g_for_x, *_), (_, g_for_policy, *_) = gae[0][0], gae[1][0]
    assert torch.equal(g_for_x, drawn[0])
    torch.testing.assert_close(g_for_policy, drawn.mean(0))


@on_atari
def test_a_lost_life_ends_the_learning_episode_but_not_the_game(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "AtariVectorEnv", AtariVectorEnv)  # whole games
    gae, steps = spy(monkeypatch, script, "k_step_gae"), spy(monkeypatch, script.Environments, "step")
    options = dict(env_id="BreakoutNoFrameskip-v4", num_steps=64, iterations=1, update_epochs=1)
    script.train(short_args(script, tmp_path, **options))
    terminations, dones = gae[0][0][3:5]
    lost = torch.tensor(np.array([result[2] for _, result in steps]))
    assert 2 <= lost.sum() < 10 and torch.equal(terminations, lost) and torch.equal(dones, lost)
    assert "charts/episodic_return" not in read_scalars(tmp_path)


@on_atari
def test_frames_reach_the_network_as_bytes(script, tmp_path, monkeypatch):
    calls = spy(monkeypatch, script.Trunk, "forward")
    script.train(short_args(script, tmp_path, iterations=1))
    assert calls and all(args[1].dtype == torch.uint8 for args, _ in calls)


def test_runs_started_in_the_same_second_do_not_share_a_folder(script, tmp_path, monkeypatch):
    """As in a loop over --gamma that starts its runs side by side."""
    monkeypatch.setattr(script.time, "strftime", lambda *_: "20250101-000000")
    script.train(short_args(script, tmp_path, gamma=0.8, iterations=1))
    with pytest.raises(FileExistsError):  # main() makes a sentence of it
        script.train(short_args(script, tmp_path, gamma=0.9, iterations=1))
    (record,), (_,) = tmp_path.rglob("run.json"), tmp_path.rglob("events.out.tfevents.*")
    assert json.loads(record.read_text())["args"]["gamma"] == 0.8


@pytest.mark.parametrize("script", MUJOCO, indirect=True)
def test_learns_to_balance_a_pole(script, tmp_path):
    """A random policy keeps the pole up for 6 steps on average."""
    options = dict(env_id="InvertedPendulum-v5", total_timesteps=24_576, num_envs=8, seed=1, cuda=False)
    script.train(script.Args(run_dir=str(tmp_path), **options))
    scores = read_scalars(tmp_path)["charts/episodic_return"]
    first = [score for step, score in scores if step <= 1_024]  # two rollouts
    last = [score for step, score in scores if step > 18_432]
    assert np.mean(first) < 20 and np.mean(last) > 500, (np.mean(first), np.mean(last))


def test_an_infinite_argument_is_recorded_as_valid_json(mujoco, tmp_path):
    mujoco.train(short_args(mujoco, tmp_path, iterations=1, u_bar=float("inf")))
    (run_json,) = tmp_path.rglob("run.json")
    assert json.loads(run_json.read_text(), parse_constant=pytest.fail)["args"]["u_bar"] == float("inf")

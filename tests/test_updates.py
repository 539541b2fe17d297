"""The updates of real runs: every loss, its gradients, and what it may move, against formulas written out anew."""

import copy
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    BDPG,
    DISTRIBUTIONAL,
    MAIN,
    OWN,
    PPO,
    QR,
    WGAN,
    copy_of,
    frozen,
    is_atari,
    is_bdpg,
    moved_names,
    read_scalars,
    short_args,
    spy,
)
from torch.nn.functional import binary_cross_entropy_with_logits

pytestmark = pytest.mark.usefixtures("lazy_disk")
# Algorithm 1 as it is printed.
PAPER = "--energy-coef 0 --r1-coef 0 --num-return-samples 1 --no-relative-returns --encoder-std-min 0 "
PAPER += "--adversarial-interval 1"
PAPER_ARGS = dict(energy_coef=0.0, r1_coef=0.0, num_return_samples=1, relative_returns=False, encoder_std_min=0.0)
PAPER_ARGS |= dict(adversarial_interval=1)


def test_every_step_of_training_moves_exactly_its_own_networks(script, tmp_path, monkeypatch):
    """By comparing all of the agent before and after each step."""
    agents, made = spy(monkeypatch, script, "Agent"), spy(monkeypatch, script, "make_optimizers")
    descend, steps = script.descend, []

    def watched(optimizer, *args):
        agent = agents[0][1]
        (name,) = (name for name, one in made[0][1].items() if one is optimizer)
        before = copy_of(agent)
        result = descend(optimizer, *args)
        own = {key for key, _ in agent.named_parameters() if key.startswith(OWN[name])}
        assert {key for key in own if key.endswith("weight")} <= moved_names(agent, before) <= own
        steps.append(name)
        return result

    monkeypatch.setattr(script, "descend", watched)
    script.train(short_args(script, tmp_path, iterations=1, update_epochs=1))
    adversaries = {**dict.fromkeys(BDPG, ["discriminator", "encoder and prior"]), **dict.fromkeys(WGAN, ["critic"])}
    every = [*adversaries.get(script.__name__, []), MAIN]
    second_alone = script.__name__ in BDPG and script.Args().adversarial_interval == 2
    assert steps == every + ([MAIN] if second_alone else every)


class DeeperPolicy(torch.nn.Module):
    """The policy with a layer before it: what a fork might do."""

    def __init__(self, policy, dim, from_state):
        super().__init__()
        self.policy, self.deeper, self.from_state = policy, torch.nn.Linear(dim, dim), from_state

    def forward(self, obs, c):
        return self.policy(obs, self.deeper(c)) if self.from_state else self.policy(self.deeper(obs), c)


def test_a_layer_that_a_fork_adds_is_trained(script, tmp_path, monkeypatch):
    class Fork(script.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            dim = 512 if is_atari(script) else envs.observation_space.shape[0]
            self.policy = DeeperPolicy(self.policy, dim, is_atari(script))
            self.at_first = copy.deepcopy(self.policy.state_dict())

    monkeypatch.setattr(script, "Agent", Fork)
    made = spy(monkeypatch, script, "make_optimizers")
    agent = script.train(short_args(script, tmp_path, iterations=1))
    for name, value in agent.policy.state_dict().items():
        assert not torch.equal(value, agent.at_first[name]), name
    main = {parameter for group in made[0][1][MAIN].param_groups for parameter in group["params"]}
    assert main >= set(agent.policy.parameters())


# --- runs that are watched ---


def rows_of(x, all_x):
    """Which steps of the rollout these targets belong to."""
    rows = (all_x == x.unsqueeze(-1)).float().argmax(-1)
    assert torch.equal(all_x[rows], x) and len(set(rows.tolist())) == len(x)
    return rows


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def gradients(loss, parameters):
    return torch.autograd.grad(loss, parameters, retain_graph=True)


def watch(script, monkeypatch):
    """Records what a run of one iteration computes, and before each descent calls the check of that optimiser."""
    seen = SimpleNamespace(agent=None, checks={}, descents=[])
    seen.gae, seen.observed = spy(monkeypatch, script, "k_step_gae"), spy(monkeypatch, script.Agent, "observe")
    agents, made = spy(monkeypatch, script, "Agent"), spy(monkeypatch, script, "make_optimizers")
    for name in ("centre", "encode", "sample"):
        if hasattr(getattr(script, "ReturnModel", None), name):
            setattr(seen, name, spy(monkeypatch, script.ReturnModel, name))
    seen.policies, seen.ppo = spy(monkeypatch, script.Policy, "forward"), spy(monkeypatch, script, "ppo_loss")
    seen.networks = spy(monkeypatch, script.ConditionalMLP, "forward") if hasattr(script, "ConditionalMLP") else []
    descend = script.descend

    def watched(optimizer, loss, max_grad_norm):
        seen.agent = agents[0][1]
        (name,) = (name for name, one in made[0][1].items() if one is optimizer)
        seen.descents.append(name)
        if name in seen.checks:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            seen.checks[name](loss, parameters)
        return descend(optimizer, loss, max_grad_norm)

    monkeypatch.setattr(script, "descend", watched)
    return seen


def targets(seen, num_steps):
    """Of the rollout: the Bellman targets x, the returns g and the observations, one row for each step."""
    (_, g, *_), advantages = seen.gae[0]
    obs = torch.stack([result for _, result in seen.observed[:num_steps]])
    return (advantages + g).flatten(), g.flatten(), obs.flatten(0, 1)


def last_call(seen, network):
    return next((inputs, c, out) for (net, inputs, c), out in reversed(seen.networks) if net is network)


def entropy_of(policy):
    if isinstance(policy, torch.distributions.Categorical):
        return -(policy.probs * policy.probs.log()).sum(-1).mean()
    return (policy.stddev.log() + 0.5 * np.log(2 * np.pi * np.e)).sum(-1).mean()


# --- BDPG ---


@pytest.mark.parametrize("options", [dict(adversarial_interval=1), PAPER_ARGS], ids=["default", "paper"])
def test_losses_and_gradients_of_bdpg(bdpg, tmp_path, monkeypatch, options):
    """Lines 14-20. Every loss is computed anew from the targets, states and latents of the same rows of the rollout,
    with the networks as they are at that moment, and so are its gradients in all parameters that it may move."""
    args = short_args(
        bdpg,
        tmp_path,
        iterations=1,
        update_epochs=4,
        num_steps=32,
        adversarial_learning_rate=0.01,
        ent_coef=0.03,
        **options,
    )
    seen, minibatches, noise = watch(bdpg, monkeypatch), [], []

    def check_discriminator(loss, parameters):
        model, now = seen.agent.return_model, SimpleNamespace()
        all_x, _, all_obs = targets(seen, 32)
        (_, now.x, b, now.s), q = seen.encode[-1]
        now.rows = rows_of(now.x, all_x)
        same(now.s, seen.agent.trunk(all_obs[now.rows]))
        same(b, seen.centre[0][1].flatten()[now.rows])
        assert not now.x.requires_grad and not now.s.requires_grad and not b.requires_grad
        z, at_s, out = last_call(seen, model.generator)
        now.x_tilde, now.b, now.w = out.squeeze(-1), b, model.residual_scale.clone()
        inputs, c_of_d, _ = last_call(seen, model.discriminator)
        assert at_s is now.s and c_of_d is now.s
        # The joint of (x̃, z) comes first; returns are relative, or plain.
        now.z, now.z_tilde, now.q, now.prior = z, inputs[1][:, 1:], q, model.prior_mean(now.s)
        if not args.relative_returns:
            assert now.w == 1 and not b.any()
        same(inputs[0], torch.cat([((now.x_tilde - b) / now.w)[:, None], z], -1))
        same(inputs[1][:, 0], (now.x - b) / now.w)
        noise.extend([(z - now.prior).detach(), ((now.z_tilde - q.mean) / q.stddev).detach()])

        D = lambda joint: model.discriminator(joint, now.s).squeeze(-1)  # noqa: E731
        generated, inferred = (joint.detach().requires_grad_() for joint in inputs)
        ones, zeros = torch.ones_like(now.x), torch.zeros_like(now.x)
        truth = [binary_cross_entropy_with_logits(D(joint), y) for joint, y in ((generated, ones), (inferred, zeros))]
        truth = sum(truth)
        if len(minibatches) % 4 == 0 and args.r1_coef > 0:  # every fourth time, fourfold
            slopes = torch.autograd.grad((D(generated) + D(inferred)).sum(), (generated, inferred), create_graph=True)
            truth = truth + 4 * args.r1_coef * (slopes[0].square().sum(-1) + slopes[1].square().sum(-1)).mean() / 2
            exact, step = copy.deepcopy(model.discriminator).double(), 1e-6 * torch.eye(3).double()
            with torch.no_grad():
                joint, s = generated.double(), now.s.double()
                finite = [(exact(joint + h, s) - exact(joint - h, s)) / 2e-6 for h in step]
                torch.testing.assert_close(slopes[0].double(), torch.cat(finite, -1), rtol=1e-3, atol=1e-4)
        same(loss, truth)
        for found, expected in zip(gradients(loss, parameters), gradients(truth, parameters), strict=True):
            same(found, expected)
        assert {*parameters} == {*model.discriminator.parameters()}
        minibatches.append(now)

    def check_encoder_and_prior(loss, parameters):
        """By a discriminator that has just learnt. Encoder and prior learn through their latents, the prior through G
        as well, which stays fixed."""
        model, now = seen.agent.return_model, minibatches[-1]
        u = ((now.x - now.b) / now.w)[:, None]
        mean, raw_std = model.encoder(u, now.s).chunk(2, -1)
        z_tilde = mean + torch.log1p(raw_std.exp()) * noise[-1] + args.encoder_std_min * noise[-1]
        z = model.prior_mean(now.s) + noise[-2]
        x_tilde = model.generator(z, now.s)
        generated = torch.cat([(x_tilde - now.b[:, None]) / now.w, z], -1)
        D_generated = model.discriminator(generated, now.s)
        D_inferred = model.discriminator(torch.cat([u, z_tilde], -1), now.s)
        truth = binary_cross_entropy_with_logits(D_generated, torch.zeros_like(D_generated))
        truth = truth + binary_cross_entropy_with_logits(D_inferred, torch.ones_like(D_inferred))
        same(loss, truth)
        for found, expected in zip(gradients(loss, parameters), gradients(truth, parameters), strict=True):
            same(found, expected)
        assert {*parameters} == {*model.encoder.parameters(), *model.prior_mean.parameters()}

    def check_main(loss, parameters):
        """Of the paper's regression, the energy distance, the clipped surrogate and the entropy."""
        model, now = seen.agent.return_model, minibatches[-1]
        latents, c, _ = last_call(seen, model.generator)
        same(c, now.s)
        assert c.requires_grad
        same(latents[0], now.z_tilde)
        noise.append((latents[1] - model.prior_mean(now.s)).detach())
        reconstruction, g_prime = model.generator(latents.detach(), c).squeeze(-1)
        truth = (reconstruction - now.x).square().mean()
        if args.energy_coef > 0:
            energy = 2 * (g_prime - now.x).abs().mean() - 2 * (g_prime - now.x_tilde.detach()).abs().mean()
            truth = truth + args.energy_coef * now.w * energy
        policy_loss, _ = seen.ppo[-1][1]
        truth = policy_loss - 0.03 * entropy_of(seen.policies[-1][1]) + 0.5 * truth
        same(loss, truth)
        for found, expected in zip(gradients(loss, parameters), gradients(truth, parameters), strict=True):
            same(found, expected)

    seen.checks = {"discriminator": check_discriminator, "encoder and prior": check_encoder_and_prior}
    seen.checks[MAIN] = check_main
    bdpg.train(args)
    assert len(minibatches) == 16 and len(seen.descents) == 48
    draws = [torch.cat(noise[first::3]) for first in (0, 1, 2)]  # of z, z̃ and z', 16 x 16 x 2 each
    for one, other in zip(draws, draws[1:] + draws[:1], strict=True):  # standard normal and independent
        assert one.numel() == 512 and abs(one.mean()) < 5 / 512**0.5 and abs(one.std() - 1) < 5 / 1024**0.5
        assert abs((one * other).mean()) < 5 / 512**0.5


def frozen_run(script, tmp_path, monkeypatch, **options):
    """One iteration in which the networks do not change: what was seen, and x, g and c(s) of every step."""
    seen = watch(script, monkeypatch)
    args = short_args(script, tmp_path, iterations=1, update_epochs=1, **options, **frozen(script))
    seen.agent = script.train(args).requires_grad_(False)
    all_x, g, obs = targets(seen, args.num_steps)
    return seen, all_x, g, seen.agent.trunk(obs)


def test_the_discriminators_accuracy_is_the_share_that_it_tells_right(bdpg, tmp_path, monkeypatch):
    seen, *_ = frozen_run(bdpg, tmp_path, monkeypatch)
    logits = [out for (net, *_), out in seen.networks if net is seen.agent.return_model.discriminator]
    right = np.mean([[(D[0] > 0).float().mean(), (D[1] < 0).float().mean()] for D in logits])
    ((_, logged),) = read_scalars(tmp_path)["losses/discriminator_accuracy"]
    assert logged == pytest.approx(right, abs=1e-6) and 0 < logged < 1


def test_information_gain_is_that_of_the_target_over_the_sampled_return(bdpg, tmp_path, monkeypatch):
    """Line 12, Eq. 13: KL(q(z|x, s) || q(z|g, s)), in this direction, at every step."""
    gains = spy(monkeypatch, bdpg, "kl_divergence")
    seen, x, g, embeddings = frozen_run(bdpg, tmp_path, monkeypatch)
    ((_, found),) = gains
    model = seen.agent.return_model
    b = model.centre(embeddings)
    (mean_x, std_x), (mean_g, std_g) = (
        (q.mean.double(), q.stddev.double()) for q in (model.encode(x, b, embeddings), model.encode(g, b, embeddings))
    )
    kl = lambda m, s, n, t: ((t / s).log() + (s**2 + (m - n) ** 2) / (2 * t**2) - 0.5).sum(-1)  # noqa: E731
    expected = kl(mean_x, std_x, mean_g, std_g)
    torch.testing.assert_close(found.sum(-1).flatten().double(), expected, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(expected, kl(mean_g, std_g, mean_x, std_x), rtol=1e-2)  # would have been noticed
    ((_, logged),) = read_scalars(tmp_path)["curiosity/information_gain"]
    assert logged == pytest.approx(expected.clamp(max=bdpg.Args().u_bar).mean().item(), rel=1e-3)


def test_centres_and_residuals_are_those_of_the_rollout(bdpg, tmp_path, monkeypatch):
    seen, all_x, _, embeddings = frozen_run(bdpg, tmp_path, monkeypatch)
    model = seen.agent.return_model
    b = model.generator(model.prior_mean(embeddings), embeddings).squeeze(-1)
    same(seen.centre[0][1].flatten(), b)
    torch.testing.assert_close(model.residual_scale, (all_x - b).abs().mean(), rtol=1e-4, atol=0)


# --- Algorithm 1 as it is printed ---


def test_algorithm_1_as_printed_is_one_command(bdpg, tmp_path):
    env_id = "PongNoFrameskip-v4" if is_atari(bdpg) else "Hopper-v5"
    size = "--total-timesteps 64 --num-envs 2 --num-steps 16 --minibatch-size 16 --eta 0.1 --no-cuda"
    command = f"{sys.executable} {bdpg.__name__}.py {PAPER} --env-id {env_id} {size} --run-dir {tmp_path}"
    run = subprocess.run(shlex.split(command), cwd=Path(bdpg.__file__).parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    args = vars(bdpg.load_checkpoint(next(tmp_path.iterdir()))["args"])
    assert {name: args[name] for name in PAPER_ARGS} == PAPER_ARGS
    assert all(np.isfinite(value) for values in read_scalars(tmp_path).values() for _, value in values)


def test_algorithm_1_as_printed_sees_plain_returns(bdpg, tmp_path, monkeypatch):
    """Encoder and discriminator get x, g and x̃ themselves, and advantages come from the sample that x comes from."""
    seen, all_x, g, _ = frozen_run(bdpg, tmp_path, monkeypatch, **PAPER_ARGS)
    model, inputs = seen.agent.return_model, {}
    for (net, given, _), out in seen.networks:
        inputs.setdefault(net, []).append((given, out))
    of_x, of_g = inputs[model.encoder][1:3]  # after those of the log, line 12
    assert torch.equal(of_x[0].flatten(), all_x) and torch.equal(of_g[0].flatten(), g)
    minibatches = inputs[model.encoder][3:]
    joints = [given for given, _ in inputs[model.discriminator]]
    assert len(minibatches) == 2 and len(joints) == 4
    for n, (x, _) in enumerate(minibatches):
        rows_of(x.flatten(), all_x)
        for joint in joints[2 * n : 2 * n + 2]:
            assert torch.equal(joint[1][:, :1], x)
            same(joint[0][:, :1], next(out for z, out in inputs[model.generator] if torch.equal(z, joint[0][:, 1:])))
    (of_target, _), (of_policy, _) = seen.gae
    assert torch.equal(of_target[1], of_policy[1]) and torch.equal(of_target[2], of_policy[2])


# --- baselines ---


@pytest.mark.parametrize("script", WGAN, indirect=True)
def test_critic_and_generator_get_targets_centres_and_states_of_the_same_rows(script, tmp_path, monkeypatch):
    """And the critic gets nothing that it could train."""
    calls, generator_calls = spy(monkeypatch, script, "f_loss"), spy(monkeypatch, script, "generator_losses")
    seen, all_x, _, embeddings = frozen_run(script, tmp_path, monkeypatch)
    model = seen.agent.return_model
    all_centres = model.centre(embeddings)
    torch.testing.assert_close(model.residual_scale, (all_x - all_centres).abs().mean(), rtol=1e-4, atol=0)
    assert len(calls) == 2
    for (of_critic, _), (of_generator, _) in zip(calls, generator_calls, strict=True):
        _, x, x_tilde, centre, s, _ = of_critic
        rows = rows_of(x, all_x)
        same(centre, all_centres[rows])
        same(s, embeddings[rows])
        assert not any(value.requires_grad for value in (x, x_tilde, centre, s))
        assert any(torch.equal(x_tilde, samples[0]) for _, samples in seen.sample if samples.shape == (1, len(x)))
        _, generator_x, generator_centre, c = of_generator
        assert generator_x is x and generator_centre is centre and torch.equal(c, s) and c.requires_grad


@pytest.mark.parametrize("script", QR, indirect=True)
def test_quantiles_get_the_targets_of_the_same_rows(script, tmp_path, monkeypatch):
    calls = spy(monkeypatch, script, "quantile_loss")
    seen, all_x, _, embeddings = frozen_run(script, tmp_path, monkeypatch)
    assert len(calls) == 2
    for (quantiles, x), _ in calls:
        same(quantiles, seen.agent.return_model.quantiles(embeddings[rows_of(x, all_x)]))


@pytest.mark.parametrize("script", PPO + QR + WGAN, indirect=True)
def test_main_loss_is_that_of_policy_entropy_and_return_model(script, tmp_path, monkeypatch):
    """PPO's value is regressed on the targets of its own states, with a gradient that reaches the trunk."""
    seen, checked = watch(script, monkeypatch), []
    losses = {
        name: spy(monkeypatch, script, name) for name in ("quantile_loss", "generator_losses") if hasattr(script, name)
    }

    def check(loss, parameters):
        all_x, _, all_obs = targets(seen, 16)
        if script.__name__ in PPO:
            (_, _, advantages, _), _ = seen.ppo[-1]
            rows = rows_of(advantages, seen.gae[0][1].flatten())
            values = seen.agent.value(seen.agent.trunk(all_obs[rows])).flatten()
            return_loss = ((values - all_x[rows]) ** 2).mean()
        elif script.__name__ in QR:
            return_loss = losses["quantile_loss"][-1][1]
        else:
            climb, mean_loss = losses["generator_losses"][-1][1]
            return_loss = climb + 0.7 * mean_loss
        policy_loss, _ = seen.ppo[-1][1]
        truth = policy_loss - 0.03 * entropy_of(seen.policies[-1][1]) + 0.4 * return_loss
        same(loss, truth)
        for found, expected in zip(gradients(loss, parameters), gradients(truth, parameters), strict=True):
            same(found, expected)
        checked.append(len(parameters))

    seen.checks = {MAIN: check}
    options = dict(mean_coef=0.7) if script.__name__ in WGAN else {}
    script.train(short_args(script, tmp_path, iterations=1, ent_coef=0.03, vf_coef=0.4, **options))
    assert len(checked) == 4


@pytest.mark.parametrize("script", PPO + DISTRIBUTIONAL, indirect=True)
def test_policy_gets_the_actions_log_probabilities_and_advantages_of_the_same_rows(script, tmp_path, monkeypatch):
    """Line 20. The networks do not change, so that the log-probability of each action is that of the rollout."""
    steps = spy(monkeypatch, script.Environments, "step")
    options = dict(eta=0.0) if is_bdpg(script) else {}
    seen, all_x, _, embeddings = frozen_run(script, tmp_path, monkeypatch, **options)
    actions = torch.stack([torch.tensor(given[1]) for given, _ in steps]).flatten(0, 1)
    obs = torch.stack([result for _, result in seen.observed[:16]]).flatten(0, 1)
    log_probs = seen.agent.policy(obs, embeddings).log_prob(actions)
    assert len(seen.ppo) == 2
    for (new, old, advantages, _), (_, movement) in seen.ppo:
        rows = rows_of(advantages, seen.gae[-1][1].flatten())
        same(old, log_probs[rows])
        same(new.detach(), log_probs[rows])
        assert movement["clip_fraction"] == 0


# --- what is logged of the return distribution ---


@pytest.mark.parametrize("script", PPO + DISTRIBUTIONAL, indirect=True)
def test_logged_metrics_of_the_return_distribution(script, tmp_path, monkeypatch):
    seen, x, g, _ = frozen_run(script, tmp_path, monkeypatch, num_steps=64)
    logged = {name.removeprefix("return_model/"): values[0][1] for name, values in read_scalars(tmp_path).items()}
    if script.__name__ in PPO:
        explained = 1 - (x - g).var(correction=0) / x.var(correction=0)
    else:
        ((_, returns),) = ((given, result) for given, result in seen.sample if given[2] == 64)
        some_x, returns = x.reshape(64, 2)[::16].flatten().numpy(), returns.flatten(1).numpy()
        explained = 1 - (some_x - returns.mean(0)).var() / some_x.var()
        low, high = np.quantile(returns, [0.1, 0.9], axis=0)
        assert logged["coverage_80"] == pytest.approx(((low <= some_x) & (some_x <= high)).mean(), abs=1e-6)
    assert logged["explained_variance"] == pytest.approx(float(explained), rel=1e-3, abs=1e-4)
    if hasattr(seen.agent, "return_model") and hasattr(seen.agent.return_model, "residual_scale"):
        assert logged["residual_scale"] == pytest.approx(seen.agent.return_model.residual_scale.item(), rel=1e-5)

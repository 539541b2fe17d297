"""The return model: information gain, the losses' values, and which networks each loss reaches."""

import math

import numpy as np
import pytest
import torch
from conftest import BDPG, WGAN, copy_of, is_atari, make_agent, moved_names, random_observations
from torch.distributions import Independent, Normal, kl_divergence


def gaussians(*shape):
    """Means and standard deviations of two diagonal Gaussians."""
    return torch.randn(shape), torch.rand(shape) + 0.2, torch.randn(shape), torch.rand(shape) + 0.2


def test_kl_equals_that_of_torch_distributions(bdpg):
    mean_q, std_q, mean_p, std_p = parameters = gaussians(50, 4, 3)
    expected = kl_divergence(Independent(Normal(mean_q, std_q), 1), Independent(Normal(mean_p, std_p), 1))
    torch.testing.assert_close(bdpg.gaussian_kl(*parameters), expected)


@pytest.mark.parametrize("t, expected", [(4, 0.588705), (10, 0.479853), (100, 0.214597), (10_000, 0.030349)])
def test_curiosity_coefficient_by_hand(bdpg, t, expected):
    assert bdpg.eta_at(1.0, t) == pytest.approx(expected, abs=1e-6)
    assert bdpg.eta_at(0.25, t) == pytest.approx(0.25 * expected, abs=1e-6)


def test_curiosity_coefficient_never_rises(bdpg):
    """log t / t itself rises up to t = e, and is 0 at t = 1: before t = 4 the coefficient stays where it is at 4."""
    values = [bdpg.eta_at(1.0, t) for t in range(1, 50)]
    assert values[0] == values[1] == values[2] == values[3] > 0
    assert all(later < earlier for earlier, later in zip(values[3:], values[4:], strict=False))


def information_gain(bdpg, model, x, g, c):
    centre = model.centre(c)
    return bdpg.gaussian_kl(*model.encode(model.relative(x, centre), c), *model.encode(model.relative(g, centre), c))


def test_information_gain_is_zero_only_for_what_was_expected(bdpg):
    agent, _, _ = make_agent(bdpg)
    c, g = torch.randn(20, agent.trunk.output_dim), torch.randn(20)
    with torch.no_grad():
        assert (information_gain(bdpg, agent.return_model, g, g, c).abs() < 1e-6).all()
        assert (information_gain(bdpg, agent.return_model, g + 1, g, c) > 1e-4).all()


def scale_of(model):
    """The unit in which encoder and discriminator see returns."""
    return 1 / model.relative(torch.ones(1), torch.zeros(1)).item()


@pytest.mark.parametrize("script", BDPG + WGAN, indirect=True)
def test_returns_are_seen_relative_to_the_state_in_units_of_the_residuals(script):
    agent, _, _ = make_agent(script)
    model, x, centre = agent.return_model, torch.randn(6), torch.randn(6)
    torch.testing.assert_close(model.relative(x, centre), ((x - centre) / scale_of(model))[:, None])
    residuals = torch.randn(1000)
    scales = []
    for unit in (1.0, 50.0):  # returns in another unit look the same from the first batch on
        model = make_agent(script, residuals=unit * residuals)[0].return_model
        scales.append(scale_of(model))
    assert 0.5 < scales[0] < 1.5 and scales[1] == pytest.approx(50 * scales[0])
    for _ in range(200):
        previous = scale_of(model)
        model.track_residuals(residuals)
        assert scales[0] <= scale_of(model) * (1 + 1e-6) and scale_of(model) <= previous  # nears the new scale from above
    assert scale_of(model) == pytest.approx(scales[0], rel=1e-3)


def test_latents_have_the_prior_they_are_said_to_have(bdpg):
    agent, _, _ = make_agent(bdpg, latent_dim=3)
    model, c = agent.return_model, torch.randn(2, agent.trunk.output_dim)
    with torch.no_grad():
        mean = model.prior(c)
        z = model.sample_latent(mean.expand(40_000, 2, 3))
        assert mean.shape == (2, 3) and (mean.abs() <= 1).all()
        torch.testing.assert_close(z.mean(0), mean, rtol=0, atol=5 / 200)
        torch.testing.assert_close(z.std(0), torch.ones(2, 3), rtol=0, atol=5 / 280)
        assert model.sample(c, 7).shape == (7, 2)


def test_posterior_is_no_sharper_than_a_tenth_of_the_prior(bdpg):
    """The floor that keeps the information gain finite."""
    agent, _, _ = make_agent(bdpg)
    with torch.no_grad():
        agent.return_model.encoder.output.bias.fill_(-1000.0)  # the encoder is as sure as can be
        _, std = agent.return_model.encode(torch.randn(5, 1), torch.randn(5, agent.trunk.output_dim))
    torch.testing.assert_close(std, torch.full((5, 2), 0.1))


# --- which networks a loss reaches ---


@pytest.mark.parametrize("name, reached", [("ppo", "policy."), ("regression", "return_model.generator.")])
def test_policy_and_regression_losses_reach_their_head_and_the_trunk_only(bdpg, name, reached):
    agent, _, args = make_agent(bdpg)
    o, x = random_observations(bdpg, 8), torch.randn(8)
    c = agent.trunk(o)
    if name == "ppo":
        policy = agent.policy(o, c)
        log_prob = policy.log_prob(policy.sample())
        loss, _, _ = bdpg.ppo_loss(log_prob, log_prob.detach() - 0.05 * torch.randn(8), torch.randn(8), args)
    else:
        _, z_tilde, x_tilde, z_prime = bdpg.sample_joints(agent.return_model, x, torch.randn(8), c.detach())
        loss = sum(bdpg.generator_losses(agent.return_model, x, x_tilde, z_tilde, z_prime, c, law_coef=1.0))
    loss.backward()
    with_gradient = {key for key, p in agent.named_parameters() if p.grad is not None and p.grad.any()}
    heads = {key for key in with_gradient if not key.startswith("trunk.")}
    assert heads and all(key.startswith(reached) for key in heads)
    shares_trunk = is_atari(bdpg) or name == "regression"  # the MuJoCo policy has a network of its own
    assert (heads < with_gradient) == shares_trunk


def test_optimisers_share_no_parameter_and_forget_none(script):
    agent, optimizers, _ = make_agent(script)
    vectors = [vector for optimizer in optimizers.values() for group in optimizer.param_groups for vector in group["params"]]
    owned = [p for vector in vectors for p in vector.parts]
    assert len({id(p) for p in owned}) == len(owned) == len(list(agent.parameters()))
    assert sum(map(len, vectors)) == sum(p.numel() for p in owned)
    with torch.no_grad():
        for vector in vectors:
            vector.fill_(3.0)
    assert all((p == 3).all() for p in agent.parameters())  # the vectors are the parameters, not copies of them


def test_the_prior_learns_through_the_generator_which_stays_fixed(bdpg):
    """Of joints[0] only x̃ is kept: what gradient is left in the prior came through G."""
    agent, optimizers, args = make_agent(bdpg)
    model = agent.return_model
    c = agent.trunk(random_observations(bdpg, 8)).detach()
    joints, _, _, _ = bdpg.sample_joints(model, torch.randn(8), torch.randn(8), c)
    model.prior.zero_grad()
    joints[0][:, 0].square().sum().backward(inputs=list(model.prior.parameters()), retain_graph=True)
    assert all(p.grad.any() for p in model.prior.parameters())
    before = copy_of(agent)
    bdpg.descend(optimizers["encoder and prior"], joints[0][:, 0].square().sum(), args.max_grad_norm)
    assert {name.rsplit(".", 2)[0] for name in moved_names(agent, before)} == {"return_model.prior"}


def test_the_encoder_learns_through_its_latent(bdpg):
    agent, _, _ = make_agent(bdpg)
    c = torch.randn(8, agent.trunk.output_dim)
    joints, _, _, _ = bdpg.sample_joints(agent.return_model, torch.randn(8), torch.randn(8), c)
    joints[1].sum().backward()
    assert {n.split(".")[1] for n, p in agent.named_parameters() if p.grad is not None and p.grad.any()} == {"encoder"}


def test_joints_hold_what_they_say(bdpg, monkeypatch):
    """With a generator that returns the sum of z and an encoder of known mean, the joints can be written down."""
    agent, _, _ = make_agent(bdpg)
    model, n = agent.return_model, 4000
    monkeypatch.setattr(model.generator, "forward", lambda z, c: z.sum(-1, keepdim=True))
    monkeypatch.setattr(model.encoder, "forward", lambda x, c: torch.cat([x, -x, torch.zeros_like(x).repeat(1, 2)], -1))
    c, x, centre = torch.randn(1, agent.trunk.output_dim).repeat(n, 1), torch.randn(n), torch.randn(n, 1)
    with torch.no_grad():
        joints, z_tilde, generated, _ = bdpg.sample_joints(model, x, centre[:, 0], c)
        prior_mean, scale = model.prior(c), scale_of(model)
        _, posterior_std = model.encode(torch.zeros(1, 1), c)
    (x_tilde, z), (relative_x, z_posterior) = (joint.split([1, 2], -1) for joint in joints)
    torch.testing.assert_close(generated, z.sum(-1))
    torch.testing.assert_close(x_tilde, (z.sum(-1, keepdim=True) - centre) / scale)
    torch.testing.assert_close(relative_x, (x[:, None] - centre) / scale)
    assert torch.equal(z_tilde, z_posterior)
    for noise in (z - prior_mean, (z_tilde - torch.cat([relative_x, -relative_x], -1)) / posterior_std):
        # 2 n standard normal draws, within 5 standard errors of their mean and standard deviation
        assert abs(noise.mean()) < 5 / math.sqrt(2 * n) and abs(noise.std() - 1) < 5 / math.sqrt(4 * n)


# --- loss values ---


def test_adversarial_losses_are_cross_entropies(bdpg):
    """D is trained to say 1 to (x̃, z) and 0 to (x, z̃); encoder and prior to make it say the opposite."""
    agent, _, _ = make_agent(bdpg)
    model, c = agent.return_model, torch.randn(16, agent.trunk.output_dim)
    joints = torch.randn(2, 16, 3)
    with torch.no_grad():
        generated, inferred = (model.discriminate(joint, c) for joint in joints)
    d_generated, d_inferred = (1 / (1 + np.exp(-logits.double().numpy())) for logits in (generated, inferred))
    loss, penalty, accuracy = bdpg.discriminator_loss(model, joints, c, r1_coef=0.0)
    assert penalty == 0 and bdpg.discriminator_loss(model, joints, c, r1_coef=1.0)[0] == loss
    assert loss.item() == pytest.approx(-np.mean(np.log(d_generated)) - np.mean(np.log(1 - d_inferred)), rel=1e-5)
    assert accuracy.item() == pytest.approx((np.mean(d_generated > 0.5) + np.mean(d_inferred < 0.5)) / 2)
    fooled = -np.mean(np.log(1 - d_generated)) - np.mean(np.log(d_inferred))
    assert bdpg.encoder_prior_loss(model, joints, c).item() == pytest.approx(fooled, rel=1e-5)


def test_slope_penalty_of_a_known_discriminator(bdpg, monkeypatch):
    """D = w·(x, z) + q x² has the slope w + (2 q x, 0, 0), whose mean square can be written down."""
    agent, _, _ = make_agent(bdpg)
    model, joints, c = agent.return_model, torch.randn(2, 16, 3), torch.randn(16, agent.trunk.output_dim)
    w, q = torch.tensor([0.3, -1.2, 0.7]), 0.4
    monkeypatch.setattr(model.discriminator, "forward", lambda rows, c: ((rows * w).sum(-1) + q * rows[..., 0] ** 2)[..., None])
    slopes = w.expand(2, 16, 3).clone()
    slopes[..., 0] += 2 * q * joints[..., 0]
    penalty = bdpg.discriminator_loss(model, joints, c, 0.5)[1]
    torch.testing.assert_close(penalty, 0.5 * (slopes**2).sum(-1).mean())


def test_slope_penalty_of_the_network_by_finite_differences(bdpg):
    agent, _, _ = make_agent(bdpg)
    model = agent.return_model.double()
    joints, c, step = torch.randn(2, 6, 3).double(), torch.randn(6, agent.trunk.output_dim).double(), 1e-6
    penalty = bdpg.discriminator_loss(model, joints, c, 1.0)[1]
    with torch.no_grad():
        shifts = step * torch.eye(3).double()
        slopes = [(model.discriminate(joints + s, c) - model.discriminate(joints - s, c)) / (2 * step) for s in shifts]
    torch.testing.assert_close(penalty.detach(), sum(slope**2 for slope in slopes).mean(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("law_coef", [0.0, 0.7])
def test_generator_losses_of_a_known_generator(bdpg, monkeypatch, law_coef):
    """With G - b normal around 0, variance 2 a², and x normal, the energy distance 2 E|G - x| - E|G - G'| and its slopes are known:
    with δ = b - E[x] and s² = 2 a² + Var(x), E|G-x| = s sqrt(2/π) exp(-δ²/2s²) + δ erf(δ/(s sqrt 2)); E|G - G'| = 2 a sqrt(2/π)."""
    agent, _, _ = make_agent(bdpg)
    model, n, c = agent.return_model, 40_000, torch.randn(1, agent.trunk.output_dim).expand(40_000, -1)
    a, b, middle = torch.tensor(0.8, requires_grad=True), torch.tensor(-1.5, requires_grad=True), model.prior(c[:1]).sum().item()
    monkeypatch.setattr(model.generator, "forward", lambda z, c: b + a * (z.sum(-1, keepdim=True) - middle))
    x, z_tilde = 0.3 * torch.randn(n) - 2, torch.randn(n, 2)
    _, _, x_tilde, z_prime = bdpg.sample_joints(model, x, torch.zeros(n), c)
    regression, law_matching = bdpg.generator_losses(model, x, x_tilde, z_tilde, z_prime, c, law_coef)
    reconstruction = -1.5 + 0.8 * (z_tilde.sum(-1) - middle)
    assert regression.item() == pytest.approx(np.mean((x - reconstruction).numpy() ** 2), rel=1e-5)
    if law_coef == 0:
        assert law_matching == 0
        return
    slope_a, slope_b = torch.autograd.grad(law_matching, (a, b))
    delta, s, unit = 0.5, math.sqrt(2 * 0.8**2 + 0.3**2), law_coef * model.residual_scale.item()
    expected_a = unit * math.sqrt(2 / math.pi) * (2 * (2 * 0.8 / s) * math.exp(-(delta**2) / (2 * s**2)) - 2)
    expected_b = unit * 2 * math.erf(delta / (s * math.sqrt(2)))
    # Five standard errors; a sample's share in slope_b is at most 4 units, in slope_a 4 |z_1 + z_2 - middle|.
    assert slope_b.item() == pytest.approx(expected_b, abs=5 * 4 * unit / math.sqrt(n))
    assert slope_a.item() == pytest.approx(expected_a, abs=5 * 4 * math.sqrt(2) * unit / math.sqrt(n))


@pytest.mark.parametrize("norm_adv", [True, False])
def test_ppo_loss_equals_the_formula(shared, norm_adv):
    args = shared.Args(norm_adv=norm_adv, clip_coef=0.15, cuda=False)
    old, new, advantages = np.random.randn(3, 200) * [[1.0], [1.0], [3.0]] + [[0.0], [0.0], [2.0]]
    new = old + 0.2 * new
    loss, approx_kl, clip_fraction = shared.ppo_loss(*(torch.tensor(v) for v in (new, old, advantages)), args)
    if norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    surrogate = []
    for ratio, advantage in zip(np.exp(new - old), advantages, strict=True):
        # The gain of a step is capped where it pays; a loss is never capped.
        surrogate.append(advantage * (min(ratio, 1.15) if advantage > 0 else max(ratio, 0.85)))
    assert loss.item() == pytest.approx(-np.mean(surrogate), rel=1e-12)
    assert approx_kl.item() == pytest.approx(np.mean(np.exp(new - old) - 1 - (new - old)), rel=1e-9)
    assert clip_fraction.item() == pytest.approx(np.mean(np.abs(np.exp(new - old) - 1) > 0.15))


@pytest.mark.parametrize("size, limit, factor", [(100.0, 0.5, 0.005), (0.1, 0.5, 1.0)])
def test_descend_clips_the_gradient_norm(shared, size, limit, factor):
    """Over all that the optimiser moves: here two networks in groups of their own, and a bias that the loss does not see."""
    networks = [torch.nn.Linear(2, 1), torch.nn.Linear(1, 2, bias=False)]
    with torch.no_grad():
        for parameter in (parameter for network in networks for parameter in network.parameters()):
            parameter.zero_()
    optimizer = torch.optim.SGD([{"params": shared.as_vector([network])} for network in networks], lr=1.0)
    direction, other = torch.tensor([0.5, -0.5, 0.5, 0.5]), torch.ones(2, requires_grad=True)  # direction: of length 1
    weights = torch.cat([network.weight.flatten() for network in networks])
    norm = shared.descend(optimizer, (size * direction * weights).sum() * other.prod(), limit)
    assert norm == pytest.approx(size)  # the norm before clipping
    moved = torch.cat([network.weight.detach().flatten() for network in networks])
    torch.testing.assert_close(moved, -size * factor * direction)
    assert other.grad is None and networks[0].bias.item() == 0


# --- metrics of the return distribution ---


def metrics_of(shared, samples, x):
    metrics = shared.distribution_metrics(samples, x)
    return {name.removeprefix("return_model/"): float(value) for name, value in metrics.items()}


def test_metrics_of_the_true_distribution(shared):
    means, spread = 3 * torch.randn(2000), 0.7
    metrics = metrics_of(shared, means + spread * torch.randn(512, 2000), means + spread * torch.randn(2000))
    std = math.sqrt(9 + spread**2)
    assert metrics["coverage_80"] == pytest.approx(0.8, abs=5 * math.sqrt(0.16 / 2000) + 0.01)
    assert metrics["w1"] < 0.05 * spread / std * 5
    assert metrics["spread"] == pytest.approx(spread / std, rel=0.1)
    assert metrics["explained_variance"] == pytest.approx(1 - spread**2 / std**2, abs=0.02)


def test_metrics_of_a_model_collapsed_to_the_mean(shared):
    means, x = torch.zeros(2000), 3 * torch.randn(2000)
    metrics = metrics_of(shared, means.expand(64, 2000), x)
    assert metrics["coverage_80"] == 0 and metrics["spread"] == 0
    assert metrics["explained_variance"] == pytest.approx(0, abs=1e-5)
    # the distance from a point at 0 to a normal distribution is E|x| = std sqrt(2 / π)
    assert metrics["w1"] == pytest.approx(math.sqrt(2 / math.pi), rel=0.06)


def test_metrics_of_a_model_that_is_off_by_a_constant(shared):
    shift, std = 2.0, 3.0
    x = std * torch.randn(5000)
    metrics = metrics_of(shared, 0.01 * torch.randn(64, 5000) + x - shift, x)
    assert metrics["w1"] == pytest.approx(shift / std, rel=0.05)
    assert metrics["coverage_80"] == 0

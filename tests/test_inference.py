"""The return model's parts: information gain, relative returns, prior and posterior; the functions of the update."""

import math

import numpy as np
import pytest
import torch
from conftest import BDPG, WGAN, is_atari, make_agent, random_observations, short_args, spy
from torch.distributions import kl_divergence


def embeddings(model, *shape):
    return torch.randn(*shape, model.generator.from_state.in_features)


# --- curiosity ---


@pytest.mark.parametrize(
    "update_epochs, by_hand",  # sqrt(log t / t) for t = 4, 4, 4, 5 and t = 20, 30, 40, 50 passes
    [(1, [0.588705, 0.588705, 0.588705, 0.567353]), (10, [0.387022, 0.336711, 0.303681, 0.279715])],
)
def test_curiosity_coefficient_by_hand(bdpg, monkeypatch, tmp_path, lazy_disk, update_epochs, by_hand):
    """log t / t itself rises up to t = e: before t = 4 the coefficient stays where it is at 4. The first iteration pays
    no bonus, as there are no gains to compare with."""
    gae, gains = spy(monkeypatch, bdpg, "k_step_gae"), spy(monkeypatch, bdpg, "kl_divergence")
    bdpg.train(short_args(bdpg, tmp_path, eta=0.25, iterations=5, update_epochs=update_epochs, minibatch_size=32))
    gains = torch.stack([kl.sum(-1).double() for _, kl in gains])
    assert gains.max() < bdpg.Args().u_bar
    found = []
    for n in range(1, 5):
        bonus = gae[2 * n + 1][0][0] - gae[2 * n][0][0]
        found.append(bonus.std().item() / (gains[n].std() / gains[:n].std(correction=0)).item())
    assert found == pytest.approx(0.25 * np.array(by_hand), rel=1e-3)


def test_information_gain_is_zero_only_for_what_was_expected(bdpg):
    model, g = make_agent(bdpg)[0].return_model, torch.randn(20)
    c = embeddings(model, 20)
    with torch.no_grad():
        b = model.centre(c)
        gains = [kl_divergence(model.encode(x, b, c), model.encode(g, b, c)).sum(-1) for x in (g, g + 1)]
    assert (gains[0].abs() < 1e-6).all() and (gains[1] > 1e-4).all()


# --- relative returns ---


def scale_of(model):
    """The unit in which encoder and discriminator see returns."""
    return 1 / model.relative(torch.ones(1), torch.zeros(1)).item()


@pytest.mark.parametrize("script", BDPG + WGAN, indirect=True)
def test_returns_are_seen_relative_to_the_state_in_units_of_the_residuals(script):
    agent, _, _ = make_agent(script)
    model, x, b = agent.return_model, torch.randn(6), torch.randn(6)
    assert scale_of(model) == pytest.approx(0.8)  # the mean of |1| and |-0.6|
    torch.testing.assert_close(model.relative(x, b), ((x - b) / 0.8)[:, None])
    residuals = torch.randn(1000)
    scales = []
    for unit in (1.0, 50.0):  # returns in another unit look the same from the first batch on
        model = make_agent(script, residuals=unit * residuals)[0].return_model
        scales.append(scale_of(model))
    assert 0.5 < scales[0] < 1.5 and scales[1] == pytest.approx(50 * scales[0])
    for _ in range(200):
        previous = scale_of(model)
        model.track_residuals(residuals)
        assert scales[0] <= scale_of(model) * (1 + 1e-6) and scale_of(model) <= previous  # nears the new scale
    assert scale_of(model) == pytest.approx(scales[0], rel=1e-3)


def test_plain_returns_stay_as_they_are(bdpg):
    agent, _, _ = make_agent(bdpg, relative_returns=False)
    model, x = agent.return_model, torch.randn(6)
    b = model.centre(embeddings(model, 6))
    assert torch.equal(model.relative(x, b), x[:, None]) and b.shape == x.shape and not b.any()
    model.track_residuals(50 * torch.randn(10))
    assert torch.equal(model.relative(x, b), x[:, None]) and model.residual_scale == 1


# --- prior and posterior ---


def test_latents_have_the_prior_they_are_said_to_have(bdpg):
    agent, _, _ = make_agent(bdpg, latent_dim=3)
    model = agent.return_model
    c = embeddings(model, 2)
    with torch.no_grad():
        for parameter in model.prior_mean.parameters():
            parameter *= 3  # an untrained mean is hardly one
        mean, z = model.prior_mean(c), model.prior(c).sample((40_000,))
        assert mean.shape == (2, 3) and (mean.abs() <= 1).all() and mean.abs().max() > 0.1
        torch.testing.assert_close(z.mean(0), mean, rtol=0, atol=5 / 200)
        torch.testing.assert_close(z.std(0), torch.ones(2, 3), rtol=0, atol=5 / 280)
        torch.testing.assert_close(model.centre(c), model.generator(mean, c)[..., 0])


def test_sampled_returns_are_generated_from_the_prior(bdpg, monkeypatch):
    agent, _, _ = make_agent(bdpg)
    model = agent.return_model
    monkeypatch.setattr(model.generator, "forward", lambda z, c: z.sum(-1, keepdim=True))
    c = embeddings(model, 2, 3)
    with torch.no_grad():
        samples, mean = model.sample(c, 40_000), model.prior_mean(c).sum(-1)
    assert samples.shape == (40_000, 2, 3)
    torch.testing.assert_close(samples.mean(0), mean, rtol=0, atol=5 * 2**0.5 / 200)
    torch.testing.assert_close(samples.std(0), torch.full((2, 3), 2**0.5), rtol=0, atol=5 * 2**0.5 / 280)


@pytest.mark.parametrize("least", [0.1, 0.0])
def test_posterior_is_no_sharper_than_it_may_be(bdpg, least):
    """A floor of a tenth of the prior keeps the information gain finite; the paper has none."""
    agent, _, _ = make_agent(bdpg, encoder_std_min=least)
    model = agent.return_model
    with torch.no_grad():
        model.encoder.output.bias.fill_(-1000.0)  # the encoder is as sure as can be
        posterior = model.encode(torch.randn(5), torch.randn(5), embeddings(model, 5))
    torch.testing.assert_close(posterior.stddev, torch.full((5, 2), least))


def test_posterior_is_what_the_encoder_says_of_the_relative_return(bdpg, monkeypatch):
    agent, _, _ = make_agent(bdpg, encoder_std_min=0.2)
    model, x, b = agent.return_model, torch.randn(4, 6), torch.randn(4, 6)
    monkeypatch.setattr(model.encoder, "forward", lambda u, c: torch.cat([u, -u, u, 2 * u], -1) + c[..., :1])
    c, u = embeddings(model, 4, 6), ((x - b) / 0.8)[..., None]
    posterior = model.encode(x, b, c)
    torch.testing.assert_close(posterior.mean, torch.cat([u, -u], -1) + c[..., :1])
    raw = (torch.cat([u, 2 * u], -1) + c[..., :1]).double()
    torch.testing.assert_close(posterior.stddev.double(), 0.2 + torch.log1p(raw.exp()), rtol=1e-5, atol=1e-6)


# --- losses and optimisers ---


def test_policy_loss_reaches_the_policy_and_what_it_stands_on(script):
    agent, _, args = make_agent(script)
    o = random_observations(script, 8)
    policy = agent.policy(o, agent.trunk(o))
    log_prob = policy.log_prob(policy.sample())
    loss, _ = script.ppo_loss(log_prob, log_prob.detach() - 0.05 * torch.randn(8), torch.randn(8), args)
    loss.backward()
    with_gradient = {key.split(".")[0] for key, p in agent.named_parameters() if p.grad is not None and p.grad.any()}
    assert with_gradient == ({"policy", "trunk"} if is_atari(script) else {"policy"})


def test_optimisers_share_no_parameter_and_forget_none(script):
    agent, optimizers, _ = make_agent(script)
    owned = [p for one in optimizers.values() for group in one.param_groups for p in group["params"]]
    assert {id(p) for p in owned} == {id(p) for p in agent.parameters()} and len(owned) == len(set(owned))


def brute_force_energy(g, x_tilde, x):
    return sum(2 * abs(a - c) - 2 * abs(a - b) for a, b, c in zip(g, x_tilde, x, strict=True)) / len(g)


def test_energy_distance_equals_the_loop_and_leaves_x_tilde_alone(bdpg):
    g, x_tilde, x = (torch.randn(50, dtype=torch.float64, requires_grad=True) for _ in range(3))
    energy = bdpg.energy_distance(g, x_tilde, x)
    assert energy.item() == pytest.approx(brute_force_energy(g.tolist(), x_tilde.tolist(), x.tolist()), rel=1e-12)
    energy.backward()
    slopes = 2 * (torch.sign(g - x) - torch.sign(g - x_tilde)) / 50
    torch.testing.assert_close(g.grad, slopes.detach())
    assert x_tilde.grad is None


def test_energy_distance_has_the_slopes_of_that_of_two_distributions(bdpg):
    """With G = b + 2a z and x normal, 2 E|G - x| - E|G - G'| and its slopes are known: with δ = b - E[x] and s² = 2 a²
    + Var(x), E|G-x| = s sqrt(2/π) exp(-δ²/2s²) + δ erf(δ/(s sqrt 2)); E|G - G'| = 2 a sqrt(2/π)."""
    n = 40_000
    a, b = torch.tensor(0.8, requires_grad=True), torch.tensor(-1.5, requires_grad=True)
    g, x_tilde = b + 2**0.5 * a * torch.randn(2, n)
    slope_a, slope_b = torch.autograd.grad(bdpg.energy_distance(g, x_tilde, 0.3 * torch.randn(n) - 2), (a, b))
    delta, s = 0.5, math.sqrt(2 * 0.8**2 + 0.3**2)
    expected_a = math.sqrt(2 / math.pi) * (2 * (2 * 0.8 / s) * math.exp(-(delta**2) / (2 * s**2)) - 2)
    expected_b = 2 * math.erf(delta / (s * math.sqrt(2)))
    # Five standard errors; a sample's share in slope_b is at most 4, in slope_a 4 sqrt(2) |z|.
    assert slope_b.item() == pytest.approx(expected_b, abs=5 * 4 / math.sqrt(n))
    assert slope_a.item() == pytest.approx(expected_a, abs=5 * 4 * math.sqrt(2) / math.sqrt(n))


@pytest.mark.parametrize("norm_adv", [True, False])
def test_ppo_loss_equals_the_formula(shared, norm_adv):
    args = shared.Args(norm_adv=norm_adv, clip_coef=0.15, cuda=False)
    old, new, advantages = np.random.randn(3, 200) * [[1.0], [1.0], [3.0]] + [[0.0], [0.0], [2.0]]
    new = old + 0.2 * new
    loss, movement = shared.ppo_loss(*(torch.tensor(v) for v in (new, old, advantages)), args)
    if norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    surrogate = []
    for ratio, advantage in zip(np.exp(new - old), advantages, strict=True):
        # The gain of a step is capped where it pays; a loss is never capped.
        surrogate.append(advantage * (min(ratio, 1.15) if advantage > 0 else max(ratio, 0.85)))
    assert loss.item() == pytest.approx(-np.mean(surrogate), rel=1e-12)
    assert movement.keys() == {"approx_kl", "clip_fraction"}
    assert movement["approx_kl"].item() == pytest.approx(np.mean(np.exp(new - old) - 1 - (new - old)), rel=1e-9)
    assert movement["clip_fraction"].item() == pytest.approx(np.mean(np.abs(np.exp(new - old) - 1) > 0.15))


@pytest.mark.parametrize("size, limit, factor", [(100.0, 0.5, 0.005), (0.1, 0.5, 1.0)])
def test_descend_clips_the_gradient_norm(shared, size, limit, factor):
    """Over all that the optimiser moves: here two networks in groups of their own, and a bias the loss does not see."""
    networks = [torch.nn.Linear(2, 1), torch.nn.Linear(1, 2, bias=False)]
    with torch.no_grad():
        for parameter in (parameter for network in networks for parameter in network.parameters()):
            parameter.zero_()
    optimizer = torch.optim.SGD([{"params": list(network.parameters())} for network in networks], lr=1.0)
    direction, other = torch.tensor([0.5, -0.5, 0.5, 0.5]), torch.ones(2, requires_grad=True)  # direction: of length 1
    for _ in range(2):  # a second step starts from no gradient
        weights = torch.cat([network.weight.flatten() for network in networks])
        start = weights.detach().clone()
        norm = shared.descend(optimizer, (size * direction * weights).sum() * other.prod(), limit)
        assert norm == pytest.approx(size)  # the norm before clipping
        moved = torch.cat([network.weight.detach().flatten() for network in networks]) - start
        torch.testing.assert_close(moved, -size * factor * direction)
        assert other.grad is None and networks[0].bias.item() == 0

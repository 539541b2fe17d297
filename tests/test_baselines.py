"""The baselines' return models against distributions whose quantiles and Wasserstein distances are known."""

import importlib
import math

import numpy as np
import pytest
import torch
from conftest import MAIN, QR, WGAN, make_agent, spy
from torch.distributions import Categorical, Exponential, MixtureSameFamily, Normal


@pytest.fixture(params=QR)
def qr(request):
    return importlib.import_module(request.param)


@pytest.fixture
def qr_mujoco():
    return importlib.import_module("ppo_qr_mujoco")


@pytest.fixture(params=WGAN)
def wgan(request):
    return importlib.import_module(request.param)


@pytest.fixture
def wgan_mujoco():
    return importlib.import_module("ppo_wgan_mujoco")


def anneal(optimizer, fraction_left):
    """As train() does."""
    for group in optimizer.param_groups:
        group["lr"] = fraction_left * group["initial_lr"]


# --- quantile regression ---


def test_quantile_regression_finds_the_quantiles_of_each_state(qr_mujoco):
    """Held in levels: the true distribution function takes output i to (i + 1/2) / N."""
    truth = [
        Normal(1.0, 0.5),
        Exponential(2.0, validate_args=False),
        MixtureSameFamily(
            Categorical(torch.tensor([0.3, 0.7])), Normal(torch.tensor([-2.0, 1.0]), torch.tensor([0.3, 0.5]))
        ),
    ]
    steps, n = 1000, 16
    agent, optimizers, args = make_agent(qr_mujoco, num_quantiles=n, learning_rate=1e-2)
    model, states = agent.return_model, torch.eye(3, 64)
    for step in range(steps):
        anneal(optimizers[MAIN], 1 - step / steps)
        x = torch.stack([distribution.sample((1024,)) for distribution in truth])
        loss = qr_mujoco.quantile_loss(model.quantiles(states).unsqueeze(1), x)
        qr_mujoco.descend(optimizers[MAIN], loss, args.max_grad_norm)
    levels = (torch.arange(n) + 0.5) / n
    for distribution, found in zip(truth, model.quantiles(states).detach(), strict=True):
        torch.testing.assert_close(distribution.cdf(found), levels, rtol=0, atol=0.2 / n)


def test_quantile_loss_equals_the_double_loop(qr):
    """Its mean over samples and quantiles, times the root of the number of quantiles."""
    quantiles, x = np.random.randn(9, 5), np.random.randn(9)
    losses = []
    for row, target in zip(quantiles, x, strict=True):
        for i, quantile in enumerate(row):
            level = (i + 0.5) / 5
            losses.append(level * (target - quantile) if target > quantile else (1 - level) * (quantile - target))
    expected = np.sqrt(5) * np.mean(losses)
    assert qr.quantile_loss(torch.tensor(quantiles), torch.tensor(x)).item() == pytest.approx(expected, rel=1e-6)


def test_sampled_returns_are_the_quantiles_of_their_state_equally_often(qr):
    """Chi-square with 12 - 1 degrees of freedom, for 6 states: a mean of 11 and a standard deviation of 4.7 each."""
    n, draws = 12, 12_000
    agent, _, _ = make_agent(qr, num_quantiles=n)
    model = agent.return_model
    c = torch.randn(2, 3, model.quantiles.in_features)
    with torch.no_grad():
        quantiles, samples = model.quantiles(c), model.sample(c, draws)
    assert samples.shape == (draws, 2, 3) and model.sample(c[0, 0], 5).shape == (5,)
    picks = (samples.unsqueeze(-1) == quantiles).float()
    assert (picks.sum(-1) == 1).all()  # each is one of its own state's
    chi_square = ((picks.sum(0) - draws / n) ** 2 / (draws / n)).sum(-1)
    assert (chi_square < 11 + 5 * 4.7).all() and chi_square.mean() > 3
    torch.testing.assert_close(samples.mean(0), quantiles.mean(-1), rtol=0, atol=5 * samples.std().item() / draws**0.5)
    torch.testing.assert_close(samples.std(0), quantiles.std(-1, correction=0), rtol=0.03, atol=0)
    # The picks of two states, and of one state twice, agree as often as chance has it.
    which = picks.argmax(-1).flatten(1)
    for a, b in ((which[:, 0], which[:, 1]), (which[:, 0], which[:, 3]), (which[1:, 0], which[:-1, 0])):
        assert abs((a == b).float().mean() - 1 / n) < 5 * math.sqrt(1 / n / draws)


# --- the Wasserstein critic ---


def replace_critic(monkeypatch, model, f):
    """Puts a known function f(u, c) of the relative return u (rows, 1) in the place of the critic's network."""
    monkeypatch.setattr(model.critic, "forward", f)


def embeddings(model, *shape):
    return torch.randn(*shape, model.generator.from_state.in_features)


def random_batch(model, n):
    """Targets x, samples x̃ elsewhere, centres b(s) and embeddings c."""
    return torch.randn(n) + 1, 2 * torch.randn(n) - 2, torch.randn(n), embeddings(model, n)


def test_noise_is_standard_normal_and_the_centre_is_where_it_is_zero(wgan, monkeypatch):
    model, draws = make_agent(wgan, latent_dim=3)[0].return_model, 20_000
    c = embeddings(model, 2, 2)
    seen = spy(monkeypatch, model.generator, "forward")
    with torch.no_grad():
        samples, centre = model.sample(c, draws), model.centre(c)
    (z, at_c), _ = seen[0]
    assert samples.shape == z.shape[:-1] == (draws, 2, 2) and z.shape[-1] == 3 and at_c is c
    torch.testing.assert_close(z.mean(0), torch.zeros(2, 2, 3), rtol=0, atol=5 / math.sqrt(draws))
    torch.testing.assert_close(z.std(0), torch.ones(2, 2, 3), rtol=0, atol=5 / math.sqrt(2 * draws))
    with torch.no_grad():
        torch.testing.assert_close(samples[7], model.generator(z[7], c)[..., 0])
        torch.testing.assert_close(centre, model.generator(torch.zeros(2, 2, 3), c)[..., 0])


@pytest.mark.parametrize("slope, excess", [(2.5, 1.5), (0.4, 0), (-0.5, 0), (-1.2, 0.2)])
def test_critic_loss_of_a_straight_critic(wgan, monkeypatch, slope, excess):
    """f = a u has the slope a everywhere; all from -1 to 1 are free."""
    model = make_agent(wgan)[0].return_model
    x, x_tilde, centre, c = random_batch(model, 30)
    replace_critic(monkeypatch, model, lambda u, c: slope * u)
    loss, distance = wgan.f_loss(model, x, x_tilde, centre, c, 7.0)
    torch.testing.assert_close(distance, slope * (x - x_tilde).mean() / model.residual_scale)
    torch.testing.assert_close(loss, 7 * excess**2 - distance)


def test_penalty_is_on_the_slope_in_x_at_the_same_state(wgan, monkeypatch):
    """f(u, s) = h(s) u has the slope h(s) of its own state in u, and slopes in s that must not count."""
    model = make_agent(wgan)[0].return_model
    x, x_tilde, centre, c = random_batch(model, 30)
    replace_critic(monkeypatch, model, lambda u, c: 3 * c[..., :1] * u)
    loss, distance = wgan.f_loss(model, x, x_tilde, centre, c, 7.0)
    torch.testing.assert_close(distance, (3 * c[:, 0] * (x - x_tilde)).mean() / model.residual_scale)
    torch.testing.assert_close(loss + distance, 7 * ((3 * c[:, 0]).abs() - 1).clamp(min=0).square().mean())


def test_penalty_is_taken_everywhere_between_target_and_sample(wgan, monkeypatch):
    """f = u² / 2 has the slope u. From 1 + a to 1 + b, both above 1, (u - 1)² is (a² + a b + b²) / 3 on average."""
    model, n = make_agent(wgan)[0].return_model, 40_000
    replace_critic(monkeypatch, model, lambda u, c: u.square() / 2)
    x, x_tilde, centre = 2 + torch.rand(n), 6 + torch.rand(n), torch.randn(n) / 10
    loss, distance = wgan.f_loss(model, x, x_tilde, centre, torch.zeros(n, 1), 1.0)
    a, b = ((value - centre) / model.residual_scale - 1 for value in (x, x_tilde))
    expected = (a.square() + a * b + b.square()) / 3
    assert abs(loss + distance - expected.mean()) < 5 * b.max() ** 2 / math.sqrt(n)


def test_penalty_of_the_network_by_finite_differences(wgan, monkeypatch, double_precision):
    """Of f's slope in relative returns."""
    model = make_agent(wgan)[0].return_model
    step, (x, x_tilde, b, c) = 1e-6, random_batch(model, 20)
    model.critic.output.weight.data *= 12  # an untrained critic is too flat for a penalty
    seen = spy(monkeypatch, model.critic, "forward")
    loss, distance = wgan.f_loss(model, x, x_tilde, b, c, 1.0)
    with torch.no_grad():
        (real, fake, between), at_c = seen[0][0]
        share = (between - real) / (fake - real)
        assert ((0 <= share) & (share <= 1)).all() and share.std() > 0.15 and at_c is c
        slopes = (model.critic(between + step, c) - model.critic(between - step, c)) / (2 * step)
        excess = (slopes.abs() - 1).clamp(min=0)
        assert 0 < (excess > 0).double().mean() < 1  # some are too steep
        torch.testing.assert_close(loss + distance, excess.square().mean(), rtol=1e-6, atol=0)
        f_real, f_fake = (model.critic(((value - b) / model.residual_scale)[:, None], c) for value in (x, x_tilde))
        torch.testing.assert_close(distance, (f_real - f_fake).mean())


@pytest.mark.parametrize(
    "real, fake, w1",
    [
        # (means of two states, std): the distance of two normals with the same std is that of their means,
        (((0.5, -0.3), 0.4), ((0.0, 0.0), 0.4), 0.4),
        # that of two with the same mean is E|z| = sqrt(2 / π) times that of their stds.
        (((0.2, -0.2), 1.2), ((0.2, -0.2), 0.5), 0.7 * math.sqrt(2 / math.pi)),
    ],
    ids=["means", "scales"],
)
def test_trained_critic_measures_the_distance(wgan_mujoco, real, fake, w1):
    """The penalised optimum is a little above W1, by 1 to 2 % here: slopes above 1 pay where the two differ much."""
    steps, scale, w = 500, 5.0, 12.0  # returns are in units of 5, and the critic sees them in units of w
    agent, optimizers, args = make_agent(wgan_mujoco, residuals=(w,))
    centres, c = torch.tensor([-20.0, 30.0]), embeddings(agent.return_model, 2)

    def draw(distribution, states):
        means, std = distribution
        return centres[states] + scale * (torch.tensor(means)[states] + std * torch.randn(states.shape))

    def critic_loss(n):
        s = torch.arange(n) % 2
        x, x_tilde = draw(real, s), draw(fake, s)
        return wgan_mujoco.f_loss(agent.return_model, x, x_tilde, centres[s], c[s], args.gradient_penalty)

    for step in range(steps):
        anneal(optimizers["critic"], 1 - step / steps)
        wgan_mujoco.descend(optimizers["critic"], critic_loss(256)[0], args.max_grad_norm)
    assert critic_loss(200_000)[1].item() * w == pytest.approx(scale * w1, rel=0.05)


# --- the generator against the critic ---


@pytest.mark.parametrize(
    "critic, slope", [(lambda u, c: -1.5 * u, lambda u: -1.5 + 0 * u), (lambda u, c: u**3, lambda u: 3 * u**2)]
)
def test_generator_climbs_the_critic(wgan, monkeypatch, critic, slope):
    """With G(z) = b + sum(z), d/db of -w E[f((G - centre) / w)] is -E[f'], whatever w is."""
    model, b, centre = make_agent(wgan)[0].return_model, torch.tensor(0.7, requires_grad=True), torch.randn(50)
    monkeypatch.setattr(model.generator, "forward", lambda z, c: b + z.sum(-1, keepdim=True))
    replace_critic(monkeypatch, model, critic)
    drawn = spy(monkeypatch, model, "sample")
    climb, _ = wgan.generator_losses(model, torch.randn(50), centre, torch.randn(50, 4))
    (gradient,) = torch.autograd.grad(climb, b)
    x_tilde, _ = drawn[0][1].detach()
    torch.testing.assert_close(gradient, -slope((x_tilde - centre) / model.residual_scale).mean())


def test_generator_climbs_the_network_by_finite_differences(wgan, monkeypatch, double_precision):
    model = make_agent(wgan)[0].return_model
    step, (x, _, centre, c) = 1e-6, random_batch(model, 20)
    seen = spy(monkeypatch, model.critic, "forward")
    wgan.generator_losses(model, x, centre, c)[0].backward()
    (u, _), _ = seen[0]
    with torch.no_grad():
        slopes = (model.critic(u + step, c) - model.critic(u - step, c)) / (2 * step)
    torch.testing.assert_close(model.generator.output.bias.grad, -slopes.mean(0), rtol=1e-6, atol=0)


def test_the_critics_view_of_the_state_trains_no_trunk(wgan, monkeypatch):
    """A generator that ignores the state leaves nothing that the generator's loss could want of the trunk."""
    model = make_agent(wgan)[0].return_model
    c = embeddings(model, 8).requires_grad_()
    sum(wgan.generator_losses(model, torch.randn(8), torch.zeros(8), c)).backward()
    assert c.grad.any()
    c.grad = None
    monkeypatch.setattr(model.generator, "forward", lambda z, c: z.sum(-1, keepdim=True).requires_grad_())
    sum(wgan.generator_losses(model, torch.randn(8), torch.zeros(8), c)).backward()
    assert c.grad is None


def test_mean_matching_is_the_squared_error_of_the_mean_and_leaves_the_spread(wgan, monkeypatch):
    """With G(z) = b + a sum(z): on average (x - b)², whose slope in b is 2 (b - x), and no slope in a."""
    model, n = make_agent(wgan)[0].return_model, 200_000
    b, a, x = torch.tensor(0.7, requires_grad=True), torch.tensor(0.5, requires_grad=True), 2.0
    monkeypatch.setattr(model.generator, "forward", lambda z, c: b + a * z.sum(-1, keepdim=True))
    replace_critic(monkeypatch, model, lambda u, c: 0 * u)
    _, loss = wgan.generator_losses(model, torch.full((n,), x), torch.zeros(n), torch.zeros(n, 4))
    slope_b, slope_a = torch.autograd.grad(loss, (b, a))
    error = x - b.item()
    # Of a product of two errors with mean `error` and variance 2 a² = 0.5; of its slopes in b and a.
    assert loss.item() == pytest.approx(error**2, abs=5 * math.sqrt((0.5 + 2 * error**2) * 0.5 / n))
    assert slope_b.item() == pytest.approx(-2 * error, abs=5 * math.sqrt(2 * 0.5 / n))
    assert slope_a.item() == pytest.approx(0, abs=5 * math.sqrt((4 * error**2 + 4) / n))


def train_on_three_states(wgan_mujoco, means, stds, steps=2000, n=256, steps_per_rollout=100):
    """A generator trained with the defaults of train() on x ~ N(mean, std) of each state; samples of all states."""
    agent, optimizers, args = make_agent(wgan_mujoco)
    model = agent.return_model
    obs = torch.randn(3, 3)
    for step in range(steps):
        for optimizer in optimizers.values():
            anneal(optimizer, 1 - step / steps)
        s = torch.randint(3, (n,))
        x = means[s] + stds[s] * torch.randn(n)
        c = agent.trunk(obs[s])
        with torch.no_grad():
            if step % steps_per_rollout == 0:
                centres = model.centre(agent.trunk(obs))
                model.track_residuals(x - centres[s])
            x_tilde = model.sample(c, 1)[0]
        loss, _ = wgan_mujoco.f_loss(model, x, x_tilde, centres[s], c.detach(), args.gradient_penalty)
        wgan_mujoco.descend(optimizers["critic"], loss, args.max_grad_norm)
        climb, mean_loss = wgan_mujoco.generator_losses(model, x, centres[s], c)
        loss = args.vf_coef * (climb + args.mean_coef * mean_loss)
        wgan_mujoco.descend(optimizers[MAIN], loss, args.max_grad_norm)
    with torch.no_grad():
        return model.sample(agent.trunk(obs), 5000)


def test_generator_learns_mean_and_spread_of_each_state(wgan_mujoco):
    """A collapsed generator has no spread; an untrained one is off by several. In single runs the spread of a state is
    off by up to 40 %, so three runs are averaged."""
    means, stds = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([0.4, 0.8, 0.2])
    samples = torch.stack([train_on_three_states(wgan_mujoco, means, stds) for _ in range(3)])
    torch.testing.assert_close(samples.mean(1) / stds, (means / stds).expand(3, 3), rtol=0, atol=0.3)
    torch.testing.assert_close((samples.std(1) / stds).mean(0), torch.ones(3), rtol=0, atol=0.25)

"""The updates of a real run: which networks each step moves, and that every loss gets the targets, states and latents it should."""

import pytest
import torch
from conftest import MAIN, OWN, QR, WGAN, copy_of, frozen, is_bdpg, moved_names, short_args, spy

pytestmark = pytest.mark.usefixtures("lazy_disk")


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
    is_wgan = script.__name__ in WGAN
    own_args = dict(num_critic_steps=2) if is_wgan else {}
    script.train(short_args(script, tmp_path, iterations=1, update_epochs=1, **own_args))
    adversaries = ["critic", "critic"] if is_wgan else ["discriminator", "encoder and prior"] if is_bdpg(script) else []
    assert steps == [*adversaries, MAIN] * 2


def frozen_run(script, tmp_path, monkeypatch):
    """One iteration in which the networks do not change: the agent, and the target, return and embedding of every step."""
    targets, samples = spy(monkeypatch, script, "k_step_gae"), spy(monkeypatch, script.ReturnModel, "sample")
    agent = script.train(short_args(script, tmp_path, iterations=1, update_epochs=1, **frozen(script)))
    (_, embeddings, _), g = samples[0]
    g = g[0, :-1].flatten()
    return agent.requires_grad_(False), targets[0][1].flatten() + g, g, embeddings[:-1].flatten(0, 1)


def rows_of(x, all_x):
    """Which steps of the rollout these targets belong to."""
    rows = (all_x == x.unsqueeze(-1)).float().argmax(-1)
    assert torch.equal(all_x[rows], x) and len(set(rows.tolist())) == len(x)
    return rows


def same(first, second):
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


def test_adversaries_and_generator_get_one_anothers_samples_at_the_same_rows(bdpg, tmp_path, monkeypatch):
    """Lines 15-19: targets, centres and states of one step; latents and returns that sample_joints drew, each in its place."""
    names = ("sample_joints", "discriminator_loss", "encoder_prior_loss", "generator_losses")
    spies = [spy(monkeypatch, bdpg, name) for name in names]
    agent, all_x, _, embeddings = frozen_run(bdpg, tmp_path, monkeypatch)
    model = agent.return_model
    all_centres = model.centre(embeddings)
    torch.testing.assert_close(model.residual_scale, (all_x - all_centres).abs().mean(), rtol=1e-4, atol=0)
    minibatches = list(zip(*spies, strict=True))
    assert len(minibatches) == 2
    for drawn, of_discriminator, of_encoder, of_generator in minibatches:
        (_, x, centre, s), (joints, *latents_and_returns) = drawn
        rows = rows_of(x, all_x)
        same(centre, all_centres[rows])
        same(s, embeddings[rows])
        assert not any(value.requires_grad for value in (x, centre, s))
        assert of_discriminator[0][1] is of_encoder[0][1] is joints and of_discriminator[0][2] is of_encoder[0][2] is s
        _, generator_x, x_tilde, z_tilde, z_prime, c, _ = of_generator[0]
        assert generator_x is x and torch.equal(c, s) and c.requires_grad
        assert all(given is one for given, one in zip((z_tilde, x_tilde, z_prime), latents_and_returns, strict=True))


def test_information_gain_is_that_of_the_target_over_the_sampled_return(bdpg, tmp_path, monkeypatch):
    """Line 12, Eq. 13: KL(q(z|x, s) || q(z|g, s)), in this direction, at every step."""
    gains = spy(monkeypatch, bdpg, "gaussian_kl")
    agent, x, g, embeddings = frozen_run(bdpg, tmp_path, monkeypatch)
    model = agent.return_model
    centres = model.centre(embeddings)
    ((given, _),) = gains
    expected = *model.encode(model.relative(x, centres), embeddings), *model.encode(model.relative(g, centres), embeddings)
    for found, wanted in zip(given, expected, strict=True):
        same(found.flatten(0, 1), wanted)
    assert not torch.allclose(expected[0], expected[2], atol=1e-2)  # the other way round would have been noticed


@pytest.mark.parametrize("script", WGAN, indirect=True)
def test_critic_and_generator_get_targets_centres_and_states_of_the_same_rows(script, tmp_path, monkeypatch):
    """And the critic gets nothing that it could train."""
    calls, generator_calls = spy(monkeypatch, script, "critic_loss"), spy(monkeypatch, script, "wgan_losses")
    agent, all_x, _, embeddings = frozen_run(script, tmp_path, monkeypatch)
    all_centres = agent.return_model.centre(embeddings)
    torch.testing.assert_close(agent.return_model.residual_scale, (all_x - all_centres).abs().mean(), rtol=1e-4, atol=0)
    assert len(calls) == 2
    for (of_critic, _), (of_generator, _) in zip(calls, generator_calls, strict=True):
        _, x, x_tilde, centre, s, _ = of_critic
        rows = rows_of(x, all_x)
        same(centre, all_centres[rows])
        same(s, embeddings[rows])
        assert not any(value.requires_grad for value in (x, x_tilde, centre, s))
        _, generator_x, generator_centre, c, _ = of_generator
        assert generator_x is x and generator_centre is centre and torch.equal(c, s) and c.requires_grad


@pytest.mark.parametrize("script", QR, indirect=True)
def test_quantiles_get_the_targets_of_the_same_rows(script, tmp_path, monkeypatch):
    calls = spy(monkeypatch, script, "quantile_loss")
    agent, all_x, _, embeddings = frozen_run(script, tmp_path, monkeypatch)
    assert len(calls) == 2
    for (quantiles, x), _ in calls:
        same(quantiles, agent.return_model.generator(embeddings[rows_of(x, all_x)]))

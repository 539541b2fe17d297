"""The study of return distributions: they are true, its measures see what is wrong, and each critic learns."""

import csv
import dataclasses
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import spy
from torch.distributions import Normal

from benchmark.common import load_jobs
from studies import return_distributions as bench

PROCESSES = list(bench.PROCESSES)


def brute_force(process, n):
    """n discounted returns from each state, by nothing but the process's steps."""
    states = torch.arange(len(process.mean)).repeat(n)
    returns, discount = torch.zeros(len(states), dtype=torch.float64), 1.0
    while discount > 1e-4 and (states != bench.END).any():
        alive = states != bench.END
        rewards, following = process.step(states.clamp(min=0))
        returns += discount * alive * rewards
        states = torch.where(alive, following, bench.END)
        discount *= process.gamma
    return returns.reshape(n, -1)


# --- the distributions ---


@pytest.mark.parametrize("name", PROCESSES)
def test_laws_are_those_of_simulated_returns(name):
    process, n = bench.PROCESSES[name], 20_000
    returns = brute_force(process, n)
    centred = (returns - returns.mean(0)) / returns.std(0)
    mean_error = (returns.mean(0) - process.mean) / process.std
    std_error = returns.std(0) / process.std - 1
    assert mean_error.abs().max() < 5 / n**0.5
    assert (std_error.abs() < 5 * ((centred**4).mean(0) - 1).sqrt() / (4 * n) ** 0.5).all()
    # Kolmogorov and Smirnov's distance, which exceeds 2.2 / sqrt(n) once in 10,000 times; just above points, for atoms.
    points = process.quantiles[20::41] + 1e-4 * process.std
    found = (returns.unsqueeze(0) <= points.unsqueeze(1)).double().mean(1)
    assert (found - process.cdf(points)).abs().max() < 2.2 / n**0.5


@pytest.mark.parametrize("name", PROCESSES)
def test_quantiles_invert_the_distribution_function(name):
    process = bench.PROCESSES[name]
    levels = ((torch.arange(bench.NUM_SAMPLES, dtype=torch.float64) + 0.5) / bench.NUM_SAMPLES).unsqueeze(1)
    step = 1e-9 * process.std
    assert (process.cdf(process.quantiles + step) >= levels - 1e-7).all()
    assert (process.cdf(process.quantiles - step) <= levels + 1e-7).all()


def test_laws_of_the_conditional_process_differ():
    process = bench.PROCESSES["conditional"]
    standard = (process.quantiles - process.mean) / process.std
    assert len(process.mean) >= 16
    assert process.std.max() / process.std.min() > 5 and process.mean.max() - process.mean.min() > 2
    skews = (standard**3).mean(0)
    assert skews.min() < -1 and skews.max() > 1
    apart = (process.quantiles.unsqueeze(1) - process.quantiles.unsqueeze(2)).abs().mean(0) + torch.eye(
        len(process.mean)
    )
    assert (apart / process.std).min() > 0.1
    at_mean = [(standard[:, i].abs() < 0.2).double().mean() for i in range(len(process.mean))]
    assert min(at_mean) < 0.05  # some distribution has a gap at its mean: two modes


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
def test_shrinkage_is_the_fixed_point_of_lambda_targets_and_not_of_sampled_ones(gae_lambda):
    """Targets of 20,000 rollouts, bootstrapped from samples of the claimed distribution, have its spread again."""
    process, steps = bench.PROCESSES["gaussian"], 256
    rewards = torch.stack([process.step(torch.zeros(20_000, dtype=torch.long))[0] for _ in range(steps)])
    dones = torch.zeros(steps, 20_000, dtype=torch.bool)
    ends = (dones, dones, process.gamma, gae_lambda, steps)
    g = bench.shrinkage(gae_lambda) * torch.randn(steps + 1, 20_000)
    x = bench.bdpg.k_step_gae(rewards, g[:-1], g[1:], *ends) + g[:-1]
    assert x[0].std() == pytest.approx(bench.shrinkage(gae_lambda), rel=0.025)  # five standard errors
    x = bench.bdpg.sr_targets(rewards, torch.randn(steps, 20_000), *ends)
    assert x[0].std() == pytest.approx(1, rel=0.025)


def test_shrinkage_of_the_default_lambda():
    assert bench.shrinkage(0.95) == pytest.approx(0.42, abs=0.005)
    assert bench.shrinkage(0.0) == bench.shrinkage(1.0) == pytest.approx(1)


# --- the measures ---


@pytest.mark.parametrize("name", PROCESSES)
def test_true_samples_are_without_fault(name):
    process = bench.PROCESSES[name]
    found = bench.measure(process.draw(bench.NUM_SAMPLES), process)
    assert max(found["w1"]) < 0.08
    assert max(map(abs, found["mean_error"])) < 5 / bench.NUM_SAMPLES**0.5
    assert all(abs(ratio - 1) < 0.15 for ratio in found["std_ratio"])
    expected = 0.9375 if name == "geometric" else 0.8  # an interval of atoms holds more: 1/2 + 1/4 + 1/8 + 1/16
    assert all(abs(coverage - expected) < 0.05 for coverage in found["coverage"])
    assert all(abs(error) < 0.05 for error in found["mode_errors"])
    assert sum(found["histogram"]) == pytest.approx(1, abs=0.01)


def test_measures_of_wrong_models():
    process = bench.PROCESSES["gaussian"]
    mean_abs = math.sqrt(2 / math.pi)  # of a standard normal
    shifted = bench.measure(process.quantiles + 0.5, process)
    assert shifted["w1"] == pytest.approx([0.5]) and shifted["mean_error"] == pytest.approx([0.5])
    narrow = bench.measure(process.quantiles / 2, process)
    assert narrow["w1"] == pytest.approx([mean_abs / 2], abs=1e-3) and narrow["std_ratio"] == pytest.approx(
        [0.5], abs=1e-3
    )
    assert narrow["coverage"] == pytest.approx([math.erf(1.2816 / 2 / math.sqrt(2))], abs=1e-3)
    collapsed = bench.measure(torch.zeros_like(process.quantiles), process)
    assert collapsed["w1"] == pytest.approx([mean_abs], abs=1e-3) and collapsed["coverage"] == pytest.approx(
        [0], abs=1e-5
    )


def test_a_dropped_mode_is_seen():
    process = bench.PROCESSES["fork"]
    samples = process.draw(bench.NUM_SAMPLES)
    samples[:, 0] = samples[:, 0].abs()  # only good branches, and some that do not exist
    assert bench.measure(samples, process)["mode_errors"] == pytest.approx([-0.4, 0.4], abs=0.05)


def test_inference_of_an_encoder_that_inverts_the_generator():
    """G(z, s) = z_0 and q(z|x, s) = N(x, 0.1²) around it: known errors, known gains of independent x and g."""
    agent, process = untrained("bdpg"), bench.PROCESSES["gaussian"]
    model = agent.return_model
    model.track_residuals(torch.ones(2))
    del model.prior_mean
    model.prior_mean = lambda c: torch.zeros(len(c), 2)
    model.generate = lambda z, c: z[..., 0].expand(torch.broadcast_shapes(z.shape[:-1], c.shape[:-1]))
    model.encode = lambda x, b, c: Normal(torch.stack([x, 0 * x], -1), torch.tensor([0.1, 1.0]).expand(*x.shape, 2))
    with torch.no_grad():
        found = bench.measure_inference(agent, process)
    assert found["reconstruction_error"] == pytest.approx(0.1, rel=0.1)
    assert found["mean_of_latent"] < 0.05 and found["std_of_latent"] == pytest.approx(1, abs=0.05)
    # E[min((x - g)² / (2 · 0.01), 100)] with x - g ~ N(0, 2), and with N(3, 2), by quadrature
    y = torch.linspace(-15, 15, 30_001, dtype=torch.float64)
    for shift, name in ((0, "information_gain"), (3, "information_gain_unseen")):
        density = torch.exp(-((y - shift) ** 2) / 4) / math.sqrt(4 * math.pi)
        assert found[name] == pytest.approx(torch.trapezoid((50 * y**2).clamp(max=100) * density, y).item(), rel=0.1)


# --- learning ---


def untrained(critic):
    space = lambda n: SimpleNamespace(shape=(n,))  # noqa: E731
    envs = SimpleNamespace(observation_space=space(bench.NUM_FEATURES), action_space=space(1))
    return bench.SCRIPTS[critic].Agent(envs, bench.default_args(critic))


@pytest.mark.parametrize("critic", bench.SCRIPTS)
def test_the_script_itself_trains_on_what_the_process_gives(critic, monkeypatch):
    """Rewards, terminations and observations reach the targets as they are: neither normalised nor cut off."""
    process, script = bench.PROCESSES["fork"], bench.SCRIPTS[critic]
    stepped, gae = spy(monkeypatch, process, "step"), spy(monkeypatch, script, "k_step_gae")
    shuffled, measured = spy(monkeypatch, torch, "randperm"), []
    args = replace(bench.default_args(critic), num_envs=2, num_steps=32, minibatch_size=32, update_epochs=3)
    agent = bench.train_on(process, critic, args, 12, lambda iteration, agent: measured.append((iteration, agent)))
    assert len(stepped) == 64 and len(shuffled) == 6  # two iterations, three passes over each
    assert measured == [(1, agent)] and not any(parameter.requires_grad for parameter in agent.parameters())
    rewards, ended = (torch.stack([result[i] for _, result in stepped[:32]]) for i in (0, 1))
    torch.testing.assert_close(gae[0][0][0], rewards.float())
    assert torch.equal(gae[0][0][3], ended == bench.END) and torch.equal(gae[0][0][4], ended == bench.END)
    assert agent.reward_stats.std == 1 and (agent.obs_stats.mean == 0).all()
    assert torch.equal(agent.policy.log_std, torch.full((1,), args.log_std_init))  # the policy rests


def learn(critic, name, steps, target="sr", gae_lambda=0.95):
    process = bench.PROCESSES[name]
    agent, _ = bench.train(critic, process, target, gae_lambda, seed=1, epochs=1, steps=steps)
    found = bench.measure(bench.sample_returns(agent, process), process)
    return agent, {
        measure: torch.tensor(found[measure])
        for measure in ("w1", "mean_error", "std_ratio", "coverage", "mode_errors")
    }


def test_bdpg_learns_24_laws():
    """A generator that collapsed to the mean has W1 0.8 and coverage 0; one that never learnt has W1 above 1."""
    agent, found = learn("bdpg", "conditional", 960)
    assert found["w1"].mean() < 0.35 and found["w1"].max() < 0.9, found
    assert found["mean_error"].abs().mean() < 0.25, found
    assert 0.75 < found["std_ratio"].mean() < 1.25, found
    assert 0.65 < found["coverage"].mean() < 0.9, found
    with torch.no_grad():
        inference = bench.measure_inference(agent, bench.PROCESSES["conditional"])
    assert inference["reconstruction_error"] < 0.6, inference  # 1 where the encoder ignores x
    assert inference["mean_of_latent"] < 0.5 and 0.7 < inference["std_of_latent"] < 1.3, inference
    assert inference["information_gain_unseen"] > 1.5 * inference["information_gain"], inference


@pytest.mark.parametrize("critic, steps", [("bdpg", 960), ("wgan", 960), ("qr", 1600)])
def test_both_modes_of_the_fork_are_kept(critic, steps):
    """A mode that is dropped, or filled into the gap between the two, is off by 0.4 or 0.6."""
    _, found = learn(critic, "fork", steps)
    assert found["mode_errors"].abs().max() < 0.2, found
    assert found["w1"].mean() < 0.4, found


def test_a_scalar_critic_learns_means_alone():
    _, found = learn("scalar", "conditional", 1600)
    assert found["mean_error"].abs().mean() < 0.2, found
    assert (found["std_ratio"] == 0).all() and (found["coverage"] < 1e-4).all()


def test_lambda_targets_shrink_the_learnt_distribution_and_sampled_ones_do_not():
    _, averaged = learn("qr", "gaussian", 1600, "lambda")
    _, sampled = learn("qr", "gaussian", 1600, "sr")
    assert averaged["std_ratio"].item() == pytest.approx(bench.shrinkage(0.95), abs=0.1)
    assert sampled["std_ratio"].item() == pytest.approx(1, abs=0.25)


# --- the command ---


def test_a_bench_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, capsys):
    done = spy(monkeypatch, bench, "run_job")
    args = bench.Args(
        critics=("qr", "scalar"), processes=("uniform",), targets=("sr",), seeds=(1,), steps=160, output=tmp_path
    )
    bench.main(args)
    assert [job["critic"] for (job,), _ in done] == ["qr", "scalar"]
    path = tmp_path / "jobs.jsonl"
    with open(path, "a") as file:
        file.write('{"critic": "qr", "process": "uni')  # killed while it wrote
    bench.main(dataclasses.replace(args, seeds=(1, 2)))
    assert [(job["critic"], job["seed"]) for (job,), _ in done[2:]] == [("qr", 2), ("scalar", 2)]
    assert len(load_jobs(path, bench.KEYS)) == 4
    with open(tmp_path / "states.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["w1"]) for row in rows] == pytest.approx([result["w1"][0] for _, result in done], rel=1e-4)
    assert all((tmp_path / f"{name}.png").exists() for name in ("density", "steps", "shrinkage"))
    assert "| uniform | 1 | 0.0" in capsys.readouterr().out
    for target in re.findall(r"\]\(([^)]+)\)", (tmp_path / "tables.md").read_text()):
        assert (tmp_path / target).exists()


def test_a_scalar_critic_alone_is_reported_without_densities(tmp_path, capsys):
    bench.main(
        bench.Args(
            critics=("scalar",),
            processes=("uniform",),
            targets=("sr",),
            seeds=(1,),
            epochs=10,
            steps=160,
            output=tmp_path,
        )
    )
    assert "passes over a rollout: 10" in capsys.readouterr().out
    assert not (tmp_path / "density.png").exists()


def test_with_write_the_results_of_the_repository_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench.Args, "steps", 160)
    args = dict(critics=("bdpg",), processes=("uniform",), targets=("sr",), seeds=(1,), steps=160, write=True)
    bench.main(bench.Args(**args))
    text = (tmp_path / "tables.md").read_text()
    bench.main(bench.Args(**args))  # from the finished job
    assert text.startswith("1 jobs") and (tmp_path / "tables.md").read_text() == text


def test_version_is_that_of_the_code(tmp_path, monkeypatch):
    source = Path(bench.qr.__file__).read_text()

    def version(*change):
        assert not change or source.count(change[0]) == 1
        (tmp_path / "qr.py").write_text(source.replace(*change) if change else source)
        monkeypatch.setattr(bench.qr, "__file__", str(tmp_path / "qr.py"))
        return bench.version("qr")

    plain = version()
    assert version("def quantile_loss(", "# a comment\ndef quantile_loss(") == plain
    assert version("def quantile_loss(", "print()\n\n\ndef quantile_loss(") != plain
    assert version("num_return_samples: int = 8", "num_return_samples: int = 9") != plain


def test_every_job_is_planned_once():
    jobs = bench.plan(bench.Args())
    assert len({tuple(job.values()) for job in jobs}) == len(jobs)
    for critic in bench.SCRIPTS:
        for process in bench.PROCESSES:
            assert {job["seed"] for job in bench.select(jobs, critic=critic, process=process, target="sr")} == {
                1,
                2,
                3,
                4,
                5,
            }


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 100},
        {"workers": 0},
        {"seeds": ()},
        {"critics": ("qr",), "processes": ("fork",), "targets": ("lambda",)},
        {"epochs": 10, "write": True},
        {"steps": 320, "write": True},
        {"quick": True, "write": True},
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(tmp_path, capsys, wrong):
    with pytest.raises(SystemExit) as stop:
        bench.main(bench.Args(output=tmp_path / "new", **wrong))
    assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "new").exists()

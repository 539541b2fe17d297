"""How much of the variance of its Bellman targets could a critic explain?

The policy of a run plays on, without learning, and a large network is fitted by regression to the targets x that
training would see now, for as long as it gains by it. It and the agent's critic are tested in environments that it was
not fitted in. Where even that network explains no more than half of the variance, the other half is chance.

    python studies/ceiling.py runs/NAME
"""

import importlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmark.common import fail, start


@dataclass
class Args:
    run: tyro.conf.Positional[Path]
    """a run's folder"""
    rollouts: int = 12
    """rollouts, as long as the run's, of 48 environments: 32 to fit the network, 8 that tell when to stop, 8 to test"""
    seed: int = 1000
    """of environments and sampling"""


def load(folder, num_envs, seed):
    """The script of a run, its newest agent, environments to play in, and its arguments."""
    try:
        name = json.loads((folder / "run.json").read_text())["script"]
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"{folder} is not the folder of a run.")
    if name not in ("bdpg_mujoco.py", "ppo_wgan_mujoco.py", "ppo_qr_mujoco.py"):
        fail(f"{folder} was made by {name}, but this is for the MuJoCo scripts with a return distribution.")
    script = importlib.import_module(name.removesuffix(".py"))
    checkpoint = script.load_checkpoint(str(folder))
    args = replace(checkpoint["args"], num_envs=num_envs, cuda=False)
    envs = script.Environments(args, seed)
    agent = script.Agent(envs, args)
    agent.load_state_dict(checkpoint["agent"])
    return script, agent, envs, args


def collect(script, agent, envs, run_args, rollouts, seed):
    """What the networks see, Bellman targets, and the mean of 64 sampled returns: (steps, environments, ...) each."""
    torch.manual_seed(seed)
    model, scale = agent.return_model, agent.reward_stats.std.float()
    next_obs = agent.observe(envs.reset())
    collected = []
    for _ in range(rollouts):
        steps, cut_short = [], []
        for t in range(run_args.num_steps):
            obs, c = next_obs, agent.trunk(next_obs)
            action = agent.policy(obs, c).sample().numpy()
            raw_obs, reward, terminated, truncated, last_obs, _ = envs.step(action)
            next_obs = agent.observe(raw_obs)
            cut_short += [(t, i, last_obs[i]) for i in (truncated & ~terminated).nonzero()[0]]
            steps.append([obs, c, *(torch.tensor(value) for value in (reward, terminated, terminated | truncated))])
        obs, embeddings, rewards, terminations, dones = (torch.stack(values) for values in zip(*steps, strict=True))
        samples = model.sample(torch.cat([embeddings, agent.trunk(next_obs)[None]]), 1)[0]
        g, next_g = samples[:-1], samples[1:].clone()
        for t, i, last in cut_short:
            next_g[t, i] = model.sample(agent.trunk(agent.observe(last[None])), 1)[0, 0]
        rewards = (rewards / scale).clamp(-10, 10).float()
        k = run_args.bootstrap_length or run_args.num_steps
        ends = (terminations, dones, run_args.gamma, run_args.gae_lambda, k)
        if run_args.target == "sr":
            x = script.sr_targets(rewards, next_g, *ends)
        else:
            x = script.k_step_gae(rewards, g, next_g, *ends) + g
        collected.append((obs, x, model.sample(embeddings, 64).mean(0)))
    return [torch.cat(values) for values in zip(*collected, strict=True)]


def explained(prediction, x):
    return (1 - (x - prediction).var() / x.var()).item()


def fit(obs, x, test_obs, stop_obs, stop_x, seed, max_epochs=200, patience=10):
    """Predictions for the test by a regression that stopped where it was best on data of its own."""
    torch.manual_seed(seed)
    mean, std = x.mean(), x.std()
    network = nn.Sequential(nn.Linear(obs.shape[1], 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    best, prediction, since = -float("inf"), None, 0
    for _ in range(max_epochs):
        for index in torch.randperm(len(x)).split(512):
            optimizer.zero_grad()
            nn.functional.mse_loss(network(obs[index]).squeeze(-1), (x[index] - mean) / std).backward()
            optimizer.step()
        with torch.no_grad():
            score = explained(mean + std * network(stop_obs).squeeze(-1), stop_x)
            since += 1
            if score > best:
                best, prediction, since = score, mean + std * network(test_obs).squeeze(-1), 0
        if since == patience:
            break
    return prediction


def main(args):
    if args.rollouts < 1:
        fail("--rollouts must be at least 1.")
    script, agent, envs, run_args = load(args.run, 48, args.seed)
    torch.set_num_threads(1)
    with torch.no_grad():
        collected = collect(script, agent, envs, run_args, args.rollouts, args.seed)
    parts = (slice(32), slice(32, 40), slice(40, 48))
    flat = [[values[:, part].flatten(0, 1) for values in collected] for part in parts]
    (fit_obs, fit_x, _), (stop_obs, stop_x, _), (test_obs, test_x, test_mean) = flat
    ceiling = fit(fit_obs, fit_x, test_obs, stop_obs, stop_x, args.seed)
    print(f"targets {len(test_x):,}; explained variance: the agent {explained(test_mean, test_x):.2f}, ", end="")
    print(f"a network fitted to {len(fit_x):,} others {explained(ceiling, test_x):.2f}")


if __name__ == "__main__":
    start(main, Args, __doc__)

"""PPO in plain PyTorch and Gymnasium, without zhixing, on CartPole-v1. The tutorial explains it part by part."""

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

GOAL = 475.0  # mean return of 100 fresh episodes, each of at most 500 steps
ENVS, STEPS, EPOCHS, MINIBATCH = 8, 64, 10, 256
GAMMA, LAMBDA, CLIP, LR = 0.98, 0.9, 0.2, 1e-3


def network(outputs, scale):
    """Two layers of 64 units. The actor's last one starts small: at first all actions are about as likely."""
    last = nn.Linear(64, outputs)
    nn.init.orthogonal_(last.weight, scale)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), last)


def collect(envs, obs, actor, critic):
    """STEPS steps in each environment: what was seen and done, how likely it was, and how good it turned out."""
    shape = (STEPS, ENVS)
    seen, acted = torch.zeros(*shape, 4), torch.zeros(shape, dtype=torch.long)
    logp, reward, value, next_value, advantage = (torch.zeros(shape) for _ in range(5))
    terminated, ended = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
    for t in range(STEPS):
        seen[t] = torch.as_tensor(obs)
        policy = Categorical(logits=actor(seen[t]))
        acted[t] = policy.sample()
        logp[t], value[t] = policy.log_prob(acted[t]), critic(seen[t]).squeeze(-1)
        obs, paid, died, cut, info = envs.step(acted[t].numpy())
        after = obs.copy()
        for i in np.flatnonzero(died | cut):  # obs shows the next episode already: look at the end of this one
            after[i] = info["final_obs"][i]
        next_value[t] = critic(torch.as_tensor(after)).squeeze(-1)
        reward[t], terminated[t], ended[t] = (torch.as_tensor(part) for part in (paid, died, died | cut))
    # generalised advantage estimation: how much better than expected, over all that followed in the same episode
    carry = torch.zeros(ENVS)
    for t in reversed(range(STEPS)):
        surprise = reward[t] + GAMMA * ~terminated[t] * next_value[t] - value[t]  # only a fall ends the future
        carry = surprise + GAMMA * LAMBDA * ~ended[t] * carry
        advantage[t] = carry
    batch = seen.flatten(0, 1), acted.flatten(), logp.flatten(), advantage.flatten(), (advantage + value).flatten()
    return obs, batch


def update(batch, actor, critic, optimizer):
    """Make what went better than expected more likely, but never much at once; and expect better."""
    for _ in range(EPOCHS):
        for rows in torch.randperm(STEPS * ENVS).split(MINIBATCH):
            obs, action, logp_before, advantage, target = (part[rows] for part in batch)
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            ratio = (Categorical(logits=actor(obs)).log_prob(action) - logp_before).exp()
            policy_loss = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
            value_loss = (critic(obs).squeeze(-1) - target).square().mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss).backward()
            nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
            optimizer.step()


def make(copies):
    anew = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}  # what has ended begins anew within the same step
    return gym.make_vec("CartPole-v1", copies, vectorization_mode="sync", vector_kwargs=anew)


@torch.no_grad()
def evaluate(actor, episodes, seed):
    """The mean return of fresh episodes, all at once, each with the likeliest actions."""
    envs, returns, playing = make(episodes), np.zeros(episodes), np.ones(episodes, bool)
    obs, _ = envs.reset(seed=seed)
    while playing.any():
        obs, reward, terminated, truncated, _ = envs.step(actor(torch.as_tensor(obs)).argmax(-1).numpy())
        returns += reward * playing
        playing &= ~(terminated | truncated)
    return float(returns.mean())


def main(seed=0, iterations=200):
    torch.manual_seed(seed)
    envs, actor, critic = make(ENVS), network(2, 0.01), network(1, 1.0)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], LR)
    obs, _ = envs.reset(seed=seed)
    for iteration in range(1, iterations + 1):
        with torch.no_grad():
            obs, batch = collect(envs, obs, actor, critic)
        update(batch, actor, critic, optimizer)
        if iteration % 5 == 0:
            mean = evaluate(actor, 20, seed=1000 + iteration)
            print(f"{iteration * STEPS * ENVS} steps: mean return {mean:.1f}")
            if mean >= GOAL and (mean := evaluate(actor, 100, seed=2000)) >= GOAL:
                break
    return {"final_return": mean, "env_steps": iteration * STEPS * ENVS}


if __name__ == "__main__":
    main()

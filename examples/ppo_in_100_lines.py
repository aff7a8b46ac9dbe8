"""PPO in plain PyTorch and Gymnasium, without zhixing, on CartPole-v1. The tutorial explains it part by part."""

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

GOAL = 475.0  # mean return of 100 evaluation episodes; the best is 500
NUM_ENVS, STEPS, EPOCHS, MINIBATCH_SIZE = 8, 64, 10, 256
GAMMA, LAMBDA, CLIP_RANGE, LR = 0.98, 0.9, 0.2, 1e-3


def make_net(outputs, scale):
    """Build a network with two hidden layers. `scale` is the size of the last layer's initial weights."""
    last = nn.Linear(64, outputs)
    nn.init.orthogonal_(last.weight, scale)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), last)


def collect(envs, obs, actor, critic):
    """Take STEPS steps in each environment. Return the observations to continue from and a batch of the steps."""
    steps = []
    for _ in range(STEPS):
        obs = torch.as_tensor(obs)
        policy = Categorical(logits=actor(obs))
        action = policy.sample()
        new_obs, reward, terminated, truncated, info = envs.step(action.numpy())
        next_obs = new_obs.copy()
        for i in np.flatnonzero(terminated | truncated):  # new_obs[i] is the first observation of the next episode
            next_obs[i] = info["final_obs"][i]
        value, next_value = critic(obs).squeeze(-1), critic(torch.as_tensor(next_obs)).squeeze(-1)
        ends = torch.as_tensor(terminated), torch.as_tensor(terminated | truncated)
        reward = torch.as_tensor(reward, dtype=torch.float32)
        steps.append((obs, action, policy.log_prob(action), reward, value, next_value, *ends))
        obs = new_obs
    all_obs, action, logp, reward, value, next_value, terminated, ended = map(torch.stack, zip(*steps, strict=True))

    # generalized advantage estimation, backwards in time
    delta = reward + GAMMA * ~terminated * next_value - value  # only termination stops bootstrapping
    advantage, carry = torch.zeros_like(value), torch.zeros(NUM_ENVS)
    for t in reversed(range(STEPS)):
        carry = delta[t] + GAMMA * LAMBDA * ~ended[t] * carry
        advantage[t] = carry
    batch = (all_obs, action, logp, advantage, advantage + value)
    return obs, [part.flatten(0, 1) for part in batch]  # [STEPS,NUM_ENVS,...] -> [B,...]


def update(batch, actor, critic, optimizer):
    """Improve the policy with PPO's clipped objective, and the critic by regression to the returns."""
    for _ in range(EPOCHS):
        for rows in torch.randperm(STEPS * NUM_ENVS).split(MINIBATCH_SIZE):
            obs, action, old_logp, advantage, returns = (part[rows] for part in batch)
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            ratio = (Categorical(logits=actor(obs)).log_prob(action) - old_logp).exp()
            clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
            policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
            value_loss = (critic(obs).squeeze(-1) - returns).square().mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss).backward()
            nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
            optimizer.step()


def make_envs(num_envs):
    same_step = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}  # the step that ends an episode also resets
    return gym.make_vec("CartPole-v1", num_envs, vectorization_mode="sync", vector_kwargs=same_step)


@torch.no_grad()
def evaluate(actor, episodes, seed):
    """Play one episode in each of `episodes` environments with the most likely actions. Return the mean return."""
    envs, returns, running = make_envs(episodes), np.zeros(episodes), np.ones(episodes, bool)
    obs, _ = envs.reset(seed=seed)
    while running.any():
        obs, reward, terminated, truncated, _ = envs.step(actor(torch.as_tensor(obs)).argmax(-1).numpy())
        returns += reward * running
        running &= ~(terminated | truncated)
    return float(returns.mean())


def main(seed=0, iterations=200):
    torch.manual_seed(seed)
    envs, actor, critic = make_envs(NUM_ENVS), make_net(2, scale=0.01), make_net(1, scale=1.0)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], LR)
    obs, _ = envs.reset(seed=seed)
    for iteration in range(1, iterations + 1):
        with torch.no_grad():
            obs, batch = collect(envs, obs, actor, critic)
        update(batch, actor, critic, optimizer)
        if iteration % 5 == 0:
            mean = evaluate(actor, 20, seed=1000 + iteration)
            print(f"{iteration * STEPS * NUM_ENVS} steps: mean return {mean:.1f}")
            if mean >= GOAL and (mean := evaluate(actor, 100, seed=2000)) >= GOAL:
                break
    return {"final_return": mean, "env_steps": iteration * STEPS * NUM_ENVS}


if __name__ == "__main__":
    main()

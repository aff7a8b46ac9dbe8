"""Several policies in one run: PPO learns tic-tac-toe from games against its earlier versions.

Run it with `python league.py`. Evaluations play against a script that was never met in training.
"""

import torch

import zhixing as zx

GOAL = 0.5  # mean result against the script, where 1 is a win and -1 a loss; two equal players get 0
CENTER = 4


class CenterFirst(zx.Policy):
    """Takes the center if it is free, and otherwise a random field."""

    def act(self, obs, hidden, mask, phase, rng, env_steps):
        random = self.random_action(len(obs), mask, rng)
        return zx.Decision(torch.where(mask[:, CENTER], CENTER, random))


def main() -> dict:
    ppo = {
        "algorithm": "ppo",
        "lr": 3e-3,
        "rollout_steps": 32,
        "minibatch_size": 256,
        "epochs": 4,
        "entropy_coef": 0.01,
    }
    return zx.train(
        "multi_policy",
        env="pettingzoo/tictactoe",
        policies={
            "learner": {**ppo, "net": {"hidden_sizes": [128, 128], "activation": "relu"}},
            "past": {"league": "learner", "every": 4_000, "size": 5, "sampling": "prioritized"},
            "script": {"script": CenterFirst},
        },
        agents={"player_1": "learner", "player_2": "past"},
        eval_agents={"player_2": "script"},
        rotate=True,  # the learner is player 1 in half of the environments
        num_envs=32,
        env_steps=24_000,
        eval_episodes=100,
        eval_every=8_000,
    )


if __name__ == "__main__":
    main()

"""Load settings from a YAML file, override some, train, and load the trained agent.

Run it with `python configuration.py`.
"""

from pathlib import Path

import numpy as np

import zhixing as zx

GOAL = 9.0  # mean return; the best is 10, random actions get 2.5

SETTINGS = """\
algorithm: ppo
env: toy/match
env_steps: 20_000
num_envs: 4
rollout_steps: 64
lr: 1e-3
eval_every: 1_000
"""


def main() -> dict:
    Path("match.yaml").write_text(SETTINGS)

    # keyword arguments override the file; two underscores separate a group from its setting
    cfg = zx.config.load("match.yaml", lr=3e-3, net__hidden_sizes=[32, 32], stop_return=GOAL)
    session = zx.Session(cfg)
    result = session.run()
    print(f"{session.folder.path}: return {result['final_return']:.2f}")

    agent = zx.load(session.folder.path)
    obs = np.eye(4, dtype=np.float32)[2]  # cue 2 of 4, one-hot
    print(f"action for cue 2: {agent.act(obs)}")
    return result


if __name__ == "__main__":
    main()

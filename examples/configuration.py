"""A configuration: read from YAML, changed by name, run, loaded as an agent.

Run it with `python configuration.py`.
"""

from pathlib import Path

import numpy as np

import zhixing as zx

GOAL = 9.0  # of 10 right answers per episode; guessing finds 2.5

SETTINGS = """\
algorithm: ppo
env: toy/match
env_steps: 20_000
num_envs: 4
rollout_steps: 64
lr: 1e-3
eval_every_steps: 1_000
"""


def main() -> dict:
    Path("match.yaml").write_text(SETTINGS)

    # files first, then settings by name; the last word wins. Two underscores reach into a group.
    cfg = zx.config.load("match.yaml", lr=3e-3, net__hidden_sizes=[32, 32], stop_return=GOAL)
    session = zx.Session(cfg)
    result = session.run()
    print(f"{session.folder.path}: return {result['final_return']:.2f}")

    # what was learned, without the platform around it
    agent = zx.load(session.folder.path)
    cue = np.eye(4, dtype=np.float32)[2]
    print(f"shown cue 2, the agent answers {agent.act(cue)}")
    return result


if __name__ == "__main__":
    main()

"""Deploy a recurrent agent: no environment is made, and a server keeps the hidden state of each client.

Run it with `python deploy.py`.
"""

import numpy as np

import zhixing as zx

GOAL = 0.9  # fraction of cues recalled; without memory 1/4


def main() -> dict:
    result = zx.train("ppo", env="toy/recall", env__delay=2, env_steps=60_000, eval_every=6_144, stop_return=GOAL)
    agent = zx.load(result)

    # each client sees its cue, two blank observations, and the question
    clients = {cue: agent.initial_hidden() for cue in range(4)}
    blank, question = np.zeros(5), np.eye(5)[4]
    for step in range(4):
        for cue, hidden in clients.items():
            obs = (np.eye(5)[cue], blank, blank, question)[step]
            answer, clients[cue] = agent.act(obs, hidden=hidden)
            if step == 3:
                print(f"cue {cue}: answer {answer}")

    # or all clients as one batch, for which the agent keeps the hidden states; sampled as in training
    agent.reset()
    for obs in (np.eye(4, 5), np.zeros((4, 5)), np.zeros((4, 5)), np.tile(question, (4, 1))):
        answers = agent.act(obs, stochastic=True)
    print(f"sampled answers: {answers}")
    return result


if __name__ == "__main__":
    main()

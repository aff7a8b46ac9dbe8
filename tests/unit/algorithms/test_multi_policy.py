"""A run with several policies: agents by name, frozen weights, leagues, exact resume, and deployment of one policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import checkpoint_tensors, differing_tensors, metrics_rows
from gymnasium.spaces import Discrete

import zhixing as zx
from zhixing.algorithms.multi_policy import MultiPolicy
from zhixing.core.batch import Batch
from zhixing.core.policy import Decision, Phase
from zhixing.core.tree import tree_leaves
from zhixing.errors import NonFiniteError, UserError
from zhixing.training.run_folder import read_checkpoint

GAME, GROUPS = "pettingzoo/tictactoe", "dummy_envs:TwoGroups"
SMALL = {"algorithm": "ppo", "rollout_steps": 8, "minibatch_size": 32, "epochs": 1, "net": {"hidden_sizes": [8]}}
LEAGUE = {"league": "learner", "every": 100, "size": 3, "sampling": "prioritized"}
SHORT = {"num_envs": 4, "env_steps": 320, "eval_every": 160, "eval_episodes": 4, "tensorboard": False, "log_every": 32}


class LastAction(zx.Policy):
    """Takes the last valid action."""

    def act(self, obs: Any, hidden: Any, mask: Any, phase: Phase, rng: torch.Generator, env_steps: int) -> Decision:
        return Decision((mask * torch.arange(1, mask.shape[-1] + 1)).argmax(-1))


def make(env: str = GROUPS, **settings: Any) -> MultiPolicy:
    vector = zx.envs.make_vector(env, 1, backend="serial")
    cfg = zx.config.load(algorithm="multi_policy", env=env, num_envs=2, **settings)
    learner = zx.algorithms.get("multi_policy").make(cfg, vector.spaces)
    vector.close()
    assert isinstance(learner, MultiPolicy)
    return learner


def config(**settings: Any) -> Any:
    settings = {"env": GAME, "vector__backend": "serial", "num_threads": 1, **SHORT, **settings}
    return zx.config.load(algorithm="multi_policy", **settings)


def train(out: Path, **settings: Any) -> Path:
    zx.Session(config(**settings), out, quiet=True).run()
    return out


class StopAt(zx.Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
        if loop.steps >= self.steps:
            loop.stop("interrupted")


# --- agents and their policies ---


def test_names_precede_patterns_and_the_first_pattern_counts() -> None:
    agents = {"*_0": "ppo", "runner_*": "dqn", "guard_0": "random", "*": "a2c"}
    learner = make(agents=agents)
    assert learner.policy.seating.agents == {"ppo": [0], "dqn": [1], "random": [2], "a2c": [3]}


ERRORS = {
    "unknown agent": (
        {"agents": {"runer_0": "ppo", "*": "random"}},
        "unknown agent in agents: 'runer_0': did you mean",
    ),
    "unknown pattern": ({"agents": {"*": "ppo"}, "eval_agents": {"goalie_*": "ppo"}}, "unknown agent in eval_agents"),
    "agent without policy": ({"agents": {"runner_*": "ppo"}}, "agents has no policy for guard_0"),
    "policy without agent": ({"policies": {"a": "ppo", "b": "dqn"}, "agents": {"*": "a"}}, "no agent has the policy b"),
    "team of one": (
        {"agents": {"runner_0": "mappo", "*": "random"}},
        "mappo needs several agents, but this policy has",
    ),
    "team of another size": (
        {"agents": {"runner_*": "mappo", "*": "random"}, "eval_agents": {"*": "mappo"}},
        "mappo acts for 2 agents together",
    ),
    "learner without agent": (
        {"agents": {"*": "random"}, "eval_agents": {"guard_0": "ppo"}},
        "only acts in evaluations, so it can't learn",
    ),
    "no policy": (
        {"policies": {"a": "json:loads"}, "agents": {"*": "a"}},
        "script='json:loads' must be a class that derives from zhixing.Policy",
    ),
    "other actions": ({"agents": {"*": "td3"}}, "policies.td3 of multi_policy: td3 needs continuous actions"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_invalid_agents_are_rejected(case: str) -> None:
    settings, message = ERRORS[case]
    with pytest.raises(UserError, match=message):
        make(**settings)


def test_environment_with_one_agent_is_rejected() -> None:
    with pytest.raises(UserError, match="multi_policy needs an environment with several agents"):
        make("toy/match")


def test_intervals_between_updates_must_divide_each_other(tmp_path: Path) -> None:
    policies = {"a": {**SMALL, "rollout_steps": 12}, "b": SMALL}
    with pytest.raises(UserError, match=r"don't fit together \(a 12, b 8\)"):
        train(tmp_path / "run", env=GROUPS, policies=policies, agents={"runner_*": "a", "guard_*": "b"})


def test_each_learner_updates_at_its_own_interval(tmp_path: Path) -> None:
    """The run has 80 steps in each of 4 environments."""
    dqn = {"algorithm": "dqn", "train_every": 2, "updates_per_step": 0.25, "learning_starts": 64, "batch_size": 4}
    policies = {"a": {**SMALL, "minibatch_size": 64}, "b": dqn, "c": {**SMALL, "rollout_steps": 16}}
    agents = {"runner_*": "a", "guard_0": "b", "guard_1": "c"}
    session = zx.Session(config(env=GROUPS, policies=policies, agents=agents), tmp_path / "run", quiet=True)
    session.run()
    learners = session.learner.learners  # type: ignore[attr-defined]
    assert learners["a"].updates == 10  # rollouts of 8 steps, each a minibatch of 8 * 4 * 2
    assert learners["b"].updates == 64  # (320 - 64) * 0.25
    assert learners["c"].updates == 10  # 5 rollouts of 16 steps, each 2 minibatches of 32
    assert session.learner.updates == 84
    assert len(session.loop.replay.buffers["b"]) == 320  # type: ignore[union-attr]


def test_error_has_the_batch_of_the_learner_that_failed(tmp_path: Path) -> None:
    agents = {"runner_*": "a", "guard_*": "b"}
    session = zx.Session(config(env=GROUPS, policies={"a": SMALL, "b": SMALL}, agents=agents), tmp_path, quiet=True)
    view = session.learner.view  # type: ignore[attr-defined]

    def poison(name: str, batch: Batch) -> Batch:
        own = view(name, batch)
        return own.replace(reward=own.reward * np.nan) if name == "a" and session.loop.env_steps > 100 else own

    session.learner.view = poison  # type: ignore[attr-defined]
    with pytest.raises(NonFiniteError, match=r"^a/\w+ is nan"):
        session.run()
    (file,) = (tmp_path / "crash").glob("batch-*.safetensors")
    assert np.isnan(np.asarray(read_checkpoint(file)["batch"]["reward"])).all()


# --- agents with other kinds of spaces ---

MIXED = "dummy_envs:make_mixed"


def test_policies_have_the_spaces_of_their_agents() -> None:
    learner = make(MIXED, agents={"eye": "dqn", "hand": "sac"})
    eye, hand = (learner.learners[name].spaces for name in ("dqn", "sac"))
    assert (eye.obs.shape, eye.action, eye.mask) == ((2, 2), Discrete(4), 4)
    assert (set(hand.obs.spaces), hand.action.shape, hand.mask) == ({"target", "phase"}, (1,), None)
    assert not eye.agents
    assert not hand.agents


def test_learners_read_their_own_observations_and_actions() -> None:
    learner = make(MIXED, agents={"eye": "dqn", "hand": "ppo"})
    vector = zx.envs.make_vector(MIXED, 2, backend="serial")
    batch = zx.Actor(learner.policy, vector, learner.extra_fields, seed=0).collect(steps=12).batch
    eye, hand = learner.view("dqn", batch), learner.view("ppo", batch)
    assert (eye.obs.shape, eye.action.dtype, eye.mask.shape) == ((12, 2, 2, 2), np.int64, (12, 2, 4))
    assert np.array_equal(eye.action, batch.action[:, :, 0, 0])
    assert np.take_along_axis(eye.mask, eye.action[..., None], 2).all()
    assert hand.obs["phase"][:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0, 1]
    assert hand.next_obs["phase"][:, 0].tolist() == [1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 1, 2]
    assert "mask" not in hand
    np.testing.assert_allclose(hand.action[..., 0] * 3 + 1, batch.action[:, :, 1, 0], atol=1e-6)  # -1 to 1 is -2 to 4


def test_agents_with_other_kinds_of_spaces_need_different_policies() -> None:
    with pytest.raises(UserError, match="eye and hand have different kinds of spaces"):
        make(MIXED, agents={"*": "ppo"})


def test_stacks_of_other_kinds_of_spaces_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"different kinds of spaces, whose padded observations can't be stacked"):
        train(tmp_path / "run", env={"name": MIXED, "stack": 2}, agents={"eye": "ppo", "hand": "a2c"})


def test_run_with_other_kinds_of_spaces_resumes_exactly(tmp_path: Path) -> None:
    dqn = {"algorithm": "dqn", "train_every": 2, "updates_per_step": 0.25, "learning_starts": 64, "batch_size": 4}
    policies, agents = {"a": dqn, "b": SMALL}, {"eye": "a", "hand": "b"}
    cfg = config(env=MIXED, policies=policies, agents=agents, checkpoint_every=96)
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [StopAt(140)], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")
    action = zx.load(tmp_path / "parts", policy="b").act({"target": np.float32([1.0]), "phase": 2})
    assert -2.0 <= action[0] <= 4.0


# --- learning, frozen and scripted policies ---


def test_only_learning_policies_change(tmp_path: Path) -> None:
    first = train(tmp_path / "first", policies={"a": SMALL}, agents={"player_1": "a", "player_2": "random"})
    policies = {"learner": SMALL, "frozen": {"run": str(first)}}
    agents = {"player_1": "learner", "player_2": "frozen"}
    second = train(tmp_path / "second", policies=policies, agents=agents)
    a, frozen = zx.load(first, policy="a").policy, zx.load(second, policy="frozen").policy
    assert all(value.equal(frozen.state_dict()[name]) for name, value in a.state_dict().items())
    settings = zx.config.load(second / "config.yaml").policies["frozen"]  # type: ignore[attr-defined]
    assert (settings["algorithm"], settings["init_policy"], settings["frozen"]) == ("ppo", "a", True)
    assert settings["net"]["hidden_sizes"] == [8]
    (first / "config.yaml").unlink()  # the run doesn't need its opponent's folder any more
    assert zx.evaluate(second, 2).episodes


def test_frozen_team_of_another_run_acts_for_some_of_its_agents(tmp_path: Path) -> None:
    settings = {**SHORT, "rollout_steps": 8, "minibatch_size": 8, "epochs": 1, "net__hidden_sizes": [8], "quiet": True}
    zx.train("ippo", env=GAME, out=tmp_path / "team", vector__backend="serial", **settings)
    policies, agents = {"learner": SMALL, "rival": str(tmp_path / "team")}, {"player_1": "rival", "player_2": "learner"}
    run = train(tmp_path / "run", policies=policies, agents=agents)
    obs, mask = np.random.default_rng(0).random((40, 2, 3, 3, 2), np.float32), np.ones((40, 2, 9), bool)
    rival = zx.load(tmp_path / "team").policy
    loaded = zx.load(run, policy="rival").policy
    assert all(value.equal(loaded.state_dict()[name]) for name, value in rival.state_dict().items())
    assert set(zx.load(run).act(obs, mask)[:, 0]) <= set(range(9))


def test_exploration_in_evaluations_is_a_choice(game_run: Path) -> None:
    """The greedy policy plays with the same moves in each episode; the opponent is random."""
    for stochastic in (True, False):
        summary = zx.evaluate(game_run, 4, stochastic=stochastic).summary()
        assert summary["mean_return"] == summary["learner/return"]
        assert "random/return" in summary  # of `eval_agents`


def test_learning_may_continue_from_another_run(tmp_path: Path) -> None:
    agents = {"player_1": "a", "player_2": "random"}
    first = train(tmp_path / "first", policies={"a": SMALL}, agents=agents)
    policies = {"a": {**SMALL, "init_from": str(first), "init_policy": "a"}}
    session = zx.Session(config(policies=policies, agents=agents), tmp_path / "second", quiet=True)
    expected = zx.load(first, policy="a").policy.state_dict()
    assert all(value.equal(expected[name]) for name, value in session.learner.policy.policies["a"].state_dict().items())
    session.close()


def test_scripted_policy_plays_its_agents(tmp_path: Path) -> None:
    policies = {"learner": SMALL, "script": f"{__name__}:LastAction"}
    run = train(tmp_path / "run", policies=policies, agents={"player_1": "script", "player_2": "learner"})
    agent = zx.load(run)
    mask = np.ones((2, 9), bool)
    mask[0, 5:] = False
    assert agent.act(np.zeros((2, 3, 3, 2), np.float32), mask)[0] == 4
    run = train(
        tmp_path / "object",
        policies={"learner": SMALL, "script": {"script": LastAction}},
        agents={"player_1": "script", "player_2": "learner"},
    )
    assert zx.evaluate(run, 2).episodes


# --- leagues ---


def test_results_against_snapshots_are_counted_over_rollouts() -> None:
    policies = {"learner": SMALL, "past": {"league": "learner", "every": 100, "size": 2}}
    learner = make(GAME, policies=policies, agents={"player_1": "learner", "player_2": "past"}, rotate=True)

    def batch(rewards: list[list[float]], ended: list[list[bool]]) -> Batch:
        """Rewards of player 1 [T,N]; those of player 2 are opposed. Environment 1 plays snapshot 1."""
        gains = np.array(rewards)
        snapshot = np.zeros((len(gains), 2, 1), np.float32)
        snapshot[:, 1] = 1.0
        flags = {"terminated": np.array(ended), "truncated": np.zeros_like(ended)}
        return Batch(reward=np.stack([gains, -gains], 2), decisions={"past": {"snapshot": snapshot}}, **flags)

    league = learner.leagues["past"]
    learner.update_leagues(batch([[1.0, 1.0], [0.0, 0.0]], [[False, False], [False, True]]), 50)
    assert league.games.tolist() == [0.0, 1.0]
    assert league.points.tolist() == [0.0, 0.0]  # in environment 1, the learner is player 2 and has lost
    state = learner.state_dict()
    learner.load_state_dict(state)
    learner.update_leagues(batch([[-0.5, 0.0]], [[True, True]]), 60)
    assert league.games.tolist() == [1.0, 2.0]
    assert league.points.tolist() == [1.0, 0.5]  # a win by 1 - 0.5, and a draw


def test_league_takes_snapshots_of_the_policy_at_intervals(tmp_path: Path) -> None:
    policies, agents = {"learner": SMALL, "past": LEAGUE}, {"player_1": "learner", "player_2": "past"}
    session = zx.Session(config(policies=policies, agents=agents), tmp_path / "run", quiet=True)
    league, learner = session.learner.leagues["past"], session.learner.learners["learner"]  # type: ignore[attr-defined]
    initial = [leaf.clone() for leaf in tree_leaves(learner.policy.state_dict())]
    assert all(map(torch.equal, tree_leaves(league.snapshots[0].state_dict()), initial))
    session.run()
    assert int(league.num_taken) == 4  # the initial policy, and snapshots at 100, 200 and 300 steps
    assert not all(map(torch.equal, tree_leaves(league.snapshots[0].state_dict()), initial))  # the fourth replaced it
    assert float(league.games.sum()) > 0


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_run_with_a_league_resumes_exactly(recurrent: str, tmp_path: Path) -> None:
    small = {**SMALL, "net": {"hidden_sizes": [8], "recurrent": recurrent, "recurrent_size": 4}}
    policies, agents = {"learner": small, "past": LEAGUE}, {"player_1": "learner", "player_2": "past"}
    cfg = config(policies=policies, agents=agents, rotate=True, checkpoint_every=96, seed=4)
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [StopAt(140)], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")
    assert float(checkpoint_tensors(tmp_path / "whole")[".parts.policy.policies.past.games"].sum()) > 0


def test_worker_processes_give_the_serial_run(tmp_path: Path) -> None:
    policies, agents = {"learner": SMALL, "past": LEAGUE}, {"player_1": "learner", "player_2": "past"}
    for backend in ("serial", "process"):
        train(tmp_path / backend, policies=policies, agents=agents, rotate=True, vector__backend=backend)
    assert differing_tensors(tmp_path / "serial", tmp_path / "process") == []
    assert metrics_rows(tmp_path / "serial") == metrics_rows(tmp_path / "process")


# --- after training ---


@pytest.fixture(scope="module")
def game_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    policies, agents = {"learner": SMALL, "past": LEAGUE}, {"player_1": "learner", "player_2": "past"}
    out = tmp_path_factory.mktemp("game") / "run"
    return train(out, policies=policies, agents=agents, eval_agents={"player_2": "random"}, rotate=True)


def test_metrics_have_the_names_of_policies(game_run: Path) -> None:
    columns = (game_run / "metrics.csv").read_text().splitlines()[0].split(",")
    expected = {
        "learner/policy_loss",
        "learner/return",
        "past/return",
        "win_rate",
        "eval_random/return",
        "eval_win_rate",
    }
    assert expected <= set(columns)


def test_one_policy_acts_on_the_observations_of_one_agent(game_run: Path) -> None:
    agent = zx.load(game_run, policy="learner")
    mask = np.eye(9, dtype=bool)[[3, 7]]
    assert agent.act(np.zeros((2, 3, 3, 2), np.float32), mask).tolist() == [3, 7]
    with pytest.raises(UserError, match="unknown policy 'lerner': did you mean 'learner'"):
        zx.load(game_run, policy="lerner")


def test_policy_of_a_run_with_one_policy_is_rejected() -> None:
    with pytest.raises(UserError, match="has only one policy"):
        zx.load("cartpole", policy="learner")


def test_learning_policy_plays_matches_as_both_players(game_run: Path) -> None:
    summary = zx.evaluate(game_run, 8, against="random").summary()
    assert summary["win_rate"] + summary["drawn"] + summary["lost"] == 1.0
    assert "second_won" in summary


def test_learning_policy_is_exported_as_a_network(game_run: Path, tmp_path: Path) -> None:
    zx.export(game_run, tmp_path / "exported", "torch")
    interface = json.loads((tmp_path / "exported" / "interface.json").read_text())
    assert [port["shape"] for port in interface["inputs"]] == [["N", 3, 3, 2], ["N", 9]]


def test_exported_folder_acts_as_the_run(game_run: Path, tmp_path: Path) -> None:
    zx.export(game_run, tmp_path / "exported", episodes=2)
    agents = [zx.load(run, policy="learner") for run in (game_run, tmp_path / "exported")]
    obs = np.random.default_rng(0).random((50, 3, 3, 2), np.float32)
    mask = np.ones((50, 9), bool)
    assert agents[0].act(obs, mask).tolist() == agents[1].act(obs, mask).tolist()


def test_policies_are_set_on_the_command_line(run_cli: Callable) -> None:
    words = ["train", "multi_policy", "--env", GAME, "env_steps=64", "num_envs=2", "policies.me.algorithm=ppo"]
    words += ["policies.me.rollout_steps=16", "agents.player_1=me", "agents.player_2=random", "eval_every=0"]
    assert run_cli(*words, "--out", "run")[0] == 0
    code, out, _ = run_cli("eval", "run", "--episodes", "4", "--json")
    assert code == 0
    assert json.loads(out)["me/return"] == json.loads(out)["mean_return"]
    code, _, err = run_cli(*words, "agents.player_3=random", "--out", "other")
    assert code == 2
    assert "unknown agent in agents: 'player_3'" in err

"""Loading settings: precedence, conversion of values, error messages and dumps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from zhixing import config
from zhixing.algorithms.dqn import DQNConfig
from zhixing.algorithms.ppo import PPOConfig
from zhixing.config import NetConfig, RunConfig, build, dump, load, merge, parse_overrides, parse_yaml
from zhixing.errors import UserError


def error_message(**overrides: Any) -> str:
    """Return the message of the error that invalid settings raise."""
    with pytest.raises(UserError) as error:
        load(**({"algorithm": "ppo", "env": "Acrobot-v1"} | overrides))
    return str(error.value)


# --- precedence ---


def test_later_sources_take_precedence(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("gamma: 0.5\nepochs: 3\nseed: 4\n")
    (tmp_path / "b.yaml").write_text("epochs: 7\nseed: 5\nnum_envs: 2\n")
    names = {"algorithm": "ppo", "env": "CartPole-v1"}
    preset = config.preset("ppo", "CartPole-v1")
    assert load(**names).gamma == preset["gamma"] != PPOConfig.model_fields["gamma"].default
    cfg = load(tmp_path / "a.yaml", tmp_path / "b.yaml", **names, seed=6)
    assert cfg.clip_range == PPOConfig.model_fields["clip_range"].default  # not set anywhere
    assert cfg.lr == preset["lr"]  # the preset precedes the default
    assert cfg.gamma == 0.5  # a file precedes the preset
    assert cfg.epochs == 7  # from the later file
    assert cfg.seed == 6  # an override precedes the files
    assert cfg.num_envs == 2
    assert cfg.vector.backend == "auto"  # not set anywhere, like clip_range


def test_preset_false_starts_from_the_defaults() -> None:
    cfg = load(algorithm="ppo", env="CartPole-v1", preset=False, epochs=3)
    assert cfg.gamma == PPOConfig.model_fields["gamma"].default != load(algorithm="ppo", env="CartPole-v1").gamma
    assert cfg.epochs == 3
    assert build([cfg.model_dump(mode="json")], {}) == cfg  # like a resumed run


def test_nested_override_keeps_the_rest_of_the_preset() -> None:
    cfg = load(algorithm="dqn", env="CartPole-v1", net__activation="elu")
    assert cfg.net.hidden_sizes == config.preset("dqn", "CartPole-v1")["net"]["hidden_sizes"]
    assert cfg.net.activation == "elu"


def test_files_may_name_algorithm_and_environment(tmp_path: Path) -> None:
    (tmp_path / "algorithm.yaml").write_text("algorithm: dqn\n")
    (tmp_path / "env.yaml").write_text("env: Acrobot-v1\n")
    cfg = load(tmp_path / "algorithm.yaml", tmp_path / "env.yaml")
    assert isinstance(cfg, DQNConfig)
    assert cfg.env.name == "Acrobot-v1"


def test_last_override_takes_precedence() -> None:
    assert parse_overrides(["lr=1", "num_envs=2", "lr=2", "vector.backend=serial"]) == {
        "lr": 2,
        "num_envs": 2,
        "vector": {"backend": "serial"},
    }


# --- the environment and its options ---


def test_environment_options() -> None:
    cfg = load(algorithm="ppo", env="dummy_envs:DictObsEnv", env__kind="multi")
    assert cfg.env.name == "dummy_envs:DictObsEnv"
    assert cfg.env.options == {"kind": "multi"}


def test_another_environment_drops_the_options() -> None:
    base = {"env": {"name": "A", "gravity": 3}}
    assert merge(base, {"env": "B"}) == {"env": {"name": "B"}}
    assert merge(base, {"env": {"name": "B", "wind": 1}}) == {"env": {"name": "B", "wind": 1}}
    assert merge(base, {"env": "A"}) == {"env": {"name": "A", "gravity": 3}}
    assert merge(base, {"env": {"wind": 1}}) == {"env": {"name": "A", "gravity": 3, "wind": 1}}


def test_options_set_before_the_environment_are_kept(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("env: {kind: multi}\n")
    assert load(tmp_path / "options.yaml", algorithm="ppo", env="dummy_envs:DictObsEnv").env.options == {
        "kind": "multi"
    }
    assert parse_overrides(["env.kind=multi", "env=dummy_envs:DictObsEnv"]) == {
        "env": {"name": "dummy_envs:DictObsEnv", "kind": "multi"}
    }


# --- numbers ---


@pytest.mark.parametrize(
    ("text", "value"),
    [("3e-4", 3e-4), ("1e6", 1e6), ("-2E+3", -2000.0), ("1.e2", 100.0), ("0.5", 0.5), ("7", 7), ("e4", "e4")],
)
def test_numbers_may_have_an_exponent(text: str, value: object) -> None:
    assert parse_yaml(text, "text") == value
    assert type(parse_yaml(text, "text")) is type(value)


def test_whole_floats_become_integers() -> None:
    cfg = load(algorithm="dqn", env="Acrobot-v1", **parse_overrides(["env_steps=1e6", "num_envs=2e0", "lr=3e-4"]))
    assert isinstance(cfg, DQNConfig)
    assert (cfg.env_steps, cfg.num_envs, cfg.lr) == (1_000_000, 2, 3e-4)
    assert isinstance(cfg.env_steps, int)
    assert isinstance(cfg.num_envs, int)
    assert load(algorithm="ppo", env="Acrobot-v1", num_threads=2.0).num_threads == 2


def test_none_is_converted_only_for_optional_settings() -> None:
    overrides = ["max_grad_norm=none", "stop_return=none", "net.recurrent=none", "distributed.address=none"]
    cfg = load(algorithm="ppo", env="CartPole-v1", **parse_overrides(overrides))
    assert (cfg.max_grad_norm, cfg.stop_return, cfg.distributed.address) == (None, None, None)  # type: ignore[attr-defined]
    assert cfg.net.recurrent == "none"
    with pytest.raises(UserError, match="lr='none': should be a valid number"):
        load(algorithm="ppo", env="CartPole-v1", lr="none")


def test_whole_floats_in_a_list_become_integers() -> None:
    assert load(algorithm="ppo", env="Acrobot-v1", net={"hidden_sizes": [1e2, 64]}).net.hidden_sizes == [100, 64]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("1h30m", 5400), ("1.5h", 5400), ("1d", 86400), (90, 90), (0.5, 0.5)],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert config.parse_duration(text) == seconds
    assert load(algorithm="ppo", env="Acrobot-v1", duration=text).duration == text


@pytest.mark.parametrize("text", ["soon", "10", "10 m", "m10", "1h 30m", "", "10mm", "-5s"])
def test_invalid_duration_is_rejected(text: str) -> None:
    assert f"{text!r} is not a duration; write for example 90s, 10m or 1h30m" in error_message(duration=text)


@pytest.mark.parametrize("duration", ["0s", "0h0m", 0, -3])
def test_duration_of_zero_is_rejected(duration: str | int) -> None:
    assert "duration" in error_message(duration=duration)


@pytest.mark.parametrize("value", ["256,128", "256, 128", "[256,128]", "[256, 128]"])
def test_lists_need_no_brackets(value: str) -> None:
    cfg = load(algorithm="ppo", env="Acrobot-v1", **parse_overrides([f"net.hidden_sizes={value}"]))
    assert cfg.net.hidden_sizes == [256, 128]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["PPO", "Ppo", " ppo ", "Double-DQN", "DoubleDQN", "double dqn", "QR-DQN", "TD3+BC"])
def test_algorithm_names_ignore_case_and_punctuation(name: str) -> None:
    registered = re.sub(r"[^a-z0-9]", "", name.lower())
    cfg = load(algorithm=name, env="Acrobot-v1")
    assert cfg.algorithm.replace("_", "") == registered
    assert cfg == load(algorithm=cfg.algorithm, env="Acrobot-v1")  # with the same preset


# --- error messages ---


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        ({"lrr": 1}, "unknown setting 'lrr': did you mean 'lr'"),
        (
            {"learning_rate": 1},
            "unknown setting: `learning_rate` (Stable-Baselines3, CleanRL, MindSpore RL) is `lr` here",
        ),
        ({"n_envs": 8}, "unknown setting: `n_envs` (Stable-Baselines3) is `num_envs` here"),
        ({"n_steps": 8}, "`n_steps` (Stable-Baselines3) is `rollout_steps` here"),
        ({"n_steps": 8, "algorithm": "dqn"}, "`n_steps` (Stable-Baselines3) is `replay.n_step` here"),
        ({"batch_size": 8}, "`batch_size` (Stable-Baselines3, Tianshou) is `minibatch_size` here"),
        ({"replay__buffer_size": 8, "algorithm": "dqn"}, "is `replay.capacity` here"),
        ({"clip_param": 8}, "`clip_param` (RLlib) is `clip_range` here"),
        ({"epsi_low": 8, "algorithm": "dqn"}, "`epsi_low` (MindSpore RL) is `epsilon_end` here"),
        ({"step_per_collect": 8}, "is `rollout_steps` here: counted per environment, not summed over all environments"),
        (
            {"state_space_dim": 8},
            "(MindSpore RL) is not a setting here: spaces and agents are read from the environment",
        ),
        ({"async_collect": True}, "unknown setting 'async_collect': only other algorithms have it, such as awac, c51"),
        ({"learning_starts": 5}, "unknown setting 'learning_starts': "),  # only off-policy algorithms have it
        ({"net__hiden_sizes": [3]}, "unknown setting 'net.hiden_sizes': did you mean 'net.hidden_sizes'"),
        ({"num_envs": 0}, "num_envs=0: should be greater than 0"),
        ({"net__hidden_sizes": [64, 0]}, "net.hidden_sizes.1=0: should be greater than 0"),
        ({"net__hidden_sizes": 64}, "net.hidden_sizes=64: should be a valid list, such as [64, 64]"),
        ({"vector": 3}, "vector=3: should be a valid dictionary"),
        ({"seed": "one"}, "seed='one': should be a valid integer"),
        ({"seed": True}, "seed=True: should be a valid integer"),
        ({"gamma": 1.1}, "gamma=1.1: should be less than or equal to 1"),
        ({"net__activation": "sine"}, "net.activation='sine': should be 'tanh', 'relu', 'silu', 'elu' or 'gelu'"),
        ({"stop_return": float("nan")}, "stop_return"),
        ({"gamma": float("nan")}, "gamma"),
        ({"algorithm": "pppo"}, "unknown algorithm 'pppo': did you mean 'ppo'"),
        ({"algorithm": None}, "no algorithm is given"),
        ({"env": None}, "no environment is given"),
        ({"env": {"gravity": 3}}, "no environment is given"),
    ],
)
def test_error_names_the_invalid_setting(invalid: dict[str, Any], message: str) -> None:
    assert message in error_message(**invalid)


@pytest.mark.parametrize(
    ("invalid", "expected"),
    [
        ({"num_threads": 0}, "num_threads=0: should be greater than 0"),
        ({"num_threads": "many"}, "num_threads='many': should be 'auto'"),
        ({"vector__workers": -1}, "vector.workers=-1: should be greater than 0"),
        ({"episodes": 0}, "episodes=0: should be greater than 0"),
        ({"duration": -1}, "duration=-1: should be greater than 0"),
        ({"value_clip_range": "wide"}, "value_clip_range='wide': should be a valid number"),
    ],
)
def test_error_of_a_union_names_the_setting_and_not_the_alternatives(invalid: dict[str, Any], expected: str) -> None:
    message = error_message(**invalid)
    assert expected in message
    for internal in ("constrained", "literal[", ".int", ".float", ".str", "function-"):
        assert internal not in message


def test_all_invalid_settings_are_reported_together() -> None:
    message = error_message(lrr=1, seed=-1, clip_range=0)
    assert len(message.split("\n")) == 3
    assert "'lrr'" in message
    assert "seed=-1" in message
    assert "clip_range=0" in message


@pytest.mark.parametrize("argument", ["lr", "=3", "--lr=3", "lr 3"])
def test_argument_that_is_not_a_setting_is_rejected(argument: str) -> None:
    with pytest.raises(UserError, match="is not a setting; write name=value"):
        parse_overrides([argument])


@pytest.mark.parametrize("content", ["- a\n- b\n", "", "3", "1: 2\n"])
def test_file_without_settings_is_rejected(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(UserError, match=r"a.yaml must contain settings, one `name: value` per line"):
        load(tmp_path / "a.yaml")


def test_unreadable_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match=r"a.yaml can't be read"):
        load(tmp_path / "a.yaml")
    with pytest.raises(UserError, match="can't be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    "text", ["!!bool maybe", "!!int ''", "!!float ''", "!!timestamp soon", "!!python/object:os.system x", "2001-99-99"]
)
def test_values_that_crash_the_yaml_parser_are_rejected(text: str) -> None:
    with pytest.raises(UserError, match="not valid YAML"):
        parse_yaml(text, "the value")


# --- arbitrary text ---

KEYS = [*PPOConfig.model_fields, *DQNConfig.model_fields, "nonsense"]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["auto", "10m", "1e3"])
)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=6), v, max_size=3))


@given(
    st.one_of(
        st.text(max_size=60),
        st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5).map(yaml.safe_dump),
        st.dictionaries(SCALARS, VALUES, max_size=3).map(lambda values: yaml.safe_dump({"vector": values})),
    )
)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("vector: {1: 2}")
@example("net: {hidden_sizes: {a: 1}}")
@example("env: {name: A, options: 3}")
@example("vector: &v {workers: *v}")
@example("duration: 0s")
def test_any_text_is_a_configuration_or_a_user_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "any.yaml"
    file.write_text(text, encoding="utf-8", errors="replace")
    for algorithm in ("ppo", "dqn"):
        try:
            cfg = load(file, algorithm=algorithm, env="Acrobot-v1")
        except UserError:
            continue
        assert isinstance(cfg, RunConfig)
        assert cfg.env.name == "Acrobot-v1"


# --- dump ---


@pytest.mark.parametrize(
    "overrides",
    [
        {"algorithm": "ppo", "env": "CartPole-v1"},
        {
            "algorithm": "ppo",
            "env": "dummy_envs:DictObsEnv",
            "env__kind": "multi",
            "duration": "1h30m",
            "stop_return": -3.5,
        },
        {"algorithm": "dqn", "env": "Acrobot-v1", "replay__capacity": 1e5, "lr": 1e-7, "init_from": "行/1"},
    ],
)
def test_dump_and_load_round_trip(overrides: dict[str, Any], tmp_path: Path) -> None:
    cfg = load(**overrides)
    file = tmp_path / "config.yaml"
    file.write_text(dump(cfg), encoding="utf-8")
    assert load(file) == cfg
    assert dump(load(file)) == dump(cfg)


def test_dump_has_all_settings() -> None:
    """It reproduces the run even if presets and defaults change."""
    cfg = load(algorithm="ppo", env="CartPole-v1")
    values = yaml.safe_load(dump(cfg))
    assert list(values) == list(PPOConfig.model_fields)
    assert values["net"].keys() == NetConfig.model_fields.keys()


def test_presets_are_found_by_pattern() -> None:
    assert config.preset("ppo", "NoSuchEnv-v0") == {}
    assert config.presets("my.module:Learner") == {}  # custom learners have no presets
    assert config.presets("../ppo") == {}
    assert "CartPole-v*" in config.presets("ppo")


def test_build_does_not_modify_the_preset() -> None:
    before = config.preset("ppo", "CartPole-v1")
    build([{"algorithm": "ppo", "env": "CartPole-v1"}], {"num_envs": 2, "minibatch_size": 64})
    assert config.preset("ppo", "CartPole-v1") == before


def test_complete_settings_get_no_values_of_a_preset() -> None:
    """The preset of a run may change after the run; its options must not reach the run's environment."""
    options = {"name": "mario/1-1", "shaping": "none"}
    assert "size" in config.build([{"algorithm": "ppo", "env": options}], {}).env.options
    cfg = config.rebuild({"algorithm": "ppo", "env": options}, {"lr": 0.5})
    assert cfg.env.options == {"shaping": "none"}
    assert (cfg.lr, cfg.preset, cfg.net.hidden_sizes) == (0.5, True, config.NetConfig().hidden_sizes)

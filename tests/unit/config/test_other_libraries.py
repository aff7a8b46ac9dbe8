"""Settings of other libraries and their equivalents."""

from __future__ import annotations

import pytest
from typer.main import get_command

from zhixing import algorithms, config
from zhixing.cli import app
from zhixing.config.other_libraries import (
    CLEANRL,
    LIBRARIES,
    LIBRARY_SETTINGS,
    MINDRL,
    OTHER_VALUE,
    RLLIB,
    SAME_VALUE,
    SB3,
    TIANSHOU,
)
from zhixing.errors import UserError

MODELS = {name: algorithms.get(name).settings for name in algorithms.names()}

# the settings that scripts of each library set most often: constructor arguments, options and configuration keys
MAIN_NAMES = {
    SB3: "learning_rate n_steps batch_size n_epochs gamma gae_lambda clip_range clip_range_vf ent_coef vf_coef "
    "max_grad_norm target_kl buffer_size learning_starts tau train_freq gradient_steps target_update_interval "
    "exploration_fraction exploration_initial_eps exploration_final_eps action_noise policy_delay "
    "target_policy_noise target_noise_clip policy_kwargs net_arch activation_fn total_timesteps n_envs seed device "
    "verbose tensorboard_log use_sde n_eval_episodes eval_freq save_freq norm_obs norm_reward",
    CLEANRL: "exp_name seed torch_deterministic cuda track wandb_project_name capture_video save_model env_id "
    "total_timesteps learning_rate num_envs num_steps anneal_lr gamma gae_lambda num_minibatches update_epochs "
    "norm_adv clip_coef clip_vloss ent_coef vf_coef max_grad_norm target_kl buffer_size target_network_frequency "
    "batch_size start_e end_e exploration_fraction learning_starts train_frequency n_atoms v_min v_max policy_lr "
    "q_lr policy_frequency policy_noise noise_clip exploration_noise tau alpha autotune",
    TIANSHOU: "task seed buffer_size lr actor_lr critic_lr gamma epoch epoch_num_steps step_per_epoch "
    "step_per_collect collection_step_num_env_steps repeat_per_collect update_step_num_repetitions update_per_step "
    "batch_size hidden_sizes training_num num_training_envs test_num num_test_envs logdir device eps_train eps_test "
    "eps_train_final n_step target_update_freq prioritized_replay start_timesteps auto_alpha alpha_lr tau "
    "exploration_noise policy_noise noise_clip update_actor_freq vf_coef ent_coef eps_clip max_grad_norm gae_lambda "
    "norm_adv advantage_normalization return_scaling value_clip dual_clip recompute_adv lr_decay num_atoms "
    "num_quantiles reward_threshold render watch resume_path",
    RLLIB: "lr gamma train_batch_size train_batch_size_per_learner minibatch_size num_epochs num_sgd_iter "
    "sgd_minibatch_size clip_param vf_clip_param vf_loss_coeff entropy_coeff lambda_ kl_coeff kl_target grad_clip "
    "num_env_runners num_envs_per_env_runner rollout_fragment_length num_learners num_gpus framework model "
    "fcnet_hiddens fcnet_activation use_lstm lstm_cell_size evaluation_interval evaluation_duration env_config "
    "target_network_update_freq replay_buffer_config num_steps_sampled_before_learning_starts double_q dueling noisy "
    "num_atoms n_step training_intensity tau twin_q initial_alpha target_entropy",
    MINDRL: "gamma lr actor_lr critic_lr epsi_high epsi_low decay state_space_dim action_space_dim hidden_size "
    "hidden_sizes capacity sample_size batch_size num_evaluate_episode num_eval_episode eval_per_episode ckpt_path "
    "save_per_episode update_factor update_interval epsilon critic_coef iter_times sigma_init_std collect_env_num "
    "init_collect_size compute_type target_entropy train_alpha_net atoms_num",
}


def cli_options() -> set[str]:
    train = get_command(app).commands["train"]  # type: ignore[attr-defined]
    return {option for parameter in train.params for option in parameter.opts}


@pytest.mark.parametrize("name", LIBRARY_SETTINGS)
def test_every_equivalent_exists(name: str) -> None:
    setting = LIBRARY_SETTINGS[name]
    assert set(setting.libraries) <= set(LIBRARIES)
    assert setting.equivalents or setting.difference
    for equivalent in setting.equivalents:
        known = equivalent in cli_options() or any(config.has_setting(model, equivalent) for model in MODELS.values())
        assert known, equivalent


def test_every_name_is_listed_once_per_library() -> None:
    rows = [*((here, names) for here, names in SAME_VALUE), *((here, names) for here, _, names in OTHER_VALUE)]
    listed = [(name, lib) for _, names in rows for lib, texts in names.items() for name in texts.split()]
    assert len(listed) == len(set(listed))
    equivalents: dict[str, set[str]] = {}
    for here, names in rows:
        for text in names.values():
            for name in text.split():
                equivalents.setdefault(name, set()).add(here)
    assert [name for name, targets in equivalents.items() if len(targets) > 1] == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_main_settings_of_each_library_are_known(library: str) -> None:
    settings = {name for model in MODELS.values() for name in model.model_fields}
    unknown = [
        name
        for name in MAIN_NAMES[library].split()
        if name not in settings and library not in LIBRARY_SETTINGS.get(name, LIBRARY_SETTINGS["n_envs"]).libraries
    ]
    assert unknown == []


@pytest.mark.parametrize("name", sorted(LIBRARY_SETTINGS))
def test_error_names_library_and_equivalent(name: str) -> None:
    """Checks the first algorithm that has the equivalent but no setting of the same name as the library."""
    setting = LIBRARY_SETTINGS[name]
    for algorithm, model in MODELS.items():
        targets = [e for e in setting.equivalents if e.startswith("-") or config.has_setting(model, e)]
        if name in model.model_fields or (setting.equivalents and not targets):
            continue
        with pytest.raises(UserError) as error:
            model(**{"algorithm": algorithm, "env": "CartPole-v1", name: 1})
        assert setting.libraries[0] in str(error.value)
        assert not targets or f"is `{targets[0]}` here" in str(error.value)
        return
    pytest.fail(f"{name} is never reported")

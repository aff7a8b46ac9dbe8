"""Names of hooks, here and in other libraries, to reject misspelled ones."""

from __future__ import annotations

import difflib
import re

from zhixing.errors import UserError

HOOKS = {
    "train_begin": "before the first iteration",
    "iteration_begin": "before collecting and updating",
    "iteration_end": "after collecting and updating",
    "episode_end": "after each training episode",
    "evaluation_step": "after each step of an evaluation",
    "evaluation_end": "after each evaluation",
    "metric_logged": "after each loop.log",
    "video_recorded": "after each recorded episode",
    "train_end": "at the end of training",
}
# hooks of Stable-Baselines3, Lightning, Keras, Tianshou, RLlib and MindSpore RL without their prefix `on_` or `_on_`
OTHER_LIBRARIES = {
    "training_start": "train_begin",
    "train_start": "train_begin",
    "fit_start": "train_begin",
    "begin": "train_begin",
    "rollout_start": "iteration_begin",
    "epoch_begin": "iteration_begin",
    "epoch_start": "iteration_begin",
    "train_epoch_start": "iteration_begin",
    "train_batch_start": "iteration_begin",
    "batch_begin": "iteration_begin",
    "episode_begin": "iteration_begin",
    "episode_start": "iteration_begin",
    "step": "iteration_end",
    "rollout_end": "iteration_end",
    "sample_end": "iteration_end",
    "learn_on_batch": "iteration_end",
    "train_result": "iteration_end",
    "epoch_end": "iteration_end",
    "batch_end": "iteration_end",
    "train_epoch_end": "iteration_end",
    "train_batch_end": "iteration_end",
    "train_fn": "iteration_begin",
    "test_fn": "evaluation_end",
    "stop_fn": "evaluation_end",
    "save_best_fn": "evaluation_end",
    "evaluate_start": "evaluation_end",
    "evaluate_end": "evaluation_end",
    "eval_end": "evaluation_end",
    "validation_start": "evaluation_end",
    "validation_end": "evaluation_end",
    "validation_epoch_end": "evaluation_end",
    "test_end": "evaluation_end",
    "training_end": "train_end",
    "fit_end": "train_end",
    "end": "train_end",
}
_EVENT_NAME = re.compile(
    r"(train|training|iteration|episode|evaluation|eval|rollout|epoch|step|batch|update|test|validation|fit)"
    r"_?(begin|begins|began|start|starts|started|end|ends|ended|finish|finished|done)"
)


def check_hooks(cls: type) -> None:
    """Raise `UserError` for a method that looks like a hook but would never be called."""
    for name, value in vars(cls).items():
        if not callable(value) or name in HOOKS or name.startswith("__"):
            continue
        hook = closest_hook(name)
        if hook is not None:
            raise UserError(
                f"{cls.__name__}.{name} would never be called: callbacks have no such hook. Did you mean {hook} "
                f"({HOOKS[hook]})? Hooks are {', '.join(HOOKS)}; give a helper method a different name"
            )


def closest_hook(name: str) -> str | None:
    """Return the hook that a name resembles, or None."""
    prefixed = re.fullmatch(r"_?on_(\w+)", name)
    bare = prefixed[1] if prefixed else name
    if bare in HOOKS:
        return bare
    if bare in OTHER_LIBRARIES and (prefixed or bare != "step"):
        return OTHER_LIBRARIES[bare]
    if bare.startswith("_"):
        return None
    cutoff = 0.5 if _EVENT_NAME.fullmatch(bare) else 0.8 if prefixed else 0.9
    return next(iter(difflib.get_close_matches(bare, HOOKS, n=1, cutoff=cutoff)), None)

"""Define how failures of environments are handled, and build the errors that report them."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zhixing.envs.api import MisbehaviorError, describe_api_error
from zhixing.errors import EnvCrashError

INTERRUPTED = "interrupted by a crash"  # key in `final_info` of an episode that a crash cut short
MAX_CONSECUTIVE_FAILURES = 10  # without a completed episode in between; after that, replacing doesn't help
ON_CRASH = ("stop", "replace")
DEFAULT_CALL_TIMEOUT = 120.0  # seconds; some game simulators take a minute to start


@dataclass(frozen=True)
class FailurePolicy:
    """How to handle an environment that raises, returns invalid values, hangs or dies.

    Timeouts are in seconds and need worker processes: only a process can be killed.
    """

    on_crash: str = "stop"  # or `replace`: a new environment starts a new episode
    step_timeout: float | None = None
    folder: Path | None = None  # where to write crash reports
    call_timeout: float | None = None  # for all calls other than `step`, such as constructors and resets

    @staticmethod
    def from_settings(vector: Any, folder: Path | None) -> FailurePolicy:
        """Return the policy that the settings `vector` of a run describe."""
        return FailurePolicy(vector.on_crash, vector.step_timeout, folder, vector.call_timeout)

    @property
    def replace(self) -> bool:
        return self.on_crash == "replace"

    @property
    def has_timeout(self) -> bool:
        return self.step_timeout is not None or self.call_timeout is not None

    @property
    def needs_processes(self) -> bool:
        """Whether the policy works fully only with environments in worker processes."""
        return self.replace or self.has_timeout

    @property
    def effective_call_timeout(self) -> float | None:
        """Timeout of calls other than `step`. If only steps have a timeout, calls get a generous one."""
        if self.call_timeout is not None or self.step_timeout is None:
            return self.call_timeout
        return max(DEFAULT_CALL_TIMEOUT, 10.0 * self.step_timeout)


def make_crash_error(
    name: str, index: int, when: str, error: Exception, episode: Mapping[str, Any] | None
) -> EnvCrashError:
    """Return the error for a failed environment. `episode` holds what a crash report needs to reproduce it."""
    text = traceback.format_exc()
    problem = str(error) if isinstance(error, MisbehaviorError) else describe_api_error(error)
    if problem is not None:
        crash = EnvCrashError(f"environment {name} (index {index}) misbehaved at {when}: {problem}")
    else:
        crash = EnvCrashError(f"environment {name} (index {index}) crashed at {when}:\n{text}")
    if episode is not None:
        failure = {"type": type(error).__name__, "message": str(error), "traceback": text}
        crash.report = {"index": index, **episode, "error": failure}
    return crash


def save_crash_report(crash: EnvCrashError, failure_policy: FailurePolicy, **fields: Any) -> None:
    """Write the crash report, if the policy has a folder, and append its location to the error message.

    If writing fails, the message contains the reason. The crash itself is never hidden.
    """
    if failure_policy.folder is None or crash.report is None:
        return
    from zhixing.envs.crash.crash_report import write  # a late import, so worker processes start faster

    timeouts = {"step_timeout": failure_policy.step_timeout, "call_timeout": failure_policy.call_timeout}
    try:
        message = write(failure_policy.folder, {**fields, **timeouts, **crash.report})
    except OSError as error:
        message = f"the crash report can't be written to {failure_policy.folder}: {error.strerror or error}"
    crash.report = None  # write it only once
    crash.args = (f"{str(crash).rstrip()}\n{message}",)

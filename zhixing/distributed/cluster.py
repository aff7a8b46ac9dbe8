"""Where ray is imported and started: on this machine alone, or as a guest of a cluster that runs already."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from zhixing.errors import UserError
from zhixing.utils.extras import require_extra
from zhixing.utils.importing import check_allowed

LOOPBACK = "127.0.0.1"
MAX_FOLDER = 20  # bytes: the name of a socket has at most 107, of which Ray takes 80 and we a few
KNOCK_SECONDS = 5.0  # that a cluster has to answer
STORE_BYTES = 256 << 20  # of memory for what is on its way between processes of this machine


class Cluster:
    """A connection to Ray. What it started itself ends with `close`; a Ray that was there already stays."""

    def __init__(self, address: str | None = None) -> None:
        self.ray = imported()
        self.started = not self.ray.is_initialized()
        self._folder: str | None = None
        self._before: dict[str, str | None] = {}  # variables of the environment
        if not self.started:  # somebody's session in this process, or this is a job on a cluster
            return
        if address is None:
            self._start()
        else:
            check_allowed(address)
            try:
                _knock(address)
                with _this_machine_only() if address.startswith((f"{LOOPBACK}:", "localhost:")) else nullcontext():
                    self.ray.init(address=address, logging_level="ERROR", log_to_driver=False)
            except Exception as error:  # Ray has many words for it
                reason = str(error).strip().split("\n")[0]
                raise UserError(
                    f"no Ray cluster answers at distributed.address={address!r}: {reason} (start one with "
                    f"`ray start --head`, or leave the address out to start one on this machine)"
                ) from None

    def _start(self) -> None:
        """Start Ray for this user alone: in a private folder, with a token, on loopback, without a dashboard."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Ray makes the folder that it is given writable for everybody, but nobody else gets through this one to it
        self._folder = tempfile.mkdtemp(prefix="zhixing-", dir=_short_folder())
        self._before = _set_token({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
        try:
            with _this_machine_only():
                self.ray.init(
                    address="local",
                    _node_ip_address=LOOPBACK,
                    include_dashboard=False,
                    logging_level="ERROR",
                    log_to_driver=False,
                    object_store_memory=STORE_BYTES,
                    _temp_dir=os.path.join(self._folder, "ray"),
                )
            where = self.ray.util.get_node_ip_address()
            if where != LOOPBACK:
                raise RuntimeError(f"Ray listens on {where}, beyond this machine; set distributed.address to want that")
        except BaseException:
            self.close()
            raise

    @property
    def own(self) -> bool:
        """Whether it is ours alone, on this machine: then workers needn't ask for free CPUs."""
        return self.ray.util.get_node_ip_address() == LOOPBACK

    def cpus(self, wanted: int) -> int:
        """How many CPUs each of so many workers asks for. A cluster too small is told at once: Ray would just wait."""
        if self.own:
            return 0
        there = int(self.ray.cluster_resources().get("CPU", 0))
        if wanted > there:
            raise UserError(f"{wanted} workers are more than the {there} CPUs of the Ray cluster; ask for fewer")
        return 1

    def close(self) -> None:
        if self.started and self.ray.is_initialized():
            self.ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            _set_token(self._before)
            self._folder = None


def _short_folder() -> str:
    """Return where temporary files go, unless Ray's sockets would have too long names there."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= MAX_FOLDER else "/tmp"


def _set_token(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set environment variables for this process and those that Ray starts; returns what they were. Without a token in
    the environment Ray would write one into the user's home."""
    from ray._raylet import AuthenticationTokenLoader, Config

    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    Config.initialize("")  # which read the environment when Ray was imported
    AuthenticationTokenLoader.instance().reset_cache()
    return before


@contextmanager
def _this_machine_only() -> Iterator[None]:
    """Ray takes 127.0.0.1 for the address that others reach this machine by, unless it knows that there are none."""
    from ray._private import ray_constants

    others, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = others


def _knock(address: str) -> None:
    """Raise at once if nobody is there: Ray would go on trying for minutes."""
    if address == "auto":  # Ray knows whether it runs on this machine
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ValueError("an address is auto or host:port, such as 10.0.0.1:6379")
    socket.create_connection((host, int(port)), KNOCK_SECONDS).close()


def imported() -> Any:
    with require_extra("a worker on Ray", "ray"):
        import ray
    return ray

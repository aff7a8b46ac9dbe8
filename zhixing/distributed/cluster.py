"""The connection to Ray: to an instance started on this machine, or to a running cluster."""

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
# bytes of the temporary folder's path: the path of a Unix socket has at most 107 bytes, of which Ray uses about 80
MAX_FOLDER = 20
CONNECT_TIMEOUT = 5.0  # seconds
OBJECT_STORE_BYTES = 256 << 20  # shared memory for objects in transit between processes of this machine


class Cluster:
    """A connection to Ray. `close` shuts down Ray or disconnects from it, unless Ray was initialized before."""

    def __init__(self, address: str | None = None) -> None:
        """Start Ray on this machine, or connect to the cluster at `address`: `host:port`, or `auto`."""
        self.ray = import_ray()
        self._folder: str | None = None
        self._saved_env: dict[str, str | None] = {}  # environment variables before `_start`
        # Ray is initialized already if the user called `ray.init`, or in a job on a cluster
        self._initialized_here = not self.ray.is_initialized()
        if not self._initialized_here:
            return
        if address is None:
            self._start()
        else:
            check_allowed(address)
            try:
                _check_reachable(address)
                with _loopback_only() if address.startswith((f"{LOOPBACK}:", "localhost:")) else nullcontext():
                    self.ray.init(address=address, logging_level="ERROR", log_to_driver=False)
            except Exception as error:  # Ray raises many types here
                reason = str(error).strip().split("\n")[0]
                raise UserError(
                    f"no Ray cluster answers at distributed.address={address!r}: {reason} (start one with "
                    f"`ray start --head`, or leave the address out to start one on this machine)"
                ) from None

    def _start(self) -> None:
        """Start Ray for this user only: in a private folder, with a token, on loopback, without a dashboard."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Ray makes its folder writable for all users, but only this user can enter the folder around it
        self._folder = tempfile.mkdtemp(prefix="zhixing-", dir=_short_temp_folder())
        self._saved_env = _set_token({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
        try:
            with _loopback_only():
                self.ray.init(
                    address="local",
                    _node_ip_address=LOOPBACK,
                    include_dashboard=False,
                    logging_level="ERROR",
                    log_to_driver=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=os.path.join(self._folder, "ray"),
                )
            address = self.ray.util.get_node_ip_address()
            if address != LOOPBACK:
                raise RuntimeError(
                    f"Ray listens on {address}, which other machines can reach; set distributed.address to allow that"
                )
        except BaseException:
            self.close()
            raise

    @property
    def is_local(self) -> bool:
        """Whether Ray runs on this machine only."""
        return self.ray.util.get_node_ip_address() == LOOPBACK

    def cpus_per_worker(self, num_workers: int) -> int:
        """Return how many CPUs each of `num_workers` workers reserves: none on this machine, one on a cluster.

        Raises `UserError` if the cluster has too few CPUs: Ray would wait for more without an error.
        """
        if self.is_local:
            return 0
        num_cpus = int(self.ray.cluster_resources().get("CPU", 0))
        if num_workers > num_cpus:
            raise UserError(f"the Ray cluster has {num_cpus} CPUs, too few for {num_workers} workers; use fewer")
        return 1

    def close(self) -> None:
        if self._initialized_here and self.ray.is_initialized():
            self.ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            _set_token(self._saved_env)
            self._folder = None


def _short_temp_folder() -> str:
    """Return the folder for temporary files, or /tmp if its path is too long for Ray's sockets."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= MAX_FOLDER else "/tmp"


def _set_token(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set environment variables for this process and those that Ray starts. Return their previous values.

    Without a token in the environment, Ray would write one into the user's home.
    """
    from ray._raylet import AuthenticationTokenLoader, Config

    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    Config.initialize("")  # Ray read the environment when it was imported
    AuthenticationTokenLoader.instance().reset_cache()
    return before


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Let Ray use 127.0.0.1. Otherwise it replaces loopback by an address that other machines can reach."""
    from ray._private import ray_constants

    enabled, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled


def _check_reachable(address: str) -> None:
    """Raise an error if nothing listens at the address: Ray would retry for minutes."""
    if address == "auto":  # Ray looks for a cluster on this machine
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ValueError("an address is auto or host:port, such as 10.0.0.1:6379")
    socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()


def import_ray() -> Any:
    with require_extra("a worker on Ray", "ray"):
        import ray
    return ray

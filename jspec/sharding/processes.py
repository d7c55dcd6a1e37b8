"""Several processes of one run, each with devices of its own: how they find each other."""

import functools
import pickle
import secrets
import socket
import threading
from multiprocessing import connection as connections
from multiprocessing.connection import Connection

import jax
import numpy as np
from jax.experimental import multihost_utils

from jspec.sharding.channel import Channel

_KEY_BYTES, _ADDRESS_BYTES = 32, 256
_SECONDS = 60  # longest wait for another process to connect


def start(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Join the processes of a run; call it before JAX touches a device.

    Args:
      coordinator: host:port of process 0; "auto" on a TPU pod or under Slurm; None or "" for one
        process.
      num_processes: of the run.
      process_id: number of this process, from 0 on.
    """
    if coordinator == "auto":
        jax.distributed.initialize()
    elif coordinator:
        jax.distributed.initialize(coordinator, num_processes, process_id)


@functools.cache
def connect(host: str | None) -> Channel:
    """Connect the processes of ``jax.distributed``; again, it is the same channel.

    ``host`` is the address of the first one; None for that in its network.

    Raises:
      ValueError: the processes have different numbers of devices, or one does not connect.
    """
    counts = [0] * jax.process_count()
    for device in jax.devices():
        counts[device.process_index] += 1
    if len(set(counts)) > 1:
        raise ValueError(
            f"the processes have {', '.join(map(str, counts))} devices; start each with as many."
        )
    index, count = jax.process_index(), jax.process_count()
    if index:
        key, address = _shared(None)
        peer = connections.Client(address, authkey=key)
        _keep_alive(peer)
        peer.send_bytes(pickle.dumps(index))
        return Channel(index, count, {0: peer})
    key = secrets.token_bytes(_KEY_BYTES)
    with connections.Listener(("0.0.0.0", 0), backlog=count, authkey=key) as listener:
        _shared((key, (host or _own_address(), listener.address[1])))
        peers: dict[int, Connection] = {}
        accepting = threading.Thread(target=_accept, args=(listener, peers, count - 1))
        accepting.daemon = True
        accepting.start()
        accepting.join(_SECONDS)
    missing = sorted({*range(1, count)} - peers.keys())
    if missing:
        raise ValueError(
            f"process {missing[0]} did not connect to process 0 at {host or _own_address()} within "
            f"{_SECONDS} seconds; let its network reach all ports of this host."
        )
    return Channel(0, count, peers)


def _accept(listener: connections.Listener, peers: dict[int, Connection], count: int) -> None:
    """Accept the connections of the other processes; others than these have no key."""
    while len(peers) < count:
        try:
            peer = listener.accept()
        except (connections.AuthenticationError, EOFError, ConnectionError):
            continue
        except OSError:
            return  # closed: it took too long
        _keep_alive(peer)
        peers[pickle.loads(peer.recv_bytes())] = peer


def _shared(secret: tuple[bytes, tuple[str, int]] | None) -> tuple[bytes, tuple[str, int]]:
    """Return the key and the address of the first process, which alone gives them."""
    packed = np.zeros(_KEY_BYTES + 2 + _ADDRESS_BYTES, np.uint8)
    if secret is not None:
        key, (host, port) = secret
        data = key + port.to_bytes(2, "big") + host.encode()
        packed[: len(data)] = np.frombuffer(data, np.uint8)
    data = np.asarray(multihost_utils.broadcast_one_to_all(packed)).tobytes()
    key, port, host = data[:_KEY_BYTES], data[_KEY_BYTES:][:2], data[_KEY_BYTES + 2 :]
    return key, (host.rstrip(b"\0").decode(), int.from_bytes(port, "big"))


def _own_address() -> str:
    """Return the address of this host in its network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # for documentation (RFC 5737); nothing is sent
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def _keep_alive(peer: Connection) -> None:
    """Have a connection end within some 20 seconds if the other host is gone without a word."""
    with socket.fromfd(peer.fileno(), socket.AF_INET, socket.SOCK_STREAM) as copy:
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in (("KEEPIDLE", 5), ("KEEPINTVL", 5), ("KEEPCNT", 3)):
            if hasattr(socket, f"TCP_{name}"):
                copy.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)

"""The address of this controller among those named in `[api] controller`."""

from __future__ import annotations

import socket

from slurm_elastic.config.schema import Config, ConfigError
from slurm_elastic.rpc import frames


def own_address(config: Config) -> str:
    """Return the address of this daemon among several; "" where only one is named.

    The address names this host, or resolves to an address of it, and has the port of `listen`.

    Raises:
        ConfigError: none of them does, or more than one.
    """
    named = config.api.addresses
    if len(named) == 1:
        return ""
    port = frames.parse_address(config.api.listen)[1]
    on_port = [a for a in named if _port(a) == port]
    names = {socket.gethostname(), socket.gethostname().partition(".")[0], socket.getfqdn()}
    own = [a for a in on_port if frames.parse_address(a)[0] in names]
    own = own or [a for a in on_port if _is_here(frames.parse_address(a)[0])]
    if len(own) != 1:
        count = "more than one" if own else "none"
        raise ConfigError(
            f"[api] controller = {config.api.controller!r}: {count} of these is this daemon, at "
            f"{socket.gethostname()} with port {port} of listen; name the host that each runs on"
        )
    return own[0]


def _port(address: str) -> int:
    try:
        return frames.parse_address(address)[1]
    except frames.ChannelError as error:
        raise ConfigError(f"[api] controller: {error}") from None


def _is_here(host: str) -> bool:
    """Return whether a name resolves to an address that can be bound on this host."""
    try:
        candidates = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in candidates:
        with socket.socket(family, kind) as sock:
            try:
                sock.bind(address)
            except OSError:
                continue
            return True
    return False

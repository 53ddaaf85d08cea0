"""The socket that a service's processes share: opened with its address, closed when nobody stands in line."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import select
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress

from longtail.serving.errors import AddressTakenError
from longtail.serving.settings import Settings

BACKLOG = 2048
"""Connections that the system makes before a process has taken them."""
_HANDSHAKE_SECONDS = 0.2
"""What a client that has begun to connect has left for its part of the handshake."""
_LOOK_SECONDS = 0.02
_SO_ATTACH_FILTER = 26
_NO_NEW_CONNECTIONS = struct.pack(
    "=" + 5 * "HBBI",
    *(0x30, 0, 0, 13),  # the flags of a TCP segment,
    *(0x54, 0, 0, 0x12),  # SYN and ACK of them:
    *(0x15, 0, 1, 0x02),  # is it SYN alone?
    *(0x06, 0, 0, 0),  # then drop it,
    *(0x06, 0, 0, 0xFFFFFFFF),  # else keep all of it.
)
"""A program for the kernel's classic BPF."""


def listen(settings: Settings) -> socket.socket:
    """The socket of the settings' address; workers share it.

    Raises:
        AddressTakenError: another process listens there, or it is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise AddressTakenError(
            f"expected a free address, found {settings.host} port {settings.port}: {error.strerror}"
        ) from None
    listener.listen(BACKLOG)
    listener.set_inheritable(True)
    logging.getLogger(__name__).info("listening on http://%s:%d", settings.host, listener.getsockname()[1])
    return listener


async def stop_listening(listener: socket.socket, hurry: Callable[[], bool]) -> None:
    """Wait, while the event loop takes connections, until none is left in line; then nobody loses one by its closing.

    A connection that the kernel has made and no process has taken is reset when the last process closes the socket.
    On Linux no new one gets in line meanwhile: what a client begins with is dropped, it tries again a second later,
    and is refused then, or let in by a service that has started since. Elsewhere the line is looked at, no more.

    Args:
        listener: of `listen`. All processes that have it stop at the same time; each does this.
        hurry: whether to wait no longer.
    """
    _turn_away(listener)
    await asyncio.sleep(_HANDSHAKE_SECONDS)
    poll = select.poll()
    poll.register(listener.fileno(), select.POLLIN)
    while poll.poll(0) and not hurry():
        await asyncio.sleep(_LOOK_SECONDS)


def _turn_away(listener: socket.socket) -> None:
    if sys.platform == "linux":
        program = ctypes.create_string_buffer(_NO_NEW_CONNECTIONS, len(_NO_NEW_CONNECTIONS))
        # A sandbox may not know of it.
        with suppress(OSError):
            listener.setsockopt(
                socket.SOL_SOCKET,
                _SO_ATTACH_FILTER,
                struct.pack("HL", len(_NO_NEW_CONNECTIONS) // 8, ctypes.addressof(program)),
            )

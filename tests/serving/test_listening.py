"""A socket that is about to be closed lets nobody in any more, and nobody in line is forgotten."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from longtail.serving import Settings
from longtail.serving.process.listening import listen, stop_listening

LOOPBACK = ["127.0.0.1", *(["::1"] if socket.has_ipv6 else [])]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a socket cannot turn anybody away")
@pytest.mark.parametrize("host", LOOPBACK)
def test_who_stands_in_line_is_let_in_and_nobody_gets_in_line(tmp_path: Path, host: str) -> None:
    with listen(Settings(releases=tmp_path, host=host, port=0)) as listener:
        address = listener.getsockname()[:2]
        with socket.create_connection(address, timeout=5) as early:
            early.sendall(b"written before anybody took the connection")

            async def take_late() -> bytes:
                stopping = asyncio.create_task(stop_listening(listener, lambda: False))
                await asyncio.sleep(0.5)
                assert not stopping.done()
                with pytest.raises(TimeoutError):
                    socket.create_connection(address, timeout=0.2)
                taken, _ = listener.accept()
                with taken:
                    await asyncio.wait_for(stopping, 5)
                    listener.close()
                    return taken.recv(1000)

            assert asyncio.run(take_late()) == b"written before anybody took the connection"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)


def test_who_is_in_a_hurry_waits_for_nobody(tmp_path: Path) -> None:
    with (
        listen(Settings(releases=tmp_path, port=0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=5),
    ):
        asyncio.run(stop_listening(listener, lambda: True))

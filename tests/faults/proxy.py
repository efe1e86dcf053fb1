"""A bad network between client and server: an asyncio proxy that delays, cuts, resets or half-closes."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: closing sends RST


@dataclass
class Weather:
    """What happens to a connection: pauses of `delay_s`, `piece` bytes at a time, an end after `until` bytes.

    `end`: "reset", "close", "half" (the server's side stays open and silent), "" for none. The first `good`
    connections have none of it.
    """

    delay_s: float = 0.0
    piece: int = 1 << 16
    until: int = 1 << 60
    end: str = ""
    good: int = 0


class Proxy:
    """The running proxy: its address and how many connections it saw."""

    def __init__(self, port: int, weather: Weather) -> None:
        """To the server at `port` of this machine."""
        self.port, self.weather, self.seen = port, weather, 0
        self.loop = asyncio.new_event_loop()
        self.server = self.loop.run_until_complete(asyncio.start_server(self.meet, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, both ways."""
        self.seen += 1
        weather = self.weather if self.seen > self.weather.good else Weather()
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        forth = asyncio.ensure_future(self.carry(reader, back, Weather()))
        await self.carry(there, writer, weather)
        forth.cancel()
        back.close()

    async def carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, weather: Weather) -> None:
        """Bytes from one side to the other, as the weather lets them."""
        sent = 0
        try:
            while data := await source.read(weather.piece):
                await asyncio.sleep(weather.delay_s)
                data = data[: max(0, weather.until - sent)]
                sink.write(data)
                await sink.drain()
                sent += len(data)
                if sent >= weather.until:
                    await self.finish(sink, weather.end)
                    return
        except ConnectionError:
            pass
        if not weather.end:
            sink.close()

    async def finish(self, sink: asyncio.StreamWriter, how: str) -> None:
        """End a connection in the middle."""
        if how == "half":
            sink.write_eof()
            await asyncio.sleep(60)
        if how == "silent":
            await asyncio.sleep(60)
        if how == "reset":
            sink.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            sink.transport.abort()
        sink.close()

    def stop(self) -> None:
        """End the proxy and what is under way."""
        self.loop.call_soon_threadsafe(self.loop.stop)


@contextmanager
def between(url: str, weather: Weather) -> Iterator[Proxy]:
    """A proxy before the server at `url`."""
    proxy = Proxy(int(url.rpartition(":")[2]), weather)
    thread = threading.Thread(target=proxy.loop.run_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.stop()
        thread.join(timeout=5)
        for task in asyncio.all_tasks(proxy.loop):
            task.cancel()
        proxy.loop.run_until_complete(asyncio.sleep(0))
        proxy.server.close()
        proxy.loop.close()

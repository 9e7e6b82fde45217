"""A link that is slow and loses frames, between two interfaces: `python slow_link.py FIRST SECOND SECONDS SHARE`.

Every frame that arrives at one interface leaves by the other, SECONDS later, unless it is among the lost SHARE. `tc` with netem
would do it in the kernel, where the kernel has netem. Frames must be whole: turn segmentation and checksum offloads off.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import sys
import time
from collections import deque

_EVERY_PROTOCOL, _PACKETS, _IGNORE_OUTGOING, _LONGEST = 0x0003, 263, 23, 65536


def interface(name: str) -> socket.socket:
    """A raw socket that gets what arrives at an interface, and not what it sends there itself."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
    opened.bind((name, 0))
    opened.setsockopt(_PACKETS, _IGNORE_OUTGOING, 1)
    opened.setblocking(False)
    return opened


def forward(first: socket.socket, second: socket.socket, delay_s: float, lost: float) -> None:
    """Carry frames both ways, for ever."""
    other, chance = {first: second, second: first}, random.Random(0)
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        wait = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        for source in select.select([first, second], [], [], wait)[0]:
            frame = source.recv(_LONGEST)
            if chance.random() >= lost:
                waiting.append((time.monotonic() + delay_s, other[source], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # a full queue, or an interface that is down: the frame is lost
                target.send(frame)


if __name__ == "__main__":
    forward(interface(sys.argv[1]), interface(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))

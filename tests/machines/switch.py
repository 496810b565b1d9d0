"""A network switch in user space: it forwards the frames of TAP devices, one in the network namespace of each host.

    python switch.py HOST=PID ...        PID: a process of the host

Each host has one cable to the switch, with a rate, a delay, a loss and a largest packet (`Cable`). Requests arrive as
lines of JSON at the standard input, answers leave at the standard output. The devices are gone when the process ends.

The kernel leaves TCP's segments together, up to 64 KiB in one frame, and checksums open, as for network cards that do
both themselves; such a frame counts as many bytes as its segments would on a wire. Where a cable loses frames, the kernel
makes the segments, so that single packets are lost.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

INTERFACE = "net0"
"""Name of the device on each host."""

FRAMES_AT_ONCE = 64
"""Largest number of frames that are read from one host before it is the others' turn."""
LARGEST_READ = 2**17

# linux/if_tun.h
TUN_SET_IFF, TUN_SET_OFFLOAD, TUN_SET_HEADER_SIZE = 0x400454CA, 0x400454D0, 0x400454D8
TAP, NO_PACKET_INFO, OFFLOAD_HEADER = 0x0002, 0x1000, 0x4000
CHECKSUMS, SEGMENTS = 0x01, 0x02 | 0x04 | 0x08
"""Tasks that the kernel may leave to the device: checksums; segments over IPv4 and IPv6, also with ECN."""

HEADER = struct.Struct("<BBHHHH")
"""virtio_net_hdr in front of each frame: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset."""
ETHERNET_BYTES = 14
MULTICAST = 0x01
"""Bit in the first byte of a destination address: the frame is for all hosts."""


@dataclass(frozen=True)
class Cable:
    """The cable between a host and the switch, alike in both directions."""

    rate_bits_s: float | None = None
    """Bits of Ethernet frames per second; None: as many as this machine can forward."""
    delay_s: float = 0.0
    """Time from one end to the other. There are two cables between two hosts."""
    loss: float = 0.0
    """Probability that a frame is lost."""
    mtu: int | None = None
    """Larger IP packets are dropped silently, as in a tunnel that nobody knows of; None: all pass."""
    queue_s: float = 0.05
    """Length of the queue in front of the cable, as the time in which it drains; more frames are dropped."""
    up: bool = True
    """False: nothing passes. The host's interface stays up, as if a device further away had failed."""


class Port:
    """A host's device and its cable."""

    def __init__(self, name: str, pid: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/proc/{pid}/ns/net") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"the network of {name} cannot be entered")
        self.name, self.cable = name, Cable()
        self.file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        flags = TAP | NO_PACKET_INFO | OFFLOAD_HEADER
        fcntl.ioctl(self.file, TUN_SET_IFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
        fcntl.ioctl(self.file, TUN_SET_HEADER_SIZE, array.array("i", [HEADER.size]))
        self.free_s = [0.0, 0.0]
        """When the cable has taken all earlier frames, from the host and to it."""


class Transit(NamedTuple):
    """A frame in a cable, which it leaves at `at_s`; ordered by that, then by `number`."""

    at_s: float
    number: int
    leg: int
    """0: in the sender's cable; 1: in the receiver's."""
    sender: Port
    receiver: Port
    frame: bytes
    size_bytes: int
    largest_packet_bytes: int


class Switch:
    """Forwards frames between ports, and counts them."""

    def __init__(self, ports: Sequence[Port]) -> None:
        self.ports = {port.name: port for port in ports}
        self.places = dict[bytes, Port]()
        """The port of each Ethernet address, learned from the frames that it sends."""
        self.blocked = set[frozenset[str]]()
        self.carried_bytes = Counter[tuple[str, str]]()
        self.dropped_frames = Counter[tuple[str, str]]()
        self.transits: list[Transit] = []
        self.numbers = itertools.count()
        self.random = random.Random(0)
        self._choose_offloads()

    def run(self) -> None:
        """Forward frames until the standard input is closed."""
        control = sys.stdin.fileno()
        senders = {port.file: port for port in self.ports.values()}
        while True:
            wait_s = max(0.0, self.transits[0].at_s - time.monotonic()) if self.transits else None
            for file in select.select([control, *senders], [], [], wait_s)[0]:
                if file != control:
                    self._take(senders[file])
                elif line := sys.stdin.readline():
                    print(json.dumps(self.answer(**json.loads(line))), flush=True)
                else:
                    return
            while self.transits and self.transits[0].at_s <= time.monotonic():
                self._leave(heapq.heappop(self.transits))

    def answer(self, do: str, **values: Any) -> Any:
        """Carry out a request, and return its answer."""
        match do:
            case "change":
                self.ports[values["host"]].cable = Cable(**values["cable"])
                self._choose_offloads()
            case "block":
                self.blocked = {frozenset(pair) for pair in values["pairs"]}
            case "count":
                return [[*pair, size] for pair, size in self.carried_bytes.items()], [
                    [*pair, frames] for pair, frames in self.dropped_frames.items()
                ]
        return None

    def _choose_offloads(self) -> None:
        lossy = any(port.cable.loss for port in self.ports.values())
        for port in self.ports.values():
            fcntl.ioctl(port.file, TUN_SET_OFFLOAD, CHECKSUMS | (0 if lossy else SEGMENTS))

    def _take(self, sender: Port) -> None:
        """Read the frames of a host, and let them enter its cable."""
        for _ in range(FRAMES_AT_ONCE):
            try:
                frame = os.read(sender.file, LARGEST_READ)
            except BlockingIOError:
                return
            target, source = frame[HEADER.size : HEADER.size + 6], frame[HEADER.size + 6 : HEADER.size + 12]
            self.places[source] = sender
            known = None if target[0] & MULTICAST else self.places.get(target)
            for receiver in (known,) if known else self.ports.values():
                if receiver is not sender:
                    now_s, size = time.monotonic(), measure(frame)
                    self._enter(Transit(now_s, next(self.numbers), 0, sender, receiver, frame, *size))

    def _enter(self, transit: Transit) -> None:
        """Let a frame that comes at `at_s` enter the cable of its leg, unless it is lost."""
        port = transit.receiver if transit.leg else transit.sender
        cable, begin_s = port.cable, max(transit.at_s, port.free_s[transit.leg])
        if (
            not cable.up
            or (cable.mtu is not None and transit.largest_packet_bytes > cable.mtu)
            or (cable.loss and self.random.random() < cable.loss)
            or begin_s - transit.at_s > cable.queue_s
            or frozenset((transit.sender.name, transit.receiver.name)) in self.blocked
        ):
            self.dropped_frames[transit.sender.name, transit.receiver.name] += 1
            return
        taken_s = begin_s + (transit.size_bytes * 8 / cable.rate_bits_s if cable.rate_bits_s else 0.0)
        port.free_s[transit.leg] = taken_s
        heapq.heappush(self.transits, transit._replace(at_s=taken_s + cable.delay_s))

    def _leave(self, transit: Transit) -> None:
        """Let a frame go on from the sender's cable to the receiver's, and from there to the receiver."""
        if transit.leg == 0:
            self._enter(transit._replace(leg=1))
            return
        pair = transit.sender.name, transit.receiver.name
        try:
            os.write(transit.receiver.file, transit.frame)
            self.carried_bytes[pair] += transit.size_bytes
        except OSError:  # the host's interface is down
            self.dropped_frames[pair] += 1


def measure(frame: bytes) -> tuple[int, int]:
    """Return a frame's bytes as they would be on a wire, and those of its largest IP packet."""
    _, segmented, _, segment_bytes, checksum_start, _ = HEADER.unpack_from(frame)
    size = len(frame) - HEADER.size
    if not segmented:
        return size, size - ETHERNET_BYTES
    tcp_words = frame[HEADER.size + checksum_start + 12] >> 4
    headers = checksum_start + 4 * tcp_words
    segments = -(-(size - headers) // segment_bytes)
    return size + (segments - 1) * headers, headers + segment_bytes - ETHERNET_BYTES


def main() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, -20)  # a cable does not wait for a core
    switch = Switch([Port(name, int(pid)) for name, pid in (text.split("=") for text in sys.argv[1:])])
    print(json.dumps("ready"), flush=True)
    switch.run()


if __name__ == "__main__":
    main()

"""The end of Ray's output on a node, which says why Ray has ended there."""

from __future__ import annotations

import pytest

from hybridengine.launch.ray_node import LAST_LINES, last_lines

RAYLET = "/work/.venv/lib/python3.11/site-packages/ray/core/src/ray/raylet/raylet"
FAILED_CHECK = (
    "[2026-11-29 15:10:47,101 C 214 214] (raylet) gcs_rpc_client.h:216: Failed to connect to GCS within 60 s"
)
ABORTED = "[2026-11-29 15:51:52,063 E 15465 15465] (raylet) logging.cc:474: *** SIGABRT received at time=1795967512 ***"
ENDED = "\t".join(("2026-11-29 15:10:47,485", "ERR scripts.py:1315 -- Remaining processes will be killed."))


@pytest.mark.parametrize(
    ("reason", "noise"),
    [
        (
            FAILED_CHECK,
            [
                "*** StackTrace Information ***",
                *(f"{RAYLET}(+0x8bbdcb) [0x5581bfcc0dcb] std::_Function_handler<>::_M_invoke()",) * 20,
                f"{RAYLET}(_ZN3ray6RayLogD1Ev+0x479) [0x5581bfcc0dcb] ray::RayLog::~RayLog()",
                "/lib/x86_64-linux-gnu/libc.so.6(+0x2724a) [0x7f88b464524a]",
                "/lib/x86_64-linux-gnu/libc.so.6(__libc_start_main+0x85) [0x7f88b4645305] __libc_start_main",
            ],
        ),
        (
            ABORTED,
            [
                f"{ABORTED.partition('***')[0]}PC: @     0x7f359ef26f36  (unknown)  epoll_wait",
                *(f"{ABORTED.partition('***')[0]}    @     0x563b5d5b6889        288  boost::asio::run()",)
                * 20,
            ],
        ),
        (
            "[2026-11-29 15:51:50,909 W 15465 15465] (raylet) no room",
            ["[state-dump] num async plasma: 0"] * 20,
        ),
    ],
)
def test_the_end_of_rays_output_says_why_it_has_ended(reason: str, noise: list[str]):
    """Also below stacks, as the raylet prints them, and in the colours of `ray start`."""
    before = [f"line {index}" for index in range(20)]
    coloured = ENDED.replace("Remaining", "\x1b[31mRemaining") + "\x1b[39m"
    output = "\n".join([*before, reason, *noise, "\x1b[39m", "", coloured])
    assert last_lines(output) == [*before[-(LAST_LINES - 2) :], reason, ENDED]

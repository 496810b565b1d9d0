"""Messages on a device, whose requests only order a stream. There is no GPU here: group and requests are mocks."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridengine.weights.transport import Messages, PeerError, Pending, PointToPointTransport

TIMEOUT_S = 0.5


def transport_over(*kinds: str) -> PointToPointTransport:
    """Return a transport over a group with backends for these kinds of devices."""
    group = mock.Mock(_device_types=[torch.device(kind) for kind in kinds])
    group._get_backend.return_value.options._timeout = timedelta(seconds=TIMEOUT_S)
    return PointToPointTransport(group)


def pending_of(transport: PointToPointTransport, request: object, is_on_device: bool = True) -> Pending:
    operations: tuple[Any, ...] = (mock.Mock(), mock.Mock())
    messages = Messages(operations, (1, 2), received_bytes=8, are_on_device=is_on_device)
    return Pending(transport, messages, [request])  # NCCL has one request for all


def test_the_host_waits_until_messages_have_come():
    started, request = time.monotonic(), mock.Mock()
    request.is_completed.side_effect = lambda: time.monotonic() > started + 0.1
    transport = transport_over("cuda")
    assert pending_of(transport, request).wait() == 8
    assert time.monotonic() - started >= 0.1
    assert transport.received_bytes == 8
    request.wait.assert_called_once_with()


def test_what_does_not_come_ends_before_the_watchdog():
    request, transport = mock.Mock(), transport_over("cuda")
    request.is_completed.return_value = False
    waits = f"messages with ranks [1, 2] failed: nothing has come for {0.9 * TIMEOUT_S:.2f} s"
    with pytest.raises(PeerError, match=re.escape(waits)):
        pending_of(transport, request).wait()
    assert transport.received_bytes == 0
    request.wait.assert_not_called()


@pytest.mark.parametrize("is_on_device", [True, False])
def test_who_gives_up_ends_what_a_device_still_writes(is_on_device: bool):
    transport = transport_over("cpu", "cuda")
    messages = pending_of(transport, mock.Mock(), is_on_device)._messages
    with (
        mock.patch.object(PointToPointTransport, "is_closed", False),
        mock.patch.object(dist, "batch_isend_irecv", return_value=[mock.Mock()]),
    ):
        transport.post(messages)
        transport.give_up()
        transport.give_up()
    assert transport.group.abort.call_count == is_on_device  # type: ignore[attr-defined]
    assert transport.has_given_up

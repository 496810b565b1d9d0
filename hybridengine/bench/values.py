"""Weights that any rank can compute for any box: every element follows from its tensor's name and its global index.

Each version has other values, so that a method which delivers nothing cannot pass with what an earlier one has left in
memory.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from hybridengine.reshard.boxes import Box
from hybridengine.reshard.layout import LocalParameter, Shard
from hybridengine.runtime.storage import WeightStorage

_MASK = 0xFFFFFFFF
_BITS = 24
"""Bits of a value; float32 holds them exactly, bfloat16 rounds them."""


def box_values(tensor: str, box: Box, version: int, device: torch.device) -> Tensor:
    """Return float32 values in [-1, 1) of one box of a logical tensor, shaped like the box."""
    hashed = torch.zeros((), dtype=torch.int32, device=device)
    for dim, (start, stop) in enumerate(box):
        salt = zlib.crc32(f"{version}/{dim}/{tensor}".encode())
        index = torch.arange(start, stop, dtype=torch.int64, device=device)
        hashed = hashed.unsqueeze(-1) ^ _hash(index, salt)
    return hashed.float().mul_(2.0 ** (1 - _BITS)).sub_(1.0)


def parameter_values(
    parameter: LocalParameter, dtype: torch.dtype, version: int, device: torch.device
) -> Tensor:
    """Return the contents of a local parameter; padding is zero."""
    values = torch.zeros(parameter.shape, dtype=dtype, device=device)
    for piece in parameter.pieces:
        values[piece.index] = box_values(piece.tensor, piece.box, version, device).to(dtype)
    return values


def fill(shard: Shard, weights: WeightStorage, version: int) -> None:
    """Write a version's values into all parameters of a shard."""
    for parameter in shard.parameters:
        target = weights[parameter.name]
        target.copy_(parameter_values(parameter, target.dtype, version, target.device))


def differing_parameters(shard: Shard, weights: WeightStorage, version: int) -> list[str]:
    """Return the parameters that do not hold a version's values, bit for bit."""
    wrong = []
    for parameter in shard.parameters:
        found = weights[parameter.name]
        expected = parameter_values(parameter, found.dtype, version, found.device)
        if found.shape != expected.shape or not torch.equal(_bits(found), _bits(expected)):
            wrong.append(parameter.name)
    return wrong


def _hash(index: Tensor, salt: int) -> Tensor:
    """24 well-mixed bits of each index."""
    mixed = ((index + 1) * 0x9E3779B1 + salt) & _MASK
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & _MASK
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _MASK
    return ((mixed ^ (mixed >> 16)) >> (32 - _BITS)).int()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)

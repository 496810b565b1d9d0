"""Pages beneath the weights of a CPU's engine, as the kernel counts them."""

from __future__ import annotations

import ctypes

import torch
from torch.nn import Parameter

from hybridengine.backends.vllm.host_segments import HostSegments
from hybridengine.backends.vllm.sleeping import SleepingWeights, pieces

PAGE = 4096
EXPERTS, DENSE, SMALL = (8, 96, 64), (256, 64), (6, 10, 64)
"""An expert fills 6 pages, the dense weight 16; eight of the small experts would fill 5 pages, and there are six."""


def weights_of() -> tuple[SleepingWeights, dict[str, Parameter]]:
    parameters = {name: Parameter(torch.ones(size)) for name, size in SHAPES.items()}
    segments = HostSegments(parameters)

    def current() -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, parameter in parameters.items():
            slices = {f"{name}[{place}]": part for place, part in enumerate(parameter)}
            found |= slices if parameter.dim() == 3 else {name: parameter}
        return found

    return SleepingWeights(current(), [], segments, current), parameters


SHAPES = {"experts": EXPERTS, "dense": DENSE, "small": SMALL}


def resident_pages(tensor: torch.Tensor) -> int:
    """Return the number of a tensor's pages to which the kernel has given memory (mincore)."""
    found = (ctypes.c_ubyte * -(-tensor.nbytes // PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), found) == 0
    return sum(page & 1 for page in found)


def test_experts_come_and_go_one_by_one() -> None:
    weights, parameters = weights_of()
    experts, dense = parameters["experts"], parameters["dense"]
    weights.release()
    assert (resident_pages(experts), resident_pages(dense)) == (0, 0)
    weights.materialise()
    for parameter in parameters.values():
        parameter.data.fill_(2.0)
    assert (resident_pages(experts), resident_pages(dense)) == (48, 16)
    weights.release(["experts[3]", "experts[4]", "dense"])
    assert (resident_pages(experts), resident_pages(dense)) == (36, 0)
    assert weights.live_bytes == 36 * PAGE + parameters["small"].nbytes
    values = [bool((part == 2.0).all()) for part in experts]
    assert values == [True, True, True, False, False, True, True, True]
    assert (parameters["small"] == 2.0).all()


def test_pieces_are_the_fewest_experts_that_fill_whole_pages() -> None:
    experts, small = torch.empty(EXPERTS), torch.empty(SMALL)
    assert list(pieces(experts, experts.nbytes, PAGE)) == [(place * 24576, 24576) for place in range(8)]
    assert list(pieces(small, small.nbytes, PAGE)) == [(0, small.nbytes)]
    dense = torch.empty(DENSE)
    assert list(pieces(dense, dense.nbytes, PAGE)) == [(0, dense.nbytes)]
    large = torch.empty(4, 3 * 2**19, 1, dtype=torch.int8)  # 1.5 MiB each: two fill three pages of 1 MiB
    assert list(pieces(large, large.nbytes, 2**20)) == [(0, 3 * 2**20), (3 * 2**20, 3 * 2**20)]


def test_small_experts_leave_together() -> None:
    weights, parameters = weights_of()
    weights.materialise()
    parameters["small"].data.fill_(2.0)
    weights.release([f"small[{place}]" for place in range(5)])
    assert (parameters["small"] == 2.0).all()
    weights.release(["small[5]"])
    assert not parameters["small"].any()

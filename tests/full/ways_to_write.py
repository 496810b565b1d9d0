"""Functions that try in different ways to write -1 over the column `wide` of the given rows; all return the rows."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict

WAYS_TO_WRITE = (
    "in_place",
    "through_out",
    "through_numpy",
    "through_an_array",
    "through_data",
    "in_inference_mode",
)


def in_place(rows: TensorDict, *_: object) -> TensorDict:
    rows["wide"].fill_(-1)
    return rows


def through_out(rows: TensorDict, *_: object) -> TensorDict:
    torch.full(rows["wide"].shape, -1, out=rows["wide"])
    return rows


def through_numpy(rows: TensorDict, *_: object) -> TensorDict:
    rows["wide"].numpy()[:] = -1
    return rows


def through_an_array(rows: TensorDict, *_: object) -> TensorDict:
    np.asarray(rows["wide"])[:] = -1
    return rows


def through_data(rows: TensorDict, *_: object) -> TensorDict:
    rows["wide"].data.fill_(-1)
    return rows


def in_inference_mode(rows: TensorDict, *_: object) -> TensorDict:
    with torch.inference_mode():
        rows["wide"].fill_(-1)
    return rows

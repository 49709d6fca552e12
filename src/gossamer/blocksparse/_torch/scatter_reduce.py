"""Elements put where indices say, on the CPU."""

import math

import torch
from torch import Tensor

from gossamer.blocksparse._torch.gather import places
from gossamer.blocksparse.lists import Lists, lost
from gossamer.blocksparse.records import BlocksparseScatterReduce, Direction


def scatter_reduce(call: BlocksparseScatterReduce) -> Tensor:
    given, src, index, dtype, reduce = call.given, call.src, call.index, call.dtype, call.reduce
    lists, names = Lists(call.layout, call.form), Lists(call.index_layout, call.index_form)
    shape = (lists.form.capacity, *index.shape[1:])
    if lists.overflowed() or names.overflowed():
        return torch.full(shape, lost(dtype), dtype=dtype)
    place = places(index, names, lists, Direction(*call.axis), "index of a scatter").view(-1)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.uint8 if dtype is torch.bool else dtype
    # One element more takes what has no place.
    size = math.prod(shape)
    place = torch.where(place < 0, size, place)
    flat = torch.zeros(size + 1, dtype=wide)
    if given is not None:
        flat[:size] = given.reshape(-1)
    if src is None:
        flat.index_add_(0, place, torch.ones((), dtype=wide).expand(place.shape))
    else:
        added = src.reshape(-1)[: len(place)]
        if reduce == "last":
            # The greatest of the positions, for a plain assignment leaves open which of equal indices is last.
            order = torch.full(flat.shape, -1).scatter_reduce_(0, place, torch.arange(len(place)), "amax")
            met = order >= 0
            flat[met] = added[order[met]].to(wide)
        else:
            flat.scatter_reduce_(0, place, added.to(wide), reduce, include_self=call.include_self)
    return flat[:size].view(shape).to(dtype, copy=True)

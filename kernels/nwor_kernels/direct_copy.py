"""Copying a few numbers on the device by the driver itself: less host time than torch takes."""

from collections.abc import Callable

import torch
from torch import Tensor

from nwor_kernels.cuda_driver import driver_error, load_driver
from nwor_kernels.direct_launch import count_refusal


def bind_copy(kept: Tensor) -> Callable[[Tensor], None]:
    """What copies to the first elements of one contiguous tensor, on the current stream.

    Args:
        kept: [n], kept alive by what is returned.

    Returns:
        What copies a tensor [up to n]: of the same dtype, device and contiguous by the driver,
        any other as torch does. It raises RuntimeError, with the driver's name of the error, if
        the driver refuses a copy, and ValueError for more elements than there is room for.
    """

    def by_torch(given: Tensor) -> None:
        count = given.numel()
        if count > most:
            raise ValueError(f"{count} numbers do not fit {most}")
        # Making a view takes the host longer than the comparison.
        (kept if count == most else kept[:count]).copy_(given)

    dtype, device, most = kept.dtype, kept.device, kept.numel()
    if not kept.is_cuda or torch.version.hip is not None:
        return by_torch
    try:
        driver = load_driver()
    except (AttributeError, OSError) as missing:
        count_refusal(f"missing: {missing}")
        return by_torch
    start, stream_of = driver.cuMemcpyDtoDAsync_v2, torch._C._cuda_getCurrentRawStream
    to, size, index = kept.data_ptr(), kept.element_size(), device.index

    def copy(given: Tensor) -> None:
        count = given.numel()
        is_alike = given.dtype is dtype and given.device == device and given.is_contiguous()
        if not is_alike or count > most:
            by_torch(given)
        elif result := start(to, given.data_ptr(), count * size, stream_of(index)):
            raise driver_error(driver, "cuMemcpyDtoDAsync", result)

    return copy

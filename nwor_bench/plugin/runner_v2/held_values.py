"""Checks that the K/V which a window points at stay in place until the commit.

A reference keeps a tensor's memory from being given to another, but not from being written to:
code compiled as a whole gives one layer's buffers to the next. The addresses show whether a model
does that. So the first window of each number of rows is held by copy while its layers' addresses
are compared; later windows are held by reference only if all addresses differed.
"""

from torch import Tensor

from nwor_bench.plugin.staging.window import HeldValuesLost


class HeldValues:
    """Holds each layer's K/V of a window, and detects two layers with the same address.

    Args:
        num_layers: layers of a whole window.
    """

    def __init__(self, num_layers: int):
        self._num_layers = num_layers
        self._proven: set[int] = set()
        self._owners: dict[int, int] = {}
        self._layers: set[int] = set()
        self._originals: list[Tensor] = []
        self._repeats = False

    def clear(self) -> None:
        """Forget the window and release its tensors."""
        self._owners.clear()
        self._layers.clear()
        self._originals.clear()
        self._repeats = False

    def take(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """What to hold of this layer: K and V themselves, or copies in a first window.

        Args:
            layer: its number; a layer that comes again begins another run of a capture's forward.
            key, value: [rows, kv_heads, head_dim], strided.

        Returns:
            None if an earlier layer has the same address; what is held of that one is still right.

        Raises:
            HeldValuesLost: an earlier layer has the same address, and no copy was made.
        """
        if layer in self._layers:
            self.clear()
            self._repeats = True  # padding: nothing can be lost, and a graph keeps addresses
        self._layers.add(layer)
        by_reference = self._repeats or key.shape[0] in self._proven
        for address in {key.data_ptr(), value.data_ptr()}:
            owner = self._owners.setdefault(address, layer)
            if owner == layer:
                continue
            if by_reference and not self._repeats:
                raise HeldValuesLost(
                    f"the K/V of target layer {owner} were overwritten by layer {layer} before "
                    f"the commit, in a window of {key.shape[0]} rows; unset VLLM_NWOR_MODE, or "
                    "set VLLM_NWOR_STAGE_BY=copy"
                )
            return None
        if by_reference:
            return key, value
        if len(self._layers) == self._num_layers:
            self._proven.add(key.shape[0])
        # Held as well: memory that is free may be given to the next layer without any fault.
        self._originals += [key, value]
        return key.clone(), value.clone()

"""Which layers' states a draft reads.

vLLM's id k is the residual entering layer k; n, the number of layers, is the last layer's output.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.errors import LabError


class BadLayers(LabError):
    """Layer ids that the target does not have, or that are given twice or out of order."""


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's low, middle and high layer for a target of `num_layers`, as vLLM counts them.

    In a target of fewer than seven these would be one and the same, so the outermost are taken there.
    """
    if num_layers < 7:
        return (min(1, num_layers - 3), num_layers // 2, num_layers - 1)
    return (2, num_layers // 2, num_layers - 3)


def layers_of(text: str | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Layer ids from "2,15,27" or a sequence; the default where it is empty.

    Raises BadLayers unless they ascend (vLLM sorts them, so another order would be lost) within 0..n-1.
    """
    words = text.replace(",", " ").split() if isinstance(text, str) else list(text)
    try:
        layers = tuple(int(word) for word in words) or default_layers(num_layers)
    except ValueError as error:
        raise BadLayers(f"aux_layers={text!r} are no layer ids", 'give them as "2,15,27"') from error
    if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= num_layers:
        raise BadLayers(
            f"layers {list(layers)} do not ascend within 0..{num_layers - 1}",
            f"the default for {num_layers} layers is {list(default_layers(num_layers))}",
        )
    return layers

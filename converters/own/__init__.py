"""One's own encoder-decoder: any nn.Module with three methods, converted as it is. See docs/own-model.md."""

from beamline.converters.modules.loop import over_time
from beamline.converters.own.layers import read_sequence
from beamline.converters.own.protocol import OwnModule, Settings, Step, Stepped, cache, memory, recurrent

__all__ = [
    "OwnModule",
    "Settings",
    "Step",
    "Stepped",
    "cache",
    "memory",
    "over_time",
    "read_sequence",
    "recurrent",
]

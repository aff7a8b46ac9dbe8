"""Replay: storage, samplers, views and relabelling, composed."""

from zhixing.buffers.buffer import Buffer
from zhixing.buffers.fields import SUCCESSORS
from zhixing.buffers.her import Hindsight
from zhixing.buffers.samplers import Prioritized, Reservoir, Uniform
from zhixing.buffers.views import Episode, NStep, Sequence, View

__all__ = [
    "SUCCESSORS",
    "Buffer",
    "Episode",
    "Hindsight",
    "NStep",
    "Prioritized",
    "Reservoir",
    "Sequence",
    "Uniform",
    "View",
]

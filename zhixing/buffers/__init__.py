"""Replay buffers: storage, a sampler, a view and optionally hindsight experience replay, composed."""

from zhixing.buffers.buffer import Buffer
from zhixing.buffers.fields import SUCCESSORS
from zhixing.buffers.group import BufferGroup
from zhixing.buffers.her import HER
from zhixing.buffers.samplers import Prioritized, Uniform
from zhixing.buffers.views import EpisodeView, NStep, SequenceView, View

__all__ = [
    "HER",
    "SUCCESSORS",
    "Buffer",
    "BufferGroup",
    "EpisodeView",
    "NStep",
    "Prioritized",
    "SequenceView",
    "Uniform",
    "View",
]

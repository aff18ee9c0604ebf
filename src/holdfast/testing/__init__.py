"""Faults to inject into your own dataset, to see what your training does: `Saboteur(dataset, at={37: "segfault"})`."""

from holdfast.testing.faults import FAULTS, Saboteur, StreamSaboteur, inflict, storm

__all__ = ["FAULTS", "Saboteur", "StreamSaboteur", "inflict", "storm"]

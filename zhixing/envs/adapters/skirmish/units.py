"""Units and maps. The numbers follow StarCraft II, with steps of about a third of a second."""

from __future__ import annotations

from dataclasses import dataclass

SIZE = 32.0  # side of the square map
SIGHT = 9.0  # distance at which agents observe units


@dataclass(frozen=True)
class Unit:
    health: int
    shield: int
    damage: int  # per shot
    cooldown: int  # steps from one shot to the next
    range: float
    speed: float  # map units per step


UNITS = {
    "m": Unit(health=45, shield=0, damage=6, cooldown=2, range=5.5, speed=2.0),  # marine
    "s": Unit(health=80, shield=80, damage=13, cooldown=4, range=6.0, speed=2.0),  # stalker
    "z": Unit(health=100, shield=50, damage=16, cooldown=3, range=2.0, speed=2.0),  # zealot: melee
}


@dataclass(frozen=True)
class Map:
    allies: str  # one letter per unit
    enemies: str
    episode_limit: int

    @property
    def types(self) -> str:
        """The unit types that observations encode; empty if the units of each team are all of one type."""
        mixed = len(set(self.allies)) > 1 or len(set(self.enemies)) > 1
        return "".join(sorted({*self.allies, *self.enemies})) if mixed else ""


MAPS = {
    "3m": Map("mmm", "mmm", 60),
    "8m": Map("m" * 8, "m" * 8, 120),
    "2s3z": Map("sszzz", "sszzz", 120),
    "5m_vs_6m": Map("m" * 5, "m" * 6, 70),
    "2m_vs_1z": Map("mm", "z", 150),
}

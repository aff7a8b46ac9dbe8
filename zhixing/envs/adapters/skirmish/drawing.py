"""A picture of one battle: allies blue, enemies red, their health in green and shields in white above them."""

from __future__ import annotations

import math

import numpy as np

from zhixing.envs.adapters.skirmish.battles import Battles
from zhixing.envs.adapters.skirmish.units import SIZE
from zhixing.envs.vector.step_buffers import Array

PIXELS = 256  # side of the picture
BAR = 12  # pixels that full health is wide
RADIUS = {"m": 4, "s": 7, "z": 5}
GROUND, ALLY, ENEMY = (40, 44, 40), (80, 140, 240), (230, 80, 70)
HEALTH, SHIELD, LOST = (90, 210, 90), (225, 225, 240), (90, 90, 90)


def picture(battles: Battles, row: int) -> Array:
    image = np.full((PIXELS, PIXELS, 3), GROUND, np.uint8)
    down, right = np.mgrid[:PIXELS, :PIXELS]
    letters = battles.map.allies + battles.map.enemies
    for unit in battles.alive[row].nonzero()[0]:
        x, y = battles.place[row, unit] / SIZE * (PIXELS - 1)
        x, y = round(float(x)), round(PIXELS - 1 - float(y))  # north is up
        radius = RADIUS[letters[unit]]
        away = (down - y) ** 2 + (right - x) ** 2
        image[away <= (radius + 1) ** 2] = GROUND  # a rim: units may overlap
        image[away <= radius**2] = ALLY if unit < battles.num_allies else ENEMY
        _bar(image, x, y - radius - 4, battles.health[row, unit] / battles.max_health[unit], HEALTH)
        if battles.max_shield[unit]:
            _bar(image, x, y - radius - 7, battles.shield[row, unit] / battles.max_shield[unit], SHIELD)
    return image


def _bar(image: Array, x: int, y: int, share: float, color: tuple[int, int, int]) -> None:
    top, left = min(max(y, 0), PIXELS - 2), min(max(x - BAR // 2, 0), PIXELS - BAR)
    image[top : top + 2, left : left + BAR] = LOST
    image[top : top + 2, left : left + math.ceil(share * BAR)] = color

"""Render one battle: allies blue, enemies red, bars above them for health (green) and shield (white)."""

from __future__ import annotations

import math

import numpy as np

from zhixing.envs.adapters.skirmish.battles import Battles
from zhixing.envs.adapters.skirmish.units import SIZE
from zhixing.envs.vector.step_buffers import Array

PIXELS = 256  # side of the image
BAR_WIDTH = 12  # pixels at full health
RADIUS = {"m": 4, "s": 7, "z": 5}
GROUND, ALLY, ENEMY = (40, 44, 40), (80, 140, 240), (230, 80, 70)
HEALTH, SHIELD, LOST = (90, 210, 90), (225, 225, 240), (90, 90, 90)


def render(battles: Battles, row: int) -> Array:
    image = np.full((PIXELS, PIXELS, 3), GROUND, np.uint8)
    rows, columns = np.mgrid[:PIXELS, :PIXELS]
    letters = battles.map.allies + battles.map.enemies
    for unit in battles.alive[row].nonzero()[0]:
        x, y = battles.position[row, unit] / SIZE * (PIXELS - 1)
        x, y = round(float(x)), round(PIXELS - 1 - float(y))  # north is up
        radius = RADIUS[letters[unit]]
        squared_distance = (rows - y) ** 2 + (columns - x) ** 2
        image[squared_distance <= (radius + 1) ** 2] = GROUND  # a border, as units may overlap
        image[squared_distance <= radius**2] = ALLY if unit < battles.num_allies else ENEMY
        _draw_bar(image, x, y - radius - 4, battles.health[row, unit] / battles.max_health[unit], HEALTH)
        if battles.max_shield[unit]:
            _draw_bar(image, x, y - radius - 7, battles.shield[row, unit] / battles.max_shield[unit], SHIELD)
    return image


def _draw_bar(image: Array, x: int, y: int, fraction: float, color: tuple[int, int, int]) -> None:
    top, left = min(max(y, 0), PIXELS - 2), min(max(x - BAR_WIDTH // 2, 0), PIXELS - BAR_WIDTH)
    image[top : top + 2, left : left + BAR_WIDTH] = LOST
    image[top : top + 2, left : left + math.ceil(fraction * BAR_WIDTH)] = color

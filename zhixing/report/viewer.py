"""A window in which a person plays a task, chance does, or a run's agent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Discrete

from zhixing import envs
from zhixing.envs.env_spec import MASK
from zhixing.envs.wrappers.headless import headless
from zhixing.errors import UserError
from zhixing.report.video import Show

ARROWS = {"w": "up", "a": "left", "s": "down", "d": "right"}
CODES = {273: "up", 274: "down", 275: "right", 276: "left"}  # of pygame 1, which Gymnasium's MountainCar still uses
CODES |= {0x4000004F: "right", 0x40000050: "left", 0x40000051: "down", 0x40000052: "up"}
LEAST = 480  # pixels that the longer side has at least: small pictures are shown larger


class WindowClosed(Exception):  # noqa: N818  # it is no error
    """The person has closed the window, or pressed escape."""


class Window:
    def __init__(self, title: str, fps: float) -> None:
        try:
            import pygame
        except ImportError as error:
            raise UserError("a window needs pygame: pip install 'gymnasium[classic-control]'") from error
        self.pygame, self.title, self.fps = pygame, title, fps
        self.screen: Any = None

    def __enter__(self) -> Window:
        if headless() and not os.environ.get("SDL_VIDEODRIVER"):
            raise _no_screen("neither DISPLAY nor WAYLAND_DISPLAY is set")
        try:
            self.pygame.display.init()  # not all of pygame: its sound fails on machines without a sound card
        except self.pygame.error as error:
            raise _no_screen(str(error)) from error
        # where the display can't be reached SDL falls back to a driver that draws nowhere
        if self.pygame.display.get_driver() in ("dummy", "offscreen") and not os.environ.get("SDL_VIDEODRIVER"):
            self.pygame.display.quit()
            raise _no_screen(f"the display {os.environ.get('DISPLAY', '')} can't be reached")
        self.clock = self.pygame.time.Clock()
        return self

    def __exit__(self, *error: object) -> None:
        self.pygame.display.quit()

    def show(self, frame: Any) -> None:
        """One picture `[H,W,3]`, and a wait for its time."""
        if not isinstance(frame, np.ndarray) or frame.ndim != 3:
            raise UserError("this task gives no pictures: render() must return an RGB array (height, width, 3)")
        pygame = self.pygame
        height, width = frame.shape[:2]
        scale = max(1, -(-LEAST // max(height, width)))
        if self.screen is None:
            try:
                self.screen = pygame.display.set_mode((width * scale, height * scale))
            except pygame.error as error:
                raise _no_screen(str(error)) from error
            pygame.display.set_caption(self.title)
        surface = pygame.surfarray.make_surface(frame.swapaxes(0, 1))
        self.screen.blit(pygame.transform.scale(surface, self.screen.get_size()), (0, 0))
        pygame.display.flip()
        self.clock.tick(self.fps)

    def keys(self) -> tuple[str, ...]:
        """The names of the keys that are held down now, in order."""
        pygame = self.pygame
        for event in pygame.event.get():
            if event.type == pygame.QUIT or (event.type == pygame.KEYDOWN and event.key == pygame.K_ESCAPE):
                raise WindowClosed
        held = pygame.key.get_pressed()
        return tuple(sorted(name for name, code in self._codes().items() if held[code]))

    def _codes(self) -> dict[str, int]:
        pygame = self.pygame
        letters = {name: getattr(pygame, f"K_{name}") for name in "abcdefghijklmnopqrstuvwxyz0123456789"}
        others = ("up", "down", "left", "right", "space", "return")
        return letters | {name: getattr(pygame, f"K_{name.upper()}") for name in others}


def _no_screen(reason: str) -> UserError:
    return UserError(f"no screen to open a window on ({reason}); `zhixing record RUN -o video.mp4` needs none")


def play(
    name: str,
    options: dict[str, Any] | None = None,
    *,
    random: bool = False,
    seed: int = 0,
    episodes: int | None = None,
) -> list[float]:
    """Play a task with the keyboard, or let chance; returns the returns. It ends with the window."""
    env = envs.make(name, **{**(options or {}), "render_mode": "rgb_array"})
    returns: list[float] = []
    try:
        keymap = {} if random else keys_of(env, name)
        with Window(name, float(env.metadata.get("render_fps", 30))) as window:
            _episodes(env, window, keymap, random, seed, episodes, returns)
    except WindowClosed:
        pass
    finally:
        env.close()
    return returns


def _episodes(
    env: gym.Env[Any, Any],
    window: Window,
    keymap: dict[tuple[str, ...], Any],
    random: bool,
    seed: int,
    episodes: int | None,
    returns: list[float],
) -> None:
    env.action_space.seed(seed)
    while episodes is None or len(returns) < episodes:
        obs, info = env.reset(seed=seed if not returns else None)
        total, ended = 0.0, False
        window.show(env.render())
        while not ended:
            held = window.keys()
            action = _any(env, obs, info) if random else action_of(held, keymap)
            obs, reward, terminated, truncated, info = env.step(action)
            total += float(np.mean(np.asarray(reward)))
            ended = bool(terminated or truncated)
            window.show(env.render())
        returns.append(total)
        print(f"return {total:.6g}", flush=True)


def _any(env: gym.Env[Any, Any], obs: Any, info: dict[str, Any]) -> Any:
    mask = info.get(MASK, obs.get(MASK) if isinstance(obs, dict) else None)
    if mask is not None and isinstance(env.action_space, Discrete):
        return env.action_space.sample(np.asarray(mask, np.int8))
    return env.action_space.sample()


def action_of(held: tuple[str, ...], keymap: dict[tuple[str, ...], Any]) -> Any:
    """Return the action of the largest combination of keys that are all held: further keys change nothing."""
    return keymap[max((keys for keys in keymap if set(keys) <= set(held)), key=len)]


def keys_of(env: gym.Env[Any, Any], name: str) -> dict[tuple[str, ...], Any]:
    """Return the action for each combination of held keys; () is for none.

    The environment's `get_keys_to_action` decides. Without one, number keys choose among up to ten discrete actions.
    """
    own = _own_keys(env)
    if own:
        print(f"{env.metadata.get('keys', 'keys: ' + ', '.join(_names(own)))}; escape ends", flush=True)
        return {(): 0, **own}
    space = env.action_space
    if not isinstance(space, Discrete) or space.n > 10 or getattr(env, "num_agents", 1) > 1:
        raise UserError(
            f"{name} can't be played with keys: its action space is {space}, and only up to 10 discrete actions have "
            f"keys by default; give it a method get_keys_to_action(), or try --random"
        )
    first, count = int(space.start), int(space.n)
    keymap: dict[tuple[str, ...], Any] = {(str(i),): first + i for i in range(count)}
    arrows = ""
    if count in (2, 3):  # of three the middle one mostly does nothing, as in MountainCar and Acrobot
        keymap |= {("left",): first, ("right",): first + count - 1}
        arrows = "; left and right arrow: the first and the last"
    print(f"keys 0 to {count - 1}: the actions{arrows}; escape ends", flush=True)
    return keymap | {(): first + (1 if count == 3 else 0)}


def _names(keymap: dict[tuple[str, ...], Any]) -> list[str]:
    return sorted({"+".join(keys) for keys in keymap if keys})


def _own_keys(env: gym.Env[Any, Any]) -> dict[tuple[str, ...], Any]:
    """Return what `get_keys_to_action` of Gymnasium says; where it has w, a, s and d, arrow keys work, too."""
    try:
        found = env.get_wrapper_attr("get_keys_to_action")()
    except AttributeError:
        return {}
    named: dict[tuple[str, ...], Any] = {}
    for keys, action in found.items():
        held = keys if isinstance(keys, (tuple, list, frozenset)) else (keys,)
        named[tuple(sorted(_word(key) for key in held if key is not None))] = action
    if not any(set(keys) & set(ARROWS.values()) for keys in named):
        named |= {tuple(sorted(ARROWS.get(key, key) for key in keys)): action for keys, action in named.items()}
    return named


def _word(key: int | str) -> str:
    """Return the name of a key that is given as a character or as a code of pygame 1 or 2."""
    if isinstance(key, int) and key in CODES:
        return CODES[key]
    character = chr(key) if isinstance(key, int) else key
    return {" ": "space", "\r": "return"}.get(character, character)


def watch(run: str | Path, episodes: int | None = None, seed: int = 0, checkpoint: str = "last") -> list[float]:
    """A run's agent in a window; returns the returns of the episodes seen to their end."""
    with Show(run, seed, checkpoint) as show:
        try:
            with Window(str(run), show.fps) as window:
                told = 0
                for frame in show.frames(episodes or 10**9):
                    window.keys()
                    window.show(frame)
                    if len(show.returns) > told:
                        told = len(show.returns)
                        print(f"return {show.returns[-1]:.6g}", flush=True)
        except WindowClosed:
            pass
        return show.returns

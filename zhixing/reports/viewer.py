"""A window in which a person, a random policy or a run's agent plays an environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Discrete

from zhixing import envs
from zhixing.core.action_layout import ActionLayout
from zhixing.envs.env_spec import MASK
from zhixing.envs.wrappers.headless import headless
from zhixing.errors import UserError
from zhixing.reports.video import AgentRenderer

Keymap = dict[tuple[str, ...], Any]  # the action for each combination of held keys; () is no key

WASD_ARROWS = {"w": "up", "a": "left", "s": "down", "d": "right"}
ARROW_CODES = {273: "up", 274: "down", 275: "right", 276: "left"}  # of pygame 1: Gymnasium's MountainCar has them
ARROW_CODES |= {0x4000004F: "right", 0x40000050: "left", 0x40000051: "down", 0x40000052: "up"}
MIN_PIXELS = 480  # of the longer side: smaller images are enlarged


class WindowClosed(Exception):  # noqa: N818  # not an error
    """The user closed the window or pressed escape."""


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
        # if the display can't be reached, SDL falls back to a driver without a window
        if self.pygame.display.get_driver() in ("dummy", "offscreen") and not os.environ.get("SDL_VIDEODRIVER"):
            self.pygame.display.quit()
            raise _no_screen(f"can't reach the display {os.environ.get('DISPLAY', '')}")
        self.clock = self.pygame.time.Clock()
        return self

    def __exit__(self, *error: object) -> None:
        self.pygame.display.quit()

    def show_frame(self, frame: Any) -> None:
        """Show an image `[H,W,3]` and wait until the next frame is due."""
        if not isinstance(frame, np.ndarray) or frame.ndim != 3:
            raise UserError("this environment renders no images: render() must return an RGB array (height, width, 3)")
        pygame = self.pygame
        height, width = frame.shape[:2]
        scale = max(1, -(-MIN_PIXELS // max(height, width)))
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

    def pressed_keys(self) -> tuple[str, ...]:
        """Return the sorted names of the keys held down. Raises `WindowClosed` if the user ended the game."""
        pygame = self.pygame
        for event in pygame.event.get():
            if event.type == pygame.QUIT or (event.type == pygame.KEYDOWN and event.key == pygame.K_ESCAPE):
                raise WindowClosed
        pressed = pygame.key.get_pressed()
        return tuple(sorted(name for name, code in self._key_codes().items() if pressed[code]))

    def _key_codes(self) -> dict[str, int]:
        pygame = self.pygame
        characters = {name: getattr(pygame, f"K_{name}") for name in "abcdefghijklmnopqrstuvwxyz0123456789"}
        special = ("up", "down", "left", "right", "space", "return")
        return characters | {name: getattr(pygame, f"K_{name.upper()}") for name in special}


def _no_screen(reason: str) -> UserError:
    return UserError(
        f"no screen to open a window on ({reason}); use `zhixing video RUN -o video.mp4`, which needs none"
    )


def play(
    name: str,
    options: dict[str, Any] | None = None,
    *,
    random: bool = False,
    seed: int = 0,
    episodes: int | None = None,
) -> list[float]:
    """Play an environment with the keyboard, or with random actions, and return the episodes' returns.

    Ends after `episodes`, or when the window is closed.
    """
    env = envs.make(name, **{**(options or {}), "render_mode": "rgb_array"})
    returns: list[float] = []
    try:
        keymap = {} if random else make_keymap(env, name)
        with Window(name, float(env.metadata.get("render_fps", 30))) as window:
            _play_episodes(env, window, keymap, random, seed, episodes, returns)
    except WindowClosed:
        pass
    finally:
        env.close()
    return returns


def _play_episodes(
    env: gym.Env[Any, Any],
    window: Window,
    keymap: Keymap,
    random: bool,
    seed: int,
    episodes: int | None,
    returns: list[float],
) -> None:
    env.action_space.seed(seed)
    while episodes is None or len(returns) < episodes:
        obs, info = env.reset(seed=seed if not returns else None)
        episode_return, ended = 0.0, False
        window.show_frame(env.render())
        while not ended:
            pressed = window.pressed_keys()
            action = _random_action(env, obs, info) if random else choose_action(pressed, keymap)
            obs, reward, terminated, truncated, info = env.step(action)
            episode_return += float(np.mean(np.asarray(reward)))
            ended = bool(terminated or truncated)
            window.show_frame(env.render())
        returns.append(episode_return)
        print(f"return {episode_return:.6g}", flush=True)


def _random_action(env: gym.Env[Any, Any], obs: Any, info: dict[str, Any]) -> Any:
    mask = info.get(MASK, obs.get(MASK) if isinstance(obs, dict) else None)
    if mask is None:
        return env.action_space.sample()
    return ActionLayout(env.action_space).sample(np.asarray(mask, np.int8))


def choose_action(pressed: tuple[str, ...], keymap: Keymap) -> Any:
    """Return the action of the largest combination whose keys are all pressed. Unknown keys are ignored."""
    return keymap[max((keys for keys in keymap if set(keys) <= set(pressed)), key=len)]


def make_keymap(env: gym.Env[Any, Any], name: str) -> Keymap:
    """Return the action for each combination of held keys, and print them.

    The environment's `get_keys_to_action` has priority. Without it, number keys select up to ten discrete actions.
    """
    env_keymap = _read_env_keymap(env)
    if env_keymap:
        combinations = sorted({"+".join(keys) for keys in env_keymap if keys})
        print(f"{env.metadata.get('keys', 'keys: ' + ', '.join(combinations))}; escape ends", flush=True)
        return {(): 0, **env_keymap}
    space = env.action_space
    if not isinstance(space, Discrete) or space.n > 10 or getattr(env, "num_agents", 1) > 1:
        raise UserError(
            f"{name} can't be played with keys: its action space is {space}, and only up to 10 discrete actions have "
            f"keys by default; give it a method get_keys_to_action(), or try --random"
        )
    first, count = int(space.start), int(space.n)
    keymap: Keymap = {(str(i),): first + i for i in range(count)}
    arrows = ""
    if count in (2, 3):  # the middle one of three is usually no-op, as in MountainCar and Acrobot
        keymap |= {("left",): first, ("right",): first + count - 1}
        arrows = "; left and right arrow: the first and the last"
    print(f"keys 0 to {count - 1}: the actions{arrows}; escape ends", flush=True)
    return keymap | {(): first + (1 if count == 3 else 0)}


def _read_env_keymap(env: gym.Env[Any, Any]) -> Keymap:
    """Return the environment's `get_keys_to_action`, if it has one. Arrow keys are added for w, a, s and d."""
    try:
        keys_to_action = env.get_wrapper_attr("get_keys_to_action")()
    except AttributeError:
        return {}
    keymap: Keymap = {}
    for keys, action in keys_to_action.items():
        combination = keys if isinstance(keys, (tuple, list, frozenset)) else (keys,)
        keymap[tuple(sorted(_key_name(key) for key in combination if key is not None))] = action
    if not any(set(keys) & set(WASD_ARROWS.values()) for keys in keymap):
        keymap |= {tuple(sorted(WASD_ARROWS.get(key, key) for key in keys)): action for keys, action in keymap.items()}
    return keymap


def _key_name(key: int | str) -> str:
    """Return the name of a key given as a character or as a pygame 1 or 2 key code."""
    if isinstance(key, int) and key in ARROW_CODES:
        return ARROW_CODES[key]
    character = chr(key) if isinstance(key, int) else key
    return {" ": "space", "\r": "return"}.get(character, character)


def watch(run: str | Path, episodes: int | None = None, seed: int = 0, checkpoint: str | int = "last") -> list[float]:
    """Show a run's agent in a window, and return the returns of the finished episodes."""
    with AgentRenderer(run, seed, checkpoint) as renderer:
        try:
            with Window(str(run), renderer.fps) as window:
                num_printed = 0
                for frame in renderer.frames(episodes or 10**9):
                    window.pressed_keys()
                    window.show_frame(frame)
                    if len(renderer.returns) > num_printed:
                        num_printed = len(renderer.returns)
                        print(f"return {renderer.returns[-1]:.6g}", flush=True)
        except WindowClosed:
            pass
        return renderer.returns

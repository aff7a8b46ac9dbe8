"""Model cards for the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from zhixing import __version__, config

VIDEO = "replay.mp4"  # the Hub shows this file at the top of the card
RESULTS = {  # of agent.json, with their names in the table
    "mean_return": "mean return",
    "std_return": "std of the return",
    "min_return": "lowest return",
    "max_return": "highest return",
    "mean_length": "mean length of an episode",
    "win_rate": "win rate",
}


def model_card(folder: Path, card: Mapping[str, Any], repo: str) -> str:
    """Return the README.md of an exported agent. `card` is the content of its agent.json."""
    algorithm, env = card["algorithm"], card["env"]
    name = repo.rpartition("/")[2]
    parts = [
        f"---\n{yaml.safe_dump(_metadata(card, name), sort_keys=False)}---\n",
        f"# {name}\n",
        f"An agent for `{env}`, trained with `{algorithm}` of zhixing {__version__} for {card['steps']:,} steps.\n",
        _results(card),
        f"## Use\n\n```sh\nzhixing pull {repo}\nzhixing eval {name}\nzhixing video {name} -o clip.mp4\n```\n",
        f'```python\nimport zhixing as zx\n\nagent = zx.load("{name}")\naction = agent.act(obs)\n```\n',
        f"## Reproduce\n\nThis command repeats the training:\n\n```sh\n{card['trained_by']}\n```\n",
        f"<details><summary>All settings</summary>\n\n```yaml\n{_settings(folder)}```\n\n</details>\n",
    ]
    return "\n".join(part for part in parts if part)


def _metadata(card: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the header that the Hub reads, with the returns in its leaderboards' format."""
    tags = ["reinforcement-learning", "deep-reinforcement-learning", "zhixing", card["algorithm"], card["env"]]
    metadata: dict[str, Any] = {"library_name": "zhixing", "tags": tags}
    if "mean_return" in card:
        value = f"{card['mean_return']:.2f} +/- {card['std_return']:.2f}"
        result = {
            "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
            "dataset": {"name": card["env"], "type": card["env"]},
            "metrics": [{"type": "mean_reward", "value": value, "name": "mean_reward", "verified": False}],
        }
        metadata["model-index"] = [{"name": name, "results": [result]}]
    return metadata


def _results(card: Mapping[str, Any]) -> str:
    rows = "".join(f"| {title} | {card[key]:g} |\n" for key, title in RESULTS.items() if key in card)
    if not rows:
        return ""
    return f"Results of {card['episodes']} episodes with seed {card['eval_seed']}:\n\n| | |\n|---|---|\n{rows}"


def _settings(folder: Path) -> str:
    return yaml.safe_dump(config.read_yaml(folder / "config.yaml"), sort_keys=False)

"""Adds the agents of `zoo/` to the built package, as `zhixing/agents`. Everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithAgents(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a checkout reads zoo/ itself
            for file in Path("zoo").glob("*/*"):
                target = Path(self.build_lib, "zhixing", "agents", file.parent.name, file.name)
                self.mkpath(str(target.parent))
                self.copy_file(str(file), str(target))


setup(cmdclass={"build_py": BuildWithAgents})

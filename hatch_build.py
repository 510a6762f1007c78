"""Builds the C kernels into the wheel. Loads build.py by path: the package's dependencies are not there at build time."""

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles every instruction set of this machine and marks the wheel as belonging to this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root, "src", "relay", "kernels", "cpu")
        spec = importlib.util.spec_from_file_location("relay_kernel_build", folder / "build.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        try:
            libraries = module.build()
        except module.BuildError as error:
            raise SystemExit(f"Relay's C kernels were not built: {error}") from None
        build_data["pure_python"] = False
        build_data["infer_tag"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"
        build_data["artifacts"].extend(str(path.relative_to(self.root)) for path in libraries)


def _platform_tag() -> str:
    """The libraries use ctypes, not the interpreter's ABI, so one wheel serves every Python 3 of the platform."""
    from packaging.tags import platform_tags

    return next(iter(platform_tags()))

"""Where the value of a setting comes from."""

from collections.abc import Collection, Sequence
from typing import Literal

# An overlay is a demo block, or the configuration's file.
Origin = Literal["manifest", "command line", "overlay", "default", "computed", "tuned"]
ORIGIN_WORDS: dict[Origin, str] = {
    "manifest": "of the manifest",
    "command line": "of the command line",
    "overlay": "of the demo block or config.yaml",
    "default": "by default",
    "computed": "as computed",
    "tuned": "as tuned",
}


def setting_origins(
    *,
    manifest: Collection[str],
    overlays: Sequence[Collection[str]],
    command_line: Collection[str],
) -> dict[str, Origin]:
    """Return the origin of each setting that is no default; the last to name it wins."""
    layers: list[tuple[Origin, Collection[str]]] = [("manifest", manifest)]
    layers += [("overlay", overlay) for overlay in overlays]
    layers.append(("command line", command_line))
    return {key: origin for origin, keys in layers for key in keys}

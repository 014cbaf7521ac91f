"""What one rank sends in each level of a mesh; comm/two_levels.py says what to whom."""

from __future__ import annotations

from gradsync_fx.inspection.data import Level
from gradsync_fx.planning.setting import Setting


def levels_of(setting: Setting, size: int) -> tuple[Level, ...]:
    """size: bytes that a rank puts in, in a window. Half of what it sends inside is before the other level."""
    if setting.levels is None:
        return ()
    mesh = setting.levels.mesh
    machines, ranks = mesh.shape
    names = mesh.mesh_dim_names or ("between machines", "inside one")
    across, inside = size // ranks * (machines - 1) // machines, size * (ranks - 1) // ranks
    return Level(names[0], machines, 2 * across), Level(names[1], ranks, 2 * inside)

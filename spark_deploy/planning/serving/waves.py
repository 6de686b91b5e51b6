"""In which waves a change goes over hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from spark_deploy.settings.service.serving import RolloutSettings

Wave = tuple[str, ...]


def waves_of(
    rollouts: Mapping[str, RolloutSettings], clusters: Iterable[Wave] = ()
) -> tuple[Wave, ...]:
    """Return which hosts change together, wave after wave.

    Canaries come first, each alone; then the others in their order. A wave is as large as the most
    careful host in it allows. The members of a cluster are one wave: they can only change together.

    Args:
        rollouts: settings of every host, in the order of the inventory.
        clusters: hosts that serve one model together.
    """
    together = [wave for wave in dict.fromkeys(clusters) if wave]
    alone = {n: one for n, one in rollouts.items() if not any(n in wave for wave in together)}
    found = list(_waves_alone(alone))
    for wave in together:
        first = any(one.canary in wave for one in rollouts.values())
        found.insert(0 if first else len(found), wave)
    return tuple(found)


def _waves_alone(rollouts: Mapping[str, RolloutSettings]) -> tuple[Wave, ...]:
    canaries = [name for name in rollouts if any(one.canary == name for one in rollouts.values())]
    waves: list[Wave] = [(name,) for name in canaries]
    wave: Wave = ()
    for name in rollouts:
        if name in canaries:
            continue
        limits = [rollouts[member].at_once for member in (*wave, name)]
        if wave and len(wave) >= min(len(rollouts) if one == "all" else one for one in limits):
            waves.append(wave)
            wave = ()
        wave = (*wave, name)
    return (*waves, wave) if wave else tuple(waves)

"""Temperature, clock and power of the GPU, where the host has them.

On a GB10 the power limit, memory figures and fans read ``[N/A]``; any field may, on any driver, so
each is a number or absent. Field names: ``nvidia-smi --help-query-gpu`` of driver 580.
"""

from __future__ import annotations

from dataclasses import dataclass

from spark_contract import release
from spark_contract.release import Watch

from spark_host.system.programs import output_of

_FIELDS = ("temperature.gpu", "clocks.current.sm", "power.draw", "utilization.gpu")

# The power-delivery fault of this board shows as full load at a low clock and little power
# (healthy: 2.0 to 2.4 GHz at 45 to 90 W). Only taking it off the mains helps, so it is told and
# the engine goes on: a restart would change nothing.
_BUSY_PERCENT = 90.0
_SLOW_MHZ = 1400.0
_WEAK_W = 40.0
_SAMPLES = 3
# So that a value that swings around the limit is one event.
_COOLED_C = 5.0


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the GPU; ``None`` where the host does not tell."""

    celsius: float | None
    clock_mhz: float | None
    power_w: float | None
    busy_percent: float | None


def read() -> Reading | None:
    """Return what nvidia-smi says; ``None`` where it is absent or does not answer."""
    query = f"--query-gpu={','.join(_FIELDS)}"
    said = output_of("nvidia-smi", query, "--format=csv,noheader,nounits")
    return None if said is None else parse(said)


def parse(text: str) -> Reading | None:
    """Read the first GPU's line; ``None`` when it is not one of ours."""
    words = (text.splitlines() or [""])[0].split(",")
    if len(words) != len(_FIELDS):
        return None
    return Reading(*(_number(word) for word in words))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


@dataclass(slots=True)
class Thermometer:
    """Turns readings into events: one when a state begins, one when it ends."""

    plan: Watch
    hot: bool = False
    weak_samples: int = 0
    weak: bool = False

    def events(self, reading: Reading | None) -> list[tuple[str, str]]:
        """Return (kind, sentence) for each state that began or ended with this reading."""
        if reading is None:
            return []
        return [*self._heat(reading), *self._power(reading)]

    def _heat(self, reading: Reading) -> list[tuple[str, str]]:
        limit = self.plan.hot_celsius
        if reading.celsius is None or limit is None:
            return []
        if not self.hot and reading.celsius >= limit:
            self.hot = True
            text = (
                f"the GPU is at {reading.celsius:.0f} °C (limit {limit:.0f} °C){_clock(reading)}; "
                "see to its air, or cap its clock: nvidia-smi -lgc 300,2200"
            )
            return [(release.HOT, text)]
        if self.hot and reading.celsius <= limit - _COOLED_C:
            self.hot = False
            return [(release.COOLED, f"the GPU is back at {reading.celsius:.0f} °C")]
        return []

    def _power(self, reading: Reading) -> list[tuple[str, str]]:
        clock, power, busy = reading.clock_mhz, reading.power_w, reading.busy_percent
        if clock is None or power is None or busy is None:
            return []
        wrong = busy >= _BUSY_PERCENT and clock < _SLOW_MHZ and power < _WEAK_W
        self.weak_samples = self.weak_samples + 1 if wrong else 0
        if wrong and not self.weak and self.weak_samples >= _SAMPLES:
            self.weak = True
            text = (
                f"the GPU is {busy:.0f} % busy at only {clock:.0f} MHz and {power:.0f} W: its "
                "power supply is stuck; shut down, take it off the mains for a minute, start again"
            )
            return [(release.POWER, text)]
        if self.weak and not wrong and busy >= _BUSY_PERCENT:
            self.weak = False
            return [(release.POWER, f"the GPU has its power back: {clock:.0f} MHz, {power:.0f} W")]
        return []


def _clock(reading: Reading) -> str:
    return "" if reading.clock_mhz is None else f", clock {reading.clock_mhz:.0f} MHz"

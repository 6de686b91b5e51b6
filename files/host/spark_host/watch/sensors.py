"""Reads the GPU's temperature, clock, power and load, and derives events.

Any field may be ``[N/A]``. Field names: ``nvidia-smi --help-query-gpu`` of driver 580.
"""

from dataclasses import dataclass

from spark_contract import release
from spark_contract.release import Watch

from spark_host.system.programs import read_output

_FIELDS = ("temperature.gpu", "clocks.current.sm", "power.draw", "utilization.gpu")
# A power fault of the board: full load at low clock and power (healthy: 2.0 to 2.4 GHz at 45 to
# 90 W). Only unplugging helps.
_BUSY_PERCENT = 90.0
_SLOW_MHZ = 1400.0
_WEAK_W = 40.0
_SAMPLES = 3
_COOLED_C = 5.0  # below the limit, so that values around it cause a single event


@dataclass(frozen=True, slots=True)
class Reading:
    celsius: float | None
    clock_mhz: float | None
    power_w: float | None
    busy_percent: float | None


def read() -> Reading | None:
    query = f"--query-gpu={','.join(_FIELDS)}"
    output = read_output("nvidia-smi", query, "--format=csv,noheader,nounits")
    return None if output is None else parse(output)


def parse(text: str) -> Reading | None:
    values = text.partition("\n")[0].split(",")  # of the first GPU
    if len(values) != len(_FIELDS):
        return None
    return Reading(*(_parse_number(value) for value in values))


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(slots=True)
class GpuAlarms:
    plan: Watch
    hot: bool = False
    low_power_samples: int = 0
    low_power: bool = False

    def events(self, reading: Reading | None) -> list[tuple[str, str]]:
        if reading is None:
            return []
        return [*self._heat_events(reading), *self._power_events(reading)]

    def _heat_events(self, reading: Reading) -> list[tuple[str, str]]:
        limit, celsius = self.plan.hot_celsius, reading.celsius
        if celsius is None or limit is None:
            return []
        if not self.hot and celsius >= limit:
            self.hot = True
            clock = "" if reading.clock_mhz is None else f", clock {reading.clock_mhz:.0f} MHz"
            text = (
                f"the GPU is at {celsius:.0f} °C (limit {limit:.0f} °C){clock}; "
                "improve the airflow, or run `nvidia-smi -lgc 300,2200` to cap the clock"
            )
            return [(release.HOT, text)]
        if self.hot and celsius <= limit - _COOLED_C:
            self.hot = False
            return [(release.COOLED, f"the GPU has cooled to {celsius:.0f} °C")]
        return []

    def _power_events(self, reading: Reading) -> list[tuple[str, str]]:
        clock, power, percent = reading.clock_mhz, reading.power_w, reading.busy_percent
        if clock is None or power is None or percent is None:
            return []
        is_busy = percent >= _BUSY_PERCENT
        is_weak = is_busy and clock < _SLOW_MHZ and power < _WEAK_W
        self.low_power_samples = self.low_power_samples + 1 if is_weak else 0
        if not self.low_power and self.low_power_samples >= _SAMPLES:
            self.low_power = True
            text = (
                f"the GPU is {percent:.0f} % busy at only {clock:.0f} MHz and {power:.0f} W, "
                "because the power supply is stuck in a low-power state; "
                "shut down, unplug the Spark for a minute, and start it again"
            )
            return [(release.POWER, text)]
        if self.low_power and is_busy and not is_weak:
            self.low_power = False
            text = f"GPU clock and power are back to normal: {clock:.0f} MHz, {power:.0f} W"
            return [(release.POWER, text)]
        return []

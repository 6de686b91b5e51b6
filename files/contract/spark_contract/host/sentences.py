"""Words that one side prints and the other looks for."""

from __future__ import annotations

SPEED = "speed: "  # begins a measurement that is not worse than the one before
PHASE = "phase="  # begins lines that tell how far work is
WAITED = "waited_s="  # in our own lines of an engine's log, not in the engine's
# FlashAttention 2 and Marlin hold PTX only: the driver took 3 to 5 minutes on one core (ptxas).
COMPILING = "compiling kernels for this GPU, first start only: 3 to 5 minutes"
STAND_IN = "+labstub"  # in versions of what only stands for the real thing

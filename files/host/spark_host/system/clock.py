"""Time as the host tools see it."""

from time import monotonic as monotonic
from time import sleep as sleep

from spark_contract.files import now as now

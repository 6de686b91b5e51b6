"""Fetches sources, builds hybrid checkpoints and proves both, on the host that will serve them.

urllib3 holds the connections; numpy looks at numbers, in builds alone. All else is the standard
library and ``spark_contract``.
"""

TOOL_VERSION = "0.1.0"

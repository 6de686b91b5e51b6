"""Host-side service tools: jobs, releases, the gateway, the check and the switch.

Runs on the host as ``spark-host VERB`` with the standard library only (Python 3.10 or newer).
"""

from __future__ import annotations

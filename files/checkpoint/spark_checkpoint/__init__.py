"""Download, build and verify checkpoints on the host that serves them.

Third-party packages: urllib3 for downloads, numpy for builds.
"""

TOOL_VERSION = "0.1.0"
